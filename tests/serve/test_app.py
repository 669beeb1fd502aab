"""The predictor over a real socket: every endpoint, and every way in which a client can be wrong, slow or hostile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from predictors import PATIENCE_S, Recorder, Steps, answering, ask, served, threads

from hora.http import guard
from hora.http import server as http_module
from hora.http.guard import RequestGuard
from hora.http.listening import listen
from hora.http.server import run_app
from hora.serve import app as app_module
from hora.serve.batcher import Batcher
from hora.serve.snapshot_buffer import ParameterVersion

ROWS = [[1.0, 2.0, 3.0, 4.0]]
MAX_BYTES = 1 << 20


class Place:
    """A predictor under its port."""

    def __init__(self, port: int, model: Recorder, source: Steps, batcher: Batcher) -> None:
        self.port, self.model, self.source, self.batcher = port, model, source, batcher
        self.right = model.layer(torch.tensor(ROWS)).tolist()

    def predict(self, body: Any, **more: Any) -> tuple[int, Any]:
        return ask(self.port, "POST", "/predict", body, **more)[:2]

    def get(self, path: str, **more: Any) -> tuple[int, Any]:
        return ask(self.port, "GET", path, **more)[:2]

    def infer(self, **change: Any) -> tuple[int, Any]:
        tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ROWS, **change}
        return ask(self.port, "POST", "/v2/models/net/infer", {"inputs": [tensor]})[:2]

    def raw(self, data: bytes) -> bytes:
        """All that comes back for what was sent, until the server hangs up."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as line:
            line.sendall(data)
            return _rest(line)

    def is_well(self) -> bool:
        return self.predict(ROWS) == (200, {"outputs": self.right, "step": self.source.version.step})  # type: ignore[union-attr]


def _rest(line: socket.socket) -> bytes:
    answer = b""
    while chunk := line.recv(65536):
        answer += chunk
    return answer


@pytest.fixture
def place() -> Iterator[Place]:
    model, source = Recorder(), Steps()
    with (
        answering(model, source, signature=model.learned) as batcher,
        served(batcher, max_bytes=MAX_BYTES, allowed_hosts=["Predictor.Example"]) as port,
    ):
        yield Place(port, model, source, batcher)
        assert Place(port, model, source, batcher).is_well()  # whatever a test has done


def sentence(said: Any) -> str:
    assert [*said] == ["error"]
    text: str = said["error"]
    assert text and "\n" not in text and len(text) < 600
    return text


# the endpoints


def test_health_and_server_metadata(place: Place) -> None:
    assert place.get("/v2/health/live") == (200, {"live": True})
    assert place.get("/v2/health/ready") == (200, {"ready": True})
    assert place.get("/v2/models/net/ready") == (200, {"name": "net", "ready": True})
    status, said = place.get("/v2")
    assert status == 200 and said["name"] == "hora" and said["extensions"] == ["binary_tensor_data"]


def test_model_metadata_tells_the_signature_and_the_newest_step(place: Place) -> None:
    place.source.version = ParameterVersion(step=9)  # no request since then: the newest is reported still
    assert place.get("/v2/models/net") == (
        200,
        {
            "name": "net",
            "versions": ["9"],
            "platform": "hora_pytorch",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 2]}],
        },
    )


def test_infer_answers_with_the_model_and_its_step(place: Place) -> None:
    status, said = place.infer()
    assert status == 200
    assert said == {
        "model_name": "net", "model_version": "7", "parameters": {"step": 7},
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [1, 2], "data": place.right[0]}],
    }  # fmt: skip


def test_infer_with_bytes_both_ways(place: Place) -> None:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body, length = head + struct.pack("<4f", *ROWS[0]), {"Inference-Header-Content-Length": str(len(head))}
    status, said, headers = ask(place.port, "POST", "/v2/models/net/infer", body, length)
    assert status == 200
    end = int(headers["Inference-Header-Content-Length"])
    assert json.loads(said[:end])["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert list(struct.unpack("<2f", said[end:])) == place.right[0]


def test_predict_answers_people_with_curl(place: Place) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d says
    for body in (ROWS, {"inputs": ROWS}, {"instances": ROWS}, {"inputs": {"x": ROWS}}, [[1, 2, 3, 4]]):
        assert place.predict(body, headers=form) == (200, {"outputs": place.right, "step": 7})
    odd = {"Content-Type": "multipart/form-data; boundary=\xff"}
    assert place.predict(ROWS, headers=odd)[0] == 200


def test_the_stamp_is_told_whole_by_both_doors(place: Place) -> None:
    place.source.version = ParameterVersion(step=8, round=2, local_step=3, spread=1)
    parts = {"step": 8, "round": 2, "local_step": 3, "spread": 1}
    assert place.predict(ROWS) == (200, {"outputs": place.right, **parts})
    assert place.infer()[1]["parameters"] == parts
    place.source.version = ParameterVersion(step=8)


def test_get_predict_shows_how_to_ask(place: Place) -> None:
    status, said, headers = ask(place.port, "GET", "/predict")
    assert status == 405 and f"curl 127.0.0.1:{place.port}/predict -d '[[" in sentence(said)
    assert headers["Allow"] == "POST"


def test_the_front_page_and_unknown_paths_list_the_endpoints(place: Place) -> None:
    status, said = place.get("/")
    assert status == 200 and (said["name"], said["ready"], said["step"]) == ("net", True, 7)
    assert "POST /v2/models/net/infer" in said["endpoints"]
    for method, path in (("GET", "/nothing"), ("POST", "/predict/"), ("POST", "/v2/"), ("GET", "/%00/../etc")):
        status, said, _ = ask(place.port, method, path, b"[]" if method == "POST" else None)
        assert status == 404 and "POST /v2/models/net/infer" in sentence(said)
    assert ask(place.port, "POST", "/v2/health/live", b"")[0] == 405
    assert ask(place.port, "GET", "/v2/models/net/infer")[0] == 405


def test_an_unknown_model_or_version_is_told_what_there_is(place: Place) -> None:
    for path in ("/v2/models/other", "/v2/models/other/ready", "/v2/models/other/versions/7"):
        status, said = place.get(path)
        assert status == 404 and sentence(said) == "no model 'other'; the model is 'net'"
    assert place.get("/v2/models/net/versions/7")[0] == 200
    assert place.get("/v2/models/net/versions/7/ready")[0] == 200
    status, said = place.get("/v2/models/net/versions/6")
    assert status == 404 and "only the newest, 7, is kept" in sentence(said)
    tensor = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ROWS}]}
    assert ask(place.port, "POST", "/v2/models/net/versions/7/infer", tensor)[0] == 200
    assert ask(place.port, "POST", "/v2/models/net/versions/6/infer", tensor)[0] == 404


def test_before_any_parameters_everything_says_so_and_when() -> None:
    source = Steps(None)
    with answering(Recorder(), source) as batcher, served(batcher) as port:
        for method, path, body in (
            ("POST", "/predict", ROWS), ("GET", "/v2/health/ready", None), ("GET", "/v2/models/net/ready", None),
        ):  # fmt: skip
            status, said, headers = ask(port, method, path, body)
            assert (status, sentence(said)) == (503, "no parameters have been published yet")
            assert headers["Retry-After"] == "1"
        assert ask(port, "GET", "/v2/health/live")[0] == 200
        assert ask(port, "GET", "/")[1]["ready"] is False
        assert ask(port, "GET", "/v2/models/net")[1]["versions"] == []
        source.version = ParameterVersion(step=0)
        assert ask(port, "GET", "/v2/health/ready")[0] == 200
        assert ask(port, "GET", "/")[1]["step"] == 0


def test_a_busy_thread_does_not_stop_the_page_or_health(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "VERSION_S", 0.2)
    assert place.is_well()
    place.model.gate.clear()
    place.model.entered.clear()
    waiting = place.batcher.submit({"x": torch.tensor(ROWS)})
    assert place.model.entered.wait(PATIENCE_S)
    assert place.get("/v2/health/ready")[0] == 200
    assert place.get("/")[1]["step"] == 7
    place.model.gate.set()
    assert waiting.result(PATIENCE_S)


def test_texts_reach_predict_through_both_doors() -> None:
    with (
        answering(Recorder(), predict=lambda model, texts: [text.upper() for text in texts]) as batcher,
        served(batcher) as port,
    ):
        assert ask(port, "POST", "/predict", ["a", "b"])[1] == {"outputs": ["A", "B"], "step": 7}
        tensor = {"name": "t", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
        said = ask(port, "POST", "/v2/models/net/infer", {"inputs": [tensor]})[1]
        assert said["outputs"] == [{"name": "output", "datatype": "BYTES", "shape": [2], "data": ["A", "B"]}]


# wrong requests


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "list of rows"),
        (b"\x00\xff" * 1000, "list of rows"),
        (b"[[1, 2, 3, NaN]]", "malformed"),
        (b"[[1, 2, 3, 1e39]]", "input 'x' has NaN or infinite values"),
        (b"[[1, 2, 3", "truncated"),
        (b"[[1, 2, 3]]", "input 'x' has shape [1, 3], expected [-1, 4]"),
        (b"[1, 2, 3, 4]", "put a single row into a list"),
        (b"[]", "at least one row"),
        (b"[[]]", "at least one row"),
        (b'["a"]', "predict=fn"),
        (b"[[true, true, true, true]]", "input 'x' has datatype BOOL, expected FP32"),
        (b'{"inputs": {"z": [[1, 2, 3, 4]]}}', "named 'z', expected 'x'"),
        (b'{"inputs": {}}', "the request has no inputs"),
        (b"[" * 100_000, "deep"),
        (b'{"inputs": ' + b'{"a":' * 100_000, "deep"),
    ],
)
def test_wrong_rows_are_a_400_with_one_sentence(place: Place, body: bytes, says: str) -> None:
    status, said = place.predict(body)
    assert status == 400 and says in sentence(said)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": [1, 5]}, "data of shape [1, 4], but its shape field is [1, 5]"),
        ({"shape": [1, 1, 4], "data": [1, 2, 3, 4]}, "input 'x' has shape [1, 1, 4], expected [-1, 4]"),
        ({"shape": [1 << 62, 4]}, "Expected `int` <="),
        ({"datatype": "FP64"}, "input 'x' has datatype FP64, expected FP32"),
        ({"datatype": "INT64", "data": [1, 2, 3, 4]}, "input 'x' has datatype INT64, expected FP32"),
        ({"datatype": "OBJECT"}, "expected one of"),
        ({"name": "y"}, "named 'y', expected 'x'"),
        ({"data": None}, "nested 0 deep"),
    ],
)
def test_wrong_tensors_are_a_400_with_one_sentence(place: Place, change: dict[str, Any], says: str) -> None:
    status, said = place.infer(**change)
    assert status == 400 and says in sentence(said)


def test_bytes_that_are_not_finite_are_refused(place: Place) -> None:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [tensor]}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    for value in (float("nan"), float("inf")):
        body = head + struct.pack("<4f", 1, 2, 3, value)
        status, said, _ = ask(place.port, "POST", "/v2/models/net/infer", body, length)
        assert status == 400 and "NaN or infinite values" in sentence(said)
    for cut in (head, head + b"\x00" * 15, head + b"\x00" * 17):
        assert ask(place.port, "POST", "/v2/models/net/infer", cut, length)[0] == 400
    beyond = {"Inference-Header-Content-Length": str(1 << 60)}
    status, said, _ = ask(place.port, "POST", "/v2/models/net/infer", head, beyond)
    assert status == 400 and "but the body has" in sentence(said)


def test_an_unknown_output_is_a_400(place: Place) -> None:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ROWS}
    asked = {"inputs": [tensor], "outputs": [{"name": "probability"}]}
    status, said, _ = ask(place.port, "POST", "/v2/models/net/infer", asked)
    assert status == 400 and sentence(said) == "the model has no output 'probability'; its outputs are 'output'"


def test_a_compressed_body_is_refused(place: Place) -> None:
    status, said = place.predict(b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert status == 415 and "gzip" in sentence(said)


def test_a_mistake_of_our_own_is_a_500_without_its_secrets(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(app_module.protocols, "encode_plain", lambda *_: 1 / 0)
        status, said = place.predict(ROWS)
    assert status == 500 and "ZeroDivisionError" in sentence(said) and "division by" not in said["error"]


# too much, too slow, too many


@pytest.mark.parametrize("path", ["/predict", "/v2/models/net/infer", "/nothing", "/v2/health/live"])
def test_ten_megabytes_of_garbage_are_a_413_that_the_sender_can_read(place: Place, path: str) -> None:
    status, said, headers = ask(place.port, "POST", path, os.urandom(10 << 20))
    assert status == 413 and f"the limit is {MAX_BYTES}" in sentence(said)
    assert headers["Connection"] == "close"


def test_a_body_of_unsaid_length_is_stopped_at_the_limit(place: Place) -> None:
    status, said, _ = ask(place.port, "POST", "/predict", iter([b"[" + b" " * 65536] * 160), {})
    assert status == 413 and "is longer" in sentence(said)
    assert place.predict(iter([b"[[1.0, 2.0", b", 3.0, 4.0]]"]))[0] == 200


def test_a_length_beyond_the_limit_is_refused_before_anything_is_read(place: Place) -> None:
    said = place.raw(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n[")
    assert said.startswith(b"HTTP/1.1 413 ")


def test_the_limit_itself_is_allowed(place: Place) -> None:
    body = json.dumps(ROWS).encode()
    assert place.predict(body + b" " * (MAX_BYTES - len(body)))[0] == 200
    assert place.predict(body + b" " * (MAX_BYTES - len(body) + 1))[0] == 413


def test_what_all_bodies_hold_together_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_HELD", 2)
    model = Recorder()
    row = b" " * 700 + json.dumps(ROWS).encode()
    with answering(model, max_wait_ms=0) as batcher, served(batcher, max_bytes=1000) as port:
        for _ in range(5):
            model.gate.clear()
            model.entered.clear()
            waiting = [threading.Thread(target=ask, args=(port, "POST", "/predict", row)) for _ in range(2)]
            for thread in waiting:
                thread.start()
            assert model.entered.wait(PATIENCE_S)
            while ask(port, "POST", "/predict", b" " * 700)[0] != 503:  # 400 as long as one of the two is not in yet
                continue
            model.gate.set()
            for thread in waiting:
                thread.join(PATIENCE_S)
        assert ask(port, "POST", "/predict", row)[0] == 200


def test_a_slow_body_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_S", 0.3)
    said = place.raw(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n[[1.0")
    assert said.startswith(b"HTTP/1.1 408 ") and b"did not arrive within" in said


def test_a_slow_head_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "HEAD_S", 0.3)
    assert place.raw(b"") == b""
    assert place.raw(b"POST /predict HTTP/1.1\r\nHo") == b""
    with socket.create_connection(("127.0.0.1", place.port), PATIENCE_S) as line:  # a second one on the same line
        line.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 200")
        line.sendall(b"GET /v2")
        _rest(line)


def test_a_client_that_hangs_up_within_its_body_disturbs_nobody(place: Place) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", place.port), PATIENCE_S) as line:
            line.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n[[1.0")
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", place.port), PATIENCE_S) as line:
            body = json.dumps(ROWS).encode()
            line.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def test_garbage_that_is_no_http_gets_a_400(place: Place) -> None:
    assert place.raw(os.urandom(2000).replace(b"\n", b"") + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert place.raw(b"GET / HTTP/1.1\r\nContent-Length: x\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert place.raw(b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 20_000).startswith(b"HTTP/1.1 400 ")


def test_two_hundred_clients_at_once_each_get_their_own_answer(place: Place) -> None:
    def one(number: int) -> bool:
        row = [float(number), 0.0, 1.0, 2.0]
        expected = place.model.layer(torch.tensor([row])).tolist()
        return place.predict([row]) == (200, {"outputs": expected, "step": 7})

    place.model.batches.clear()
    assert threads(200, one) == [True] * 200
    assert sum(place.model.batches) == 200


def test_good_and_bad_clients_at_once_do_not_mix(place: Place) -> None:
    kinds: list[tuple[bytes, int]] = [
        (json.dumps(ROWS).encode(), 200), (b"[[1, 2, 3]]", 400), (b"garbage", 400), (b" " * (MAX_BYTES + 1), 413),
    ]  # fmt: skip

    def one(number: int) -> bool:
        body, status = kinds[number % len(kinds)]
        return all(place.predict(body)[0] == status for _ in range(5))

    assert threads(16, one) == [True] * 16


def test_a_request_without_an_answer_is_given_up() -> None:
    model = Recorder()
    with answering(model, timeout_s=0.3, max_wait_ms=0) as batcher, served(batcher) as port:
        model.gate.clear()
        status, said, headers = ask(port, "POST", "/predict", ROWS)
        assert status == 503 and "no answer within 0.3 s" in sentence(said) and headers["Retry-After"] == "1"
        model.gate.set()
        assert ask(port, "POST", "/predict", ROWS)[0] == 200


# who may ask


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000",
                                  "predictor.example", "PREDICTOR.EXAMPLE:80"])  # fmt: skip
def test_our_own_names_are_allowed(place: Place, host: str) -> None:
    assert place.predict(ROWS, headers={"Host": host})[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example",
                                  "localhost.evil.example", "localhost@evil.example", "", "[::1", "::2", "[::2]:80",
                                  "127.0.0.1:80:80", "0.0.0.0", "predictor.example."])  # fmt: skip
def test_names_that_others_let_point_here_are_not(place: Place, host: str) -> None:
    for method, path in (("POST", "/predict"), ("GET", "/"), ("GET", "/v2/health/live"), ("GET", "/nothing")):
        status, said, _ = ask(place.port, method, path, ROWS if method == "POST" else None, {"Host": host})
        assert status == 403 and "is not allowed; allowed: " in sentence(said)


def test_the_address_that_was_reached_is_allowed() -> None:
    with answering(Recorder()) as batcher, served(batcher, host="0.0.0.0") as port:
        with socket.create_connection(("127.0.0.2", port)) as line:
            line.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.2\r\nConnection: close\r\n\r\n")
            assert _rest(line).startswith(b"HTTP/1.1 200 ")
        assert ask(port, "GET", "/v2/health/live", headers={"Host": "127.0.0.2"})[0] == 403


def test_an_answer_that_nobody_reads_counts_and_its_connection_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "TAKE_S", 0.5)
    large = 16 << 20
    guards: list[RequestGuard] = []
    made = RequestGuard.__init__

    def noted(self: RequestGuard, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        guards.append(self)

    monkeypatch.setattr(RequestGuard, "__init__", noted)
    with answering(Recorder(), predict=lambda model, x: ["x" * large]) as batcher, served(batcher) as port:
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", port))
            body = b"[[1, 1, 1, 1]]"
            line.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            deadline = time.monotonic() + PATIENCE_S
            while not any(guard._held_bytes > large for guard in guards) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert any(guard._held_bytes > large for guard in guards)
            while any(guard._held_bytes for guard in guards) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not any(guard._held_bytes for guard in guards)
        assert len(ask(port, "POST", "/predict", body)[1]["outputs"][0]) == large, "who reads gets it all"


def test_no_host_or_two_are_refused(place: Place) -> None:
    assert b" 403 " in place.raw(b"GET / HTTP/1.0\r\n\r\n")[:20]
    two = b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert place.raw(two)[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 403 ")


@pytest.mark.parametrize("origin", ["http://evil.example", "https://localhost.evil.example", "null", "", "http://[::1",
                                    "file://", "localhost", "http://127.0.0.1:1", "http://127.0.0.1",
                                    "http://localhost:3000", "https://predictor.example"])  # fmt: skip
def test_pages_of_others_may_not_ask(place: Place, origin: str) -> None:
    status, said = place.predict(ROWS, headers={"Origin": origin})
    assert status == 403 and "are not allowed" in sentence(said)


def test_pages_of_ours_may(place: Place) -> None:
    assert place.predict(ROWS, headers={"Origin": f"http://127.0.0.1:{place.port}"})[0] == 200


@pytest.mark.parametrize(
    ("origin", "host"),
    [("http://localhost:3000", "localhost:3000"), ("https://predictor.example", "Predictor.Example"),
     ("https://predictor.example", "predictor.example:443"), ("http://[::1]:8000", "[::1]:8000")],
)  # fmt: skip
def test_a_tunnel_or_a_proxy_may_have_another_port(place: Place, origin: str, host: str) -> None:
    assert place.predict(ROWS, headers={"Origin": origin, "Host": host})[0] == 200
    other = place.predict(ROWS, headers={"Origin": origin, "Host": f"localhost:{place.port}"})
    assert other[0] == 403 and "are not allowed" in sentence(other[1])


# the server


def test_an_address_in_use_is_told_with_a_remedy() -> None:
    first = listen("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: address already in use; .*port 0"):
        listen("127.0.0.1", port)
    first.close()
    listen("127.0.0.1", port).close()
    for host, wrong in (("127.0.0.1", 65536), ("127.0.0.1", -1), ("no.such.host.invalid", 0), ("203.0.113.9", 0)):
        with pytest.raises(ValueError, match="cannot listen on"):
            listen(host, wrong)


def test_clients_that_come_before_the_server_runs_are_served() -> None:
    with answering(Recorder()) as batcher:
        app, listener = app_module.make_app(batcher, name="net", allowed_hosts=[]), listen("127.0.0.1", 0)
        address = listener.getsockname()
        done = threading.Event()
        early: list[int] = []
        client = threading.Thread(target=lambda: early.append(ask(address[1], "GET", "/v2/health/live")[0]))
        client.start()
        thread = threading.Thread(target=run_app, args=(app, listener, done.is_set))
        thread.start()
        client.join(PATIENCE_S)
        done.set()
        thread.join(PATIENCE_S)
        assert early == [200]


def test_it_serves_over_ipv6() -> None:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        with answering(Recorder()) as batcher, served(batcher, host="::1") as port:
            assert ask(port, "POST", "/predict", ROWS, host="::1")[0] == 200
        return
    pytest.skip("no IPv6 here")


def test_a_request_under_way_at_the_end_is_finished_and_idle_clients_do_not_hold_it_up() -> None:
    model = Recorder()
    with answering(model) as batcher:
        app, listener = app_module.make_app(batcher, name="net", allowed_hosts=[]), listen("127.0.0.1", 0)
        address = listener.getsockname()
        done = threading.Event()
        thread = threading.Thread(target=run_app, args=(app, listener, done.is_set))
        thread.start()
        with socket.create_connection(address, PATIENCE_S) as idle:
            idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle.recv(65536).startswith(b"HTTP/1.1 200")
            model.gate.clear()
            status: list[int] = []
            client = threading.Thread(target=lambda: status.append(ask(address[1], "POST", "/predict", ROWS)[0]))
            client.start()
            assert model.entered.wait(PATIENCE_S)
            done.set()
            _rest(idle)  # hung up: the end has begun
            model.gate.set()
            client.join(PATIENCE_S)
            thread.join(PATIENCE_S)
        assert status == [200] and not thread.is_alive()


def test_a_request_that_hangs_does_not_hold_up_the_end() -> None:
    model = Recorder()
    with answering(model) as batcher:
        with served(batcher) as port:
            model.gate.clear()
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as line:
                body = json.dumps(ROWS).encode()
                head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                line.sendall(head % len(body) + body)
                assert model.entered.wait(PATIENCE_S)
        model.gate.set()


def test_an_until_that_raises_ends_the_server_and_is_seen() -> None:
    def until() -> bool:
        raise LookupError("over")

    with answering(Recorder()) as batcher:
        app, listener = app_module.make_app(batcher, name="net", allowed_hosts=[]), listen("127.0.0.1", 0)
        address = listener.getsockname()
        with pytest.raises(LookupError, match="over"):
            run_app(app, listener, until)
        with pytest.raises(OSError):
            socket.create_connection(address, 1)


def test_nothing_is_said_and_signals_stay_as_they_were(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In the main thread, where uvicorn and asyncio would both set handlers."""
    caplog.set_level(logging.INFO)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen, rounds = [], iter(range(5))

    def until() -> bool:
        seen.append([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)])
        return next(rounds) == 4

    with answering(Recorder()) as batcher:
        run_app(app_module.make_app(batcher, name="net", allowed_hosts=[]), listen("127.0.0.1", 0), until)
    assert seen == [before] * 5
    assert capfd.readouterr() == ("", "") and caplog.records == []
