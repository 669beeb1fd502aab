"""A rank with a rate limit sends no faster than it, whatever it sends, and what it sends arrives as ever."""

from __future__ import annotations

import time

import pytest
import torch

from hora.collectives import Group
from hora.rendezvous import environment
from hora.transport.rate_limit import BURST_S, PIECE_BYTES, RateLimiter
from ranks import run

RATE = 8 << 20
BURST = max(PIECE_BYTES, RATE * BURST_S)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_grants_never_exceed_the_rate_and_one_burst() -> None:
    clock = Clock()
    limiter = RateLimiter(RATE, clock)
    granted = 0
    for _ in range(1000):
        granted += limiter.take(1 << 20)
        assert granted <= BURST + RATE * (clock.now - 100.0)
        clock.now += 0.0007
    assert granted >= RATE * 0.69


def test_silence_saves_up_no_more_than_a_burst() -> None:
    clock = Clock()
    limiter = RateLimiter(RATE, clock)
    clock.now += 3600
    assert limiter.take(1 << 30) == int(BURST) and limiter.take(1 << 30) == 0


def test_something_large_waits_for_a_piece_and_something_small_for_itself() -> None:
    clock = Clock()
    limiter = RateLimiter(RATE, clock)
    limiter.take(1 << 30)
    assert limiter.take(100) == 0
    assert limiter.due_s(1 << 30) == pytest.approx(PIECE_BYTES / RATE, rel=0.01)
    assert limiter.due_s(100) == pytest.approx(100 / RATE, rel=0.02)
    clock.now += 101 / RATE
    assert limiter.take(1 << 30) == 0 and limiter.take(100) == 100


def test_what_was_given_back_may_be_taken_again() -> None:
    limiter = RateLimiter(RATE, Clock())
    granted = limiter.take(1 << 30)
    limiter.give_back(granted)
    assert limiter.take(1 << 30) == granted


@pytest.mark.parametrize("algorithm", ["ring", "halving", "star", "tree"])
def test_sums_are_right_and_take_at_least_what_the_rate_demands(algorithm: str) -> None:
    numel = 100_003

    def work(group: Group) -> float:
        flat = torch.arange(numel, dtype=torch.float32) % 64 + group.rank
        begin = time.monotonic()
        for _ in range(3):
            total = group.all_reduce(flat.clone(), algorithm=algorithm)
            assert torch.equal(total, 3 * (torch.arange(numel, dtype=torch.float32) % 64) + 3)
        assert group.transport.kind == "tcp"
        least_s = (sum(group.transport.sent_bytes) - BURST) / RATE
        assert time.monotonic() - begin >= least_s
        return least_s

    assert max(run(3, work, "auto", rate_bytes_per_s=float(RATE))) > 0.05  # so the limit was felt


@pytest.mark.parametrize("kind", ["shm", "engine"])
def test_a_transport_that_would_not_heed_the_limit_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"a rate limit needs the tcp transport; {kind}"):
        run(2, lambda group: None, kind, rate_bytes_per_s=float(RATE))


def test_the_environment_gives_the_rate_and_refuses_what_is_none() -> None:
    assert environment.read({"HORA_RATE_BYTES_PER_S": "12500000"}).rate_bytes_per_s == 12.5e6
    assert environment.read({}).rate_bytes_per_s is None
    with pytest.raises(ValueError, match="HORA_RATE_BYTES_PER_S takes a number of bytes per second"):
        environment.read({"HORA_RATE_BYTES_PER_S": "fast"})
