"""Access: what a process must know of its run to reach its servers, or to be one."""

from __future__ import annotations

import dataclasses

from ..coordinator import CoordinatorLine


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContext:
    """`colocated`: the first `num_servers` workers of the launch host a server each, in their own process.

    `joined`: this worker came to a run that was under way. `shared`: whether memory may be shared on one host.
    `history`: a folder into which servers write what they did, for checkers. `watched`: somebody wants their reports.
    """

    control: CoordinatorLine
    token: bytes
    name: str  # of this process, for messages
    rank: int
    size: int  # workers of the launch
    num_servers: int
    colocated: bool = False
    joined: bool = False
    bind: str = "127.0.0.1"
    timeout_s: float = 1800.0
    shared: bool = True
    history: str = ""
    watched: bool = False
