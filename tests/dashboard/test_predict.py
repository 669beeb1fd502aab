"""The box that asks the run's predictor: only the one that the run database names, and only on this machine."""

from __future__ import annotations

import contextlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

import pytest
from fake_runs import FakeRun
from pages import shown

from hora.dashboard import predict
from hora.http.errors import HttpError


class Answers(http.server.BaseHTTPRequestHandler):
    """A predictor that says what it was asked."""

    def do_GET(self) -> None:
        if self.path == "/":
            self._say({"name": "net", "ready": True, "step": 7})
        else:
            self._say({"name": "net", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]})

    def do_POST(self) -> None:
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if rows == "long":
            self._say("x" * (predict.MAX_BYTES + 10))
        elif rows == "bad":
            self._say({"error": "no rows"}, 400)
        else:
            self._say({"outputs": rows, "path": self.path, "host": self.headers["Host"], "step": 7})

    def _say(self, told: object, status: int = 200) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Not to the test's output."""


@pytest.fixture
def address() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_predictor_is_asked_where_the_run_says(tmp_path: pathlib.Path, address: str) -> None:
    story = FakeRun(tmp_path, "one", serving=address)
    with shown(tmp_path) as page:
        told = page.get("/api/runs/one/predictor")
        assert (told["serving"], told["ready"], told["step"], told["problem"]) == (address, True, 7, "")
        assert told["inputs"][0]["shape"] == [-1, 2]
        status, said, headers = page.ask("/api/runs/one/predict", "POST", [[1, 2]])
        assert status == 200 and said["outputs"] == [[1, 2]] and said["path"] == "/predict"
        assert said["host"] == address.removeprefix("http://") and headers["Cache-Control"] == "no-store"
        assert page.ask("/api/runs/one/predict", "POST", "bad")[:2] == (400, {"error": "no rows"})
        assert page.ask("/api/runs/one/predict", "POST", "long")[0] == 502
        assert page.ask("/api/runs/one/predict", "POST", b"x" * (2 << 20))[0] == 413
        story.end()
        status, said, _ = page.ask("/api/runs/one/predict", "POST", [[1, 2]])
        assert (status, said["error"]) == (409, "the run has ended, and its predictor with it")
        FakeRun(tmp_path, "two").end()
        status, said, _ = page.ask("/api/runs/two/predict", "POST", [[1, 2]])
        assert status == 409 and "--serve" in said["error"]


def test_a_predictor_that_is_gone_is_named(tmp_path: pathlib.Path) -> None:
    story = FakeRun(tmp_path, "one", serving="http://127.0.0.1:1")
    with shown(tmp_path) as page:
        status, said, _ = page.ask("/api/runs/one/predict", "POST", [[1, 2]])
        assert status == 502 and "cannot be reached" in said["error"]
        assert "cannot be reached" in page.get("/api/runs/one/predictor")["problem"]
    story.end()


@pytest.mark.parametrize("where", ["http://192.0.2.1:80", "http://example.com:80", "https://127.0.0.1:80", "file:///etc/passwd",
                                   "http://127.0.0.1:80/secret", "http://user@127.0.0.1:80", "http://127.0.0.1",
                                   "http://127.0.0.1:x", "http://[::1", "http://2130706433:80",
                                   "http://169.254.169.254:80"])  # fmt: skip
def test_a_memory_sends_nobody_elsewhere(where: str) -> None:
    with pytest.raises(HttpError, match="not on this machine"):
        predict._host_and_port(where)


@pytest.mark.parametrize(
    ("where", "place"),
    [("http://127.0.0.1:8000", ("127.0.0.1", 8000)), ("http://0.0.0.0:8000", ("127.0.0.1", 8000)),
     ("http://[::1]:8000", ("::1", 8000)), ("http://localhost:8000/", ("localhost", 8000))],
)  # fmt: skip
def test_this_machine_may_be_asked(where: str, place: tuple[str, int]) -> None:
    assert predict._host_and_port(where) == place
