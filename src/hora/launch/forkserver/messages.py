"""What a launcher and a fork server say to each other over a Unix socket: typed messages in msgpack, in frames.

    launcher                                      fork server
                                           ◀──    ServerReady    torch is imported, or why ranks will not be forked
      ForkRequest    argv, env, descriptors ──▶
                                           ◀──    ForkReply      its pid, or why it could not be started
      SignalRequest                        ──▶
                                           ◀──    ProcessExit    exit status, peak memory

The launcher's end of the socket is its life: when it closes, the fork server kills what it has started for it.
"""

from __future__ import annotations

import msgspec

from hora.net.framing import FrameReader, frame

__all__ = [
    "ForkReply",
    "ForkRequest",
    "FrameReader",
    "FromServer",
    "ProcessExit",
    "ServerReady",
    "SignalRequest",
    "decode_client",
    "decode_server",
    "frame",
]

MAX_DESCRIPTORS = 8


class ForkServerMessage(msgspec.Struct, tag_field="do"):
    """The base of all."""


class ForkRequest(ForkServerMessage, tag="start"):
    """One process. Three descriptors come with it, its stdin, stdout and stderr, and then one for each name in
    `passed`: the variable of that name tells the process its number."""

    argv: list[str]  # the interpreter, perhaps -m, the script and its arguments
    env: dict[str, str]
    cwd: str
    passed: list[str] = []
    fork: bool = True  # else a new interpreter is started


class SignalRequest(ForkServerMessage, tag="signal"):
    """To the process alone, or to its group."""

    pid: int
    number: int
    group: bool


class ServerReady(ForkServerMessage, tag="ready"):
    """`problem` says why processes will be started as new interpreters instead; empty if they will be forked."""

    pid: int
    problem: str = ""


class ForkReply(ForkServerMessage, tag="started"):
    pid: int
    problem: str = ""


class ProcessExit(ForkServerMessage, tag="ended"):
    """`code` as in subprocess. Nothing of the process's group is left."""

    pid: int
    code: int
    peak_bytes: int


FromServer = ServerReady | ForkReply | ProcessExit

decode_client = msgspec.msgpack.Decoder(ForkRequest | SignalRequest).decode
decode_server = msgspec.msgpack.Decoder(FromServer).decode
