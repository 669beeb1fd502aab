"""`hora bench`: `start` is always there; the other benchmarks come with hora_benchmarks."""

from __future__ import annotations

import click

from . import plugins
from .options import PositiveInt


class BenchGroup(click.Group):
    """The package's own commands, then those of hora_benchmarks."""

    def _more(self) -> dict[str, click.Command]:
        found = plugins.command("bench")
        return dict(found.commands) if isinstance(found, click.Group) else {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *self._more()]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = self.commands.get(name)
        if found is None:
            more = self._more()
            if not more and not ctx.resilient_parsing:
                raise plugins.missing(f"hora bench {name}")
            found = more.get(name)
        return found


@click.group(cls=BenchGroup, no_args_is_help=False, invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure Hora against its peers on this machine.

    \b
      hora bench start
      hora bench allreduce -n 2
      hora bench train -n 2 --model mlp
      hora bench ps -n 2 --servers 1
      hora bench staleness --plot staleness.png
      hora bench local -n 4 --rates 100mbit
      hora bench hosts --hosts-sim 4 --rate 1gbit
      hora bench quality -n 2 --plot quality.png
      hora bench serve
      hora bench observe
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@bench.command()
@click.option(
    "--ranks", default="2,8,32", metavar="LIST", help="Numbers of ranks, e.g. --ranks 2,8. Without it: 2,8,32."
)
@click.option("--repeats", type=PositiveInt(), default=5, help="Measurements of each, e.g. --repeats 9. Without it: 5.")
@click.option(
    "--json", "json_path", metavar="FILE", help="Also write the results as JSON lines, e.g. --json out.jsonl."
)
def start(ranks: str, repeats: int, json_path: str | None) -> int:
    """How long ranks take to start and end, against python on the same file and torchrun; and their memory.

    \b
      hora bench start --ranks 2,8
    """
    from . import bench_start

    sizes = [int(part) if part.strip().isdecimal() else 0 for part in ranks.split(",")]
    if not all(sizes):
        raise click.UsageError(f"--ranks takes whole numbers of at least 1, not {ranks!r}; e.g. --ranks 2,8")
    try:
        return bench_start.main(sizes, repeats, json_path)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
