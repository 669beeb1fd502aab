"""The page on a socket of its own, and a client that says exactly what it is told to."""

from __future__ import annotations

import contextlib
import http.client
import json
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hora.dashboard.app import make_app
from hora.dashboard.catalogue import RunCatalogue
from hora.http.listening import listen
from hora.http.server import run_app

PATIENCE_S = 20.0


class Page:
    def __init__(self, port: int, home: pathlib.Path) -> None:
        self.port, self.home = port, home

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, method: str = "GET", body: Any = None, **headers: str
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, body (JSON if it is), headers. An underscore in a header's name is a dash."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            line.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                line.putheader(name.replace("_", "-"), value)
            if data is not None:
                line.putheader("Content-Length", str(len(data)))
            line.endheaders(data)
            answer = line.getresponse()
            said: Any = answer.read()
            with contextlib.suppress(ValueError):
                said = json.loads(said)
            return answer.status, said, answer.headers
        finally:
            line.close()

    def get(self, path: str, **headers: str) -> Any:
        """What a path says; it has to be 200."""
        status, said, _ = self.ask(path, **headers)
        assert status == 200, said
        return said

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[Stream]:
        line = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
        try:
            line.sendall(f"GET /api/runs/{name}/live HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            yield Stream(line)
        finally:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()


class Stream:
    """Server-sent events as they come."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self._file = line.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        self.headers: dict[str, str] = {}
        while (head := self._file.readline().decode().strip()) != "":
            key, _, value = head.partition(": ")
            self.headers[key.lower()] = value

    def body(self) -> Any:
        return json.loads(self._file.read(int(self.headers["content-length"])))

    def next(self) -> tuple[str, Any] | None:
        """Kind and data of the next event; None at the end."""
        kind, text = "", b""
        while True:
            size = int(self._file.readline() or b"0", 16)
            if not size:
                return None
            chunk = self._file.read(size)
            self._file.readline()
            text += chunk
            while b"\n\n" in text:
                block, text = text.split(b"\n\n", 1)
                lines = dict(part.split(b": ", 1) for part in block.split(b"\n") if b": " in part and part[:1] != b":")
                if b"event" in lines:
                    kind = lines[b"event"].decode()
                    assert not text  # each is sent by itself
                    return kind, json.loads(lines[b"data"])


@contextlib.contextmanager
def shown(home: pathlib.Path, send_bytes: int = 0, port: int = 0, **others: str) -> Iterator[Page]:
    """The page of the runs in `home`, served by a thread; `send_bytes` is what the kernel holds of an answer."""
    over = threading.Event()
    listener = listen("127.0.0.1", port)
    if send_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    app = make_app(RunCatalogue(str(home), others), allowed_hosts=["Trainer.Example"])
    port = listener.getsockname()[1]
    thread = threading.Thread(target=run_app, args=(app, listener, over.is_set))
    thread.start()
    try:
        yield Page(port, home)
    finally:
        over.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def until(holds: Callable[[], Any]) -> Any:
    """What `holds` returns once it is true."""
    end = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.02)
    return found
