"""What members and coordinator say to each other: typed messages in msgpack, framed by net/framing.py."""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL = 1
MAX_VALUE_BYTES = 64 << 10
MAX_REPORT_BYTES = 256 << 10
MAX_NAME_CHARS = 1024  # of a key, a lease, a topic, a host: what is passed on must fit into a frame

EventKind = Literal["formed", "joined", "left", "died", "stop", "message", "expired"]


class Member(msgspec.Struct, frozen=True):
    """Who takes part: a role, a rank within it, and where its process is."""

    role: str
    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.role == "worker" else f"{self.role} {self.rank}"
        return f"{who} (host {self.host}, pid {self.pid})"


class CoordinatorRequest(msgspec.Struct, tag_field="do", kw_only=True):
    """From a member; `id` comes back in the reply. An id of 0 asks for none."""

    id: int = 0


class Join(CoordinatorRequest, tag="join"):
    """Answered once all workers and servers of the run are there, with the members: workers, then servers, by rank.

    A predictor (that role) is answered then too, but not waited for, and nobody hears of it. A visitor (that role) is
    answered at once. It only looks: nobody hears of it, and it hears of nothing.
    """

    member: Member
    protocol: int = PROTOCOL
    versions: str = ""


class ListMembers(CoordinatorRequest, tag="members"):
    """Who is there so far: answered at once with the members that have joined."""


class Reserve(CoordinatorRequest, tag="reserve"):
    """Asks for `count` ranks that nobody has had, for workers that will join; answered with the first, in decimal.

    Before the run has formed the answer waits for that.
    """

    count: int


class Leave(CoordinatorRequest, tag="leave"):
    """This member has finished well: others that still wait for it are told so."""


class Fail(CoordinatorRequest, tag="fail"):
    """This member is about to die, and this is why."""

    reason: str


class Put(CoordinatorRequest, tag="put"):
    key: str
    value: bytes


class Get(CoordinatorRequest, tag="get"):
    """Answered with the value, when there is one: at once, or, with `wait`, after a member has put it."""

    key: str
    wait: bool = True


class Lease(CoordinatorRequest, tag="lease"):
    """Asks for `name` for `seconds`; the holder asks again to keep it. Answered with whether it is now held."""

    name: str
    seconds: float


class Release(CoordinatorRequest, tag="release"):
    name: str


class Send(CoordinatorRequest, tag="send"):
    """A word to other ranks of the same role (all of them if `to` is empty), delivered as an event."""

    topic: str
    body: bytes = b""
    to: tuple[int, ...] = ()


class Stop(CoordinatorRequest, tag="stop"):
    """Everybody stops; the first reason counts."""

    reason: str


class Report(CoordinatorRequest, tag="report"):
    """What a member tells of itself to whoever watches the run (watch/report.py). The coordinator does not read it."""

    body: bytes


class TakeBlock(CoordinatorRequest, tag="take"):
    """The next block of samples of a loader's epoch (book.py), and those finished since. Answered with a Grant.

    Blocks are named (epoch, loop, block): `loop` counts the loops over the loader in one epoch. `before`: by epoch, the
    ranges of blocks that a restored run has done."""

    loader: int
    epoch: int
    loop: int
    num_samples: int
    block_samples: int
    num_blocks: int
    done: tuple[tuple[int, int, int], ...] = ()
    before: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    ahead: bool = False
    last: bool = True


class BeginBlock(CoordinatorRequest, tag="begin"):
    """A block that was taken ahead comes to the user's code. Answered with whether it is still this worker's."""

    loader: int
    epoch: int
    loop: int
    block: int
    done: tuple[tuple[int, int, int], ...] = ()


class DoneBlocks(CoordinatorRequest, tag="done"):
    """Blocks are done; with `release` this worker gives back what else it took from the loader."""

    loader: int
    done: tuple[tuple[int, int, int], ...] = ()
    release: bool = False


class ShowData(CoordinatorRequest, tag="data"):
    """Answered with the views of all loaders, or with one loader's account."""

    loader: int | None = None


class BlockGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to TakeBlock: a "block", and how its epoch is cut; "end": none is left; "wait": for these holders."""

    kind: str
    epoch: int = 0
    loop: int = 0
    block: int = 0
    cut: tuple[int, ...] = ()  # samples, samples per block, blocks
    holders: tuple[int, ...] = ()


class CoordinatorReply(msgspec.Struct, tag_field="do", tag="reply", kw_only=True):
    id: int
    value: bytes = b""
    members: tuple[Member, ...] = ()
    generation: int = 0
    error: str = ""


class CoordinatorEvent(msgspec.Struct, tag_field="do", tag="event", kw_only=True):
    """What happened, pushed to every member: formed, joined, left, died, stop, message, expired.

    `failed`: who died has told why itself, by an exception of its script."""

    kind: EventKind
    generation: int
    failed: bool = False
    member: Member | None = None
    text: str = ""
    topic: str = ""
    body: bytes = b""


AboutData = TakeBlock | BeginBlock | DoneBlocks | ShowData
AnyRequest = (
    Join | ListMembers | Reserve | Leave | Fail | Put | Get | Lease | Release | Send | Stop | Report | AboutData
)
AnyAnswer = CoordinatorReply | CoordinatorEvent

decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_answer = msgspec.msgpack.Decoder(AnyAnswer).decode
