"""The machines themselves: they reach each other by ssh and by nothing else."""

from __future__ import annotations

import pathlib
import subprocess
import time

import pytest

from hora_benchmarks.bench import links

from .conftest import Make
from .machines import Machines

pytestmark = pytest.mark.timeout(60)


def test_machines_reach_each_other_and_share_neither_processes_nor_memory_nor_tmp(machines: Make) -> None:
    those = machines(3)
    for name in those.names:
        there = those.call("ssh", "-F", str(those.config), name, "hostname; touch /tmp/mine /dev/shm/mine; ps ax")
        assert there.stdout.startswith(f"machine-{name}\n"), there
        assert (
            "-D -E" in there.stdout and sum("sshd" in line and "-D" in line for line in there.stdout.split("\n")) == 1
        )
    assert those.residue() == [f"{name}:{place}/mine" for name in those.names for place in ("/tmp", "/dev/shm")]
    for name in those.names:
        those.call("rm", "/tmp/mine", "/dev/shm/mine", on=name)


def test_what_lives_on_a_machine_is_found_and_a_cut_one_is_not_reached(machines: Make) -> None:
    those = machines(2)
    asleep = subprocess.Popen(["nsenter", *those._entrance("b"), "sleep", "40"])
    deadline = time.monotonic() + 10
    while list(those.alive("b").values()) != ["sleep 40"] and time.monotonic() < deadline:  # nsenter becomes it
        time.sleep(0.01)
    assert list(those.alive("b").values()) == ["sleep 40"] and not those.alive("a")
    asleep.kill()
    asleep.wait()
    for pid in those.alive("b"):
        subprocess.run(["kill", "-9", str(pid)], check=True)
    assert not those.wait_until_nobody(limit_s=5)
    try_it = ["ssh", "-F", str(those.config), "-o", "ConnectTimeout=1", "b", "true"]
    assert those.call(*try_it).returncode == 0
    those.cut("b")
    assert those.call(*try_it).returncode == 255
    those.mend("b")
    assert those.call(*try_it).returncode == 0


def test_nothing_is_left_of_machines(machines: Make, tmp_path: pathlib.Path) -> None:
    (tmp_path / "own").mkdir()
    with pytest.raises(ZeroDivisionError), Machines(tmp_path / "own") as those:
        name = those._links.host(0).removesuffix("host0")
        roots = list(those._roots.values())
        assert len([left for left in links._namespaces() if left.startswith(name)]) == 3
        _ = 1 // 0
    assert not [left for left in links._namespaces() if left.startswith(name)]
    assert not [pid for pid in roots if pathlib.Path(f"/proc/{pid}").exists()]
