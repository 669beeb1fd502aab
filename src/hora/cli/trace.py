"""`hora trace`: what a trace file says."""

from __future__ import annotations

import click

from ..monitor import trace_summary


@click.command(
    help="""Say where the time of a run went, out of the file that hora run --trace FILE has written.

\b
  hora trace run.json
  hora trace run.json.gz --summary
"""
)
@click.argument("file", metavar="FILE")
@click.option(
    "--summary",
    is_flag=True,
    help="In words: what each rank spent its time on, what communication was hidden, who was waited for, e.g. hora "
    "trace run.json --summary.",
)
def trace(file: str, summary: bool) -> None:
    try:
        ranks, problem = trace_summary.read(file)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    lines = trace_summary.describe(ranks)
    if problem:
        click.echo(problem, err=True)
    if summary:
        click.echo("\n".join(lines))
    else:
        click.echo(f"{lines[0]}\nopen {file} in ui.perfetto.dev (it stays on this machine), or in chrome://tracing;")
        click.echo(f"where the time went, in words: hora trace {file} --summary")
