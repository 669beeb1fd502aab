"""Serving: the page on a listening socket, until a signal or until somebody says that it is enough."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from ..serve.door import names_of
from ..serve.http import Server
from .app import make_app
from .runs import Runs

if TYPE_CHECKING:
    from types import FrameType


def serve(
    listener: socket.socket,
    *,
    home: str,
    others: Mapping[str, str] | None = None,
    host_names: Collection[str] = (),
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Show the runs in `home`, and `others` by name and directory, in the main thread; closes the listener."""
    hosts = [*names_of(listener.getsockname()[0]), *host_names]
    app = make_app(Runs(home, others), allowed_hosts=hosts)
    server = Server(app, listener=listener)
    with _signals() as asked:

        def is_over() -> bool:
            app.state.feeds.is_closing = bool(asked) or until()
            return bool(app.state.feeds.is_closing)

        server.run(is_over)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end the serving, not the process; those that came."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
