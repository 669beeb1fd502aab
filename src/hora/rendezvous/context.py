"""ProcessIdentity and RunContext: what a process knows of its run before and after it has reached the coordinator."""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Any

from ..coordinator import CoordinatorConnection, CoordinatorService, Member
from ..http.serve_config import ServeConfig

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """What the launcher's environment variables say; `environment.read` makes it.

    `rank` counts within the role. `size` is the number of workers that the run started with: a worker that `joined`
    later has a rank of at least `size`. `local_rank` and `local_size` are the launcher's own count. Empty or None: not
    set.
    """

    launcher: str = "alone"  # hora, torchrun, mpirun, slurm, alone
    role: str = "worker"
    rank: int = 0
    size: int = 1
    servers: int | None = None  # server processes
    colocated: bool = False  # servers run in the workers' processes
    joined: bool = False
    local_rank: int = 0
    local_size: int = 1
    job: str = ""  # names the launch, so that its processes find each other on one host
    address: str = ""  # of the coordinator, or of the launcher's store; under Slurm the list of nodes
    strategy: str | None = None
    timeout_s: float | None = None
    max_steps: int | None = None
    host: str = dataclasses.field(default_factory=socket.gethostname)  # as the user calls it
    bind: str = ""  # the address to listen on
    interface: str = ""  # the network interface whose address to listen on
    rate_bytes_per_s: float | None = None  # the most that a rank sends, to emulate slower links
    token_fd: int | None = None
    token_file: str = ""
    scratch: str = ""  # a folder that the launcher deletes after the run
    history: str = ""  # a folder into which servers write every update, for tests
    trace: str = ""  # a folder for this process's spans
    watched: bool = False  # the launcher reads reports
    progress: str = "plain"  # what rank 0 prints: plain lines, else nothing
    serve: ServeConfig | None = None  # the run has a predictor; or, alone, this process serves a checkpoint

    @property
    def num_processes(self) -> int:
        """The launcher's own number of ranks; a launcher that knows no servers counts them too."""
        return self.size if self.launcher == "hora" else self.size + (self.servers or 0)

    @property
    def one_host(self) -> bool:
        return self.local_size == self.num_processes

    @property
    def hosts_coordinator(self) -> bool:
        """Whether the coordinator runs in this process: in rank 0's, unless the launcher is Hora's own."""
        return self.launcher != "hora" and self.role == "worker" and self.rank == 0

    @property
    def member(self) -> Member:
        """This process as the coordinator knows it. A process alone is the worker that forms its run."""
        return Member("worker" if self.launcher == "alone" else self.role, self.rank, self.host, os.getpid())

    @property
    def name(self) -> str:
        """For messages: `rank 2 (host b, pid 411)`."""
        return str(self.member)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContext(ProcessIdentity):
    """The identity with its open settings resolved, and the connection to the coordinator; `rendezvous` makes it.

    `bind` is the address that this process listens on. `colocated`: the first `num_servers` workers of the launch host
    one server each, in their own process. `shared`: processes on one host may share memory.
    """

    control: CoordinatorConnection
    token: bytes = dataclasses.field(repr=False)
    service: CoordinatorService | None = None  # the coordinator, where this process hosts it
    store: Any = None  # torchrun's store; it must live as long as other ranks may read it
    bind: str = LOOPBACK
    timeout_s: float = TIMEOUT_S
    num_servers: int = 1
    shared: bool = True
