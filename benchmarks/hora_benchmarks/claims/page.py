"""The page docs/CLAIMS.md, written from records alone: one row for each, then a section with its figure and table."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from . import catalogue
from .claim import Claim, Table
from .record import Record

HEAD = """# Claims

What textbooks and blogs repeat about distributed training, put to the test under the architectures that each claim is
about. Each command can be run again: `hora claims --list` lists them, `--quick` takes minutes on two cores. A verdict
is computed from the measured rows by its rule, and this page is written from the records by
`{command}`, never by hand. Where a rule or a setting was changed after results
had been seen, the section says what and why. What a verdict says of two cores and slept compute need not hold on your
machine: run it there. A commit with a + had other changes on top of it.
"""


def write(records: Sequence[Record], folder: pathlib.Path, path: pathlib.Path) -> None:
    """`folder` is where the records were read from; the figures lie beside them."""
    figures = pathlib.Path(os.path.relpath(folder, path.parent))
    path.write_text(text(records, figures, f"hora claims --into {folder} --page {path}"))


def text(records: Sequence[Record], figures: pathlib.Path, command: str) -> str:
    """The whole page. `figures` is where the pictures lie, as seen from the page."""
    full = sorted(records, key=lambda one: (catalogue.names().index(one.claim), one.cores))
    overview = Table(
        headings=("", "claim", "command", "figure", "verdict", "measured"),
        lines=[_cells(catalogue.find(one.claim), one, figures) for one in full],
        note="",
    )
    parts = [HEAD.format(command=command), _markdown(overview) + "\n"]
    for name in dict.fromkeys(one.claim for one in full):
        parts.append(_section(catalogue.find(name), [one for one in full if one.claim == name], figures))
    return "\n".join(parts)


def _cells(claim: Claim, record: Record, figures: pathlib.Path) -> list[str]:
    verdict = claim.judge(record.rows)
    return [
        str(claim.number),
        f"[{claim.says}](#{claim.name})",
        f"`{record.command}`",
        f"[picture]({figures / record.stem}.png)",
        f"**{verdict.word}**{':' if verdict.word != 'only if' else ''} {verdict.text}",
        f"{record.date}, {record.machine.partition(',')[0]}, {record.cores} cores; {claim.table(record.rows).repeats}",
    ]


def _section(claim: Claim, records: Sequence[Record], figures: pathlib.Path) -> str:
    parts = [f"## {claim.name}", f"*{claim.says}*", f"Rule: {claim.rule}", f"The full measurement takes: {claim.needs}"]
    if claim.changed:
        parts.append(f"Changed after results had been seen: {claim.changed}")
    for record in records:
        table, verdict = claim.table(record.rows), claim.judge(record.rows)
        parts += [
            f"**{_sentence(str(verdict))}** {verdict.more}".strip(),
            f"![{claim.name}, {record.cores} cores]({figures / record.stem}.png)",
            _markdown(table),
            f"{_sentence(table.note)} {_sentence(table.repeats)}",
            f"`{record.command}`, {record.date}, commit {record.commit}, {record.seconds / 60:.1f} minutes on "
            f"{record.machine}.",
        ]
    return "\n\n".join(parts) + "\n"


def _markdown(table: Table) -> str:
    lines = [table.headings, ["---"] * len(table.headings), *table.lines]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
