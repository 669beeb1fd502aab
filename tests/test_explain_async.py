"""`hora explain async` shows what the server did: versions, lags and values are exact, and it fits the screen."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import pytest

import hora.explain
from hora.cli import main
from hora.explain.asynchronous import MAX_WORKERS, MIN_WORKERS, even_paces, number, uneven_paces, updates_until_near
from hora.explain.race import RaceEvent, WorkerPace, race
from hora.runs import exit_codes
from hora.server.state import Rules

explain = functools.cache(functools.partial(hora.explain.explain, hora.explain.ASYNC))
every_size = pytest.mark.parametrize("workers", range(MIN_WORKERS, MAX_WORKERS + 1))


def pushes(moments: list[RaceEvent]) -> list[tuple[int, float, int, int]]:
    """Rank, gradient, base, lag of each, as they came."""
    return [(rank, p.gradient, p.base, p.lag) for moment in moments for rank, p in sorted(moment.pushes.items())]


def test_the_race_of_two_has_these_versions_lags_and_values() -> None:
    moments = race(even_paces(2), Rules(mode="async"), 7)
    assert pushes(moments) == [
        (0, 16, 0, 0), (1, 16, 0, 1), (0, 8, 1, 1), (1, 0, 2, 1), (0, -4, 3, 1), (1, -4, 4, 1),
    ]  # fmt: skip
    assert [(moment.version, moment.w) for moment in moments if moment.pushes] == [
        (1, 8), (2, 0), (3, -4), (4, -4), (5, -2), (6, 0),
    ]  # fmt: skip


@every_size
def test_synchronous_gradients_are_never_late_and_halve_w(workers: int) -> None:
    moments = race(even_paces(workers), Rules(mode="sync"), 5 * workers)
    assert {lag for *_, lag in pushes(moments)} == {0}
    assert [moment.w for moment in moments if len(moment.reads) == workers] == [8, 4, 2, 1]


@every_size
def test_equal_workers_lag_by_the_number_of_the_others(workers: int) -> None:
    lags = [lag for *_, lag in pushes(race(even_paces(workers), Rules(mode="async"), 6 * workers))]
    assert lags[:workers] == list(range(workers)) and set(lags[workers:]) == {workers - 1}


@pytest.mark.full
@every_size
def test_what_is_said_of_equal_workers_is_so_of_the_race_that_is_shown(workers: int) -> None:
    came = pushes(race(even_paces(workers), Rules(mode="async"), 5 * workers - 1))
    later = [lag for place, (rank, *_, lag) in enumerate(came) if rank in {earlier for earlier, *_ in came[:place]}]
    assert set(later) == {workers - 1}
    late = "one update late" if workers == 2 else f"{workers - 1} updates late"
    assert f"every gradient but each worker's first comes {late}" in " ".join(explain(workers).split())


@every_size
def test_the_slow_worker_comes_four_updates_late(workers: int) -> None:
    paces = uneven_paces(workers)
    moments = race(paces, Rules(mode="async"), paces[-1].ticks)
    assert pushes(moments)[-1] == (workers - 1, 16, 0, 4)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_staleness_bounds_the_lag(staleness: int) -> None:
    for slow in (7, 19, 41):
        paces = [WorkerPace(ticks=2), WorkerPace(ticks=4, start=1), WorkerPace(ticks=slow)]
        lags = [lag for *_, lag in pushes(race(paces, Rules(mode="ssp", staleness=staleness), 300))]
        assert max(lags) <= 2 * (2 * staleness + 1)


def test_after_a_meeting_all_stand_on_one_version() -> None:
    met = [m for m in race(uneven_paces(3), Rules(mode="async", sync_every=2), 60) if len(m.reads) == 3]
    assert met and all(set(moment.reads.values()) == {moment.version} for moment in met)


def test_delay_compensation_is_exact_for_the_first_late_gradient() -> None:
    paces = uneven_paces(2)
    found = {
        correct: race(paces, Rules(mode="async", correct=correct, dc_lambda=1 / 256), 9)[-1].w
        for correct in ("none", "scale", "dc")
    }
    assert found == {"none": -7.0, "scale": pytest.approx(1 - 0.5 * 16 / 5), "dc": 0.5}


@pytest.mark.full
@every_size
def test_momentum_makes_it_worse(workers: int) -> None:
    more = []
    for momentum in (0.0, 0.5, 0.9):
        counts = [
            updates_until_near(even_paces(workers), mode, momentum, 0.5 / (workers - 1) * (1 - momentum))
            for mode in ("sync", "async")
        ]
        more.append(counts[1] - counts[0])
    assert more == sorted(more) and more[-1] > more[0]


@pytest.mark.cases(2)
@every_size
def test_every_push_of_the_race_is_shown(workers: int) -> None:
    text = explain(workers).split("── B. ")[1].split("── C. ")[0]
    shown = [(g, int(base), int(lag)) for g, base, lag in re.findall(r"(\S+) of v(\d+), lag (\d+)", text)]
    assert shown == [
        (number(g), base, lag)
        for _, g, base, lag in pushes(race(even_paces(workers), Rules(mode="async"), 5 * workers - 1))
    ]


@pytest.mark.full
@every_size
def test_it_fits_110_columns_and_is_plain_text(workers: int) -> None:
    lines = explain(workers).splitlines()
    assert max(map(len, lines)) <= 110 and all(line == line.rstrip() for line in lines)
    assert not re.search(r"[{}\N{NO-BREAK SPACE}\x1b]", "".join(lines)), "nothing left to fill in"
    assert lines.index("Summary") > 0


@pytest.mark.parametrize("workers", ["1", "5", "16"])
def test_a_number_of_workers_that_cannot_be_drawn_is_refused_in_one_sentence(
    workers: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["explain", "async", "-n", workers]) == exit_codes.USAGE
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"hora explain: explain async draws 2 to 4 workers, got {workers}\n")


def test_without_n_two_workers_race_and_a_ring_has_five(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", "async"]) == main.main(["explain", "ring"]) == exit_codes.OK
    out = capfd.readouterr().out
    assert "the race of 2 workers" in out and "ring all-reduce on 5 ranks" in out


def test_explaining_a_ring_does_not_load_torch() -> None:
    code = "import sys; from hora.explain import explain; explain('ring', 5); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 0
