"""Multi-host set-up: connects the agents of all hosts, checks them, and opens a coordinator that all can reach.

greet       versions, folder, script, clocks: a host that differs is named before any rank starts
route       each host finds its own address on the route to the coordinator, and reaches it
probe       each host reaches every other
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import hora
from hora.net import interface

from ...rendezvous.environment import NAMES
from ...runs.run_directory import versions
from ...terminal.format import sanitize
from .. import messages
from ..config import LOOPBACK, RunConfig
from ..context import LaunchContext, OpenedBackend
from ..forkserver.client import preloaded
from ..process import Slot
from ..process_set import identity
from . import ssh
from .host_set import HostSet, OpenedHosts, close_all
from .remote_host import RemoteHost

if TYPE_CHECKING:
    from hora.coordinator import CoordinatorService

OPEN_S = 40.0
ROUTE_S = 20.0
PROBE_S = 30.0
MAX_CLOCK_DIFFERENCE_S = 1.0
"""A larger difference is logged: time stamps and traces of the hosts will not match."""

WILDCARDS = ("0.0.0.0", "::")  # addresses to listen at, not to connect to

FORWARDED = (
    "PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_*", "MKL_*", "CUDA_*", "NCCL_*", "GLOO_*", "TORCH_*",
    "HORA_*",
)  # fmt: skip
NOT_FORWARDED = (*NAMES, "HORA_SSH", "HORA_DASHBOARD", "HORA_HOST", "HORA_TOKEN_FILE", "HORA_FORKSERVER")


def connect(context: LaunchContext) -> OpenedBackend:
    """Connects the hosts by ssh, or those that Ray provides, so that all reach the coordinator and each other. Blocks,
    bounded.

    ValueError says what is wrong with a host. SignalReceived if a stopping signal comes first.
    """
    config = context.config
    if config.engine is not None:
        from .ray import open_by_ray

        opened = open_by_ray(context)
    else:
        opened = open_by_ssh(config)
    hosts = HostSet(opened.hosts, context.signals, context.screen.log)
    context.cleanup.callback(hosts.close)
    notes = _greet(hosts, opened, context)
    coordinator = _open_coordinator(context, hosts)
    notes += _route_and_probe(hosts, config)
    notes += _predictor_note(config, opened)
    _assign(hosts, opened.slots, context)
    return OpenedBackend(hosts, coordinator, hosts.start, notes)


def open_by_ssh(config: RunConfig) -> OpenedHosts:
    """One agent per host of `config.hosts`."""
    hosts: list[RemoteHost] = []
    try:
        for spec in config.hosts:
            hosts.append(ssh.open_host(spec, config.ssh, config.python))
    except ValueError:
        close_all(hosts)
        raise
    specs = {host.name: spec for host, spec in zip(hosts, config.hosts, strict=True)}
    python = config.python or sys.executable

    def explain(host: RemoteHost) -> str:
        return ssh.explain(specs[host.name], host.error_lines, python, config.ssh)

    return OpenedHosts(hosts, place(config), explain)


def place(config: RunConfig) -> list[list[Slot]]:
    """The processes of each host: workers fill the hosts in order, servers are dealt from the last host on, the
    predictor is on the first."""
    slots: list[list[Slot]] = []
    first = 0
    for spec in config.hosts:
        assert spec.slots is not None
        slots.append([("worker", rank) for rank in range(first, first + spec.slots)])
        first += spec.slots
    for number in range(config.servers if isinstance(config.servers, int) else 0):
        slots[-1 - number % len(slots)].append(("server", number))
    if config.serve is not None:
        slots[0].append(("predictor", 0))
    return slots


# -- greet -------------------------------------------------------------------------------------------------------------


def _greet(hosts: HostSet, opened: OpenedHosts, context: LaunchContext) -> list[str]:
    """Gets the facts of every host. ValueError if one cannot run this; a note for what is merely odd."""
    config, token = context.config, context.token
    env, modules = forwarded(config), list(preloaded(config))
    processes: Counter[str] = Counter()  # by machine
    for number, (host, slots) in enumerate(zip(hosts.all, opened.slots, strict=True)):
        processes[host.machine] += len(slots)
        host.run_id = f"{context.run_id}.{number}"  # its own: an agent that ends kills all that carry it

    def hello(host: RemoteHost) -> messages.AgentHello:
        script = os.getcwd(), config.command[0], config.module
        share = processes[host.machine]
        return messages.AgentHello(messages.PROTOCOL, host.name, host.run_id, token, *script, env, share, modules)

    began_ns = time.time_ns()
    facts = hosts.ask(hello, messages.HostFacts, OPEN_S, opened.explain)
    ended_ns = time.time_ns()
    names = [host.name for host in hosts.all]
    check_versions(names, facts)
    if config.hosts:
        check_distinct(names, facts)
    for host, each in zip(hosts.all, facts, strict=True):
        host.facts = each
    return clock_notes(names, [each.time_ns for each in facts], began_ns, ended_ns)


def forwarded(config: RunConfig) -> dict[str, str]:
    """The variables for the hosts: search paths, settings of libraries, and what the user named."""
    patterns = (*FORWARDED, *config.forward)
    env = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) and name not in NOT_FORWARDED
    }
    if config.engine is not None:
        env.pop("CUDA_VISIBLE_DEVICES", None)  # the engine assigns the GPUs
    return {**env, **dict(config.env)}


def check_versions(names: Sequence[str], facts: Sequence[messages.HostFacts]) -> None:
    """ValueError names a host where something is missing, or where a version differs from this machine's."""
    for name, each in zip(names, facts, strict=True):
        if each.problem:
            raise ValueError(f"host {name}: {sanitize(each.problem, 500)}")
    ours = {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": versions()["torch"] or "",
        "Hora": hora.__version__,
    }
    for name, each in zip(names, facts, strict=True):
        theirs = {"Python": ".".join(each.python.split(".")[:2]), "torch": each.torch, "Hora": each.hora}
        for what, version in theirs.items():
            if not version:
                raise ValueError(f"host {name}: its {each.executable} has no {what}; install {what} {ours[what]} there")
            if version != ours[what]:
                raise ValueError(
                    f"host {name} has {what} {version}, this machine {ours[what]}: install the same on all hosts, or "
                    "choose another interpreter with --python PATH"
                )


def check_distinct(names: Sequence[str], facts: Sequence[messages.HostFacts]) -> None:
    """ValueError for one machine under two names: its GPUs and cores would be assigned twice."""
    machines: dict[str, str] = {}
    for name, each in zip(names, facts, strict=True):
        other = machines.setdefault(each.machine or name, name)
        if other != name:
            raise ValueError(f"hosts {other} and {name} are the same machine: name it once, with all its ranks")


def clock_notes(names: Sequence[str], times_ns: Sequence[int], began_ns: int, ended_ns: int) -> list[str]:
    """A line for each host whose clock was outside of the interval in which it answered."""
    lines = []
    for name, at_ns in zip(names, times_ns, strict=True):
        ahead_s = max(at_ns - ended_ns, 0) / 1e9 - max(began_ns - at_ns, 0) / 1e9
        if abs(ahead_s) > MAX_CLOCK_DIFFERENCE_S:
            direction = "ahead of" if ahead_s > 0 else "behind"
            lines.append(
                f"the clock of host {name} is {abs(ahead_s):.1f} s {direction} this machine's, so its times in logs "
                "and traces will be too; is NTP running there?"
            )
    return lines


# -- route and probe ---------------------------------------------------------------------------------------------------


def _open_coordinator(context: LaunchContext, hosts: HostSet) -> CoordinatorService:
    """The coordinator, listening at every address by which a host reaches this machine, and at no other."""
    config = context.config
    for host in hosts.all:
        host.launcher_address = _launcher_address(config, host)
    addresses = list(dict.fromkeys(host.launcher_address for host in hosts.all if host.launcher_address))
    if config.bind in WILDCARDS:
        coordinator = context.open_coordinator(config.bind)
        loopback = LOOPBACK if config.bind == "0.0.0.0" else "::1"
        ports = dict.fromkeys([*addresses, loopback], coordinator.address[1])
    else:
        coordinator = context.open_coordinator(addresses[0] if addresses else config.bind)
        ports = {coordinator.address[0]: coordinator.address[1]}
        try:
            ports |= {address: coordinator.listen(address) for address in addresses[1:]}
        except OSError as problem:
            raise ValueError(f"cannot listen on {', '.join(addresses[1:])}: {problem.strerror or problem}") from None
    for host in hosts.all:
        address = host.launcher_address or next(iter(ports))
        host.coordinator_address = (address, ports[address])
    return coordinator


def _launcher_address(config: RunConfig, host: RemoteHost) -> str:
    """This machine's address as that host should use it; empty where any will do."""
    if host.launcher_address:  # known since the connection was opened
        return host.launcher_address
    if config.bind not in (LOOPBACK, *WILDCARDS):
        return config.bind
    if config.interface:
        with contextlib.suppress(ValueError):  # this machine may be outside of the network between the hosts
            return interface.address_on(config.interface)
    if not host.facts.server:
        return ""
    if host.facts.client in interface.addresses().values():
        return host.facts.client
    try:
        return interface.route_to(host.facts.server)
    except OSError as problem:
        raise ValueError(
            f"host {host.name} is reached at {host.facts.server}, and has no route back to this machine: {problem}; "
            "choose the network with --interface"
        ) from None


def _route_and_probe(hosts: HostSet, config: RunConfig) -> list[str]:
    """Every host reaches the coordinator and every other host. Returns the line that names the network."""

    def route(host: RemoteHost) -> messages.RouteRequest:
        return messages.RouteRequest(*host.coordinator_address, config.interface or "")

    def explain(host: RemoteHost) -> str:
        return host.lost or "its agent does not answer"

    for host, routed in zip(hosts.all, hosts.ask(route, messages.RouteReply, ROUTE_S, explain), strict=True):
        if routed.problem:
            raise ValueError(
                f"host {host.name} cannot reach this machine: {routed.problem}; choose another network with "
                "--interface NAME or NETWORK"
            )
        host.address, host.interface, host.port = routed.address, routed.interface, routed.port
    peers = [messages.ProbedPeer(host.name, host.address, host.port) for host in hosts.all]
    replies = hosts.ask(lambda host: messages.ProbeRequest(peers), messages.ProbeReply, PROBE_S, explain)
    slowest_s = 0.0
    for host, probed in zip(hosts.all, replies, strict=True):
        if len(probed.problems) != len(peers) or len(probed.seconds) != len(peers):
            raise ValueError(f"host {host.name}: its agent's reply does not match the request")
        for peer, problem, seconds in zip(peers, probed.problems, probed.seconds, strict=True):
            if problem:
                raise ValueError(
                    f"host {host.name} cannot reach host {peer.name} at {peer.host}: {problem}; choose another network "
                    "with --interface NAME or NETWORK"
                )
            slowest_s = max(slowest_s, seconds)
    machines = list({host.machine: host for host in hosts.all}.values())
    if len(machines) == 1:
        return []
    networks = ", ".join(dict.fromkeys(host.interface or "an interface without a name" for host in machines))
    some = ", ".join(f"{host.name} {host.address}" for host in machines[:4]) + (", …" if len(machines) > 4 else "")
    return [
        f"{len(machines)} hosts over {networks} ({some}): all reach each other, in {slowest_s * 1e3:.1f} ms at most"
    ]


def _predictor_note(config: RunConfig, opened: OpenedHosts) -> list[str]:
    """The address that a predictor prints is its own host's."""
    there = [host for host, slots in zip(opened.hosts, opened.slots, strict=True) if ("predictor", 0) in slots]
    if config.serve is None or not there or not there[0].facts.server:
        return []
    only_there = interface.is_loopback(config.serve.host)
    way = ", for clients on that host only; --serve 0.0.0.0:PORT allows others" if only_there else ""
    return [f"predictions are answered on host {there[0].name}{way}"]


def _assign(hosts: HostSet, slots: Sequence[Sequence[Slot]], context: LaunchContext) -> None:
    """Gives each process its host and its local rank there."""
    config = context.config
    machine_workers: dict[str, list[Slot]] = {}
    for host, those in zip(hosts.all, slots, strict=True):
        machine_workers.setdefault(host.machine, []).extend(slot for slot in those if slot[0] == "worker")
    for host, those in zip(hosts.all, slots, strict=True):
        local = sorted(machine_workers[host.machine])
        for slot in those:
            local_rank = local.index(slot) if slot in local else 0
            address, local_size = host.coordinator_address, max(1, len(local))
            env = identity(config, context.processes, address, slot, local_rank, local_size)
            start = messages.StartProcess(*slot, config.argv()[1:], env, config.trace is not None)
            hosts.places[slot] = host, start
