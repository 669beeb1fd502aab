"""`hora bench ps`: its pure parts, its processes, and the memory limit. Nothing here looks at how long it took."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from hora_benchmarks.bench import ps, ps_copy, ps_peers, ps_table
from hora_benchmarks.bench.process_pool import PoolContestant, ProcessPool, Result, gb_per_s

ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"updates_per_s": 4.0, "latency_s": 0.5, "server_cpu": 0.25}), flush=True)
"""
KEYS = ["name", "workers", "servers", "params", "updates_per_s", "gb_per_s", "latency_s"]


def result(rate: float, name: str = "a", params: int = 1000) -> Result:
    return Result(
        name=name, workers=2, servers=1, params=params, updates_per_s=rate, gb_per_s=gb_per_s(params, rate),
        latency_s=1 / rate,
    )  # fmt: skip


def echo(name: str = "echo", processes: int = 1, script: str = ECHO) -> PoolContestant:
    pool = ProcessPool(name, [[sys.executable, "-c", script]] * processes)
    return PoolContestant(name=name, pool=pool, workers=2, params=1000)


def alive(pid: int) -> bool:
    status = pathlib.Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("text", "params"), [("10M", 10_000_000), ("2.3m", 2_300_000), ("400K", 400_000), ("123", 123), ("1G", 10**9)]
)
def test_params_are_read_as_people_write_them(text: str, params: int) -> None:
    assert ps_table.params_of(text) == params


@pytest.mark.parametrize("text", ["", "M", "0", "-1M", "ten", "1.5", "nan", "inf", "1T"])
def test_params_that_are_no_number_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no number of parameters"):
        ps_table.params_of(text)


def test_params_are_written_as_they_are_read() -> None:
    assert [ps_table.params_text(n) for n in (10_000_000, 400_000, 123)] == ["10M", "400K", "123"]


def test_a_row_is_the_median_of_its_rounds_and_begins_with_the_promised_keys() -> None:
    row = ps_table.row_of([result(10.0), result(40.0), result(20.0)])
    assert list(row)[: len(KEYS)] == KEYS
    assert (row["updates_per_s"], row["updates_per_s_p10"], row["updates_per_s_p90"]) == (20.0, 10.0, 40.0)
    assert row["gb_per_s"] == pytest.approx(20 * 1000 * 8 / 1e9) and row["latency_s"] == 0.05
    assert json.loads(ps_table.json_text([row])) == row


def test_the_table_shows_the_share_of_the_memory_limit_and_the_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ps_table.row_of([result(rate, name)]) for name, rate in (("hora", 60.0), ("ray", 20.0))]
    rows.append(ps_table.row_of([result(120.0, ps_copy.NAME)]))
    ps_table.print_rates(rows, "title")
    ps_table.print_ratios(rows, ["hora"], ["ray", "absent"])
    shown = capsys.readouterr().out
    assert "50%" in shown and "17%" in shown and "1K" in shown
    assert "hora against ray" in shown and "3.00" in shown and "absent" not in shown


@pytest.mark.full
def test_the_memory_limit_is_measured_by_as_many_processes_as_workers() -> None:
    limit = ps_copy.copy_limit(params=1000, workers=2, seconds=0.05)
    assert (limit.name, limit.workers, limit.servers, limit.params) == (ps_copy.NAME, 2, 0, 1000)
    assert limit.updates_per_s > 0 and limit.latency_s > 0
    assert limit.gb_per_s == pytest.approx(gb_per_s(1000, limit.updates_per_s))


def test_a_process_pool_adds_up_the_updates_of_its_processes() -> None:
    one = echo(processes=2)
    try:
        one.start()
        measured = one.measure(0.0)
    finally:
        one.stop()
    assert (measured.updates_per_s, measured.latency_s, measured.server_cpu) == (8.0, 0.5, 0.25)


def test_a_failed_contestant_is_named_with_its_last_words_and_the_others_go_on() -> None:
    dying = echo("dying", script=ECHO.replace('print(json.dumps({"updates', "sys.exit('no memory') #"))
    results, failures = ps.measure([echo("living"), dying], rounds=2, seconds=0.0)
    assert len(results["living"]) == 2 and results["dying"] == []
    assert len(failures) == 1 and "dying" in failures[0] and "no memory" in failures[0]


@pytest.mark.skipif(not pathlib.Path("/proc/self/environ").exists(), reason="needs /proc")
def test_stop_ends_also_what_has_left_the_process_group(tmp_path: pathlib.Path) -> None:
    pids = tmp_path / "pid"
    daemon = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(50)'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(str(child.pid))\n"
    )
    one = echo(script=daemon + ECHO)
    one.start()
    pid = int(pids.read_text())
    assert alive(pid)
    one.stop()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)
    one.stop()


def test_a_peer_that_is_not_installed_is_left_out_with_a_sentence(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ps_peers.importlib.util, "find_spec", lambda name: None)
    found, missing = ps_peers.contestants(["ray/async", "ray/sync", "tensorflow"], workers=2, params=1000)
    assert found == [] and len(missing) == 2
    assert all("--install-peers" in sentence and str(tmp_path) in sentence for sentence in missing)
    with pytest.raises(RuntimeError, match="not installed"):
        ps_peers.measure("tensorflow", workers=2, params=1000, seconds=0.1)


def test_both_modes_of_ray_share_the_processes_of_an_installed_ray(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hora/peers/ray/lib/python3.11/site-packages/ray/__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ps_peers.python_of("ray") == str(tmp_path / "hora/peers/ray/bin/python")
    found, missing = ps_peers.contestants(["ray/async", "ray/sync"], workers=2, params=1000)
    assert [one.name for one in found] == ["ray/async", "ray/sync"] and missing == []
    assert found[0].pool is found[1].pool


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="there are: ray"):
        ps_peers.contestants(["mxnet"], workers=2, params=1000)
    with pytest.raises(ValueError, match="there are: ray"):
        ps_peers.install("mxnet")


@pytest.mark.full
def test_main_writes_a_line_per_contestant_and_size(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    code = ps.main(2, 1, [1000, 2000], str(out), rounds=2, peers=[], ours=lambda w, s, p: [echo()], seconds=0.02)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert code == 0 and [row["name"] for row in rows] == ["echo", ps_copy.NAME] * 2
    assert all(list(row)[: len(KEYS)] == KEYS and row["rounds"] == 2 for row in rows)
    assert "push-pull of float32, 2 workers" in capsys.readouterr().out


@pytest.mark.full
def test_an_interrupted_benchmark_leaves_no_process(tmp_path: pathlib.Path) -> None:
    script = "from hora_benchmarks.bench import ps; ps.main(2, 1, [1000], rounds=1000, peers=[], seconds=0.05)"
    bench = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, start_new_session=True)
    assert bench.stderr is not None
    for line in bench.stderr:
        if b"round 2" in line:
            break
    children = pathlib.Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
    os.kill(bench.pid, 2)
    bench.wait(20)
    bench.stderr.close()
    assert len(children) == 2 and not any(alive(int(pid)) for pid in children)
