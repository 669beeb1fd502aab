"""Drawings of the communication patterns: ring, tree, star and halving-doubling, as lines of text."""

from __future__ import annotations

from ..collectives.schedule import Schedule, ScheduleStep

EASY_RANKS = 8  # up to here ranks are spelled out as `rank 3`
_INDENT = "    "
_FLIP = str.maketrans("┌┐┬┴", "└┘┴┬")


def draw(plan: Schedule) -> list[str]:
    if plan.name == "ring":
        line = " ──▶ ".join(_label(plan).format(rank) for rank in range(plan.ranks))
        lines = [f"┌──▶ {line} ──┐", f"└{'◀'.center(len(line) + 7, '─')}┘"]
    elif plan.name == "halving":
        lines = _exchanges(plan)
    elif plan.name == "star":
        lines = _star(plan)
    elif plan.name == "reduce-serial":
        lines = _flipped(_flat_tree(range(1, plan.ranks), plan)[0])
    else:
        children: dict[int, list[int]] = {rank: [] for rank in range(plan.ranks)}
        for transfer in plan.transfers:
            if transfer.reduce:
                children[transfer.target].append(transfer.source)
        lines = _tree(0, children, _label(plan))[0]
    return [_INDENT + line for line in lines]


def _label(plan: Schedule) -> str:
    return "rank {}" if plan.ranks <= EASY_RANKS else "{}"


def _star(plan: Schedule) -> list[str]:
    """One half of the ranks above the root, the other below it."""
    half = plan.ranks // 2 + 1
    top, left = _flat_tree(range(1, half), plan)
    bottom, right = _flat_tree(range(half, plan.ranks), plan)
    shift = max(left, right)
    lines = [" " * (shift - left) + line for line in _flipped(top)]
    return lines + [" " * (shift - right) + line for line in bottom[1:]]


def _flipped(lines: list[str]) -> list[str]:
    return [line.translate(_FLIP) for line in reversed(lines)]


def _flat_tree(ranks: range, plan: Schedule) -> tuple[list[str], int]:
    return _tree(0, {0: list(ranks)} | {rank: [] for rank in ranks}, _label(plan))


def _tree(rank: int, children: dict[int, list[int]], label: str) -> tuple[list[str], int]:
    """A tree with its root on top: lines of equal width, and the column of the root's middle."""
    text = label.format(rank)
    blocks = [_tree(child, children, label) for child in children[rank]]
    if not blocks:
        return [text], len(text) // 2
    gap = " " * (2 if label != "{}" else 4)
    height = max(len(lines) for lines, _ in blocks)
    anchors, offset = [], 0
    for lines, anchor in blocks:
        anchors.append(offset + anchor)
        offset += len(lines[0]) + len(gap)
        lines += [" " * len(lines[0])] * (height - len(lines))
    body = [gap.join(row) for row in zip(*(lines for lines, _ in blocks), strict=True)]
    middle = (anchors[0] + anchors[-1]) // 2
    edges = [" "] * len(body[0])
    edges[anchors[0] : anchors[-1] + 1] = "─" * (anchors[-1] + 1 - anchors[0])
    for anchor in anchors:
        edges[anchor] = "┬"
    edges[anchors[0]], edges[anchors[-1]] = "┌", "┐"
    edges[middle] = "│" if len(anchors) == 1 else "┼" if middle in anchors else "┴"
    left = middle - len(text) // 2
    pad = " " * max(0, -left)
    picture = [" " * max(0, left) + text, *(pad + line for line in ["".join(edges), *body])]
    width = max(map(len, picture))
    return [line.ljust(width) for line in picture], middle + len(pad)


def _exchanges(plan: Schedule) -> list[str]:
    """Ranks across, and below them, round by round, which exchange with each other; crossing arcs get a line each."""
    pitch, label = (9, "rank {}") if plan.ranks <= EASY_RANKS else (6, "r{}")
    lines = [" " * 14 + "".join(label.format(rank).center(pitch) for rank in range(plan.ranks))]
    rounds = [step for step in plan.steps if step.phase in ("fold in", "halving")]
    folds = rounds[0].phase == "fold in"
    for number, step in enumerate(rounds):
        name = step.phase if step.phase == "fold in" else f"halving {number + (not folds)}"
        for row in _arcs(step, pitch, plan.ranks):
            lines.append(f"{name:<14}" + "".join(row))
            name = ""
    back = "then the same exchanges backwards (doubling)"
    return [*lines, back + (", and the folded ranks get the result (fold out)" if folds else "")]


def _arcs(step: ScheduleStep, pitch: int, ranks: int) -> list[list[str]]:
    rows: list[list[str]] = []
    ends: list[int] = []  # the last rank that each row reaches
    both_ways = step.phase == "halving"
    for transfer in step.transfers:
        low, high = sorted((transfer.source, transfer.target))
        if both_ways and transfer.source != low:
            continue
        row = next((i for i, end in enumerate(ends) if end < low), len(rows))
        if row == len(rows):
            rows.append([" "] * (pitch * ranks))
            ends.append(-1)
        ends[row] = high
        start, stop = low * pitch + pitch // 2, high * pitch + pitch // 2
        rows[row][start : stop + 1] = "◀" + "─" * (stop - start - 1) + ("▶" if both_ways else "●")
    return rows
