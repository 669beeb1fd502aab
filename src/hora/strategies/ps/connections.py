"""Outpost: all that joins a worker with the servers; its own server too, where these live in the workers' processes."""

from __future__ import annotations

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
    """`roster` is the model with what updates it on the servers. `check` is called while this worker waits for one, and
    may raise. ValueError for a model that cannot be cut into blocks."""

    def __init__(
        self,
        access: RunContext,
        roster: ParameterRegistry,
        rules: Rules,
        block_bytes: int,
        check: Callable[[], None],
        tables: Mapping[int, ServerEmbedding] | None = None,
    ) -> None:
        self._access = access
        self._check = check
        layout = make_layout(roster, access, block_bytes)
        self.flats = FlatParameters(roster, dict(tables or {}), access.num_servers)
        self._colocated: ColocatedServer | None = None
        if access.colocated and not access.joined and access.rank < access.num_servers:
            access.control.put(f"parameters/{access.rank}", b"here")  # the run cannot go on without this process
            self._colocated = ColocatedServer(access, roster, rules, block_bytes)
        dtypes = [p.dtype for p in roster.parameters]
        self.client = ServerClient(access, layout, dtypes, rules, check=self._look, targets=self.flats.target)
        self.client.connect(roster.entries())

    def gather_mates(self, group: Group) -> None:
        """Collective, where all workers step together: those of one host push one gradient to servers elsewhere."""
        self.client.host_aggregation = make_host_aggregation(group, self.client.connections)

    def abort(self, cause: HoraError) -> None:
        """Ends every wait for this worker's mates. Thread-safe."""
        fold = self.client.host_aggregation
        if fold is not None:
            fold.abort(cause)

    def _look(self) -> None:
        """While this worker waits for a server: is there still something to wait for?"""
        self._check()
        if self._colocated is not None:
            self._colocated.check()

    def close(self) -> None:
        self.client.close()

    def linger(self) -> None:
        """After this worker has left: its own server stays until all have."""
        self.client.close()
        if self._colocated is not None:
            self._colocated.close(self._access.timeout_s)
