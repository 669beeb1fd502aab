"""Claim: the master's communication time grows linearly with the workers, the ring's stays flat.

Hosts are network namespaces whose links the kernel shapes both ways; each holds one rank. The same ranks all-reduce the
same vector as a star, whose root is the master, and as a ring, in turns. What the links alone would take (bench/limits)
grows as 2(n−1) for the star and as 2(n−1)/n for the ring, which is 1 for two hosts and comes near 2 for many: so even a
perfect ring is not flat in the beginning, and the rule asks from which number of hosts on it is.

Bytes are counted by the kernel. Additions are counted in the schedule that the algorithms follow
(collectives/schedule.py); the processor's time of the busiest rank holds these, and what sending and receiving costs.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from .claim import Claim, Row, Table, Verdict, spread

FIT = 0.98  # the least R² of a line through the star's times
OFF = 0.25  # so far may the star's growth be from the line's
FLAT = 1.25  # what one doubling of the hosts may multiply the ring's time with
RATE = "200mbit"


def measure(quick: bool) -> list[Row]:
    return measured((2, 4, 8), 2 << 20, 1) if quick else measured((2, 4, 8, 16), 8 << 20, 5)


def measured(hosts: Sequence[int], num_bytes: int, rounds: int) -> list[Row]:
    """A row for each number of hosts and algorithm; the rounds are interleaved (bench/hosts_turns)."""
    from ..bench import hosts as bench

    plan = bench.Plan(picture_hosts=hosts, picture_bytes=num_bytes, picture_rate=RATE, picture_rounds=rounds)
    rows, failures = bench.measure_picture(plan)
    if failures:
        raise RuntimeError("; ".join(failures))
    return [row | {"additions": additions(row["name"], row["hosts"])} for row in rows]


def additions(algorithm: str, ranks: int) -> float:
    """Of the rank that adds most, for each element of the vector."""
    from ..collectives import schedule

    made = schedule.SCHEDULES[algorithm](ranks)
    return max(made.chunks_added(rank) for rank in range(ranks)) / made.parts


def obstacle(quick: bool) -> str:
    from ..bench import links

    found = links.obstacle()
    return f"there can be no network namespaces here: {found}. Run it as root on Linux, with ip and tc" if found else ""


def judge(rows: Sequence[Row]) -> Verdict:
    star, ring = _values(rows, "star", "median_s"), _values(rows, "ring", "median_s")
    first, last = min(star), max(star)
    fit, growth, expected = r_squared(star), star[last] / star[first], (last - 1) / (first - 1)
    linear = fit >= FIT and abs(growth / expected - 1) <= OFF
    added, of_ring = _values(rows, "star", "additions"), _values(rows, "ring", "additions")
    told = (
        f"from {first} to {last} hosts the star's time grows {growth:.1f}-fold (a line: {expected:g}-fold; "
        f"R² = {fit:.4f}), its root's additions from {added[first]:g} to {added[last]:g} for each element (the ring's "
        f"from {of_ring[first]:.2g} to {of_ring[last]:.2g}), and the ring's time {ring[last] / ring[first]:.2f}-fold"
    )
    if not linear or added[last] <= added[first]:
        return Verdict(word="fails", text=f"the star does not grow as it should: {told}")
    flat = flat_from(ring)
    if flat is None:
        return Verdict(word="fails", text=f"the ring is not flat: {told}")
    if flat == first:
        return Verdict(word="holds", text=told)
    limit = _values(rows, "ring", "limit_s")
    return Verdict(
        word="only if",
        text=f"the ring has {flat} hosts or more: from there to {last} its time grows "
        f"{ring[last] / ring[flat]:.2f}-fold, but {ring[flat] / ring[first]:.2f}-fold from {first} to {flat} (its "
        f"links alone: {limit[flat] / limit[first]:.2f}-fold). For the rest, {told}",
    )


def r_squared(times: dict[int, float]) -> float:
    """Of the straight line through the times over n − 1 that fits best."""
    return statistics.correlation([hosts - 1 for hosts in times], list(times.values())) ** 2


def flat_from(times: dict[int, float]) -> int | None:
    """The least number of hosts from which on no doubling multiplies the time by more than FLAT; None if none is."""
    places = sorted(times)
    found = None
    for before, after in reversed(list(itertools.pairwise(places))):
        if (times[after] / times[before]) ** (1 / math.log2(after / before)) > FLAT:
            break
        found = before
    return found


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for hosts in sorted({row["hosts"] for row in rows}):
        for name in ("star", "ring"):
            row = _row(rows, name, hosts)
            took, busy = (spread([1e3 * value for value in row[key]], ".0f") for key in ("each_s", "cpu_s"))
            wire = f"{row['wire_bytes'] / row['bytes']:.2f}"
            lines.append(
                [f"{hosts}, {name}", took, f"{1e3 * row['limit_s']:.0f}", wire, f"{row['additions']:.2f}", busy]
            )
    first = rows[0]
    return Table(
        headings=["hosts", "time: ms", "links alone: ms", "leaves the busiest host: × S",
                  "additions per element, busiest", "its processor: ms"],
        lines=lines,
        note=f"all-reduce of S = {first['bytes'] / 1e6:.3g} MB float32 over links of {first['rate']}, one rank on each "
        f"host; median (least to greatest) of {len(first['each_s'])} interleaved rounds",
    )  # fmt: skip


def draw(rows: Sequence[Row], figure: Any) -> None:
    from .figure import COLORS, dress, line

    both, alone, adding = figure.subplots(1, 3)
    first, last = (worst(row["hosts"] for row in rows) for worst in (min, max))
    for axis, names in ((both, ("star", "ring")), (alone, ("ring",))):
        for name in names:
            mine = {row["hosts"]: row["each_s"] for row in rows if row["name"] == name}
            line(axis, mine, f"{name}, measured", color=COLORS[name])
            limits = _values(rows, name, "limit_s")
            axis.plot(
                list(limits), list(limits.values()), "--", color=COLORS[name], linewidth=1,
                label=f"{name}, the links alone",
            )  # fmt: skip
    ring = _row(rows, "ring", last)
    end_s = ring["limit_s"] * last / (last - 1)
    alone.axhline(end_s, color=COLORS["ideal"], linestyle=":", label="the same, however many hosts: 2·S/B")
    for name, formula in (("star", "n − 1"), ("ring", "(n − 1)/n")):
        mine = {row["hosts"]: [row["additions"]] for row in rows if row["name"] == name}
        line(adding, mine, f"{name}: {formula}", color=COLORS[name])
    size = f"S = {ring['bytes'] / 1e6:.3g} MB, B = {ring['rate']}"
    grown = ", ".join(f"{name} × {_growth(rows, name, 'median_s'):.1f}" for name in ("star", "ring"))
    added = ", ".join(f"{name} × {_growth(rows, name, 'additions'):.1f}" for name in ("star", "ring"))
    dress(both, f"Time from {first} to {last} hosts: {grown}\n{size}", "n, hosts", "seconds per all-reduce")
    dress(alone, "The ring alone:\nits links let it rise towards 2·S/B", "n, hosts", "seconds per all-reduce")
    dress(adding, f"Additions of the busiest rank\n{added}", "n, hosts", "additions per element")
    for axis in (both, alone, adding):
        axis.set_xticks(sorted({row["hosts"] for row in rows}))
        axis.set_ylim(bottom=0)


def _row(rows: Sequence[Row], name: str, hosts: int) -> Row:
    return next(row for row in rows if (row["name"], row["hosts"]) == (name, hosts))


def _values(rows: Sequence[Row], name: str, key: str) -> dict[int, float]:
    """By the number of hosts, the fewest first."""
    mine = {row["hosts"]: row[key] for row in rows if row["name"] == name}
    return {hosts: mine[hosts] for hosts in sorted(mine)}


def _growth(rows: Sequence[Row], name: str, key: str) -> float:
    values = list(_values(rows, name, key).values())
    return values[-1] / values[0]


CLAIM = Claim(
    number=1,
    name="master",
    says="The master's communication time grows linearly with the number of workers; the ring's stays flat; the "
    "master's additions grow too.",
    rule=f"holds if a line through the star's median times over n − 1 has R² ≥ {FIT}, their growth from the fewest to "
    f"the most hosts is within {OFF:.0%} of the line's, the root's additions grow, and no doubling of the hosts "
    f"lengthens the ring's median time by more than {FLAT - 1:.0%}; only if, where that is so of the ring from some "
    "number of hosts on; fails otherwise. Even a perfect ring grows as 2(n−1)/n, 1.5-fold from 2 to 4 hosts: one as "
    "fast as its links is flat from 4 hosts on at best, and cannot make the sentence hold.",
    needs="root on Linux with ip and tc: 16 network namespaces with links of 200 Mbit/s",
    minutes=(0.7, 3.5),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    obstacle=obstacle,
    figure_size=(12.0, 4.4),
)
