"""ServerEmbedding: an embedding table that lives on the parameter servers; a worker holds the rows of its batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import HoraError
from .embedding_table import INITS, TableSpec
from .rows import make_sparse

LookUp = Callable[[torch.Tensor], torch.Tensor]


class ServerEmbedding(torch.nn.Module):
    """As nn.Embedding in the forward, but the table is the parameter servers' (`--strategy ps`), spread by id.

    No process holds more of it than it needs: a worker the rows of its batch, a server the rows that ever had a
    gradient. What a row is before that depends on `seed` and its id alone: `init` is normal, uniform (between −scale
    and scale) or zeros; with `scale` 1 normal is what nn.Embedding begins with.

    The optimizer must have it: `rows` is its one parameter, a placeholder of one element, through which
    hyper-parameters, names and clipping reach the table. After backward() `rows.grad` is the norm of the rows'
    gradient; whatever scales it, as clipping and GradScaler do, scales the gradient that the next step pushes. Updates
    are lazy, as torch.optim.SparseAdam's: a row that has no gradient in a step does not move.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, init: str = "normal", scale: float = 1.0, seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(f"ServerEmbedding takes sizes of 1 and more, not {num_embeddings} × {embedding_dim}")
        if init not in INITS:
            raise ValueError(f"init={init!r} is unknown; there are: {', '.join(INITS)}")
        if not math.isfinite(scale):
            raise ValueError(f"scale takes a finite number, not {scale}")
        if not -(1 << 63) <= seed < 1 << 63:
            raise ValueError(f"seed takes a number of 64 bits, not {seed}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.init, self.scale, self.seed = init, float(scale), seed
        self.rows = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        self._look_up: LookUp | None = None
        self._on_gradient: Callable[[], None] | None = None
        self._new: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids and gradients of this backward
        self._accumulated: torch.Tensor | None = None  # sparse gradients since the last zero_grad()
        self._norm = 0.0  # of these, as last written to `rows.grad`

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, init={self.init}, scale={self.scale:g}, seed={self.seed}"

    def spec(self, index: int, num_servers: int) -> TableSpec:
        return TableSpec(
            index, self.num_embeddings, self.embedding_dim, self.rows.dtype, self.init, self.scale, self.seed,
            num_servers,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not attached to servers."""
        return {**self.__dict__, "_look_up": None, "_on_gradient": None, "_new": [], "_accumulated": None}

    def attach(self, look_up: LookUp, on_gradient: Callable[[], None]) -> None:
        """From now on rows come from `look_up(ids)`; `on_gradient` is called inside a backward that reaches them."""
        self._look_up, self._on_gradient = look_up, on_gradient

    def detach(self) -> None:
        self._look_up = self._on_gradient = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self._look_up is None:
            raise HoraError("this ServerEmbedding has no servers yet: its rows are there after job.prepare(model, …)")
        unique, places = self._checked(ids).unique(return_inverse=True)
        found = self._look_up(unique).to(self.rows.device)
        if torch.is_grad_enabled() and self.rows.requires_grad:
            found.requires_grad_()
            found.register_post_accumulate_grad_hook(functools.partial(self._keep_gradient, unique))
        return torch.nn.functional.embedding(places.view(ids.shape).to(found.device), found)

    def _checked(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ServerEmbedding takes ids of int64 or int32, not of {ids.dtype}")
        flat = ids.detach().reshape(-1).to("cpu", torch.int64)
        wrong = flat[(flat < 0) | (flat >= self.num_embeddings)]
        if len(wrong):
            raise IndexError(
                f"id {int(wrong[0])} in a ServerEmbedding of {self.num_embeddings} rows: ids go from 0 to "
                f"{self.num_embeddings - 1}"
            )
        return flat

    def _keep_gradient(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        assert rows.grad is not None and self._on_gradient is not None
        self._new.append((ids, rows.grad.detach()))
        rows.grad = None
        self._on_gradient()

    def gather(self) -> None:
        """Called after a backward: accumulates its gradients on those since the last zero_grad()."""
        new, self._new = self._new, []
        if not new:
            return
        before = self.gradient()
        if before is not None:
            new.append((before.indices()[0], before.values()))
        ids = torch.cat([ids for ids, _ in new])
        values = torch.cat([values.cpu() for _, values in new])
        self._accumulated = torch.sparse_coo_tensor(
            ids[None], values, (self.num_embeddings, self.embedding_dim), check_invariants=False
        ).coalesce()
        wide = torch.promote_types(values.dtype, torch.float32)
        norm = torch.linalg.vector_norm(self._accumulated.values(), dtype=wide).to(self.rows.dtype)
        self.rows.grad = norm.to(self.rows.device).view(1)
        self._norm = float(norm)

    def gradient(self) -> torch.Tensor | None:
        """The accumulated sparse gradient as the user has left it: cleared, or scaled through `rows.grad`."""
        known = self._accumulated
        if self.rows.grad is None or known is None:
            self._accumulated = None
            return None
        now = float(self.rows.grad)
        if now == 0 and self._norm:  # zero_grad(set_to_none=False)
            self._accumulated = None
        elif now != self._norm and math.isfinite(self._norm) and self._norm:
            scaled = known.values() * (now / self._norm)
            self._accumulated = make_sparse(known.indices()[0], scaled, self.num_embeddings)
            self._norm = now
        return self._accumulated


def server_embeddings(models: Iterable[torch.nn.Module]) -> list[ServerEmbedding]:
    """Those in these models, each once."""
    found = {id(m): m for model in models for m in model.modules() if isinstance(m, ServerEmbedding)}
    return list(found.values())
