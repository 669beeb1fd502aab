"""Click helpers of all commands: value types, and a command whose help lists its options under headings."""

from __future__ import annotations

import re
from typing import Any

import click


class GroupedOption(click.Option):
    """An option that `hora COMMAND --help` lists under the heading `group`."""

    def __init__(self, flags: list[str], *, group: str, **more: Any) -> None:
        super().__init__(flags, **more)
        self.group = group


class GroupedCommand(click.Command):
    """A command that ends at its first argument (the rest belongs to the script) and groups its options."""

    allow_interspersed_args = False

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(param, "group", "Other"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class PositiveInt(click.ParamType):
    """A whole number of at least 1."""

    name = "N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if not text.isdecimal() or int(text) < 1:
            flag = param.opts[0] if param else "it"
            self.fail(f"{flag} takes a whole number of at least 1, not {str(value)!r}; e.g. {flag} 4", param, ctx)
        return int(text)


class IntOrText(click.ParamType):
    """A whole number, or a word; RunConfig checks which."""

    name = "N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        try:
            return int(str(value))
        except ValueError:
            return str(value)


class ByteSizes(click.ParamType):
    """Sizes in bytes as 4K,64K,1M: K, M and G count in steps of 1024."""

    name = "SIZES"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        sizes = []
        for part in str(value).split(","):
            match = re.fullmatch(r"(\d+)([KMG]?)B?", part.strip().upper())
            if match is None or int(match[1]) == 0:
                self.fail(f"--sizes takes sizes as 4K,64K,1M, not {part.strip()!r}", param, ctx)
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
        return sizes
