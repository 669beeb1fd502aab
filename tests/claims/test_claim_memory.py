"""Claim 9: what rows say of memory, and that processes are found and counted by role."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest

from hora.launch.launched import launched
from hora_benchmarks.claims import memory, process_memory
from hora_benchmarks.claims.claim import MAX_TEXT
from hora_benchmarks.claims.memory import CLAIM, LOCAL, RING

pytestmark = pytest.mark.full

PARAMETERS = 1_000_000
EMPTY = 300_000_000


def row(
    setup: str, worker: float, server: float = 0.0, workers: int = 2, mapped: float = 0.0, later: float = 0.0
) -> dict[str, Any]:
    """A run whose processes need so many bytes per parameter, and map so many more that others pay for; so many of them
    they have only while others have less."""
    servers = int(setup[4]) if setup.startswith("ps") else 0

    def processes(for_worker: float, for_server: float, mapped: float, later: float) -> list[dict[str, Any]]:
        ones = [("server", rank, for_server) for rank in range(servers)]
        ones += [("worker", rank, for_worker) for rank in range(workers)]
        return [
            {"role": role, "rank": rank, "own": EMPTY + need * PARAMETERS,
             "peak": EMPTY + (need + mapped) * PARAMETERS, "together": EMPTY + (need - later) * PARAMETERS}
            for role, rank, need in ones
        ]  # fmt: skip

    return {
        "setup": setup, "strategy": setup.partition(",")[0], "workers": workers, "servers": servers,
        "parameters": PARAMETERS, "without": processes(0, 0, 0, 0),
        "with": [processes(worker, server, mapped, later)] * 2,
    }  # fmt: skip


def rows(local: float, served: float, sharded: float) -> list[dict[str, Any]]:
    return [
        row(RING, 16.5),
        row("ring:update=sharded", sharded),
        row("ps, 1 server", served, 16),
        row("ps, 2 servers", served, 8),
        row(LOCAL, local),
        row("one process", 16, workers=1),
    ]


@pytest.mark.parametrize(
    ("local", "served", "sharded", "word"),
    [(10, 8, 12, "holds"), (20.5, 8, 12, "only if"), (20.5, 16, 16, "fails"), (15.7, 15.7, 15.8, "only if")],
)
def test_each_that_is_said_to_save_is_judged(local: float, served: float, sharded: float, word: str) -> None:
    verdict = CLAIM.judge(rows(local, served, sharded))
    assert verdict.word == word and len(verdict.text) <= MAX_TEXT


def test_the_verdict_names_who_saves_and_what_all_need_together() -> None:
    verdict = CLAIM.judge(rows(20.5, 8, 12))
    assert verdict.text == (
        "it is servers (8.0 and 8.0) or sharded updates (12.0), in bytes per parameter of a worker against the ring's "
        "16.5; Local SGD needs more (20.5); repeats within 0.0"
    )
    assert "ring 33; ring:update=sharded 24; ps, 1 server 32" in verdict.more


def test_the_verdict_names_the_setups_where_not_all_save() -> None:
    ones = [*rows(20.5, 8, 15.9), row("shared:update=sharded", 12)]
    text = CLAIM.judge(ones).text
    assert "or sharded updates over shared memory (12.0), in bytes" in text
    assert text.endswith("sharded updates over the ring save too little (15.9); repeats within 0.0")
    assert len(text) <= MAX_TEXT


def test_a_saving_that_repeats_would_judge_otherwise_is_on_the_edge() -> None:
    ones = rows(20.5, 8, 15.8)
    sharded = ones[1]
    sharded["with"] = [row(sharded["setup"], need)["with"][0] for need in (15.6, 16.0)]
    text = CLAIM.judge(ones).text
    assert "sharded updates over the ring save too little (15.8, on the edge of 0.8 less); repeats within 0.4" in text
    assert "servers (8.0 and 8.0)" in text


def test_the_verdict_names_what_the_plain_peak_says_otherwise() -> None:
    told = "As top shows it, which counts shared memory in full for each process, "
    assert CLAIM.judge(rows(20.5, 8, 12)).more.startswith(f"{told}the same would save. ")
    ones = [*rows(20.5, 8, 12), row("shared:update=sharded", 12, mapped=8)]
    verdict = CLAIM.judge(ones)
    assert "sharded updates (12.0 and 12.0)" in verdict.text
    assert verdict.more.startswith(f"{told}shared:update=sharded (20.0) would not save against the ring's 16.5. ")


def test_a_run_needs_what_its_processes_had_at_one_moment() -> None:
    one = row(RING, 16, later=3)
    assert memory.per_parameter(one, "worker") == [16, 16]
    assert memory.together(one) == [2 * (16 - 3)] * 2


def test_one_setup_that_does_not_save_is_enough() -> None:
    verdict = CLAIM.judge([*rows(10, 8, 12), row("shared:update=sharded", 16)])
    assert verdict.word == "only if"
    assert verdict.text.startswith(
        "it is Local SGD (10.0) or servers (8.0 and 8.0) or sharded updates over the ring (12.0)"
    )
    assert "sharded updates over shared memory save too little (16.0)" in verdict.text


@pytest.mark.parametrize(
    ("setup", "workers", "must"),
    [
        ("one process", 1, {"worker": 16}),
        (RING, 4, {"worker": 16}),
        ("ring:update=sharded", 4, {"worker": 7}),
        ("ps, 2 servers", 4, {"worker": 8, "server": 8}),
        (LOCAL, 4, {"worker": 20}),
        ("diloco:every=4", 4, {"worker": 28}),
    ],
)
def test_what_must_be_held(setup: str, workers: int, must: dict[str, float]) -> None:
    assert memory.expected(row(setup, 0, workers=workers)) == must


def test_table_and_figure() -> None:
    ones = rows(20.5, 8, 12)
    told = CLAIM.table(ones)
    assert len(told.lines) == len(ones) and {len(line) for line in told.lines} == {len(told.headings)}
    assert "1.0 M float32 parameters" in told.note and told.repeats.startswith("2 repeats")
    assert "the workers of sharded updates share the memory of the parameters" in told.note
    drawn = pytest.importorskip("matplotlib.figure").Figure(figsize=CLAIM.figure_size, layout="constrained")
    CLAIM.draw(ones, drawn)
    assert drawn.axes[1].get_title() == "All processes of a run with 2 or 1 workers"


@pytest.mark.timeout(240)
@pytest.mark.skipif(not process_memory.can_watch(), reason="the kernel does not tell who pays for shared memory")
def test_all_processes_of_a_run_are_seen_by_their_roles_and_needs(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import mmap, os, pathlib, sys, time\n"
        "rank, here = int(os.environ['HORA_RANK']), pathlib.Path(__file__).parent\n"
        "def meet(rank, name):\n"
        "    until = time.monotonic() + 100\n"
        "    while not (here / f'{name}-{rank}').exists() and time.monotonic() < until:\n"
        "        time.sleep(0.01)\n"
        "if rank == 0:\n"
        "    gone = b'x' * 60_000_000\n"
        "    time.sleep(0.5)  # it is looked at\n"
        "    del gone\n"
        "else:\n"
        "    meet(0, 'maps')\n"
        "held = b'x' * (rank * 100_000_000)\n"
        "shared = mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 40 << 20)\n"
        "sum(shared[::4096])\n"
        "(here / f'maps-{rank}').touch()\n"
        "meet(1, 'maps')\n"
        "time.sleep(0.5)  # both hold it, and are looked at\n"
        "if rank == 0:\n"
        "    pathlib.Path(sys.argv[1]).write_text('1')\n"
        "    print('leaves', flush=True)\n"
        "time.sleep(0.5)\n"
    )
    common = pathlib.Path("/dev/shm") / tmp_path.name
    try:
        common.write_bytes(bytes(40 << 20))
        with process_memory.MemoryWatch() as watch:
            launched(
                [str(script)],
                common,
                size=2,
                strategy="ring",
                on_line=lambda line: "leaves" in line and not watch.stop(),
            )
    finally:
        common.unlink()
    assert sorted(watch.footprints) == [("worker", 0), ("worker", 1)]
    first, second = watch.footprints["worker", 0], watch.footprints["worker", 1]
    near = functools.partial(pytest.approx, abs=5_000_000)
    assert first.own_bytes == near(first.peak_bytes), "had most before it mapped what is shared"
    assert second.own_bytes == near(second.peak_bytes - (20 << 20)), "half of what is shared"
    together = first.together_bytes + second.together_bytes  # later: a busy rank touches pages of libraries meanwhile
    assert together == near(first.peak_bytes - 60_000_000 + second.peak_bytes, abs=15_000_000)
