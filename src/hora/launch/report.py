"""Report: what the launcher says about the end of a run, last and once."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from collections.abc import Sequence

from . import codes
from .child import Child, signal_name
from .tracebacks import shorten

TRACEBACK_LINES = 30
TAIL_LINES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: the launcher's exit code, the cause in one line, and what to print last."""

    code: int
    cause: str
    text: str = ""


def failed(child: Child, children: Sequence[Child], *, others_ran: bool, log_dir: str | None) -> Outcome:
    """`child` was the first of `children` to end badly; `others_ran` when it did."""
    by_itself = child.returncode is not None and child.returncode > 0
    who = f"rank {child.rank} (host {socket.gethostname()}, pid {child.pid})"
    cause = f"{who} failed with {child.how}" if by_itself else f"{who} {child.how}"
    if child.returncode == codes.ECHO_EXIT:
        cause = f"{who} lost a rank that it needed"
    others = ""
    if len(children) > 1 and child.exception and all(other.exception == child.exception for other in children):
        others = "; the others failed in the same way"
    elif others_ran:
        others = "; the others were stopped"
    lines = child.traceback() or (child.err.last_lines()[-TAIL_LINES:] if by_itself else [])
    shown = [f"  {line}".rstrip() for line in shorten(lines, TRACEBACK_LINES)]
    if log_dir:
        shown.append(f"  (all it said: {os.path.join(log_dir, f'rank-{child.rank}.err')})")
    code = codes.SCRIPT_FAILED if by_itself else codes.RANK_KILLED
    return Outcome(code=code, cause=cause, text="\n".join([f"{cause}{others}.", *shown]))


def unstarted(rank: int, error: OSError) -> Outcome:
    """The operating system refused to start `rank`."""
    cause = f"rank {rank} could not be started: {error.strerror or error}"
    return Outcome(code=codes.SCRIPT_FAILED, cause=cause, text=f"{cause}; the others were stopped.")


def stopped(number: int, *, killed: Sequence[int]) -> Outcome:
    """The run was asked to stop by signal `number`; `killed` are the ranks that had to be made to."""
    ranks = ", ".join(map(str, sorted(set(killed))))
    code = codes.TERMINATED
    if number in (signal.SIGINT, signal.SIGPIPE):
        code = codes.INTERRUPTED if number == signal.SIGINT else codes.OUTPUT_CLOSED
    text = f"killed what did not stop by itself: rank {ranks}." if ranks else ""
    return Outcome(code=code, cause=f"stopped by {signal_name(number)}", text=text)
