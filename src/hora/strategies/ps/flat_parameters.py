"""FlatParameters: a worker's parameters and gradients as vectors in memory order, sliced like the servers' blocks."""

from __future__ import annotations

import torch

from ...errors import HoraError
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import flat_view, flatten, is_dense
from ...server.embedding import ServerEmbedding
from ...server.layout import ParameterBlock, sparse_parameters
from ...server.rows import supports_sparse


class FlatParameters:
    """`collect` before a step, then `gradient` for every block of it; `target` is where a block's parameters go."""

    def __init__(self, registry: ParameterRegistry, tables: dict[int, ServerEmbedding], num_servers: int) -> None:
        self.registry = registry
        self._tables = tables
        self._num_servers = num_servers
        self._sparse = sparse_parameters(registry)
        self._vectors: dict[int, tuple[int, torch.Tensor]] = {}  # by parameter: its address and its vector
        self._grads: dict[int, torch.Tensor | None] = {}

    def clear(self) -> None:
        self._grads.clear()

    def norm(self) -> float:
        """The norm of all collected gradients."""
        grads = [grad for grad in self._grads.values() if grad is not None]
        return float(torch.nn.utils.get_total_norm([grad.values() if grad.is_sparse else grad for grad in grads]))

    def collect(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of this step as vectors, in the order in which their parameters lie in memory."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                index = self.registry.index[id(parameter)]
                if index in self._tables:
                    self._grads[index] = self._tables[index].gradient()
                    continue
                self._grads[index] = self._flat(index, parameter)
                grad = self._grads[index]
                if grad is not None and grad.is_sparse and not supports_sparse(type(optimizer)):
                    raise HoraError(
                        f"the gradient of {self.registry.names[index]} is sparse, and {type(optimizer).__name__} takes "
                        "dense ones only: give this table torch.optim.SparseAdam, Adagrad or SGD, beside the other "
                        "optimizer in job.prepare(model, [first, second])"
                    )

    def _flat(self, index: int, parameter: torch.Tensor) -> torch.Tensor | None:
        grad = parameter.grad
        if grad is None:
            return None
        if grad.layout is torch.sparse_coo:
            if index not in self._sparse:
                raise HoraError(
                    f"the gradient of {self.registry.names[index]} is sparse and belongs to no "
                    "nn.Embedding(sparse=True): under ps only these have sparse gradients"
                )
            return grad.detach().coalesce().cpu()
        if grad.dtype != parameter.dtype or grad.shape != parameter.shape:
            raise HoraError(
                f"the gradient of {self.registry.names[index]} is {list(grad.shape)} of {grad.dtype}, the parameter "
                f"{list(parameter.shape)} of {parameter.dtype}"
            )
        if is_dense(parameter) and grad.stride() != parameter.stride():
            grad = torch.empty_like(parameter).copy_(grad)
        return flat_view(grad)

    def gradient(self, block: ParameterBlock) -> torch.Tensor | None:
        grad = self._grads.get(block.index)
        if grad is None:
            return None
        if block.index in self._tables:
            return self._ids(block, grad)
        if grad.is_sparse:
            return self._rows(block, grad)
        return grad if block.whole else grad[block.start : block.stop]

    def _rows(self, block: ParameterBlock, grad: torch.Tensor) -> torch.Tensor:
        """The rows of a sparse gradient that lie in this block, counted from its beginning."""
        row = grad.numel() // grad.shape[0]
        first, last = block.start // row, block.stop // row
        rows, values = grad.indices()[0], grad.values()
        begin, end = (int(at) for at in torch.searchsorted(rows, torch.tensor([first, last])))
        return torch.sparse_coo_tensor(
            (rows[begin:end] - first)[None],
            values[begin:end].reshape(end - begin, row),
            (last - first, row),
            is_coalesced=True,
            check_invariants=False,
        )

    def _ids(self, block: ParameterBlock, grad: torch.Tensor) -> torch.Tensor:
        """The rows of a ServerEmbedding's gradient that belong to the server of this block, by its own row numbers."""
        ids, num_servers = grad.indices()[0], self._num_servers
        mine = (ids % num_servers == block.start).nonzero().view(-1)
        shape = (-(-grad.shape[0] // num_servers), grad.shape[1])
        return torch.sparse_coo_tensor(
            (ids[mine] // num_servers)[None], grad.values()[mine], shape, is_coalesced=True, check_invariants=False
        )

    def target(self, block: ParameterBlock) -> torch.Tensor:
        """Where a block's parameters go."""
        flat = self._vector(block.index)
        return flat if block.whole else flat[block.start : block.stop]

    def _vector(self, index: int) -> torch.Tensor:
        parameter = self.registry.parameters[index]
        known = self._vectors.get(index)
        if known is None or known[0] != parameter.data_ptr():
            whole = parameter.detach()
            known = self._vectors[index] = (
                parameter.data_ptr(),
                flatten(whole) if is_dense(whole) else flat_view(whole),
            )
        return known[1]

    def scatter(self) -> None:
        """Copies vectors of parameters with gaps in their memory back into these."""
        for index, (_, flat) in self._vectors.items():
            parameter = self.registry.parameters[index]
            if not is_dense(parameter):
                parameter.detach().copy_(flat.view(parameter.shape))

    def values(self, block: ParameterBlock) -> torch.Tensor:
        """A block's parameters on this worker."""
        flat = flat_view(self.registry.parameters[block.index])
        return flat if block.whole else flat[block.start : block.stop]
