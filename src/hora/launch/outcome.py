"""Outcome: the exit code, cause and final message of a run, and the messages about processes lost on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..runs import exit_codes
from ..terminal.screen import log_path, process_name
from ..terminal.tracebacks import shorten
from .process import RunProcess, Slot, signal_name

TRACEBACK_LINES = 30
TAIL_LINES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: exit code, cause in one line, what to print last, and the ranks that it went on without."""

    code: int
    cause: str
    text: str = ""
    lost: tuple[str, ...] = ()


def failed(
    process: RunProcess,
    processes: Sequence[RunProcess],
    *,
    others_ran: bool,
    parameters_lost: bool,
    announced: str,
    log_dir: str | None,
) -> Outcome:
    """`process` was the first of `processes` to fail; `others_ran` then. `announced`: the reason that it gave."""
    by_itself = process.returncode is not None and (process.returncode > 0 or bool(announced))
    cause = f"{_who(process)} failed with {process.how}" if by_itself else f"{_who(process)} {process.how}"
    if announced and process.returncode is not None and process.returncode < 0:
        cause = f"{_who(process)} failed ({announced}), did not end by itself and was {process.how}"
    if process.returncode == exit_codes.SECONDARY_FAILURE:
        cause = f"{_who(process)} lost a rank that it needed"
    if parameters_lost:
        cause += ", and its parameters are lost with it"
    others = ""
    alike = [other for other in processes if other.role == process.role]
    if len(alike) > 1 and process.exception and all(other.exception == process.exception for other in alike):
        others = "; the others failed in the same way"
    elif others_ran:
        others = "; the others were stopped"
    lines = process.traceback() or (process.err.last_lines()[-TAIL_LINES:] if by_itself else [])
    shown = [f"  {line}".rstrip() for line in shorten(lines, TRACEBACK_LINES)]
    if log_dir:
        shown.append(f"  (full output: {log_path(log_dir, process.role, process.rank, 'err')})")
    code = exit_codes.SCRIPT_FAILED if by_itself else exit_codes.RANK_KILLED
    return Outcome(code=code, cause=cause, text="\n".join([f"{cause}{others}.", *shown]))


def lost(process: RunProcess, step: str) -> str:
    """The run goes on without `process`; `step` is the last one that it reported, or empty."""
    return f"{_who(process)} {_how(process)}{f' after step {step}' if step else ''}"


def predictor_failed(process: RunProcess, training: bool) -> str:
    """The predictor failed, while `training` was going on or after it."""
    by_itself = process.returncode is not None and process.returncode > 0  # a killed one had survived its exceptions
    why = f": {process.exception}" if process.exception and by_itself else ""
    return f"the {_who(process)} {_how(process)}{why}; training {'goes on without it' if training else 'had ended'}"


def ended(lost: Sequence[str]) -> Outcome:
    """The run ended well, perhaps without some ranks."""
    text = f"the run ended well; lost on the way: {'; '.join(lost)}." if lost else ""
    return Outcome(code=exit_codes.OK, cause="", text=text, lost=tuple(lost))


def never_met(size: int, script: str) -> Outcome:
    """Every rank ended well, and none had joined the run."""
    text = (
        f"no rank called hora.init(), so {size} copies of {script} ran side by side, each by itself; "
        "call job = hora.init() and job.prepare(model, optimizer) to make them one run."
    )
    return Outcome(code=exit_codes.OK, cause="", text=text)


def unstarted(role: str, rank: int, error: OSError) -> Outcome:
    """The operating system, or a lost host, prevented the start of this process."""
    cause = f"{process_name(role, rank)} could not be started: {error.strerror or error}"
    return Outcome(code=exit_codes.SCRIPT_FAILED, cause=cause, text=f"{cause}; the others were stopped.")


def stopped(number: int, *, killed: Sequence[Slot]) -> Outcome:
    """Signal `number` stopped the run; `killed` are the processes that did not end by themselves."""
    names = []
    for role, noun in (("worker", "rank"), ("server", "server")):
        numbers = sorted({rank for kind, rank in killed if kind == role})
        if numbers:
            names.append(f"{noun} {', '.join(map(str, numbers))}")
    if any(role == "predictor" for role, _ in killed):
        names.append("predictor")
    text = f"killed after the grace period: {' and '.join(names)}." if names else ""
    return Outcome(code=exit_codes.of_signal(number), cause=f"stopped by {signal_name(number)}", text=text)


def _how(process: RunProcess) -> str:
    if process.returncode == exit_codes.SECONDARY_FAILURE:
        return "lost a rank that it needed"
    return (
        f"failed with {process.how}"
        if process.returncode is not None and process.returncode > 0
        else f"was {process.how}"
    )


def _who(process: RunProcess) -> str:
    return f"{process.name} (host {process.host}, pid {process.pid})"
