"""Doorbell: the page's address, open from the start of a run; the page itself is started when somebody comes.

The launcher only holds the listening socket and waits for the first connection in its own loop. Then a process of its
own takes the socket over: nothing that a browser does can hurt the launcher, and a run that nobody looks at pays
nothing. If the page ends, the bell is armed again.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

from hora.http.listening import listen_near

from ..http.listening import DASHBOARD_PORT

HOST = "127.0.0.1"
END_S = 1.5  # for the page to show the end to those who look
MAX_STARTS = 5  # of the page, should it fail


class DashboardSocket:
    """Bound from its making on; if its port is taken, to the next. ValueError where none can be had."""

    def __init__(self, port: int | None) -> None:
        self._socket = listen_near(HOST, port if port is not None else DASHBOARD_PORT)
        self.port: int = self._socket.getsockname()[1]
        self.moved = bool(port) and self.port != port
        self._page: subprocess.Popen[bytes] | None = None
        self._num_starts = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def address(self, run: str) -> str:
        return f"http://{HOST}:{self.port}/runs/{run}"

    @property
    def waiting(self) -> bool:
        """Whether a connection should wake the launcher: no page is there to take it."""
        if self._page is not None and self._page.poll() is not None:
            self._hang_up()
        return self._page is None and self._num_starts < MAX_STARTS

    def answer(self, run: str, directory: str, home: str) -> None:
        """Somebody has come: the page takes over. It ends when its stdin does, so with this launcher at the latest."""
        self._num_starts += 1
        command = [sys.executable, "-m", "hora.dashboard", "--fd", str(self.fileno()), "--home", home]
        try:
            self._page = subprocess.Popen(
                [*command, "--run", f"{run}={directory}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[self.fileno()],
                start_new_session=True,
            )
        except OSError as problem:  # no process or descriptor to be had: the run does without a page
            self._num_starts = MAX_STARTS
            raise ValueError(f"the page cannot be started: {problem.strerror or problem}") from None

    def end(self) -> None:
        """The run is over: the page tells whoever looks, and ends."""
        page = self._page
        if page is not None:
            assert page.stdin is not None
            with contextlib.suppress(OSError):
                page.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                page.wait(END_S)
            if page.poll() is None:
                page.kill()
                page.wait()
        self._socket.close()

    def _hang_up(self) -> None:
        assert self._page is not None and self._page.stdin is not None
        self._page.stdin.close()
        self._page = None
