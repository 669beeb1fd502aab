"""The panel stays below everything that is written, through unfinished lines and resizes, and leaves no trace."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import select
import struct
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from hora.terminal.format import num_cells
from hora.terminal.screen import HIDDEN_S, IDLE_S, PANEL_S, RankStream, Screen, fit_panel
from hora.terminal.tracebacks import TracebackAction

pyte = pytest.importorskip("pyte", reason="the terminal that looks at the panel: pip install pyte")
Row = dict[int, str]
OPERATIONS = ("line", "part", "say", "panel", "tick", "write", "resize")


class Terminal(pyte.Screen):  # type: ignore[misc, name-defined]
    """A terminal that remembers what was scrolled out at its top, and is resized as real ones are: they wrap long
    lines anew or cut them, give up lines at the bottom or at the top, and pull old ones back or do not."""

    def __init__(self, columns: int, lines: int) -> None:
        self.above: list[Row] = []
        super().__init__(columns, lines)

    def index(self) -> None:
        if self.cursor.y == self.lines - 1:
            self.above.append(self._row(0))
        super().index()

    def resize_as(self, lines: int, columns: int, *, wraps: bool, pulls: bool) -> None:
        rows, y, x = [self._row(each) for each in range(self.lines)], self.cursor.y, self.cursor.x
        if wraps:
            parts = [_wrapped(row, columns, x if each == y else 0) for each, row in enumerate(rows)]
            y = sum(map(len, parts[:y])) + x // columns
            x, rows = x % columns, [row for part in parts for row in part]
        rows = [{at: sign for at, sign in row.items() if at < columns} for row in rows]
        while len(rows) > lines and (len(rows) - 1 > y and (not rows[-1] or not pulls)):
            rows.pop()
        while len(rows) > lines and y > 0:  # the cursor's line stays in sight
            self.above.append(rows.pop(0))
            y -= 1
        del rows[lines:]
        while pulls and len(rows) < lines and self.above:
            rows.insert(0, self.above.pop())
            y += 1
        self.reset()
        self.lines, self.columns = lines, columns
        self.margins = None
        for each, row in enumerate(rows):
            for at, sign in row.items():
                self.buffer[each][at] = self.default_char._replace(data=sign)
        self.cursor.y, self.cursor.x = max(0, min(y, lines - 1)), min(x, columns - 1)

    def seen(self) -> list[str]:
        """Everything, from the first line on; without blank lines at the end."""
        rows = [*self.above, *(self._row(each) for each in range(self.lines))]
        texts = ["".join(row.get(at, " ") for at in range(max(row, default=-1) + 1)) for row in rows]
        while texts and not texts[-1]:
            texts.pop()
        return texts

    def _row(self, y: int) -> Row:
        return {x: cell.data for x, cell in self.buffer[y].items() if cell.data != " " and x < self.columns}


def _wrapped(row: Row, columns: int, least: int) -> list[Row]:
    length = max(max(row, default=-1) + 1, least + 1)
    starts = range(0, length, columns)
    return [{at - start: sign for at, sign in row.items() if 0 <= at - start < columns} for start in starts]


def _has_room(fd: int) -> bool:
    poller = select.poll()  # select() takes no descriptor beyond 1023, and a long suite gets there
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))


class Desk:
    """A Screen on a pseudo-terminal, and the terminal behind it."""

    def __init__(self, columns: int = 60, lines: int = 16, *, shared: bool = True, other: int = 1) -> None:
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        os.set_blocking(self.slave, False)
        self.terminal = Terminal(columns, lines)
        self.feed = pyte.ByteStream(self.terminal)
        self.size(columns, lines)
        self.screen = Screen(size=4, color="never", out=self.slave if shared else other, err=self.slave)
        self.streams = [stream for rank in range(4) for stream in self._streams(rank)]
        self.now = 100.0

    def _streams(self, rank: int) -> tuple[RankStream, RankStream]:
        return self.screen.streams("worker", rank, log_dir=None, decide=lambda exception: TracebackAction.SHOW)

    def size(self, columns: int, lines: int, *, wraps: bool = False, pulls: bool = False) -> None:
        self.read()
        self.terminal.resize_as(lines, columns, wraps=wraps, pulls=pulls)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def tick(self, after_s: float) -> None:
        self.now += after_s
        self.screen.tick(self.now)

    def write(self) -> None:
        """Lets everything through that is queued."""
        while any(sink.pending for sink in self.screen.sinks):
            for sink in self.screen.sinks:
                if sink.pending and _has_room(sink.fd):
                    sink.write_some()
            self.read()

    def read(self) -> None:
        try:
            while data := os.read(self.master, 1 << 16):
                self.feed.feed(data)
        except BlockingIOError:
            pass

    def seen(self) -> list[str]:
        self.write()
        return self.terminal.seen()

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture(autouse=True)
def term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def panel(number: int, lines: int, width: int) -> list[str]:
    return [f" panel {number} line {line} ".ljust(width - 1, "=") for line in range(lines)]


def test_the_panel_stands_below_the_lines_and_is_gone_at_the_end(desk: Desk) -> None:
    assert desk.screen.can_panel
    desk.streams[0].feed(b"one\n", desk.now)
    desk.screen.panel([" a", " b"])
    desk.tick(1)
    assert desk.seen() == ["[0] one", "", " a", " b"]
    desk.streams[2].feed(b"two\n", desk.now)
    desk.screen.log("three")
    desk.tick(1)
    assert desk.seen() == ["[0] one", "[1] two", "hora: three", "", " a", " b"]
    desk.screen.panel([" c"])
    desk.tick(1)
    assert desk.seen()[3:] == ["", " c"]
    desk.screen.close()
    desk.screen.log("the last word")
    desk.tick(1)
    assert desk.seen() == ["[0] one", "[1] two", "hora: three", "hora: the last word"]


def test_it_is_never_missing_between_two_lines(desk: Desk) -> None:
    desk.screen.panel([" a"])
    desk.tick(1)
    chance = random.Random(1)
    for number in range(200):
        desk.streams[0].feed(f"{number}\n".encode(), desk.now)
        desk.tick(chance.choice((0.001, 0.1)))
        assert desk.seen()[-2:] == ["", " a"]
    desk.tick(PANEL_S)
    assert desk.screen.due is None
    assert desk.seen() == [*(f"[0] {number}" for number in range(200)), "", " a"]


def test_a_line_waits_for_a_moment_at_most_and_not_if_it_comes_alone(desk: Desk) -> None:
    desk.screen.panel([" a"])
    desk.tick(1)
    desk.streams[0].feed(b"one\n", desk.now)
    desk.tick(PANEL_S)
    assert desk.seen()[0] == "[0] one"
    desk.streams[0].feed(b"two\n", desk.now)
    desk.tick(PANEL_S / 2)
    assert desk.screen.due is not None and desk.screen.due - desk.now == pytest.approx(PANEL_S / 2)
    desk.tick(PANEL_S / 2)
    assert desk.seen()[:2] == ["[0] one", "[0] two"]


def test_a_flood_of_lines_does_not_lay_it_for_each_of_them(desk: Desk) -> None:
    desk.screen.panel([" a"])
    laid = 0
    for line in range(300):
        desk.streams[0].feed(f"line {line}\n".encode(), desk.now)
        desk.tick(PANEL_S / 10)
        laid += desk.screen.sinks[0].pending > 0
        desk.write()
    assert 25 <= laid <= 35
    desk.tick(PANEL_S)
    assert desk.seen() == [*(f"[0] line {line}" for line in range(300)), "", " a"]


def test_an_unfinished_line_goes_on_where_it_stood_above_the_panel(desk: Desk) -> None:
    desk.screen.panel([" a", " b"])
    desk.streams[0].feed(b"loading ...", desk.now)
    desk.tick(IDLE_S)
    assert desk.seen() == ["[0] loading ...", " a", " b"]
    desk.streams[0].feed(b" done\n", desk.now)
    desk.tick(1)
    assert desk.seen() == ["[0] loading ... done", "", " a", " b"]


def test_below_an_unfinished_line_that_ends_at_the_edge_there_is_no_panel(desk: Desk) -> None:
    desk.screen.panel([" a"])
    desk.streams[0].feed(b"x" * 56, desk.now)
    desk.tick(IDLE_S)
    assert desk.seen() == ["[0] " + "x" * 56]
    desk.streams[0].feed(b"yz\n", desk.now)
    desk.tick(HIDDEN_S)
    assert desk.seen() == ["[0] " + "x" * 56, "yz", "", " a"]


def test_while_nobody_reads_it_is_not_laid_over_and_over(desk: Desk) -> None:
    for turn in range(10_000):
        desk.screen.panel([f" a {turn}"])
        desk.tick(1)
    assert desk.screen.sinks[0].pending < 2 * select.PIPE_BUF
    assert desk.screen.due is None
    assert desk.seen()[0] == "" and len(desk.seen()) == 2


def test_a_terminal_that_is_gone_is_not_asked_again(desk: Desk) -> None:
    os.close(desk.master)
    desk.screen.panel([" a"])
    desk.tick(1)
    desk.screen.sinks[0].write_some()
    assert desk.screen.sinks[0].silent and desk.screen.due is None
    desk.master = os.open(os.devnull, os.O_RDONLY)


def test_only_a_terminal_with_room_and_a_name_gets_one(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, lines, can in ((40, 10, True), (39, 10, False), (40, 9, False), (200, 60, True)):
        desk.size(columns, lines)
        assert desk.screen.can_panel is can
    monkeypatch.setenv("TERM", "dumb")
    assert not desk.screen.can_panel
    monkeypatch.delenv("TERM")
    assert not desk.screen.can_panel


def test_where_stdout_is_a_file_the_panel_is_on_the_terminal_alone(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as file:
        desk = Desk(shared=False, other=file.fileno())
        assert desk.screen.can_panel
        desk.screen.panel([" a"])
        desk.streams[0].feed(b"to the file\n", desk.now)
        desk.streams[1].feed(b"to the terminal\n", desk.now)
        desk.tick(1)
        assert desk.seen() == ["[0] to the terminal", "", " a"]
        desk.screen.close()
        assert desk.seen() == ["[0] to the terminal"]
        desk.close()
    assert (tmp_path / "out").read_text() == "[0] to the file\n"


def test_where_stderr_is_a_file_there_is_no_panel(tmp_path: Path) -> None:
    with open(tmp_path / "err", "wb") as file:
        assert not Screen(size=1, color="never", out=1, err=file.fileno()).can_panel


def test_what_a_lower_terminal_cannot_hold_is_counted() -> None:
    assert fit_panel(["a", "b", "c"], 8) == ["a", "b", "c"]
    assert fit_panel(["a", "b", "c", "d", "e"], 10) == ["a", "b", "c", " … 2 lines hidden"]
    assert len(fit_panel(["a"] * 50, 1)) == 1


def test_columns_are_counted_without_escapes_and_with_wide_signs() -> None:
    assert num_cells("\x1b[36m[0]\x1b[0m 你好") == 8


@pytest.mark.parametrize("seed", range(60))
def test_any_interleaving_leaves_the_lines_as_written_and_one_panel_below_them(seed: int, tmp_path: Path) -> None:
    """A second screen writes the same to a file and knows no panel: it says which lines there should be."""
    chance = random.Random(seed)
    resizes = chance.choice((0, 1, 1))
    desk = Desk(chance.randint(44, 120), chance.randint(12, 40))
    with open(tmp_path / "plain", "w+b") as file:
        plain = Screen(size=4, color="never", out=file.fileno(), err=file.fileno())
        twins = [
            plain.streams("worker", rank, log_dir=None, decide=lambda exception: TracebackAction.SHOW)
            for rank in range(4)
        ]
        streams = list(zip(desk.streams, (stream for pair in twins for stream in pair), strict=True))
        lengths = [0] * len(streams)
        for number in range(chance.randint(20, 150)):
            what = chance.choices(OPERATIONS, (8, 3, 1, 4, 6, 6, resizes))[0]
            if what in ("line", "part"):
                index = chance.randrange(len(streams))
                text = f" {number}{'x' * chance.randint(1, 20)}" if what == "line" else f" {number}…"
                ends = what == "line" or lengths[index] > 12  # so that no line is longer than the narrowest terminal
                lengths[index] = 0 if ends else lengths[index] + len(text)
                for stream in streams[index]:
                    stream.feed(f"{text}{chr(10) * ends}".encode(), desk.now)
            elif what == "say":
                desk.screen.log(f"said {number}")
                plain.log(f"said {number}")
            elif what == "panel":
                width, height = desk.screen.size()
                desk.screen.panel(panel(number, chance.randint(1, height // 2 + 1), width))
            elif what == "tick":
                desk.tick(chance.choice((0.001, 0.05, 0.4)))
                plain.tick(desk.now)
            elif what == "write":
                desk.write()
            else:
                height = desk.screen.size()[1]
                if chance.random() < 0.5:  # else what is on its way was made for another width
                    height = chance.randint(12, 40)
                    desk.write()
                wraps, pulls = chance.random() < 0.5, chance.random() < 0.5
                desk.size(chance.randint(44, 120), height, wraps=wraps, pulls=pulls)
            if chance.random() < 0.1:
                desk.write()
                wanted = panel(number, 4, desk.screen.size()[0])
                desk.screen.panel(wanted)
                desk.tick(1)
                plain.tick(desk.now)
                seen, lines = desk.seen(), written(plain, file.fileno())
                cursor = [] if plain.sinks[0].open_by is not None else [""]
                assert seen == [*lines, *cursor, *wanted]
        desk.screen.close()
        plain.close()
        assert desk.seen() == written(plain, file.fileno())
    desk.close()


def written(plain: Screen, fd: int) -> list[str]:
    """The lines, an unfinished one included."""
    while plain.sinks[0].pending:
        plain.sinks[0].write_some()
    return os.pread(fd, 1 << 20, 0).decode().splitlines()
