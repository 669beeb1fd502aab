"""App: the predictor's endpoints over an Answerer. Everything that is not an answer is {"error": "one sentence"}."""

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
from . import inference_protocol, plain_json
from .batcher import Batcher, NotReady, Prediction
from .source import ParameterVersion
from .tensor_codec import Value

GLANCE_S = 1.0  # how long a question about the moment waits for a busy thread before the last known one will do

T = TypeVar("T")


def make_app(answerer: Batcher, *, name: str, allowed_hosts: Collection[str], max_bytes: int = 8 << 20) -> Starlette:
    """The app that answers for the model `name` under `allowed_hosts` and the loopback's names."""
    desk = _Endpoints(answerer, name)
    model = f"/v2/models/{name}"
    desk.endpoints = [
        "POST /predict", "GET /v2/health/live", "GET /v2/health/ready", f"GET {model}", f"GET {model}/ready",
        f"POST {model}/infer",
    ]  # fmt: skip
    routes = [
        Route("/predict", desk.predict, methods=["POST"]),
        Route("/v2/models/{name}/infer", desk.infer, methods=["POST"]),
        Route("/v2/models/{name}/versions/{version}/infer", desk.infer, methods=["POST"]),
        Route("/v2/health/live", desk.live),
        Route("/v2/health/ready", desk.ready),
        Route("/v2/models/{name}", desk.metadata),
        Route("/v2/models/{name}/versions/{version}", desk.metadata),
        Route("/v2/models/{name}/ready", desk.model_ready),
        Route("/v2/models/{name}/versions/{version}/ready", desk.model_ready),
        Route("/v2", desk.server),
        Route("/", desk.index),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestGuard, allowed_hosts=allowed_hosts, max_bytes=max_bytes)],
        exception_handlers={HttpError: _refused, HTTPException: desk.astray, Exception: _broken},
    )
    app.router.redirect_slashes = False  # what is nearly right is wrong, and gets the list of what is right
    return app


class _Endpoints:
    """The endpoints."""

    def __init__(self, answerer: Batcher, name: str) -> None:
        self._answerer = answerer
        self._name = name
        self.endpoints: list[str] = []

    async def predict(self, request: Request) -> Response:
        inputs = plain_json.parse(await _body(request), self._answerer.expected)
        answer = await self._answer(inputs)
        return _json(plain_json.encode(answer.outputs, answer.stamp))

    async def infer(self, request: Request) -> Response:
        self._check_name(request)
        asked = inference_protocol.parse(await _body(request), request.headers.get(inference_protocol.HEADER))
        answer = await self._answer(asked.inputs)
        self._check_version(request, answer.stamp)
        body, length = inference_protocol.encode(asked, answer.outputs, answer.stamp, self._name)
        if length is None:
            return _json(body)
        return Response(body, headers={inference_protocol.HEADER: str(length)}, media_type="application/octet-stream")

    async def live(self, request: Request) -> Response:
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        await self._ready()
        return _json({"ready": True})

    async def model_ready(self, request: Request) -> Response:
        self._check_name(request)
        self._check_version(request, await self._ready())
        return _json({"name": self._name, "ready": True})

    async def metadata(self, request: Request) -> Response:
        self._check_name(request)
        stamp = await self._moment()
        self._check_version(request, stamp)
        known = self._answerer.expected
        return _json(
            {
                "name": self._name,
                "versions": [str(stamp.step)] if stamp else [],
                "platform": "hora_pytorch",
                "inputs": known.inputs if known else [],
                "outputs": known.outputs if known else [],
            }
        )

    async def server(self, request: Request) -> Response:
        return _json({"name": "hora", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def index(self, request: Request) -> Response:
        stamp = await self._moment()
        about = {"name": self._name, "ready": stamp is not None, "step": stamp.step if stamp else None}
        return _json({**about, "endpoints": self.endpoints})

    async def astray(self, request: Request, error: Exception) -> Response:
        """A path that is not there, or not for this method."""
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405 and request.url.path == "/predict":
            host = request.headers["host"]
            return error_response(f"/predict takes POST: curl {host}/predict -d '[[0.5, 1.5]]'", 405, headers)
        there = f"there is no {request.method} {request.url.path[:80]} here, only {', '.join(self.endpoints)}"
        return error_response(there, error.status_code, headers)

    async def _answer(self, inputs: Mapping[str, Value]) -> Prediction:
        try:
            return await _within(self._answerer.timeout_s, self._answerer.submit(inputs))
        except TimeoutError:
            raise HttpError(f"no answer within {self._answerer.timeout_s:g} s", 503) from None

    async def _moment(self) -> ParameterVersion | None:
        try:
            return await _within(GLANCE_S, self._answerer.moment())
        except TimeoutError:
            return self._answerer.stamp

    async def _ready(self) -> ParameterVersion:
        stamp = await self._moment()
        if stamp is None:
            raise NotReady
        return stamp

    def _check_name(self, request: Request) -> None:
        name = request.path_params["name"]
        if name != self._name:
            raise HttpError(f"there is no model {name[:80]!r} here, only {self._name!r}", 404)

    def _check_version(self, request: Request, stamp: ParameterVersion | None) -> None:
        """The parameters of one step are all that there is: the newest."""
        asked = request.path_params.get("version")
        if asked is not None and (stamp is None or asked != str(stamp.step)):
            newest = f"the newest is {stamp.step}" if stamp else "there is none yet"
            raise HttpError(
                f"there is no version {asked[:80]!r} of {self._name!r}: {newest}, and no other is kept", 404
            )


async def _within(seconds: float, future: Future[T]) -> T:
    with anyio.fail_after(seconds):
        return await wrap_future(future)


async def _body(request: Request) -> bytes:
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise HttpError(f"the body is encoded as {coding[:80]!r}, expected it as it is", 415)
    return await request.body()


def _json(content: Any) -> Response:
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return Response(body, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error_response(str(error), error.status)


async def _broken(request: Request, error: Exception) -> Response:
    """Our own mistake; starlette raises it again after this, and the server logs it."""
    return error_response(f"the predictor failed with {type(error).__name__}; its log says more", 500)
