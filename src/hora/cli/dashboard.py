"""`hora dashboard`: one page with all runs of this user, live and ended."""

from __future__ import annotations

import os

import click

from ..http.listening import DASHBOARD_PORT


@click.command()
@click.option(
    "--port", metavar="[HOST:]PORT", default=str(DASHBOARD_PORT),
    help="Address to listen on; if the port is taken, the next free one. E.g. --port 9000, --port 0.0.0.0:9000. "
    f"Default: {DASHBOARD_PORT} on 127.0.0.1.",
)  # fmt: skip
@click.option(
    "--run-dir", "run_dirs", metavar="DIR", multiple=True,
    help="Include a run that was started with --run-dir; repeatable. E.g. --run-dir out/mnist-3.",
)  # fmt: skip
@click.option(
    "--host-name", "host_names", metavar="NAME", multiple=True,
    help="Further host name that browsers may use; repeatable. E.g. --host-name trainer.example.",
)  # fmt: skip
def dashboard(port: str, run_dirs: tuple[str, ...], host_names: tuple[str, ...]) -> None:
    """Show all runs in the browser.

    It shows curves, workers, events and comparisons of live and ended runs; Prometheus metrics are at /metrics. It
    reads what runs have written and changes nothing. Without a host in --port only this machine can connect. Ctrl-C
    stops it.

    \b
      hora dashboard
      hora dashboard --port 9000
      hora dashboard --port 0.0.0.0:9000 --host-name trainer.example
      hora dashboard --run-dir /data/runs/mnist-3
    """
    from ..dashboard.catalogue import RunCatalogue, name_of
    from ..http.listening import listen_near, parse_address
    from ..runs import run_directory

    try:
        host, wanted = parse_address(port, "--port")
        others: dict[str, str] = {}
        for directory in run_dirs:
            if name_of(directory) in others:
                raise ValueError(f"two runs are called {name_of(directory)!r}; start another dashboard for {directory}")
            others[name_of(directory)] = os.path.abspath(directory)
        listener = listen_near(host, wanted)
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    from ..dashboard.app import serve

    number = listener.getsockname()[1]
    if wanted and number != wanted:
        click.echo(f"port {wanted} is taken; using port {number}", err=True)
    home = run_directory.home()
    shown = f"[{host}]" if ":" in host else host
    count = len(RunCatalogue(home, others).all())
    click.echo(f"{count} {'run' if count == 1 else 'runs'} of {home} on http://{shown}:{number}/ (Ctrl-C stops it)")
    serve(listener, home=home, others=others, host_names=host_names)
