"""Exit codes of `hora run`, and the exit code of a rank that failed only because it lost a peer."""

from __future__ import annotations

import signal

OK = 0  # every rank ended well
SCRIPT_FAILED = 1  # a rank's script exited with another code than 0, or could not be started
USAGE = 2  # the command line was wrong; nothing was started
RANK_KILLED = 3  # a rank was killed by a signal that the launcher did not send
INTERRUPTED = 130  # Ctrl-C (SIGINT) stopped the run
OUTPUT_CLOSED = 141  # the reader of the launcher's output closed it, as `| head` does, and the run was stopped
TERMINATED = 143  # SIGTERM or SIGHUP stopped the run
SECONDARY_FAILURE = 76  # of a rank: it failed only because another rank was lost, so it is never the first cause


def of_signal(number: int) -> int:
    """The exit code of a run that this signal stopped."""
    if number == signal.SIGINT:
        return INTERRUPTED
    return OUTPUT_CLOSED if number == signal.SIGPIPE else TERMINATED
