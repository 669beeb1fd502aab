"""Door: who may come in, and with how much. Stands before the app on every path.

Host       the name that the client used has to be one of ours, or the very address that it has reached: a web page that
           lets its own name point here (DNS rebinding) is turned away
Origin     a page of another host or port may not ask in its visitor's name; nor may another host's load from here where
           its browser tells of it
body       at most `max_bytes`, whole within BODY_S; what all requests and answers hold together is bounded as well
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import RETRY_S, HttpError

BODY_S = 10.0  # for a whole body
MAX_HELD = 32  # times `max_bytes`: what all requests under way may hold together
LINGER_S = 2.0  # how long the rest of a refused body is read and thrown away, so that its sender can read why
LARGE_BYTES = 64 << 10  # an answer below this fits into the connection's own buffer
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANYWHERE = ("0.0.0.0", "::")

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]*))(?::(\d{1,5}))?")
_PORTS = {"http": 80, "https": 443}


def names_of(host: str) -> list[str]:
    """The names under which a server that listens on `host` may be asked; on all addresses: all of this machine's."""
    if host not in ANYWHERE:
        return [host]
    own = {socket.gethostname()}
    with contextlib.suppress(OSError):
        own |= {str(address[0]) for *_, address in socket.getaddrinfo(socket.gethostname(), None)}
    return sorted(own)


def error_response(sentence: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """A refusal as the protocol wants it."""
    if status == 503:
        headers = {**(headers or {}), "Retry-After": str(RETRY_S)}
    return Response(msgspec.json.encode({"error": sentence}), status, headers, "application/json")


class RequestGuard:
    """ASGI middleware: the app behind it finds the whole body in its first message, and then hears of the client's
    going as the server tells it."""

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str], max_bytes: int) -> None:
        self._app = app
        self._hosts = {_bare(host) for host in (*allowed_hosts, *LOOPBACK)}
        self._max_bytes = max_bytes
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        chunks: list[bytes] = []
        try:
            try:
                headers = self._check(scope)
                if b"content-length" in headers or b"transfer-encoding" in headers:
                    with anyio.fail_after(BODY_S):
                        await self._read(receive, chunks)
            except HttpError as refusal:
                await _refuse(error_response(str(refusal), refusal.status), scope, receive, send)
                return
            except TimeoutError:
                late = error_response(f"the body did not come within {BODY_S:g} s", 408, {"Connection": "close"})
                await late(scope, receive, send)
                return
            told: list[Message] = [{"type": "http.request", "body": b"".join(chunks), "more_body": False}]

            async def whole() -> Message:
                return told.pop() if told else await _gone(receive)

            async def counted(message: Message) -> None:
                await self._hand_over(message, send)

            await self._app(scope, whole, counted)
        finally:
            self._held -= sum(map(len, chunks))

    async def _hand_over(self, message: Message, send: Send) -> None:
        """An answer counts until the client has taken it: the server lets the second message wait for that."""
        num_bytes = len(message.get("body", b""))
        if num_bytes <= LARGE_BYTES or message.get("more_body", False):
            await send(message)
            return
        self._held += num_bytes
        try:
            await send({**message, "more_body": True})
            await send({"type": message["type"], "body": b"", "more_body": False})
        finally:
            self._held -= num_bytes

    def _check(self, scope: Scope) -> dict[bytes, bytes]:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")  # the server has refused a second one
        reached = (scope.get("server") or [""])[0].lower().removeprefix("::ffff:")
        if _bare(host) not in {*self._hosts, reached} - {""}:
            raise HttpError(f"the host {host[:80]!r} is not allowed here, only {', '.join(sorted(self._hosts))}", 403)
        origin = headers.get(b"origin")
        if origin is not None and not _is_same(origin.decode("latin-1"), host):
            raise HttpError(f"pages of {origin.decode('latin-1')[:80]!r} may not ask here", 403)
        if headers.get(b"sec-fetch-site") == b"cross-site" and headers.get(b"sec-fetch-mode") != b"navigate":
            raise HttpError("pages of other sites may not load from here", 403)
        length = headers.get(b"content-length", b"0")
        if int(length) > self._max_bytes:  # the server has made sure that it is a number
            raise self._too_large(f"has {int(length)} bytes")
        return headers

    async def _read(self, receive: Receive, chunks: list[bytes]) -> None:
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HttpError("the client has gone")
            chunk = message.get("body", b"")
            chunks.append(chunk)
            num_bytes += len(chunk)
            self._held += len(chunk)
            if num_bytes > self._max_bytes:
                raise self._too_large("is longer")
            if self._held > MAX_HELD * self._max_bytes:
                raise HttpError("the requests under way hold too much memory together", 503)
            more = message.get("more_body", False)

    def _too_large(self, what: str) -> HttpError:
        return HttpError(f"the body {what}, at most {self._max_bytes} are taken; send fewer rows at a time", 413)


async def _gone(receive: Receive) -> Message:
    """Waits until the client has gone. A body that was read, or was not announced, is not told of again."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return message


async def _refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, throw away what still comes for a while, then hang up: a connection that is closed with bytes unread is
    reset, and the client would see that instead of the answer."""
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with anyio.move_on_after(LINGER_S):
        while (await receive()).get("more_body", False):
            continue
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _bare(host: str) -> str:
    """A host without its port and brackets, in small letters; what is none stays as it is, and will not be found."""
    match = _HOST.fullmatch(host.strip().lower())
    return (match[1] or match[2]) if match else host.lower()


def _is_same(origin: str, host: str) -> bool:
    """Whether a page's origin is the very place that was asked: its host, which was found to be ours, and its port."""
    with contextlib.suppress(ValueError):
        page = urlsplit(origin)
        usual = _PORTS.get(page.scheme)
        match = _HOST.fullmatch(host.strip().lower())
        if usual is not None and page.hostname and match is not None:
            return (page.hostname, page.port or usual) == (_bare(host), int(match[3] or usual))
    return False
