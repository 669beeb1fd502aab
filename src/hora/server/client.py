"""Client: a worker's end of the lines to all servers. One step pushes every parcel and pulls it again.

Parcels go out in the order of the model, what the next forward needs first, and each is read as soon as its server says
so, while later ones are still on their way. On one host a gradient is copied once, into memory that the server reads in
place, and a block is copied once, out of memory that the server writes; a block's word proves that it was whole. Over a
network gradients may be encoded (`Wire`), and workers of one host may send one for all of them (`Fold`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import select
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..errors import HoraError, Mismatch, OutOfMemory, PeerLost, Timeout
from ..monitor import spans
from ..monitor.spans import COMMUNICATION, TRAINING
from ..net.fd_passing import FdPassing
from ..net.handshake import connect
from ..net.message_socket import ConnectionClosed, MessageSocket
from ..net.tensor_bytes import tensor_bytes
from ..transport.base import NOTICE_S, SLICE_S, SLOW_S
from ..transport.tcp import tune
from . import messages
from .block_memory import BlockMemory
from .connection import ServerConnection
from .host_aggregation import HostAggregation
from .layout import BlockLayout, Chunk, ParameterBlock
from .loop import PURPOSE, near_address
from .messages import (
    Ack,
    BeginStep,
    BlobReply,
    ChunkReady,
    DropStep,
    EnterLoop,
    ExtraConnection,
    FillParameters,
    GetBlob,
    LeaveLoop,
    LoadState,
    Lookup,
    Pull,
    Push,
    PutBlob,
    Refused,
    RowsReply,
    ServerError,
    ServerMessage,
    SynchronizedAck,
    Welcome,
    WorkerBye,
    WorkerHello,
)
from .push_codec import PushCodec
from .rows import num_bytes, to_bytes
from .state import Rules

log = logging.getLogger(__name__)

NUM_EXTRA = 1  # further connections to a server on another host, for tensors
MAX_ROWS = 1 << 20  # of a table that a batch may touch: their numbers fit into a message with room to spare
BLINK_NS = 20_000  # a shorter wait is none
CAUSE_S = 0.5  # a broken line waits this long for word of why

Check = Callable[[], None]


class ServerClient:
    """One worker's lines. Everything is called on its training thread; `check` is called while it waits, and may raise.

    `targets(block)` gives the memory, as a vector, into which a block's parameters are read.
    """

    def __init__(
        self,
        *,
        rank: int,
        name: str,
        layout: BlockLayout,
        dtypes: Sequence[torch.dtype],
        control: CoordinatorConnection,
        token: bytes,
        timeout_s: float,
        check: Check,
        targets: Callable[[ParameterBlock], torch.Tensor],
        rules: Rules,
        shared: bool = True,
        colocated: bool = False,
    ) -> None:
        self._colocated = colocated  # the servers are in the first workers' processes
        self.rank = rank
        self.name = name
        self.layout = layout
        self.links = [ServerConnection(number, part, dtypes) for number, part in enumerate(layout.parts)]
        for link in self.links:
            link.wire = PushCodec(rules.wire, rules.codec, link.part, dtypes)
        self.check = check
        self.notice: Callable[[], None] = lambda: None  # a wait has lasted for NOTICE_S
        self.pushed_bytes = 0  # of gradients, sent or laid out for a server to read
        self.plain_bytes = 0  # what these would be if none were encoded
        self.fold: HostAggregation | None = None
        self._rules = rules
        self._spreading: list[tuple[ServerConnection, Chunk]] = []  # what the mates are to get of the step under way
        self.lags: list[int] = []
        self._sent_at = 0  # when the last push was done, for the trace
        self._targets = targets
        self._control = control
        self._token = token
        self._timeout_s = timeout_s
        self._ended: dict[int, str] = {}
        self._poller = select.poll()
        self._by_descriptor: dict[int, tuple[ServerConnection, MessageSocket]] = {}
        self._num_pulls = 0
        self._deferring = False
        self._deferred: list[
            tuple[ServerConnection, ChunkReady]
        ] = []  # what may be read, and is not before it is wanted
        self._passing: FdPassing | None = None
        if shared:
            with contextlib.suppress(OSError):
                self._passing = FdPassing(token, timeout_s)
        self._order: dict[int, list[tuple[ServerConnection, Chunk]]] = {}
        for optimizer in {parcel.optimizer for part in layout.parts for parcel in part.parcels}:
            those = [(link, p) for link in self.links for p in link.part.parcels if p.optimizer == optimizer]
            self._order[optimizer] = sorted(those, key=lambda pair: (pair[1].blocks[0].index, pair[1].blocks[0].start))
        self._tables: dict[int, list[Chunk]] = {}  # by parameter, in the order of the servers
        for link in self.links:
            for parcel in link.part.parcels:
                if parcel.table is not None:
                    self._tables.setdefault(parcel.table.index, []).append(parcel)
        self._num_lookups = 0
        control.subscribe(self._hear)
        if not colocated:  # one may have ended before we listened
            there = {member.rank for member in control.members() if member.role == "server"}
            for link in self.links:
                if link.number not in there:
                    self._ended.setdefault(link.number, f"server {link.number}: it ended before it served")

    # -- connecting ----------------------------------------------------------------------------------------------------

    def connect(self, entries: list[list[Any]]) -> None:
        """Meets all servers; Mismatch if one has built another model."""
        for link in self.links:
            look = functools.partial(self._check_alive, link)
            address = self._control.get(f"ps/{link.number}", self._timeout_s, look).decode()
            host, port, passing = address.split()
            self._meet(link, (host, int(port)), "" if passing == "-" else passing, entries)

    def _meet(self, link: ServerConnection, address: tuple[str, int], passing: str, entries: list[list[Any]]) -> None:
        num_blocks, num_bytes = len(link.part.blocks), link.part.num_bytes
        key = ""
        if passing and self._passing is not None and self._reaches(passing):
            try:
                link.gradients = BlockMemory.shared(num_blocks, num_bytes)
            except OutOfMemory as problem:
                log.warning("rank %d: no shared memory for gradients, so they travel over TCP: %s", self.rank, problem)
            else:
                assert link.gradients.descriptor is not None
                key = f"gradients-{secrets.token_hex(4)}"
                self._passing.offer(key, link.gradients.descriptor)
                link.shared = True
        if not link.shared:
            link.gradients = BlockMemory(num_blocks, num_bytes)
        self._open(link, address, passing).send(
            WorkerHello(self.rank, self.name, self.layout.fingerprint, entries,
                  self._passing.address if link.shared and self._passing else "", key)
        )  # fmt: skip
        answer = self._answer(link, Welcome, Refused)
        if isinstance(answer, Refused):
            raise Mismatch(answer.reason)
        assert isinstance(answer, Welcome)
        if link.shared:
            assert self._passing is not None
            descriptor = self._passing.fetch(answer.passing, answer.mine or answer.key)
            link.parameters = BlockMemory(num_blocks, num_bytes, descriptor)
            link.parameters.close()
            self._passing.withdraw(key)
            link.gradients.close()
            link.private = bool(answer.mine)
        else:
            link.parameters = BlockMemory(num_blocks, num_bytes)
            link.private = True
            for number in range(NUM_EXTRA):
                self._open(link, address).send(ExtraConnection(self.rank, number))
        link.settle()

    def _reaches(self, passing: str) -> bool:
        assert self._passing is not None
        try:
            self._passing.reach(passing).close()
        except (OSError, HoraError):
            return False
        return True

    def _open(self, link: ServerConnection, address: tuple[str, int], passing: str = "") -> MessageSocket:
        if link.shared:
            assert self._passing is not None
            sock = self._passing.reach(near_address(passing)[1:], self._timeout_s, PURPOSE)
        else:
            sock = connect(address, self._token, PURPOSE, check=self.check)
            tune(sock)
        line = MessageSocket(sock, self._place, messages.encode, messages.decode)
        line.peer = ("server", link.number)
        link.lines.append(line)
        self._by_descriptor[line.fileno()] = (link, line)
        self._poller.register(line.fileno(), select.POLLIN)
        return line

    def _place(self, line: MessageSocket, message: ServerMessage, num_bytes: int) -> memoryview:
        assert line.peer is not None
        link = self.links[line.peer[1]]
        if isinstance(message, ChunkReady) and not link.shared and 0 <= message.parcel < len(link.part.parcels):
            parcel = link.part.parcels[message.parcel]
            if num_bytes <= parcel.num_bytes:
                return tensor_bytes(link.parameters.data[parcel.at : parcel.at + num_bytes])
        if isinstance(message, RowsReply) and message.number in link.rooms:
            room = link.rooms[message.number]
            if num_bytes == room.numel() * room.element_size():
                return tensor_bytes(room)
        if isinstance(message, BlobReply):
            link.blob = bytearray(num_bytes)
            return memoryview(link.blob)
        raise HoraError(f"server {link.number} sent {num_bytes} bytes behind a {type(message).__name__}")

    def _hear(self, event: CoordinatorEvent) -> None:
        if event.member is None or event.kind not in ("died", "left"):
            return
        if event.member.role == "server" or (
            # One that has left well serves on, until nobody needs it.
            self._colocated and event.kind == "died" and event.member.rank < len(self.links)
        ):
            self._ended[event.member.rank] = f"{event.member}: {event.text}"
            if self.fold is not None:  # who waits for a mate does not look at the servers
                self.fold.abort(self._gone(event.member.rank))

    # -- one step ------------------------------------------------------------------------------------------------------

    def push(
        self, begin: BeginStep, gradient: Callable[[ParameterBlock], torch.Tensor | None], defer: bool = False
    ) -> None:
        """Sends a step's gradients to all servers, and reads what is ready meanwhile; with `defer` not before `pull`.

        `gradient(block)` is that block's as a vector, None if it has none, or a sparse tensor of its rows."""
        order = self._order.get(begin.optimizer, [])
        fold = self.fold
        self._spreading = [(link, parcel) for link, parcel in order if fold is not None and fold.carries(link, parcel)]
        started, pushed_bytes = spans.clock() if spans.on else 0, self.pushed_bytes
        self._deferring = defer
        worth = begin.weight * begin.scale if self._rules.mode == "sync" else begin.scale
        with self._breaking_off():
            if fold is not None:
                fold.agree(worth, order, [[gradient(b) is not None for b in p.blocks] if p.whole else ()
                                          for _, p in order])  # fmt: skip
            factors = self._begin(begin, worth)
            self.lags.clear()
            for link, parcel in order:
                self._push(link, parcel, begin.step, gradient, factors[link.number])
                self._turn(0)
        if spans.on:
            self._sent_at = spans.clock()
            for lane in (TRAINING, COMMUNICATION):
                spans.add(lane, "push", started, self._sent_at, step=begin.step, bytes=self.pushed_bytes - pushed_bytes)

    def _begin(self, begin: BeginStep, worth: float) -> list[float]:
        """Tells all servers that a step begins; what multiplies the gradients here already, by server.

        A rounding error counts the same whenever it is fed back: so what a gradient counts goes in before rounding.
        Half precision may hold the mean of the mates' gradients and not their sum: it is their mean that is sent."""
        factors = []
        for link in self.links:
            mine = [parcel for parcel in link.part.parcels if parcel.optimizer == begin.optimizer]
            folds = self.fold if any(link is each for each, _ in self._spreading) else None
            link.outstanding = {p.number for p in mine if folds is None or folds.leads or not p.whole}
            link.readies.clear()
            begin.parcels = len(link.outstanding)
            begin.carrier, begin.factor, factor = -1, None, 1.0
            if link.encodes:
                begin.factor = 1.0 if folds is None else float(folds.size)
                factor = worth / begin.factor
            elif folds is not None:
                begin.factor, factor = folds.total, worth / folds.total if folds.total else 0.0
            if folds is not None and not folds.leads:
                begin.carrier = folds.leader
            self._send(link, begin)
            factors.append(factor)
        return factors

    @contextlib.contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """What ends this worker's step ends its mates' too, with the same words."""
        try:
            yield
        except HoraError as problem:
            if self.fold is not None and type(problem) in (HoraError, PeerLost, Timeout):
                self.fold.break_off(problem)
            raise

    def look_up(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """The rows with these ids, in order and each once, of the table that parameter `index` stands for. Blocks."""
        self._num_lookups += 1
        number, parcels, num_servers = self._num_lookups, self._tables[index], len(self.links)
        asked = []
        for link, parcel in zip(self.links, parcels, strict=True):
            mine = (ids % num_servers == link.number).nonzero().view(-1)
            if len(mine):
                link.rooms[number] = _room(len(mine), parcel)
                self._send(link, Lookup(number, parcel.number, to_bytes(ids[mine] // num_servers)))
                asked.append((link, parcel, mine))
        found = _room(len(ids), parcels[0])
        for link, parcel, mine in asked:
            answer = self._answer(link, RowsReply)
            while isinstance(answer, RowsReply) and answer.number != number:
                link.rooms.pop(answer.number, None)  # of one that was broken off
                answer = self._answer(link, RowsReply)
            assert isinstance(answer, RowsReply)
            found[mine] = link.rooms.pop(number)
            link.base[parcel.blocks[0].number] = answer.version
        return found

    def _push_rows(self, link: ServerConnection, parcel: Chunk, step: int, given: torch.Tensor | None) -> None:
        """The gradient of a table, whose rows travel over the line."""
        base = [link.base[parcel.blocks[0].number]]
        if given is None:
            self._send(link, Push(step, parcel.number, base, [False]))
            return
        assert parcel.table is not None
        self.pushed_bytes += num_bytes([given])
        values = given.values().to(parcel.table.dtype).contiguous()
        self._send(link, Push(step, parcel.number, base, None, [to_bytes(given.indices()[0])]), values)

    def _send(
        self,
        link: ServerConnection,
        message: ServerMessage,
        payload: torch.Tensor | bytes | None = None,
        number: int = 0,
    ) -> None:
        """On one of the lines to this server; PeerLost if it is gone."""
        try:
            link.lines[number].send(message, payload)
        except ConnectionClosed as problem:
            raise self._lost(link, problem) from None

    def _push(
        self,
        link: ServerConnection,
        parcel: Chunk,
        step: int,
        gradient: Callable[[ParameterBlock], torch.Tensor | None],
        factor: float,
    ) -> None:
        if parcel.table is not None:
            self._push_rows(link, parcel, step, gradient(parcel.blocks[0]))
            return
        fold = self.fold if self.fold is not None and self.fold.carries(link, parcel) else None
        have: list[bool] = []
        rows = None
        length = parcel.num_bytes
        blank = fold is not None or link.encodes  # others are added to it, or all of it is encoded
        for block, room in zip(parcel.blocks, link.staged[parcel.number], strict=True):
            given = gradient(block)
            have.append(given is not None)
            if given is None:
                if blank and parcel.whole:
                    room.zero_()
            elif given.is_sparse:
                values = given.values()
                room[: values.numel()].copy_(values.reshape(-1))
                rows = [to_bytes(given.indices()[0])]
                length = values.numel() * room.element_size()
            elif factor != 1.0 and parcel.whole:
                torch.mul(given, factor, out=room) if given.dtype == room.dtype else room.copy_(given).mul_(factor)
            else:
                room.copy_(given)
        place = link.gradients.data[parcel.at : parcel.at + parcel.num_bytes]
        if fold is not None:
            have = [fold.has(link, block) for block in parcel.blocks]
            if any(have):
                fold.gather(parcel, place, link.dtype(parcel))
            if not fold.leads:
                return
        self._send_gradients(link, parcel, step, have, rows, place[:length])

    def _send_gradients(
        self,
        link: ServerConnection,
        parcel: Chunk,
        step: int,
        have: list[bool],
        rows: list[bytes] | None,
        data: torch.Tensor,
    ) -> None:
        """What lies staged, over the line, or where the server reads it."""
        blocks = list(zip(parcel.blocks, link.staged[parcel.number], have, strict=True))
        num_rows_bytes = sum(map(len, rows or ()))
        plain_bytes = len(data) if rows else sum(room.numel() * room.element_size() for _, room, has in blocks if has)
        known = link.base if link.held is None else link.held
        base = [known[block.number] for block in parcel.blocks]
        message = Push(step, parcel.number, base, None if all(have) else have, rows)
        self.plain_bytes += plain_bytes + num_rows_bytes
        if link.shared or not any(have):
            self.pushed_bytes += plain_bytes + num_rows_bytes
            self._send(link, message)
            return
        if link.wire.num_bytes(parcel, link.wire.name) is not None:
            message.wire = link.wire.name
            data = link.encode(parcel, data, [block for block, _, has in blocks if has])
            plain_bytes = len(data)
        self.pushed_bytes += plain_bytes + num_rows_bytes
        self._send(link, message, data, parcel.number % len(link.lines))

    def pull(self) -> list[ChunkReady]:
        """Waits for the rest of the step's parcels and reads them; what the servers said of them."""
        self._deferring = False
        begin = spans.clock() if spans.on else 0
        deferred, self._deferred = self._deferred, []
        for link, ready in deferred:
            self._take(link, ready)
        spreading, self._spreading = self._spreading, []
        with self._breaking_off():
            if self.fold is not None and spreading:
                self._spread(self.fold, spreading)
            self._wait(lambda: not any(link.outstanding for link in self.links))
        if spans.on:
            spans.add(TRAINING, "pull", begin)
            spans.add(COMMUNICATION, "pull", self._sent_at or begin)  # the answer to what was pushed
            self._sent_at = 0
        return [ready for link in self.links for ready in link.readies]

    def _spread(self, fold: HostAggregation, parcels: Sequence[tuple[ServerConnection, Chunk]]) -> None:
        """The leader's parcels to its mates, in the order of the model, which is about that of their arrival."""
        if not fold.leads:  # what others may wait for is on its way before this worker waits for the leader
            self._wait(lambda: not any(line.pending for link in self.links for line in link.lines))
        for link, parcel in parcels:
            if fold.leads:
                self._wait(functools.partial(_is_read, link, parcel))
            fold.spread(parcel, link.parameters.data[parcel.at : parcel.at + parcel.num_bytes])
        numbers = {(link.number, parcel.number) for link, parcel in parcels}
        said = [(link.number, ready) for link in self.links for ready in link.readies
                if (link.number, ready.parcel) in numbers]  # fmt: skip
        for number, ready in fold.tell(said):
            if not fold.leads:
                self._take(self.links[number], ready)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Moves what can be moved until it is `done`; says who is missing, and gives up when that is too long."""
        started = time.monotonic()
        next_word, noticed = SLOW_S, False
        while not done():
            if self._turn(SLICE_S * 1000):
                continue
            self.check()
            if not noticed and time.monotonic() - started >= NOTICE_S:
                noticed = True
                self.notice()
            for link in self.links:
                if link.outstanding and link.number in self._ended:  # a host that vanishes closes no connection
                    raise self._lost(link, "it was reported dead")
            waited = time.monotonic() - started
            if waited >= next_word:
                next_word *= 2
                log.warning("%s has waited %.0f s for %s", self.name, waited, self._whom())
            if waited >= self._timeout_s:
                raise Timeout(f"{self.name} has waited {waited:.0f} s for {self._whom()}; gave up after "
                              f"timeout_s={self._timeout_s:g}")  # fmt: skip

    def hold(self) -> None:
        """What is read from now on is newer than what the next gradients are based on."""
        for link in self.links:
            link.held = list(link.base)

    def refresh(self) -> list[ChunkReady]:
        """All parameters as they are now."""
        self._num_pulls += 1
        self._spreading = []  # of a step that was broken off
        for link in self.links:
            link.outstanding = {parcel.number for parcel in link.part.parcels}
            link.readies.clear()
            link.held = None
            self._send(link, Pull(-self._num_pulls))
        return self.pull()

    def _whom(self) -> str:
        waiting = [link for link in self.links if link.outstanding]
        words = []
        for link in waiting:
            with contextlib.suppress(HoraError):
                words.append(f"server {link.number}, which waits for {self.ask(link.number, 'awaited').decode()}")
        return "; ".join(words) or "the servers"

    def _turn(self, timeout_ms: float) -> bool:
        """Moves what can be moved; whether anything did."""
        busy = [line for link in self.links for line in link.lines if line.pending]
        for line in busy:
            self._poller.modify(line.fileno(), select.POLLIN | select.POLLOUT)
        begin = spans.clock() if spans.on and timeout_ms else 0
        events = self._poller.poll(timeout_ms)
        if begin and (end := spans.clock()) - begin > BLINK_NS:
            spans.add(TRAINING, "waiting", begin, end, what="servers")
        for line in busy:
            self._poller.modify(line.fileno(), select.POLLIN)
        moved = False
        for descriptor, mask in events:
            link, line = self._by_descriptor[descriptor]
            try:
                if mask & select.POLLOUT:
                    line.flush()
                    moved = True
                if mask & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    for message in line.receive():
                        self._take(link, message)
                        moved = True
            except ConnectionClosed as problem:
                raise self._lost(link, problem) from None
        return moved

    def _take(self, link: ServerConnection, message: ServerMessage) -> None:
        if isinstance(message, ChunkReady) and self._deferring:
            self._deferred.append((link, message))
        elif isinstance(message, ChunkReady):
            parcel = link.part.parcels[message.parcel]
            self.lags.append(message.lag)
            link.read(parcel, message, self._targets, self._check_alive)
            link.answered(message.parcel, counts=not message.skipped and not message.dropped)
            link.outstanding.discard(message.parcel)
            link.readies.append(message)
        elif isinstance(message, ServerError):
            raise HoraError(message.reason)
        else:
            link.answers.append(message)

    # -- outside of steps ----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        self._tell(EnterLoop())

    def rest(self) -> None:
        self._tell(LeaveLoop())

    def got(self, step: int) -> None:
        self._tell(SynchronizedAck(step))

    def drop(self, step: int) -> None:
        """The step under way will not take place: no answer to it can come, since one worker never pushed."""
        for link in self.links:
            link.outstanding.clear()
            link.take_back()
            self._send(link, DropStep(step))

    def fill(self, parameter: Callable[[ParameterBlock], torch.Tensor], step: int = 0) -> None:
        """The servers take these parameters over, which are of this step of the job."""
        for link in self.links:
            for parcel in link.part.parcels:
                if parcel.table is not None:
                    continue
                for block, room in zip(parcel.blocks, link.staged[parcel.number], strict=True):
                    room.copy_(parameter(block))
                payload = None if link.shared else link.gradients.data[parcel.at : parcel.at + parcel.num_bytes]
                self._send(link, FillParameters(parcel.number, step), payload)
                self._answer(link, Ack)

    def forget(self) -> None:
        """What encoding has taken from gradients so far is given up."""
        for link in self.links:
            link.forget()

    def load(self, server: int, blob: bytes) -> None:
        """One server takes this optimizer state over."""
        self._send(self.links[server], LoadState(), blob)
        self._answer(self.links[server], Ack)

    def keep(self, server: int, what: str, blob: bytes) -> None:
        self._send(self.links[server], PutBlob(what), blob)
        self._answer(self.links[server], Ack)

    def ask(self, server: int, what: str) -> bytes:
        link = self.links[server]
        link.blob = None
        self._send(link, GetBlob(what))
        self._answer(link, BlobReply)
        return bytes(link.blob or b"")

    def _tell(self, message: ServerMessage) -> None:
        for link in self.links:
            self._send(link, message)

    def _answer(self, link: ServerConnection, *kinds: type[ServerMessage]) -> ServerMessage:
        deadline = time.monotonic() + self._timeout_s
        while True:
            for position, answer in enumerate(link.answers):
                if isinstance(answer, kinds):
                    return link.answers.pop(position)
            if not self._turn(SLICE_S * 1000):
                self._check_alive(link)
                if time.monotonic() > deadline:
                    raise Timeout(f"{self.name} has waited {self._timeout_s:.0f} s for server {link.number}")

    def _lost(self, link: ServerConnection, problem: object) -> HoraError:
        """The line to a server is gone: the cause, if it is told within a moment, else what was seen here."""
        for line in link.lines:
            with contextlib.suppress(ConnectionClosed):
                for message in line.receive():  # its last word may still be there
                    if isinstance(message, ServerError):
                        return HoraError(message.reason)
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            self.check()
            self._control.check()
            if link.number in self._ended:
                return self._gone(link.number)
            time.sleep(0.005)
        return PeerLost(
            f"{self.name}: lost server {link.number}: {problem}; its parameters are lost with it", (), secondary=True
        )

    def _gone(self, server: int) -> PeerLost:
        return PeerLost(f"{self.name}: lost {self._ended[server]}; its parameters are lost with it", (), secondary=True)

    def _check_alive(self, link: ServerConnection) -> None:
        self.check()
        if link.number in self._ended:
            raise self._lost(link, "it was reported dead")

    def close(self) -> None:
        if self.fold is not None:
            self.fold.close()
            self.fold = None
        for link in self.links:
            for line in link.lines:
                with contextlib.suppress(HoraError):
                    if line is link.lines[0]:
                        line.send(WorkerBye())
                line.close()
        if self._passing is not None:
            self._passing.close()


def _is_read(link: ServerConnection, parcel: Chunk) -> bool:
    return parcel.number not in link.outstanding


def _room(num_rows: int, parcel: Chunk) -> torch.Tensor:
    """For rows of a table."""
    assert parcel.table is not None
    if num_rows > MAX_ROWS:
        raise HoraError(f"a batch that touches {num_rows} rows of one table; the limit is {MAX_ROWS}")
    return torch.empty(num_rows, parcel.row, dtype=parcel.table.dtype)
