"""`hora bench hosts` holds what it measured against what the links allow, and leaves no namespace behind.

Nothing here looks at how long it took.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from hora.cli import main
from hora.runs import exit_codes
from hora_benchmarks.bench import hosts, hosts_mpi, hosts_table, hosts_turns, limits, links
from hora_benchmarks.bench.process_pool import ProcessPool

pytestmark = pytest.mark.timeout(240)  # several processes import torch on whatever cores there are

GBIT = 10**9
SIZE = 1 << 20


@pytest.fixture(autouse=True)
def _no_namespace_is_left() -> Iterator[None]:
    before = {name for name in links._namespaces() if f"-{os.getpid()}-" in name}
    yield
    assert {name for name in links._namespaces() if f"-{os.getpid()}-" in name} <= before


@pytest.fixture
def namespaces() -> None:
    problem = links.obstacle()
    if problem:
        pytest.skip(f"no network namespaces here: {problem}")


# -- over real links ---------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("namespaces")
def test_two_hosts_all_reduce_and_each_link_carries_what_the_ring_promises(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hosts.peers, "mpi_version", lambda: None)
    path = tmp_path / "out.jsonl"
    command = ["bench", "hosts", "--hosts-sim", "2", "--sizes", "1M", "--rounds", "1", "--parts", "allreduce"]
    assert main.main([*command, "--json", str(path)]) == exit_codes.OK
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    flat = {(row["name"], row["per_host"]): row["wire_bytes"] / row["bytes"] for row in rows}
    assert set(flat) == {(name, per_host) for name in ("ring", "auto", "gloo") for per_host in (1, 2)}
    promised = 2 * (2 - 1) / 2
    assert all(promised <= flat["ring", per_host] <= 1.1 * promised for per_host in (1, 2)), flat
    shown = capsys.readouterr().out
    assert "2 hosts × 1" in shown and "2 hosts × 2" in shown and "left out: mpirun" in shown


@pytest.mark.usefixtures("namespaces")
def test_ranks_of_one_host_share_its_namespace_and_are_told_so() -> None:
    with links.Namespaces(2, "1gbit") as where:
        commands = [where.command(rank, 3, size=4, per_host=2) for rank in range(4)]
        said = [subprocess.check_output([*command, "env"], text=True, timeout=20).splitlines() for command in commands]
        places = [
            subprocess.check_output([*command, "readlink", "/proc/self/ns/net"], text=True, timeout=20)
            for command in commands
        ]
    assert places[0] == places[1] != places[2] == places[3]
    for rank, lines in enumerate(said):
        told = dict(line.split("=", 1) for line in lines if "=" in line)
        assert (told["RANK"], told["WORLD_SIZE"]) == (str(rank), "4")
        assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
        assert told["HORA_BIND"] == where.address(rank // 2) and told["MASTER_ADDR"] == where.address(0)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is not installed")
def test_the_agent_runs_a_command_on_the_host_that_is_named(tmp_path: pathlib.Path) -> None:
    agent = tmp_path / "agent"
    with links.Namespaces(2, "1gbit") as where:
        hosts_mpi.command(where, str(tmp_path), 2)
        call = [str(agent), where.address(1), "hostname;", "ip", "-brief", "address", "show", links.DEVICE]
        said = subprocess.check_output(call, text=True, timeout=20)
        assert said.splitlines()[0] == where.host(1) and where.address(1) in said
        wrong = subprocess.run([str(agent), "10.83.0.9", "true"], capture_output=True, text=True, timeout=20)
        assert wrong.returncode == 1 and "no host 10.83.0.9 here" in wrong.stderr


# -- limits and rows ---------------------------------------------------------------------------------------------------


def test_limits_are_the_formulas() -> None:
    assert limits.ring_s(4, 100_000_000, GBIT) == pytest.approx(1.2)
    assert limits.star_s(4, 100_000_000, GBIT) == pytest.approx(4.8)
    assert limits.ring_s(2, 125, 1000) == limits.star_s(2, 125, 1000) / 2 == pytest.approx(1.0)
    assert [limits.one_way_s(4, k, 25_000_000, GBIT) for k in (1, 2, 4, 8)] == pytest.approx([0.8, 0.4, 0.2, 0.2])


def test_a_row_counts_the_slowest_rank_of_every_call_and_the_busiest_host() -> None:
    turns = [
        [{"each": [1.0, 2.0], "wire_bytes": 20}, {"each": [3.0, 1.0], "wire_bytes": 60}],
        [{"each": [9.0, 4.0], "wire_bytes": 20}, {"each": [1.0, 1.0], "wire_bytes": 40}],
    ]
    row = hosts_turns.row_of({"part": "allreduce", "limit_s": 1.75}, turns)
    assert (row["median_s"], row["p10_s"], row["p90_s"]) == (3.5, 2.0, 9.0)
    assert row["of_limit"] == 0.5 and row["wire_bytes"] == 25 and (row["repeats"], row["rounds"]) == (4, 2)
    assert "of_limit" not in hosts_turns.row_of({"part": "train"}, turns)
    assert json.loads(json.dumps(row)) == row


def test_a_process_pool_that_fails_is_named_and_the_others_go_on() -> None:
    able = ["sh", "-c", "echo '{}'; while read line; do echo '{\"each\": [0.5], \"wire_bytes\": 7}'; done"]
    pools = {
        "able": ProcessPool("able", [able]),
        "unable": ProcessPool("unable", [["sh", "-c", "echo no luck >&2; exit 3"]]),
    }
    entries = [hosts_turns.Entry(pool=pool, warm_up={}, request={}, row={"name": name}) for name, pool in pools.items()]
    rows, failures = hosts_turns.take("try", entries, 2)
    assert [(row["name"], row["median_s"], row["repeats"]) for row in rows] == [("able", 0.5, 2)]
    assert len(failures) == 1 and "unable: ended with exit code 3" in failures[0] and "no luck" in failures[0]


# -- tables and plots --------------------------------------------------------------------------------------------------


def figures(part: str, name: str, median_s: float, **known: object) -> hosts.Row:
    return hosts_turns.row_of({"part": part, "name": name, "rate": "1gbit", **known}, [answers(median_s)])


def answers(seconds: float) -> list[dict[str, object]]:
    return [{"each": [seconds], "wire_bytes": 1_500_000}]


def reduced(name: str, median_s: float, per_host: int = 1) -> hosts.Row:
    return figures("allreduce", name, median_s, hosts=4, per_host=per_host, bytes=SIZE, limit_s=0.94)


ROWS = [
    reduced("ring", 1.0), reduced("auto", 1.1), reduced("gloo", 2.0), reduced("mpi", 2.5),
    reduced("ring", 1.0, 2), reduced("auto", 1.3, 2), reduced("gloo", 1.2, 2),
    figures("train", "ddp/gloo", 3.0, hosts=4, model="mlp"), figures("train", "ring", 1.5, hosts=4, model="mlp"),
    figures("train", "auto", 3.5, hosts=4, model="mlp"),
    figures("ps", "ps", 1.14, workers=4, servers=1, bytes=SIZE, one_way_s=0.5, limit_s=1.0),
    figures("ps", "ps", 1.16, workers=4, servers=2, bytes=SIZE, one_way_s=0.5, limit_s=1.0),
    *(
        figures("picture", name, seconds * n, hosts=n, per_host=1, bytes=SIZE, limit_s=seconds * n)
        for n in (2, 4) for name, seconds in (("star", 1.0), ("ring", 0.1))
    ),
]  # fmt: skip


def lines_of(shown: str, name: str) -> list[str]:
    return [" ".join(line.split()) for line in shown.splitlines() if line.startswith(f"│ {name} ")]


def test_the_tables_say_what_was_reached(capsys: pytest.CaptureFixture[str]) -> None:
    hosts_table.print_rows(ROWS)
    shown = capsys.readouterr().out
    one, two, step = lines_of(shown, "ring")
    assert "94.0%" in one and "reached" in one
    assert "reached" in two
    assert "2.00" in step and "reached" in step
    assert ["missed" in line for line in lines_of(shown, "auto")] == [True, True, True]
    assert not [line for line in lines_of(shown, "gloo") if "reached" in line or "missed" in line]
    (within,) = lines_of(shown, "ps, 1 server")
    (beyond,) = lines_of(shown, "ps, 2 servers")
    assert "+14.0%" in within and "reached" in within and "+16.0%" in beyond and "missed" in beyond


def test_the_plots_are_drawn_from_the_rows(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    for draw in (hosts_table.plot_rows, hosts_table.plot_picture):
        path = tmp_path / f"{draw.__name__}.png"
        assert draw(ROWS, str(path)) is None
        assert path.stat().st_size > 5000
    assert "nothing but the picture" in (hosts_table.plot_rows(ROWS[-4:], str(tmp_path / "a.png")) or "")
    assert "was not measured" in (hosts_table.plot_picture(ROWS[:3], str(tmp_path / "b.png")) or "")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "fast"], "write for example 100mbit"),
        (["--hosts-sim", "1"], "--hosts-sim takes 2 to 64 hosts, not 1"),
        (["--hosts-sim", "65"], "--hosts-sim takes 2 to 64 hosts, not 65"),
        (["--hosts-sim", "none"], "--hosts-sim takes a whole number"),
        (["--sizes", "0"], "--sizes takes sizes as 4K"),
        (["--parts", "speed"], "no part is called 'speed'; there are: allreduce, train, ps, picture"),
        (["--parts", ","], "--parts names nothing"),
        (["--parts", "ps", "--picture", "out.png"], "which --parts leaves out"),
    ],
)
def test_arguments_that_are_wrong_are_refused_before_anything_is_started(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "obstacle", lambda: pytest.fail("it was about to start"))
    assert main.main(["bench", "hosts", *arguments]) == exit_codes.USAGE
    assert words in " ".join(capsys.readouterr().err.split())


def test_without_namespaces_it_says_why_and_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert main.main(["bench", "hosts"]) == exit_codes.USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert "no network namespaces here: not root" in said and "as root" in said and "hora bench local" in said


def test_the_picture_is_a_part_only_where_it_is_wanted() -> None:
    assert hosts.choose() == ["allreduce", "train", "ps"]
    assert hosts.choose(picture=True) == ["allreduce", "train", "ps", "picture"]
    assert hosts.choose(["picture", "ps"]) == ["ps", "picture"]


def test_a_quick_run_keeps_hosts_and_rate() -> None:
    plan = hosts.quick(hosts.Plan(hosts=3, rate="2gbit"))
    assert (plan.hosts, plan.rate, plan.rounds) == (3, "2gbit", 1)
