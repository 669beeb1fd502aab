"""Messages between workers and parameter servers, in msgpack. Tensors follow as raw bytes, or lie in shared memory."""

from __future__ import annotations

from typing import Any, Union

import msgspec


class ServerMessage(msgspec.Struct, tag_field="do", array_like=True):
    """The base class of all messages here."""


# -- from a worker -----------------------------------------------------------------------------------------------------


class WorkerHello(ServerMessage, tag="hello"):
    """The first message on a worker's main connection. The server compares `entries`, the model's, with its own.

    `passing`: the address of the worker's FdPassing, if it shares its gradients' memory."""

    worker: int
    name: str
    fingerprint: str
    entries: list[list[Any]]
    passing: str = ""


class ExtraConnection(ServerMessage, tag="extra"):
    """The first message on a worker's further connection, for tensors."""

    worker: int


class BeginStep(ServerMessage, tag="begin"):
    """A step begins: this server will get `num_chunks` pushes of it.

    `weight` is that of the newest backward, in whose units the gradients are; `total` is the sum over all `count` that
    were accumulated. `scale` multiplies the gradient. `hyper` are the optimizers' hyper-parameters, None if unchanged.
    `present` is how many workers have samples in this batch, `place` is (loop, batch). A worker that has read
    parameters of two steps is not `eligible`. `reaches` is the job's step that this one leads to.

    `carrier` is the rank whose dense pushes contain this worker's gradients, -1 if it sends its own. `factor`
    multiplies dense gradients instead of `weight` and `scale`."""

    step: int
    optimizer: int
    num_chunks: int
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
    """A chunk's gradients. `base`: the block versions they were computed at. `have`: which blocks have one, None if
    all. `rows`: the rows of a sparse block, whose values are all that follows. `wire`: the codec, empty for plain
    bytes."""

    step: int
    chunk: int
    base: list[int]
    have: list[bool] | None = None
    rows: list[bytes] | None = None
    wire: str = ""


class Lookup(ServerMessage, tag="lookup"):
    """Asks for rows of a ServerEmbedding's table."""

    number: int
    chunk: int
    rows: bytes


class Pull(ServerMessage, tag="pull"):
    """Asks for all chunks as they are, outside of a step."""

    number: int


class SynchronizedAck(ServerMessage, tag="got"):
    """The worker has read the result of the full synchronisation after this step."""

    step: int


class DropStep(ServerMessage, tag="drop"):
    """A step that was begun will not take place: the server discards its pushes."""

    step: int


class EnterLoop(ServerMessage, tag="enter"):
    """The worker begins to train: others wait for its steps."""


class LeaveLoop(ServerMessage, tag="rest"):
    """The worker takes no more steps for now: no worker waits for it."""


class FillParameters(ServerMessage, tag="fill"):
    """From rank 0: a chunk's parameters, those of the job's `step`, follow."""

    chunk: int
    step: int = 0


class LoadState(ServerMessage, tag="load"):
    """From rank 0: optimizer state follows."""


class GetBlob(ServerMessage, tag="ask"):
    """Asks for a blob: `state` (parameters and optimizer state), `stats`, `awaited` (which ranks this worker waits
    for), or one that was put under a name."""

    what: str


class PutBlob(ServerMessage, tag="keep"):
    """A blob follows, which the server keeps under a name."""

    what: str


class WorkerBye(ServerMessage, tag="bye"):
    """The worker leaves."""


# -- from a server -----------------------------------------------------------------------------------------------------


class Welcome(ServerMessage, tag="welcome"):
    """`passing`: the address of the server's FdPassing, if it shares memory. `private`: with this worker alone."""

    passing: str = ""
    private: bool = False


class Refused(ServerMessage, tag="refused"):
    reason: str


class ChunkReady(ServerMessage, tag="ready"):
    """A chunk may be read: the result of `step`, or, after Pull, as it is.

    `now` is the servers' next step. `skipped` is the reason why the step was not taken, if it was not."""

    step: int
    chunk: int
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
    """The rows of Lookup `number` follow; `version` is their table's."""

    number: int
    version: int


class Ack(ServerMessage, tag="done"):
    """FillParameters, LoadState or PutBlob was done."""


class BlobReply(ServerMessage, tag="blob"):
    """The blob follows; nothing if there is none."""


class ServerError(ServerMessage, tag="trouble"):
    """The server cannot continue."""

    reason: str


# -- between servers ---------------------------------------------------------------------------------------------------


class ServerHello(ServerMessage, tag="hail"):
    """The first message on a connection from another server."""

    server: int


class ChosenWorkers(ServerMessage, tag="chosen"):
    """From server 0: the step uses these workers' gradients; the others' are dropped."""

    step: int
    workers: list[int]


class GradientNorm(ServerMessage, tag="norm"):
    """A server's sum of squares of the mean gradient; from server 0: the sum over all servers."""

    step: int
    squares: float


class WorkerEntered(ServerMessage, tag="entered"):
    """From server 0, under ssp and `sync_every`: this worker trains, and starts at this clock."""

    worker: int
    clock: int


class SynchronizeAt(ServerMessage, tag="meet"):
    """From server 0, under `sync_every`: these workers synchronise when all of them have reached this clock."""

    clock: int
    workers: list[int]


FromServer = ChosenWorkers | GradientNorm | WorkerEntered | SynchronizeAt

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Union[tuple(ServerMessage.__subclasses__())]).decode  # noqa: UP007
