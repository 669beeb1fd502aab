"""`hora serve`: a predictor of a checkpoint, without a run; and the --serve options of `hora run`."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath
from typing import Any, NoReturn

import click

from ..http.listening import parse_address
from ..http.serve_config import ServeConfig, parse_batch
from ..launch.config import SERVING, RunConfig
from ..rendezvous.environment import NAMES
from .options import GroupedCommand, GroupedOption

_HELP = """Answer predictions over HTTP with a saved model.

\b
  hora serve checkpoints train.py
  hora serve --port 0.0.0.0:8000 checkpoints/step-400 train.py --width 256

CHECKPOINT is the directory that job.save wrote to (its newest valid checkpoint is loaded), or one step-N inside it.
SCRIPT is the script that saved it, with the same arguments: it runs as far as job.prepare(model, optimizer), and that
model answers. Ctrl-C stops it, with exit code 0.
"""

_HOST = GroupedOption(
    ["--serve-host", "serve_hosts"], group=SERVING, multiple=True, metavar="NAME",
    help="Host name that requests may use besides the address; repeatable. E.g. --serve-host gpu1.example.org.",
)  # fmt: skip
_BATCH = GroupedOption(
    ["--serve-batch"], group=SERVING, metavar="ROWS,MS",
    help="Requests are batched: the largest number of rows, and how many milliseconds the first request waits for "
    "others. E.g. --serve-batch 256,5. Default: 64,2.",
)  # fmt: skip
SERVE_OPTIONS = (
    GroupedOption(
        ["--serve-from", "serve_source"], group=SERVING, type=click.Choice(["average", "newest"]),
        help="Under local and diloco: serve the last average of all workers, or the newest parameters of any worker "
        "within the round. E.g. --serve-from newest. Default: average.",
    ),
    GroupedOption(
        ["--serve-every"], group=SERVING, metavar="WHEN",
        help="How often a worker publishes its parameters to the predictor, under strategies without rounds: step, a "
        "number of steps, or seconds. E.g. --serve-every step, --serve-every 10, --serve-every 0.5s. Default: 1s.",
    ),
    GroupedOption(
        ["--serve-after"], group=SERVING, is_flag=True,
        help="Continue to answer after training, until Ctrl-C. E.g. --serve 8000 --serve-after.",
    ),
    _HOST,
    _BATCH,
)  # fmt: skip
"""Of `hora run`, besides --serve. Each is named after the field of ServeConfig that it sets, but for serve_batch."""


def serve_config(
    address: str | None, command: tuple[str, ...], module: bool, *, checkpoint: str = "", **given: Any
) -> ServeConfig | None:
    """ServeConfig of the --serve options; None without an address. Raises ValueError for an option without effect."""
    if address is None:
        for name in given:
            flag = {"source": "from", "hosts": "host"}.get(name, name)
            raise ValueError(f"--serve-{flag} does nothing without --serve; e.g. --serve 8000")
        return None
    host, port = parse_address(address, "--port" if checkpoint else "--serve")
    if "batch" in given:
        given["max_batch"], given["max_wait_ms"] = parse_batch(given.pop("batch"))
    script = command[0] if command else "model"
    name = script.rpartition(".")[2] if module else PurePath(script).stem
    return ServeConfig(host=host, port=port, name=name, checkpoint=checkpoint, **given)


_PORT = GroupedOption(
    ["--port", "address"], group=SERVING, metavar="[HOST:]PORT", default="8000",
    help="Address to listen on; port 0 picks a free one. E.g. --port 9000, --port 0.0.0.0:8000. Default: 8000, for "
    "this machine only.",
)  # fmt: skip


@click.command(cls=GroupedCommand, params=[_PORT, _HOST, _BATCH], help=_HELP)
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as for python -m. E.g. -m package.train.")
@click.argument("command", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def serve(
    ctx: click.Context, checkpoint: str, address: str, module: bool, command: tuple[str, ...], **given: Any
) -> NoReturn:
    options = {name.removeprefix("serve_"): value for name, value in given.items() if value}
    try:
        config = serve_config(address, command, module, checkpoint=checkpoint, **options)
        assert config is not None
        become_predictor(config, command, module)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None


def become_predictor(serving: ServeConfig, command: tuple[str, ...], module: bool) -> NoReturn:
    """Replaces this process by the script, which job.prepare turns into the predictor. Raises ValueError if the
    checkpoint or the port is not available; whether the checkpoint fits the model is checked by the script."""
    config = RunConfig(command=command, module=module, serve=serving)
    folder = Path(serving.checkpoint)
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint {serving.checkpoint!r}: give the directory that job.save wrote to")
    if not any(map(_is_checkpoint, (folder, *folder.iterdir()))):
        raise ValueError(f"there is no checkpoint in {serving.checkpoint!r}: job.save writes step-N directories there")
    serving.check_port()
    env = {key: value for key, value in os.environ.items() if key not in NAMES}
    argv = config.argv()
    os.execve(argv[0], argv, {**env, "HORA_SERVE": serving.to_json(), "PYTHONUNBUFFERED": "1"})


def _is_checkpoint(path: Path) -> bool:
    return re.fullmatch(r"step-\d+", path.name) is not None and (path / "manifest.json").exists()
