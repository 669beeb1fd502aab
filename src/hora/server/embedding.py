"""ServerEmbedding: a table that lives on the servers alone; a worker has the rows that its batch asks for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import HoraError
from .embedding_table import INITS, TableSpec

LookUp = Callable[[torch.Tensor], torch.Tensor]


class ServerEmbedding(torch.nn.Module):
    """As nn.Embedding in the forward, but the table is the parameter servers' (`--strategy ps`), spread by id.

    No process holds more of it than it needs: a worker the rows of its batch, a server the rows that ever had a
    gradient. What a row is before that depends on `seed` and its id alone: `init` is normal, uniform (between −scale
    and scale) or zeros; with `scale` 1 normal is what nn.Embedding begins with.

    The optimizer must have it: `rows` is its one parameter, a stand-in of one element, through which hyper-parameters,
    names and clipping reach the table. After backward() `rows.grad` is the norm of the rows' gradient; whatever scales
    it, as clipping and GradScaler do, scales the gradient that the next step pushes. Updates are lazy, as
    torch.optim.SparseAdam's: a row that has no gradient in a step does not move.
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
        self._tell: Callable[[], None] | None = None
        self._fresh: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients that this backward brought: ids, rows
        self._gathered: torch.Tensor | None = None  # those since the last zero_grad(), sparse
        self._norm = 0.0  # of these, as `rows.grad` was told

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, init={self.init}, scale={self.scale:g}, seed={self.seed}"

    def spec(self, index: int, num_servers: int) -> TableSpec:
        return TableSpec(
            index, self.num_embeddings, self.embedding_dim, self.rows.dtype, self.init, self.scale, self.seed,
            num_servers,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no servers."""
        return {**self.__dict__, "_look_up": None, "_tell": None, "_fresh": [], "_gathered": None}

    # -- in a training -------------------------------------------------------------------------------------------------

    def attach(self, look_up: LookUp, tell: Callable[[], None]) -> None:
        """From now on rows come from `look_up(ids)`, and `tell` is called inside a backward that reaches them."""
        self._look_up, self._tell = look_up, tell

    def detach(self) -> None:
        self._look_up = self._tell = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self._look_up is None:
            raise HoraError("this ServerEmbedding has no servers yet: its rows are there after job.prepare(model, …)")
        flat = self._checked(ids)
        unique, places = flat.unique(return_inverse=True)
        found = self._look_up(unique).to(self.rows.device)
        if torch.is_grad_enabled() and self.rows.requires_grad:
            found.requires_grad_()
            found.register_post_accumulate_grad_hook(functools.partial(self._came, unique))
        return torch.nn.functional.embedding(places.view(ids.shape).to(found.device), found)

    def _checked(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"a ServerEmbedding is asked for ids of int64 or int32, not of {ids.dtype}")
        flat = ids.detach().reshape(-1).to("cpu", torch.int64)
        wrong = flat[(flat < 0) | (flat >= self.num_embeddings)]
        if len(wrong):
            raise IndexError(
                f"id {int(wrong[0])} in a ServerEmbedding of {self.num_embeddings} rows: ids go from 0 to "
                f"{self.num_embeddings - 1}"
            )
        return flat

    def _came(self, ids: torch.Tensor, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None and self._tell is not None
        self._fresh.append((ids, leaf.grad.detach()))
        leaf.grad = None
        self._tell()

    def gather(self) -> None:
        """A backward has ended: its gradients come on top of those since the last zero_grad()."""
        fresh, self._fresh = self._fresh, []
        if not fresh:
            return
        before = self.gradient()
        if before is not None:
            fresh.append((before.indices()[0], before.values()))
        ids = torch.cat([ids for ids, _ in fresh])
        values = torch.cat([values.cpu() for _, values in fresh])
        self._gathered = torch.sparse_coo_tensor(
            ids[None], values, (self.num_embeddings, self.embedding_dim), check_invariants=False
        ).coalesce()
        norm = torch.linalg.vector_norm(self._gathered.values(), dtype=_wide(values.dtype)).to(self.rows.dtype)
        self.rows.grad = norm.to(self.rows.device).view(1)
        self._norm = float(norm)

    def gradient(self) -> torch.Tensor | None:
        """What has piled up, sparse, as the user has left it: cleared, or scaled through `rows.grad`."""
        if self.rows.grad is None or self._gathered is None:
            self._gathered = None
            return None
        now = float(self.rows.grad)
        if now == 0 and self._norm:  # zero_grad(set_to_none=False)
            self._gathered = None
        elif now != self._norm and math.isfinite(self._norm) and self._norm:
            known = self._gathered
            assert known is not None
            self._gathered = torch.sparse_coo_tensor(
                known.indices(), known.values() * (now / self._norm), known.shape, is_coalesced=True,
                check_invariants=False,
            )  # fmt: skip
            self._norm = now
        return self._gathered


def server_embeddings(models: Iterable[torch.nn.Module]) -> list[ServerEmbedding]:
    """Those in these models, each once."""
    found = {id(m): m for model in models for m in model.modules() if isinstance(m, ServerEmbedding)}
    return list(found.values())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
