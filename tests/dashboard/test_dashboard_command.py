"""`hora dashboard`, and `python -m hora.dashboard` on a socket that it was given."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from fake_runs import FakeRun, older
from pages import PATIENCE_S, Page

from hora.cli.dashboard import dashboard
from hora.http.listening import listen, listen_near

RUN = "from hora.cli.dashboard import dashboard; dashboard()"


@contextlib.contextmanager
def started(*words: str, state: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "XDG_STATE_HOME": str(state)},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def get(port: int, path: str, host: str = "localhost") -> tuple[int, Any]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    line.request("GET", path, headers={"Host": host})
    answer = line.getresponse()
    said = json.loads(answer.read())
    line.close()
    return answer.status, said


def test_dashboard_prints_its_address_moves_from_a_taken_port_and_ends_well(tmp_path: pathlib.Path) -> None:
    older(tmp_path / "hora" / "runs", "old")
    elsewhere = FakeRun(tmp_path / "out", "mine")
    elsewhere.end()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("--port", str(port), "--run-dir", str(elsewhere.path), "--host-name", "trainer.example")
        with started(*words, state=tmp_path) as process:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            match = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
            assert match is not None and int(match[1]) > port and "2 runs" in line
            assert process.stderr.readline() == f"port {port} is taken; using port {match[1]}\n"
            told = get(int(match[1]), "/api/runs", host="trainer.example:80")[1]
            assert {run["name"] for run in told["runs"]} == {"old", "mine"}
            assert get(int(match[1]), "/api/runs", host="other.example")[0] == 403
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
            assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--port", "x"), "--port takes [HOST:]PORT, not 'x'"),
        (("--port", "70000"), "--port takes [HOST:]PORT"),
        (("--port", "192.0.2.1:8320"), "cannot listen on 192.0.2.1:8320"),
        (("--run-dir", "/nowhere/at/all"), "there is no run in /nowhere/at/all"),
    ],
)
def test_dashboard_refuses_in_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    done = CliRunner().invoke(dashboard, words)
    assert done.exit_code == 2 and sentence in done.output


def test_two_directories_of_one_name_are_refused(tmp_path: pathlib.Path) -> None:
    for folder in ("a", "b"):
        older(tmp_path / folder, "same")
    done = CliRunner().invoke(dashboard, ["--run-dir", str(tmp_path / "a/same"), "--run-dir", str(tmp_path / "b/same")])
    assert done.exit_code == 2 and "'same'" in done.output


def test_a_port_that_is_taken_gives_way_to_the_next_free_one() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with listen_near("127.0.0.1", port) as second:
            assert port < second.getsockname()[1] <= port + 100


@pytest.mark.parametrize("how", ["stdin", "signal"])
def test_the_page_serves_on_an_inherited_socket(tmp_path: pathlib.Path, how: str) -> None:
    """The connection that came before the process did is answered too."""
    story = FakeRun(tmp_path / "away", "r")
    story.go(4)
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), PATIENCE_S) as early:
        early.sendall(b"GET /api/runs/r HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        fd = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "hora.dashboard", "--fd", str(fd), "--home", str(tmp_path / "none"), "--run",
             f"r={story.path}"],
            pass_fds=[fd], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            answer = b""
            while chunk := early.recv(65536):
                answer += chunk
            assert answer.startswith(b"HTTP/1.1 200") and b'"value/loss"' in answer
            assert process.stdin is not None and process.stderr is not None
            if how == "stdin":
                process.stdin.close()
            else:
                process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0 and process.stderr.read() == b""
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stderr.close()
    story.end()


def test_what_is_no_socket_is_named(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hora.dashboard", "--fd", "99", "--home", str(tmp_path)], capture_output=True, text=True,
        timeout=50, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2 and "--fd 99 is not a socket" in done.stderr


def test_who_watches_sees_the_end_though_the_page_ends_with_the_launcher(tmp_path: pathlib.Path) -> None:
    """The launcher writes the database's last word, lets the page go, and only then writes end.json."""
    story = FakeRun(tmp_path, "r")
    story.go(4)
    with listen("127.0.0.1", 0) as listener:
        fd = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "hora.dashboard", "--fd", str(fd), "--home", str(tmp_path)],
            pass_fds=[fd], stdin=subprocess.PIPE,
        )  # fmt: skip
        try:
            with Page(listener.getsockname()[1], tmp_path).stream("r") as stream:
                assert (stream.next() or ("",))[0] == "whole"
                story.database.put("end", {"code": 3, "cause": "rank 1 failed"})
                story.event("end", "run", "rank 1 failed")
                story.write()
                assert process.stdin is not None
                process.stdin.close()
                events = []
                while (event := stream.next()) is not None:
                    events.append(event)
            assert [kind for kind, _ in events] == ["change", "end"]
            assert events[0][1]["state"] == "failed" and events[0][1]["end"]["code"] == 3
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
    story.end()
