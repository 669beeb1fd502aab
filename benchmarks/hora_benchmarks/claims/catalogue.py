"""All claims. A module of this package without `_` in its name that defines CLAIM is a claim."""

from __future__ import annotations

import importlib
import pkgutil

from hora.errors import did_you_mean

from .claim import Claim


def names() -> list[str]:
    """In the order of the claims' numbers."""
    return [claim.name for claim in sorted(_claims().values(), key=lambda claim: claim.number)]


def find(name: str) -> Claim:
    """Raises ValueError for an unknown name, with the nearest one."""
    found = _claims()
    if name not in found:
        there = names()
        raise ValueError(f"no claim is called {name!r}; {did_you_mean(name, there)}there are: {', '.join(there)}")
    return found[name]


def _claims() -> dict[str, Claim]:
    package = importlib.import_module(__package__)
    modules = [each.name for each in pkgutil.iter_modules(package.__path__) if "_" not in each.name]
    found = [importlib.import_module(f".{name}", __package__) for name in modules]
    return {module.CLAIM.name: module.CLAIM for module in found if hasattr(module, "CLAIM")}
