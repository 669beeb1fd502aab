"""HTTP server: an ASGI app on a listening socket, run by uvicorn in the calling thread. Prints and logs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .listening import MAX_CONNECTIONS

HEAD_S = 10.0  # deadline for a request's head, from its first byte; for the first request, from the connection
TAKE_S = 10.0  # deadline for the client to take a response that no longer fits into the buffers
KEEP_ALIVE_S = 30
SHUTDOWN_S = 2  # for open requests at the end


def run_app(app: ASGIApp, listener: socket.socket, until: Callable[[], bool]) -> None:
    """Serve until `until()`, polled ten times a second, is true; open requests then get SHUTDOWN_S to finish.

    Connections that wait on `listener` already are served too. Closes it."""
    config = uvicorn.Config(
        app, http=_Connection, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
        server_header=False, proxy_headers=False, limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )  # fmt: skip
    loop = asyncio.new_event_loop()  # not asyncio.run, which installs a handler for SIGINT
    with contextlib.closing(listener), contextlib.closing(loop):
        try:
            loop.run_until_complete(_Uvicorn(config, until).serve(sockets=[listener]))
        finally:
            loop.run_until_complete(_cancel_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """While inside, SIGINT and SIGTERM are only appended to the list. Main thread only."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, until: Callable[[], bool]) -> None:
        super().__init__(config)
        self._until = until

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._until()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handlers as they are."""
        yield


class _Connection(H11Protocol):
    """Adds HEAD_S and TAKE_S to uvicorn's connection, which waits for slow clients without a limit."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timers: dict[str, asyncio.TimerHandle] = {}
        super().connection_made(transport)
        self._update_head_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for name in [*self._timers]:
            self._stop(name)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("take", TAKE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("take")

    def _update_head_timer(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._start("head", HEAD_S, self.transport.close)
        else:
            self._stop("head")

    def _start(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, action)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
