"""The `hora` command: finds its subcommands, runs one, and turns wrong usage into one line and exit code 2.

The command `hora NAME` is the attribute NAME of the module hora.cli.NAME, which is imported when it is needed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from ..errors import did_you_mean
from ..runs import exit_codes
from . import plugins

COMMANDS = ("run", "serve", "explain", "bench", "demo", "runs", "show", "compare", "dashboard", "trace")


class HoraGroup(click.Group):
    """The package's own commands, and `claims`, which comes with hora_benchmarks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *(["claims"] if plugins.command("claims") is not None else [])]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            found: click.Command = getattr(importlib.import_module(f".{name}", __package__), name)
            return found
        if name != "claims":
            return plugins.unknown(ctx, name)
        return plugins.command(name) or plugins.not_installed(ctx, name)


@click.group(
    cls=HoraGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Help of one command: hora run --help",
    invoke_without_command=True,
)
@click.version_option(package_name="hora", message="hora %(version)s", help="Print the version. E.g. hora --version.")
@click.pass_context
def hora(ctx: click.Context) -> None:
    """Train one PyTorch script on many processes, under any data-parallel architecture, chosen by one word."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (sys.argv by default) and returns its exit code. Wrong usage is one line on stderr."""
    try:
        result = hora.main(
            args=list(arguments) if arguments is not None else None, prog_name="hora", standalone_mode=False
        )
    except click.UsageError as error:
        click.echo(_usage_message(error), err=True)
        return exit_codes.USAGE
    except click.ClickException as error:
        click.echo(f"hora: {error.format_message()}", err=True)
        return exit_codes.SCRIPT_FAILED
    except (click.Abort, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    return result if isinstance(result, int) else exit_codes.OK


def _usage_message(error: click.UsageError) -> str:
    """One line: the command, what is wrong, and what exists."""
    ctx, where = error.ctx, error.ctx.command_path if error.ctx else "hora"
    message = error.format_message().rstrip(".")
    message = f"{message[0].lower()}{message[1:]}"
    if isinstance(error, click.NoSuchOption) and ctx is not None:
        options = [name for param in ctx.command.params for name in param.opts if name.startswith("-")] + ["--help"]
        hint = did_you_mean(error.option_name, options, cutoff=0.75)
        message = f"no such option {error.option_name}; {hint}there are: {', '.join(options)}"
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        message = f"{error.param.metavar} is missing; see {where} --help"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        message = error.message.rstrip(".")
        if not getattr(error.param.type, "message_names_option", False):
            what = error.param.metavar if isinstance(error.param, click.Argument) else error.param.opts[0]
            message = f"{what}: {message}"
    return f"{where}: {' '.join(message.split())}"


if __name__ == "__main__":
    sys.exit(main())
