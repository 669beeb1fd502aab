"""The examples run alone and under the launcher, learn something, and use only what users are promised."""

from __future__ import annotations

import ast
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

import hora

pytestmark = pytest.mark.usefixtures("forkserver")

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
ALONE = [sys.executable]
TWO = [sys.executable, "-m", "hora.cli.main", "run", "-n", "2"]
TINY = {
    "digits.py": ["--epochs", "1"],
    "gpt.py": ["--characters", "6000", "--layers", "1", "--width", "16", "--batch", "8"],
}
ON_A_JOB = {
    "rank", "size", "local_rank", "role", "device", "step", "group", "prepare", "shard", "epochs", "log", "stop",
    "accumulate", "weight", "ledger", "save", "restore", "process_group", "close",
}  # fmt: skip


def run(start: list[str], name: str, *arguments: str) -> str:
    done = subprocess.run(
        [*start, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def number_after(words: str, text: str) -> float:
    found = re.search(rf"{words} ([\d.]+)", text)
    assert found, text
    return float(found[1])


@pytest.mark.full
def test_digits_alone_reach_95_percent() -> None:
    assert number_after("test accuracy", run(ALONE, "digits.py")) >= 95


@pytest.mark.full
def test_digits_learn_the_same_on_any_number_of_workers() -> None:
    alone, two, three = (run(start, "digits.py", "--epochs", "2") for start in (ALONE, TWO, [*TWO[:-1], "3"]))
    for out in (alone, two, three):
        assert number_after("after", out) == 50
        assert abs(number_after("test accuracy", out) - number_after("test accuracy", alone)) < 0.7  # 2 of 297 samples


@pytest.mark.cases(1)
@pytest.mark.parametrize("strategy", ["ring", "shared:update=sharded"])
@pytest.mark.parametrize("name", TINY)
def test_examples_run_on_two_workers(name: str, strategy: str) -> None:
    out = run([*TWO, "--strategy", strategy], name, *TINY[name])
    assert out.count("test accuracy" if name == "digits.py" else "it writes:") == 1
    assert not re.search(r"^\[1\]", out, re.MULTILINE)


@pytest.mark.full
def test_gpt_alone_learns_and_writes_a_sample() -> None:
    out = run(ALONE, "gpt.py", *TINY["gpt.py"], "--epochs", "5", "--lr", "0.01")
    assert number_after("loss", out) < math.log(60) - 1  # well below that of a guess among its letters
    assert len(out.partition("it writes:")[2]) > 300


@pytest.mark.parametrize(
    "start",
    [pytest.param(ALONE, marks=pytest.mark.full), [*TWO, "--servers", "1", "--strategy", "ps:mode=async"]],
    ids=["alone", "async on a server"],
)
def test_the_recommender_learns_from_tables_that_only_servers_have(start: list[str]) -> None:
    assert number_after("test accuracy", run(start, "recommender.py")) >= 78  # of 84 that can be had; a guess has 51


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_use_only_public_names(path: pathlib.Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "hora":
                assert node.attr in hora.__all__
            elif node.value.id == "job":
                assert node.attr in ON_A_JOB
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hora"):
            assert node.module == "hora.datasets"
