"""Explanation of a collective: each step of its schedule, with the partial sums in every chunk, and a summary.

Everything is computed from collectives/schedule.py, the schedules that the algorithms are tested against."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from ..collectives import schedule as schedules
from ..collectives.schedule import Schedule, ScheduledTransfer, State
from .pictures import EASY_RANKS, draw
from .stories import ALONE, REDUCE, STORIES, Story
from .text import facts, heading, rule, title, wrap

NAMES = ("ring", "tree", "halving", "star", "reduce")
MAX_RANKS = 16  # up to EASY_RANKS lines have at most 110 columns; above, the text abbreviates and may take 136


def lines(name: str, ranks: int) -> list[str]:
    """The explanation of one of `NAMES`. ValueError for fewer than 1 or more than `MAX_RANKS` ranks."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"explain draws 1 to {MAX_RANKS} ranks, got {ranks}")
    on_ranks = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if name == "reduce":
        head, idea = f"reduce on {on_ranks}: serial against tree", REDUCE
    else:
        head, idea = f"{STORIES[name].title} on {on_ranks}", STORIES[name].idea
    opening = [*title(head), "", *wrap(idea), ""]
    if ranks == 1:
        return [*opening, *wrap(ALONE)]
    if name == "reduce":
        return [*opening, *_compare_reduces(ranks)]
    plan = schedules.SCHEDULES[name](ranks)
    return [*opening, *draw(plan), "", *_legend(plan), "", *_walk(plan, STORIES[name])]


def _compare_reduces(n: int) -> list[str]:
    serial, tree = (schedules.SCHEDULES[name](n) for name in ("reduce-serial", "reduce-tree"))
    lines = [*_legend(serial), ""]
    for plan in (serial, tree):
        story = STORIES[plan.name]
        lines += [*title(story.title), "", *wrap(story.idea), "", *draw(plan), "", *_walk(plan, story), ""]
    lines += [*title("Serial against tree"), "", f"  {'':<14}{'serial':>8}{'tree':>8}"]
    for what, left, right, why in (
        ("steps", serial.num_steps, tree.num_steps, "n − 1 against ⌈log2 n⌉"),
        ("messages", serial.num_messages, tree.num_messages, "the same: every rank but the root sends once"),
        ("root receives", len(serial.receives(0)), len(tree.receives(0)), "whole vectors, each of which it must add"),
    ):
        lines.append(f"  {what:<14}{left:>8}{right:>8}     {why}")
    sizes = (2, 4, 8, 16, 64, 256, 1024)
    lines += ["", "  The difference grows with the number of ranks:", "", _row("ranks", sizes, 14, 8)]
    lines.append(_row("serial", [size - 1 for size in sizes], 14, 8) + "   steps")
    lines.append(_row("tree", [schedules.ceil_log2(size) for size in sizes], 14, 8) + "   steps")
    return lines


def _row(name: str, cells: Sequence[object], margin: int, width: int) -> str:
    return f"  {name:<{margin}}" + "".join(f"{cell:>{width}}" for cell in cells)


def _walk(plan: Schedule, story: Story) -> list[str]:
    """The start, then each step's transfers and what every rank holds after it, then the summary."""
    table = _Table(plan)
    before, *states = table.states
    lines = [rule("Start: every rank holds only its own numbers"), "", *table.draw(before), ""]
    steps_of = {phase: [i for i, step in enumerate(plan.steps) if step.phase == phase] for phase in story.rules}
    for number, (step, after) in enumerate(zip(plan.steps, states, strict=True)):
        same_phase = steps_of[step.phase]
        if number == same_phase[0]:
            lines += [*heading(f"Phase: {step.phase}"), "", *wrap(_fill_in(story.rules[step.phase], plan)), ""]
        place = f" {same_phase.index(number) + 1} of {len(same_phase)}" if len(same_phase) > 1 else ""
        lines += [rule(f"Step {number + 1} of {plan.num_steps} · {step.phase}{place}"), ""]
        lines += [*_transfers(plan, step.transfers, after), "", *table.draw(after, before), ""]
        before = after
    return lines + _summary(plan, story)


def _fill_in(rule: str, plan: Schedule) -> str:
    """A rule with the numbers of this run; the names are those of schedule.py."""
    p, e = plan.parts, plan.ranks - plan.parts
    left = [r for r in range(plan.ranks) if r >= 2 * e or r % 2 == 0]
    return rule.format(n=plan.ranks, p=p, folding=2 * e, left=", ".join(map(str, left)), who="number" if e else "rank")


def _transfers(plan: Schedule, transfers: Sequence[ScheduledTransfer], after: State) -> list[str]:
    """One line per transfer; more than EASY_RANKS of them are abbreviated and put into columns."""
    short = len(transfers) > EASY_RANKS
    digits = len(str(plan.ranks - 1))
    payloads = [_payload(plan, transfer) for transfer in transfers]
    longest = max(map(len, payloads))
    lines = []
    for transfer, payload in zip(transfers, payloads, strict=True):
        arrow = f"──{payload}──".ljust(longest + 4, "─") + "▶"
        result = _sum(after[transfer.target][transfer.start], plan.ranks, room=5 if short else 24)
        source, target = f"{transfer.source:>{digits}}", f"{transfer.target:>{digits}}"
        verb = "adds" if transfer.reduce else "copies"
        if short:
            lines.append(f"{source} {arrow} {target}  {verb} → {result}")
            continue
        what = payload if plan.parts > 1 else "the vector"
        becomes = "become" if len(transfer.chunks) > 1 else "becomes"
        lines.append(f"  rank {source} {arrow} rank {target}   {verb}: {what} there {becomes} {result}")
    if not short:
        return lines
    width = max(map(len, lines)) + 4
    num_rows = -(-len(lines) // max(1, 116 // width))
    return ["  " + "".join(line.ljust(width) for line in lines[row::num_rows]) for row in range(num_rows)]


def _payload(plan: Schedule, transfer: ScheduledTransfer) -> str:
    if plan.parts == 1:
        return "vector"
    one = len(transfer.chunks) == 1
    return f"chunk {transfer.start}" if one else f"chunks {transfer.start}–{transfer.stop - 1}"


class _Table:
    """Ranks down, chunks across, a partial sum in each cell; a vector in one piece takes one row, with ranks across."""

    def __init__(self, plan: Schedule) -> None:
        self.states = [schedules.initial(plan), *schedules.simulate(plan)]
        self._ranks = plan.ranks
        self._one_row = plan.parts == 1
        columns, kind = (plan.ranks, "rank") if self._one_row else (plan.parts, "chunk")
        easy = columns <= EASY_RANKS
        self._heads = [f"{kind} {i}" if easy else f"{kind[0]}{i}" for i in range(columns)]
        self._sides = ["holds"] if self._one_row else [f"rank {r}" if easy else f"r{r}" for r in range(plan.ranks)]
        self._margin = max(map(len, self._sides)) + 3
        available = (108 if plan.ranks <= EASY_RANKS else 132) - self._margin
        self._room = max(5, available // columns - 5)
        self.texts = {self._text(cell) for state in self.states for row in state for cell in row}
        longest = max(map(len, {*self.texts, *self._heads}))
        # Two for the brackets, two for space if they fit; odd, so that sums of single digits are centred.
        roomy = (longest + 4) | 1
        self._width = roomy if columns * roomy <= available else longest + 2

    def draw(self, state: State, before: State | None = None) -> list[str]:
        """The state, with changes from `before` in brackets."""
        lines = [" " * self._margin + "".join(f" {head} ".center(self._width) for head in self._heads)]
        for side, row, old_row in zip(self._sides, self._rows(state), self._rows(before or state), strict=True):
            cells = [
                f"[{self._text(new)}]" if new != old else self._text(new) for new, old in zip(row, old_row, strict=True)
            ]
            lines.append(f"  {side}".ljust(self._margin) + "".join(cell.center(self._width) for cell in cells))
        return lines

    def _rows(self, state: State) -> State:
        return (tuple(row[0] for row in state),) if self._one_row else state

    def _text(self, contributions: frozenset[int]) -> str:
        return _sum(contributions, self._ranks, self._room)


def _sum(contributions: frozenset[int], n: int, room: int) -> str:
    """A partial sum in about `room` characters: 0+1+2, or 0…2, or 0,2…6, or Σ4; `all ✓` when complete."""
    if len(contributions) == n:
        return "all ✓" if n <= EASY_RANKS or room > 5 else "✓"
    starts = [r for r in sorted(contributions) if (r - 1) % n not in contributions]
    # A run that continues past the last rank at rank 0 is written in the order in which it travelled: 4+0+1.
    order = sorted(contributions, key=lambda r: (r - starts[0]) % n if len(starts) == 1 else r)
    full = "+".join(map(str, order))
    if len(full) <= room:
        return full
    if len(starts) == 1:
        return f"{order[0]}…{order[-1]}"
    if len({b - a for a, b in pairwise(order)}) == 1:
        return f"{order[0]},{order[1]}…{order[-1]}"
    return f"Σ{len(order)}"


def _legend(plan: Schedule) -> list[str]:
    """How to read the tables; explains only the abbreviations that appear."""
    texts = _Table(plan).texts
    pieces = "travels in one piece" if plan.parts == 1 else f"is cut into {plan.parts} chunks of nearly equal size"
    text = (
        f"How to read the tables: the vector {pieces}. A cell lists the ranks whose numbers are added up in it: 0+1 is "
        "the sum of the numbers of ranks 0 and 1. [Brackets] mark what has just changed, "
        f"{'all ✓' if 'all ✓' in texts else '✓'} the complete sum."
    )
    short = []
    if plan.ranks > EASY_RANKS:
        short.append("r3 is rank 3" if plan.parts <= EASY_RANKS else "r3 is rank 3 and c3 chunk 3")
    if any("…" in text and "," not in text for text in texts):
        past = f"; {plan.ranks - 2}…1 continues past the last rank at rank 0" if plan.name == "ring" else ""
        short.append(f"0…3 is 0+1+2+3{past}")
    if any("," in text for text in texts):
        short.append("0,2…6 is 0+2+4+6")
    if any("Σ" in text for text in texts):
        short.append("Σ6 is a sum of six ranks")
    return wrap(f"{text} Abbreviations: {', '.join(short)}." if short else text)


def _summary(plan: Schedule, story: Story) -> list[str]:
    n = plan.ranks
    counts = {"sent": plan.chunks_sent, "received": plan.chunks_received, "added": plan.chunks_added}
    rows = {name: [_decimal(Fraction(count(r), plan.parts)) for r in range(n)] for name, count in counts.items()}
    heads = [f"rank {r}" if n <= EASY_RANKS else f"r{r}" for r in range(n)]
    width = max(len(text) for row in (heads, *rows.values()) for text in row) + 2
    per_rank = {len(plan.sends(r)) for r in range(n)}
    few, many = min(per_rank), max(per_rank)
    told = [
        ("steps", f"{plan.num_steps} = {story.steps}"),
        ("messages", f"{plan.num_messages}, {f'{few} from each rank' if few == many else f'{few} to {many} per rank'}"),
        ("data sent", story.uneven if story.uneven and n & (n - 1) else story.share),
        ("the root", story.root),
        ("good for", story.good),
        ("the price", story.cost),
    ]
    lines = [*heading("Summary"), "", *facts(told), "", _row("in vectors", heads, 13, width)]
    return lines + [_row(name, row, 13, width) for name, row in rows.items()]


def _decimal(x: Fraction) -> str:
    return str(x.numerator) if x.denominator == 1 else f"{float(x):.2f}".rstrip("0")
