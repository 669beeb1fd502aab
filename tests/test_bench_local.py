"""`hora bench local` counts the bytes that its strategies promise, over both kinds of links, and leaves nothing behind.

Nothing here looks at how long it took.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hora.cli import main
from hora.runs import exit_codes
from hora_benchmarks.bench import links, local, local_table
from hora_benchmarks.bench.models import WORKLOADS

pytestmark = pytest.mark.timeout(240)  # several processes import torch on whatever cores there are

EVERY = 4
MODEL = "cnn"
RATE = "1gbit"
OVERHEAD = 1.06  # headers, acknowledgements, the buffers of BatchNorm, and a census that says who had which gradient


@pytest.fixture(autouse=True)
def _no_namespace_is_left() -> Iterator[None]:
    before = set(links._namespaces())
    yield
    left = set(links._namespaces()) - before
    others = {name for name in left if _maker(name) != os.getpid() and os.path.exists(f"/proc/{_maker(name)}")}
    assert left <= others  # those are of a test beside this one


def _maker(name: str) -> int:
    return int(name.split("-")[1])


@pytest.fixture
def namespaces() -> None:
    problem = links.obstacle()
    if problem:
        pytest.skip(f"no network namespaces here: {problem}")


def model_bytes() -> int:
    return sum(p.numel() * p.element_size() for p in WORKLOADS[MODEL].build().parameters())


def rows_over(where: links.Links) -> dict[str, local.Row]:
    those = [local.contestant(name) for name in ("ring", f"local:every={EVERY}")]
    rows, failures = local.measure(2, those, RATE, where, MODEL, 1)
    assert not failures
    return {row["name"]: row for row in rows}


def check_bytes(rows: dict[str, local.Row], key: str) -> None:
    """Ring: 2(n−1)/n of the model in each step, here all of it. Local SGD: that much in one step of EVERY."""
    size = 2
    promised = 2 * (size - 1) / size * model_bytes()
    assert promised <= rows["ring"][key] <= OVERHEAD * promised
    assert promised / EVERY <= rows[f"local:every={EVERY}"][key] <= OVERHEAD * promised / EVERY


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("namespaces")
def test_in_namespaces_the_kernel_counts_what_the_strategies_promise() -> None:
    rows = rows_over(links.Namespaces(2, RATE))
    check_bytes(rows, "wire_bytes")
    check_bytes(rows, "sent_bytes")
    assert all("tc tbf" in row["links"] for row in rows.values())


@pytest.mark.full
def test_under_the_transports_limit_hora_counts_the_same_and_the_table_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = rows_over(links.Limited(2, RATE, "not root"))
    check_bytes(rows, "sent_bytes")
    assert all(row["wire_bytes"] is None for row in rows.values())
    local_table.print_rates(list(rows.values()), "title", rows["ring"]["links"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "rate limit of the transport, for what each worker sends, not of a wire" in shown and "not root" in shown


# -- what is left ------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("namespaces")
def test_ctrl_c_ends_the_workers_and_removes_their_namespaces() -> None:
    command = [sys.executable, "-m", "hora.cli.main", "bench", "local", "-n", "2", "--only", "ring"]
    bench = subprocess.Popen([*command, "--rates", RATE], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert bench.stderr is not None
        assert "starting ring" in bench.stderr.readline()
        ours = [name for name in links._namespaces() if name.startswith(f"hora-{bench.pid}-")]
        assert len(ours) == 3
        deadline = time.monotonic() + 20
        while not (pids := subprocess.check_output(["ip", "netns", "pids", ours[0]], text=True).split()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(bench.pid, signal.SIGINT)
        assert bench.wait(20) == exit_codes.INTERRUPTED
        assert not [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]
        assert not [name for name in links._namespaces() if name in ours]
    finally:
        bench.kill()
        bench.wait()
        assert bench.stderr is not None
        bench.stderr.close()


@pytest.mark.usefixtures("namespaces")
def test_what_a_killed_bench_left_is_swept_up_and_what_a_live_one_uses_is_not() -> None:
    script = (
        "import sys, time\nfrom hora_benchmarks.bench.links import Namespaces\n"
        f"with Namespaces(1, '{RATE}') as there:\n    print(there.host(0), flush=True)\n    time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        host = other.stdout.readline().strip()
        links.sweep()
        assert host in links._namespaces()
        other.kill()
        other.wait()
        assert host in links._namespaces()
        links.sweep()
        assert host not in links._namespaces()
    finally:
        other.kill()
        other.wait()
        assert other.stdout is not None
        other.stdout.close()


@pytest.mark.usefixtures("namespaces")
def test_namespaces_that_could_not_be_made_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BURST", "none")
    with pytest.raises(RuntimeError, match="tc -n"), links.Namespaces(2, RATE):
        pass
    assert [name for name in links._namespaces() if f"-{os.getpid()}-" in name] == []  # other processes make some too


def test_without_root_there_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert links.obstacle() == "not root"


# -- its pure parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "bits"), [("100mbit", 10**8), ("1gbit", 10**9), ("2.5Gbit", 2.5e9), ("9kbit", 9000)])
def test_rates_are_read_as_tc_reads_them(text: str, bits: int) -> None:
    assert links.bits_per_s(text) == bits


@pytest.mark.parametrize("text", ["", "100", "0mbit", "fast", "-1gbit", "1gbyte"])
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no rate"):
        links.bits_per_s(text)


def test_an_option_belongs_to_the_strategy_before_it() -> None:
    assert local.names("ring, diloco:every=32,wire=int8,ddp/gloo") == ["ring", "diloco:every=32,wire=int8", "ddp/gloo"]


def test_every_name_that_is_offered_is_a_contestant() -> None:
    those = {name: local.contestant(name) for name in (*local.DEFAULT, *local.FURTHER)}
    assert (those["ring"].every, those["local:every=8"].every, those["diloco:every=32"].every) == (1, 8, 32)
    assert those["diloco:every=32"].lead == 0 and those["diloco:every=32,overlap=31"].lead == 32
    assert (those[local.NONE].how, those[local.DDP].how) == ("alone", "ddp")


def test_a_name_that_is_none_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "local", "--only", "rang"]) == exit_codes.USAGE
    assert "unknown strategy 'rang'" in capsys.readouterr().err
    assert main.main(["bench", "local", "--rates", "fast"]) == exit_codes.USAGE
    assert "write for example 100mbit" in capsys.readouterr().err


def answer(seconds: float, num_bytes: int) -> local.Answer:
    return {"seconds": seconds, "wire_bytes": num_bytes, "sent_bytes": num_bytes, "exposed_s": 0.0}


def test_a_row_counts_the_slowest_worker_the_busiest_link_and_the_median_repeat() -> None:
    one = local.contestant("local:every=8")
    repeats = [[answer(2.0, 100), answer(seconds, 300)] for seconds in (4.0, 16.0, 8.0)]
    row = local.row_of(one, "mlp", "1kbit", repeats, links.Namespaces(2, "1kbit"))
    samples = 2 * 64 * 16
    assert (row["samples_per_s"], row["samples_per_s_min"], row["samples_per_s_max"]) == (
        samples / 8, samples / 16, samples / 4,
    )  # fmt: skip
    assert row["wire_bytes"] == 200 / 16 and row["link_use"] == 300 * 8 / 8 / 1000
    assert json.loads(json.dumps(row)) == row


def test_the_table_and_the_plot_hold_the_rings_multiples_against_the_targets(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    where = links.Namespaces(4, "100mbit")
    rows = [
        local.row_of(local.contestant(name), "mlp", "100mbit", [[answer(seconds, 10**8)] * 4], where)
        for name, seconds in (("ring", 20.0), ("local:every=8", 20.0), ("diloco:every=32", 40.0))
    ]
    local_table.print_rates(rows, "title", where.note)
    shown = capsys.readouterr().out
    assert "8.00" in shown and "6 reached" in shown and "15 missed" in shown
    pytest.importorskip("matplotlib")
    assert local_table.plot_rates(rows, "title", str(tmp_path / "out.png")) is None
    assert (tmp_path / "out.png").stat().st_size > 1000
