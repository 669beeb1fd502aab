"""Places the processes of a run on a Ray cluster, which assigns CPUs and GPUs; agents work as over ssh.

Each process has a bundle of one placement group, with an actor that only starts an agent there and waits for it. The
agent connects to the launcher and proves a token, which Ray passes to the actors inside of its cluster.
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
from ..context import LaunchContext
from ..process import Slot
from ..signal_pipe import STOPPING, SignalPipe
from .host_set import OpenedHosts, SignalReceived, check_signals
from .remote_host import RemoteHost
from .ssh import AGENT

PURPOSE = "agent"
RESERVE_S = 60.0
CONNECT_S = 60.0
NUMBER = struct.Struct("<I")


class AgentActor:
    """The actor: holds its bundle's CPUs and GPUs for as long as its agent lives."""

    def where(self) -> tuple[str, str]:
        """The node's address and its name in the cluster."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def serve(self, number: int, address: tuple[str, int], token: bytes) -> int:
        """Starts the agent, with a connection to the launcher as its stdin and stdout, and waits for its end."""
        sock = connect(address, token, PURPOSE)
        sock.sendall(NUMBER.pack(number))
        fd = sock.fileno()
        return subprocess.call([sys.executable, "-m", AGENT], stdin=fd, stdout=fd, start_new_session=True)


def open_by_ray(context: LaunchContext) -> OpenedHosts:
    """One agent for each process, where Ray places it. ValueError if the cluster has no space for all."""
    config, signals, cleanup, slots = context.config, context.signals, context.cleanup, context.processes.slots
    try:
        import ray
    except ImportError:
        raise ValueError("--engine ray needs Ray: pip install 'hora[ray]'") from None
    _init(ray, len(slots))
    cleanup.callback(ray.shutdown)
    group = _reserve(ray, config, slots, signals)
    cleanup.callback(ray.util.remove_placement_group, group)
    actors = [_make_actor(ray, group, number, bundle) for number, bundle in enumerate(group.bundle_specs)]
    nodes = _get(ray, [actor.where.remote() for actor in actors], signals, "the actors did not start")
    own = ray.util.get_node_ip_address()
    launcher_address = own if any(address != own for address, _ in nodes) else "127.0.0.1"
    token = handshake.new_token()
    accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    listening = socket.create_server((launcher_address, 0), backlog=128)
    listener = handshake.AuthenticatedListener(listening, token, PURPOSE, accepted.put)
    cleanup.callback(listener.close)
    address = (launcher_address, listening.getsockname()[1])
    running = [actor.serve.remote(number, address, token) for number, actor in enumerate(actors)]
    hosts = _accept(ray, accepted, running, _names(nodes), signals)
    for host, (_, node) in zip(hosts, nodes, strict=True):
        host.machine = node
        host.launcher_address = launcher_address
    return OpenedHosts(hosts, [[slot] for slot in slots], lambda host: host.lost or "its agent does not answer")


def _init(ray: Any, num_processes: int) -> None:
    """Connects to the cluster that RAY_ADDRESS names or that runs here, else starts one for this run."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ValueError(
            f"RAY_ADDRESS={address}: the hosts of the cluster cannot reach a machine outside of it; run the command on "
            "one of its nodes, e.g. with ray job submit"
        )
    before = {number: signal.getsignal(number) for number in STOPPING}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the signal pipe is not read meanwhile
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    runtime_env = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}} if os.environ.get("PYTHONPATH") else None
    try:
        try:
            ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR", runtime_env=runtime_env)
        except ConnectionError as problem:
            if address:
                raise ValueError(f"no Ray cluster answers at RAY_ADDRESS={address}: {problem}") from None
            cpus = max(num_processes, os.cpu_count() or 1)
            ray.init(num_cpus=cpus, _node_ip_address="127.0.0.1", runtime_env=runtime_env, **quiet)
    except KeyboardInterrupt:
        raise SignalReceived(signal.SIGINT) from None
    finally:
        for number, handler in before.items():  # Ray installs a SIGTERM handler of its own
            signal.signal(number, handler)


def _reserve(ray: Any, config: RunConfig, slots: list[Slot], signals: SignalPipe) -> Any:
    """A placement group for all processes. Workers get `--gpus` GPUs each; without it one, if there are enough."""
    available = ray.cluster_resources()
    gpus = config.gpus if config.gpus is not None else float(available.get("GPU", 0) >= config.size)
    bundles = []
    for role, _ in slots:
        bundles.append({"CPU": 1.0, **({"GPU": gpus} if role == "worker" and gpus else {})})
    wanted = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
    for kind, number in wanted.items():
        if number > available.get(kind, 0.0):
            raise ValueError(
                f"the run needs {number:g} {kind}s ({len(slots)} processes) and the Ray cluster has "
                f"{available.get(kind, 0.0):g}; use fewer with -n" + (" or --gpus 0" if kind == "GPU" else "")
            )
    group = ray.util.placement_group(bundles, strategy="PACK")
    try:
        _get(ray, [group.ready()], signals, "the Ray cluster is busy: it has no free resources for the run now")
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def _make_actor(ray: Any, group: Any, number: int, bundle: dict[str, float]) -> Any:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=number
    )
    options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
    return ray.remote(AgentActor).options(max_restarts=0, **options).remote()


def _get(ray: Any, waiting: list[Any], signals: SignalPipe, failure: str) -> list[Any]:
    """All results. ValueError with `failure` if they take too long; SignalReceived if a signal comes first."""
    deadline = time.monotonic() + RESERVE_S
    while True:
        check_signals(signals)
        done, left = ray.wait(waiting, num_returns=len(waiting), timeout=0.2)
        if not left:
            try:
                return list(ray.get(waiting))
            except ray.exceptions.RayError as problem:
                raise ValueError(f"{failure}: {_last_line(problem)}") from None
        if time.monotonic() > deadline:
            raise ValueError(f"{failure} ({len(done)} of {len(waiting)} after {RESERVE_S:g} s)")


def _accept(
    ray: Any, accepted: queue.SimpleQueue[socket.socket], running: list[Any], names: list[str], signals: SignalPipe
) -> list[RemoteHost]:
    """The agents' connections, in the order of their processes."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + CONNECT_S
    while len(found) < len(running):
        check_signals(signals)
        ended, _ = ray.wait([each for number, each in enumerate(running) if number not in found], timeout=0)
        if ended:
            try:
                why = f"its agent ended with code {ray.get(ended[0])}"
            except ray.exceptions.RayError as problem:
                why = _last_line(problem)
            raise ValueError(f"host {names[running.index(ended[0])]}: {why}")
        if time.monotonic() > deadline:
            missing = ", ".join(sorted({name for number, name in enumerate(names) if number not in found}))
            raise ValueError(
                f"no agent connected from {missing} in {CONNECT_S:g} s; can these hosts reach this machine?"
            )
        with contextlib.suppress(queue.Empty):
            sock = accepted.get(timeout=0.1)
            (number,) = NUMBER.unpack(recv_exactly(sock, NUMBER.size, time.monotonic() + 2.0))
            found[number] = sock
    return [_remote_host(names[number], found[number]) for number in range(len(running))]


def _remote_host(name: str, sock: socket.socket) -> RemoteHost:
    def end(timeout_s: float) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()

    return RemoteHost(name, os.dup(sock.fileno()), os.dup(sock.fileno()), -1, end)


def _names(nodes: list[tuple[str, str]]) -> list[str]:
    """The hosts' names: their address, and where several nodes share one also the node's own name."""
    counts = Counter(address for address, _ in set(nodes))
    return [address if counts[address] == 1 else f"{address}/{node[:6]}" for address, node in nodes]


def _last_line(problem: BaseException) -> str:
    return str(problem).strip().splitlines()[-1] if str(problem).strip() else type(problem).__name__
