"""Grace: how long processes may take to end by themselves, in one place."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grace:
    """Seconds. HORA_GRACE=0.2 makes all of them a fifth: for tests, which would otherwise spend minutes waiting."""

    react_s: float = 1.0
    """After the first failure: until the others, who were told, get SIGTERM."""

    failed_kill_s: float = 2.0
    """After the first failure: until SIGKILL."""

    lost_s: float = 6.0
    """After a rank that failed because it lost another: until that one is blamed, if no rank says that it failed."""

    cause_s: float = 30.0
    """The same where a rank has said that it failed: it is the cause, and may take this long to end."""

    asked_term_s: float = 1.5
    asked_kill_s: float = 2.3
    """After Ctrl-C or SIGTERM: until the process groups get SIGTERM, and until SIGKILL."""

    server_term_s: float = 10.0
    server_kill_s: float = 12.0
    """After the last worker's end: until a server or predictor that is still there gets SIGTERM, and SIGKILL."""

    give_up_s: float = 5.0
    """After SIGKILL: until a process that the kernel does not let go is left behind."""

    drain_s: float = 0.4
    """After the last process's end: until pipes that another process holds open are closed."""

    @classmethod
    def from_environment(cls) -> Grace:
        try:
            factor = float(os.environ.get("HORA_GRACE", "1"))
        except ValueError:
            factor = 1.0
        return cls(**{field.name: getattr(cls, field.name) * factor for field in dataclasses.fields(cls)})
