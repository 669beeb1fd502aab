"""Lines: prefixed, whole, in order, nothing lost; progress bars, tracebacks and a reader that leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hora.runs import exit_codes
from hora.terminal.screen import IDLE_S, REDRAW_S, TRACEBACK_S, RankStream, StreamLog, as_shown
from hora.terminal.sink import Sink
from hora.terminal.tracebacks import TracebackAction, TracebackFold, exception_of, last_traceback, shorten
from launching import SCRIPTS, Launcher

TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "    f()"]


class Paper(Sink):
    """A sink that keeps what is put on it."""

    def __init__(self) -> None:
        super().__init__(1, color="never")
        self.text = ""

    def put(self, text: str) -> None:
        self.text += text


def show(*pieces: bytes) -> str:
    paper = Paper()
    stream = RankStream(paper, "[0] ")
    for piece in pieces:
        stream.feed(piece, 0.0)
    stream.close()
    return paper.text


def test_lines_are_put_together_from_any_cut() -> None:
    data = "eins\nzwei – drei\n\nvier".encode()
    wanted = "[0] eins\n[0] zwei – drei\n[0] \n[0] vier\n"
    for cut in range(len(data) + 1):
        assert show(data[:cut], data[cut:]) == wanted
    assert show(*(bytes([byte]) for byte in data)) == wanted


def test_bytes_that_are_no_text_are_shown_as_such_and_lose_nothing_else() -> None:
    assert show(b"a\xff\xfeb\n", b"\xe2\x82") == "[0] a\ufffd\ufffdb\n[0] \ufffd\n"


def test_a_very_long_line_stays_one_line() -> None:
    piece = b"x" * 65536
    assert show(*[piece] * 160, b"\n") == f"[0] {'x' * 65536 * 160}\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain", "plain"),
        ("windows\r", "windows"),
        ("10%\r50%\r100%", "100%"),
        ("10 left\r9 left", "9 leftt"),
        ("long text\rshort    ", "short"),
        ("\r 10%\r 20%", " 20%"),
        ("\x1b[31m10%\r\x1b[32m20%", "\x1b[32m20%"),
    ],
)
def test_carriage_returns_leave_what_a_terminal_would(line: str, shown: str) -> None:
    assert as_shown(line) == shown
    assert show(*(letter.encode() for letter in line), b"\n") == f"[0] {shown}\n"


def test_an_idle_unfinished_line_is_shown_and_goes_on_where_it_stood() -> None:
    paper = Paper()
    stream = RankStream(paper, "[0] ")
    stream.feed(b"wait", 10.0)
    stream.tick(10.0 + IDLE_S / 2)
    assert paper.text == ""
    assert stream.due == 10.0 + IDLE_S
    stream.tick(10.0 + IDLE_S)
    assert paper.text == "[0] wait" and stream.due is None
    stream.feed(b"ing\n", 11.0)
    assert paper.text == "[0] waiting\n"


def test_another_rank_never_writes_into_an_unfinished_line() -> None:
    paper = Paper()
    one, other = RankStream(paper, "[0] "), RankStream(paper, "[1] ")
    one.feed(b"wait", 0.0)
    one.tick(IDLE_S)
    other.feed(b"hello\n", 1.0)
    one.feed(b"ing\n", 1.0)
    assert paper.text == "[0] wait\n[1] hello\n[0] ing\n"


def test_a_bar_that_never_ends_its_line_is_shown_now_and_then_not_at_each_change() -> None:
    paper = Paper()
    stream = RankStream(paper, "[0] ")
    for tick in range(200):
        stream.feed(f"\r{tick:3d}".encode(), tick * 0.1)
        stream.tick(tick * 0.1)
    stream.close()
    assert paper.text.count("\n") <= 20 / REDRAW_S + 1
    assert paper.text.endswith("[0] 199\n")


def fold(verdict: TracebackAction = TracebackAction.SHOW) -> tuple[TracebackFold, Callable[[list[str]], list[str]]]:
    folding = TracebackFold(lambda exception: verdict)
    return folding, lambda lines: [shown for line in lines for shown in folding.push(line)]


def test_a_traceback_is_held_until_it_is_decided_and_order_is_kept() -> None:
    folding, push = fold()
    assert push(["before", *TRACEBACK, "ValueError: boom", "  more"]) == ["before"]
    assert folding.release() == [*TRACEBACK, "ValueError: boom", "  more"]


def test_a_dropped_traceback_drops_nothing_after_it() -> None:
    folding, push = fold(TracebackAction.DROP)
    assert push(["before", *TRACEBACK, "KeyboardInterrupt", "after"]) == ["before"]
    assert folding.release() == ["after"]


def test_an_echo_is_folded_to_its_last_line() -> None:
    folding, push = fold(TracebackAction.LAST_LINE)
    push([*TRACEBACK, "hora.errors.PeerLost: rank 2 is gone"])
    assert folding.release() == ["hora.errors.PeerLost: rank 2 is gone"]


def test_chained_tracebacks_are_one_and_separate_ones_are_two() -> None:
    chain = [
        *TRACEBACK,
        "ValueError: boom",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
    ]
    seen = []
    folding = TracebackFold(lambda exception: seen.append(exception) or TracebackAction.SHOW)  # type: ignore[func-returns-value]
    for line in [*chain, *TRACEBACK, "KeyError: 1", *TRACEBACK, "OSError: 2"]:
        folding.push(line)
    folding.release()
    assert seen == ["KeyError: 1", "OSError: 2"]


def test_a_held_traceback_is_shown_when_nothing_decides_about_it() -> None:
    paper = Paper()
    stream = RankStream(paper, "", fold=fold()[0])
    stream.feed("\n".join([*TRACEBACK, "E: 1", ""]).encode(), 5.0)
    stream.tick(5.0 + TRACEBACK_S / 2)
    assert paper.text == ""
    stream.feed(b"later\n", 5.9)
    stream.tick(5.0 + TRACEBACK_S)
    assert paper.text.splitlines() == [*TRACEBACK, "E: 1", "later"]


def test_the_last_traceback_and_its_exception_are_found() -> None:
    link = ["", "The above exception was the direct cause of the following exception:", ""]
    chain = [*TRACEBACK, "ValueError: one", "two", *link, *TRACEBACK, "RuntimeError: three"]
    assert last_traceback(["x", *TRACEBACK, "KeyError: 0", "y", *chain]) == chain
    assert exception_of(chain) == "RuntimeError: three"
    assert last_traceback(["x", "y"]) == [] and exception_of([]) == ""
    assert len(shorten(["x"] * 100, 30)) == 30


def test_a_log_that_cannot_be_written_warns_once_and_the_run_goes_on() -> None:
    said: list[str] = []
    log = StreamLog("/dev/full", said.append)
    log.write(b"x")
    log.write(b"x")
    assert len(said) == 1 and "No space left" in said[0]


def test_nothing_is_lost_and_order_is_kept_with_10000_lines_from_4_ranks(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.run("run", "-n", 4, "--log-dir", tmp_path / "logs", "lines.py", 10_000)
    assert done.returncode == exit_codes.OK
    for rank in range(4):
        wanted = [f"line {i} {'x' * (i % 80)}" for i in range(10_000)] + ["the last line has no newline"]
        assert [line[4:] for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")] == wanted
        notes = [line[4:] for line in done.stderr.splitlines() if line.startswith(f"[{rank}] ")]
        assert notes == [f"note {i}" for i in range(0, 10_000, 10)]
        assert (tmp_path / "logs" / f"rank-{rank}.out").read_text() == "\n".join(wanted)
        assert (tmp_path / "logs" / f"rank-{rank}.err").read_text().splitlines() == notes


def test_color_is_for_terminals_or_on_request(launcher: Launcher) -> None:
    assert "\x1b" not in launcher.run("run", "-n", 2, "hello.py").stdout
    assert "\x1b[36m[0]\x1b[0m hello" in launcher.run("run", "--color", "always", "hello.py", NO_COLOR="1").stdout


def test_a_reader_that_leaves_stops_the_run_cleanly(launcher: Launcher) -> None:
    command = f"{sys.executable} -m hora.cli.main run -n 2 lines.py 10000000 | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=SCRIPTS, env=launcher.env, capture_output=True, text=True, timeout=40
    )
    assert done.returncode == exit_codes.OUTPUT_CLOSED
    assert [line for line in done.stderr.splitlines() if not line.startswith("[")] == [
        "hora: the reader of this output is gone; stopping 2 ranks"
    ]


def test_a_reader_that_stops_reading_does_not_keep_a_signal_from_working(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "lines.py", 10_000_000)
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.terminate()
    assert process.wait(timeout=4) == exit_codes.TERMINATED
    process.communicate()
