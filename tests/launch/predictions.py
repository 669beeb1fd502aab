"""Runs with a predictor, as a test sees them: what they have said so far, and what is asked of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from launching import Launcher

PROBE = (torch.arange(12.0).view(2, 6) / 6).tolist()
LIMIT_S = 100.0


class Run:
    """A run under way: what it has said so far on both its outputs, and its predictor's port."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, args=(pipe,), daemon=True) for pipe in (process.stdout, process.stderr)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe: Any) -> None:
        for line in pipe:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def await_line(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + LIMIT_S
        with self._news:
            while True:
                for line in self.lines:
                    if match := re.search(pattern, line):
                        return match
                over = not any(thread.is_alive() for thread in self._threads)
                assert not over and time.monotonic() < deadline, (pattern, self.lines)
                self._news.wait(1.0)

    @property
    def port(self) -> int:
        return int(self.await_line(r"serving '\w+' on http://127\.0\.0\.1:(\d+) ")[1])

    @property
    def workers(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"\[\d\] pid (\d+)", self.text)]

    def end(self) -> int:
        code = self.process.wait(LIMIT_S)
        for thread in self._threads:
            thread.join(5.0)
        return code

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@contextlib.contextmanager
def running(launcher: Launcher, *arguments: object) -> Iterator[Run]:
    process = launcher.start(*arguments)
    run = Run(process)
    try:
        yield run
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def ask(port: int, body: bytes | None = None, path: str = "/predict", **headers: str) -> tuple[int, dict[str, Any]]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        line.request("POST", path, json.dumps({"inputs": PROBE}).encode() if body is None else body, headers)
        answer = line.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        line.close()
