"""App: the page's endpoints. It reads runs and changes none; what is no answer is {"error": "one sentence"}."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..http.errors import HttpError, error_response
from ..http.guard import LARGE_BYTES, RequestGuard
from . import catalogue, predict, prometheus
from .feed import Feeds, TooManyStreams
from .runs import RunNotFound, StoredRuns
from .view import RunView

MAX_BYTES = 1 << 20  # of a request's body
NUM_READERS = 4  # threads that read memories and ask predictors for requests, besides the feeds' own
MAX_LARGE = 64  # answers above LARGE_BYTES that are under way at once
KEEP_S = 0.5  # for which an answer is told to others as well
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
ENDPOINTS = ("/", "/runs/NAME", "/compare?runs=A,B", "/api/runs", "/api/runs/NAME", "/api/runs/NAME/live", "/metrics")

T = TypeVar("T")


def make_app(runs: StoredRuns, *, allowed_hosts: Collection[str] = ()) -> Starlette:
    """The app that shows `runs` under `allowed_hosts` and the loopback's names."""
    desk = _Endpoints(runs)
    routes = [
        Route("/", desk.page("index.html")),
        Route("/compare", desk.page("compare.html")),
        Route("/runs/{name}", desk.run_page),
        Route("/static/{file}", desk.static),
        Route("/favicon.ico", desk.icon),
        Route("/metrics", desk.metrics),
        Route("/api/runs", desk.list),
        Route("/api/runs/{name}", desk.whole),
        Route("/api/runs/{name}/live", desk.live),
        Route("/api/runs/{name}/predictor", desk.predictor),
        Route("/api/runs/{name}/predict", desk.predict, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_Headers), Middleware(RequestGuard, allowed_hosts=allowed_hosts, max_bytes=MAX_BYTES)],
        exception_handlers={HttpError: _refused, RunNotFound: _missing, HTTPException: _astray, Exception: _broken},
    )
    app.router.redirect_slashes = False
    app.state.feeds = desk.feeds
    return app


class _Endpoints:
    """The endpoints."""

    def __init__(self, runs: StoredRuns) -> None:
        self._runs = runs
        self.feeds = Feeds(runs)
        self.num_large = 0  # answers under way
        self._files = _files()
        self._kept: dict[str, tuple[float, asyncio.Future[bytes]]] = {}
        self._readers: anyio.CapacityLimiter | None = None
        self._askers: anyio.CapacityLimiter | None = None

    def page(self, file: str) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            return self._file(request, file)

        return show

    async def run_page(self, request: Request) -> Response:
        """The page says itself why a run cannot be shown."""
        response = self._file(request, "run.html")
        with contextlib.suppress(RunNotFound):
            await self._in_thread(lambda: self._runs.find(request.path_params["name"]))
            return response
        return Response(self._files["run.html"], 404, media_type="text/html")

    async def static(self, request: Request) -> Response:
        return self._file(request, request.path_params["file"])

    async def icon(self, request: Request) -> Response:
        return self._file(request, "icon.svg")

    async def list(self, request: Request) -> Response:
        return _json(await self._shared("list", lambda: catalogue.listing(self._runs)))

    async def whole(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._in_thread(lambda: self._runs.find(name))  # names that are none take no room below

        def read() -> bytes:
            return RunView(self._runs, name).whole()

        body = await self._shared(f"run {name}", read)
        if len(body) > LARGE_BYTES and self.num_large >= MAX_LARGE:
            raise HttpError("too many large answers are under way", 503)
        return _Large(self, body) if len(body) > LARGE_BYTES else _json(body)

    async def live(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._in_thread(lambda: self._runs.find(name))
        return _Stream(self.feeds, name)

    async def metrics(self, request: Request) -> Response:
        body = await self._shared("metrics", lambda: prometheus.text(self._runs))
        return Response(body, headers={"Content-Type": prometheus.CONTENT_TYPE, "Cache-Control": "no-store"})

    async def predictor(self, request: Request) -> Response:
        name = request.path_params["name"]
        run = await self._in_thread(lambda: self._runs.find(name))
        return _json(await self._shared(f"predictor {name}", lambda: predict.state(run), self._ask))

    async def predict(self, request: Request) -> Response:
        name, body = request.path_params["name"], await request.body()
        run = await self._in_thread(lambda: self._runs.find(name))
        status, answer = await self._ask(lambda: predict.predict(run, body))
        return Response(answer, status, {"Cache-Control": "no-store"}, "application/json")

    def _file(self, request: Request, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise HTTPException(404)
        headers = {"Cache-Control": "no-cache"}
        return Response(content, headers=headers, media_type=TYPES[name.rpartition(".")[2]])

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._readers is None:
            self._readers = anyio.CapacityLimiter(NUM_READERS)
        return await anyio.to_thread.run_sync(work, limiter=self._readers)

    async def _ask(self, work: Callable[[], T]) -> T:
        """The same for what waits for a predictor, so that nobody else waits for it."""
        if self._askers is None:
            self._askers = anyio.CapacityLimiter(NUM_READERS)
        if self._askers.statistics().tasks_waiting >= predict.MAX_WAITING:
            raise HttpError("too many ask the predictor at once", 503)
        return await anyio.to_thread.run_sync(work, limiter=self._askers)

    async def _shared(
        self, key: str, work: Callable[[], bytes], hand: Callable[[Callable[[], bytes]], Awaitable[bytes]] | None = None
    ) -> bytes:
        """What `work` returns, done once for all who ask within KEEP_S."""
        now = time.monotonic()
        for old in [old for old, (at, done) in self._kept.items() if done.done() and now - at > KEEP_S]:
            del self._kept[old]
        if key not in self._kept:
            self._kept[key] = (now, asyncio.ensure_future((hand or self._in_thread)(work)))
        return await asyncio.shield(self._kept[key][1])


class _Large(Response):
    """An answer that is counted until it is taken, so that those who do not take theirs cost bounded memory."""

    def __init__(self, desk: _Endpoints, body: bytes) -> None:
        super().__init__(body, headers={"Cache-Control": "no-store"}, media_type="application/json")
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._desk.num_large += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._desk.num_large -= 1


class _Stream(Response):
    """Server-sent events, until the run is over or the client has gone."""

    def __init__(self, feeds: Feeds, name: str) -> None:
        super().__init__(
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._feeds, self._name = feeds, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._feeds.watch(self._name) as events, anyio.create_task_group() as both:

                async def until_gone() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        continue
                    both.cancel_scope.cancel()

                both.start_soon(until_gone)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": b"retry: 2000\n\n", "more_body": True})
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                both.cancel_scope.cancel()
        except TooManyStreams as full:
            await error_response(str(full), 503, {"Cache-Control": "no-store"})(scope, receive, send)


class _Headers:
    """ASGI middleware: what every answer says to the browser, refusals included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *self._headers]}
            await send(message)

        await self._app(scope, receive, dressed)


def _files() -> dict[str, bytes]:
    """All that lies in static/, by name."""
    folder = importlib.resources.files(__package__) / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES}


def _json(body: bytes) -> Response:
    return Response(body, headers={"Cache-Control": "no-store"}, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error_response(str(error), error.status, {"Cache-Control": "no-store"})


async def _missing(request: Request, error: Exception) -> Response:
    return error_response(str(error), 404, {"Cache-Control": "no-store"})


async def _astray(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    there = f"there is no {request.method} {request.url.path[:80]} here, only {', '.join(ENDPOINTS)}"
    return error_response(there, error.status_code, dict(error.headers or {}))


async def _broken(request: Request, error: Exception) -> Response:
    """Our own mistake; starlette raises it again after this, and the server logs it."""
    return error_response(f"the page failed with {type(error).__name__}; its log says more", 500)
