"""Table: the rows of a `hora.ServerEmbedding` that one server has. A row is made when its first gradient comes.

Row r of server s of S is the one with id r · S + s. What a row is before its first gradient depends on the seed and its
id alone, so it is the same whatever the number of servers, and looking it up makes nothing.

An update is a step of the user's own optimizer on the touched rows alone, with the state that these rows have (lazy, as
torch.optim.SparseAdam is): momentum and decay move no row that has no gradient. What an optimizer counts, as Adam's
`step`, it counts once for the whole table, in every step in which any worker had a gradient for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

INITS = ("normal", "uniform", "zeros")
FIRST_ROWS = 256  # room for so many, then twice as many, and so on

# By exact type: they treat rows by themselves, and a fresh row's state is zero, or what Adagrad says.
OPTIMIZERS = (
    torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SparseAdam,
    torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """What all processes must agree on. `index` is that of its stand-in among the model's parameters."""

    index: int
    num_rows: int
    width: int
    dtype: torch.dtype
    init: str
    scale: float
    seed: int
    num_servers: int

    def rows_on(self, server: int) -> int:
        return max(0, -(-(self.num_rows - server) // self.num_servers))

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


class EmbeddingTable:
    """`state` is what the optimizer had for the stand-in from the start, as Adagrad has. Not thread-safe."""

    def __init__(self, spec: TableSpec, server: int, state: dict[str, Any] | None = None) -> None:
        self.spec = spec
        self.server = server
        self._first = dict(state or {})
        self.clear()

    def clear(self) -> None:
        """No row was ever touched."""
        self._slots: dict[int, int] = {}  # by row
        self._rows = torch.empty(0, self.spec.width, dtype=self.spec.dtype)
        self._state: dict[str, torch.Tensor] = {}  # row by row, as long as `_rows`
        self._counts: dict[str, Any] = {}  # the same for all rows
        self._fills: dict[str, float] = {}
        for key, value in self._first.items():
            if isinstance(value, torch.Tensor) and value.dim():
                self._fills[key] = float(value.reshape(-1)[0])
                self._state[key] = torch.empty_like(self._rows)
            else:
                self._counts[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def __len__(self) -> int:
        """How many rows there are: those that ever had a gradient."""
        return len(self._slots)

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """What these rows are now. Makes none."""
        slots = torch.tensor([self._slots.get(row, -1) for row in rows.tolist()], dtype=torch.int64)
        missing = (slots < 0).nonzero().view(-1)
        if len(missing) == len(slots):
            return initial(self.spec, self._ids(rows))
        found = self._rows[slots]  # -1 is the last, to be overwritten
        if len(missing):
            found[missing] = initial(self.spec, self._ids(rows[missing]))
        return found

    def apply(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], gradient: torch.Tensor) -> None:
        """One step on the rows of a sparse gradient. `group` is the optimizer's for this table, empty before and after;
        a gradient without rows is counted too."""
        gradient = gradient.coalesce()
        slots = self._make(gradient.indices()[0])
        touched = torch.nn.Parameter(self._rows[slots])
        touched.grad = gradient.values().to(touched.dtype)
        if type(optimizer) is torch.optim.SparseAdam:
            touched.grad = torch.sparse_coo_tensor(
                torch.arange(len(slots))[None], touched.grad, touched.shape, is_coalesced=True, check_invariants=False
            )
        known = {**self._counts, **{key: value[slots] for key, value in self._state.items()}}
        if known:
            optimizer.state[touched] = known
        group["params"] = [touched]
        try:
            optimizer.step()
        finally:
            group["params"] = []
            state = optimizer.state.pop(touched, {})
        self._rows[slots] = touched.detach()
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == touched.shape:
                if key not in self._state:
                    self._state[key] = torch.zeros(self._rows.shape, dtype=value.dtype)
                self._state[key][slots] = value
            else:
                self._counts[key] = value

    def _make(self, rows: torch.Tensor) -> torch.Tensor:
        """Where these rows are; those that are new get a place."""
        numbers = rows.tolist()
        new = [row for row in numbers if row not in self._slots]
        begin, end = len(self._slots), len(self._slots) + len(new)
        if end > len(self._rows):
            room = max(FIRST_ROWS, 2 * len(self._rows), end)
            self._rows = _longer(self._rows, room, 0.0)
            self._state = {key: _longer(value, room, self._fills.get(key, 0.0)) for key, value in self._state.items()}
        self._slots.update(zip(new, range(begin, end), strict=True))
        if new:
            self._rows[begin:end] = initial(self.spec, self._ids(torch.tensor(new)))
        return torch.tensor([self._slots[row] for row in numbers], dtype=torch.int64)

    def _ids(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.spec.num_servers + self.server

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """Rows and their state by id, so that any number of servers can go on with them."""
        rows = torch.tensor(list(self._slots), dtype=torch.int64)
        state = {key: value[: len(rows)] for key, value in self._state.items()}
        return {"ids": self._ids(rows), "rows": self._rows[: len(rows)], "state": state, "counts": dict(self._counts)}

    def load(self, saved: dict[str, Any]) -> None:
        """All of it becomes what was saved, of whose ids only this server's are here."""
        self.clear()
        rows = saved["ids"] // self.spec.num_servers
        slots = self._make(rows)
        self._rows[slots] = saved["rows"]
        for key, value in saved["state"].items():
            self._state[key] = _longer(value[:0], len(self._rows), self._fills.get(key, 0.0))
            self._state[key][slots] = value
        for key, value in saved["counts"].items():
            self._counts[key] = value.clone() if isinstance(value, torch.Tensor) else value


def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What several servers have saved of one table, as one."""
    keys = sorted({key for part in parts for key in part["state"]})
    return {
        "ids": torch.cat([part["ids"] for part in parts]),
        "rows": torch.cat([part["rows"] for part in parts]),
        "state": {key: torch.cat([part["state"][key] for part in parts if key in part["state"]]) for key in keys},
        "counts": next((part["counts"] for part in parts if part["counts"]), {}),
    }


def split(saved: dict[str, Any], server: int, num_servers: int) -> dict[str, Any]:
    """What one server gets of it."""
    mine = (saved["ids"] % num_servers == server).nonzero().view(-1)
    state = {key: value[mine] for key, value in saved["state"].items()}
    return {"ids": saved["ids"][mine], "rows": saved["rows"][mine], "state": state, "counts": saved["counts"]}


def _longer(tensor: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    longer = torch.full((length, tensor.shape[1]), fill, dtype=tensor.dtype)
    longer[: len(tensor)] = tensor
    return longer


# -- what rows are before they are trained -----------------------------------------------------------------------------

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)


def initial(spec: TableSpec, ids: torch.Tensor) -> torch.Tensor:
    """The rows with these ids before their first gradient, from counters, not from a stream: splitmix64 of seed, id and
    column. `normal` adds up twelve uniform numbers of 16 bits: in whole numbers, so that the bits are the same on every
    machine; none lies beyond six standard deviations."""
    if spec.init == "zeros":
        return torch.zeros(len(ids), spec.width, dtype=spec.dtype)
    seed = _mix(torch.tensor(spec.seed, dtype=torch.int64) + _GOLDEN)
    keys = _mix(ids.view(-1, 1, 1) * _GOLDEN + seed)
    num_draws = 3 if spec.init == "normal" else 1
    counters = torch.arange(1, spec.width * num_draws + 1).view(1, spec.width, num_draws)
    bits = _mix(keys + counters * _GOLDEN)
    if spec.init == "uniform":
        unit = _shift(bits, 11).squeeze(2).to(torch.float64) / (1 << 52) - 1
    else:
        total = sum((_shift(bits, 16 * piece) & 0xFFFF).sum(2) for piece in range(4))
        assert isinstance(total, torch.Tensor)
        unit = (total.to(torch.float64) - 12 * 0xFFFF / 2) / 0x10000
    return (unit * spec.scale).to(spec.dtype)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser; whole numbers wrap around."""
    x = (x ^ _shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, without the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1) if count else x
