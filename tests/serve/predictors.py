"""A predictor without a run: parameters of steps that a test names, and a server on a free port of the loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hora.http.listening import listen
from hora.http.server import run_app
from hora.serve.app import make_app
from hora.serve.batcher import Batcher
from hora.serve.signature import Signature, signature_of
from hora.serve.snapshot_buffer import ParameterVersion

PATIENCE_S = 30.0
SEVENTH = ParameterVersion(step=7)


class Steps:
    """A source that says what it is told to; counts how often it was asked."""

    def __init__(self, version: ParameterVersion | None = SEVENTH) -> None:
        self.version = version
        self.num_refreshes = 0

    def refresh(self) -> ParameterVersion | None:
        self.num_refreshes += 1
        return self.version

    def close(self) -> None: ...


class Recorder(nn.Module):
    """A linear layer with small whole weights, so that sums are exact; remembers the rows of every forward."""

    def __init__(self, features: int = 4, answers: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(features, answers, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(features * answers).reshape(answers, features) % 5 - 2)
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        self.batches.append(len(x))
        result: torch.Tensor = self.layer(x)
        return result

    def learned(self) -> Signature | None:
        x = torch.zeros(3, self.layer.in_features)
        return signature_of(["x"], [x], self.layer(x))


@contextlib.contextmanager
def answering(model: nn.Module | list[nn.Module], source: Any = None, **options: Any) -> Iterator[Batcher]:
    options.setdefault("signature", lambda: None)
    models = model if isinstance(model, list) else [model]
    batcher = Batcher(models, Steps() if source is None else source, **options)
    try:
        yield batcher
    finally:
        for module in models:
            if isinstance(module, Recorder):
                module.gate.set()
        batcher.close()


@contextlib.contextmanager
def served(batcher: Batcher, name: str = "net", host: str = "127.0.0.1", **options: Any) -> Iterator[int]:
    """The port under which `batcher` is served."""
    options.setdefault("allowed_hosts", [])
    app, listener = make_app(batcher, name=name, **options), listen(host, 0)
    port = listener.getsockname()[1]
    done = threading.Event()
    thread = threading.Thread(target=run_app, args=(app, listener, done.is_set))
    thread.start()
    try:
        yield port
    finally:
        done.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def ask(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, host: str = "127.0.0.1"
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Status, what the answer says, and its headers. A body that is no bytes is sent as JSON."""
    if body is not None and not isinstance(body, bytes | bytearray | Iterator):
        body = json.dumps(body).encode()
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        data = response.read()
        kind = response.headers.get_content_type()
        return response.status, json.loads(data) if kind == "application/json" else data, response.headers
    finally:
        connection.close()


def threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns for each number, all at the same time."""
    results: list[Any] = [None] * count

    def one(number: int) -> None:
        results[number] = work(number)

    running = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(PATIENCE_S)
    return results
