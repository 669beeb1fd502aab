"""Screen: the streams of all ranks as prefixed lines on the launcher's stdout and stderr, in order, nothing lost.

    rank's pipe ─ bytes ─> RankStream ─ lines ─> Sink ─ at most 4 KiB when poll reports it writable ─> stdout or stderr
                             └─ raw bytes ─> StreamLog

Nothing here blocks: a reader that has stopped reading (a pager, Ctrl-S) must not keep the launcher from noticing a dead
rank. A Sink queues; when its queue exceeds `FULL_BYTES` the launcher stops reading the ranks' pipes. On a terminal a
panel may stand below the lines. All of this is used by the launcher's main thread only.
"""

from __future__ import annotations

import codecs
import collections
import os
import select
import sys
from collections.abc import Callable, Sequence

from .format import num_cells
from .sink import Sink
from .tracebacks import TracebackAction, TracebackFold

FULL_BYTES = 1 << 20
IDLE_S = 0.3  # an unfinished line that has not grown for this long is shown
TRACEBACK_S = 1.0  # a traceback is held for this long, so that the launcher can tell whether it is a secondary failure
REDRAW_S = 5.0  # a progress bar that never ends its line is shown this often
PANEL_S = 1 / 30  # the panel, and the text above it, are drawn at most this often, together, to avoid flicker
HIDDEN_S = 0.5  # while the launcher is in the background, drawing the panel is tried again this often
MIN_WIDTH, MIN_HEIGHT = 40, 10  # a smaller terminal gets no panel
TAIL_LINES = 200
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class StreamLog:
    """One stream of one rank as raw bytes in a file. An error ends the file, not the run, and is reported once."""

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and self._fd is not None:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._warn(f"{self._path} is not written any further: {error.strerror}; the run continues without it")
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class RankStream:
    """stdout or stderr of one rank: bytes in, prefixed lines out; the last TAIL_LINES are kept.

    Bytes that are not UTF-8 are shown as U+FFFD. A line with carriage returns is shown as a terminal would leave it.
    """

    def __init__(
        self, sink: Sink, prefix: str, *, log: StreamLog | None = None, fold: TracebackFold | None = None
    ) -> None:
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.fold = fold
        self._sink = sink
        self._prefix = prefix
        self._log = log
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []
        self._shown = ""
        self._fresh_at: float | None = None
        self._fed_at = 0.0
        self._held_at = 0.0
        self._drawn_at: float | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Takes bytes that the rank wrote, cut anywhere."""
        if self._log is not None:
            self._log.write(data)
        self._fed_at = now
        self._take(self._decoder.decode(data), now)

    def last_lines(self) -> list[str]:
        """The last lines, an unfinished one included."""
        return [*self._tail, *([as_shown("".join(self._pieces))] if self._pieces else [])]

    @property
    def unfinished(self) -> str:
        """The unfinished line as it stands on the screen, with its prefix."""
        return f"{self._prefix}{self._shown}"

    @property
    def due(self) -> float | None:
        """When `tick` will have something to show; None if it has nothing."""
        if self.fold is not None and self.fold.held:
            return self._held_at + TRACEBACK_S
        if self._fresh_at is None:
            return None
        due = min(self._fed_at + IDLE_S, self._fresh_at + REDRAW_S)
        return due if self._drawn_at is None else max(due, self._drawn_at + REDRAW_S)

    def tick(self, now: float) -> None:
        """Shows a held traceback, or an unfinished line that has not grown for long enough."""
        due = self.due
        if due is None or now < due:
            return
        self.flush_traceback()
        if self._fresh_at is None:
            return
        text = "".join(self._pieces)
        self._show(as_shown(text), newline=False)
        self._fresh_at = None
        if "\r" in text:
            self._drawn_at = now

    def flush_traceback(self) -> None:
        """Shows a held traceback at once."""
        for line in self.fold.release() if self.fold is not None else ():
            self._show(line, newline=True)

    def close(self) -> None:
        """The rank has ended: shows its last line even without a newline, and a held traceback."""
        self._take(self._decoder.decode(b"", final=True), self._fed_at)
        if self._pieces:
            self._line("".join(self._pieces))
            self._pieces = []
            self._fresh_at = None
        self.flush_traceback()
        if self._log is not None:
            self._log.close()

    def _take(self, text: str, now: float) -> None:
        *lines, rest = text.split("\n")
        for line in lines:
            self._line("".join([*self._pieces, line]))
            self._pieces, self._fresh_at = [], None
        if rest:
            self._pieces.append(rest)
            if "\r" in rest:
                self._pieces = [_collapse("".join(self._pieces))]
            self._fresh_at = now if self._fresh_at is None else self._fresh_at

    def _line(self, text: str) -> None:
        text = as_shown(text)
        self._tail.append(text)
        lines = [text]
        if self.fold is not None and not self._shown:
            if not self.fold.held:
                self._held_at = self._fed_at
            lines = self.fold.push(text)
        for line in lines:
            self._show(line, newline=True)
        self._drawn_at = None

    def _show(self, text: str, *, newline: bool) -> None:
        """Writes a line, or the part of it that was not yet shown."""
        sink, already = self._sink, self._shown
        rest = text
        if already and text.startswith(already):
            rest = text[len(already) :]
        elif already:
            sink.end_line()
        self._shown = "" if newline else text
        if already and rest != text and not rest and sink.open_by is not self:
            return
        if sink.open_by is not self:
            sink.end_line()
            sink.put(self._prefix)
        sink.put(rest)
        if sink.color and "\x1b" in rest:
            sink.put("\x1b[0m")
        if newline:
            sink.put("\n")
        sink.open_by = None if newline else self


class Screen:
    """The launcher's stdout and stderr. Its own lines go to stderr. If both are the same terminal or file they share
    one queue, so that no line is cut by another."""

    def __init__(self, *, size: int, color: str, out: int = 1, err: int = 2) -> None:
        self._width = len(str(size - 1))
        self._out = Sink(out, color=color)
        self._err = self._out if os.path.sameopenfile(out, err) else Sink(err, color=color)
        self._streams: list[RankStream] = []
        self._panel: list[str] = []
        self._panel_is_new = False
        self._panel_due = 0.0

    @property
    def sinks(self) -> list[Sink]:
        return [self._out] if self._err is self._out else [self._out, self._err]

    @property
    def full(self) -> bool:
        return any(sink.pending > FULL_BYTES for sink in self.sinks)

    def streams(
        self, role: str, rank: int, *, log_dir: str | None, decide: Callable[[str], TracebackAction]
    ) -> tuple[RankStream, RankStream]:
        """stdout and stderr of one process. Raises OSError if its log files cannot be created."""
        logs = [StreamLog(log_path(log_dir, role, rank, end), self.log) if log_dir else None for end in ("out", "err")]
        out = RankStream(self._out, self._prefix(role, rank, self._out), log=logs[0])
        err = RankStream(self._err, self._prefix(role, rank, self._err), log=logs[1], fold=TracebackFold(decide))
        self._streams += [out, err]
        return out, err

    def log(self, text: str) -> None:
        """Prints a line of the launcher itself."""
        self._err.end_line()
        if os.isatty(self._err.fd):
            self._err.put("\r")  # over the ^C that the terminal has echoed
        self._err.put(f"\x1b[1mhora:\x1b[0m {text}\n" if self._err.color else f"hora: {text}\n")

    @property
    def can_panel(self) -> bool:
        """Whether stderr is a terminal that can show a panel, and no other descriptor of ours writes to it."""
        if not os.isatty(self._err.fd) or os.environ.get("TERM", "") in ("", "dumb"):
            return False
        width, height = self.size()
        alone = self._err is self._out or not os.isatty(self._out.fd)
        return alone and width >= MIN_WIDTH and height >= MIN_HEIGHT

    @property
    def color(self) -> bool:
        """Whether the launcher's lines and the panel are coloured."""
        return self._err.color

    def size(self) -> tuple[int, int]:
        """Current columns and lines of the terminal; (0, 0) if they are unknown."""
        try:
            return os.get_terminal_size(self._err.fd)
        except OSError:
            return 0, 0

    def panel(self, lines: Sequence[str]) -> None:
        """Sets the lines that stand below all others; none removes the panel. They may contain colours but nothing
        that moves the cursor. Only if `can_panel`."""
        self._panel_is_new = self._panel_is_new or list(lines) != self._panel
        self._panel = list(lines)
        if not lines:
            self._err.release()
            self._err.lift()

    @property
    def due(self) -> float | None:
        dues = [due for stream in self._streams if (due := stream.due) is not None]
        if self._wants_panel or self._err.holds:
            dues.append(self._panel_due)
        return min(dues, default=None)

    def tick(self, now: float) -> None:
        for stream in self._streams:
            stream.tick(now)
        if now < self._panel_due or not (self._wants_panel or self._err.holds):
            return
        self._panel_due = now + PANEL_S
        self._err.release()
        if not self._wants_panel:
            return
        width, height = self.size()
        if self._may_draw(width):
            self._err.lay(fit_panel(self._panel, height), width)
            self._panel_is_new = False
        else:
            self._panel_due = now + HIDDEN_S

    def close(self) -> None:
        """Shows the rest of the ranks' lines, ends the last of them, and removes the panel."""
        self.panel([])
        for stream in self._streams:
            stream.close()
        for sink in self.sinks:
            sink.end_line()

    @property
    def _wants_panel(self) -> bool:
        """Whether the panel has to be drawn, and earlier output was read."""
        sink = self._err
        stale = self._panel_is_new or not sink.footer
        return bool(self._panel) and stale and not sink.silent and sink.pending <= select.PIPE_BUF

    def _may_draw(self, width: int) -> bool:
        """Not in the background, and not below a line that ends at the last column: the cursor could not return."""
        try:
            if os.tcgetpgrp(self._err.fd) != os.getpgrp():
                return False
        except OSError:
            pass  # not our controlling terminal
        above = self._err.open_by
        return above is None or (width > 0 and num_cells(above.unfinished) % width != 0)

    def _prefix(self, role: str, rank: int, sink: Sink) -> str:
        text = f"[{rank:>{self._width}}]" if role == "worker" else f"[{process_name(role, rank)}]"
        return f"\x1b[{_COLORS[rank % len(_COLORS)]}m{text}\x1b[0m " if sink.color else f"{text} "


def fit_panel(lines: Sequence[str], height: int) -> list[str]:
    """The lines that fit in half of a terminal of that height, with the cursor's line; a last line counts the rest."""
    room = max(1, height // 2 - 1)
    return list(lines) if len(lines) <= room else [*lines[: room - 1], f" … {len(lines) - room + 1} lines hidden"]


def as_shown(line: str) -> str:
    """What a terminal shows of a line with carriage returns: each part overwrites the one before it."""
    line = line.rstrip("\r")
    if "\r" not in line:
        return line
    shown = ""
    for part in line.split("\r"):
        # Escapes have no width, so columns cannot be counted: the last part wins.
        escaped = "\x1b" in part or "\x1b" in shown
        shown = (part or shown) if escaped else part + shown[len(part) :]
    return shown.rstrip(" ")


def _collapse(line: str) -> str:
    """An equivalent unfinished line with one carriage return: a progress bar may run for hours."""
    before, _, last = line.rpartition("\r")
    return f"{as_shown(before)}\r{last}"


def log_path(log_dir: str, role: str, rank: int, end: str) -> str:
    """Log file of one stream of one process: rank-0.out, server-0.err, predictor.err."""
    return os.path.join(log_dir, f"{process_name(role, rank).replace(' ', '-')}.{end}")


def process_name(role: str, rank: int) -> str:
    """`rank 2`, `server 0` or `predictor`."""
    return role if role == "predictor" else f"{'rank' if role == 'worker' else role} {rank}"


def make_log_dir(path: str | None) -> None:
    """Creates `--log-dir`. Raises ValueError if it cannot be created or written."""
    if path is None:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--log-dir {path} cannot be created: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"--log-dir {path} is not writable")


def open_standard_descriptors() -> None:
    """Flushes Python's buffers, and opens closed standard descriptors, so that no pipe gets the number of one."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
