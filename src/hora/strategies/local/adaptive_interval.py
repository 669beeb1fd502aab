"""Pace: how many steps a worker takes between two rounds, when rounds are by time."""

from __future__ import annotations

from collections.abc import Sequence


def steps_for(rank: int, every: int, step_s: Sequence[float], fewest: int) -> int:
    """As many as this worker can take while all together take about `every` each on average.

    `step_s` is what a step took each worker in the last round. The slowest decides, since its steps are the longest:
    the round lasts a whole number of them, and the others fit in what they can. Nobody knows how long a step takes
    before the first one, so the first round has the `fewest`. However slow one of them was in its last step, nobody
    takes more than twice as many as it should."""
    known = [each for each in step_s if each]  # who has had no samples yet is not known
    if not known:
        return fewest
    slowest = max(known)
    length_s = every * len(known) / sum(1.0 / each for each in known)
    whole_s = slowest * max(fewest, round(length_s / slowest))
    return max(fewest, int(min(whole_s, 2 * length_s) / (step_s[rank] or slowest) + 1e-6))
