"""Host: what a predictor does in `job.prepare`: finds the parameters, listens, and answers until the run is over."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
import torch

from .. import checkpoint
from ..checkpoint.manifest import Damaged
from ..checkpoint.reader import verified
from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..errors import HoraError, Timeout
from ..http.guard import own_names
from ..http.serve_config import ServeConfig
from ..http.server import HttpServer, catch_signals
from ..net.fd_passing import FdPassing
from ..parameters.registry import ParameterRegistry
from ..rendezvous.context import RunContext
from ..server.block_memory import BlockMemory
from ..server.embedding import tables_of
from ..server.host import layout_of
from ..strategies.ps.config import PS
from .app import make_app
from .batcher import Batcher
from .inference_protocol import Signature
from .publisher import FETCH_S, SnapshotOffer
from .snapshot_buffer import SnapshotBuffer
from .source import ParameterSource
from .sources import CheckpointSource, ServerSource, SnapshotSource

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

WAIT_S = 86400.0  # for rank 0, which may prepare its data before its model; a run that ends ends this too
ANSWER_S = 2.0  # for what must be there already

Predict = Callable[[Any, Any], Any]


class ServedRun(NamedTuple):
    """What a predictor knows of its run: `size` workers show parameters; servers have them under `ps`."""

    control: CoordinatorConnection
    token: bytes
    size: int
    ps: tuple[PS, RunContext] | None


def serve(config: ServeConfig, roster: ParameterRegistry, predict: Predict | None, run: ServedRun) -> None:
    """A predictor's whole life: returns when all workers have left, or later, if it is to stay, on a signal.

    Mismatch if it has built another model than the workers."""
    _check(roster)
    crowd = LiveWorkers(run.control)
    passing = FdPassing(run.token, FETCH_S)
    with contextlib.closing(passing):
        showcase = _open(run.control, passing, 0, roster, crowd)
        source: ParameterSource
        servers = _servers(run, passing, roster) if run.ps is not None else None
        if run.ps is not None and servers is not None:
            strategy, access = run.ps
            layout = layout_of(roster, access, strategy.block_bytes)
            source = ServerSource(roster, layout, servers, showcase, together=strategy.mode == "sync")
        else:
            source = shown = SnapshotSource(roster, [showcase])
            if run.size > 1:
                threading.Thread(
                    target=_seek, args=(run, passing, roster, crowd, shown), name="hora-seeker", daemon=True
                ).start()

        def told(url: str) -> None:
            with contextlib.suppress(HoraError):
                run.control.put("serving", url.encode())

        def is_over() -> bool:
            return crowd.is_gone(config.after)

        _answer(config, roster, source, predict, lambda: _signature(showcase.note), is_over, told)


def serve_checkpoint(config: ServeConfig, roster: ParameterRegistry, predict: Predict | None) -> None:
    """The same for a saved model, until a signal. HoraError if it is not there, or of another model."""
    _check(roster)
    found = _find(Path(config.checkpoint))
    source = CheckpointSource(roster, found)
    signature = _signature(str(found.record.get("signature", "")).encode())
    _answer(config, roster, source, predict, lambda: signature, lambda: False, lambda url: None)


def _check(roster: ParameterRegistry) -> None:
    if tables_of(roster.models):
        raise ValueError("a model with a ServerEmbedding cannot be served: its rows are nowhere but with the servers")
    torch.set_num_threads(1)  # the other cores are the workers'


def _answer(
    config: ServeConfig,
    roster: ParameterRegistry,
    source: ParameterSource,
    predict: Predict | None,
    signature: Callable[[], Signature | None],
    is_over: Callable[[], bool],
    told: Callable[[str], None],
) -> None:
    answerer = Batcher(
        roster.models, source, predict=predict, signature=signature, max_batch=config.max_batch,
        max_wait_ms=config.max_wait_ms,
    )  # fmt: skip
    try:
        app = make_app(answerer, name=config.name, allowed_hosts=[*own_names(config.host), *config.hosts])
        server = HttpServer(app, config.host, config.port)
        with catch_signals() as caught:
            url = dataclasses.replace(config, port=server.address[1]).url
            log.warning("serving %r on %s (POST /predict, Open Inference Protocol under /v2)", config.name, url)
            told(url)
            server.run(lambda: bool(caught) or is_over())
    finally:
        answerer.close()
        source.close()


def _signature(words: bytes) -> Signature | None:
    try:
        return msgspec.json.decode(words, type=Signature) if words else None
    except msgspec.MsgspecError:
        return None


class LiveWorkers:
    """The workers that are still there. Whose end it is, the line's own thread hears."""

    def __init__(self, control: CoordinatorConnection) -> None:
        self._here: set[int] = set()
        self._gone: set[int] = set()
        self._said = False
        control.subscribe(self._hear)
        self._here |= {member.rank for member in control.members() if member.role == "worker"}

    def _hear(self, event: CoordinatorEvent) -> None:
        if event.member is None or event.member.role != "worker":
            return
        if event.kind == "joined":
            self._here.add(event.member.rank)
            self._gone.discard(event.member.rank)
        elif event.kind in ("left", "died"):
            self._gone.add(event.member.rank)

    @property
    def is_empty(self) -> bool:
        return self._here <= self._gone

    def is_gone(self, after: bool) -> bool:
        """Whether nobody is left to serve for; who stays after them says so once."""
        if after and self.is_empty and not self._said:
            self._said = True
            log.warning("training has ended; serving goes on until Ctrl-C")
        return self.is_empty and not after

    def ask(self, control: CoordinatorConnection, key: str) -> bytes:
        """What a worker has put, or will; HoraError if all have left without. Who has left may have put it before."""
        if self.is_empty:
            with contextlib.suppress(Timeout):
                return control.get(key, ANSWER_S)
            self._complain()
        return control.get(key, WAIT_S, lambda: self._complain() if self.is_empty else None)

    @staticmethod
    def _complain() -> NoReturn:
        raise HoraError("all workers have left before they showed any parameters")


def _open(
    control: CoordinatorConnection, passing: FdPassing, rank: int, roster: ParameterRegistry, crowd: LiveWorkers
) -> SnapshotBuffer:
    offer = msgspec.msgpack.decode(crowd.ask(control, f"showcase/{rank}"), type=SnapshotOffer)
    if offer.problem:
        raise HoraError(f"rank {rank} shows no parameters: {offer.problem}")
    try:
        descriptor = passing.fetch(offer.address, offer.key)
    except OSError as problem:
        raise HoraError(f"what rank {rank} shows cannot be reached: {problem}") from None
    return SnapshotBuffer.open(descriptor, roster.parameters, roster.buffers, roster.entries())


def _seek(
    run: ServedRun, passing: FdPassing, roster: ParameterRegistry, crowd: LiveWorkers, shown: SnapshotSource
) -> None:
    """What the other workers show; whoever shows nothing is left out."""
    for rank in range(1, run.size):
        with contextlib.suppress(HoraError, OSError):
            shown.add(_open(run.control, passing, rank, roster, crowd))


def _servers(run: ServedRun, passing: FdPassing, roster: ParameterRegistry) -> list[BlockMemory] | None:
    """The servers' own memory; None if one of them has none that can be mapped here."""
    assert run.ps is not None
    strategy, access = run.ps
    layout = layout_of(roster, access, strategy.block_bytes)
    memories = []
    for number, part in enumerate(layout.parts):
        *_, address = run.control.get(f"ps/{number}", FETCH_S).decode().split()  # rank 0 has found it too
        try:
            if address == "-":
                raise HoraError("its memory is not shared")
            descriptor = passing.fetch(address, "parameters")
            memories.append(BlockMemory(len(part.blocks), part.num_bytes, descriptor))
            memories[-1].close()
        except (OSError, HoraError) as problem:
            log.warning("server %d cannot be read, so rank 0's parameters are served: %s", number, problem)
            return None
    return memories


def _find(path: Path) -> checkpoint.Checkpoint:
    """The newest valid one in a directory, or the one that this directory is."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    if match is not None and os.path.exists(path / "manifest.json"):
        try:
            return verified(path, int(match[1]))
        except Damaged as damage:
            raise HoraError(f"{path} is damaged: {damage}") from None
    found = checkpoint.newest(path)
    if found is None:
        raise HoraError(f"there is no checkpoint in {path}")
    return found
