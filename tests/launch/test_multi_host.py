"""What is checked and sent before any rank of several hosts starts, and what ssh's errors mean."""

from __future__ import annotations

import pathlib
import sys

import pytest

import hora
from hora.launch.config import RunConfig
from hora.launch.hosts import multi_host, ssh
from hora.launch.hosts.host_spec import HostSpec, deal, parse
from hora.launch.messages import HostFacts, ProcessOutput, decode_from_agent
from hora.net.framing import FrameReader, frame
from hora.runs.run_directory import versions
from hora.strategies import parse as strategy


def config(tmp_path: pathlib.Path, **fields: object) -> RunConfig:
    script = tmp_path / "train.py"
    script.write_text("")
    hosts, size = deal(parse("a:2,b:2"), None)
    return RunConfig(command=(str(script),), size=size, hosts=hosts, **fields)  # type: ignore[arg-type]


def test_servers_are_dealt_from_the_last_host_on(tmp_path: pathlib.Path) -> None:
    placed = multi_host.place(config(tmp_path, strategy=strategy("ps"), servers=3))
    assert placed == [
        [("worker", 0), ("worker", 1), ("server", 1)],
        [("worker", 2), ("worker", 3), ("server", 0), ("server", 2)],
    ]


def test_only_what_is_meant_for_them_goes_to_the_hosts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET", "WANDB_MODE", "NCCL_DEBUG", "HORA_RANK", "HORA_HISTORY", "HORA_TOKEN_FILE"):
        monkeypatch.setenv(name, "x")
    sent = multi_host.forwarded(config(tmp_path, forward=("WANDB_*",), env=(("A", "1"), ("NCCL_DEBUG", "INFO"))))
    assert sent["WANDB_MODE"] == sent["HORA_HISTORY"] == "x"
    assert sent["A"] == "1" and sent["NCCL_DEBUG"] == "INFO"
    assert not {"SECRET", "HORA_RANK", "HORA_TOKEN_FILE"} & set(sent)


def facts(**changed: str) -> HostFacts:
    python = ".".join(map(str, sys.version_info[:3]))
    told = {"python": python, "torch": versions()["torch"], "hora": hora.__version__, **changed}
    return HostFacts(hostname="x", executable="/usr/bin/python", cores=2, time_ns=0, **told)  # type: ignore[arg-type]


def test_whoever_differs_is_named() -> None:
    multi_host.check_versions(["a", "b"], [facts(), facts()])
    for changed, words in (
        ({"torch": "1.0"}, "host b has torch 1.0, this machine"),
        ({"python": "3.1.4"}, "host b has Python 3.1, this machine"),
        ({"hora": "9"}, "host b has Hora 9, this machine"),
        ({"torch": ""}, "host b: its /usr/bin/python has no torch"),
        ({"problem": "no folder"}, "host b: no folder"),
    ):
        with pytest.raises(ValueError, match=words):
            multi_host.check_versions(["a", "b"], [facts(), facts(**changed)])


def test_clocks_that_are_apart_are_told_and_slow_answers_are_not() -> None:
    second = 10**9
    assert multi_host.clock_notes(["a"], [5 * second], 0, 9 * second) == []
    assert "host a is 7.0 s ahead of" in multi_host.clock_notes(["a"], [17 * second], 9 * second, 10 * second)[0]
    assert "host a is 5.0 s behind" in multi_host.clock_notes(["a"], [4 * second], 9 * second, 10 * second)[0]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Host key verification failed.", "connect once by hand"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @|Host key verification failed.", "installed anew"),
        ("root@b: Permission denied (publickey).", "ssh-copy-id b"),
        ("env: '/opt/py': Permission denied", "--python"),
        ("ssh: Could not resolve hostname b: Name or service not known", "no such host"),
        ("Identity file x: No such file or directory|ssh: connect to host b: Connection refused", "reached"),
        ("/opt/py: No module named hora", "has no Hora"),
        ("", "try by hand: ssh b"),
    ],
)  # fmt: skip
def test_ssh_is_understood(said: str, words: str) -> None:
    assert words in ssh.explain(HostSpec("b"), said.split("|") if said else [], "/opt/py", "ssh")


def test_frames_are_cut_as_they_were_sent() -> None:
    sent = [ProcessOutput("worker", 1, 2, b"\0" * 1000), ProcessOutput("server", 0, 1, b"x")]
    stream, frames = b"".join(frame(message) for message in sent), FrameReader()
    found = [decode_from_agent(body) for at in range(0, len(stream), 7) for body in frames.feed(stream[at : at + 7])]
    assert found == sent
