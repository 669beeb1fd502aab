"""The command, its records and the page, with a claim of the test's own; and what docs say of all claims."""

from __future__ import annotations

import json
import pathlib

import pytest
from click.testing import CliRunner, Result

from hora.launch.launched import launched
from hora.runs import exit_codes
from hora_benchmarks.claims import catalogue, page, record
from hora_benchmarks.claims.claim import MAX_TEXT, Claim, Row, Table, Verdict, spread
from hora_benchmarks.claims.cli import claims

ROOT = pathlib.Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "claims"


def count(quick: bool) -> list[Row]:
    return [{"workers": n, "values": [n, n + 1]} for n in ((1,) if quick else (1, 2))]


def judge(rows: list[Row]) -> Verdict:
    most = max(row["workers"] for row in rows)
    return Verdict(word="holds" if most > 1 else "only if", text=f"there are {most} | more", more="And so on.")


def claim(**changed: object) -> Claim:
    told = {
        "number": 1, "name": "master", "says": "More is more.", "rule": "holds if more is more", "needs": "nothing",
        "minutes": (0.1, 0.2), "measure": count, "judge": judge,
        "table": lambda rows: Table(headings=("n", "v"), lines=[["1", spread([1.0, 2.0, 4.0])]], note="all",
                                    repeats="2 of them"),
        "draw": lambda rows, figure: figure.subplots().plot([1, 2]),
    }  # fmt: skip
    return Claim(**{**told, **changed})  # type: ignore[arg-type]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One claim only, made up here."""
    monkeypatch.setattr(catalogue, "find", lambda name: claim())


def call(*words: object) -> Result:
    return CliRunner().invoke(claims, [str(word) for word in words], standalone_mode=False)


@pytest.mark.usefixtures("only")
def test_a_claim_is_measured_judged_drawn_and_recorded(tmp_path: pathlib.Path) -> None:
    result = call("master", "--into", tmp_path)
    assert result.return_value == exit_codes.OK, result.output
    assert "holds: there are 2 | more" in result.output and "2.0 (1.0 to 4.0)" in result.output
    (found,) = record.read_all(tmp_path)
    assert found.rows == count(False) and found.command == "hora claims master" and not found.quick
    assert (tmp_path / f"{found.stem}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("only")
def test_a_quick_one_is_kept_apart_and_says_so(tmp_path: pathlib.Path) -> None:
    assert call("master", "--into", tmp_path).return_value == exit_codes.OK
    result = call("master", "--quick", "--into", tmp_path)
    assert "only if there are 1 | more" in result.output
    assert sorted(one.quick for one in record.read_all(tmp_path)) == [False, True]
    assert {one.command for one in record.read_all(tmp_path)} == {"hora claims master", "hora claims master --quick"}


@pytest.mark.usefixtures("only")
def test_redraw_judges_what_was_recorded_and_measures_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("master", "--into", tmp_path)
    (picture,) = tmp_path.glob("*.png")
    picture.unlink()

    def refuse(quick: bool) -> list[Row]:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(catalogue, "find", lambda name: claim(measure=refuse))
    result = call("--redraw", "--into", tmp_path)
    assert result.return_value == exit_codes.OK and "holds: there are 2" in result.output and picture.exists()


@pytest.mark.usefixtures("only")
def test_the_page_shows_full_records_only_and_keeps_its_table_whole(tmp_path: pathlib.Path) -> None:
    call("master", "--into", tmp_path / "claims")
    call("master", "--quick", "--into", tmp_path / "claims")
    path = tmp_path / "CLAIMS.md"
    assert call("--into", tmp_path / "claims", "--page", path).return_value == exit_codes.OK
    text = path.read_text()
    assert "**holds**: there are 2 \\| more" in text and "--quick`" not in text.split("## master")[1]
    (picture,) = [one for one in (tmp_path / "claims").glob("*.png") if "quick" not in one.name]
    assert f"](claims/{picture.name})" in text


def test_what_cannot_be_measured_here_says_why_and_the_others_go_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    those = {"master": claim(obstacle=lambda quick: "not root; run it as root"), "servers": claim(name="servers")}
    monkeypatch.setattr(catalogue, "find", lambda name: those[name])
    result = call("master", "servers", "--into", tmp_path)
    assert result.return_value == exit_codes.SCRIPT_FAILED
    assert "master could not be measured: not root; run it as root" in result.output
    assert [one.claim for one in record.read_all(tmp_path)] == ["servers"]


def test_a_defect_of_one_claim_does_not_stop_the_others(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slip(quick: bool) -> list[Row]:
        return [{}["missing"]]

    those = {"master": claim(measure=slip), "servers": claim(name="servers")}
    monkeypatch.setattr(catalogue, "find", lambda name: those[name])
    result = call("master", "servers", "--into", tmp_path)
    assert result.return_value == exit_codes.SCRIPT_FAILED and "KeyError: 'missing'" in result.output
    assert [one.claim for one in record.read_all(tmp_path)] == ["servers"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mastre"], "did you mean 'master'?"),
        ([], "hora claims --list"),
        (["master", "--all"], "leave names, --quick and --redraw out"),
        (["--quick", "--page", "x.md"], "full records only"),
        (["--redraw", "--into", "/nonexistent"], "there is no record in /nonexistent"),
        (["--page", "x.md", "--into", "/nonexistent"], "there is no full record in /nonexistent"),
    ],
)
def test_bad_words_get_one_sentence(words: list[str], said: str) -> None:
    result = call(*words)
    assert result.exception is not None and said in str(getattr(result.exception, "message", result.exception))


def test_what_is_no_record_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"other": 1}) + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl is no record of a claim"):
        record.read_all(tmp_path)


@pytest.mark.full
def test_a_run_leaves_its_result_and_a_failed_one_its_last_lines(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import hora, json, pathlib, sys\njob = hora.init()\nprint('hear this', flush=True)\n"
        "if sys.argv[2] == 'fail': raise RuntimeError('out of luck')\n"
        "if job.rank == 0 and sys.argv[2] == 'word':\n"
        "    pathlib.Path(sys.argv[1]).write_text(json.dumps([job.size, sys.argv[2]]))\n"
    )
    heard: list[str] = []

    def hear(line: str) -> bool:
        heard.append(line)
        return False

    assert launched([str(script)], "word", size=2, strategy="ring", on_line=hear) == [2, "word"]
    assert "[1] hear this\n" in heard
    with pytest.raises(RuntimeError, match=r"ring with 1 ended well, but wrote no result"):
        launched([str(script)], "nothing", size=1, strategy="ring")
    with pytest.raises(RuntimeError, match=r"ring with 1 ended with exit code 1:(?s:.*)out of luck"):
        launched([str(script)], "fail", size=1, strategy="ring")


def test_every_claim_of_the_catalogue_says_what_it_is() -> None:
    found = [catalogue.find(name) for name in catalogue.names()]
    assert [one.name for one in found] == list(catalogue.names())
    assert [one.number for one in found] == list(range(1, 15))
    assert all(one.says and one.rule and one.needs for one in found)


@pytest.mark.parametrize("name", catalogue.names())
def test_a_verdict_fits_in_a_row_and_the_rest_are_sentences(name: str) -> None:
    one = catalogue.find(name)
    for found in (found for found in record.read_all(RECORDS) if found.claim == name):
        verdict, table = one.judge(found.rows), one.table(found.rows)
        assert len(verdict.text) <= MAX_TEXT and not verdict.text.endswith(".")
        assert 0 < len(table.repeats) <= 90 and table.note
        for text in (verdict.more, one.changed):
            assert not text or text.endswith(".")


def test_the_page_in_docs_says_what_its_records_say() -> None:
    written = (ROOT / "docs" / "CLAIMS.md").read_text()
    command = "hora claims --into docs/claims --page docs/CLAIMS.md"
    assert written == page.text(record.read_all(RECORDS), pathlib.Path("claims"), command)
    assert {one.claim for one in record.read_all(RECORDS)} == set(catalogue.names())
    for one in record.read_all(RECORDS):
        assert (RECORDS / f"{one.stem}.png").is_file(), f"{one.stem} has no figure"
