"""The claim about stragglers: each verdict from made-up rows; and a small real run, exact in its counts."""

from __future__ import annotations

import statistics

import pytest

from hora_benchmarks.claims import straggler, uneven
from hora_benchmarks.claims.claim import MAX_TEXT, Row

pytestmark = pytest.mark.full

SIZE, STEPS, SAMPLES = 4, 24, 480
SLOW = {"lasting": 0.3, "passing": 0.45}


def row(strategy: str, kind: str, share: float) -> Row:
    lost = 120 if strategy == straggler.BACKUP and kind != "even" else 0
    timeline = [[[0.0, 0.02], [0.08, 0.1]]] * SIZE if strategy in straggler.DRAWN and kind == "lasting" else []
    return {
        "strategy": strategy, "kind": kind, "workers": SIZE, "steps": STEPS, "samples": SAMPLES, "pace_s": 0.02,
        "seconds": [1.0, 1.1, 0.9], "shares": [share, share + 0.02, share - 0.02], "used": [SAMPLES - lost] * 3,
        "dropped": [lost // 2] * 3, "never_computed": [lost // 2] * 3, "idle": [[0.5, 0.5, 0.5, 0.1]] * 3,
        "timeline": timeline,
    }  # fmt: skip


def rows(sync: dict[str, float], ssp: dict[str, float], backup: dict[str, float]) -> list[Row]:
    """The control reaches 95 % unless `even` says otherwise."""
    found = []
    for strategy in straggler.QUICK:
        shares = sync if strategy in straggler.SYNC else ssp if strategy in straggler.BOUNDED else backup
        for kind in straggler.KINDS:
            found.append(row(strategy, kind, {"even": 0.95, **shares}[kind]))
    return found


HELPED = {"lasting": 0.9, "passing": 0.9}


def test_it_holds_if_both_remedies_help_against_both_stragglers() -> None:
    verdict = straggler.judge(rows(SLOW, HELPED, HELPED))
    assert verdict.word == "holds"
    assert verdict.text == (
        "in % of what is possible synchronous training reaches 30 (28 to 32) under a lasting straggler and 45 (43 to "
        "47) under passing ones, bounded staleness 90 (88 to 92) and 90 (88 to 92), a backup worker 90 (88 to 92) and "
        "90 (88 to 92), leaving out 25 % of the samples"
    )
    assert "A backup worker helps against both: +200 % samples/s under a lasting straggler" in verdict.more
    assert "keeps, in the same order: synchronous training 32 % and 47 %; bounded staleness 95 %" in verdict.more
    assert "exceed" not in verdict.more


def test_only_if_names_the_straggler_that_a_remedy_helps_against() -> None:
    verdict = straggler.judge(rows(SLOW, {"lasting": 0.33, "passing": 0.6}, HELPED))
    assert (
        str(verdict).startswith("only if the remedy fits: in % of what is possible") and len(verdict.text) <= MAX_TEXT
    )
    assert "Bounded staleness helps against passing ones only: +10 % samples/s" in verdict.more
    assert "A backup worker helps against both" in verdict.more


def test_that_a_backup_worker_keeps_more_than_all_is_explained() -> None:
    verdict = straggler.judge(rows(SLOW, HELPED, {"even": 0.6, **HELPED}))
    assert "a backup worker 150 % and 150 %. Kept can exceed 100 %" in verdict.more
    assert "it reaches only 60 % of what is possible there" in verdict.more


@pytest.mark.parametrize(
    ("sync", "helped"), [(SLOW, SLOW), ({"lasting": 0.7, "passing": 0.65}, {"lasting": 0.95, "passing": 0.95})]
)
def test_it_fails_if_nothing_helps_or_nothing_holds_back(sync: dict[str, float], helped: dict[str, float]) -> None:
    assert straggler.judge(rows(sync, helped, helped)).word == "fails"


def test_who_is_slow_without_a_straggler_too_is_not_held_back_by_one() -> None:
    sync = {"even": 0.55, "lasting": 0.5, "passing": 0.5}
    verdict = straggler.judge(rows(sync, HELPED, HELPED))
    assert verdict.word == "fails" and "synchronous training 91 % and 91 %" in verdict.more
    assert "helps against neither" in verdict.more


def test_who_is_faster_without_a_straggler_too_does_not_help_against_one_nor_who_is_always_slow() -> None:
    sync = {"even": 0.5, "lasting": 0.25, "passing": 0.25}
    faster, always_slow = {"lasting": 0.5, "passing": 0.5}, dict.fromkeys(straggler.KINDS, 0.25)
    verdict = straggler.judge(rows(sync, {"even": 0.95, **faster}, always_slow))
    assert verdict.word == "fails"
    assert "+100 % samples/s under a lasting straggler" in verdict.more
    assert "synchronous training 50 % and 50 %; bounded staleness 53 % and 53 %" in verdict.more


def test_table_and_figure_show_every_row() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    made = rows(SLOW, HELPED, HELPED)
    table = straggler.table(made)
    assert len(table.lines) == len(made) and all(len(line) == len(table.headings) for line in table.lines)
    assert [line[1:4] for line in table.lines[:2]] == [
        ["none", "95 (93 to 97)", ""],
        ["lasting", "30 (28 to 32)", "32"],
    ]
    assert "passing, spells of 3 steps" in table.note and table.repeats == (
        "median of 3 repeats (least to greatest), interleaved"
    )
    straggler.draw(made, figures.Figure(layout="constrained"))


@pytest.mark.parametrize(("size", "steps"), [(4, 72), (8, 48)])
def test_passing_stragglers_are_slow_equally_often_and_never_two_in_a_step(size: int, steps: int) -> None:
    factors = straggler.passing(size, steps, seed=1)
    assert all(len(of_one) == steps for of_one in factors)
    slow = [[factor > 1 for factor in of_one] for of_one in factors]
    assert {sum(of_one) for of_one in slow} == {steps // (2 * size)}
    assert max(sum(step) for step in zip(*slow, strict=True)) == 1
    assert statistics.mean(f for of_one in factors for f in of_one if f > 1) == 6
    assert factors == straggler.passing(size, steps, seed=1) != straggler.passing(size, steps, seed=2)


def test_ideal_is_the_sum_of_speeds() -> None:
    assert uneven.ideal_samples_per_s(uneven.lasting(4), 5, 0.02) == pytest.approx(5 / 0.02 * 3.25)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_with_one_of_two_workers_as_a_backup_every_step_uses_one_gradient() -> None:
    """Whichever comes first: the other's is dropped, or not even computed."""
    (loop,) = uneven.run(straggler.BACKUP, [[[1.0], [8.0]]], num_samples=80, batch=5, pace_s=0.01)
    seen = [number for worker in loop.workers for batch in worker.samples for number in batch]
    assert len(seen) == len(set(seen)) == loop.num_samples
    assert loop.num_samples - 5 * loop.dropped == 40
