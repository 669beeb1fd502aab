"""UnservedState: rank 0's state that no server updates, kept by server 0 for workers that leave a loop later or join
the run.

It holds buffers, parameters that no optimizer has, and what the user's loop has made of schedulers and
hyper-parameters."""

from __future__ import annotations

import msgspec
import torch

from ...parameters.registry import ParameterRegistry
from ...server.client import ServerClient
from ...server.store import pack, unpack
from ..common.hooks import TrainingHooks

TENSORS = "standing"
LOOP = "orders"


class UnservedState:
    def __init__(self, registry: ParameterRegistry, client: ServerClient, hooks: TrainingHooks) -> None:
        self._registry = registry
        self._client = client
        self._hooks = hooks

    def start(self, rank: int, joined: bool, elastic: bool) -> None:
        """Rank 0 publishes what it begins with; a worker that joins the run takes it."""
        if joined:
            self.load()
            if elastic:
                self.load_loop()
        elif rank == 0:
            self._publish_all(elastic)

    def share(self, rank: int, elastic: bool) -> None:
        """A worker that leaves its loop after rank 0 takes rank 0's tensors; one that leaves before keeps its own."""
        if rank:
            self.load(self._hooks.loop)
        else:
            self._publish_all(elastic)

    def _publish_all(self, elastic: bool) -> None:
        self.publish()
        if elastic:
            self.publish_loop()

    def publish(self) -> None:
        """Rank 0's tensors, with the loop they are of."""
        tensors = {name: tensor.detach().cpu() for name, tensor in self._tensors().items()}
        self._client.put_blob(0, TENSORS, pack([{"loop": self._hooks.loop, **tensors}]))

    def load(self, since_loop: int = 0) -> None:
        """Takes rank 0's tensors, unless they are from before `since_loop`."""
        blob = self._client.get_blob(0, TENSORS)
        if not blob:
            return
        theirs, mine = unpack(blob)[0], self._tensors()
        if theirs.pop("loop") < since_loop:
            return
        with torch.no_grad():
            for name, value in theirs.items():
                if name in mine:
                    mine[name].copy_(value)

    def publish_loop(self) -> None:
        """Rank 0's schedulers and hyper-parameters."""
        self._client.put_blob(0, LOOP, msgspec.msgpack.encode(self._hooks.loop_state()))

    def load_loop(self) -> None:
        if state := self._client.get_blob(0, LOOP):
            self._hooks.load_loop_state(msgspec.msgpack.decode(state))

    def _tensors(self) -> dict[str, torch.Tensor]:
        served = {self._registry.names[index] for index in self._client.layout.served}
        idle = {name: p for name, p in self._registry.parameter_dict().items() if name not in served}
        return {name: tensor for name, tensor in {**idle, **self._registry.buffer_dict()}.items() if tensor.numel()}
