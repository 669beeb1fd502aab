"""Claim 9: what rows say of memory, and that processes are found and counted by role."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from hora.bench import peak
from hora.bench.launched import launched
from hora.claims import memory
from hora.claims.memory import CLAIM, LOCAL, RING

PARAMETERS = 1_000_000
EMPTY = 300_000_000


def row(setup: str, worker: float, server: float = 0.0, workers: int = 2) -> dict[str, Any]:
    """A run whose processes need so many bytes per parameter."""
    servers = int(setup[4]) if setup.startswith("ps") else 0

    def processes(for_worker: float, for_server: float) -> list[dict[str, Any]]:
        ones = [("server", rank, for_server) for rank in range(servers)]
        ones += [("worker", rank, for_worker) for rank in range(workers)]
        return [
            {"role": role, "rank": rank, "own": EMPTY + need * PARAMETERS, "peak": EMPTY + 2 * need * PARAMETERS}
            for role, rank, need in ones
        ]

    return {
        "setup": setup, "strategy": setup.partition(",")[0], "workers": workers, "servers": servers,
        "parameters": PARAMETERS, "without": processes(0, 0), "with": [processes(worker, server)] * 2,
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
    assert CLAIM.judge(rows(local, served, sharded)).word == word


def test_the_verdict_names_who_saves_and_what_all_need_together() -> None:
    text = CLAIM.judge(rows(20.5, 8, 12)).text
    savers = "ps, 1 server; or ps, 2 servers; or ring:update=sharded"
    assert text.startswith(f"it is {savers}: a worker needs 16.5 bytes per parameter under the ring")
    assert "Local SGD: 20.5 under local:every=4; servers: 8.0 under ps, 1 server" in text
    assert "ring 33; ring:update=sharded 24; ps, 1 server 32" in text


def test_one_setup_that_does_not_save_is_enough() -> None:
    verdict = CLAIM.judge([*rows(10, 8, 12), row("shared:update=sharded", 16)])
    assert verdict.word == "only if" and verdict.text.startswith("it is local:every=4; or ps, 1 server; or")
    assert "shared:update=sharded" not in verdict.text.partition("a worker needs")[0]


@pytest.mark.parametrize(
    ("setup", "workers", "must"),
    [
        ("one process", 1, {"worker": 16}),
        (RING, 4, {"worker": 16}),
        ("ring:update=sharded", 4, {"worker": 10}),
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
    assert "1.0 M float32 parameters" in told.note and "2 repeats" in told.note
    matplotlib = pytest.importorskip("matplotlib.figure")
    CLAIM.draw(ones, matplotlib.Figure(figsize=CLAIM.figure_size, layout="constrained"))


@pytest.mark.timeout(240)
@pytest.mark.skipif(not peak.can_watch(), reason="the kernel does not tell who pays for shared memory")
def test_all_processes_of_a_run_are_seen_by_their_roles_and_needs(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import mmap, os, pathlib, sys, time\n"
        "rank = int(os.environ['HORA_RANK'])\n"
        "held = b'x' * (rank * 50_000_000)\n"
        "shared = mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 40 << 20)\n"
        "sum(shared[::4096])\n"
        "here = pathlib.Path(__file__).parent\n"
        "(here / f'here-{rank}').touch()\n"
        "until = time.monotonic() + 100\n"
        "while len([*here.glob('here-*')]) < 2 and time.monotonic() < until:\n"
        "    time.sleep(0.01)\n"
        "time.sleep(1.0)  # both hold it, and are looked at\n"
        "pathlib.Path(sys.argv[1]).write_text('1')\n"
    )
    common = pathlib.Path("/dev/shm") / tmp_path.name
    try:
        common.write_bytes(bytes(40 << 20))
        with peak.watching() as seen:
            launched([str(script)], common, size=2, strategy="ring")
    finally:
        common.unlink()
    assert sorted(seen) == [("worker", 0), ("worker", 1)]
    first, second = seen["worker", 0], seen["worker", 1]
    assert second.peak_bytes - first.peak_bytes > 45_000_000
    assert first.shared_bytes >= 40 << 20 and first.others_bytes == pytest.approx(20 << 20, rel=0.05)
    assert first.own_bytes == first.peak_bytes - first.others_bytes
