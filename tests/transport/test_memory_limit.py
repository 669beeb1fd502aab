"""Too little memory: noticed before it is taken, said once, and the ranks go on over TCP together."""

from __future__ import annotations

import logging
import os
import pathlib
import threading

import pytest
import torch

from hora.collectives import Group
from hora.errors import OutOfMemory
from hora.net.fd_passing import FdPassing
from hora.transport import futex, memory_limit
from ranks import failures, run

needs_shm = pytest.mark.skipif(not futex.AVAILABLE, reason="shared memory is for Linux on x86-64")

MIB = 1 << 20


class Root:
    """A root directory with the files that the kernel would show."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def write(self, name: str, text: object) -> Root:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return self

    def meminfo(self, available_bytes: int) -> Root:
        lines = ("MemTotal: 99999999 kB", "MemFree: 1 kB", f"MemAvailable:    {available_bytes >> 10} kB")
        return self.write("proc/meminfo", "\n".join(lines))

    def v2(self, group: str, limit: object, usage: int) -> Root:
        folder = f"sys/fs/cgroup/{group}".rstrip("/")
        return self.write(f"{folder}/memory.max", limit).write(f"{folder}/memory.current", usage)

    def v1(self, group: str, limit: int, usage: int) -> Root:
        folder = f"sys/fs/cgroup/memory/{group}".rstrip("/")
        return self.write(f"{folder}/memory.limit_in_bytes", limit).write(f"{folder}/memory.usage_in_bytes", usage)

    @property
    def available(self) -> int:
        return memory_limit.available_bytes(str(self.path))


@pytest.fixture
def root(tmp_path: pathlib.Path) -> Root:
    return Root(tmp_path).meminfo(1000 * MIB)


# -- how much is left --------------------------------------------------------------------------------------------------


def test_without_a_cgroup_the_hosts_available_memory_counts(root: Root) -> None:
    assert root.available == 1000 * MIB


def test_a_limit_of_version_2_counts_less_what_is_used(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/job").v2("job", 300 * MIB, 100 * MIB)
    assert root.available == 200 * MIB


def test_a_limit_above_what_the_host_has_does_not_add_memory(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/job").v2("job", 9000 * MIB, 0)
    assert root.available == 1000 * MIB


def test_max_is_no_limit(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/job").v2("job", "max", 100 * MIB)
    assert root.available == 1000 * MIB


def test_the_tightest_of_nested_limits_counts(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/a/b/c")
    root.v2("a/b/c", "max", 10 * MIB).v2("a/b", 500 * MIB, 50 * MIB).v2("a", 400 * MIB, 350 * MIB)
    assert root.available == 50 * MIB


def test_a_limit_already_exceeded_leaves_nothing(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/job").v2("job", 100 * MIB, 120 * MIB)
    assert root.available == 0


def test_inside_a_container_the_limit_lies_at_the_root(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/").v2("", 64 * MIB, 4 * MIB)
    assert root.available == 60 * MIB
    root.write("proc/self/cgroup", "0::/../../elsewhere")
    assert root.available == 60 * MIB


def test_a_limit_of_version_1_counts(root: Root) -> None:
    root.write("proc/self/cgroup", "12:cpu,cpuacct:/x\n7:memory:/docker/abc\n1:name=systemd:/y")
    root.v1("docker/abc", 256 * MIB, 56 * MIB)
    assert root.available == 200 * MIB


def test_a_path_that_only_the_host_has_leads_to_the_limit_above_it(root: Root) -> None:
    root.write("proc/self/cgroup", "7:memory:/docker/abc").v1("", 128 * MIB, 28 * MIB)
    assert root.available == 100 * MIB


def test_the_unlimited_of_version_1_is_no_limit(root: Root) -> None:
    root.write("proc/self/cgroup", "7:memory:/x").v1("x", 9223372036854771712, 5 * MIB)
    assert root.available == 1000 * MIB


def test_files_that_the_kernel_can_drop_do_not_count_as_used(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/job").v2("job", 300 * MIB, 290 * MIB)
    root.write("sys/fs/cgroup/job/memory.stat", f"anon 1\nfile 2\ninactive_file {200 * MIB}\nactive_file 3")
    assert root.available == 210 * MIB
    root.write("proc/self/cgroup", "7:memory:/x").v1("x", 300 * MIB, 290 * MIB)
    root.write("sys/fs/cgroup/memory/x/memory.stat", f"inactive_file 1\ntotal_inactive_file {100 * MIB}")
    assert root.available == 110 * MIB


@pytest.mark.parametrize("text", ["", "garbage", "0::", "::::", "7:memory"])
def test_a_file_that_makes_no_sense_is_passed_over(root: Root, text: str) -> None:
    root.write("proc/self/cgroup", text)
    assert root.available == 1000 * MIB


def test_where_nothing_is_told_nothing_is_forbidden(tmp_path: pathlib.Path) -> None:
    assert memory_limit.available_bytes(str(tmp_path)) > 1 << 60


def test_this_machine_tells(tmp_path: pathlib.Path) -> None:
    if not os.path.exists("/proc/meminfo"):
        pytest.skip("no /proc here")
    assert 0 <= memory_limit.available_bytes() < 1 << 50


def test_a_shortage_says_how_much_is_wanted_and_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: 100 * MIB)
    assert memory_limit.shortage(30 * MIB) is None
    assert memory_limit.shortage(36 * MIB) is None  # 64 are kept free
    message = memory_limit.shortage(37 * MIB)
    assert message is not None and "37 MiB" in message and "100 MiB" in message and "64 MiB" in message


# -- what the ranks do about it ----------------------------------------------------------------------------------------


def reduces(group: Group) -> str:
    """A few reductions with exact results; tells what they ran over."""
    total = group.size * (group.size + 1) // 2
    for numel in (1, 1000, 100_000):
        tensor = torch.full((numel,), float(group.rank + 1))
        assert bool((group.all_reduce(tensor) == total).all())
    return group.transport.kind


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@needs_shm
def test_ranks_of_one_host_share_memory_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert run(3, reduces, "auto") == ["shm"] * 3
    assert warnings_of(caplog) == []


@needs_shm
def test_too_little_memory_is_one_warning_and_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: 65 * MIB)
    assert run(3, reduces, "auto") == ["tcp"] * 3
    (warning,) = warnings_of(caplog)
    assert "use tcp" in warning and "65 MiB left" in warning and "rank 0" in warning


@needs_shm
@pytest.mark.parametrize("problem", [OSError(38, "Function not implemented"), OSError(24, "Too many open files")])
def test_a_refused_memfd_is_one_warning_and_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: OSError
) -> None:
    def refuse(name: str, flags: int = 0) -> int:
        raise problem

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert run(3, reduces, "auto") == ["tcp"] * 3
    (warning,) = warnings_of(caplog)
    assert "use tcp" in warning and str(problem.strerror) in warning


@needs_shm
def test_no_memory_for_one_of_the_later_mappings_is_one_warning_and_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The links fit, the staging slots do not."""
    left = [1 << 40]
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: left.pop() if left else 0)
    assert run(2, reduces, "auto") == ["tcp"] * 2
    assert len(warnings_of(caplog)) == 1


@needs_shm
@pytest.mark.parametrize("failing", [1, 3, 4])
def test_when_one_rank_cannot_map_all_fall_back_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    """Of three ranks two fetch the links, then the staging slots: one fetch of all these fails."""
    count, order, fetch = [0], threading.Lock(), FdPassing.fetch

    def some(self: FdPassing, address: str, key: str, timeout_s: float = 30.0) -> int:
        with order:
            count[0] += 1
            if count[0] == failing:
                raise OSError(24, "Too many open files")
        return fetch(self, address, key, timeout_s)

    monkeypatch.setattr(FdPassing, "fetch", some)
    before = len(os.listdir("/proc/self/fd"))
    assert run(3, reduces, "auto") == ["tcp"] * 3
    (warning,) = warnings_of(caplog)
    assert "Too many open files" in warning and ("rank 1" in warning or "rank 2" in warning)
    assert len(os.listdir("/proc/self/fd")) <= before + 12


@needs_shm
def test_shared_memory_that_was_asked_for_and_refused_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: 0)
    errors = failures(3, reduces, "shm")
    assert [type(error) for error in errors] == [OutOfMemory] * 3
    assert all("0 MiB left" in str(error) and "rank 0" in str(error) for error in errors)


@needs_shm
def test_a_buffer_that_does_not_fit_is_refused_on_every_rank_and_the_group_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(group: Group) -> None:
        reduces(group)
        group.barrier()
        group.buffer("large", 1 << 50, torch.float32)

    errors = failures(3, work, "shm")
    assert [type(error) for error in errors] == [OutOfMemory] * 3
