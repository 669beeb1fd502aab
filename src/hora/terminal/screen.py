"""Output: the ranks' streams become prefixed lines on our own stdout and stderr, whole, in order, nothing lost.

    rank's pipe ─ bytes ─> Stream ─ lines ─> Sink ─ at most 4 KiB when poll says so ─> our stdout or stderr
                             └─ raw bytes ─> Log

Nothing here blocks: a reader of ours that has stopped reading (a pager, Ctrl-S) must not keep the launcher from
noticing a dead rank. A Sink queues; when its queue is `FULL_BYTES` long the launcher stops reading the ranks' pipes.
On a terminal a panel may stand below all that. All of this is the launcher's main thread's alone.
"""

from __future__ import annotations

import codecs
import collections
import errno
import os
import select
import stat
import sys
from collections.abc import Callable, Sequence

from .footer import Footer, fitting
from .format import num_cells
from .tracebacks import TracebackAction, TracebackFold

FULL_BYTES = 1 << 20
IDLE_S = 0.3
"""An unfinished line that has been quiet for this long is shown."""

TRACEBACK_S = 1.0
"""A traceback is held back for this long, so that the launcher can tell whether it is an echo."""

REDRAW_S = 5.0
"""A progress bar that never ends its line is shown this often."""

PANEL_S = 1 / 30
"""The panel is drawn this often at most, and what is said above it shown: together, so that it does not flicker."""

HIDDEN_S = 0.5
"""While the panel cannot be drawn, since the launcher is in the background, it is tried again this often."""

LEAST_WIDTH, LEAST_HEIGHT = 40, 10
"""A terminal smaller than this gets no panel."""

TAIL_LINES = 200
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class Sink:
    """One of our own descriptors. `put` queues and never blocks; `write_some` is called when poll says it may write.

    `gone` turns true when the reader has left (EPIPE). Any other error of the descriptor, a closed terminal or a full
    disk, only makes it `silent`: training is worth more than its output.
    """

    def __init__(self, fd: int, *, color: bool) -> None:
        self.fd = fd
        self.color = color
        self.gone = False
        self.open_by: RankStream | None = None
        self.footer = Footer()
        self.silent = False
        self._queue = bytearray()
        self._held = bytearray()
        # A pipe that poll calls writable takes PIPE_BUF bytes without blocking, and no more is promised.
        self._chunk = 1 << 20 if _is_regular(fd) else select.PIPE_BUF

    @property
    def pending(self) -> int:
        return len(self._queue)

    def put(self, text: str) -> None:
        """Queues; while a footer lies below, until the next `release`, so that it does not flicker."""
        if self.silent:
            return
        if not self.footer.lines:
            self._queue += text.encode("utf-8", "replace")
            return
        self._held += text.encode("utf-8", "replace")
        if len(self._held) > select.PIPE_BUF:
            self.release()

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def release(self) -> None:
        """Queues what was held, in the place of the footer."""
        if self._held:
            self.lift()
            self._queue += self._held
            self._held = bytearray()

    def lay(self, lines: Sequence[str], width: int) -> None:
        """Puts a footer below everything."""
        if not self.silent:
            self.release()
            self._queue += self.footer.lay(lines, width, below_text=self.open_by is not None).encode("utf-8", "replace")

    def lift(self) -> None:
        """Takes the footer away, if there is one."""
        self._queue += self.footer.lift().encode()

    def write_some(self) -> None:
        try:
            written = os.write(self.fd, memoryview(self._queue)[: self._chunk])
        except BlockingIOError:
            return
        except OSError as error:
            self.gone = error.errno == errno.EPIPE
            self.silent = True
            self._queue = self._held = bytearray()
            self.footer.lift()
            return
        del self._queue[:written]

    def end_line(self) -> None:
        """Leaves the unfinished line that the cursor may stand in."""
        if self.open_by is not None:
            self.put("\n")
            self.open_by = None


class StreamLog:
    """One stream of one rank as raw bytes in a file. An error ends the file, not the run, and is told once."""

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
            self._warn(f"{self._path} cannot be written any more: {error.strerror}; the run goes on without it")
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class RankStream:
    """stdout or stderr of one rank: bytes in, prefixed lines out, and the last of them kept.

    Bytes that are no UTF-8 are shown as U+FFFD. A line with carriage returns is shown as a terminal would leave it.
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
        """Takes what the rank wrote, in any cut."""
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
        """When `tick` has something to show, if nothing else comes; None when it has not."""
        if self.fold is not None and self.fold.held:
            return self._held_at + TRACEBACK_S
        if self._fresh_at is None:
            return None
        due = min(self._fed_at + IDLE_S, self._fresh_at + REDRAW_S)
        return due if self._drawn_at is None else max(due, self._drawn_at + REDRAW_S)

    def tick(self, now: float) -> None:
        """Shows a traceback or an unfinished line that has been quiet long enough."""
        due = self.due
        if due is None or now < due:
            return
        if self.fold is not None and self.fold.held:
            self._show_all(self.fold.release())
        if self._fresh_at is None:
            return
        text = "".join(self._pieces)
        self._show(as_shown(text), newline=False)
        self._fresh_at = None
        if "\r" in text:
            self._drawn_at = now

    def settle(self) -> None:
        """Shows a traceback that is held back, at once."""
        if self.fold is not None:
            self._show_all(self.fold.release())

    def close(self) -> None:
        """The rank is gone: shows the last line even without its newline, and whatever was held back."""
        self._take(self._decoder.decode(b"", final=True), self._fed_at)
        if self._pieces:
            self._line("".join(self._pieces))
            self._pieces = []
            self._fresh_at = None
        self.settle()
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
        if self.fold is None or self._shown:
            self._show(text, newline=True)
        else:
            if not self.fold.held:
                self._held_at = self._fed_at
            self._show_all(self.fold.push(text))
        self._drawn_at = None

    def _show_all(self, lines: list[str]) -> None:
        for line in lines:
            self._show(line, newline=True)

    def _show(self, text: str, *, newline: bool) -> None:
        """Writes a line, or what is new of it since it was last shown unfinished."""
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
    """Our stdout and stderr. Lines of ours go to stderr; when both are one terminal or file they share one queue, so
    that no line is cut by another."""

    def __init__(self, *, size: int, color: str, out: int = 1, err: int = 2) -> None:
        self._width = len(str(size - 1))
        self._out = Sink(out, color=_use_color(out, color))
        self._err = self._out if _same_file(out, err) else Sink(err, color=_use_color(err, color))
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
        self, role: str, rank: int, *, log_dir: str | None, verdict: Callable[[str], TracebackAction]
    ) -> tuple[RankStream, RankStream]:
        """The two streams of one process; OSError when its log files cannot be made."""
        logs = [StreamLog(log_path(log_dir, role, rank, end), self.say) if log_dir else None for end in ("out", "err")]
        out = RankStream(self._out, self._prefix(role, rank, self._out), log=logs[0])
        err = RankStream(self._err, self._prefix(role, rank, self._err), log=logs[1], fold=TracebackFold(verdict))
        self._streams += [out, err]
        return out, err

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._err.end_line()
        if os.isatty(self._err.fd):
            self._err.put("\r")  # over the ^C that the terminal itself has echoed
        self._err.put(f"\x1b[1mhora:\x1b[0m {text}\n" if self._err.color else f"hora: {text}\n")

    @property
    def can_panel(self) -> bool:
        """Whether there is a terminal that can show a panel, and nobody else writes to it behind our back."""
        if not os.isatty(self._err.fd) or os.environ.get("TERM", "") in ("", "dumb"):
            return False
        width, height = self.size()
        alone = self._err is self._out or not os.isatty(self._out.fd)
        return alone and width >= LEAST_WIDTH and height >= LEAST_HEIGHT

    @property
    def color(self) -> bool:
        """Whether our own lines, and the panel, are coloured."""
        return self._err.color

    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal, as they are now; (0, 0) when it does not tell."""
        try:
            return os.get_terminal_size(self._err.fd)
        except OSError:
            return 0, 0

    def panel(self, lines: Sequence[str]) -> None:
        """From now on these lines stand below all others, until they are replaced; none: no panel. They may carry
        colours, and nothing else that moves a terminal. Only where `can_panel`."""
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
            self._err.lay(fitting(self._panel, height), width)
            self._panel_is_new = False
        else:
            self._panel_due = now + HIDDEN_S

    def close(self) -> None:
        """Shows everything that is left of the ranks' lines, leaves the last of them, and takes the panel away."""
        self.panel([])
        for stream in self._streams:
            stream.close()
        for sink in self.sinks:
            sink.end_line()

    @property
    def _wants_panel(self) -> bool:
        """Whether the panel is not there as it should be, and someone reads what we write."""
        sink = self._err
        stale = self._panel_is_new or not sink.footer.lines
        return bool(self._panel) and stale and not sink.silent and sink.pending <= select.PIPE_BUF

    def _may_draw(self, width: int) -> bool:
        """In the background the terminal is another's. Below a line that ends at the very edge there is no way back."""
        try:
            if os.tcgetpgrp(self._err.fd) != os.getpgrp():
                return False
        except OSError:
            pass  # a terminal that is not ours to control
        above = self._err.open_by
        return above is None or (width > 0 and num_cells(above.unfinished) % width != 0)

    def _prefix(self, role: str, rank: int, sink: Sink) -> str:
        text = f"[{rank:>{self._width}}]" if role == "worker" else f"[{seat_name(role, rank)}]"
        return f"\x1b[{_COLORS[rank % len(_COLORS)]}m{text}\x1b[0m " if sink.color else f"{text} "


def as_shown(line: str) -> str:
    """What a terminal shows of a line with carriage returns: each part is written over the one before it."""
    line = line.rstrip("\r")
    if "\r" not in line:
        return line
    shown = ""
    for part in line.split("\r"):
        # Escapes have no width, so counting columns would lie: there the last part wins.
        escaped = "\x1b" in part or "\x1b" in shown
        shown = (part or shown) if escaped else part + shown[len(part) :]
    return shown.rstrip(" ")


def _collapse(line: str) -> str:
    """An equivalent of an unfinished line with at most one carriage return that matters: bars run for hours."""
    before, _, last = line.rpartition("\r")
    return f"{as_shown(before)}\r{last}"


def _use_color(fd: int, color: str) -> bool:
    if color != "auto":
        return color == "always"
    return os.isatty(fd) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _is_regular(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def _same_file(one: int, other: int) -> bool:
    a, b = os.fstat(one), os.fstat(other)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


def log_path(log_dir: str, role: str, rank: int, end: str) -> str:
    """Where one stream of one process is kept: rank-0.out, server-0.err, predictor.err."""
    return os.path.join(log_dir, f"{seat_name(role, rank).replace(' ', '-')}.{end}")


def seat_name(role: str, rank: int) -> str:
    """As `rank 2`, `server 0`, or `predictor`, of which there is one."""
    if role == "predictor":
        return role
    return f"{'rank' if role == 'worker' else role} {rank}"


def make_log_dir(path: str | None) -> None:
    """Makes `--log-dir`; ValueError when it cannot be had."""
    if path is None:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--log-dir {path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"--log-dir {path} cannot be written")


def open_standard_descriptors() -> None:
    """Python's own buffers first; and a pipe of ours must never get the number of a closed stdout."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
