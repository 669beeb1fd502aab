"""Reaper: a small process that kills the processes of a run whose launcher has died, even by SIGKILL.

It runs this file as a script, with the standard library only, so that it starts in milliseconds. It reads a pipe whose
write end only the launcher has, and which the kernel closes when the launcher dies. Lines on the pipe:

    group PGID      a rank was started; it leads this process group
    forget PGID     that group is empty and reaped; its number may be reused
    file HEX        a file or folder (its path's bytes in hex) to be removed
    done            the launcher has cleaned up by itself

At the end of the pipe without `done` it kills the groups, then every other process of this run, and removes the files.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

SWEEP_S = 1.5


def sweep(run: str, *, spare: int = 0, limit_s: float = SWEEP_S) -> int:
    """SIGKILLs every process of this user that carries HORA_RUN=`run`, except this one and `spare`; returns how many.

    Repeats passes over /proc until two in a row find none, since a process may be about to start another; ends after
    `limit_s` in any case. Without /proc (not Linux) it finds none. Thread-safe.
    """
    deadline = time.monotonic() + limit_s
    num_killed = num_quiet = 0
    while num_quiet < 2:
        ended = _kill_all(run, spare)
        num_killed += len(ended)
        num_quiet = 0 if ended else num_quiet + 1
        for pidfd in ended:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            os.close(pidfd)
        if time.monotonic() >= deadline:
            break
    return num_killed


def _kill_all(run: str, spare: int) -> list[int]:
    """One pass; returns a pidfd for each process that was killed."""
    mark = b"HORA_RUN=" + run.encode()
    pidfds = []
    for pid in _own_processes():
        if pid in (os.getpid(), spare) or not _has(pid, mark):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        # The pid may have been reused since the first check; from here on the pidfd holds it.
        if _has(pid, mark):
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                pidfds.append(pidfd)
                continue
            except OSError:
                pass
        os.close(pidfd)
    return pidfds


def _own_processes() -> list[int]:
    pids = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                pids.append(int(name))
    return pids


def _has(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False


class Reaper:
    """The launcher's handle. Not thread-safe. Only `done` blocks, for a second at most. A failed write is ignored.

    `pidfd` becomes readable when the process has died; -1 where there are none.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._groups: set[int] = set()
        self._files: list[str] = []
        self._replaced = False
        self._process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def group(self, pgid: int) -> None:
        self._groups.add(pgid)
        self._send(f"group {pgid}")

    def forget(self, pgid: int) -> None:
        self._groups.discard(pgid)
        self._send(f"forget {pgid}")

    def file(self, path: str) -> None:
        self._files.append(path)
        self._send(f"file {os.fsencode(path).hex()}")

    def folder(self, prefix: str) -> str:
        """Makes a temporary folder, 0700. The reaper knows its path before it exists, so a kill never leaves it."""
        import secrets
        import tempfile

        path = os.path.join(tempfile.gettempdir(), prefix + secrets.token_hex(8))
        self.file(path)
        os.mkdir(path, 0o700)
        return path

    def replace(self) -> bool:
        """After the process has died: starts a second one with the same knowledge. False if that was the second."""
        self._close()
        if self._replaced:
            return False
        self._replaced = True
        self._start()
        for pgid in self._groups:
            self._send(f"group {pgid}")
        for path in self._files:
            self._send(f"file {os.fsencode(path).hex()}")
        return True

    def done(self) -> None:
        """The run is over and cleaned up: ends the process."""
        self._send("done")
        self._close()

    def _start(self) -> None:
        import subprocess

        # Without HORA_*: if this launcher is a rank of another run, that run's sweep must not kill its reaper.
        env = {key: value for key, value in os.environ.items() if not key.startswith("HORA_")}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), self._run],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=env,
            cwd="/",
            start_new_session=True,
        )
        if hasattr(os, "pidfd_open"):
            self.pidfd = os.pidfd_open(self._process.pid)

    def _send(self, line: str) -> None:
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())

    def _close(self) -> None:
        import subprocess

        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        process.stdin.close()
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch(run: str) -> None:
    """What the process runs: reads the pipe until its end, then kills and removes unless it is done."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    files: list[bytes] = []
    for line in sys.stdin.buffer:
        verb, _, rest = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n"):
            break
        if verb == b"group":
            groups.add(int(rest))
        elif verb == b"forget":
            groups.discard(int(rest))
        elif verb == b"file":
            files.append(bytes.fromhex(rest.decode()))
        elif verb == b"done":
            return
    for pgid in groups:
        with contextlib.suppress(OSError):
            os.killpg(pgid, signal.SIGKILL)
    sweep(run)
    for path in files:
        with contextlib.suppress(OSError):
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)


if __name__ == "__main__":
    _watch(sys.argv[1])
