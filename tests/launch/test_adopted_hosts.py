"""Other launchers on several hosts, which are network namespaces here: nobody says where to listen, and links break."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from started import Started
from test_adopted import needs_mpirun, one_process, parameters  # noqa: F401  # a fixture

from hora.runs import exit_codes
from hora_benchmarks.bench import links

OBSTACLE = links.obstacle()
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(OBSTACLE), reason=f"no network namespaces here: {OBSTACLE}"),
]
NOTICE = r"the coordinator listens for other hosts at 10\.83\.0\.1:\d+ \(eth0\); set HORA_INTERFACE for another address"


@pytest.fixture
def hosts() -> Iterator[links.Namespaces]:
    with links.Namespaces(2, "1gbit") as there:
        yield there


@pytest.fixture
def started(tmp_path_factory: pytest.TempPathFactory, hosts: links.Namespaces) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("tmp"))
    yield started
    started.end()


def inside(hosts: links.Namespaces, number: int) -> list[str]:
    return ["ip", "netns", "exec", hosts.host(number)]


def torchrun(
    started: Started, hosts: links.Namespaces, per_host: int, *arguments: object, **env: str
) -> list[subprocess.Popen[str]]:
    """One on each host, as its users would type it."""
    started_there = []
    for number in range(2):
        command = [*inside(hosts, number), sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", str(per_host), "--node-rank", str(number)]
        command += ["--master-addr", hosts.address(0), "--master-port", "29400"]
        started_there.append(started.start(command, *arguments, HORA_HOST=f"host{number}", **env))
    return started_there


def by_hand(
    started: Started, hosts: links.Namespaces, rank: int, size: int, *arguments: object, **env: str
) -> subprocess.Popen[str]:
    """One rank on the host of its number, the first two alone and the rest on the second; with torchrun's variables
    but without torchrun, which would end the others at the first death."""
    number = min(rank, 1)
    said = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29401"}
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # one host sees no other's processes
    command = [*inside(hosts, number), *apart, sys.executable]
    return started.start(command, *arguments, **said, **{"HORA_HOST": f"host{number}"} | env)


def said(processes: list[subprocess.Popen[str]], timeout_s: float = 90.0) -> list[tuple[int, str]]:
    return [(process.returncode, out) for process in processes for out in [process.communicate(timeout=timeout_s)[0]]]


@pytest.mark.full
def test_torchrun_on_two_hosts_is_adopted_without_a_word_about_addresses(
    started: Started, hosts: links.Namespaces
) -> None:
    done = said(torchrun(started, hosts, 2, "agree.py"))
    assert [code for code, _ in done] == [0, 0], done
    out = "".join(text for _, text in done)
    assert sorted(re.findall(r"agreed: rank (\d) of 4 under torchrun over tcp", out)) == ["0", "1", "2", "3"]
    assert len(re.findall(NOTICE, out)) == 1


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "servers"), [("ring", ""), ("ps", "1"), ("ps", "colocated")])
def test_digits_are_learnt_on_two_hosts_as_by_one_process(
    started: Started,
    hosts: links.Namespaces,
    one_process: torch.Tensor,  # noqa: F811
    tmp_path: pathlib.Path,
    strategy: str,
    servers: str,
) -> None:
    chosen = {"HORA_STRATEGY": strategy} | ({"HORA_SERVERS": servers} if servers else {})
    done = said(torchrun(started, hosts, 2 if servers == "1" else 1, "digits_alike.py", tmp_path, **chosen))
    assert [code for code, _ in done] == [0, 0], done
    found = parameters(tmp_path)
    assert len(found) == (3 if servers == "1" else 2)
    for each in found:
        torch.testing.assert_close(each, one_process, rtol=1e-9, atol=1e-12)


@pytest.mark.full
@needs_mpirun
def test_mpirun_on_two_hosts_is_adopted_without_a_word_about_addresses(
    started: Started, hosts: links.Namespaces, tmp_path: pathlib.Path
) -> None:
    """mpirun reaches the other host by whatever it is told to use instead of ssh."""
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nhost=$1\nshift\nexec ip netns exec "$host" sh -c "$*"\n')
    agent.chmod(0o755)
    command = [*inside(hosts, 0), "mpirun", "--mca", "plm_rsh_agent", str(agent), "--mca", "btl_tcp_if_include", "eth0"]
    command += ["--mca", "oob_tcp_if_include", "eth0", "--mca", "btl", "tcp,self", "--mca", "pml", "ob1"]
    command += ["--host", f"{hosts.host(0)}:1,{hosts.host(1)}:1", "-n", "2", "--map-by", "node"]
    command += ["-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", sys.executable]
    ((code, out),) = said([started.start(command, "agree.py", HORA_STRATEGY="ring")])
    assert code == 0, out
    assert sorted(re.findall(r"agreed: rank (\d) of 2 under mpirun over tcp", out)) == ["0", "1"]
    assert len(re.findall(NOTICE, out)) == 1


@pytest.mark.full
def test_an_interface_may_be_named_and_a_wrong_one_says_what_there_is(
    started: Started, hosts: links.Namespaces
) -> None:
    named = {"HORA_INTERFACE": "10.83.0.0/24"}
    done = said([by_hand(started, hosts, rank, 2, "agree.py", **named) for rank in range(2)])
    assert [code for code, _ in done] == [0, 0], done
    code, out = said([by_hand(started, hosts, 0, 2, "agree.py", HORA_INTERFACE="ib7")])[0]
    assert code == 1
    assert "HORA_INTERFACE on host0: no interface here is 'ib7'; there are: " in out and "eth0 (10.83.0.1)" in out


@pytest.mark.full
def test_a_coordinator_that_cannot_be_reached_is_named_with_the_way_out(
    started: Started, hosts: links.Namespaces
) -> None:
    """Rank 0 is told to use a network that the other host is not on."""
    subprocess.run([*inside(hosts, 0), "ip", "address", "add", "10.84.0.1/24", "dev", "lo"], check=True)
    first = by_hand(started, hosts, 0, 2, "agree.py", HORA_INTERFACE="10.84.0.1", HORA_TIMEOUT_S="80")
    ((code, out),) = said([by_hand(started, hosts, 1, 2, "agree.py")])
    assert code == 1 and first.poll() is None
    unreachable = r"rank 1 \(host host1, pid \d+\) cannot reach the coordinator at 10\.84\.0\.1:\d+: .*"
    assert re.search(unreachable + "set HORA_INTERFACE to another", out)


# -- a host that disappears --------------------------------------------------------------------------------------------

NO_ANSWER = r"no answer for 4 s: is the host down or the link cut\?"


def cut(hosts: links.Namespaces, number: int) -> None:
    """Its link goes down: nothing closes, nothing is refused, nothing arrives."""
    switch = hosts.host(0).removesuffix("host0") + "switch"
    subprocess.run(["ip", "-n", switch, "link", "set", f"plug{number}", "down"], check=True)


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    heard = ""
    while words not in heard:
        line = process.stdout.readline()
        assert line, heard
        heard += line
    return heard


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ring", "ps", "local:every=2"])
def test_a_lost_host_is_named_on_both_sides(started: Started, hosts: links.Namespaces, strategy: str) -> None:
    ranks = [by_hand(started, hosts, rank, 3, "stepping.py", HORA_STRATEGY=strategy) for rank in range(3)]
    for rank, process in enumerate(ranks):
        wait_for(process, f"steps: rank {rank} of 3")
    cut(hosts, 1)
    began = time.monotonic()
    (code, out), *away = said(ranks, 30)
    print(f"all had ended after {time.monotonic() - began:.1f} s")
    assert code == exit_codes.SECONDARY_FAILURE, out
    assert re.search(rf"stopped: .*lost rank [12] \(host host1, pid \d+\).*{NO_ANSWER}", out), out
    for code, out in away:
        assert code == exit_codes.SECONDARY_FAILURE, out
        assert re.search(rf"stopped: .*lost rank 0 \(host host0, pid \d+\).*{NO_ANSWER}", out), out
    assert time.monotonic() - began < 15


@pytest.mark.full
def test_a_server_on_another_host_ends_too_when_rank_0s_host_is_lost(started: Started, hosts: links.Namespaces) -> None:
    chosen = {"HORA_STRATEGY": "ps:mode=async", "HORA_SERVERS": "1"}
    ranks = [by_hand(started, hosts, rank, 3, "stepping.py", **chosen) for rank in range(3)]
    for rank in range(2):
        wait_for(ranks[rank], f"steps: rank {rank} of 2")
    cut(hosts, 1)
    for code, out in said(ranks[1:], 30):
        assert code == exit_codes.SECONDARY_FAILURE, out
        assert re.search(rf"stopped: .*lost rank 0 \(host host0, pid \d+\).*{NO_ANSWER}", out), out


@pytest.mark.full
def test_async_goes_on_without_the_workers_of_a_lost_host(started: Started, hosts: links.Namespaces) -> None:
    """Rank 0 with its colocated server stays; the host of another worker, which has no server, goes."""
    chosen = {"HORA_STRATEGY": "ps:mode=async", "HORA_SERVERS": "1"}
    places = {0: 0, 1: 1, 2: 0}  # worker, worker, server
    ranks = []
    for rank, number in places.items():
        said_of = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29401"}
        command = [*inside(hosts, number), sys.executable]
        said_of |= {"HORA_HOST": f"host{number}", "HORA_MAX_STEPS": "600", **chosen}
        ranks.append(started.start(command, "stepping.py", **said_of))
    for rank in range(2):
        wait_for(ranks[rank], f"steps: rank {rank} of 2")
    cut(hosts, 1)
    (code, out), (server, _) = said([ranks[0], ranks[2]])
    assert (code, server) == (0, 0), out


@pytest.mark.full
def test_another_version_on_one_host_is_named_by_all(started: Started, hosts: links.Namespaces) -> None:
    script = "import hora, torch; torch.__version__ = {!r}; hora.init(timeout_s=20)"
    ranks = [
        by_hand(started, hosts, rank, 2, "-c", script.format(version))
        for rank, version in enumerate(("2.13.0", "2.12.1"))
    ]
    for code, out in said(ranks):
        assert code == 1
        who = r"rank \d \(host host\d, pid \d+\)"
        assert re.search(rf"{who} has torch 2\.1\d\.\d, {who} torch 2\.1\d\.\d: install the same", out), out
