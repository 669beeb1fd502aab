"""`hora explain`: an algorithm as text, step by step."""

from __future__ import annotations

import click

from ..runs import exit_codes
from .options import PositiveInt


@click.command()
@click.argument("what", metavar="NAME", type=click.Choice(["ring", "tree", "halving", "star", "reduce", "async"]))
@click.option("-n", "size", type=PositiveInt(), help="Number of ranks. E.g. -n 5. Default: 5; for async (2 to 4): 2.")
def explain(what: str, size: int | None) -> int:
    """Print an algorithm step by step.

    NAME is ring, tree, halving, star, reduce (serial against tree), or async (workers of a parameter server, with the
    versions they compute on, the lags, and what bounds these). For collectives it prints which rank sends which chunk
    to which, and the sums in every chunk.

    \b
      hora explain ring -n 5
      hora explain async
    """
    from ..explain import ASYNC
    from ..explain import explain as explanation

    try:
        click.echo(explanation(what, (2 if what == ASYNC else 5) if size is None else size))
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    return exit_codes.OK
