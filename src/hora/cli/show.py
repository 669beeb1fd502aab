"""`hora show`: one run, from its records and run database and, while it is live, from its coordinator."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex

import click
import msgspec

from ..errors import HoraError
from ..monitor.status import RunEvent
from ..runs import exit_codes, run_directory
from ..runs.digest import digest
from ..runs.json_file import jsonable
from ..runs.run_directory import RunRecord
from ..runs.summary import single_worker_speed, steps_taken, summary_lines
from ..terminal.format import event_text, sanitize, size

EVENTS = 10


@click.command()
@click.argument("name", metavar="RUN")
@click.option(
    "--data", is_flag=True,
    help="Show which samples are done, leased or pending, and which worker holds which. E.g. hora show mnist-3 --data.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON. E.g. hora show mnist-3 --json.")
@click.option(
    "--run-dir", "directory", metavar="DIR",
    help="Directory of the run, if it was started with --run-dir. E.g. --run-dir runs/mnist-3.",
)  # fmt: skip
@click.pass_context
def show(ctx: click.Context, name: str, data: bool, as_json: bool, directory: str | None) -> int:
    """Print what is known of a run, live or ended.

    RUN is its name, or the path of its directory.

    \b
      hora show mnist-3
      hora show mnist-3 --data
      hora show runs/mnist-3
    """
    if data and as_json:
        raise click.UsageError("--data has no JSON; give --data or --json", ctx)
    try:
        found = _find(name, directory)
        if as_json:
            click.echo(_json(found))
        elif not data:
            click.echo(_card(found))
        else:
            try:
                click.echo(_data(found))
            except ValueError:
                again = _find(name, directory)
                if not found.live or again.live:
                    raise
                click.echo(_data(again))  # it has ended meanwhile, and its record has the ledger
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None
    return exit_codes.OK


def _find(name: str, directory: str | None) -> RunRecord:
    return run_directory.find(name, directory) if directory else run_directory.look_up(name)


def _json(found: RunRecord) -> str:
    shown = digest(found).as_json()
    events, problem = _events(found)
    shown |= {"events": msgspec.to_builtins(events), "memory": _database(found), "problem": problem or shown["problem"]}
    return json.dumps(jsonable({**shown, "record": {"run": found.config, "end": found.end}}), indent=2)


def _card(found: RunRecord) -> str:
    begun, ended = found.config, found.end or {}
    known = digest(found)
    events, problem = _events(found)
    strategy, members = known.strategy, ""
    if found.live and "joins" not in begun:
        from ..launch.joining import visit

        with contextlib.suppress(HoraError, ValueError), visit(found) as client:
            roll = client.members()
            ranks = {role: [str(each.rank) for each in roll if each.role == role] for role in ("worker", "server")}
            members = "; ".join(
                f"{role}{'s' if len(each) > 1 else ''} {', '.join(each)}" for role, each in ranks.items() if each
            )
            strategy = strategy or client.get("strategy", 0.2).decode()
    database = _database(found)
    if database is not None:
        with contextlib.suppress(OSError):
            database = f"{database} ({size(os.path.getsize(database))})"
    lost = ended.get("lost")
    rows: dict[str, object] = {
        "run": found.name,
        "state": _state(found),
        "cause": ended.get("cause"),
        "lost": "; ".join(map(str, lost)) if isinstance(lost, list) else "",
        "joins": begun.get("joins"),
        "command": shlex.join(known.command),
        "strategy": strategy or "chosen by the script",
        "workers": begun.get("size"),
        "servers": begun.get("servers"),
        "there now": members,
        "started": begun.get("started"),
        "ended": ended.get("ended"),
        "host": f"{begun.get('host')}, pid {begun.get('pid')}, in {begun.get('cwd')}",
        "record": found.path,
        "memory": problem or database,
    }
    lines = [(key, sanitize(value, 4000)) for key, value in rows.items() if value not in (None, "")]
    summary = summary_lines(known.summary, single=single_worker_speed(begun, steps_taken(known.summary)))
    history = [f"{event.at:.1f} s, step {event.step}: {event_text(event)}" for event in events]
    for key, texts in (("summary", summary), ("events", history)):
        lines += zip([key, *[""] * len(texts)], texts, strict=False)
    width = max(len(key) for key, _ in lines)
    return "\n".join(f"{key:<{width}}  {text}" for key, text in lines)


def _events(found: RunRecord) -> tuple[list[RunEvent], str]:
    """The last events of the run; and why there are none, if its database cannot be read."""
    try:
        reader = found.reader()
        return reader.events()[-EVENTS:] if reader is not None else [], ""
    except ValueError as problem:
        return [], str(problem)


def _database(found: RunRecord) -> str | None:
    return found.database_path if found.database_id is not None else None


def _state(found: RunRecord) -> str:
    if found.end is not None:
        code, seconds = found.end.get("code"), found.end.get("seconds")
        return f"{'ended well' if code == 0 else f'failed with exit code {code}'} after {seconds} s"
    if not found.live:
        return "broken off: its launcher was killed"
    try:
        started = datetime.datetime.fromisoformat(str(found.config.get("started")))
    except ValueError:
        return "running"
    return f"running for {(datetime.datetime.now().astimezone() - started).total_seconds():.0f} s"


def _data(found: RunRecord) -> str:
    """The ledger: of a live run from its coordinator, of one that ended from its record."""
    if "joins" in found.config:
        joined = found.config["joins"]
        raise ValueError(f"{found.name!r} has joined run {joined!r}, which keeps the ledger: hora show {joined} --data")
    if not found.live:
        if found.end is None:
            raise ValueError(f"run {found.name!r} was {_state(found)}, so its ledger was not recorded")
        return str(found.end.get("data", ""))
    from ..coordinator.lease_manager import describe
    from ..launch.joining import visit

    try:
        with visit(found) as client:
            return describe(client.lease_views())
    except HoraError as problem:
        raise ValueError(f"run {found.name!r} does not answer: {problem}") from None
