"""Names of the codecs (`wire=…`), and checks of their options. Imports no torch."""

from __future__ import annotations

NAMES = ("fp32", "fp16", "bf16", "int8", "topk")
FULL = "fp32"
POWERSGD = "powersgd"
ALL_NAMES = (*NAMES, POWERSGD)
TOPK = 0.01

_ALIASES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "top-k": "topk"}


def check_name(name: str, names: tuple[str, ...] = NAMES) -> None:
    """ValueError, with the supported names, for any other."""
    if name not in names:
        meant = _ALIASES.get(name)
        hint = f"; did you mean {meant}?" if meant in names else ""
        raise ValueError(f"wire={name!r} is unknown; there are: {', '.join(names)}{hint}")


def check_share(share: float) -> None:
    if not 0.0 < share <= 1.0:
        raise ValueError(f"topk takes a share of the elements above 0 and up to 1, not {share}")


def check(wire: str, topk: float | None, rank: int | None = None, names: tuple[str, ...] = NAMES) -> None:
    """ValueError for options that are invalid or would have no effect; None is an option that was left out."""
    check_name(wire, names)
    if topk is not None:
        if wire != "topk":
            raise ValueError(f"topk={topk} has an effect only with wire=topk")
        check_share(topk)
    if rank is not None:
        if wire != POWERSGD:
            raise ValueError(f"rank={rank} has an effect only with wire=powersgd")
        if rank < 1:
            raise ValueError(f"rank takes a whole number of at least 1, not {rank}")
