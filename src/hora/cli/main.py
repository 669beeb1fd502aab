"""The command line: `hora run`, `serve`, `explain`, `bench`, `demo`, and what looks at runs: `runs`, `show`, `compare`,
`dashboard`, `trace`. Each imports only what it needs."""

from __future__ import annotations

import difflib
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ..runs import exit_codes
from . import plugins
from .bench import bench
from .dashboard import dashboard
from .options import ByteSizes, DashboardOption, PositiveInt, ServersOption
from .runs import compare, runs, show
from .trace import trace

if TYPE_CHECKING:
    from hora.http.serve_config import ServeConfig

    from ..launch.hosts.host import HostSpec

_RUN_HELP = """Start N processes of one script, on this machine or on several, and see them to their end.

\b
  hora run -n 4 train.py
  hora run -n 4 --strategy ring train.py --epochs 3
  hora run -n 2 -m package.train --lr 0.1
  hora run -n 4 --strategy ps:mode=async --servers 2 --name mnist-3 train.py
  hora run --join mnist-3 train.py
  hora run -n 4 --serve 8000 train.py
  hora run --hosts a:2,b:2 train.py

Everything after the script is the script's own, --help and -n included. Each line that a rank writes appears as
"[rank] line", one of a server as "[server 0] line", of the predictor as "[predictor] line", on stdout or stderr as it
was written. The first failure is printed last. Ctrl-C stops all ranks within 3 seconds; a second one, at once. Under
ps:mode=async and ps:mode=ssp a rank that is lost is named and the others go on. With --serve one process more runs the
same script and answers predictions over HTTP with the newest parameters while the others train; however it ends, the
training goes on.
"""

_RUN_EPILOG = f"""\b
Exit codes:
  {exit_codes.OK:>3}  every rank ended well; under ps:mode=async and ps:mode=ssp, the last one did
  {exit_codes.SCRIPT_FAILED:>3}  a rank's or a server's script failed
  {exit_codes.USAGE:>3}  the command line was wrong, nothing was started
  {exit_codes.RANK_KILLED:>3}  a rank or a server was killed by a signal
  {exit_codes.INTERRUPTED}  Ctrl-C
  {exit_codes.OUTPUT_CLOSED}  the reader of the output went away, as `| head` does
  {exit_codes.TERMINATED}  SIGTERM or SIGHUP
"""


class HoraGroup(click.Group):
    """The package's own commands, and `claims`, which comes with hora_benchmarks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *(["claims"] if plugins.command("claims") is not None else [])]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = self.commands.get(name)
        if found is None and name == "claims":
            found = plugins.command(name)
            if found is None and not ctx.resilient_parsing:
                raise plugins.missing("hora claims")
        return found


@click.group(
    cls=HoraGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Every command explains itself: hora run --help",
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.version_option(
    package_name="hora", message="hora %(version)s", help="Print the version and end, e.g. hora --version."
)
@click.pass_context
def hora(ctx: click.Context) -> None:
    """Train one PyTorch script on many processes, under any data-parallel architecture, chosen by one word."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@hora.command(
    help=_RUN_HELP, epilog=_RUN_EPILOG, context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS]"
)
@click.option(
    "-n",
    "size",
    type=PositiveInt(),
    help="How many ranks, e.g. -n 4. Without it: 1; with --hosts, as many as these take.",
)
@click.option(
    "--hosts",
    metavar="LIST",
    help="Other machines, reached by your own ssh, and how many ranks each takes, e.g. --hosts a:2,b:2, --hosts "
    "user@a,b -n 4. Ranks fill them in order. The same folder, Python and packages must be there.",
)
@click.option(
    "--hostfile",
    metavar="FILE",
    help="The same from a file, one host per line as `a:2` or `a slots=2`, e.g. --hostfile hosts.txt.",
)
@click.option(
    "--engine",
    type=click.Choice(["ray"]),
    help="What places the processes on a cluster instead: ray, e.g. --engine ray -n 8. The cluster is the one that "
    "RAY_ADDRESS names or that runs here; without any, one is started for this run. Needs the ray package.",
)
@click.option(
    "--gpus",
    type=float,
    metavar="G",
    help="With --engine ray: GPUs for each worker, e.g. --gpus 1. Without it: one each if the cluster has enough, "
    "else none.",
)
@click.option(
    "--ssh",
    metavar="COMMAND",
    default="ssh",
    envvar="HORA_SSH",
    help='How hosts are reached, e.g. --ssh "ssh -p 2222 -i key". Without it: ssh; the environment variable HORA_SSH '
    "does the same.",
)
@click.option(
    "--python",
    metavar="PATH",
    help="The Python on the hosts, e.g. --python /opt/venv/bin/python. Without it: the one that runs this.",
)
@click.option(
    "--interface",
    metavar="NAME|NETWORK",
    help="The network between the hosts, e.g. --interface eth1, --interface 10.0.0.0/24. Without it: the one by which "
    "they reach this machine; a line says which.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable for all ranks; may be given again, e.g. --env NCCL_DEBUG=INFO.",
)
@click.option(
    "--forward",
    multiple=True,
    metavar="NAME",
    help="A variable that the hosts get from here, * for any end; may be given again, e.g. --forward 'WANDB_*'. "
    "Without it: PATH, PYTHONPATH, VIRTUAL_ENV, LD_LIBRARY_PATH and what begins with OMP_, MKL_, CUDA_, NCCL_, GLOO_, "
    "TORCH_ or HORA_.",
)
@click.option(
    "--strategy",
    metavar="TEXT",
    help="How ranks come to agree, NAME or NAME:option=value; it beats the script's own. E.g. --strategy ring, "
    "--strategy auto:deterministic=true.",
)
@click.option(
    "--servers",
    type=ServersOption(),
    metavar="S",
    help="Parameter servers besides the ranks, for strategies that use them, e.g. --servers 2; or --servers colocated, "
    "inside the ranks' processes. Without it: a number measured on this machine, and one line that explains it; "
    "where the script itself chooses ps, inside the workers' processes.",
)
@click.option(
    "--join",
    metavar="RUN",
    help="Add N workers (-n, without it: 1) to a run that is going on under ps:mode=async or ps:mode=ssp, e.g. --join "
    "mnist-3. Strategy and servers are the run's own.",
)
@click.option(
    "--serve",
    metavar="[HOST:]PORT",
    help="Answer predictions while training, e.g. --serve 8000, and then curl -d '{\"inputs\": [[1, 2]]}' "
    "127.0.0.1:8000/predict. Without HOST only this machine reaches it; --serve 0.0.0.0:8000 for others; port 0: one "
    "that is free.",
)
@click.option(
    "--serve-from",
    type=click.Choice(["average", "newest"]),
    help="Under local and diloco: the last average of all workers, or the freshest worker's own parameters within the "
    "round, e.g. --serve-from newest. Without it: average.",
)
@click.option(
    "--serve-every",
    metavar="WHEN",
    help="When a worker shows its parameters to the predictor, where no round does: after every step, a number of "
    "steps, or a time, e.g. --serve-every step, --serve-every 10, --serve-every 0.5s. Without it: 1s.",
)
@click.option(
    "--serve-after",
    is_flag=True,
    help="Go on answering after the training, until Ctrl-C, e.g. --serve 8000 --serve-after.",
)
@click.option(
    "--serve-host",
    "serve_hosts",
    multiple=True,
    metavar="NAME",
    help="A name by which the predictor may be asked, besides its address; may be given again, e.g. --serve-host "
    "gpu1.example.org.",
)
@click.option(
    "--serve-batch",
    metavar="ROWS,MS",
    help="Requests are answered together, so many rows at most, and the first waits so many milliseconds for others, "
    "e.g. --serve-batch 256,5. Without it: 64,2.",
)
@click.option(
    "--max-steps",
    type=PositiveInt(),
    metavar="N",
    help="All workers leave their loops after N steps of the optimizer, e.g. --max-steps 100.",
)
@click.option(
    "--log-dir",
    metavar="DIR",
    help="Also keep each rank's output, byte for byte, in DIR/rank-0.out and DIR/rank-0.err, and a server's in "
    "DIR/server-0.out and .err, the predictor's in DIR/predictor.out and .err, e.g. --log-dir logs.",
)
@click.option(
    "--timeout-s",
    type=float,
    metavar="SECONDS",
    help="How long a rank waits for another that is alive but slow, before it fails, e.g. --timeout-s 600.",
)
@click.option(
    "--bind",
    default="127.0.0.1",
    metavar="ADDR",
    help="The address on which the run's coordinator listens, e.g. --bind 10.0.0.5. Without it: 127.0.0.1, which "
    "nobody outside this machine reaches.",
)
@click.option(
    "--name", metavar="RUN", help="The run's name, e.g. --name mnist-3. Without it: date, time and a random end."
)
@click.option(
    "--run-dir",
    metavar="DIR",
    help="Where the run's record goes, e.g. --run-dir runs/mnist-3; with --join, where the joined run's record is. "
    "Without it: ~/.local/state/hora/runs/NAME.",
)
@click.option(
    "--progress",
    type=click.Choice(["auto", "plain", "off"]),
    default="auto",
    help="What the terminal shows of the training: plain lines of what job.log was given, or off, e.g. --progress "
    "plain. Without it: auto, a live panel on a terminal and plain lines elsewhere.",
)
@click.option(
    "--dashboard",
    type=DashboardOption(),
    metavar="PORT|off",
    envvar="HORA_DASHBOARD",
    help="Where the run's page is found by a browser on this machine, e.g. --dashboard 9000, --dashboard off. If the "
    "port is taken, the next free one. Without it: 8320 or the next; the environment variable HORA_DASHBOARD does "
    "the same.",
)
@click.option(
    "--trace",
    "trace_path",
    metavar="FILE",
    help="A timeline of all ranks for ui.perfetto.dev: forward, backward, each bucket's journey, waiting, the servers' "
    "updates, e.g. --trace run.json, --trace run.json.gz; hora trace FILE --summary tells it in words.",
)
@click.option(
    "--tensorboard",
    metavar="DIR",
    help="Also write what job.log is given as TensorBoard's event files, e.g. --tensorboard tb. Needs the tensorboard "
    "package.",
)
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Colour the ranks' prefixes, e.g. --color never. Without it: auto, on a terminal unless NO_COLOR is set.",
)
@click.option(
    "--no-fork",
    is_flag=True,
    help="Start every rank as a new interpreter that imports torch by itself, e.g. --no-fork. Without it: one process "
    "per host imports torch once and ranks are forked from it; --python starts interpreters too.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as for python -m, e.g. -m package.train.")
@click.argument("command", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    size: int | None,
    hosts: str | None,
    hostfile: str | None,
    engine: str | None,
    gpus: float | None,
    ssh: str,
    python: str | None,
    interface: str | None,
    env: tuple[str, ...],
    forward: tuple[str, ...],
    strategy: str | None,
    servers: int | str | None,
    join: str | None,
    serve: str | None,
    serve_from: str | None,
    serve_every: str | None,
    serve_after: bool,
    serve_hosts: tuple[str, ...],
    serve_batch: str | None,
    max_steps: int | None,
    log_dir: str | None,
    timeout_s: float | None,
    bind: str,
    name: str | None,
    run_dir: str | None,
    progress: str,
    dashboard: int | str | None,
    trace_path: str | None,
    tensorboard: str | None,
    color: str,
    no_fork: bool,
    module: bool,
    command: tuple[str, ...],
) -> int:
    from hora.strategies import parse

    from ..launch import joining, local
    from ..launch.config import RunConfig

    try:
        machines, size = _machines(hosts, hostfile, size)
        config = RunConfig(
            command=command,
            module=module,
            size=size,
            servers=servers,
            join=join,
            serve=_serving(
                serve,
                command,
                module,
                hosts=serve_hosts,
                batch=serve_batch,
                source=serve_from,
                every=serve_every,
                after=serve_after,
            ),
            strategy=parse(strategy) if strategy is not None else None,
            timeout_s=timeout_s,
            max_steps=max_steps,
            bind=bind,
            name=name,
            run_dir=run_dir,
            log_dir=log_dir,
            color=color,
            progress=progress,
            dashboard=dashboard,
            trace=trace_path,
            tensorboard=tensorboard,
            hosts=machines,
            engine=engine,
            gpus=gpus,
            ssh=ssh,
            python=python,
            fork=not no_fork and python is None,
            interface=interface,
            env=tuple(_variable(each) for each in env),
            forward=forward,
        )
        if misplaced := _misplaced(ctx, command):
            click.echo(f"hora: {misplaced}", err=True)
        if machines or engine is not None:
            from ..launch.hosts import multi_host, ray

            return multi_host.run(config, ray.by_ray if engine is not None else multi_host.by_ssh)
        return local.run(config) if join is None else joining.join(config)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None


def _machines(hosts: str | None, hostfile: str | None, size: int | None) -> tuple[tuple[HostSpec, ...], int]:
    """The other machines, with their slots, and how many ranks there are. ValueError says what is wrong."""
    from ..launch.hosts import host

    if hosts is None and hostfile is None:
        return (), 1 if size is None else size
    if hosts is not None and hostfile is not None:
        raise ValueError("--hosts and --hostfile name the same thing; leave one of them out")
    return host.deal(host.parse(hosts) if hosts is not None else host.read_file(str(hostfile)), size)


def _misplaced(ctx: click.Context, command: tuple[str, ...]) -> str:
    """What to say of an option of ours that stands behind the script, where it is the script's; nothing if none does.
    Where the same was given before the script too, both are meant."""
    ours = {name: param for param in ctx.command.params for name in param.opts if name.startswith("-") and name != "-m"}
    for number, word in enumerate(command[1:], 1):
        name = word.partition("=")[0]
        if name in ours and ctx.get_parameter_source(str(ours[name].name)) is click.core.ParameterSource.DEFAULT:
            takes_value = "=" not in word and number + 1 < len(command) and not getattr(ours[name], "is_flag", False)
            given = f"{word} {command[number + 1]}" if takes_value else word
            return (
                f"{given} stands behind {command[0]}, so the script gets it; for hora run it comes first: "
                f"hora run {given} {command[0]}"
            )
    return ""


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--env takes NAME=VALUE, not {text!r}; to pass one on from here: --forward {text}")
    return name, value


def _serving(
    address: str | None,
    command: tuple[str, ...],
    module: bool,
    *,
    hosts: tuple[str, ...] = (),
    batch: str | None = None,
    source: str | None = None,
    every: str | None = None,
    after: bool = False,
    checkpoint: str = "",
) -> ServeConfig | None:
    """What the flags say of a predictor; None if there is none. ValueError for a flag that would do nothing."""
    from hora.http.listening import parse_address
    from hora.http.serve_config import ServeConfig, parse_batch

    given = {"from": source, "every": every, "after": after, "host": hosts, "batch": batch}
    if address is None:
        for flag, value in given.items():
            if value:
                raise ValueError(f"--serve-{flag} does nothing without --serve; e.g. --serve 8000")
        return None
    host, port = parse_address(address, "--port" if checkpoint else "--serve")
    rows, wait_ms = parse_batch(batch) if batch is not None else (ServeConfig.max_batch, ServeConfig.max_wait_ms)
    what = command[0] if command else "model"
    return ServeConfig(
        host=host,
        port=port,
        hosts=hosts,
        every=every or ServeConfig.every,
        source=source or ServeConfig.source,
        after=after,
        max_batch=rows,
        max_wait_ms=wait_ms,
        name=what.rpartition(".")[2] if module else pathlib.PurePath(what).stem,
        checkpoint=checkpoint,
    )


_SERVE_HELP = """Answer predictions over HTTP with a saved model.

\b
  hora serve checkpoints train.py
  hora serve --port 0.0.0.0:8000 checkpoints/step-400 train.py --width 256

CHECKPOINT is where job.save wrote, of which the newest valid one is taken, or one step-N inside. SCRIPT is the script
that saved it, with the same arguments: it runs as far as job.prepare(model, optimizer), and what it gave there answers.
Ctrl-C ends it, with exit code 0.
"""


@hora.command(
    "serve", help=_SERVE_HELP, context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS]"
)
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option(
    "--port",
    "address",
    metavar="[HOST:]PORT",
    default="8000",
    help="Where to listen, e.g. --port 9000, --port 0.0.0.0:8000; port 0: one that is free. Without it: 8000, "
    "for this machine only.",
)
@click.option(
    "--serve-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name by which it may be asked, besides its address; may be given again, e.g. --serve-host "
    "gpu1.example.org.",
)
@click.option(
    "--serve-batch",
    "batch",
    metavar="ROWS,MS",
    help="Rows of a batch at most, and how many milliseconds the first waits for others, e.g. --serve-batch 256,5. "
    "Without it: 64,2.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as for python -m, e.g. -m package.train.")
@click.argument("command", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def serve_checkpoint(
    ctx: click.Context,
    checkpoint: str,
    address: str,
    hosts: tuple[str, ...],
    batch: str | None,
    module: bool,
    command: tuple[str, ...],
) -> int:
    from . import serve_checkpoint

    try:
        serving = _serving(address, command, module, hosts=hosts, batch=batch, checkpoint=checkpoint)
        assert serving is not None
        serve_checkpoint.serve(serving, command, module)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None


@hora.command()
@click.argument("what", metavar="NAME", type=click.Choice(["ring", "tree", "halving", "star", "reduce", "async"]))
@click.option(
    "-n", "size", type=PositiveInt(), help="How many ranks, e.g. -n 5. Without it: 5; for async, of 2 to 4 workers, 2."
)
def explain(what: str, size: int | None) -> int:
    """Print an algorithm, step by step: who sends which chunk to whom and the sums in every chunk, or who computes on
    which version.

    NAME is ring, tree, halving, star, reduce (serial against tree), or async (the race of workers for a parameter
    server, with the versions, the lags, and what bounds them).

    \b
      hora explain ring -n 5
      hora explain async
    """
    from hora.explain import ASYNC
    from hora.explain import explain as explanation

    try:
        click.echo(explanation(what, (2 if what == ASYNC else 5) if size is None else size))
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    return exit_codes.OK


hora.add_command(bench)


@hora.command()
def demo() -> int:
    """Train handwritten digits with one worker and with several, under every strategy, and compare.

    \b
      hora demo
    """
    from hora.cli.demo import main as show

    return show()


hora.add_command(runs)
hora.add_command(show)
hora.add_command(compare)
hora.add_command(dashboard)
hora.add_command(trace)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (ours by default) and returns its exit code. Bad usage is one line on stderr and code 2."""
    try:
        result = hora.main(
            args=list(arguments) if arguments is not None else None, prog_name="hora", standalone_mode=False
        )
    except click.UsageError as error:
        _complain(error)
        return exit_codes.USAGE
    except click.ClickException as error:
        click.echo(f"hora: {error.format_message()}", err=True)
        return exit_codes.SCRIPT_FAILED
    except (click.Abort, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    return result if isinstance(result, int) else exit_codes.OK


def _complain(error: click.UsageError) -> None:
    """What is wrong, and what exists, in one line."""
    where = error.ctx.command_path if error.ctx else "hora"
    message = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        options = [name for param in error.ctx.command.params for name in param.opts if name.startswith("-")]
        near = difflib.get_close_matches(error.option_name, options, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]}? " if near else ""
        message = f"no such option {error.option_name}; {hint}there are: {', '.join([*options, '--help'])}"
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        message = f"{error.param.metavar} is missing; see {where} --help"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        ours = isinstance(error.param.type, (PositiveInt, ByteSizes, DashboardOption))
        what = error.param.metavar if isinstance(error.param, click.Argument) else error.param.opts[0]
        message = error.message.rstrip(".") if ours else f"{what}: {error.message.rstrip('.')}"
    elif error.ctx is not None and isinstance(error.ctx.command, click.Group):
        wrong, _, _ = message.partition(". ")
        message = f"{wrong[0].lower()}{wrong[1:]}; there are: {', '.join(error.ctx.command.list_commands(error.ctx))}"
    else:
        message = f"{message[0].lower()}{message[1:]}"
    click.echo(f"{where}: {' '.join(message.split())}", err=True)


if __name__ == "__main__":
    sys.exit(main())
