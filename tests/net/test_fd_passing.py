"""Descriptors between processes of one host, and the memory they stand for."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from hora.errors import HoraError, OutOfMemory, Unauthorized
from hora.net.fd_passing import FdPassing
from hora.transport import futex
from hora.transport.arena import PAGE, Arena

pytestmark = pytest.mark.skipif(not futex.AVAILABLE, reason="shared memory is for Linux on x86-64")

TOKEN = b"p" * 32


@pytest.fixture
def windows() -> Iterator[tuple[FdPassing, FdPassing]]:
    ours, theirs = FdPassing(TOKEN), FdPassing(TOKEN)
    yield ours, theirs
    ours.close()
    theirs.close()


def memfd(num_bytes: int, seals: int | None = None) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    if seals is not None:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


# -- passing -----------------------------------------------------------------------------------------------------------


def test_a_descriptor_arrives_and_shows_the_same_memory(windows: tuple[FdPassing, FdPassing]) -> None:
    ours, theirs = windows
    descriptor = memfd(PAGE)
    theirs.offer("key", descriptor)
    fetched = ours.fetch(theirs.address, "key")
    assert fetched != descriptor
    with mmap.mmap(fetched, PAGE) as mine, mmap.mmap(descriptor, PAGE) as other:
        other[:5] = b"hello"
        assert mine[:5] == b"hello"
    assert not os.get_inheritable(fetched)
    os.close(fetched)
    os.close(descriptor)


def test_a_fetch_waits_until_the_descriptor_is_offered(windows: tuple[FdPassing, FdPassing]) -> None:
    ours, theirs = windows
    descriptor = memfd(PAGE)
    threading.Timer(0.15, theirs.offer, ("late", descriptor)).start()
    os.close(ours.fetch(theirs.address, "late", 10.0))
    os.close(descriptor)


def test_a_refusal_carries_the_reason_whole_or_cut(windows: tuple[FdPassing, FdPassing]) -> None:
    ours, theirs = windows
    theirs.refuse("key", "only 3 MiB left")
    with pytest.raises(HoraError, match=r"^only 3 MiB left$"):
        ours.fetch(theirs.address, "key")
    theirs.refuse("long", "é" * 1000)
    with pytest.raises(HoraError, match=r"^é{250}$"):
        ours.fetch(theirs.address, "long")


def test_a_withdrawn_descriptor_is_no_longer_given(windows: tuple[FdPassing, FdPassing]) -> None:
    ours, theirs = windows
    descriptor = memfd(PAGE)
    theirs.offer("key", descriptor)
    theirs.withdraw("key")
    with pytest.raises(TimeoutError):
        ours.fetch(theirs.address, "key", 0.2)
    os.close(descriptor)


def test_a_wrong_token_is_refused(windows: tuple[FdPassing, FdPassing]) -> None:
    ours, _ = windows
    stranger = FdPassing(b"x" * 32)
    stranger.refuse("key", "never said")
    try:
        with pytest.raises(Unauthorized):
            ours.fetch(stranger.address, "key")
        with pytest.raises(Unauthorized):
            stranger.fetch(ours.address, "key")
    finally:
        stranger.close()


def test_a_name_that_nobody_has_is_another_host(windows: tuple[FdPassing, FdPassing]) -> None:
    with pytest.raises(ConnectionError):
        windows[0].fetch("hora-nobody", "key")


def test_another_network_namespace_is_another_host(windows: tuple[FdPassing, FdPassing]) -> None:
    """It shares hostname, boot id and /dev/shm with us, and still no descriptor can be passed."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    commands = (["unshare", "-n"], ["unshare", "-rn"])
    allowed = [
        command for command in commands if subprocess.run([*command, "true"], capture_output=True).returncode == 0
    ]
    if not allowed:
        pytest.skip("this machine does not let us make a network namespace")
    script = (
        "import sys; from hora.net.fd_passing import FdPassing\n"
        f"window = FdPassing({TOKEN!r})\n"
        "try: window.connect(sys.argv[1], 5.0).close(); print('same host')\n"
        "except ConnectionError: print('another host')"
    )
    for command, host in (([], "same host"), (allowed[0], "another host")):
        found = subprocess.run(
            [*command, sys.executable, "-c", script, windows[0].address], capture_output=True, text=True, timeout=50
        )
        assert found.stdout.strip() == host, found.stderr


def test_a_window_that_closes_ends_the_wait_of_those_who_fetch(windows: tuple[FdPassing, FdPassing]) -> None:
    ours, theirs = windows
    threading.Timer(0.15, theirs.close).start()
    with pytest.raises(HoraError, match="closed before it offered anything"):
        ours.fetch(theirs.address, "never", 20.0)
    with pytest.raises(ConnectionError):
        ours.connect(theirs.address, 1.0)


def test_one_that_asks_for_nothing_costs_no_one_else_anything(windows: tuple[FdPassing, FdPassing]) -> None:
    ours, theirs = windows
    theirs.refuse("key", "no")
    mute = [ours.connect(theirs.address) for _ in range(80)]  # more than may shake hands at once
    with pytest.raises(HoraError, match=r"^no$"):
        ours.fetch(theirs.address, "key")
    for sock in mute:
        sock.close()
    with ours.connect(theirs.address) as sock:
        sock.sendall(b"\x02\xff\xff")  # a name that is no text
        sock.settimeout(5.0)
        assert sock.recv(1) == b""


def test_a_refused_fetch_leaves_no_descriptor_behind(windows: tuple[FdPassing, FdPassing]) -> None:
    ours, theirs = windows
    theirs.refuse("key", "no")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(HoraError):
            ours.fetch(theirs.address, "key")
        with pytest.raises(ConnectionError):
            ours.fetch("hora-nobody", "key")
    deadline = time.monotonic() + 5.0
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


# -- the memory --------------------------------------------------------------------------------------------------------


def test_an_arena_takes_memory_that_can_no_longer_shrink() -> None:
    descriptor = Arena.create(3 * PAGE)
    arena = Arena(descriptor, 3 * PAGE)
    for length in (PAGE, 4 * PAGE):
        with pytest.raises(OSError):
            os.ftruncate(descriptor, length)
    with pytest.raises(OSError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)
    arena.tensor(PAGE, 4, torch.float32).fill_(2.0)
    assert Arena.tensor(arena, PAGE, 4, torch.float32).tolist() == [2.0] * 4


def test_an_arena_refuses_memory_that_is_not_sealed() -> None:
    for seals in (None, fcntl.F_SEAL_GROW):
        descriptor = memfd(PAGE, seals)
        with pytest.raises(HoraError, match="not sealed"):
            Arena(descriptor, PAGE)
        os.close(descriptor)


def test_an_arena_refuses_memory_that_is_too_small() -> None:
    descriptor = Arena.create(PAGE)
    with pytest.raises(HoraError, match="too small"):
        Arena(descriptor, 2 * PAGE)
    os.close(descriptor)


def test_an_arena_refuses_what_is_no_memfd(tmp_path: object) -> None:
    with open(f"{tmp_path}/file", "w+b") as file, pytest.raises((HoraError, OSError)):
        file.truncate(PAGE)
        Arena(file.fileno(), PAGE)
    left, right = socket.socketpair()
    with left, right, pytest.raises((HoraError, OSError)):
        Arena(left.fileno(), PAGE)


def test_memory_larger_than_the_host_is_refused_before_it_is_taken() -> None:
    with pytest.raises(OutOfMemory, match="MiB"):
        Arena.create(1 << 50)
