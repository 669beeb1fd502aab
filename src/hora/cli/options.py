"""Click helpers of all commands: value types, and a command whose help lists its options under headings."""

from __future__ import annotations

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
    message_names_option = True

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
