"""Server: the app on a socket, in the thread that runs it. Nothing is printed, and no signal is touched."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .listening import MAX_CONNECTIONS, listen

HEAD_S = 10.0  # for the head of a request, from its first byte; for the first one from the connection
TAKE_S = 10.0  # for an answer to be taken, from when it no longer fits into the buffers
KEEP_S = 30  # how long a connection may be silent between two requests
GRACE_S = 2  # for requests under way at the end
POLL_S = 0.1


class HttpServer:
    """Listens from its making on, so that nobody is turned away until `run` serves. `address` is host and port, the
    real one where 0 was asked for. A `listener` that is given is used instead, and closed in the end."""

    def __init__(self, app: ASGIApp, host: str = "", port: int = 0, *, listener: socket.socket | None = None) -> None:
        self._app = app
        self._socket = listener or listen(host, port)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def run(self, until: Callable[[], bool]) -> None:
        """Serve in the calling thread until `until()`, asked ten times a second, is true; requests under way are
        finished within GRACE_S then. To be called once."""
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve(until))
            loop.run_until_complete(_drop_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            self.close()

    def close(self) -> None:
        """Give the address back; for a server that is not going to run."""
        self._socket.close()

    async def _serve(self, until: Callable[[], bool]) -> None:
        config = uvicorn.Config(
            self._app, http=_Connection, ws="none", lifespan="off", log_config=None, log_level="error",
            access_log=False, server_header=False, proxy_headers=False, limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_S, timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
        server = _Uvicorn(config)
        serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
        try:
            while not serving.done() and not until():
                await asyncio.wait({serving}, timeout=POLL_S)
        finally:
            server.should_exit = True
            await serving


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the launcher's."""
        yield


class _Connection(H11Protocol):
    """One client's connection, closed if a request's head takes too long, or the client too long to read its answer:
    uvicorn itself would wait forever."""

    _head: asyncio.TimerHandle | None = None
    _full: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()
        self._relieve()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._full is None:
            self._full = self.loop.call_later(TAKE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._relieve()

    def _relieve(self) -> None:
        if self._full is not None:
            self._full.cancel()
            self._full = None

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.transport.close)

    def _unwatch(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


async def _drop_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
