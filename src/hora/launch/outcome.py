"""Report: what the launcher says about the end of a run, last and once; and of a rank lost on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..runs import exit_codes
from ..terminal.screen import log_path, seat_name
from ..terminal.tracebacks import shorten
from .process import RunProcess, signal_name

TRACEBACK_LINES = 30
TAIL_LINES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: the launcher's exit code, the cause in one line, what to print last, and who was lost."""

    code: int
    cause: str
    text: str = ""
    lost: tuple[str, ...] = ()


def failed(
    child: RunProcess,
    children: Sequence[RunProcess],
    *,
    others_ran: bool,
    parameters_lost: bool,
    told: str,
    log_dir: str | None,
) -> Outcome:
    """`child` was the first of `children` to end badly; `others_ran` when it did. `told`: why it failed, in its own
    words."""
    by_itself = child.returncode is not None and (child.returncode > 0 or bool(told))
    cause = f"{_who(child)} failed with {child.how}" if by_itself else f"{_who(child)} {child.how}"
    if told and child.returncode is not None and child.returncode < 0:
        cause = f"{_who(child)} failed ({told}), did not end by itself and was {child.how}"
    if child.returncode == exit_codes.SECONDARY_FAILURE:
        cause = f"{_who(child)} lost a rank that it needed"
    if parameters_lost:
        cause += ", and its parameters are lost with it"
    others = ""
    alike = [other for other in children if other.role == child.role]
    if len(alike) > 1 and child.exception and all(other.exception == child.exception for other in alike):
        others = "; the others failed in the same way"
    elif others_ran:
        others = "; the others were stopped"
    lines = child.traceback() or (child.err.last_lines()[-TAIL_LINES:] if by_itself else [])
    shown = [f"  {line}".rstrip() for line in shorten(lines, TRACEBACK_LINES)]
    if log_dir:
        shown.append(f"  (all it said: {log_path(log_dir, child.role, child.rank, 'err')})")
    code = exit_codes.SCRIPT_FAILED if by_itself else exit_codes.RANK_KILLED
    return Outcome(code=code, cause=cause, text="\n".join([f"{cause}{others}.", *shown]))


def lost(child: RunProcess, step: str) -> str:
    """`child` ended badly, after that step, the last it told, if it is known, and the run goes on without it."""
    return f"{_who(child)} {_how(child)}{f' after step {step}' if step else ''}"


def silenced(child: RunProcess, training: bool) -> str:
    """The predictor ended badly, while `training` was going on or after it."""
    by_itself = child.returncode is not None and child.returncode > 0  # one that was killed had got over its exceptions
    why = f": {child.exception}" if child.exception and by_itself else ""
    return f"the {_who(child)} {_how(child)}{why}; training {'goes on without it' if training else 'had ended'}"


def ended(lost: Sequence[str]) -> Outcome:
    """The run ended well, perhaps without some."""
    text = f"the run ended well; lost on the way: {'; '.join(lost)}." if lost else ""
    return Outcome(code=exit_codes.OK, cause="", text=text, lost=tuple(lost))


def never_met(size: int, script: str) -> Outcome:
    """Every rank ended well, and none had joined the run."""
    text = (
        f"no rank called hora.init(), so {size} copies of {script} ran side by side, each by itself; "
        "job = hora.init() and job.prepare(model, optimizer) make them one run."
    )
    return Outcome(code=exit_codes.OK, cause="", text=text)


def unstarted(role: str, rank: int, error: OSError) -> Outcome:
    """The operating system, or its host, refused to start this rank or server."""
    cause = f"{seat_name(role, rank)} could not be started: {error.strerror or error}"
    return Outcome(code=exit_codes.SCRIPT_FAILED, cause=cause, text=f"{cause}; the others were stopped.")


def stopped(number: int, *, killed: Sequence[tuple[str, int]]) -> Outcome:
    """The run was asked to stop by signal `number`; `killed` are the roles and ranks that had to be made to."""
    names = []
    for role, word in (("worker", "rank"), ("server", "server")):
        numbers = sorted({rank for kind, rank in killed if kind == role})
        if numbers:
            names.append(f"{word} {', '.join(map(str, numbers))}")
    if any(role == "predictor" for role, _ in killed):
        names.append("predictor")
    text = f"killed what did not stop by itself: {' and '.join(names)}." if names else ""
    return Outcome(code=exit_codes.of_signal(number), cause=f"stopped by {signal_name(number)}", text=text)


def _how(child: RunProcess) -> str:
    if child.returncode == exit_codes.SECONDARY_FAILURE:
        return "lost a rank that it needed"
    return f"failed with {child.how}" if child.returncode is not None and child.returncode > 0 else f"was {child.how}"


def _who(child: RunProcess) -> str:
    return f"{child.name} (host {child.host}, pid {child.pid})"
