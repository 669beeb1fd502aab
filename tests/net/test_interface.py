"""Which address others reach us by, asked of the kernel; inside a network namespace where one has to be made up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hora.net import interface
from hora_benchmarks.bench import links

OBSTACLE = links.obstacle()
needs_namespaces = pytest.mark.skipif(bool(OBSTACLE), reason=f"no network namespaces here: {OBSTACLE}")


def test_to_ourselves_packets_leave_from_loopback() -> None:
    assert interface.route_to("127.0.0.1") == "127.0.0.1"
    assert interface.is_loopback(interface.route_to("localhost"))


def test_a_host_that_nobody_knows_has_no_route() -> None:
    with pytest.raises(OSError):
        interface.route_to("no-such-host.invalid")


def test_an_interface_is_found_by_name_by_network_and_by_address() -> None:
    assert interface.addresses()["lo"] == "127.0.0.1"
    for words in ("lo", "127.0.0.0/8", "127.0.0.1"):
        assert interface.address_on(words) == "127.0.0.1"
    assert interface.name_of("127.0.0.1") == "lo"
    assert interface.name_of("203.0.113.9") == ""


@pytest.mark.parametrize("words", ["ib7", "203.0.113.0/24", "203.0.113.9", ""])
def test_one_that_is_not_here_is_refused_with_those_that_are(words: str) -> None:
    with pytest.raises(ValueError, match=rf"no interface here is '{words}'; there are: .*lo \(127\.0\.0\.1\)"):
        interface.address_on(words)


@pytest.mark.parametrize(
    ("address", "loopback"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("a-name", False)]
)
def test_loopback_is_known_by_its_address(address: str, loopback: bool) -> None:
    assert interface.is_loopback(address) is loopback


def test_an_address_is_ours_if_we_can_listen_on_it() -> None:
    assert interface.is_ours("127.0.0.1")
    assert not interface.is_ours("203.0.113.9")


def outward_inside(host: str, *setup: str, name: str = "localhost") -> str:
    """What a process finds on that host, after these commands of `ip` there."""
    for command in setup:
        subprocess.run(["ip", "-n", host, *command.split()], check=True, timeout=20)
    code = f"from hora.net import interface; print(interface.reachable_address({name!r}))"
    done = subprocess.run(
        ["ip", "netns", "exec", host, sys.executable, "-c", code], capture_output=True, text=True, timeout=50
    )
    return done.stdout.strip() or done.stderr


@needs_namespaces
def test_a_name_that_means_loopback_is_looked_up_elsewhere() -> None:
    """As where /etc/hosts maps a machine's own name to 127.0.1.1."""
    with links.Namespaces(1, "1gbit") as hosts:
        host = hosts.host(0)
        assert outward_inside(host, name=hosts.address(0)) == "10.83.0.1", "it is ours"
        assert outward_inside(host, name="10.83.0.77") == "10.83.0.1", "it is somebody else's"
        assert outward_inside(host) == "10.83.0.1", "the only one there is"
        more = ("link add side type bridge", "address add 10.90.0.5/24 dev side", "link set side up")
        found = outward_inside(host, *more, "route add default via 10.90.0.1 dev side")
        assert found == "10.90.0.5", "the default route's"
        assert "has no address but loopback" in outward_inside(host, "link delete side", "address flush dev eth0")
