"""Strategy: how workers come to agree on the parameters, chosen by one word.

A strategy is a frozen dataclass whose fields are its options. Its spelling on the command line is derived from it,
`name:field=value,field=value`, so there is one place where an option is named, typed, checked and explained. What it
does to a model in training is its Sync (sync.py), which it makes when `job.prepare` asks.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ..parameters.registry import ParameterRegistry
    from .common.hooks import TrainingHooks
    from .common.sync import Sync


REGISTERED: dict[str, type[Strategy]] = {}
"""All strategies that were imported so far, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """The base of all strategies. What it says of itself is all that job, launcher and dashboard know of it."""

    name: ClassVar[str]
    unit: ClassVar[str] = "step"  # what workers synchronise after: every step, or a round of steps of their own
    may_use_servers: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            REGISTERED[cls.name] = cls

    @property
    def topology(self) -> str:
        """How the dashboard draws the run: ring, star, tree, halving, shared, engine, ps, rounds; auto is as chosen."""
        return self.name

    @property
    def backend(self) -> str:
        """Of the collectives: gloo, nccl, mpi; auto chooses by device."""
        return "auto"

    @property
    def deterministic(self) -> bool:
        """Whether algorithms are chosen by fixed thresholds, not by measurement."""
        return False

    @property
    def uses_servers(self) -> bool:
        """Whether servers keep the parameters."""
        return self.may_use_servers

    @property
    def synchronous(self) -> bool:
        """Whether workers wait for each other, at every step or in rounds."""
        return True

    def served(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """What updates the parameters that servers keep, out of the user's optimizers; they are not changed."""
        return list(optimizers)

    @property
    def algorithm(self) -> str:
        """What `all_reduce(algorithm="auto")` means in this run."""
        return self.name

    @property
    def elastic(self) -> bool:
        """Whether the run goes on when a worker is lost, and others may join it."""
        return False

    @property
    def leased(self) -> bool:
        """Whether samples are leased to free workers, since workers do not step together; else they are dealt."""
        return False

    def sync(self, registry: ParameterRegistry, hooks: TrainingHooks) -> Sync:
        """The strategy at work on these models and optimizers; not yet bound to a group."""
        raise NotImplementedError  # each family says how

    def spell(self) -> str:
        """The command-line spelling that parses back to this strategy; options at their default are left out."""
        changed = [
            f"{field.name}={_spell_value(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


def parse(text: str, known: dict[str, type[Strategy]]) -> Strategy:
    """Turns `name:field=value,…` into a strategy, or raises ValueError saying what is wrong and what exists."""
    name, _, rest = text.strip().partition(":")
    kind = known.get(name)
    if kind is None:
        raise ValueError(f"unknown strategy {name!r}; {did_you_mean(name, known)}there are: {', '.join(sorted(known))}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    types = typing.get_type_hints(kind)
    options: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if key not in fields:
            there = f"its options are: {', '.join(fields)}" if fields else "it has no options"
            raise ValueError(f"strategy {name!r} has no option {key!r}; {did_you_mean(key, fields)}{there}")
        if not equals:
            raise ValueError(f"strategy {name!r}: option {key!r} needs a value, as in {name}:{key}=…")
        if key in options:
            raise ValueError(f"strategy {name!r}: option {key!r} is given twice")
        options[key] = _parse_value(f"strategy {name!r}: {key}", value, types[key])
    return kind(**options)


def _parse_value(what: str, text: str, wanted: Any) -> object:
    if wanted is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{what} takes true or false, not {text!r}")
        return text.lower() == "true"
    if wanted is str:
        return text
    if isinstance(wanted, types.UnionType):  # an option that may be left out
        wanted = next(kind for kind in typing.get_args(wanted) if kind is not type(None))
    try:
        return wanted(text)
    except ValueError:
        kind = {"int": "a whole number", "float": "a number"}.get(wanted.__name__, wanted.__name__)
        raise ValueError(f"{what} takes {kind}, not {text!r}") from None


def _spell_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
