"""Exit codes: what the launcher's says about a run, and the one by which a rank says "it was not me"."""

from __future__ import annotations

import signal

OK = 0
"""Every rank ended well."""

SCRIPT_FAILED = 1
"""A rank's script failed: it exited with a code other than 0, or could not be started."""

USAGE = 2
"""The command line was wrong; nothing was started."""

RANK_KILLED = 3
"""A rank was killed by a signal that the launcher did not send."""

INTERRUPTED = 130
"""Ctrl-C (SIGINT) stopped the run."""

OUTPUT_CLOSED = 141
"""Whoever read the launcher's output went away, as `| head` does, and the run was stopped."""

TERMINATED = 143
"""SIGTERM or SIGHUP stopped the run."""

SECONDARY_FAILURE = 76
"""A *rank's* exit code: it failed only because another rank was lost, so it is never blamed before that one."""


def of_signal(number: int) -> int:
    """The code of a run that this signal has stopped."""
    if number == signal.SIGINT:
        return INTERRUPTED
    return OUTPUT_CLOSED if number == signal.SIGPIPE else TERMINATED
