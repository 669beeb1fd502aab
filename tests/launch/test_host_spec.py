"""Hosts as users name them, and how ranks are dealt to them."""

from __future__ import annotations

import pathlib

import pytest

from hora.launch.hosts.host_spec import HostSpec, deal, parse, read_file


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [HostSpec("a")]),
        ("a:2,b:2", [HostSpec("a", 2), HostSpec("b", 2)]),
        (" a:2 , user@b ,", [HostSpec("a", 2), HostSpec("user@b")]),
        ("[fe80::1]:3,10.0.0.2", [HostSpec("fe80::1", 3), HostSpec("10.0.0.2")]),
    ],
)
def test_hosts_are_read_as_they_are_written(text: str, hosts: list[HostSpec]) -> None:
    assert list(parse(text)) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("a:2,a:2", "'a' is listed twice"),
        ("a,user@a", "'a' is listed twice"),
        ("a:0", "from 1 to"),
        ("a:x", "from 1 to"),
        ("a b", "is not a host"),
        ("-oProxyCommand=evil", "is not a host"),
        ("a;rm", "is not a host"),
        ("$(id)", "is not a host"),
    ],
)
def test_what_is_no_host_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        parse(text)


def test_a_hostfile_has_a_host_per_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all\na slots=2\nb:3 # there\n\nc\td\n")
    with pytest.raises(ValueError, match="line 5: 'd' is not understood"):
        read_file(str(path))
    path.write_text("a\tslots=2\nb:3 # there\n\nuser@c\n")
    assert read_file(str(path)) == (HostSpec("a", 2), HostSpec("b", 3), HostSpec("user@c"))
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_file(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "size", "slots"),
    [
        ("a:2,b:2", None, {"a": 2, "b": 2}),
        ("a:2,b:2", 3, {"a": 2, "b": 1}),
        ("a:2,b:2", 2, {"a": 2}),
        ("a:2,b", None, {"a": 2, "b": 1}),
        ("a,b,c", None, {"a": 1, "b": 1, "c": 1}),
        ("a,b,c", 7, {"a": 3, "b": 2, "c": 2}),
        ("a,b,c", 2, {"a": 1, "b": 1}),
    ],
)
def test_ranks_fill_the_hosts(text: str, size: int | None, slots: dict[str, int]) -> None:
    hosts, total = deal(parse(text), size)
    assert {host.name: host.slots for host in hosts} == slots and total == sum(slots.values())


def test_more_ranks_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="-n 5 is more than the hosts take, which is 4"):
        deal(parse("a:2,b:2"), 5)
