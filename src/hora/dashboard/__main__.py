"""`python -m hora.dashboard --fd N --home DIR`: the page on a socket that somebody else has opened, for as long as its
stdin is open and no signal comes."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading

from .serving import serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hora.dashboard", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the descriptor of a listening socket")
    parser.add_argument("--home", required=True, help="the directory of the runs")
    parser.add_argument("--run", action="append", default=[], metavar="NAME=DIRECTORY", help="a run elsewhere")
    parser.add_argument("--host-name", action="append", default=[], help="a further name of this machine")
    asked = parser.parse_args()
    others = {name: os.path.abspath(path) for name, _, path in (run.partition("=") for run in asked.run)}
    try:
        listener = socket.socket(fileno=asked.fd)
        listener.getsockname()
    except OSError as problem:
        parser.error(f"--fd {asked.fd} is no socket: {problem.strerror}")
    closed = threading.Event()
    threading.Thread(target=_until_closed, args=(closed,), name="hora-page-stdin", daemon=True).start()
    serve(listener, home=asked.home, others=others, host_names=asked.host_name, until=closed.is_set)


def _until_closed(closed: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(sys.stdin.fileno(), 4096):
            continue
    closed.set()


if __name__ == "__main__":
    main()
