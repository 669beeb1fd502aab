"""What workers and servers say to each other: typed messages in msgpack; tensors follow as raw bytes, or lie in
memory that both see."""

from __future__ import annotations

from typing import Any

import msgspec


class ServerMessage(msgspec.Struct, tag_field="do", array_like=True):
    """The base of all."""


# -- from a worker ---------------------------------------------------------------------------------------------------


class WorkerHello(ServerMessage, tag="hello"):
    """The first word on a line. `entries` describes the model; the server compares it with its own.

    `passing` and `key` say where the worker's gradients can be mapped; empty where they come over the line."""

    worker: int
    name: str
    fingerprint: str
    entries: list[list[Any]]
    passing: str = ""
    key: str = ""


class ExtraConnection(ServerMessage, tag="extra"):
    """The first word on a further line of a worker, for tensors."""

    worker: int
    number: int


class ServerHello(ServerMessage, tag="hail"):
    """The first word on a line from another server."""

    server: int


class BeginStep(ServerMessage, tag="begin"):
    """A step begins: `parcels` gradients of it will come to this server.

    `weight` is what the newest backward counts, in whose units the gradients are; `total` is the sum over all `count`
    that piled up. `scale` multiplies the gradient. `hyper` are the optimizers' hyper-parameters, None if they are what
    they were. `present` is how many workers have samples in this batch, `place` (loop, batch) says which. A worker that
    is not `eligible` has read parameters of two steps. `reaches` is the step of the job that it leads to.

    `carrier` is the rank whose gradients contain this worker's, of all parcels that travel whole; -1: it sends its own.
    `factor` is what multiplies the gradients of such parcels, instead of `weight` and `scale`.
    """

    step: int
    optimizer: int
    parcels: int
    weight: float = 1.0
    total: float = 1.0
    count: int = 1
    scale: float = 1.0
    hyper: list[list[dict[str, Any]]] | None = None
    nonfinite: str = ""
    stop: bool = False
    buffers: bool = False
    present: int = 0
    place: tuple[int, int] = (0, 0)
    eligible: bool = True
    reaches: int = 0
    carrier: int = -1
    factor: float | None = None


class Push(ServerMessage, tag="push"):
    """The gradients of a parcel. `have`: which blocks have one, None if all. `base`: the versions they were computed
    at. `rows`: of a sparse block the rows, whose gradients are all that follows. `wire`: how what follows is encoded,
    empty if it is not."""

    step: int
    parcel: int
    base: list[int]
    have: list[bool] | None = None
    rows: list[bytes] | None = None
    wire: str = ""


class Lookup(ServerMessage, tag="lookup"):
    """Asks for rows of a table that only servers have."""

    number: int
    parcel: int
    rows: bytes


class Pull(ServerMessage, tag="pull"):
    """Asks for all parcels as they are, outside of a step."""

    number: int


class SynchronizedAck(ServerMessage, tag="got"):
    """The worker has read what the full synchronisation after this step left."""

    step: int


class DropStep(ServerMessage, tag="drop"):
    """A step that was begun will not take place: what came of it is forgotten."""

    step: int


class EnterLoop(ServerMessage, tag="enter"):
    """The worker begins to train: others count on its steps."""


class LeaveLoop(ServerMessage, tag="rest"):
    """It takes no more steps for now: nobody waits for it."""


class FillParameters(ServerMessage, tag="fill"):
    """The parameters of a parcel, of this step of the job, which the server takes over as they are; rank 0 says it."""

    parcel: int
    step: int = 0


class LoadState(ServerMessage, tag="load"):
    """Optimizer state follows, which the server takes over; rank 0 says it."""


class GetBlob(ServerMessage, tag="ask"):
    """Asks for a blob: `state` (the optimizers'), `stats`, `awaited` (whom this worker waits for), or one that was kept
    under a name."""

    what: str


class PutBlob(ServerMessage, tag="keep"):
    """A blob follows, to be kept under a name for others to ask for."""

    what: str


class WorkerBye(ServerMessage, tag="bye"):
    """The worker leaves well."""


# -- from a server ---------------------------------------------------------------------------------------------------


class Welcome(ServerMessage, tag="welcome"):
    """`passing` and `key`: where the parameters can be mapped; empty if they come over the line. `mine`: where the
    parameters that are this worker's alone can be."""

    passing: str = ""
    key: str = ""
    mine: str = ""


class Refused(ServerMessage, tag="refused"):
    reason: str


class ChunkReady(ServerMessage, tag="ready"):
    """A parcel's parameters may be read: the result of `step`, or, after Pull, as they are.

    `now` is the step that the servers are at. `skipped` says why the step was not taken, if it was not."""

    step: int
    parcel: int
    versions: list[int]
    now: int = 0
    lag: int = 0
    stop: bool = False
    dropped: bool = False
    skipped: str = ""
    buffers: bool = False
    place: tuple[int, int] = (0, 0)
    rows: list[bytes] | None = None


class RowsReply(ServerMessage, tag="rows"):
    """The rows that Lookup `number` asked for follow; `version` is their table's."""

    number: int
    version: int


class Ack(ServerMessage, tag="done"):
    """The answer to Fill, Load, Keep."""


class BlobReply(ServerMessage, tag="blob"):
    """What was asked for follows; nothing if there is none."""

    what: str


class ServerError(ServerMessage, tag="trouble"):
    """The server cannot go on, and this is why."""

    reason: str


# -- between servers -------------------------------------------------------------------------------------------------


class ChosenWorkers(ServerMessage, tag="chosen"):
    """Server 0: these workers' gradients make up the step; the others' are dropped."""

    step: int
    workers: list[int]


class GradientNorm(ServerMessage, tag="norm"):
    """A server's sum of squares of the mean gradient; from server 0: everybody's together."""

    step: int
    squares: float


class WorkerEntered(ServerMessage, tag="entered"):
    """Server 0, under ssp and with `sync_every`: this worker trains, and so many steps count as behind it."""

    worker: int
    clock: int


class SynchronizeAt(ServerMessage, tag="meet"):
    """Server 0, with `sync_every`: these workers come together once they all have so many steps behind them."""

    clock: int
    workers: list[int]


FromWorker = (
    BeginStep | Push | Lookup | Pull | SynchronizedAck | DropStep | EnterLoop | LeaveLoop | FillParameters | LoadState
    | GetBlob | PutBlob | WorkerBye
)  # fmt: skip
FromServer = ChosenWorkers | GradientNorm | WorkerEntered | SynchronizeAt
ToWorker = Welcome | Refused | ChunkReady | RowsReply | Ack | BlobReply | ServerError
AnyMessage = WorkerHello | ExtraConnection | ServerHello | FromWorker | FromServer | ToWorker

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyMessage).decode
