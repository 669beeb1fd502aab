"""Options: what the commands' values may look like, and what is said of those that do not."""

from __future__ import annotations

import re

import click


class PositiveInt(click.ParamType):
    """A whole number of at least 1."""

    name = "N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(str(value))
        except ValueError:
            number = 0
        if number < 1:
            flag = param.opts[0] if param else "it"
            self.fail(f"{flag} takes a whole number of at least 1, not {str(value)!r}; e.g. {flag} 4", param, ctx)
        return number


class ServersOption(click.ParamType):
    """A whole number, or `colocated`; what else is wrong with it, RunConfig says."""

    name = "S"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        try:
            return int(str(value))
        except ValueError:
            return str(value)


class DashboardOption(click.ParamType):
    """A port, or `off`."""

    name = "PORT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value)
        if text == "off":
            return text
        if not text.isdecimal() or int(text) > 65535:
            self.fail(
                f"--dashboard takes a port from 0 to 65535, or off, not {text!r}; e.g. --dashboard 8320", param, ctx
            )
        return int(text)


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
