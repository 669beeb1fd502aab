"""`hora bench`: the group of benchmarks. `start` is part of the package; the others come with hora_benchmarks."""

from __future__ import annotations

import click

from . import plugins
from .bench_start import start


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

    All but start need the package hora-benchmarks: in a checkout of Hora's repository, pip install ./benchmarks.

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


bench.add_command(start)
