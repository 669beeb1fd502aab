"""`hora trace`: where the time of a run went, out of its trace file."""

from __future__ import annotations

import click

from ..monitor import trace_summary


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--summary", is_flag=True,
    help="Print per rank what its time was spent on, how much communication was hidden, and which rank the others "
    "waited for. E.g. hora trace run.json --summary.",
)  # fmt: skip
def trace(file: str, summary: bool) -> None:
    """Summarise the trace file of hora run --trace FILE.

    \b
      hora trace run.json
      hora trace run.json.gz --summary
    """
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
