"""ServerStateArchive: the servers' parameters and optimizer state as a checkpoint holds them, whole and by name."""

from __future__ import annotations

from typing import Any

import torch

from ...parameters import optimizer_state
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import flatten, is_dense
from ...server.client import ServerClient
from ...server.embedding_table import join, split
from ...server.layout import ServerPart
from ...server.store import pack, unpack


class ServerStateArchive:
    """Each server sends all of its blocks at once, so they are of one step of it."""

    def __init__(self, registry: ParameterRegistry, client: ServerClient) -> None:
        self.registry = registry
        self._client = client

    def fetch(self, parameters: dict[str, torch.Tensor]) -> optimizer_state.OptimizerStates:
        """Returns the optimizers' state; the parameters of the same moment go into `parameters`."""
        found: optimizer_state.OptimizerStates = [{} for _ in self.registry.optimizers]
        connections = self._client.connections
        received = [unpack(self._client.get_blob(connection.number, "state")) for connection in connections]
        for connection, theirs in zip(connections, received, strict=True):
            self._assemble(connection.part, theirs, parameters, found)
        self._join_tables(received, found)
        return found

    def _assemble(
        self,
        part: ServerPart,
        received: list[dict[str, Any]],
        parameters: dict[str, torch.Tensor],
        found: optimizer_state.OptimizerStates,
    ) -> None:
        """Puts one server's blocks into their places."""
        values, *states = received
        tables = {chunk.blocks[0].index for chunk in part.chunks if chunk.table is not None}
        for block in part.blocks:
            if block.index in tables:
                continue
            name, parameter = self.registry.names[block.index], self.registry.parameters[block.index]
            value = values[str(block.number)]
            if is_dense(parameter):
                flatten(parameters[name])[block.start : block.stop].copy_(value.reshape(-1))
            else:
                parameters[name].copy_(value.view(parameter.shape))
            for number, by_block in enumerate(states):
                if str(block.number) in by_block:
                    whole = found[number].setdefault(name, {})
                    optimizer_state.put(whole, by_block[str(block.number)], parameter, block.start, block.stop)

    def _join_tables(self, received: list[list[dict[str, Any]]], found: optimizer_state.OptimizerStates) -> None:
        """Joins the servers' parts of ServerEmbedding tables."""
        parts: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for connection, (_, *states) in zip(self._client.connections, received, strict=True):
            for chunk in connection.part.chunks:
                if chunk.table is not None:
                    mine = states[chunk.optimizer][str(chunk.blocks[0].number)]
                    parts.setdefault((chunk.optimizer, chunk.table.index), []).append(mine)
        for (optimizer, index), theirs in parts.items():
            found[optimizer][self.registry.names[index]] = join(theirs)

    def put(self, states: optimizer_state.OptimizerStates) -> None:
        """Sends each server its part of these states."""
        for connection in self._client.connections:
            blocks: list[dict[str, Any]] = [{} for _ in states]
            for chunk in connection.part.chunks:
                for block in chunk.blocks:
                    state = states[chunk.optimizer].get(self.registry.names[block.index])
                    if state is not None and chunk.table is not None:
                        mine = split(state, connection.number, len(self._client.connections))
                        blocks[chunk.optimizer][str(block.number)] = mine
                    elif state is not None:
                        parameter = self.registry.parameters[block.index]
                        cut = optimizer_state.cut(state, parameter, block.start, block.stop)
                        blocks[chunk.optimizer][str(block.number)] = cut
            self._client.load_state(connection.number, pack(blocks))
