"""ServerConnections: a worker's connections to all servers, and its own server where servers are colocated."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

from ...collectives.group import Group
from ...errors import HoraError
from ...parameters.registry import ParameterRegistry
from ...rendezvous.context import RunContext
from ...server.client import ServerClient
from ...server.embedding import ServerEmbedding
from ...server.host_aggregation import make_host_aggregation
from ...server.layout import make_layout
from ...server.process import ColocatedServer
from ...server.state import Rules
from .flat_parameters import FlatParameters


class ServerConnections:
    """`registry` is the model with what updates it on the servers. `check` is called while this worker waits for one,
    and may raise. ValueError for a model that cannot be cut into blocks."""

    def __init__(
        self,
        context: RunContext,
        registry: ParameterRegistry,
        rules: Rules,
        block_bytes: int,
        check: Callable[[], None],
        tables: Mapping[int, ServerEmbedding] | None = None,
    ) -> None:
        self._context = context
        self._check = check
        self._tables = dict(tables or {})
        layout = make_layout(registry, context, block_bytes)
        self.flat_parameters = FlatParameters(registry, self._tables, context.num_servers)
        self._colocated: ColocatedServer | None = None
        if context.colocated and not context.joined and context.rank < context.num_servers:
            context.control.put(f"parameters/{context.rank}", b"here")  # the run cannot go on without this process
            self._colocated = ColocatedServer(context, registry, rules, block_bytes)
        dtypes = [p.dtype for p in registry.parameters]
        targets = self.flat_parameters.target
        self.client = ServerClient(context, layout, dtypes, rules, check=self._look, targets=targets)
        self.client.connect(registry.entries())

    def watch(
        self, group: Group, doing: Callable[[], str], is_aborted: Callable[[], bool], num_steps: Callable[[], int]
    ) -> contextlib.AbstractContextManager[None]:
        """What to hold during a step, where all workers step together: then workers that wait for each other, one in a
        step and one in a collective call of `group`, are found."""
        if group.deadlocks is None:
            return contextlib.nullcontext()
        self.client.on_slow_wait = group.deadlocks.on_long_wait
        return group.deadlocks.scope("servers", lambda: f"while {doing()}", is_aborted, num_steps)

    def gather_local_ranks(self, group: Group) -> None:
        """Collective, where all workers step together: those of one host push one gradient to remote servers."""
        self.client.host_aggregation = make_host_aggregation(group, self.client.connections)

    def attach_tables(self, on_gradient: Callable[[], None]) -> None:
        """The rows of ServerEmbeddings come from the servers; `on_gradient` is called inside a backward that reaches
        them."""
        for index, table in self._tables.items():
            table.attach(functools.partial(self.client.look_up, index), on_gradient)

    def leave_group(self) -> None:
        """Between two steps. The connections stay: a server knows a worker by its rank in the run, whatever its
        group."""
        for table in self._tables.values():
            table.detach()
        self.client.leave_local_ranks()

    def abort(self, cause: HoraError) -> None:
        """Ends every wait for the other workers of this host. Thread-safe."""
        fold = self.client.host_aggregation
        if fold is not None:
            fold.abort(cause)

    def _look(self) -> None:
        """Called while this worker waits for a server: raises if the wait is in vain."""
        self._check()
        if self._colocated is not None:
            self._colocated.check()

    def stay(self) -> None:
        """After this worker has left the run: its own server stays until all workers have left."""
        self.client.close()
        if self._colocated is not None:
            self._colocated.close(self._context.timeout_s)
