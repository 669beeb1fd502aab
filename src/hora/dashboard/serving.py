"""Serving: the page on a listening socket, until a signal or until somebody says that it is enough."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping

from ..http.guard import own_names
from ..http.server import HttpServer, catch_signals
from .app import make_app
from .runs import StoredRuns


def serve(
    listener: socket.socket,
    *,
    home: str,
    others: Mapping[str, str] | None = None,
    host_names: Collection[str] = (),
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Show the runs in `home`, and `others` by name and directory, in the main thread; closes the listener."""
    hosts = [*own_names(listener.getsockname()[0]), *host_names]
    app = make_app(StoredRuns(home, others), allowed_hosts=hosts)
    server = HttpServer(app, listener=listener)
    with catch_signals() as caught:

        def is_over() -> bool:
            app.state.feeds.is_closing = bool(caught) or until()
            return bool(app.state.feeds.is_closing)

        server.run(is_over)
