"""Span files of all processes become one trace that ui.perfetto.dev opens."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import random
import tracemalloc
from typing import Any

import pytest

import spanfiles
from hora.monitor import trace
from hora.monitor.trace import TraceThreads

TRAINING, COMMUNICATION, SERVER = "training", "communication", "server"

STEP = [
    [TRAINING, "data", 0, 1],
    [TRAINING, "forward", 1, 3],
    [TRAINING, "launch", 3.5, 4, {"bucket": 0}],
    [TRAINING, "launch", 4.5, 5, {"bucket": 1}],
    [COMMUNICATION, "bucket 0", 3.5, 6, {"bucket": 0, "bytes": 10}],
    [TRAINING, "waiting", 6, 8],
    [COMMUNICATION, "bucket 1", 4.5, 8, {"bucket": 1, "bytes": 20}],
    [TRAINING, "exchange", 5.5, 8],
    [TRAINING, "backward", 3, 8.5],
    [TRAINING, "step", 9, 10, {"step": 1, "optimizer": 0}],
]


def merged(folder: pathlib.Path, name: str = "run.json") -> tuple[str, list[dict[str, Any]]]:
    words = trace.merge(str(folder), str(folder / name))
    data = (folder / name).read_bytes()
    return words, spanfiles.check(json.loads(gzip.decompress(data) if name.endswith("gz") else data))


def spans_of(events: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and all(e.get(key) == value for key, value in wanted.items())]


def names_of(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


def test_every_process_and_lane_has_its_place(tmp_path: pathlib.Path) -> None:
    spanfiles.write(tmp_path, "worker", 1, STEP)
    spanfiles.write(tmp_path, "worker", 0, STEP, perf_ns=2000 * spanfiles.MS, time_ns=10**18 + 1000 * spanfiles.MS)
    spanfiles.write(tmp_path, "server", 0, [[SERVER, "update", 1, 2, {"worker": 1}], [SERVER, "serving", 0, 3]])
    words, events = merged(tmp_path)
    assert f"{2 * len(STEP) + 2} spans of 3 processes" in words and "ui.perfetto.dev" in words
    who = {pid: name for (pid, _), name in names_of(events, "process_name").items()}
    assert who == {1: "rank 0 (host a, pid 100)", 2: "rank 1 (host a, pid 101)", 3: "server 0 (host a, pid 100)"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == [1, 2, 3]
    lanes = names_of(events, "thread_name")
    assert sorted(name for (pid, _), name in lanes.items() if pid == 1) == [
        COMMUNICATION,
        f"{COMMUNICATION} 2",
        TRAINING,
    ]
    assert [name for (pid, _), name in lanes.items() if pid == 3] == [SERVER]
    forward = spans_of(events, name="forward")
    assert [(e["pid"], e["ts"], e["dur"]) for e in forward] == [(1, 1_001_000, 2000), (2, 1000, 2000)]
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0
    assert spans_of(events, name="bucket 1", pid=1)[0]["args"] == {"bucket": 1, "bytes": 20}


def test_a_buckets_launch_points_to_its_journey(tmp_path: pathlib.Path) -> None:
    spanfiles.write(tmp_path, "worker", 0, STEP)
    spanfiles.write(tmp_path, "worker", 1, STEP)
    _, events = merged(tmp_path)
    begins, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert begins.keys() == ends.keys() and len(begins) == 4
    lanes = names_of(events, "thread_name")
    for number, begin in begins.items():
        assert lanes[begin["pid"], begin["tid"]] == TRAINING
        assert lanes[ends[number]["pid"], ends[number]["tid"]].startswith(COMMUNICATION)
        journey = [e for e in spans_of(events, pid=begin["pid"], tid=ends[number]["tid"]) if e["ts"] == begin["ts"]]
        assert journey[0]["ts"] <= ends[number]["ts"] <= journey[0]["ts"] + journey[0]["dur"]


def test_hosts_with_other_clocks_are_put_beside_each_other_by_the_time_of_day(tmp_path: pathlib.Path) -> None:
    ms = spanfiles.MS
    spanfiles.write(tmp_path, "worker", 0, STEP, perf_ns=5000 * ms, time_ns=10**18)
    spanfiles.write(tmp_path, "worker", 1, STEP, host="b", clock="two", perf_ns=77 * ms, time_ns=10**18 + 40 * ms)
    _, events = merged(tmp_path)
    assert [e["ts"] for e in spans_of(events, name="data")] == [0, 40_000]


def test_the_queue_of_a_server_is_a_curve(tmp_path: pathlib.Path) -> None:
    serving = [[SERVER, "serving", at, at + 1, {"queue": queue}] for at, queue in enumerate([0, 0, 3, 3, 0])]
    spanfiles.write(tmp_path, "server", 0, serving)
    _, events = merged(tmp_path)
    counts = [(e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counts == [(1000, {"gradients": 0}), (3000, {"gradients": 3}), (5000, {"gradients": 0})]


def test_any_spans_nest_or_follow_each_other_on_their_threads(tmp_path: pathlib.Path) -> None:
    dice = random.Random(4)
    spans = []
    for lane in (TRAINING, COMMUNICATION, SERVER):
        for _ in range(400):
            begin = dice.randrange(1000)
            spans.append([lane, "x", begin, begin + dice.choice([0, 1, 5, 60])])
    dice.shuffle(spans)  # in the order of their ends only in a window
    spanfiles.write(tmp_path, "worker", 0, spans)
    _, events = merged(tmp_path)
    assert len(spans_of(events)) == 1200


def test_what_nests_stays_on_one_thread_and_what_overlaps_takes_few() -> None:
    nested, beside = TraceThreads(nests=True), TraceThreads(nests=False)
    assert [nested.place(*span) for span in [(1, 2), (3, 4), (0, 5), (6, 7), (6, 8)]] == [0] * 5
    assert [nested.place(*span) for span in [(7, 9)]] == [1], "it straddles the end of one"
    assert [beside.place(*span) for span in [(0, 4), (1, 5), (2, 6), (5, 7), (4, 8), (6, 9)]] == [0, 1, 2, 1, 0, 2]


def test_it_is_compressed_if_its_name_says_so(tmp_path: pathlib.Path) -> None:
    spanfiles.write(tmp_path, "worker", 0, STEP)
    _, events = merged(tmp_path, "run.json.gz")
    assert len(spans_of(events)) == len(STEP)


def test_a_damaged_file_is_named_and_the_rest_is_used(tmp_path: pathlib.Path) -> None:
    spanfiles.write(tmp_path, "worker", 0, STEP)
    path = spanfiles.write(tmp_path, "worker", 1, STEP)
    lines = path.read_bytes().split(b"\n")
    lines[3] = b"\xff\x00 nonsense"
    lines[5] = b'["training", "backwards", 5, -5, null]'
    path.write_bytes(b"\n".join(lines))
    (tmp_path / "worker-2.spans").write_text("no header\n")
    (tmp_path / "worker-3.spans").write_text("")
    (tmp_path / "other.txt").write_text("not ours")
    words, events = merged(tmp_path)
    assert "rank 1 (host a, pid 101): 2 lines of it are damaged" in words
    assert "worker-2.spans is left out" in words and "worker-3.spans is left out" in words and "other" not in words
    assert [len(spans_of(events, pid=pid)) for pid in (1, 2)] == [len(STEP), len(STEP) - 2]


def test_a_process_that_was_killed_as_it_wrote_is_not_damaged(tmp_path: pathlib.Path) -> None:
    path = spanfiles.write(tmp_path, "worker", 0, STEP)
    path.write_bytes(path.read_bytes()[:-9])
    words, events = merged(tmp_path)
    assert "damaged" not in words and len(spans_of(events)) == len(STEP) - 1


def test_a_file_that_says_it_was_cut_short_is_quoted(tmp_path: pathlib.Path) -> None:
    path = spanfiles.write(tmp_path, "worker", 0, STEP)
    path.write_text(path.read_text() + '{"note": "it ends here"}\n')
    assert "rank 0 (host a, pid 100): it ends here" in merged(tmp_path)[0]


def test_a_place_that_cannot_be_written_is_said_and_what_was_there_stays(tmp_path: pathlib.Path) -> None:
    spanfiles.write(tmp_path, "worker", 0, STEP)
    with pytest.raises(ValueError, match=r"nowhere/run\.json cannot be written: No such file"):
        trace.merge(str(tmp_path), str(tmp_path / "nowhere" / "run.json"))
    old = tmp_path / "old.json"
    old.write_text("the old one")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match=r"folder\.json cannot be written"):
        trace.merge(str(tmp_path), str(tmp_path / "folder.json"))
    with pytest.raises(ValueError, match="no process has left any spans"):
        trace.merge(str(tmp_path / "folder.json"), str(old))
    assert old.read_text() == "the old one"
    assert sorted(os.listdir(tmp_path)) == ["folder.json", "old.json", "worker-0.spans"], "no temporary file is left"


def test_memory_does_not_grow_with_the_run(tmp_path: pathlib.Path) -> None:
    def peak(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        spanfiles.write(folder, "worker", 0, [[TRAINING, f"span {at}", at, at + 0.5] for at in range(count)])
        tracemalloc.start()
        try:
            trace.merge(str(folder), str(folder / "run.json"))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(12_000) < 1.3 * peak(5_000)
