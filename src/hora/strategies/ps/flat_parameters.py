"""Flats: a worker's parameters and gradients as vectors, in the order of their memory, cut as the blocks are."""

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
        self._flat_parameters: dict[int, tuple[int, torch.Tensor]] = {}  # parameters, by index, with their address
        self._grads: dict[int, torch.Tensor | None] = {}

    def clear(self) -> None:
        self._grads.clear()

    def norm(self) -> float:
        """Of all that was collected."""
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
                    f"the gradient of {self.registry.names[index]} is sparse, and no nn.Embedding(sparse=True) has it: "
                    "under ps only these have rows that travel alone"
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
        """The rows of a table's gradient that are for the server of this block, as it counts them."""
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
        known = self._flat_parameters.get(index)
        if known is None or known[0] != parameter.data_ptr():
            whole = parameter.detach()
            known = self._flat_parameters[index] = (
                parameter.data_ptr(),
                flatten(whole) if is_dense(whole) else flat_view(whole),
            )
        return known[1]

    def scatter(self) -> None:
        """Parameters with gaps in their memory were read into vectors of their own."""
        for index, (_, flat) in self._flat_parameters.items():
            parameter = self.registry.parameters[index]
            if not is_dense(parameter):
                parameter.detach().copy_(flat.view(parameter.shape))

    def values(self, block: ParameterBlock) -> torch.Tensor:
        """A block's parameters as they are here."""
        flat = flat_view(self.registry.parameters[block.index])
        return flat if block.whole else flat[block.start : block.stop]
