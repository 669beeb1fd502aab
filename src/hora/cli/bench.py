"""`hora bench`: `start` is always there; the other benchmarks come with hora_benchmarks."""

from __future__ import annotations

import click

from . import plugins
from .options import PositiveInt


class BenchGroup(click.Group):
    """The package's own commands, then those of hora_benchmarks."""

    def _plugins(self) -> dict[str, click.Command]:
        found = plugins.command("bench")
        return dict(found.commands) if isinstance(found, click.Group) else {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *self._plugins()]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in self.commands:
            return self.commands[name]
        more = self._plugins()
        return more.get(name) or (plugins.unknown(ctx, name) if more else plugins.not_installed(ctx, name))


@click.group(cls=BenchGroup, invoke_without_command=True)
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
@click.option("--ranks", default="2,8,32", metavar="LIST", help="Numbers of ranks. E.g. --ranks 2,8. Default: 2,8,32.")
@click.option("--repeats", type=PositiveInt(), default=5, help="Repeats of each. E.g. --repeats 9. Default: 5.")
@click.option("--json", "json_path", metavar="FILE", help="Also write results as JSON lines. E.g. --json out.jsonl.")
def start(ranks: str, repeats: int, json_path: str | None) -> int:
    """Time to start and end ranks, against python and torchrun; and their memory.

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
