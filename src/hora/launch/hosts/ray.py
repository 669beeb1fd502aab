"""Ray: the processes of a run placed on a Ray cluster, which hands out CPUs and GPUs; agents and all else as over ssh.

One bundle of a placement group for each seat, and an actor in each bundle that does nothing but start an agent there
and wait for it. The agent's line is a connection of its own to the launcher, opened by the token, which Ray carries to
the actors inside of its cluster.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from hora.net import handshake
from hora.net.framing import recv_exactly
from hora.net.handshake import connect

from ..config import RunConfig
from ..process_set import Seat
from ..signal_pipe import STOPPING, SignalPipe
from .host_set import SignalReceived
from .multi_host import OpenedHosts
from .remote_host import RemoteHost
from .ssh import AGENT

PURPOSE = "agent"
PLACE_S = 60.0
MEET_S = 60.0
NUMBER = struct.Struct("<I")


class AgentActor:
    """The actor: holds its bundle's CPUs and GPUs for as long as its agent lives."""

    def where(self) -> tuple[str, str]:
        """The node's address and its name in the cluster."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def serve(self, number: int, address: tuple[str, int], token: bytes) -> int:
        """Starts the agent, with a line to the launcher as its stdin and stdout, and waits for its end."""
        sock = connect(address, token, PURPOSE)
        sock.sendall(NUMBER.pack(number))
        line = sock.fileno()
        return subprocess.call([sys.executable, "-m", AGENT], stdin=line, stdout=line, start_new_session=True)


def by_ray(config: RunConfig, wake: SignalPipe, undo: contextlib.ExitStack) -> OpenedHosts:
    """A site for each seat, wherever Ray has put it. ValueError if the cluster has no room for all."""
    try:
        import ray
    except ImportError:
        raise ValueError("--engine ray needs Ray: pip install 'hora[ray]'") from None
    servers = config.servers if isinstance(config.servers, int) else 0
    seats: list[Seat] = [("worker", rank) for rank in range(config.size)]
    seats += [("server", number) for number in range(servers)]
    seats += [("predictor", 0)] if config.serve is not None else []
    _enter(ray, len(seats))
    undo.callback(ray.shutdown)
    group = _reserve(ray, config, seats, wake)
    undo.callback(ray.util.remove_placement_group, group)
    posts = [_post(ray, group, number, bundle) for number, bundle in enumerate(group.bundle_specs)]
    places = _get(ray, [post.where.remote() for post in posts], wake, "the actors did not start")
    own = ray.util.get_node_ip_address()
    road = own if any(address != own for address, _ in places) else "127.0.0.1"
    token = handshake.new_token()
    lines: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    listening = socket.create_server((road, 0), backlog=128)
    listener = handshake.AuthenticatedListener(listening, token, PURPOSE, lines.put)
    undo.callback(listener.close)
    address = (road, listening.getsockname()[1])
    running = [post.serve.remote(number, address, token) for number, post in enumerate(posts)]
    sites = _meet(ray, lines, running, _names(places), wake)
    for site, (_, node) in zip(sites, places, strict=True):
        site.machine = node
        site.road = road
    return OpenedHosts(sites, [[seat] for seat in seats], lambda site: site.lost or "its agent does not answer")


def _enter(ray: Any, num_seats: int) -> None:
    """The cluster that RAY_ADDRESS names or that runs here, else one of our own for as long as the run lasts."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ValueError(
            f"RAY_ADDRESS={address}: from outside of a cluster its hosts do not reach this machine; run the command on "
            "one of its nodes, e.g. with ray job submit"
        )
    before = {number: signal.getsignal(number) for number in STOPPING}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # nobody reads our pipe meanwhile
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    here = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}} if os.environ.get("PYTHONPATH") else None
    try:
        try:
            ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR", runtime_env=here)
        except ConnectionError as problem:
            if address:
                raise ValueError(f"no Ray cluster answers at RAY_ADDRESS={address}: {problem}") from None
            cpus = max(num_seats, os.cpu_count() or 1)
            ray.init(num_cpus=cpus, _node_ip_address="127.0.0.1", runtime_env=here, **quiet)
    except KeyboardInterrupt:
        raise SignalReceived(signal.SIGINT) from None
    finally:
        for number, handler in before.items():  # Ray puts a SIGTERM of its own there
            signal.signal(number, handler)


def _reserve(ray: Any, config: RunConfig, seats: list[Seat], wake: SignalPipe) -> Any:
    """A placement group with room for all seats; GPUs for workers, as many as asked for, or one if there are enough."""
    there = ray.cluster_resources()
    gpus = config.gpus if config.gpus is not None else float(there.get("GPU", 0) >= config.size)
    bundles = []
    for role, _ in seats:
        bundles.append({"CPU": 1.0, **({"GPU": gpus} if role == "worker" and gpus else {})})
    wanted = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
    for kind, number in wanted.items():
        if number > there.get(kind, 0.0):
            raise ValueError(
                f"the run needs {number:g} {kind}s ({len(seats)} processes) and the Ray cluster has "
                f"{there.get(kind, 0.0):g}; fewer with -n" + (" or --gpus 0" if kind == "GPU" else "")
            )
    group = ray.util.placement_group(bundles, strategy="PACK")
    try:
        _get(ray, [group.ready()], wake, "the Ray cluster is busy: it has no room for the run now")
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def _post(ray: Any, group: Any, number: int, bundle: dict[str, float]) -> Any:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=number
    )
    options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
    return ray.remote(AgentActor).options(max_restarts=0, **options).remote()


def _get(ray: Any, waiting: list[Any], wake: SignalPipe, sorry: str) -> list[Any]:
    """All results. ValueError with `sorry` if they take too long; Stopped if a signal comes first."""
    deadline = time.monotonic() + PLACE_S
    while True:
        _check(wake)
        done, left = ray.wait(waiting, num_returns=len(waiting), timeout=0.2)
        if not left:
            try:
                return list(ray.get(waiting))
            except ray.exceptions.RayError as problem:
                raise ValueError(f"{sorry}: {_last_line(problem)}") from None
        if time.monotonic() > deadline:
            raise ValueError(f"{sorry} ({len(done)} of {len(waiting)} after {PLACE_S:g} s)")


def _check(wake: SignalPipe) -> None:
    for number in wake.read():
        if number in STOPPING:
            raise SignalReceived(number)


def _meet(
    ray: Any, lines: queue.SimpleQueue[socket.socket], running: list[Any], names: list[str], wake: SignalPipe
) -> list[RemoteHost]:
    """The agents' lines, as sites in the order of their seats."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + MEET_S
    while len(found) < len(running):
        _check(wake)
        ended, _ = ray.wait([each for number, each in enumerate(running) if number not in found], timeout=0)
        if ended:
            try:
                said = f"its agent ended with code {ray.get(ended[0])}"
            except ray.exceptions.RayError as problem:
                said = _last_line(problem)
            raise ValueError(f"host {names[running.index(ended[0])]}: {said}")
        if time.monotonic() > deadline:
            missing = ", ".join(sorted({name for number, name in enumerate(names) if number not in found}))
            raise ValueError(f"no agent came from {missing} in {MEET_S:g} s; can these hosts reach this machine?")
        with contextlib.suppress(queue.Empty):
            sock = lines.get(timeout=0.1)
            (number,) = NUMBER.unpack(recv_exactly(sock, NUMBER.size, time.monotonic() + 2.0))
            found[number] = sock
    return [_site(names[number], found[number]) for number in range(len(running))]


def _site(name: str, sock: socket.socket) -> RemoteHost:
    back, there = os.dup(sock.fileno()), os.dup(sock.fileno())

    def end(patience_s: float) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()

    return RemoteHost(name, back, there, -1, end)


def _names(places: list[tuple[str, str]]) -> list[str]:
    """What hosts are called: by their address, and where several nodes share it also by the node's own name."""
    nodes = Counter(address for address, _ in set(places))
    return [address if nodes[address] == 1 else f"{address}/{node[:6]}" for address, node in places]


def _last_line(problem: BaseException) -> str:
    return str(problem).strip().splitlines()[-1] if str(problem).strip() else type(problem).__name__
