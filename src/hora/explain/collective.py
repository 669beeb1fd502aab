"""A collective as a picture in text, step by step, with the partial sums in every chunk.

Everything shown is computed from collectives/schedule.py, the same schedule that the algorithms are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from ..collectives import schedule as schedules
from ..collectives.schedule import Schedule, ScheduledTransfer, State
from .text import facts, heading, rule, title, wrap

NAMES = ("ring", "tree", "halving", "star", "reduce")
MAX_RANKS = 16
_EASY_RANKS = 8
"""Up to here the output keeps to 110 columns and spells everything out; above, it abbreviates and may take 136."""


def lines(name: str, ranks: int) -> list[str]:
    """The explanation of one of `NAMES`. Raises ValueError for fewer than 1 or more than `MAX_RANKS` ranks."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"explain draws 1 to {MAX_RANKS} ranks, got {ranks}")
    return _reduce(ranks) if name == "reduce" else _one(_STORIES[name], ranks)


@dataclass(frozen=True, kw_only=True)
class _Story:
    """The words around one schedule. `rules` says for each phase what happens; the rest is for the summary.

    `uneven` replaces `share` where n is not a power of two.
    """

    title: str
    schedule: Callable[[int], Schedule]
    picture: Callable[[Schedule], list[str]]
    idea: str
    rules: dict[str, str]
    steps: str
    share: str
    root: str
    good: str
    cost: str
    uneven: str = ""


def _one(story: _Story, n: int) -> list[str]:
    plan = story.schedule(n)
    lines = [*title(f"{story.title} on {_ranks(n)}"), "", *wrap(story.idea), ""]
    if n == 1:
        return [*lines, *wrap(_ALONE)]
    return [*lines, *story.picture(plan), "", *_legend(plan), "", *_walk(plan, story), *_summary(plan, story)]


def _reduce(n: int) -> list[str]:
    lines = [*title(f"reduce on {_ranks(n)}: serial against tree"), "", *wrap(_REDUCE), ""]
    if n == 1:
        return [*lines, *wrap(_ALONE)]
    stories = _STORIES["reduce-serial"], _STORIES["reduce-tree"]
    serial, tree = (story.schedule(n) for story in stories)
    lines += [*_legend(serial), ""]
    for story, plan in zip(stories, (serial, tree), strict=True):
        lines += [*title(story.title), "", *wrap(story.idea), "", *story.picture(plan), ""]
        lines += [*_walk(plan, story), *_summary(plan, story), ""]
    lines += [*title("Serial against tree"), "", f"  {'':<14}{'serial':>8}{'tree':>8}"]
    for what, left, right, why in (
        ("steps", serial.num_steps, tree.num_steps, "n − 1 against ⌈log2 n⌉"),
        ("messages", serial.num_messages, tree.num_messages, "the same: every rank but the root sends once"),
        ("root receives", len(serial.receives(0)), len(tree.receives(0)), "whole vectors, each of which it must add"),
    ):
        lines.append(f"  {what:<14}{left:>8}{right:>8}     {why}")
    sizes = (2, 4, 8, 16, 64, 256, 1024)
    return [
        *lines,
        "",
        "  The more ranks, the wider the gap:",
        "",
        f"  {'ranks':<14}" + "".join(f"{size:>8}" for size in sizes),
        f"  {'serial':<14}" + "".join(f"{size - 1:>8}" for size in sizes) + "   steps",
        f"  {'tree':<14}" + "".join(f"{schedules.ceil_log2(size):>8}" for size in sizes) + "   steps",
    ]


# ── the steps ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _walk(plan: Schedule, story: _Story) -> list[str]:
    """Start, then for each step its transfers and what every rank holds after it."""
    table = _Table(plan)
    before, *states = table.states
    lines = [rule("Start: every rank holds only its own numbers"), "", *table.draw(before), ""]
    of_phase = {phase: [i for i, s in enumerate(plan.steps) if s.phase == phase] for phase in story.rules}
    for number, (step, after) in enumerate(zip(plan.steps, states, strict=True)):
        inside = of_phase[step.phase]
        if number == inside[0]:
            lines += [*heading(f"Phase: {step.phase}"), "", *wrap(_filled(story.rules[step.phase], plan)), ""]
        place = f" {inside.index(number) + 1} of {len(inside)}" if len(inside) > 1 else ""
        lines += [rule(f"Step {number + 1} of {plan.num_steps} · {step.phase}{place}"), ""]
        lines += [*_transfers(plan, step.transfers, after), "", *table.draw(after, before), ""]
        before = after
    return lines


def _transfers(plan: Schedule, transfers: Sequence[ScheduledTransfer], after: State) -> list[str]:
    """One line per transfer; with more than eight of them the short form, in columns."""
    short = len(transfers) > _EASY_RANKS
    digits = len(str(plan.ranks - 1))
    payloads = [_payload(plan, t) for t in transfers]
    longest = max(len(payload) for payload in payloads)
    lines = []
    for t, payload in zip(transfers, payloads, strict=True):
        arrow = f"──{payload}──".ljust(longest + 4, "─") + "▶"
        result = _sum(after[t.target][t.start], plan.ranks, room=5 if short else 24)
        source, target = f"{t.source:>{digits}}", f"{t.target:>{digits}}"
        if short:
            lines.append(f"{source} {arrow} {target}  {'adds' if t.reduce else 'copies'} → {result}")
            continue
        what = payload if plan.parts > 1 else "the vector"
        verb = "become" if len(t.chunks) > 1 else "becomes"
        effect = f"adds: {what} there {verb} {result}" if t.reduce else f"copies: {what} there {verb} {result}"
        lines.append(f"  rank {source} {arrow} rank {target}   {effect}")
    if not short:
        return lines
    width = max(len(line) for line in lines) + 4
    columns = max(1, 116 // width)
    rows = -(-len(lines) // columns)
    return ["  " + "".join(line.ljust(width) for line in lines[row::rows]) for row in range(rows)]


def _payload(plan: Schedule, t: ScheduledTransfer) -> str:
    if plan.parts == 1:
        return "vector"
    return f"chunk {t.start}" if len(t.chunks) == 1 else f"chunks {t.start}–{t.stop - 1}"


class _Table:
    """Ranks down, chunks across, a partial sum in each cell; a vector in one piece lies on its side, ranks across."""

    def __init__(self, plan: Schedule) -> None:
        self.plan = plan
        self.flat = plan.parts == 1
        self.states = [schedules.initial(plan), *schedules.simulate(plan)]
        columns, kind = (plan.ranks, "rank") if self.flat else (plan.parts, "chunk")
        spelt = columns <= _EASY_RANKS
        self.heads = [f"{kind} {i}" if spelt else f"{kind[0]}{i}" for i in range(columns)]
        self.sides = [f"rank {r}" if spelt else f"r{r}" for r in range(plan.ranks)]
        if self.flat:
            self.sides = ["holds"]
        self.margin = max(len(side) for side in self.sides) + 3
        room_for_all = (108 if plan.ranks <= _EASY_RANKS else 132) - self.margin
        self.room = max(5, room_for_all // columns - 5)
        self.texts = {self._text(cell) for state in self.states for row in state for cell in row}
        longest = max(len(text) for text in {*self.texts, *self.heads})
        # Two for the brackets, two for air where there is room; odd, so that sums of single digits stand in the middle.
        self.width = longest + 2
        if columns * ((longest + 4) | 1) <= room_for_all:
            self.width = (longest + 4) | 1

    def draw(self, state: State, before: State | None = None) -> list[str]:
        """The state, with what is different from `before` in brackets."""
        rows = [tuple(row[0] for row in state)] if self.flat else state
        old = rows if before is None else [tuple(row[0] for row in before)] if self.flat else before
        lines = [" " * self.margin + "".join(f" {head} ".center(self.width) for head in self.heads)]
        for side, row, old_row in zip(self.sides, rows, old, strict=True):
            cells = [
                f"[{self._text(new)}]" if new != was else self._text(new) for new, was in zip(row, old_row, strict=True)
            ]
            lines.append(f"  {side}".ljust(self.margin) + "".join(cell.center(self.width) for cell in cells))
        return lines

    def _text(self, contributions: frozenset[int]) -> str:
        return _sum(contributions, self.plan.ranks, self.room)


def _sum(contributions: frozenset[int], n: int, room: int) -> str:
    """A partial sum in at most about `room` characters: 0+1+2, or 0…2, or 0,2…6, or Σ4; `all ✓` when complete."""
    if len(contributions) == n:
        return "all ✓" if n <= _EASY_RANKS or room > 5 else "✓"
    first = [r for r in sorted(contributions) if (r - 1) % n not in contributions]
    # A run that goes on past the last rank to rank 0 is written in the order in which it travelled: 4+0+1.
    order = sorted(contributions, key=lambda r: (r - first[0]) % n if len(first) == 1 else r)
    spelt = "+".join(map(str, order))
    if len(spelt) <= room:
        return spelt
    if len(first) == 1:
        return f"{order[0]}…{order[-1]}"
    strides = {b - a for a, b in pairwise(order)}
    if len(strides) == 1:
        return f"{order[0]},{order[1]}…{order[-1]}"
    return f"Σ{len(order)}"


# ── the pictures ───────────────────────────────────────────────────────────────────────────────────────────────────


def _picture_ring(plan: Schedule) -> list[str]:
    line = " ──▶ ".join(_label(plan).format(r) for r in range(plan.ranks))
    return [f"    ┌──▶ {line} ──┐", f"    └{'◀'.center(len(line) + 7, '─')}┘"]


def _picture_tree(plan: Schedule) -> list[str]:
    children: dict[int, list[int]] = {rank: [] for rank in range(plan.ranks)}
    for step in plan.steps:
        for t in step.transfers:
            if t.reduce:
                children[t.target].append(t.source)
    lines, _ = _branch(0, children, _label(plan))
    return ["    " + line for line in lines]


def _picture_star(plan: Schedule) -> list[str]:
    others = list(range(1, plan.ranks))
    half = (len(others) + 1) // 2
    above, below = others[:half], others[half:]
    label = _label(plan)
    top, left = _flat_branch(above, label)
    top = [line.translate(_UPSIDE_DOWN) for line in reversed(top)]
    if not below:
        return ["    " + line for line in top]
    bottom, right = _flat_branch(below, label)
    shift = max(left, right)
    top = [" " * (shift - left) + line for line in top]
    bottom = [" " * (shift - right) + line for line in bottom]
    return ["    " + line for line in [*top, *bottom[1:]]]


def _picture_serial(plan: Schedule) -> list[str]:
    lines, _ = _flat_branch(list(range(1, plan.ranks)), _label(plan))
    return ["    " + line.translate(_UPSIDE_DOWN) for line in reversed(lines)]


_UPSIDE_DOWN = str.maketrans("┌┐┬┴", "└┘┴┬")


def _label(plan: Schedule) -> str:
    return "rank {}" if plan.ranks <= _EASY_RANKS else "{}"


def _flat_branch(ranks: list[int], label: str) -> tuple[list[str], int]:
    """Rank 0 above a row of ranks, and the column of its middle."""
    return _branch(0, {0: ranks} | {r: [] for r in ranks}, label)


def _branch(rank: int, children: dict[int, list[int]], label: str) -> tuple[list[str], int]:
    """Draw a tree top down; returns its lines, all of one width, and the column of the top's middle."""
    text = label.format(rank)
    blocks = [_branch(child, children, label) for child in children[rank]]
    if not blocks:
        return [text], len(text) // 2
    gap = 2 if label != "{}" else 4
    anchors, offset = [], 0
    for lines, anchor in blocks:
        anchors.append(offset + anchor)
        offset += len(lines[0]) + gap
    height = max(len(lines) for lines, _ in blocks)
    widths = [len(lines[0]) for lines, _ in blocks]
    body = [
        (" " * gap).join(
            (lines[row] if row < len(lines) else "").ljust(w) for (lines, _), w in zip(blocks, widths, strict=True)
        )
        for row in range(height)
    ]
    middle = (anchors[0] + anchors[-1]) // 2
    width = len(body[0])
    link = [" "] * width
    for column in range(anchors[0], anchors[-1] + 1):
        link[column] = "─"
    for anchor in anchors:
        link[anchor] = "┬"
    link[anchors[0]], link[anchors[-1]] = "┌", "┐"
    link[middle] = "│" if len(anchors) == 1 else "┼" if middle in anchors else "┴"
    left = middle - len(text) // 2
    pad = max(0, -left)
    top = " " * max(0, left) + text
    picture = [top, *(" " * pad + line for line in ["".join(link), *body])]
    full = max(len(line) for line in picture)
    return [line.ljust(full) for line in picture], middle + pad


def _picture_halving(plan: Schedule) -> list[str]:
    """The ranks across, and below them, round by round, who exchanges with whom; arcs that cross get a line each."""
    pitch = 9 if plan.ranks <= _EASY_RANKS else 6
    margin = 18
    label = "rank {}" if plan.ranks <= _EASY_RANKS else "r{}"
    lines = [" " * margin + "".join(label.format(r).center(pitch) for r in range(plan.ranks))]
    rounds = [step for step in plan.steps if step.phase in ("fold in", "halving")]
    place = 0
    for step in rounds:
        name = step.phase
        if step.phase == "halving":
            place += 1
            name = f"halving {place}"
        rows: list[list[str]] = []
        ends: list[int] = []
        for t in step.transfers:
            low, high = sorted((t.source, t.target))
            if step.phase == "halving" and t.source != low:
                continue
            row = next((i for i, end in enumerate(ends) if end < low), len(rows))
            if row == len(rows):
                rows.append([" "] * (pitch * plan.ranks))
                ends.append(-1)
            ends[row] = high
            start, stop = low * pitch + pitch // 2, high * pitch + pitch // 2
            rows[row][start : stop + 1] = "◀" + "─" * (stop - start - 1) + ("▶" if step.phase == "halving" else "●")
        for i, cells in enumerate(rows):
            lines.append(f"    {name if i == 0 else '':<{margin - 4}}" + "".join(cells))
    back = "then the same exchanges backwards (doubling)"
    back += ", and the folded ranks get the result (fold out)" if rounds[0].phase == "fold in" else ""
    return [*lines, f"    {back}"]


# ── the words ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _legend(plan: Schedule) -> list[str]:
    """How to read the tables; an abbreviation is explained only where it is used."""
    texts = _Table(plan).texts
    if plan.parts == 1:
        text = "How to read the tables: the vector travels in one piece. "
    else:
        text = f"How to read the tables: the vector is cut into {plan.parts} chunks of nearly equal size. "
    text += "A cell names the ranks whose numbers are added up in it: 0+1 is the sum of what ranks 0 and 1 brought. "
    text += f"[Brackets] mark what has just changed, {'all ✓' if 'all ✓' in texts else '✓'} the complete sum."
    short = []
    if plan.ranks > _EASY_RANKS:
        short.append("r3 is rank 3" if plan.parts <= _EASY_RANKS else "r3 is rank 3 and c3 chunk 3")
    if any("…" in text and "," not in text for text in texts):
        past = f"; {plan.ranks - 2}…1 goes on past the last rank to rank 0" if plan.name == "ring" else ""
        short.append(f"0…3 is 0+1+2+3{past}")
    if any("," in text for text in texts):
        short.append("0,2…6 is 0+2+4+6")
    if any("Σ" in text for text in texts):
        short.append("Σ6 is a sum of six ranks")
    return wrap(f"{text} To save room: {', '.join(short)}." if short else text)


def _summary(plan: Schedule, story: _Story) -> list[str]:
    n = plan.ranks
    everyone = range(n)
    sent = [plan.share_sent(r) for r in everyone]
    received = [Fraction(plan.chunks_received(r), plan.parts) for r in everyone]
    added = [Fraction(plan.chunks_added(r), plan.parts) for r in everyone]
    numbers = [[_decimal(x) for x in row] for row in (sent, received, added)]
    heads = [f"rank {r}" if n <= _EASY_RANKS else f"r{r}" for r in everyone]
    width = max(len(text) for row in [heads, *numbers] for text in row) + 2
    per_rank = {len(plan.sends(r)) for r in everyone}
    spread = (
        f"{per_rank.pop()} from each rank" if len(per_rank) == 1 else f"{min(per_rank)} to {max(per_rank)} per rank"
    )
    share = story.uneven if story.uneven and n & (n - 1) else story.share
    told = [
        ("steps", f"{plan.num_steps} = {story.steps}"),
        ("messages", f"{plan.num_messages}, {spread}"),
        ("data sent", share),
        ("the root", story.root),
        ("good for", story.good),
        ("the price", story.cost),
    ]
    lines = [*heading("Summary"), "", *facts(told)]
    lines += ["", "  in vectors   " + "".join(head.rjust(width) for head in heads)]
    for name, row in zip(("sent", "received", "added"), numbers, strict=True):
        lines.append(f"  {name:<13}" + "".join(text.rjust(width) for text in row))
    return lines


def _filled(rule: str, plan: Schedule) -> str:
    """A rule with this run's numbers in it; the names are those of schedule.py."""
    p, e = plan.parts, plan.ranks - plan.parts
    left = [r for r in range(plan.ranks) if r >= 2 * e or r % 2 == 0]
    return rule.format(n=plan.ranks, p=p, folding=2 * e, left=", ".join(map(str, left)), who="number" if e else "rank")


_ALONE = (
    "With one rank there is nothing to send: its own vector already is the sum of all. The same code runs, with no "
    "steps and no messages. Try it with 2 to 16 ranks."
)

_REDUCE = (
    "Everyone has a vector, and one rank, the root, wants the sum of all. It can take them one after the other, or "
    "the ranks can add up in pairs on the way, all pairs at the same time."
)

_STORIES: dict[str, _Story] = {
    "ring": _Story(
        title="ring all-reduce",
        schedule=schedules.ring,
        picture=_picture_ring,
        idea="The vector is cut into as many chunks as there are ranks, and the chunks travel round a ring, each rank "
        "adding its own numbers to what passes, until every chunk is complete somewhere. Then the complete chunks "
        "travel round once more, so that everyone has them all.",
        rules={
            "scatter-reduce": "In its step i = 0, 1, 2, … rank j sends chunk (j − i) mod {n} to rank (j + 1) mod {n}, "
            "which adds it to its own. All links work at the same time. At the end rank j owns one complete chunk, "
            "number (j + 1) mod {n}.",
            "all-gather": "Nothing is added any more. In its step i rank j sends the complete chunk (j + 1 − i) mod "
            "{n} to rank (j + 1) mod {n}, which puts it in place of its own partial sum.",
        },
        steps="2(n − 1): n − 1 to add up, n − 1 to hand round",
        share="every rank sends 2(n − 1)/n of the data: a little less than twice its vector, however many ranks there "
        "are. No all-reduce by messages between ranks can do with less.",
        root="there is none: everyone sends, receives and adds the same, and talks only to its two neighbours.",
        good="large tensors, and links of equal speed.",
        cost="the number of steps grows with n, and each costs one latency: slow for small tensors. One slow link "
        "slows all.",
    ),
    "tree": _Story(
        title="tree all-reduce",
        schedule=schedules.tree,
        picture=_picture_tree,
        idea="In every round the ranks that still hold a sum pair up, and one of each pair hands its sum to the other, "
        "so half of them are done; soon rank 0 holds the sum of all. Then the result goes down the same way.",
        rules={
            "reduce up": "In its round k = 0, 1, 2, … the ranks with rank mod 2^(k+1) = 2^k send their whole vector to "
            "rank − 2^k, which adds it. The distance doubles each time.",
            "broadcast down": "The same edges the other way round, the last first: whoever has the result passes it "
            "on.",
        },
        steps="2⌈log2 n⌉: ⌈log2 n⌉ up, ⌈log2 n⌉ down",
        share="a rank sends one whole vector up and one down to each of its children: 1 + children (the root only "
        "children), at most ⌈log2 n⌉. A leaf sends 1.",
        root="rank 0 receives, adds and sends back ⌈log2 n⌉ whole vectors, where a star's root has n − 1.",
        good="small tensors, where the number of steps is what counts.",
        cost="whole vectors in every step, and in each step most ranks wait: wasteful for large tensors.",
    ),
    "halving": _Story(
        title="halving-doubling all-reduce",
        schedule=schedules.halving,
        picture=_picture_halving,
        idea="In every round two ranks share out the range they both work on: each keeps one half, adds what the other "
        "had there and sends the other half away, so the messages halve while the sums double. At the end each owns "
        "one complete chunk, and the same exchanges backwards hand out everything.",
        rules={
            "fold in": "The exchanges need a power of two; the largest here is p = {p}. So of the first 2(n − p) = "
            "{folding} ranks every odd one sends its whole vector to the even one before it, and waits. The ranks "
            "left, {left}, get the numbers v = 0 … p − 1 in this order.",
            "halving": "In its round k = 0, 1, 2, … {who} v works with {who} v XOR {p}/2^(k+1): half of them away at "
            "first, the neighbour at last. The lower of the two keeps the lower half of their range, the upper one "
            "the upper half.",
            "doubling": "The same pairs backwards, neighbours first: both send all the complete chunks they own, so "
            "each owns twice as many after every round.",
            "fold out": "The ranks that were folded in get the whole result from their partner.",
        },
        steps="2⌈log2 n⌉: as many halvings as doublings, and one fold each way if n is not a power of two",
        share="every rank sends 2(n − 1)/n of the data, as in the ring: a little less than twice its vector.",
        uneven="with p the largest power of two below n, a rank that exchanges sends 2(p − 1)/p of the data; one that "
        "also folds for another sends a whole vector more, 2(p − 1)/p + 1, and a folded rank sends 1. The ring's "
        "2(n − 1)/n is reached only when n is a power of two.",
        root="there is none: all ranks that exchange do the same work.",
        good="medium tensors: the few steps of the tree with the little data of the ring, if n is a power of two.",
        cost="partners far apart, so it wants a network where all pairs are equally near. When n is not a power of "
        "two, each fold costs a whole vector on top.",
    ),
    "star": _Story(
        title="star all-reduce",
        schedule=schedules.star,
        picture=_picture_star,
        idea="Everyone sends its vector to rank 0, which adds them up and sends the result back to everyone. It is the "
        "simplest way, and the baseline that the others are measured against.",
        rules={
            "reduce at the root": "Ranks 1, 2, 3, … send their whole vector; rank 0 takes them in this order, one at a "
            "time, so the sum is always added up in the same order.",
            "send back": "Rank 0 sends the result to each in turn.",
        },
        steps="2(n − 1): the root handles one vector at a time, n − 1 in and n − 1 out",
        share="every rank but the root sends its vector once; the root sends n − 1.",
        root="rank 0 receives n − 1 vectors, adds n − 1 and sends n − 1, while the others mostly wait: its cost grows "
        "with n.",
        good="a few ranks, tiny tensors, and as the yardstick: one fixed order of summation.",
        cost="twice the ranks, twice the time.",
    ),
    "reduce-serial": _Story(
        title="A. Serial: one after the other",
        schedule=schedules.reduce_serial,
        picture=_picture_serial,
        idea="Every rank sends straight to the root. The root can only take and add one vector at a time.",
        rules={"reduce at the root": "Ranks 1, 2, 3, … send their whole vector to rank 0, which adds it."},
        steps="n − 1",
        share="every rank but the root sends its vector once.",
        root="rank 0 receives and adds all n − 1 vectors itself.",
        good="a few ranks; nothing to arrange.",
        cost="time grows with n, and all of it is the root's.",
    ),
    "reduce-tree": _Story(
        title="B. Tree: all pairs at once",
        schedule=schedules.reduce_tree,
        picture=_picture_tree,
        idea="Neighbours add up in pairs, then those who received do the same, as in a tournament. Each round halves "
        "the number of ranks that still hold something to hand over.",
        rules={
            "reduce up": "In its round k = 0, 1, 2, … the ranks with rank mod 2^(k+1) = 2^k send their whole vector to "
            "rank − 2^k, which adds it. The distance doubles each time."
        },
        steps="⌈log2 n⌉",
        share="every rank but the root sends its vector once, as in the serial way.",
        root="rank 0 receives and adds only ⌈log2 n⌉ vectors; the other additions happen elsewhere at the same time.",
        good="any number of ranks; with two there is no difference.",
        cost="ranks in the middle must receive and add before they can send.",
    ),
}


def _ranks(n: int) -> str:
    return "1 rank" if n == 1 else f"{n} ranks"


def _decimal(x: Fraction) -> str:
    return str(x.numerator) if x.denominator == 1 else f"{float(x):.2f}".rstrip("0")
