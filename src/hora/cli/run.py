"""`hora run`: the command line derived from RunConfig, and the launch."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import click

from ..launch.config import HOSTS, OptionSpec, RunConfig
from ..runs import exit_codes
from ..strategies import parse
from .options import GroupedCommand, GroupedOption, IntOrText, PositiveInt
from .serve import SERVE_OPTIONS, serve_config

_HELP = """Start N processes of a script and supervise them.

\b
  hora run -n 4 train.py
  hora run -n 4 --strategy ring train.py --epochs 3
  hora run -n 2 -m package.train --lr 0.1
  hora run -n 4 --strategy ps:mode=async --servers 2 --name mnist-3 train.py
  hora run --join mnist-3 train.py
  hora run -n 4 --serve 8000 train.py
  hora run --hosts a:2,b:2 train.py

Options come before the script. Everything after it is passed to the script, --help and -n included. Each line that a
rank writes is printed as "[rank] line", of a server as "[server 0] line", of the predictor as "[predictor] line", on
stdout or stderr as it was written. The first failure is printed last. Ctrl-C stops all ranks within 3 seconds; a second
Ctrl-C kills them at once. Under an elastic strategy (ps:mode=async, ps:mode=ssp, local:via=ps,barrier=false) a lost
rank is reported and the others continue. With --serve one more process runs the same script and answers predictions
over HTTP with the newest parameters; if it fails, training continues.
"""

_EPILOG = f"""\b
Exit codes:
  {exit_codes.OK:>3}  every rank succeeded; under an elastic strategy, the last one did
  {exit_codes.SCRIPT_FAILED:>3}  the script failed on a rank or a server
  {exit_codes.USAGE:>3}  the command line was wrong; nothing was started
  {exit_codes.RANK_KILLED:>3}  a rank or a server was killed by a signal
  {exit_codes.INTERRUPTED}  Ctrl-C
  {exit_codes.OUTPUT_CLOSED}  the reader of the output closed it, as `| head` does
  {exit_codes.TERMINATED}  SIGTERM or SIGHUP
"""


def _derived_option(name: str, hint: Any, spec: OptionSpec) -> GroupedOption:
    """The click option of a RunConfig field. It has no default: RunConfig's own applies to what was not given."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind: Any = str
    if spec.choices:
        kind = click.Choice(spec.choices)
    elif int in kinds:
        kind = IntOrText() if str in kinds else PositiveInt()
    elif float in kinds:
        kind = float
    flags = [spec.flag or f"--{name.replace('_', '-')}", name]
    more: dict[str, Any] = {"is_flag": True} if hint is bool else {"type": kind, "metavar": spec.metavar}
    return GroupedOption(
        flags, group=spec.group, help=spec.help, multiple=spec.multiple, envvar=spec.envvar, default=None, **more
    )


def _parameters() -> list[click.Parameter]:
    hints = typing.get_type_hints(RunConfig)
    found: list[click.Parameter] = [
        _derived_option(field.name, hints[field.name], field.metadata["option"])
        for field in dataclasses.fields(RunConfig)
        if "option" in field.metadata
    ]
    hostfile = "The same as --hosts from a file, one host per line as `a:2` or `a slots=2`. E.g. --hostfile hosts.txt."
    found.append(GroupedOption(["--hostfile"], group=HOSTS, metavar="FILE", help=hostfile))
    script = click.Argument(["command"], metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
    return [*found, *SERVE_OPTIONS, script]


@click.command(cls=GroupedCommand, params=_parameters(), help=_HELP, epilog=_EPILOG)
@click.pass_context
def run(ctx: click.Context, command: tuple[str, ...], **given: Any) -> int:
    from ..launch.run import run as launch

    try:
        known = {name: value for name, value in given.items() if value not in (None, ()) and value is not False}
        config = make_config(command, known)
        if misplaced := _misplaced(ctx, command):
            click.echo(f"hora: {misplaced}", err=True)
        return launch(config)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None


def make_config(command: tuple[str, ...], given: dict[str, Any]) -> RunConfig:
    """RunConfig of the options that were given, by name. Raises ValueError if one is wrong or has no effect."""
    from ..launch.hosts import host_spec

    serving = {name.removeprefix("serve_"): given.pop(name) for name in [*given] if name.startswith("serve_")}
    given["serve"] = serve_config(given.get("serve"), command, "module" in given, **serving)
    hosts, hostfile = given.pop("hosts", None), given.pop("hostfile", None)
    if hosts is not None and hostfile is not None:
        raise ValueError("--hosts and --hostfile both list the hosts; leave one of them out")
    if hosts is not None or hostfile is not None:
        listed = host_spec.parse(hosts) if hosts is not None else host_spec.read_file(str(hostfile))
        given["hosts"], given["size"] = host_spec.deal(listed, given.get("size"))
    if "strategy" in given:
        given["strategy"] = parse(given["strategy"])
    given["env"] = tuple(_variable(each) for each in given.get("env", ()))
    given["fork"] = "fork" not in given and "python" not in given  # its flag is --no-fork
    return RunConfig(command=command, **given)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--env takes NAME=VALUE, not {text!r}; to copy a variable from here: --forward {text}")
    return name, value


def _misplaced(ctx: click.Context, command: tuple[str, ...]) -> str:
    """A warning about an option of `hora run` that stands after the script; empty if there is none, or if the same
    option was given before the script too."""
    ours = {name: param for param in ctx.command.params for name in param.opts if name.startswith("-") and name != "-m"}
    for number, word in enumerate(command[1:], 1):
        name = word.partition("=")[0]
        if name in ours and ctx.get_parameter_source(str(ours[name].name)) is click.core.ParameterSource.DEFAULT:
            takes_value = "=" not in word and number + 1 < len(command) and not getattr(ours[name], "is_flag", False)
            given = f"{word} {command[number + 1]}" if takes_value else word
            return (
                f"{given} stands after {command[0]}, so it is passed to the script; to give it to hora run: "
                f"hora run {given} {command[0]}"
            )
    return ""
