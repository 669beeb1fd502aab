"""Clients of `hora bench serve`: each sends requests on one connection and records when and how long each took."""

from __future__ import annotations

import http.client
import json
import struct
import threading
import time
from typing import NamedTuple
from urllib.parse import urlsplit

PATIENCE_S = 30.0


class Reply(NamedTuple):
    at: float  # when it came, by the machine's monotonic clock
    seconds: float


class Request(NamedTuple):
    path: str
    body: bytes
    headers: dict[str, str]


def plain(row: list[float]) -> Request:
    """One row as JSON, as curl would send it."""
    return Request("/predict", json.dumps([row]).encode(), {"Content-Type": "application/json"})


def binary(name: str, row: list[float]) -> Request:
    """The same as the Open Inference Protocol's binary extension has it."""
    data = struct.pack(f"<{len(row)}f", *row)
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "input",
                    "shape": [1, len(row)],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": len(data)},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return Request(
        f"/v2/models/{name}/infer",
        head + data,
        {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))},
    )


class Clients:
    """`count` of them, from `start` to `stop`. Whatever is not a good answer is kept as a problem."""

    def __init__(self, url: str, request: Request, count: int) -> None:
        parts = urlsplit(url)
        self._place = (parts.hostname or "", parts.port or 80)
        self._request = request
        self._over = threading.Event()
        self._replies: list[list[Reply]] = [[] for _ in range(count)]
        self.problems: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(own,), daemon=True) for own in self._replies]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Reply]:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return sorted(reply for own in self._replies for reply in own)

    def _ask(self, replies: list[Reply]) -> None:
        line = http.client.HTTPConnection(*self._place, timeout=PATIENCE_S)
        path, body, headers = self._request
        try:
            while not self._over.is_set():
                begin = time.monotonic()
                line.request("POST", path, body, headers)
                answer = line.getresponse()
                text = answer.read()
                now = time.monotonic()
                if answer.status != 200:
                    self.problems.append(f"{answer.status}: {text[:200].decode(errors='replace')}")
                    return
                replies.append(Reply(now, now - begin))
        except OSError as problem:
            if not self._over.is_set():
                self.problems.append(str(problem))
        finally:
            line.close()
