"""What workers and servers say to each other: typed messages in msgpack; tensors follow as raw bytes, or lie in
memory that both see."""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, tag_field="do", array_like=True):
    """The base of all."""


# -- from a worker ---------------------------------------------------------------------------------------------------


class Hello(Message, tag="hello"):
    """The first word on a line. `entries` describes the model; the server compares it with its own.

    `passing` and `key` say where the worker's gradients can be mapped; empty where they come over the line."""

    worker: int
    name: str
    fingerprint: str
    entries: list[list[Any]]
    passing: str = ""
    key: str = ""


class Extra(Message, tag="extra"):
    """The first word on a further line of a worker, for tensors."""

    worker: int
    number: int


class Hail(Message, tag="hail"):
    """The first word on a line from another server."""

    server: int


class Begin(Message, tag="begin"):
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


class Push(Message, tag="push"):
    """The gradients of a parcel. `have`: which blocks have one, None if all. `base`: the versions they were computed
    at. `rows`: of a sparse block the rows, whose gradients are all that follows. `wire`: how what follows is encoded,
    empty if it is not."""

    step: int
    parcel: int
    base: list[int]
    have: list[bool] | None = None
    rows: list[bytes] | None = None
    wire: str = ""


class Lookup(Message, tag="lookup"):
    """Asks for rows of a table that only servers have."""

    number: int
    parcel: int
    rows: bytes


class Pull(Message, tag="pull"):
    """Asks for all parcels as they are, outside of a step."""

    number: int


class Got(Message, tag="got"):
    """The worker has read what the full synchronisation after this step left."""

    step: int


class Drop(Message, tag="drop"):
    """A step that was begun will not take place: what came of it is forgotten."""

    step: int


class Enter(Message, tag="enter"):
    """The worker begins to train: others count on its steps."""


class Rest(Message, tag="rest"):
    """It takes no more steps for now: nobody waits for it."""


class Fill(Message, tag="fill"):
    """The parameters of a parcel, of this step of the job, which the server takes over as they are; rank 0 says it."""

    parcel: int
    step: int = 0


class Load(Message, tag="load"):
    """Optimizer state follows, which the server takes over; rank 0 says it."""


class Ask(Message, tag="ask"):
    """Asks for a blob: `state` (the optimizers'), `stats`, `awaited` (whom this worker waits for), or one that was kept
    under a name."""

    what: str


class Keep(Message, tag="keep"):
    """A blob follows, to be kept under a name for others to ask for."""

    what: str


class Bye(Message, tag="bye"):
    """The worker leaves well."""


# -- from a server ---------------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome"):
    """`passing` and `key`: where the parameters can be mapped; empty if they come over the line. `mine`: where the
    parameters that are this worker's alone can be."""

    passing: str = ""
    key: str = ""
    mine: str = ""


class Refused(Message, tag="refused"):
    reason: str


class Ready(Message, tag="ready"):
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


class Rows(Message, tag="rows"):
    """The rows that Lookup `number` asked for follow; `version` is their table's."""

    number: int
    version: int


class Done(Message, tag="done"):
    """The answer to Fill, Load, Keep."""


class Blob(Message, tag="blob"):
    """What was asked for follows; nothing if there is none."""

    what: str


class Trouble(Message, tag="trouble"):
    """The server cannot go on, and this is why."""

    reason: str


# -- between servers -------------------------------------------------------------------------------------------------


class Chosen(Message, tag="chosen"):
    """Server 0: these workers' gradients make up the step; the others' are dropped."""

    step: int
    workers: list[int]


class Norm(Message, tag="norm"):
    """A server's sum of squares of the mean gradient; from server 0: everybody's together."""

    step: int
    squares: float


class Entered(Message, tag="entered"):
    """Server 0, under ssp and with `sync_every`: this worker trains, and so many steps count as behind it."""

    worker: int
    clock: int


class Meet(Message, tag="meet"):
    """Server 0, with `sync_every`: these workers come together once they all have so many steps behind them."""

    clock: int
    workers: list[int]


FromWorker = Begin | Push | Lookup | Pull | Got | Drop | Enter | Rest | Fill | Load | Ask | Keep | Bye
FromServer = Chosen | Norm | Entered | Meet
Any_ = (
    Hello | Extra | Hail | Begin | Push | Lookup | Pull | Got | Drop | Enter | Rest | Fill | Load | Ask | Keep | Bye
    | Welcome | Refused | Ready | Rows | Done | Blob | Trouble | Chosen | Norm
    | Entered | Meet
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Any_).decode
