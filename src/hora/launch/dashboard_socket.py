"""DashboardSocket: the dashboard's listening socket; the dashboard process is started at the first connection.

The launcher holds the socket from the start of the run and polls it in its own loop. A separate process then accepts
the connections: nothing that a browser does can hurt the launcher, and a run without visitors pays nothing. If that
process ends, the next connection starts another.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

from hora.http.listening import listen_near

from ..http.listening import DASHBOARD_PORT

HOST = "127.0.0.1"
END_S = 1.5  # for the dashboard to show the run's end to its visitors
MAX_STARTS = 5  # of the process, should it fail


class DashboardSocket:
    """Listens from construction on; if its port is taken, at the next. ValueError if none is free."""

    def __init__(self, port: int | None) -> None:
        self._socket = listen_near(HOST, port if port is not None else DASHBOARD_PORT)
        self.port: int = self._socket.getsockname()[1]
        self.moved = bool(port) and self.port != port
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def address(self, run: str) -> str:
        return f"http://{HOST}:{self.port}/runs/{run}"

    @property
    def waiting(self) -> bool:
        """Whether the launcher must poll the socket, since no process accepts its connections."""
        if self._process is not None and self._process.poll() is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None
        return self._process is None and self._num_starts < MAX_STARTS

    def start(self, run: str, directory: str, home: str) -> None:
        """Starts the process, which ends when its stdin does, so with this launcher at the latest. ValueError if it
        cannot be started."""
        self._num_starts += 1
        command = [sys.executable, "-m", "hora.dashboard", "--fd", str(self.fileno()), "--home", home]
        try:
            self._process = subprocess.Popen(
                [*command, "--run", f"{run}={directory}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[self.fileno()],
                start_new_session=True,
            )
        except OSError as problem:  # out of processes or descriptors
            self._num_starts = MAX_STARTS
            raise ValueError(f"the dashboard cannot be started: {problem.strerror or problem}") from None

    def end(self) -> None:
        """Closes the socket and ends the process, which shows the run's end to its visitors first."""
        process = self._process
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            if process.poll() is None:
                process.kill()
                process.wait()
        self._socket.close()
