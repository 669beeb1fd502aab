"""Messages between the members of a run and its coordinator: msgspec structs, framed by net/framing.py."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

PROTOCOL = 1
MAX_VALUE_BYTES = 64 << 10
MAX_REPORT_BYTES = 256 << 10
MAX_NAME_CHARS = 1024  # of a key, a topic, a host: events that carry them must fit into a frame

EventKind = Literal["formed", "joined", "left", "died", "stop", "message"]
BlockName = tuple[int, int, int]  # epoch, loop over the loader in that epoch, block


class Member(msgspec.Struct, frozen=True):
    """A process of the run: its role, its rank within the role, and where it runs."""

    role: str
    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.role == "worker" else f"{self.role} {self.rank}"
        return f"{who} (host {self.host}, pid {self.pid})"


class CoordinatorRequest(msgspec.Struct, tag_field="do", kw_only=True):
    """From a member. The reply carries the same `id`; with an id of 0 there is none, unless the request fails."""

    id: int = 0


class Join(CoordinatorRequest, tag="join"):
    """Answered once all workers and servers of the run have joined, with the members: workers, then servers, by rank.

    A predictor is answered then too, but the run does not wait for it, and it causes no events. A visitor is answered
    at once; it may only read, causes no events and receives none.
    """

    member: Member
    protocol: int = PROTOCOL
    versions: str = ""


class ListMembers(CoordinatorRequest, tag="members"):
    """Answered at once with the members that have joined so far."""


class Reserve(CoordinatorRequest, tag="reserve"):
    """Reserves `count` new ranks for workers that will join; answered with the first, in decimal, once the run has
    formed."""

    count: int


class Leave(CoordinatorRequest, tag="leave"):
    """This member has finished well."""


class Fail(CoordinatorRequest, tag="fail"):
    """This member is about to die of `reason`."""

    reason: str


class Put(CoordinatorRequest, tag="put"):
    key: str
    value: bytes


class Get(CoordinatorRequest, tag="get"):
    """Answered with the value of `key`; with `wait`, as soon as there is one."""

    key: str
    wait: bool = True


class Send(CoordinatorRequest, tag="send"):
    """A message to the ranks `to` of the same role (empty: all others), delivered as an event."""

    topic: str
    body: bytes = b""
    to: tuple[int, ...] = ()


class Stop(CoordinatorRequest, tag="stop"):
    """Asks all members to stop; the first reason counts."""

    reason: str


class Report(CoordinatorRequest, tag="report"):
    """This member's statistics (monitor/messages.py), for the run's observer. The coordinator does not parse it."""

    body: bytes


class EpochCut(NamedTuple):
    """How an epoch is cut into blocks; the same on all workers."""

    num_samples: int
    block_samples: int
    num_blocks: int

    def samples(self, start: int, end: int) -> int:
        """The number of samples in the blocks from `start` to `end`."""
        return min(end * self.block_samples, self.num_samples) - start * self.block_samples


class TakeBlock(CoordinatorRequest, tag="take"):
    """Asks for the next block of a loader's epoch (lease_manager.py). Answered with a BlockGrant.

    `done`: blocks finished since the last request. `before`: by epoch, the ranges of blocks that a restored run has
    done. `ahead`: the block will be begun later. `last`: no later epoch is expected."""

    loader: int
    epoch: int
    loop: int
    cut: EpochCut
    done: tuple[BlockName, ...] = ()
    before: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    ahead: bool = False
    last: bool = True


class BeginBlock(CoordinatorRequest, tag="begin"):
    """A block that was taken ahead is about to be computed. Answered with whether this worker still holds it."""

    loader: int
    block: BlockName
    done: tuple[BlockName, ...] = ()


class DoneBlocks(CoordinatorRequest, tag="done"):
    """Blocks are done; with `release` this worker also gives back all others that it holds of the loader."""

    loader: int
    done: tuple[BlockName, ...] = ()
    release: bool = False


class ShowData(CoordinatorRequest, tag="data"):
    """Answered with the views of all loaders, or with the account of one."""

    loader: int | None = None


class BlockGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to TakeBlock: a "block" and how its epoch is cut; "end": none is left; "wait": for these holders."""

    kind: Literal["block", "end", "wait"]
    epoch: int = 0
    loop: int = 0
    block: int = 0
    cut: EpochCut = EpochCut(0, 1, 0)
    holders: tuple[int, ...] = ()


class CoordinatorReply(msgspec.Struct, tag_field="do", tag="reply", kw_only=True):
    id: int
    value: bytes = b""
    members: tuple[Member, ...] = ()
    generation: int = 0
    error: str = ""


class CoordinatorEvent(msgspec.Struct, tag_field="do", tag="event", kw_only=True):
    """What happened, pushed to the members. `failed`: the member that died has said why itself, by Fail."""

    kind: EventKind
    generation: int
    failed: bool = False
    member: Member | None = None
    text: str = ""
    topic: str = ""
    body: bytes = b""


LeaseRequest = TakeBlock | BeginBlock | DoneBlocks | ShowData
AnyRequest = Join | ListMembers | Reserve | Leave | Fail | Put | Get | Send | Stop | Report | LeaseRequest
AnyAnswer = CoordinatorReply | CoordinatorEvent

decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_answer = msgspec.msgpack.Decoder(AnyAnswer).decode
