"""The page over a real socket: what it tells of runs, and every way in which a client can be wrong or hostile."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import resource
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from fake_runs import FakeRun, older
from pages import PATIENCE_S, Page, shown, until

from hora.dashboard import app as app_module
from hora.dashboard import feed as feed_module
from hora.dashboard.view import RunView
from hora.http import server as http_module
from hora.runs.run_directory import DATABASE

PATHS = ["/", "/runs/one", "/compare", "/static/style.css", "/favicon.ico", "/metrics", "/api/runs", "/api/runs/one",
         "/api/runs/one/live", "/api/runs/one/predictor", "/nowhere"]  # fmt: skip


@pytest.fixture
def home(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def story(home: pathlib.Path) -> Iterator[FakeRun]:
    story = FakeRun(home, "one", size=2)
    for _ in range(10):
        story.go(4)
    yield story
    story.end()


@pytest.fixture
def page(home: pathlib.Path) -> Iterator[Page]:
    with shown(home) as page:
        yield page


# what it tells


def test_a_live_run_is_told_whole(page: Page, story: FakeRun) -> None:
    told = page.get("/api/runs/one")
    assert (told["name"], told["live"], told["state"]) == ("one", True, "running")
    assert told["now"]["step"] == 40 and told["run"]["command"] == ["train.py", "--lr", "0.1"]
    assert {"value/loss", "speed", "rank/1/compute"} <= told["curves"].keys()
    assert len(told["curves"]["value/loss"]["points"]) == 40
    assert [event["kind"] for event in told["events"]][:2] == ["joined", "joined"]
    assert [one["step"] for one in told["histograms"]["grad/fc1"]] == [20, 40]


def test_a_run_tells_how_its_strategy_describes_itself(page: Page, home: pathlib.Path) -> None:
    run = FakeRun(home, "two", strategy="ps:mode=async", servers=1)
    told = page.get("/api/runs/two")["strategy"]
    assert (told["topology"], told["unit"], told["synchronous"]) == ("ps", "step", False)
    assert told["options"]["mode"] == "async"
    run.end()


@pytest.mark.parametrize(("code", "state"), [(0, "ended"), (3, "failed"), (130, "stopped")])
def test_an_ended_run_is_told_by_the_same_words(page: Page, story: FakeRun, code: int, state: str) -> None:
    live = page.get("/api/runs/one")
    story.end(code=code)
    time.sleep(0.6)  # what was told is kept for others as long
    told = page.get("/api/runs/one")
    assert told.keys() == live.keys()
    assert (told["live"], told["state"], told["end"]["code"]) == (False, state, code)
    assert told["summary"]["samples"] == 40 * 64 * 2


def test_the_list_has_live_runs_first(page: Page, home: pathlib.Path) -> None:
    stories = [FakeRun(home, name) for name in ("a", "b", "c")]
    for story in stories:
        story.go(4)
    stories[2].end()
    stories[1].leave()
    older(home, "d")
    listed = {run["name"]: run for run in page.get("/api/runs")["runs"]}
    assert next(iter(listed)) == "a" and [*listed][-1] == "d"
    assert [listed[name]["state"] for name in "abcd"] == ["running", "lost", "ended", "ended"]
    assert listed["c"]["samples"] == 4 * 64 * 4 and listed["c"]["values"]["loss"] > 0
    assert not listed["d"]["remembered"] and listed["d"]["seconds"] == 12.5
    stories[0].end()


def test_a_run_without_a_memory_says_what_is_known(page: Page, home: pathlib.Path) -> None:
    older(home, "old", code=1, cause="rank 1 failed")
    told = page.get("/api/runs/old")
    assert (told["state"], told["remembered"], told["curves"]) == ("failed", False, {})
    assert told["end"]["cause"] == "rank 1 failed" and "now" not in told


def test_a_memory_of_another_version_is_named_with_the_way_out(page: Page, home: pathlib.Path, story: FakeRun) -> None:
    story.end()
    with sqlite3.connect(home / "one" / DATABASE) as database:
        database.execute("PRAGMA user_version = 7")
    told = page.get("/api/runs/one")
    assert "another version of Hora (schema 7" in told["problem"] and "delete the directory" in told["problem"]
    assert "another version of Hora" in page.get("/api/runs")["runs"][0]["problem"]


@pytest.mark.parametrize("junk", [b"", b"no database at all" * 100])
def test_a_memory_that_is_none_is_named(page: Page, home: pathlib.Path, story: FakeRun, junk: bytes) -> None:
    story.end()
    (home / "one" / DATABASE).write_bytes(junk)
    assert page.get("/api/runs/one")["problem"] and page.get("/api/runs")["runs"][0]["problem"]


def test_a_run_elsewhere_is_shown_by_its_name(tmp_path: pathlib.Path, home: pathlib.Path) -> None:
    story = FakeRun(tmp_path / "elsewhere", "x")
    story.go(4)
    os.unlink(story.path / "run.json")  # as where the run directory cannot be written
    story.database.put("config", {"command": ["t.py"]})
    story.write()
    with shown(home, x=str(story.path)) as page:
        told = page.get("/api/runs/x")
        assert told["live"] and told["run"] == {"command": ["t.py"]} and page.get("/api/runs")["runs"][0]["name"] == "x"
        story.database.put("end", {"code": 0})
        story.event("end", "run", "over")
        story.write()
        until(lambda: not page.get("/api/runs/x")["live"])
    story.leave()


# the stream


def test_a_stream_begins_with_all_and_goes_on_with_what_changes(page: Page, story: FakeRun) -> None:
    with page.stream("one") as stream:
        assert stream.status == 200 and stream.headers["content-type"].startswith("text/event-stream")
        kind, told = stream.next() or ("", {})
        assert kind == "whole" and told["now"]["step"] == 40
        story.go(4)
        kind, told = stream.next() or ("", {})
        assert kind == "change" and told["now"]["step"] == 44
        assert [point[0] for point in told["curves"]["value/loss"]["points"]] == [41, 42, 43, 44]
        assert not told["curves"]["value/loss"]["whole"] and "run" not in told


def test_a_stream_says_that_the_run_has_ended(page: Page, story: FakeRun) -> None:
    with page.stream("one") as stream:
        assert (stream.next() or ("",))[0] == "whole"
        story.end()
        kinds, states = [], set()
        while (event := stream.next()) is not None:
            kinds.append(event[0])
            states.add(event[1].get("state"))
        assert kinds[-1] == "end" and "ended" in states


def test_a_launcher_that_was_killed_ends_the_stream(page: Page, story: FakeRun) -> None:
    with page.stream("one") as stream:
        assert (stream.next() or ("",))[0] == "whole"
        story.leave()
        while (event := stream.next()) is not None:
            last = event
        assert last[0] == "end"


def test_a_run_that_begins_anew_is_told_anew(page: Page, story: FakeRun, home: pathlib.Path) -> None:
    with page.stream("one") as stream:
        assert (stream.next() or ("",))[0] == "whole"
        story.database.close()
        story.database = type(story.database)(str(home / "one" / DATABASE), story._warn)
        story.run_state = type(story.run_state)(run="one", size=2, strategy="ring")
        story.step = 0
        story.go(2)
        told = until(lambda: next((data for kind, data in [stream.next() or ("", {})] if kind == "whole"), None))
        assert until(lambda: told.get("now", {}).get("step") == 2 or (stream.next() or ("", {}))[1]["now"]["step"] == 2)


def test_all_watchers_share_one_poller_and_nobody_is_no_poll(
    page: Page, story: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    change = RunView.change

    def counted(view: RunView) -> tuple[bytes, bool] | None:
        looks.append(time.monotonic())
        return change(view)

    monkeypatch.setattr(RunView, "change", counted)
    with page.stream("one") as first, page.stream("one") as second, page.stream("one") as third:
        for stream in (first, second, third):
            assert (stream.next() or ("",))[0] == "whole"
        until(lambda: len(looks) > 5)
        assert min(b - a for a, b in itertools.pairwise(looks)) >= feed_module.EVERY_S * 0.9
    time.sleep(3 * feed_module.EVERY_S)
    count = len(looks)
    time.sleep(3 * feed_module.EVERY_S)
    assert len(looks) == count


def test_streams_beyond_the_limit_are_told_to_ask(page: Page, story: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_STREAMS", 3)
    with page.stream("one") as first, page.stream("one") as second:
        with page.stream("one") as third:
            for stream in (first, second, third):
                assert stream.next()
            with page.stream("one") as fourth:
                assert fourth.status == 503 and "ask now and then" in fourth.body()["error"]
                assert fourth.headers["retry-after"]
            assert page.get("/api/runs/one")["name"] == "one"

        def again() -> bool:
            with page.stream("one") as stream:
                return stream.status == 200

        assert until(again)  # the third has gone


def test_who_does_not_read_is_let_go(home: pathlib.Path, story: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "TAKE_S", 0.3)
    with shown(home, send_bytes=4096) as page, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", page.port))
        line.sendall(b"GET /api/runs/one/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(20):
            story.go(50)
            time.sleep(0.1)
        line.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):
            while line.recv(1 << 16):  # it ends; a stream that goes on would wait for more and time out
                continue
        assert page.get("/api/runs/one")["live"]


# who may not


@pytest.mark.parametrize("path", PATHS)
def test_other_hosts_and_origins_are_refused_everywhere(page: Page, story: FakeRun, path: str) -> None:
    for headers in ({"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example:80"}, {"Origin": "http://evil.example"},
                    {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}):  # fmt: skip
        status, said, answer = page.ask(path, **headers)
        assert status == 403 and "error" in said
        assert "default-src 'none'" in answer["Content-Security-Policy"]


def test_a_post_from_another_page_reaches_nobody(page: Page, story: FakeRun) -> None:
    assert page.ask("/api/runs/one/predict", "POST", [[1]], Origin="http://evil.example")[0] == 403
    assert page.ask("/api/runs/one", "POST", [[1]])[0] == 405
    assert page.ask("/api/runs/one", "DELETE")[0] == 405


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:8320", "trainer.example"])
def test_our_own_names_may(page: Page, story: FakeRun, host: str) -> None:
    assert page.ask("/api/runs", Host=host)[0] == 200
    assert page.ask("/runs/one", Host=host, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


@pytest.mark.parametrize("path", ["/", "/runs/one", "/compare", "/static/run.js", "/api/runs/one", "/metrics"])
def test_every_answer_has_a_strict_policy(page: Page, story: FakeRun, path: str) -> None:
    _, _, headers = page.ask(path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"
    stored = "no-store" if path.startswith(("/api", "/metrics")) else "no-cache"
    assert headers["Cache-Control"] == stored


@pytest.mark.parametrize("name", ["..", "%2e%2e", "..%2fother", "a%2f..%2fone", "%00", "one%00", "a" * 65, "-one",
                                  "one\\x", "%3Cimg%20src%3Dx%3E"])  # fmt: skip
def test_names_that_are_none_lead_nowhere(page: Page, story: FakeRun, name: str) -> None:
    (page.home.parent / "run.json").write_text(json.dumps({"name": ".."}))
    for path in (f"/api/runs/{name}", f"/api/runs/{name}/live", f"/runs/{name}"):
        assert page.ask(path)[0] == 404


@pytest.mark.parametrize("file", ["..%2fapp.py", "%2e%2e%2fapp.py", "nothing.js", "style.css%00"])
def test_only_static_files_are_static(page: Page, file: str) -> None:
    assert page.ask(f"/static/{file}")[0] == 404


def test_links_out_of_the_home_are_not_followed(page: Page, home: pathlib.Path) -> None:
    secret = FakeRun(home.parent / "secret", "s")
    secret.end()
    (home / "s").symlink_to(secret.path)
    assert page.ask("/api/runs/s")[0] == 404 and page.get("/api/runs")["runs"] == []
    (home / "t").mkdir()
    (home / "t" / "run.json").write_text("{}")
    (home / "t" / DATABASE).symlink_to(secret.path / DATABASE)
    assert page.get("/api/runs/t")["curves"] == {}
    (home / "u").mkdir()
    (home / "u" / "run.json").symlink_to(secret.path / "run.json")
    assert page.ask("/api/runs/u")[0] == 404


@pytest.mark.parametrize("told", [b"", b"[]", b"{", b'{"name": 5, "size": "x", "strategy": [], "command": "x"}',
                                  b"[" * 100_000])  # fmt: skip
def test_a_run_json_of_anything_breaks_nothing(page: Page, home: pathlib.Path, told: bytes) -> None:
    (home / "odd").mkdir()
    (home / "odd" / "run.json").write_bytes(told)
    page.get("/api/runs")
    assert page.ask("/api/runs/odd")[0] in (200, 404)
    page.get("/metrics")


def test_a_thousand_connections_hurt_nobody(page: Page, story: FakeRun) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:  # both ends of each are in this process
        if hard != resource.RLIM_INFINITY and hard < 4096:
            pytest.skip(f"needs 4096 descriptors, and only {hard} may be had")
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    lines = []
    try:
        for number in range(1000):
            lines.append(socket.create_connection(("127.0.0.1", page.port), PATIENCE_S))
            if number % 3 == 0:
                lines[-1].sendall(b"GET /api/runs/one HTTP/1.1\r\nHost: localhost\r\n\r\n")
            elif number % 3 == 1:
                lines[-1].sendall(b"GET /api/runs/one/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert page.get("/api/runs/one")["name"] == "one"
    finally:
        for line in lines:
            line.close()
    assert page.get("/api/runs")["runs"][0]["name"] == "one"


def test_large_answers_that_nobody_takes_are_bounded(
    home: pathlib.Path, story: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "MAX_LARGE", 3)
    monkeypatch.setattr(http_module, "TAKE_S", 60.0)
    wide = FakeRun(home, "wide", size=16)
    for _ in range(150):
        wide.go(4)
    with shown(home, send_bytes=4096) as page, contextlib.ExitStack() as open_lines:
        assert len(json.dumps(page.get("/api/runs/wide"))) > 400_000, "more than all buffers on its way hold"

        def is_answered() -> bool:
            """One more that asks and takes nothing but the first word of its answer."""
            line = open_lines.enter_context(socket.socket())
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.settimeout(PATIENCE_S)
            line.connect(("127.0.0.1", page.port))
            line.sendall(b"GET /api/runs/wide HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return b" 200 " in line.recv(16)  # not so while the last one's answer still counts

        for _ in range(3):
            until(is_answered)
        until(lambda: page.ask("/api/runs/wide")[0] == 503)
        assert page.get("/api/runs")["runs"]
        open_lines.close()
        until(lambda: page.ask("/api/runs/wide")[0] == 200)
    wide.end()


def test_no_torch_is_imported() -> None:
    modules = "hora.dashboard.app, hora.cli.dashboard, hora.dashboard.__main__"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "False", done.stderr
