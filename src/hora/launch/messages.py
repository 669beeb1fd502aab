"""Messages between a launcher and what starts processes for it: the fork server of this machine, the agents of hosts.

    launcher                                   fork server
                                        ◀──    ServerReady       torch is imported, or why ranks will not be forked
      ForkProcess    with descriptors   ──▶
                                        ◀──    ProcessStarted
      SignalProcess                     ──▶
                                        ◀──    ProcessEnded

    launcher                                   agent
      AgentHello     token, environment ──▶
                                        ◀──    HostFacts         versions, clock, or what is missing there
      RouteRequest   the coordinator    ──▶
                                        ◀──    RouteReply        the host's own address on that route
      ProbeRequest   all hosts          ──▶
                                        ◀──    ProbeReply        which hosts it cannot reach
      StartProcess, SignalProcess,      ──▶
      HoldOutput … EndAgent             ◀──    ProcessStarted, ProcessOutput, ProcessEnded … TraceFilePiece, AgentBye

Launcher and agent send a Heartbeat once a second, so that a cut connection can be told from an idle one. When the
launcher's end closes, fork server and agent kill what they have started for it.
"""

from __future__ import annotations

import msgspec

PROTOCOL = 2  # of agents; a fork server is always of the launcher's own version
MAX_DESCRIPTORS = 8
OUTPUT_BYTES = 1 << 16  # of one ProcessOutput
FILE_BYTES = 1 << 19  # of one TraceFilePiece


class LaunchMessage(msgspec.Struct, tag_field="do"):
    """Base class of all messages of this module."""


# -- from the launcher -------------------------------------------------------------------------------------------------


class ForkProcess(LaunchMessage, tag="fork"):
    """Start one process. Its stdin, stdout and stderr come as descriptors with this message, then one descriptor for
    each name in `passed`; the variable of that name tells the process the descriptor's number."""

    role: str
    rank: int
    argv: list[str]  # the interpreter, perhaps -m, the script and its arguments
    env: dict[str, str]
    cwd: str
    passed: list[str] = []
    fork: bool = True  # else a new interpreter is started


class SignalProcess(LaunchMessage, tag="signal"):
    """Send a signal to the process alone, or to its group."""

    role: str
    rank: int
    number: int
    group: bool


class AgentHello(LaunchMessage, tag="hello"):
    """The agent's processes carry HORA_RUN=`run_id`; `host` is the host's name on the command line, `command` the
    script or module of the ranks. `processes` of the run share the cores of that machine. If `modules` is not empty,
    they are forked from a process that has imported these."""

    protocol: int
    host: str
    run_id: str = msgspec.field(name="mark")  # its name on the wire since protocol 1
    token: bytes
    cwd: str
    command: str
    module: bool
    env: dict[str, str]
    processes: int
    modules: list[str]


class RouteRequest(LaunchMessage, tag="route"):
    """The coordinator's address. `interface` is the user's choice, or empty."""

    host: str
    port: int
    interface: str


class ProbedPeer(msgspec.Struct, frozen=True):
    name: str
    host: str
    port: int


class ProbeRequest(LaunchMessage, tag="probe"):
    peers: list[ProbedPeer]


class StartProcess(LaunchMessage, tag="start"):
    """Start one process. `argv` is without the interpreter, which is the agent's own; `env` is its identity."""

    role: str
    rank: int
    argv: list[str]
    env: dict[str, str]
    trace: bool = False


class HoldOutput(LaunchMessage, tag="hold"):
    """Stop (`on`) or resume reading the output of the processes."""

    on: bool


class Heartbeat(LaunchMessage, tag="beat"):
    """Sender and connection are alive."""


class EndAgent(LaunchMessage, tag="end"):
    """End the remaining processes, send the trace files, and exit."""


# -- to the launcher ---------------------------------------------------------------------------------------------------


class ServerReady(LaunchMessage, tag="ready"):
    """`problem` says why processes will be started as new interpreters; empty if they will be forked."""

    pid: int
    problem: str = ""


class HostFacts(LaunchMessage, tag="facts"):
    """`problem` is what is missing on the host. `client` and `server` are the two ends of the ssh connection as the
    host sees them; empty without one."""

    hostname: str
    python: str
    torch: str
    hora: str
    executable: str
    cores: int
    time_ns: int
    machine: str = ""  # equal for all processes that share a kernel and a network
    client: str = ""
    server: str = ""
    problem: str = ""


class RouteReply(LaunchMessage, tag="routed"):
    address: str = ""
    interface: str = ""
    port: int = 0  # where other hosts can probe it
    problem: str = ""


class ProbeReply(LaunchMessage, tag="probed"):
    """By peer: what went wrong, or empty, and the seconds that a handshake took."""

    problems: list[str]
    seconds: list[float]


class ProcessStarted(LaunchMessage, tag="started"):
    role: str
    rank: int
    pid: int
    problem: str = ""  # why it could not be started


class ProcessOutput(LaunchMessage, tag="output"):
    """Bytes that a process wrote to stdout (`stream` 1) or stderr (2)."""

    role: str
    rank: int
    stream: int
    data: bytes


class ProcessEnded(LaunchMessage, tag="ended"):
    """`code` as in subprocess. Nothing of the process's group is left. An agent sends it after all output."""

    role: str
    rank: int
    code: int
    peak_bytes: int = 0


class TraceFilePiece(LaunchMessage, tag="file"):
    """A piece of a trace file of a process; the pieces of a file come in order."""

    name: str
    data: bytes


class AgentBye(LaunchMessage, tag="bye"):
    """No process is left on the host."""


FromForkServer = ServerReady | ProcessStarted | ProcessEnded
ToForkServer = ForkProcess | SignalProcess
ToAgent = AgentHello | RouteRequest | ProbeRequest | StartProcess | SignalProcess | HoldOutput | Heartbeat | EndAgent
HostReply = HostFacts | RouteReply | ProbeReply
ProcessEvent = ProcessStarted | ProcessOutput | ProcessEnded
FromAgent = HostReply | ProcessEvent | TraceFilePiece | Heartbeat | AgentBye

decode_from_fork_server = msgspec.msgpack.Decoder(FromForkServer).decode
decode_to_fork_server = msgspec.msgpack.Decoder(ToForkServer).decode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
