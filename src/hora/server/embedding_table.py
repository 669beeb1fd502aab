"""EmbeddingTable: one server's rows of a `hora.ServerEmbedding`. A row is allocated at its first gradient.

Row r of server s of S has id r · S + s. Its initial value depends on the seed and its id alone: it is the same for any
number of servers, and looking it up allocates nothing.

An update is a step of the user's own optimizer on the touched rows only, with the state of these rows (lazy, as in
torch.optim.SparseAdam): momentum and decay move no row without a gradient. What an optimizer counts, as Adam's `step`,
it counts once for the whole table, in every step in which any worker had a gradient for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .rows import make_sparse

INITS = ("normal", "uniform", "zeros")
FIRST_ROWS = 256  # the first capacity, which then doubles

# By exact type: they treat rows independently, and a new row's state is zero, or what Adagrad says.
OPTIMIZERS = (
    torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SparseAdam,
    torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """What all processes must agree on. `index` is that of its placeholder among the model's parameters."""

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
    """`state` is the optimizer's initial state of the placeholder, as Adagrad has one. Not thread-safe."""

    def __init__(self, spec: TableSpec, server: int, state: dict[str, Any] | None = None) -> None:
        self.spec = spec
        self.server = server
        self._initial_state = dict(state or {})
        self.clear()

    def clear(self) -> None:
        """Discards all rows."""
        self._slots: dict[int, int] = {}  # by row
        self._rows = torch.empty(0, self.spec.width, dtype=self.spec.dtype)
        self._state: dict[str, torch.Tensor] = {}  # by row, as long as `_rows`
        self._shared_state: dict[str, Any] = {}  # the same for all rows, such as step counts
        self._fills: dict[str, float] = {}  # the initial value of a row's state
        for key, value in self._initial_state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                self._fills[key] = float(value.reshape(-1)[0])
                self._state[key] = torch.empty_like(self._rows)
            else:
                self._shared_state[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def __len__(self) -> int:
        """The number of allocated rows: those that ever had a gradient."""
        return len(self._slots)

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """These rows as they are now. Allocates none."""
        slots = torch.tensor([self._slots.get(row, -1) for row in rows.tolist()], dtype=torch.int64)
        missing = (slots < 0).nonzero().view(-1)
        if len(missing) == len(slots):
            return initial(self.spec, self._ids(rows))
        found = self._rows[slots]  # -1 is the last, to be overwritten
        if len(missing):
            found[missing] = initial(self.spec, self._ids(rows[missing]))
        return found

    def apply(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], gradient: torch.Tensor) -> None:
        """One step on the rows of a sparse gradient, which may have none. `group` is the optimizer's for this table,
        empty before and after."""
        gradient = gradient.coalesce()
        slots = self._allocate(gradient.indices()[0])
        touched = torch.nn.Parameter(self._rows[slots])
        touched.grad = gradient.values().to(touched.dtype)
        if type(optimizer) is torch.optim.SparseAdam:
            touched.grad = make_sparse(torch.arange(len(slots)), touched.grad, len(slots))
        known = {**self._shared_state, **{key: value[slots] for key, value in self._state.items()}}
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
                self._shared_state[key] = value

    def _allocate(self, rows: torch.Tensor) -> torch.Tensor:
        """The slots of these rows; new rows get one."""
        numbers = rows.tolist()
        new = [row for row in numbers if row not in self._slots]
        begin, end = len(self._slots), len(self._slots) + len(new)
        if end > len(self._rows):
            capacity = max(FIRST_ROWS, 2 * len(self._rows), end)
            self._rows = _grow(self._rows, capacity, 0.0)
            self._state = {key: _grow(value, capacity, self._fills.get(key, 0.0)) for key, value in self._state.items()}
        self._slots.update(zip(new, range(begin, end), strict=True))
        if new:
            self._rows[begin:end] = initial(self.spec, self._ids(torch.tensor(new)))
        return torch.tensor([self._slots[row] for row in numbers], dtype=torch.int64)

    def _ids(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.spec.num_servers + self.server

    def save(self) -> dict[str, Any]:
        """Rows and their state by id, which any number of servers can load."""
        rows = torch.tensor(list(self._slots), dtype=torch.int64)
        state = {key: value[: len(rows)] for key, value in self._state.items()}
        counts = dict(self._shared_state)
        return {"ids": self._ids(rows), "rows": self._rows[: len(rows)], "state": state, "counts": counts}

    def load(self, saved: dict[str, Any]) -> None:
        """Replaces all rows with saved ones, whose ids are all this server's."""
        self.clear()
        slots = self._allocate(saved["ids"] // self.spec.num_servers)
        self._rows[slots] = saved["rows"]
        for key, value in saved["state"].items():
            self._state[key] = _grow(value[:0], len(self._rows), self._fills.get(key, 0.0))
            self._state[key][slots] = value
        for key, value in saved["counts"].items():
            self._shared_state[key] = value.clone() if isinstance(value, torch.Tensor) else value


def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One table from what several servers have saved of it."""
    keys = sorted({key for part in parts for key in part["state"]})
    return {
        "ids": torch.cat([part["ids"] for part in parts]),
        "rows": torch.cat([part["rows"] for part in parts]),
        "state": {key: torch.cat([part["state"][key] for part in parts if key in part["state"]]) for key in keys},
        "counts": next((part["counts"] for part in parts if part["counts"]), {}),
    }


def split(saved: dict[str, Any], server: int, num_servers: int) -> dict[str, Any]:
    """One server's part of a saved table."""
    mine = (saved["ids"] % num_servers == server).nonzero().view(-1)
    state = {key: value[mine] for key, value in saved["state"].items()}
    return {"ids": saved["ids"][mine], "rows": saved["rows"][mine], "state": state, "counts": saved["counts"]}


def _grow(tensor: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    longer = torch.full((length, tensor.shape[1]), fill, dtype=tensor.dtype)
    longer[: len(tensor)] = tensor
    return longer


# -- initial values ----------------------------------------------------------------------------------------------------

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)


def initial(spec: TableSpec, ids: torch.Tensor) -> torch.Tensor:
    """The rows with these ids before their first gradient: splitmix64 of seed, id and column. `normal` sums twelve
    uniform numbers of 16 bits, as integers, so that the bits are the same on every machine; none lies beyond six
    standard deviations."""
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
    """splitmix64's finaliser; integers wrap around."""
    x = (x ^ _shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (x >> count) & ((1 << (64 - count)) - 1) if count else x
