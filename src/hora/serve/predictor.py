"""Predictor process: finds the parameters of the run (or of a checkpoint) and serves them over HTTP until the end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable

import msgspec
import torch

from .. import checkpoint
from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..errors import HoraError, Timeout
from ..http.guard import own_names
from ..http.listening import listen
from ..http.serve_config import ServeConfig
from ..http.server import catch_signals, run_app
from ..net.fd_passing import FdPassing
from ..parameters.registry import ParameterRegistry
from ..rendezvous.context import RunContext
from ..server.block_memory import BlockMemory
from ..server.embedding import server_embeddings
from ..server.layout import make_layout
from ..strategies.ps.config import PS
from .app import make_app
from .batch import Predict
from .batcher import Batcher
from .publisher import FETCH_S, SnapshotOffer
from .signature import Signature
from .snapshot_buffer import SnapshotBuffer
from .sources import CheckpointSource, ParameterSource, ServerSource, SnapshotSource

log = logging.getLogger(__name__)

WAIT_S = 86400.0  # for rank 0, which may load its data before its model; the end of the run ends this wait too
ANSWER_S = 2.0  # for a value that must be there already


def serve(
    config: ServeConfig, registry: ParameterRegistry, predict: Predict | None, context: RunContext,
    num_publishers: int, servers: PS | None,
) -> None:  # fmt: skip
    """Serve until all workers have left, or with `config.after` until a signal. Ranks below `num_publishers` publish
    snapshots; parameter `servers` are read directly. Mismatch if the workers have built another model."""
    _check_model(registry)
    workers = LiveWorkers(context.control)
    with contextlib.closing(FdPassing(context.token, FETCH_S)) as fd_passing:

        def open_snapshot(rank: int) -> SnapshotBuffer:
            offer = msgspec.msgpack.decode(workers.get(f"snapshot/{rank}"), type=SnapshotOffer)
            if offer.problem:
                raise HoraError(f"rank {rank} publishes no parameters: {offer.problem}")
            try:
                descriptor = fd_passing.fetch(offer.address, offer.key)
            except OSError as problem:
                raise HoraError(f"the snapshot buffer of rank {rank} cannot be opened: {problem}") from None
            return SnapshotBuffer.open(descriptor, registry.parameters, registry.buffers, registry.entries())

        def add_snapshots(source: SnapshotSource) -> None:
            """Of the other ranks; a rank that publishes nothing is skipped."""
            for rank in range(1, num_publishers):
                with contextlib.suppress(HoraError, OSError):
                    source.add(open_snapshot(rank))

        def announce(url: str) -> None:
            with contextlib.suppress(HoraError):
                context.control.put("serving", url.encode())

        snapshot = open_snapshot(0)
        server_source = _server_source(servers, context, fd_passing, registry, snapshot) if servers else None
        source = server_source or SnapshotSource(registry, [snapshot])
        if isinstance(source, SnapshotSource) and num_publishers > 1:
            threading.Thread(target=add_snapshots, args=(source,), name="hora-snapshots", daemon=True).start()
        _serve_http(
            config, registry, source, predict, lambda: _signature(snapshot.signature),
            lambda: workers.is_over(config.after), announce,
        )  # fmt: skip


def serve_checkpoint(config: ServeConfig, registry: ParameterRegistry, predict: Predict | None) -> None:
    """Serve a saved model until a signal. HoraError if there is none, or it is of another model."""
    _check_model(registry)
    found = checkpoint.find(config.checkpoint)
    signature = _signature(str(found.record.get("signature", "")).encode())
    _serve_http(config, registry, CheckpointSource(registry, found), predict, lambda: signature)


def _check_model(registry: ParameterRegistry) -> None:
    if server_embeddings(registry.models):
        raise ValueError("a model with a ServerEmbedding cannot be served: only the servers have its rows")
    torch.set_num_threads(1)  # the other cores are for the workers


def _serve_http(
    config: ServeConfig,
    registry: ParameterRegistry,
    source: ParameterSource,
    predict: Predict | None,
    signature: Callable[[], Signature | None],
    is_over: Callable[[], bool] = lambda: False,
    announce: Callable[[str], None] = lambda url: None,
) -> None:
    """Blocks until `is_over()` or a signal; closes `source`."""
    batcher = Batcher(
        registry.models, source, predict=predict, signature=signature, max_batch=config.max_batch,
        max_wait_ms=config.max_wait_ms,
    )  # fmt: skip
    try:
        app = make_app(batcher, name=config.name, allowed_hosts=[*own_names(config.host), *config.hosts])
        listener = listen(config.host, config.port)
        with catch_signals() as caught:
            url = dataclasses.replace(config, port=listener.getsockname()[1]).url
            log.warning("serving %r on %s (POST /predict, Open Inference Protocol under /v2)", config.name, url)
            announce(url)
            run_app(app, listener, lambda: bool(caught) or is_over())
    finally:
        batcher.close()
        source.close()


def _signature(encoded: bytes) -> Signature | None:
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(encoded, type=Signature) if encoded else None
    return None


class LiveWorkers:
    """Which workers are still in the run, from the coordinator's events, which arrive on the connection's thread."""

    def __init__(self, control: CoordinatorConnection) -> None:
        self._control = control
        self._joined: set[int] = set()
        self._gone: set[int] = set()
        self._logged = False
        control.subscribe(self._on_event)
        self._joined |= {member.rank for member in control.members() if member.role == "worker"}

    def _on_event(self, event: CoordinatorEvent) -> None:
        if event.member is None or event.member.role != "worker":
            return
        if event.kind == "joined":
            self._joined.add(event.member.rank)
            self._gone.discard(event.member.rank)
        elif event.kind in ("left", "died"):
            self._gone.add(event.member.rank)

    @property
    def all_gone(self) -> bool:
        return self._joined <= self._gone

    def is_over(self, after: bool) -> bool:
        """Whether all workers have left; with `after` never, and the end of training is logged once."""
        if after and self.all_gone and not self._logged:
            self._logged = True
            log.warning("training has ended; still serving, until Ctrl-C")
        return self.all_gone and not after

    def get(self, key: str) -> bytes:
        """A value that a worker has put, or will; blocks. HoraError if all workers leave without it."""
        if self.all_gone:
            with contextlib.suppress(Timeout):
                return self._control.get(key, ANSWER_S)
        self._check()
        return self._control.get(key, WAIT_S, self._check)

    def _check(self) -> None:
        if self.all_gone:
            raise HoraError("all workers have left before they published any parameters")


def _server_source(
    strategy: PS, context: RunContext, fd_passing: FdPassing, registry: ParameterRegistry, snapshot: SnapshotBuffer
) -> ServerSource | None:
    """Reads the servers' own memory; None if the memory of one cannot be mapped here."""
    layout = make_layout(registry, context, strategy.block_bytes)
    memories = []
    for number, part in enumerate(layout.parts):
        *_, address = context.control.get(f"ps/{number}", FETCH_S).decode().split()  # put before rank 0's snapshot
        try:
            if address == "-":
                raise HoraError("its memory is not shared")
            memories.append(BlockMemory(len(part.blocks), part.num_bytes, fd_passing.fetch(address, "parameters")))
            memories[-1].close()
        except (OSError, HoraError) as problem:
            log.warning("cannot read the memory of server %d, serving rank 0's parameters: %s", number, problem)
            return None
    return ServerSource(registry, layout, memories, snapshot, sync=strategy.mode == "sync")
