"""Few lines are enough: the counts are exact, the scripts run, and one script reaches every architecture."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest

from hora_benchmarks.claims import lines
from hora_benchmarks.claims.claim import MAX_TEXT

pytestmark = pytest.mark.full

PAST_GUESSING = 20.0  # per cent; a guess has 10


def rows(**changed: int) -> list[dict[str, Any]]:
    counts = {style.name: 20 for style in lines.STYLES} | {lines.HORA.name: changed.get("ours", 8)}
    counts |= {lines.DDP.name: changed.get("ddp", 20)}
    return [{**lines.count(style), "changed": counts[style.name], "ran": {}, "epochs": 1} for style in lines.STYLES]


@pytest.mark.parametrize(
    ("ours", "ddp", "word"), [(10, 11, "holds"), (11, 12, "only if"), (10, 10, "only if"), (11, 11, "fails")]
)
def test_every_verdict_can_come_out(ours: int, ddp: int, word: str) -> None:
    verdict = lines.judge(rows(ours=ours, ddp=ddp))
    assert verdict.word == word
    assert f"{ours} " in verdict.text and f"DDP {ddp}" in verdict.text
    assert len(verdict.text) <= MAX_TEXT


def test_only_if_says_which_half_is_not_so() -> None:
    text = lines.judge(rows(ours=11, ddp=16)).text
    assert text.startswith("11 lines of 48 are few: fewer than in every other style (DDP 16, Horovod 20,")
    assert text.endswith("but not within 10")
    assert lines.judge(rows(ours=9, ddp=9)).text.startswith("they need not be the fewest: 9 of 48 lines")


def test_it_is_said_what_was_not_run() -> None:
    ones = rows()
    ones[0]["ran"] = {"ring": 50.0, "ps": 50.0}
    assert lines.judge(ones).more == (
        "Run here: Hora's script under 2 architectures without another change. "
        "Not run, only compiled: DDP, Horovod, TensorFlow's servers."
    )
    assert [cells[-1] for cells in lines.table(ones).lines] == ["ring, ps", *3 * ["not run, only compiled"]]


def test_a_new_a_lost_and_a_different_line_count_once_each() -> None:
    found = lines.compare(["a", "b", "c", "d"], ["new", "a", "B", "c"])
    assert (found["changed"], found["added"], found["removed"]) == (3, 2, 2)
    assert found["changes"] == ["+ new", "- b", "+ B", "- d"]


def test_an_unchanged_script_has_no_changed_line() -> None:
    assert lines.compare(lines.code("plain.py"), lines.code("plain.py"))["changed"] == 0


def test_blank_lines_comments_and_the_head_are_not_counted(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    (tmp_path / "one.py").write_text('"""Head,\n\na$ python one.py\nb$ python one.py --other\n"""\n\n# why\nx = 1\n')
    monkeypatch.setattr(lines, "SCRIPTS", tmp_path)
    assert lines.code("one.py") == ["x = 1"]
    assert lines.commands("one.py") == ["python one.py", "python one.py --other"]


def test_the_counts_of_the_scripts_that_are_here() -> None:
    counted = {style.name: lines.count(style) for style in lines.STYLES}
    assert {name: row["changed"] for name, row in counted.items()} == {
        "Hora": 11, "DDP": 16, "Horovod": 16, "TensorFlow's servers": 21,
    }  # fmt: skip
    assert {name: len(row["commands"]) for name, row in counted.items()} == {
        "Hora": 1, "DDP": 2, "Horovod": 1, "TensorFlow's servers": 4,
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.name for path in lines.SCRIPTS.glob("*.py")))
def test_every_script_compiles(name: str) -> None:
    compile((lines.SCRIPTS / name).read_text(), name, "exec")


def test_a_script_that_fails_says_what_it_said() -> None:
    with pytest.raises(RuntimeError, match=r"exit code 2:\n(.|\n)*unrecognized arguments: --nothing"):
        lines.run([sys.executable, str(lines.SCRIPTS / "plain.py"), "--nothing"])


def test_a_script_that_takes_too_long_fails_and_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LIMIT_S", 1.0)
    with pytest.raises(RuntimeError, match=r"has not ended after 1 s:\nso far"):
        lines.run([sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(100)"])


def test_what_servers_complained_of_is_told(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\n"
        'case "$TF_CONFIG" in\n'
        f'  *\'"type": "chief"\'*) until [ -s {tmp_path}/worker-1.log ]; do sleep 0.05; done; exit 3;;\n'
        "esac\n"
        'echo "I am $TF_CONFIG" >&2\n'
        "exec sleep 100\n"
    )
    script.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"exit code 3:\n(.|\n)*worker-1:\nI am .*\"index\": 1"):
        lines.run_tensorflow(str(script), str(tmp_path))


def test_the_table_has_a_line_for_every_style() -> None:
    table = lines.table(rows())
    assert [cells[0] for cells in table.lines] == [style.name for style in lines.STYLES]
    assert all(len(cells) == len(table.headings) for cells in table.lines)
    assert "written by Hora's authors" in table.note and "(Hora: +11 −6 make 8)" in table.note


def test_it_can_be_drawn() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    lines.draw(rows(), figure)
    assert [len(axis.patches) for axis in figure.axes] == 4 * [len(lines.STYLES)]
