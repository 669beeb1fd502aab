"""Request guard: ASGI middleware that checks Host, Origin and body size before the app sees a request.

Host     must be a name of this server or the address that the client connected to (prevents DNS rebinding)
Origin   pages of another host or port may not send requests, and other sites may not load resources
body     at most `max_bytes`, complete within BODY_S; the total held by all requests and responses is bounded too
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import HttpError, error_response
from .listening import ANY_ADDRESS

BODY_S = 10.0  # deadline for a whole body
MAX_HELD = 32  # times `max_bytes`: the most that all requests may hold together
DRAIN_S = 2.0  # how long the rest of a rejected body is read, so that the client reads the response and not a reset
LARGE_BYTES = 64 << 10  # a smaller response fits into the connection's own buffer
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]*))(?::(\d{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def own_names(host: str) -> list[str]:
    """The names that clients may use for a server that listens on `host`."""
    if host not in ANY_ADDRESS:
        return [host]
    names = {socket.gethostname()}
    with contextlib.suppress(OSError):
        names |= {str(address[0]) for *_, address in socket.getaddrinfo(socket.gethostname(), None)}
    return sorted(names)


class RequestGuard:
    """The app behind it gets the whole body in its first message, and afterwards the client's disconnect."""

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str], max_bytes: int) -> None:
        self._app = app
        self._hosts = {_split_host(host)[0] for host in (*allowed_hosts, *LOOPBACK_NAMES)}
        self._max_bytes = max_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        chunks: list[bytes] = []
        try:
            try:
                headers = self._check(scope)
                if "content-length" in headers or "transfer-encoding" in headers:
                    with anyio.fail_after(BODY_S):
                        await self._read(receive, chunks)
            except HttpError as error:
                await _reject(error, receive, send)
                return
            except TimeoutError:
                late = error_response(f"the body did not arrive within {BODY_S:g} s", 408, {"Connection": "close"})
                await late(scope, receive, send)
                return
            unread: list[Message] = [{"type": "http.request", "body": b"".join(chunks), "more_body": False}]

            async def replay() -> Message:
                if unread:
                    return unread.pop()
                while (message := await receive())["type"] == "http.request":
                    continue  # an empty body that was not announced, and therefore not read above
                return message

            async def counted(message: Message) -> None:
                await self._send(message, send)

            await self._app(scope, replay, counted)
        finally:
            self._held_bytes -= sum(map(len, chunks))

    async def _send(self, message: Message, send: Send) -> None:
        """Count a response until the client has taken it: uvicorn blocks on the second message until then."""
        num_bytes = len(message.get("body", b""))
        if num_bytes <= LARGE_BYTES or message.get("more_body", False):
            await send(message)
            return
        self._held_bytes += num_bytes
        try:
            await send({**message, "more_body": True})
            await send({"type": message["type"], "body": b"", "more_body": False})
        finally:
            self._held_bytes -= num_bytes

    def _check(self, scope: Scope) -> Headers:
        headers = Headers(scope=scope)
        host = headers.get("host", "")  # uvicorn rejects a second one
        reached = (scope.get("server") or [""])[0].lower().removeprefix("::ffff:")
        if _split_host(host)[0] not in {*self._hosts, reached} - {""}:
            raise HttpError(f"host {host[:80]!r} is not allowed; allowed: {', '.join(sorted(self._hosts))}", 403)
        origin = headers.get("origin")
        if origin is not None and not _is_same_origin(origin, host):
            raise HttpError(f"requests from pages of {origin[:80]!r} are not allowed", 403)
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            raise HttpError("requests from pages of other sites are not allowed", 403)
        num_bytes = int(headers.get("content-length", "0"))  # uvicorn rejects what is not a number
        if num_bytes > self._max_bytes:
            raise self._too_large(f"has {num_bytes} bytes")
        return headers

    async def _read(self, receive: Receive, chunks: list[bytes]) -> None:
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HttpError("the client disconnected")
            chunk = message.get("body", b"")
            chunks.append(chunk)
            num_bytes += len(chunk)
            self._held_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise self._too_large("is longer")
            if self._held_bytes > MAX_HELD * self._max_bytes:
                raise HttpError("the open requests hold too much memory together", 503)
            more = message.get("more_body", False)

    def _too_large(self, what: str) -> HttpError:
        return HttpError(f"the body {what}; the limit is {self._max_bytes} bytes; send fewer rows at a time", 413)


async def _reject(error: HttpError, receive: Receive, send: Send) -> None:
    """Respond, drain the body for a while, then close: closing with unread bytes would reset the connection before the
    client has read the response."""
    response = error_response(str(error), error.status, {"Connection": "close"})
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with anyio.move_on_after(DRAIN_S):
        while (await receive()).get("more_body", False):
            continue
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _split_host(host: str) -> tuple[str, int | None]:
    """Name, in lower case without brackets, and port of a Host header; an invalid one is returned as it is."""
    match = _HOST.fullmatch(host.strip().lower())
    if match is None:
        return host.lower(), None
    return match[1] or match[2], int(match[3]) if match[3] else None


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether `origin` has the host and port of `host`, a Host header that was found to be allowed."""
    with contextlib.suppress(ValueError):
        page, (name, port) = urlsplit(origin), _split_host(host)
        default = _DEFAULT_PORTS.get(page.scheme)
        return default is not None and (page.hostname, page.port or default) == (name, port or default)
    return False
