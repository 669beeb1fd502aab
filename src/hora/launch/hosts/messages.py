"""What a launcher and the agents on its hosts say to each other: typed messages in msgpack, a length before each.

    launcher                              agent
      Hello   who, where, token, env ──▶
                                  ◀──     Facts     versions, clock, or what is missing there
      Route   the coordinator     ──▶
                                  ◀──     Routed    this host's own address on that road
      Probe   all hosts' addresses ─▶
                                  ◀──     Probed    whom it cannot reach
      Start, Signal, Hold … End   ──▶
                                  ◀──     Started, Output, Ended … File, Bye

Both say Beat once a second, so that a cut link is told from a quiet one.
"""

from __future__ import annotations

import msgspec

from hora.net.framing import MAX_FRAME_BYTES, FrameReader, frame

__all__ = ["MAX_FRAME_BYTES", "FrameReader", "FromAgent", "FromLauncher", "decode_agent", "decode_launcher", "frame"]

PROTOCOL = 2
OUTPUT_BYTES = 1 << 16  # of one Output
FILE_BYTES = 1 << 19  # of one File


class AgentMessage(msgspec.Struct, tag_field="do"):
    """The base of all."""


# -- from the launcher -------------------------------------------------------------------------------------------------


class AgentHello(AgentMessage, tag="hello"):
    """`mark` is what every process that this agent starts carries as HORA_RUN; `host` what the user calls the host.
    `command` is the script, or the module, that ranks will run. Of the run, `processes` share the cores of this
    machine; they are forked from one that has imported `modules`, if there are any."""

    protocol: int
    host: str
    mark: str
    token: bytes
    cwd: str
    command: str
    module: bool
    env: dict[str, str]
    processes: int
    modules: list[str]


class RouteRequest(AgentMessage, tag="route"):
    """Where the coordinator is; `interface`: what the user named, or nothing."""

    host: str
    port: int
    interface: str


class ProbedPeer(msgspec.Struct, frozen=True):
    name: str
    host: str
    port: int


class ProbeRequest(AgentMessage, tag="probe"):
    peers: list[ProbedPeer]


class StartProcess(AgentMessage, tag="start"):
    """One process: `argv` without the interpreter, which is the agent's own; `env` is its identity in the run."""

    role: str
    rank: int
    argv: list[str]
    env: dict[str, str]
    trace: bool = False


class SignalProcess(AgentMessage, tag="signal"):
    """To the process alone, or to its group."""

    role: str
    rank: int
    number: int
    group: bool


class HoldOutput(AgentMessage, tag="hold"):
    """Read nothing of the processes' output until the contrary is said."""

    on: bool


class Heartbeat(AgentMessage, tag="beat"):
    """I am here, and the link is."""


class EndAgent(AgentMessage, tag="end"):
    """Nobody is needed any more: end what is left, say what was kept, and go."""


# -- from the agent ----------------------------------------------------------------------------------------------------


class HostFacts(AgentMessage, tag="facts"):
    """`problem` is what is missing there. `client` and `server` are the two ends of the ssh connection as seen from
    there; empty without one."""

    hostname: str
    python: str
    torch: str
    hora: str
    executable: str
    cores: int
    time_ns: int
    machine: str = ""  # the same for all processes that share a kernel and a network
    client: str = ""
    server: str = ""
    problem: str = ""


class RouteReply(AgentMessage, tag="routed"):
    address: str = ""
    interface: str = ""
    port: int = 0  # where it can be probed
    problem: str = ""


class ProbeReply(AgentMessage, tag="probed"):
    """By peer, what went wrong, empty if nothing, and how long a handshake with it took."""

    problems: list[str]
    seconds: list[float]


class ProcessStarted(AgentMessage, tag="started"):
    role: str
    rank: int
    pid: int
    problem: str = ""


class ProcessOutput(AgentMessage, tag="output"):
    """What a process wrote, to stdout (1) or stderr (2)."""

    role: str
    rank: int
    stream: int
    data: bytes


class ProcessEnded(AgentMessage, tag="ended"):
    """After everything that it wrote; `code` as in subprocess."""

    role: str
    rank: int
    code: int
    peak_bytes: int = 0


class TraceFilePiece(AgentMessage, tag="file"):
    """A piece of what a process left for the trace; the pieces of a file come in order."""

    name: str
    data: bytes


class AgentBye(AgentMessage, tag="bye"):
    """Nothing is left here."""


FromLauncher = (
    AgentHello | RouteRequest | ProbeRequest | StartProcess | SignalProcess | HoldOutput | Heartbeat | EndAgent
)
FromAgent = (
    HostFacts
    | RouteReply
    | ProbeReply
    | ProcessStarted
    | ProcessOutput
    | ProcessEnded
    | TraceFilePiece
    | Heartbeat
    | AgentBye
)

decode_launcher = msgspec.msgpack.Decoder(FromLauncher).decode
decode_agent = msgspec.msgpack.Decoder(FromAgent).decode
