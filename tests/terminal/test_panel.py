"""The panel's lines: what they say of a run, that they fit, and that nothing of the run's own can break out of them."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from rich.cells import cell_len

from hora.monitor.status import RunEvent, RunStatus, ServerStatus, WorkerStatus
from hora.terminal import panel

ADDRESS = "http://127.0.0.1:8320/runs/mnist-3"
HOSTILE = ("\x1b[2J", "\x1b]0;t\x07", "a\nb", "[red]x[/red]", "\u202eevil", "宽" * 40, "", "x" * 500, "\x00", "e\u0301")


def worker(rank: int, **facts: Any) -> WorkerStatus:
    known = {"compute_s": 0.1, "comm_s": 0.02, "wait_s": 0.0, "samples_per_s": 533.3, "step": 1284, **facts}
    return WorkerStatus(rank=rank, name=f"rank {rank} (host a, pid {400 + rank})", **known)


def run(size: int = 4, **facts: Any) -> RunStatus:
    known: dict[str, Any] = {
        "run": "mnist-3", "strategy": "ring", "size": size, "state": "running", "seconds": 134.0, "step": 1284,
        "epoch": 1, "epochs": 3, "progress": 0.43, "eta_s": 178.0, "samples": 12345, "samples_per_s": 2133.0,
        "steps_per_s": 8.13, "values": {"accuracy": 0.9131, "loss": 0.31244},
        "workers": [worker(rank) for rank in range(size)],
    }  # fmt: skip
    return RunStatus(**{**known, **facts})


def render(now: RunStatus, width: int = 100, height: int = 40, *events: RunEvent, color: bool = False) -> list[str]:
    return panel.render(now, width=width, height=height, address=ADDRESS, color=color, events=events)


def event(text: str, kind: str = "slow", at: float = 122.0) -> RunEvent:
    return RunEvent(number=1, at=at, step=7, kind=kind, who="rank 1", text=text)


def line(lines: list[str], start: str) -> str:
    (found,) = [each for each in lines if each.strip().startswith(start)]
    return found


def test_it_says_what_the_run_is_where_it_stands_and_how_fast() -> None:
    lines = render(run())
    assert re.fullmatch(r" mnist-3  ring, 4 workers +running for 2 min 14 s", lines[0])
    assert re.fullmatch(r" step 1,284   epoch 2 of 3   ━+╸?─+ +43 %   2 min 58 s left", lines[1])
    assert re.fullmatch(r" loss 0\.3124   accuracy 0\.9131 +2,133 samples/s   8\.13 steps/s", lines[2])
    assert re.fullmatch(r" rank 0  █+▒+ +120 ms +533/s", lines[3])
    assert lines[-1].startswith(f" {ADDRESS} ") and lines[-1].endswith("█ compute  ▒ communication  ░ waiting")
    assert {cell_len(each) for each in lines} == {99}, "both edges are even"


def test_while_it_starts_it_says_what_it_waits_for() -> None:
    assert render(run(state="starting", waiting="rank 1 imports torch"))[0].endswith("starting: rank 1 imports torch")
    assert "imports" not in render(run(waiting="rank 1 imports torch"))[0]


def test_what_auto_has_chosen_is_said() -> None:
    assert render(run(strategy="auto", algorithm="shared"))[0].startswith(" mnist-3  auto (shared), 4 workers ")


def test_the_bar_is_as_long_as_the_progress() -> None:
    for progress, full in ((0.0, 0.0), (0.25, 0.25), (0.5, 0.5), (1.0, 1.0), (7.0, 1.0), (-1.0, 0.0)):
        bar = re.findall("[━╸─]+", render(run(progress=progress))[1])[0]
        assert (bar.count("━") + bar.count("╸") / 2) / len(bar) == pytest.approx(full, abs=0.02)


def test_without_progress_epochs_or_values_it_says_less() -> None:
    lines = render(run(progress=None, eta_s=None, epoch=None, epochs=None, values={}))
    assert lines[1] == " step 1,284" and "nothing logged yet" in lines[2]
    assert len(render(RunStatus(run="x"), 100, 40)) == 4, "a run that has not begun"


def test_values_that_have_no_place_are_counted() -> None:
    values = dict.fromkeys(("accuracy", "val_loss", "lr", "norm", "loss", "perplexity", "entropy", "reward"), 0.5)
    assert re.match(
        r" loss 0\.5   val_loss 0\.5   accuracy 0\.5   lr 0\.5   … 4 more +2,133", render(run(values=values))[2]
    )
    assert re.fullmatch(r" loss 0\.5   … 7 more +2,133 samples/s", render(run(values=values), 40)[2])
    assert re.fullmatch(
        r" loss 0\.5   a{20} 0\.5 +2,133 samples/s", render(run(values={"loss": 0.5, "a" * 20: 0.5}), 60)[2]
    )


def test_a_bar_shows_compute_communication_and_waiting_in_their_proportions() -> None:
    bar = line(render(run(1, workers=[worker(0, compute_s=0.5, comm_s=0.25, wait_s=0.25)])), "rank 0")
    parts = [bar.count(sign) for sign in "█▒░"]
    assert parts[0] == pytest.approx(2 * parts[1], abs=1) and parts[1] == pytest.approx(parts[2], abs=1)
    narrow = line(render(run(1, workers=[worker(0, compute_s=0.95, comm_s=0.03, wait_s=0.02)]), 40), "rank 0")
    assert narrow.count("▒") == narrow.count("░") == 1, "the small can be seen"


def test_bars_have_one_scale_and_those_that_are_nearly_alike_end_together() -> None:
    lines = render(run(3, workers=[worker(0), worker(1, compute_s=0.099), worker(2, compute_s=0.04)]))
    lengths = [sum(each.count(sign) for sign in "█▒░") for each in lines if each.startswith(" rank")]
    assert lengths[0] == lengths[1] and lengths[2] == pytest.approx(lengths[0] / 2, abs=1)


def test_a_straggler_is_marked_and_who_is_gone_is_said() -> None:
    workers = [
        worker(0, wait_s=0.3),
        worker(1, compute_s=0.41, slow=4.1),
        worker(2, state="died", step=900),
        worker(3, state="left"),
    ]
    lines = render(run(4, workers=workers), 100, 40, event("rank 1 is slow: 412 ms"))
    assert line(lines, "rank 1").endswith("  ▲ slow: 4.1×")
    assert line(lines, "rank 2").endswith("✗ died after step 900") and "left after step 1,284" in line(lines, "rank 3")
    assert line(lines, "12 s ago") == " 12 s ago  rank 1 is slow: 412 ms"


def test_of_many_workers_the_slowest_six_are_shown_and_the_others_counted() -> None:
    workers = [worker(rank, compute_s=0.1 + 0.001 * (rank % 3)) for rank in range(16)]
    workers[11] = worker(11, compute_s=0.41, slow=4.1)
    workers[7] = worker(7, compute_s=0.16)
    lines = render(run(16, workers=workers))
    shown = [int(each.split()[1]) for each in lines if each.startswith(" rank")]
    assert shown == [0, 1, 2, 3, 7, 11] and " … 10 more, all even" in lines
    assert len([each for each in render(run(8)) if each.startswith(" rank")]) == 8
    workers[12:] = [worker(rank, state="left") for rank in range(12, 16)]
    assert line(render(run(16, workers=workers)), "… 10 more").endswith("4 left")


def test_even_workers_do_not_change_places_for_a_few_percent() -> None:
    chance = random.Random(1)
    shown = set()
    for _ in range(20):
        workers = [worker(rank, compute_s=0.1 * chance.uniform(0.95, 1.05)) for rank in range(16)]
        shown.add(tuple(each.split()[1] for each in render(run(16, workers=workers)) if each.startswith(" rank")))
    assert shown == {("0", "1", "2", "3", "4", "5")}


def test_servers_tell_their_load_and_lags_are_put_into_words() -> None:
    servers = [ServerStatus(number=k, load_bytes=4_200_000, updates_per_s=38.2, busy=0.62, queue=k) for k in range(6)]
    now = run(2, strategy="ps:mode=async", servers=servers, lags={0: 50, 1: 40, 5: 9, 14: 1})
    lines = render(now)
    assert re.fullmatch(r" server 1  █+·+ +62 % busy   queue 1   38\.2 updates/s   4\.2 MB", line(lines, "server 1"))
    assert " … 2 more" in lines and " lag 0 at the median, 95 % within 5, 14 at most" in lines
    assert "2 workers, 6 servers" in lines[0]


def test_rounds_tell_how_far_the_next_one_is() -> None:
    assert " 14 rounds, 5 local steps since the last" in render(run(1, rounds=14, workers=[worker(0, local_steps=5)]))
    workers = [worker(0, local_steps=5), worker(1, local_steps=7), worker(2, local_steps=1, state="died")]
    assert " 1 round, 5 to 7 local steps since the last" in render(run(3, rounds=1, workers=workers))


def test_a_value_that_is_no_number_is_shown_as_such() -> None:
    assert "loss nan" in render(run(values={"loss": float("nan")}))[2]
    assert "\x1b[1;31mnan" in render(run(values={"loss": float("nan")}), color=True)[2]


def test_colors_are_the_only_escapes_and_only_where_they_are_wanted() -> None:
    plain, colored = render(run()), render(run(), color=True)
    assert not any("\x1b" in each for each in plain)
    assert [re.sub(r"\x1b\[[0-9;]*m", "", each).rstrip() for each in colored] == plain


def test_where_there_is_little_room_the_straggler_is_still_named() -> None:
    workers = [worker(rank, wait_s=0.3) for rank in range(16)]
    workers[2] = worker(2, compute_s=0.41, slow=4.1)
    lines = render(run(16, workers=workers), 40, 10)
    assert len(lines) == 4 and " … 16 workers, slow: rank 2" in lines and "43 %" in lines[0]


@pytest.mark.parametrize("seed", range(150))
def test_it_fits_whatever_the_run_and_the_terminal_are(seed: int) -> None:
    chance = random.Random(seed)

    def number(most: float) -> float:
        return chance.choice((0.0, most, chance.random() * most, 1e-9, 1e12, float("nan"), float("inf"), -1.0))

    def name() -> str:
        return chance.choice((*HOSTILE, "loss", "accuracy", "a long name of a value"))

    def worker_of(rank: int) -> WorkerStatus:
        seconds = {"compute_s": number(1), "comm_s": number(1), "wait_s": number(9)}
        state = chance.choice(("alive", "alive", "left", "died", HOSTILE[0]))
        slow = chance.choice((0.0, 1.7, 123.4))
        return worker(rank, samples_per_s=number(1e5), slow=slow, state=state, **seconds)

    workers = [worker_of(rank) for rank in range(chance.choice((0, 1, 2, 4, 8, 9, 16, 64)))]
    servers = [
        ServerStatus(number=k, busy=number(1), queue=chance.randint(0, 10**6), load_bytes=chance.randint(0, 10**12))
        for k in range(chance.choice((0, 0, 1, 2, 9)))
    ]
    now = run(
        len(workers),
        workers=workers,
        servers=servers,
        run=name(),
        strategy=name(),
        algorithm=name(),
        serving=name(),
        values={name(): chance.choice((float("nan"), float("-inf"), 1e-30, 12.5)) for _ in range(chance.randint(0, 9))},
        progress=chance.choice((None, 0.0, 0.5, 1.0, float("nan"))),
        eta_s=chance.choice((None, 5.0, 1e7, float("inf"))),
        epoch=chance.choice((None, 7)),
        state=chance.choice(("starting", "running", "ended")),
        rounds=chance.choice((None, 3)),
        step=chance.choice((0, 10**9)),
        lags=chance.choice(({}, {0: 1}, {3: 5, 900: 1})),
        samples_per_s=number(1e6),
        seconds=number(1e6),
    )
    width, height = chance.randint(40, 220), chance.randint(10, 80)
    events = [
        event(name(), chance.choice(("slow", "died", "even", HOSTILE[1])), number(100))
        for _ in range(chance.randint(0, 3))
    ]
    address = chance.choice((None, ADDRESS, ADDRESS * 4))
    lines = panel.render(now, width=width, height=height, address=address, color=False, events=events)
    assert 1 <= len(lines) <= height // 2 - 1
    assert all(cell_len(each) <= min(width, 100) - 1 and each.isprintable() for each in lines), lines
    assert any("step" in each for each in lines)
    shown = {each.split()[1] for each in lines if each.startswith(" rank ")}
    hidden = [each for each in lines if re.match(r" … \d+ (more|worker)", each)]
    assert len(shown) == len(workers) or hidden, "who is not shown is counted"
