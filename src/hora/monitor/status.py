"""RunStatus: a run at one moment, as the panel, the dashboard and /metrics show it. Rates are of the last seconds."""

from __future__ import annotations

import msgspec


class WorkerStatus(msgspec.Struct, kw_only=True):
    rank: int
    name: str  # as in "rank 3 (host a, pid 411)"
    state: str = "alive"  # alive, left, died; stopped: with the run
    step: int = 0
    compute_s: float = 0.0  # per step, without communication
    wait_s: float = 0.0  # per step, for slower workers
    comm_s: float = 0.0  # per step, that the training thread did or waited for, beyond wait_s
    samples_per_s: float = 0.0
    sent_bytes_per_s: float = 0.0
    peers: dict[int, float] = {}  # bytes per second to each rank
    rounds: int | None = None
    local_steps: int = 0
    lag: float | None = None
    slow: float = 0.0  # of a straggler: its compute_s relative to the others'; else 0


class ServerStatus(msgspec.Struct, kw_only=True):
    number: int
    state: str = "alive"
    load_bytes: int = 0
    updates: int = 0
    updates_per_s: float = 0.0
    busy: float = 0.0  # 0 to 1
    queue: int = 0
    bytes_in_per_s: float = 0.0
    bytes_out_per_s: float = 0.0
    lags: dict[int, int] = {}


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: joined, left, died, slow, even (keeps up again), checkpoint, restore, skipped, stop, serving, end."""

    number: int  # 1, 2, … in the order of arrival
    at: float  # seconds since the run began
    step: int
    kind: str
    who: str
    text: str


class RunStatus(msgspec.Struct, kw_only=True):
    run: str = ""
    strategy: str = ""
    topology: str = ""  # this and the next two: as the strategy describes itself
    unit: str = ""
    synchronous: bool = True
    algorithm: str = ""  # what `auto` has chosen
    size: int = 0
    state: str = "starting"  # starting, running, ended
    waiting: str = ""  # what a starting run waits for
    seconds: float = 0.0  # since the run began
    trained_s: float = 0.0  # from the first step to the last
    step: int = 0
    first_step: int = 0  # of this run; a run may continue from a checkpoint
    epoch: int | None = None
    epochs: int | None = None
    progress: float | None = None
    eta_s: float | None = None
    samples: int = 0
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    bytes_per_step: float = 0.0  # of one worker, over the whole run
    hidden: float | None = None  # share of communication hidden by computation, over the whole run
    values: dict[str, float] = {}  # the newest logged values
    num_workers: int = 0  # that there ever were
    workers: list[WorkerStatus] = []
    servers: list[ServerStatus] = []
    lags: dict[int, int] = {}  # of all servers: block updates by lag
    rounds: int | None = None
    checkpoints: int = 0
    skipped: int = 0
    slowest: str = ""  # the worker with the longest compute per step over the whole run, if by 5 % or more
    serving: str = ""  # the predictor's address, http://host:port, while it answers
    lost_reports: int = 0

    def summary(self) -> dict[str, object]:
        """The run in a few numbers, for end.json and the run database; the speed is from the first step to the last."""
        speed = self.samples / self.trained_s if self.trained_s > 0 else 0.0
        first = {"samples": self.samples, "seconds": self.seconds, "samples_per_s": speed}
        steps = {"steps": self.step, "from_step": self.first_step}
        same = ("bytes_per_step", "hidden", "slowest", "checkpoints", "skipped", "rounds", "values")
        return {**first, **steps, **{name: getattr(self, name) for name in same}, "workers": self.num_workers}
