"""ASGI app of the predictor: its endpoints over a Batcher. Every error is {"error": "one sentence"}."""

from __future__ import annotations

from asyncio import wrap_future
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..http.errors import HttpError, error_response
from ..http.guard import RequestGuard
from . import protocols
from .batcher import Batcher, NotReady, Prediction
from .snapshot_buffer import ParameterVersion
from .tensor_codec import Value

VERSION_S = 1.0  # how long a status request waits for a busy model before it reports the last known version

T = TypeVar("T")


def make_app(batcher: Batcher, *, name: str, allowed_hosts: Collection[str], max_bytes: int = 8 << 20) -> Starlette:
    """Serves the model `name` under `allowed_hosts` and the names of the loopback."""
    endpoints = _Endpoints(batcher, name)
    routes = [
        Route("/predict", endpoints.predict, methods=["POST"]),
        Route("/v2/health/live", endpoints.live),
        Route("/v2/health/ready", endpoints.ready),
        Route("/v2", endpoints.server),
        Route("/", endpoints.index),
    ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(f"{model}/infer", endpoints.infer, methods=["POST"]),
            Route(f"{model}/ready", endpoints.model_ready),
            Route(model, endpoints.metadata),
        ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestGuard, allowed_hosts=allowed_hosts, max_bytes=max_bytes)],
        exception_handlers=dict.fromkeys((HttpError, HTTPException, Exception), endpoints.error),
    )
    app.router.redirect_slashes = False  # a path that is nearly right gets the list of endpoints
    return app


class _Endpoints:
    def __init__(self, batcher: Batcher, name: str) -> None:
        self._batcher = batcher
        self._name = name
        model = f"/v2/models/{name}"
        self._paths = [
            "POST /predict", "GET /v2/health/live", "GET /v2/health/ready", f"GET {model}", f"GET {model}/ready",
            f"POST {model}/infer",
        ]  # fmt: skip

    async def predict(self, request: Request) -> Response:
        inputs = protocols.parse_plain(await _body(request), self._batcher.signature)
        prediction = await self._predict(inputs)
        return _json(protocols.encode_plain(prediction.outputs, prediction.version))

    async def infer(self, request: Request) -> Response:
        self._check_name(request)
        asked = protocols.parse_infer(await _body(request), request.headers.get(protocols.HEADER))
        prediction = await self._predict(asked.inputs)
        self._check_version(request, prediction.version)
        body, length = protocols.encode_infer(asked, prediction.outputs, prediction.version, self._name)
        if length is None:
            return _json(body)
        return Response(body, headers={protocols.HEADER: str(length)}, media_type="application/octet-stream")

    async def live(self, request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        await self._ready_version()
        return _json({"ready": True})

    async def model_ready(self, request: Request) -> Response:
        self._check_name(request)
        self._check_version(request, await self._ready_version())
        return _json({"name": self._name, "ready": True})

    async def metadata(self, request: Request) -> Response:
        self._check_name(request)
        version = await self._version()
        self._check_version(request, version)
        signature = self._batcher.signature
        return _json(
            {
                "name": self._name,
                "versions": [str(version.step)] if version else [],
                "platform": "hora_pytorch",
                "inputs": signature.inputs if signature else [],
                "outputs": signature.outputs if signature else [],
            }
        )

    async def server(self, request: Request) -> Response:
        return _json({"name": "hora", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def index(self, request: Request) -> Response:
        version = await self._version()
        about = {"name": self._name, "ready": version is not None, "step": version.step if version else None}
        return _json({**about, "endpoints": self._paths})

    async def error(self, request: Request, error: Exception) -> Response:
        """Starlette raises any other error than these two again after this, and the server logs it."""
        if isinstance(error, HttpError):
            return error_response(str(error), error.status)
        if not isinstance(error, HTTPException):
            return error_response(f"the predictor failed with {type(error).__name__}; see its log", 500)
        headers = dict(error.headers or {})
        if error.status_code == 405 and request.url.path == "/predict":
            host = request.headers["host"]
            return error_response(f"/predict takes POST: curl {host}/predict -d '[[0.5, 1.5]]'", 405, headers)
        message = f"no endpoint {request.method} {request.url.path[:80]}; endpoints: {', '.join(self._paths)}"
        return error_response(message, error.status_code, headers)

    async def _predict(self, inputs: Mapping[str, Value]) -> Prediction:
        try:
            return await _within(self._batcher.timeout_s, self._batcher.submit(inputs))
        except TimeoutError:
            raise HttpError(f"no answer within {self._batcher.timeout_s:g} s", 503) from None

    async def _version(self) -> ParameterVersion | None:
        try:
            return await _within(VERSION_S, self._batcher.newest_version())
        except TimeoutError:
            return self._batcher.version

    async def _ready_version(self) -> ParameterVersion:
        version = await self._version()
        if version is None:
            raise NotReady
        return version

    def _check_name(self, request: Request) -> None:
        name = request.path_params["name"]
        if name != self._name:
            raise HttpError(f"no model {name[:80]!r}; the model is {self._name!r}", 404)

    def _check_version(self, request: Request, version: ParameterVersion | None) -> None:
        """Only the newest version is kept."""
        asked = request.path_params.get("version")
        if asked is not None and (version is None or asked != str(version.step)):
            newest = f"only the newest, {version.step}, is kept" if version else "there is none yet"
            raise HttpError(f"no version {asked[:80]!r} of {self._name!r}: {newest}", 404)


async def _within(seconds: float, future: Future[T]) -> T:
    with anyio.fail_after(seconds):
        return await wrap_future(future)


async def _body(request: Request) -> bytes:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(f"content encoding {encoding[:80]!r} is not supported; send the body uncompressed", 415)
    return await request.body()


def _json(content: Any) -> Response:
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return Response(body, media_type="application/json")
