"""`hora dashboard`: the page of all runs of this user, live and past."""

from __future__ import annotations

import os

import click

from ..http.listening import DASHBOARD_PORT

_HELP = """Show all runs in the browser, live and past: curves, workers, events, comparisons; Prometheus at /metrics.

\b
  hora dashboard
  hora dashboard --port 9000
  hora dashboard --port 0.0.0.0:9000 --host-name trainer.example
  hora dashboard --run-dir /data/runs/mnist-3

It reads what runs have written and changes none. Without a host in --port only this machine can open it. Ctrl-C ends
it.
"""


@click.command(help=_HELP)
@click.option(
    "--port",
    metavar="[HOST:]DASHBOARD_PORT",
    default=str(DASHBOARD_PORT),
    help=f"Where it listens, e.g. --port 9000, --port 0.0.0.0:9000; if it is taken, the next free one. Without it: "
    f"{DASHBOARD_PORT} on 127.0.0.1.",
)
@click.option(
    "--run-dir", "run_dirs", metavar="DIR", multiple=True,
    help="The directory of a run that lies elsewhere, e.g. --run-dir out/mnist-3. Can be given several times.",
)  # fmt: skip
@click.option(
    "--host-name", "host_names", metavar="NAME", multiple=True,
    help="A further name under which browsers may open it, e.g. --host-name trainer.example. Can be given several "
    "times.",
)  # fmt: skip
def dashboard(port: str, run_dirs: tuple[str, ...], host_names: tuple[str, ...]) -> None:
    from ..dashboard.runs import StoredRuns, named
    from ..http.listening import listen_near, parse_address
    from ..runs import run_directory

    try:
        host, wanted = parse_address(port, "--port")
        others: dict[str, str] = {}
        for directory in run_dirs:
            if named(directory) in others:
                raise ValueError(f"two runs are called {named(directory)!r}: {directory} can be shown by itself")
            others[named(directory)] = os.path.abspath(directory)
        listener = listen_near(host, wanted)
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    from ..dashboard.serving import serve

    number = listener.getsockname()[1]
    if wanted and number != wanted:
        click.echo(f"port {wanted} is taken, so this is port {number}", err=True)
    home = run_directory.home()
    shown = f"[{host}]" if ":" in host else host
    count = len(StoredRuns(home, others).all())
    click.echo(f"{count} {'run' if count == 1 else 'runs'} of {home} on http://{shown}:{number}/ (Ctrl-C ends it)")
    serve(listener, home=home, others=others, host_names=host_names)
