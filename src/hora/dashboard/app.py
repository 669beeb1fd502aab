"""The dashboard's HTTP endpoints, and `serve`, which runs them. It reads runs and changes none."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
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
from ..http.guard import LARGE_BYTES, RequestGuard, own_names
from ..http.server import catch_signals, run_app
from . import predict, prometheus
from .catalogue import RunCatalogue, RunNotFound, listing
from .feed import Feeds
from .view import RunView

MAX_BYTES = 1 << 20  # of a request's body
NUM_READERS = 4  # threads that read run databases, and as many that call predictors; the feeds have their own
MAX_LARGE = 64  # responses above LARGE_BYTES that are being sent at once
SHARE_S = 0.5  # how long a response is reused for other clients
NO_STORE = {"Cache-Control": "no-store"}
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


def serve(
    listener: socket.socket,
    *,
    home: str,
    others: Mapping[str, str] | None = None,
    host_names: Collection[str] = (),
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Serve the runs in `home`, and `others` by name and directory, until SIGINT, SIGTERM or `until()`. Blocks; main
    thread only. Closes the listener."""
    hosts = [*own_names(listener.getsockname()[0]), *host_names]
    app = make_app(RunCatalogue(home, others), allowed_hosts=hosts)
    with catch_signals() as caught:

        def is_over() -> bool:
            app.state.feeds.is_closing = bool(caught) or until()
            return bool(app.state.feeds.is_closing)

        run_app(app, listener, is_over)


def make_app(catalogue: RunCatalogue, *, allowed_hosts: Collection[str] = ()) -> Starlette:
    """The app for these runs; requests must name one of `allowed_hosts` or the loopback as Host."""
    endpoints = _Endpoints(catalogue)
    routes = [
        Route("/", endpoints.file("index.html")),
        Route("/compare", endpoints.file("compare.html")),
        Route("/favicon.ico", endpoints.file("icon.svg")),
        Route("/runs/{name}", endpoints.run_page),
        Route("/static/{file}", endpoints.static),
        Route("/metrics", endpoints.metrics),
        Route("/api/runs", endpoints.list),
        Route("/api/runs/{name}", endpoints.run),
        Route("/api/runs/{name}/live", endpoints.live),
        Route("/api/runs/{name}/predictor", endpoints.predictor),
        Route("/api/runs/{name}/predict", endpoints.predict, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_Headers), Middleware(RequestGuard, allowed_hosts=allowed_hosts, max_bytes=MAX_BYTES)],
        exception_handlers=dict.fromkeys((HttpError, HTTPException, Exception), _error),
    )
    app.router.redirect_slashes = False
    app.state.feeds = endpoints.feeds
    return app


class _Endpoints:
    def __init__(self, catalogue: RunCatalogue) -> None:
        self._catalogue = catalogue
        self.feeds = Feeds(catalogue)
        self.num_large = 0  # large responses that are being sent
        folder = importlib.resources.files(__package__) / "static"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if _suffix(file.name) in TYPES}
        self._shared_results: dict[str, tuple[float, asyncio.Future[bytes]]] = {}
        self._reader_limit: anyio.CapacityLimiter | None = None  # made in the event loop
        self._predictor_limit: anyio.CapacityLimiter | None = None

    def file(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            return self._file(name)

        return respond

    async def run_page(self, request: Request) -> Response:
        """The page itself says why a run cannot be shown."""
        with contextlib.suppress(RunNotFound):
            await self._in_thread(lambda: self._catalogue.find(request.path_params["name"]))
            return self._file("run.html")
        return Response(self._files["run.html"], 404, media_type="text/html")

    async def static(self, request: Request) -> Response:
        return self._file(request.path_params["file"])

    async def list(self, request: Request) -> Response:
        return _json(await self._shared("list", lambda: listing(self._catalogue)))

    async def run(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._in_thread(lambda: self._catalogue.find(name))  # unknown names must not fill the shared results
        body = await self._shared(f"run {name}", lambda: RunView(self._catalogue, name).snapshot())
        if len(body) <= LARGE_BYTES:
            return _json(body)
        if self.num_large >= MAX_LARGE:
            raise HttpError("too many large responses are being sent; try again", 503)
        return _LargeResponse(self, body)

    async def live(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._in_thread(lambda: self._catalogue.find(name))
        return _EventStream(self.feeds, name)

    async def metrics(self, request: Request) -> Response:
        body = await self._shared("metrics", lambda: prometheus.text(self._catalogue))
        return Response(body, headers={"Content-Type": prometheus.CONTENT_TYPE, **NO_STORE})

    async def predictor(self, request: Request) -> Response:
        name = request.path_params["name"]
        run = await self._in_thread(lambda: self._catalogue.find(name))
        return _json(await self._shared(f"predictor {name}", lambda: predict.state(run), self._call_predictor))

    async def predict(self, request: Request) -> Response:
        name, body = request.path_params["name"], await request.body()
        run = await self._in_thread(lambda: self._catalogue.find(name))
        status, answer = await self._call_predictor(lambda: predict.predict(run, body))
        return Response(answer, status, NO_STORE, "application/json")

    def _file(self, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise HTTPException(404)
        return Response(content, headers={"Cache-Control": "no-cache"}, media_type=TYPES[_suffix(name)])

    async def _in_thread(self, work: Callable[[], T]) -> T:
        self._reader_limit = self._reader_limit or anyio.CapacityLimiter(NUM_READERS)
        return await anyio.to_thread.run_sync(work, limiter=self._reader_limit)

    async def _call_predictor(self, work: Callable[[], T]) -> T:
        """In a thread of another pool: a slow predictor must not delay the pages."""
        self._predictor_limit = self._predictor_limit or anyio.CapacityLimiter(NUM_READERS)
        if self._predictor_limit.statistics().tasks_waiting >= predict.MAX_WAITING:
            raise HttpError("too many requests wait for the predictor; try again", 503)
        return await anyio.to_thread.run_sync(work, limiter=self._predictor_limit)

    async def _shared(
        self, key: str, work: Callable[[], bytes], run: Callable[[Callable[[], bytes]], Awaitable[bytes]] | None = None
    ) -> bytes:
        """The result of `work`, computed once for all requests within SHARE_S."""
        now, results = time.monotonic(), self._shared_results
        for old in [old for old, (at, result) in results.items() if result.done() and now - at > SHARE_S]:
            del results[old]
        if key not in results:
            results[key] = (now, asyncio.ensure_future((run or self._in_thread)(work)))
        return await asyncio.shield(results[key][1])


class _LargeResponse(Response):
    """Counted while it is sent, so that clients that do not read cost bounded memory."""

    def __init__(self, endpoints: _Endpoints, body: bytes) -> None:
        super().__init__(body, headers=NO_STORE, media_type="application/json")
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._endpoints.num_large += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._endpoints.num_large -= 1


class _EventStream(Response):
    """Server-sent events, until the run is over or the client disconnects."""

    def __init__(self, feeds: Feeds, name: str) -> None:
        super().__init__(headers={**NO_STORE, "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._feeds, self._name = feeds, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_body(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            async with self._feeds.watch(self._name) as events, anyio.create_task_group() as tasks:

                async def until_disconnect() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        continue
                    tasks.cancel_scope.cancel()

                tasks.start_soon(until_disconnect)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send_body(b"retry: 2000\n\n")
                async for event in events:
                    await send_body(event)
                await send_body(b"", more=False)
                tasks.cancel_scope.cancel()
        except HttpError as error:
            await error_response(str(error), error.status, NO_STORE)(scope, receive, send)


class _Headers:
    """ASGI middleware: adds HEADERS to every response, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *self._headers]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _error(request: Request, error: Exception) -> Response:
    if isinstance(error, HttpError):
        return error_response(str(error), error.status, NO_STORE)
    if isinstance(error, HTTPException):
        text = f"there is no {request.method} {request.url.path[:80]}; the endpoints are {', '.join(ENDPOINTS)}"
        return error_response(text, error.status_code, dict(error.headers or {}))
    # a bug: Starlette raises the error again after this response, and the server logs it
    return error_response(f"the dashboard failed with {type(error).__name__}; see its log", 500)


def _json(body: bytes) -> Response:
    return Response(body, headers=NO_STORE, media_type="application/json")


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
