"""`hora explain` shows the schedule completely, fits the screen and says what exists when asked for something else."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import hora.collectives.schedule
import hora.explain
from hora.collectives.schedule import SCHEDULES
from hora.explain import MAX_RANKS, NAMES

explain = functools.cache(hora.explain.explain)
every_name = pytest.mark.parametrize("name", NAMES)
SCHEDULES_OF = {name: [name] for name in NAMES if name != "reduce"} | {"reduce": ["reduce-serial", "reduce-tree"]}


def section(text: str, start: str, end: str = "\n──") -> str:
    rest = text[text.index(start) :]
    stop = rest.find(end, len(start))
    return rest if stop < 0 else rest[:stop]


def test_ring_of_5_shows_both_phases_and_each_of_its_8_steps() -> None:
    text = explain("ring", 5)
    assert text.index("Phase: scatter-reduce") < text.index("Phase: all-gather") < text.index("Summary")
    for step in range(1, 9):
        phase = "scatter-reduce" if step <= 4 else "all-gather"
        assert f"Step {step} of 8 · {phase} {(step - 1) % 4 + 1} of 4" in text
    assert "Step 9" not in text


def test_ring_of_5_says_who_sends_which_chunk_and_what_it_becomes() -> None:
    text = explain("ring", 5)
    assert "rank 0 ──chunk 0──▶ rank 1   adds: chunk 0 there becomes 0+1\n" in text
    assert "rank 4 ──chunk 3──▶ rank 0   adds: chunk 3 there becomes 3+4+0\n" in text
    assert "rank 4 ──chunk 0──▶ rank 0   copies: chunk 0 there becomes all ✓\n" in text
    assert "8 = 2(n − 1)" in text and "1.6" in text


def test_tables_show_partial_sums_and_bracket_what_changed() -> None:
    step = section(explain("ring", 3), "Step 1 of 4")
    rows = [line.split() for line in step.splitlines() if line.startswith("  rank") and "▶" not in line]
    assert rows == [
        ["rank", "0", "0", "0", "[2+0]"],
        ["rank", "1", "[0+1]", "1", "1"],
        ["rank", "2", "2", "[1+2]", "2"],
    ]


def test_the_last_table_is_complete_on_every_rank() -> None:
    last = section(explain("halving", 6), "Step 6 of 6", "Summary")
    rows = [line for line in last.splitlines() if line.startswith("  rank") and "▶" not in line]
    assert len(rows) == 6 and all(row.count("all ✓") == 4 for row in rows)


@every_name
@pytest.mark.parametrize("n", range(2, MAX_RANKS + 1))
def test_every_step_and_every_message_is_shown(name: str, n: int) -> None:
    text = explain(name, n)
    schedules = [SCHEDULES[each](n) for each in SCHEDULES_OF[name]]
    assert len(re.findall(r"^── Step \d+ of \d+ ·", text, re.MULTILINE)) == sum(s.num_steps for s in schedules)
    assert len(re.findall(r"─(?:vector|chunks? [\d–]+)─+▶", text)) == sum(s.num_messages for s in schedules)
    for schedule in schedules:
        assert all(f"Phase: {step.phase}\n" in text for step in schedule.steps)


@every_name
@pytest.mark.parametrize("n", range(1, MAX_RANKS + 1))
def test_it_fits_110_columns_up_to_8_ranks_and_136_above(name: str, n: int) -> None:
    lines = explain(name, n).splitlines()
    assert max(map(len, lines)) <= (110 if n <= 8 else 136)
    assert all(line == line.rstrip() for line in lines)
    assert not re.search(r"[{}\N{NO-BREAK SPACE}\x1b]", "".join(lines)), "plain text, with nothing left to fill in"


@every_name
def test_one_rank_has_nothing_to_send(name: str) -> None:
    text = explain(name, 1)
    assert "nothing to send" in text and "Step" not in text


def test_abbreviations_are_explained_where_they_are_used_and_only_there() -> None:
    for name in NAMES:
        for n in range(2, MAX_RANKS + 1):
            text = explain(name, n)
            legend, rest = text.split("── Start", 1)
            legend = " ".join(legend.split())
            tables = "\n".join(line for line in rest.splitlines() if re.match(r"  (holds|rank \d+ |r\d+ )", line))
            assert ("0…3 is" in legend) == bool(re.search(r"(?<!,)\b\d+…\d", re.sub(r"\d+,\d+…\d+", "", tables)))
            assert ("0,2…6 is" in legend) == bool(re.search(r"\d,\d+…\d", tables))
            assert ("Σ6 is" in legend) == ("Σ" in tables)


def test_the_ring_is_drawn_with_its_way_back() -> None:
    lines = explain("ring", 3).splitlines()
    top = next(i for i, line in enumerate(lines) if "┌" in line)
    assert lines[top] == "    ┌──▶ rank 0 ──▶ rank 1 ──▶ rank 2 ──┐"
    assert len(lines[top + 1]) == len(lines[top]) and "◀" in lines[top + 1]


def test_the_tree_is_drawn_as_a_tree() -> None:
    picture = """
            rank 0
       ┌───────┼───────┐
    rank 1  rank 2  rank 4
               │
            rank 3
"""
    assert picture in explain("tree", 5)


def test_the_star_is_drawn_around_its_root() -> None:
    picture = """
    rank 1  rank 2
       └───┬───┘
        rank 0
       ┌───┴───┐
    rank 3  rank 4
"""
    assert picture in explain("star", 5)


def test_halving_is_drawn_as_its_exchanges() -> None:
    picture = explain("halving", 5).split("\n\n")[2].splitlines()
    assert [line.split()[:2] for line in picture[1:3]] == [["fold", "in"], ["halving", "1"]]
    assert picture[1].count("◀") == 1 and picture[1].count("●") == 1
    assert sum(line.count("▶") for line in picture) == 4, "two exchanges in each of two rounds"


def test_halving_is_honest_about_the_folds() -> None:
    assert "2(p − 1)/p + 1" in explain("halving", 6)
    assert "2(p − 1)/p" not in explain("halving", 8)


def test_reduce_compares_serial_with_tree() -> None:
    text = explain("reduce", 8)
    assert text.index("A. Serial") < text.index("B. Tree") < text.index("Serial against tree\n═")
    comparison = text[text.index("Serial against tree\n═") :]
    assert re.search(r"steps +7 +3 +n − 1 against ⌈log2 n⌉", comparison)


@pytest.mark.parametrize("name", ["", "Ring", "reduce-tree", "shared"])
def test_an_unknown_name_is_answered_with_what_exists(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r}; there are: ring, tree, halving, star, reduce"):
        explain(name, 4)


@pytest.mark.parametrize("ranks", [-1, 0, 17, 1000])
@every_name
def test_too_few_or_too_many_ranks_are_answered_with_the_limit(name: str, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 16 ranks, got {ranks}"):
        explain(name, ranks)


@pytest.mark.parametrize("module", [hora.explain, hora.collectives.schedule])
def test_explaining_needs_only_the_standard_library(module: object) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))  # type: ignore[attr-defined]
    roots = {a.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    roots |= {
        str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level
    }
    assert roots <= {"__future__", "collections", "dataclasses", "fractions", "itertools", "re", "textwrap"}
