"""`python -m hora.dashboard --fd N --home DIR`: the dashboard on a socket that the launcher has opened, until stdin is
closed or a signal arrives."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading

from .app import serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hora.dashboard", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of a listening socket")
    parser.add_argument("--home", required=True, help="directory of the runs")
    parser.add_argument("--run", action="append", default=[], metavar="NAME=DIRECTORY", help="a run elsewhere")
    parser.add_argument("--host-name", action="append", default=[], help="another name of this machine")
    args = parser.parse_args()
    others = {name: os.path.abspath(path) for name, _, path in (run.partition("=") for run in args.run)}
    try:
        listener = socket.socket(fileno=args.fd)
        listener.getsockname()
    except OSError as error:
        parser.error(f"--fd {args.fd} is not a socket: {error.strerror}")
    closed = threading.Event()
    threading.Thread(target=_wait_for_eof, args=(closed,), name="hora-page-stdin", daemon=True).start()
    serve(listener, home=args.home, others=others, host_names=args.host_name, until=closed.is_set)


def _wait_for_eof(closed: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(sys.stdin.fileno(), 4096):
            continue
    closed.set()


if __name__ == "__main__":
    main()
