"""Transports by name. A new transport is one new file in this folder, or a module of another distribution that the
entry-point group `hora.transports` names:

    class CarrierTransport(Transport):
        kind = "carrier"                                 # its name for `Group.new_group(ranks, "carrier")`
        send_transfer, recv_transfer = _Send, _Recv      # Transfer classes: how a message advances without blocking

        @classmethod
        def open(cls, context, spec, option=""):         # collective; context has settings and exchanges addresses
            return cls(spec, context.resource("carrier", CarrierPort.open))

        def _idle(self, transfer, rounds): ...           # sleeps until something may move

With `auto_order` it takes part in the choice of "auto", where it is `usable`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil

from .base import GroupSpec, Transport
from .context import TransportContext

ENTRY_POINTS = "hora.transports"


@functools.cache
def _import_all() -> None:
    package = importlib.import_module(__name__.rpartition(".")[0])
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def find(kind: str) -> type[Transport]:
    """The transport `kind`, which may have an option behind a colon; ValueError names those that exist."""
    _import_all()
    name, known = kind.partition(":")[0], Transport.REGISTERED
    if name not in known:
        for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
            point.load()
    if name not in known:
        raise ValueError(f"unknown transport {kind!r}; there are: {', '.join(('auto', *sorted(known)))}")
    return known[name]


def candidates(context: TransportContext, spec: GroupSpec, kind: str) -> list[str]:
    """The kinds to try in this order, until one gets the memory it needs; for "auto" those that are usable here."""
    if kind != "auto":
        return [kind]
    _import_all()
    known = [cls for cls in Transport.REGISTERED.values() if cls.auto_order is not None]
    return [cls.kind for cls in sorted(known, key=lambda cls: cls.auto_order or 0) if cls.usable(context, spec)]


def open_transport(context: TransportContext, spec: GroupSpec, kind: str) -> Transport:
    """Collective: a transport of that kind over the ranks of `spec`."""
    found = find(kind)
    if context.run.rate_bytes_per_s is not None and not found.limits_rate:
        raise ValueError(f"a rate limit needs the tcp transport; {kind} does not support it")
    return found.open(context, spec, kind.partition(":")[2])
