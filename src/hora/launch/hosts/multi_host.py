"""Spread: a run over several hosts, from its configuration to its exit code.

open        one agent per host, by ssh, or here
compare     versions, folder, script, clocks: who differs is named before anything starts
route       each host finds its own address on the road to the coordinator, and reaches it
probe       each host reaches every other
conduct     from here on as on one machine, with agents that start and end the processes
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import hora
from hora.net import interface

from ...rendezvous.environment import NAMES
from ...runs import exit_codes
from ...runs.run_directory import versions
from ...terminal.format import harmless
from ...terminal.screen import Screen, open_standard_descriptors
from ..config import LOOPBACK, RunConfig
from ..forkserver.client import preloaded
from ..local import conduct, open_desk, open_stage, settle_servers
from ..process_set import ProcessSet, Seat, identity
from ..signal_pipe import SignalPipe
from . import ssh
from .host_set import HostSet, ProcessPlace, SignalReceived, close_all
from .messages import (
    PROTOCOL,
    AgentHello,
    HostFacts,
    ProbedPeer,
    ProbeReply,
    ProbeRequest,
    RouteReply,
    RouteRequest,
    StartProcess,
)
from .remote_host import RemoteHost

if TYPE_CHECKING:
    from hora.coordinator import CoordinatorService

OPEN_S = 40.0
ROUTE_S = 20.0
PROBE_S = 30.0
APART_S = 1.0
"""Clocks that differ by more are worth a line: time stamps and traces of the hosts do not fit together."""

ANYWHERE = ("0.0.0.0", "::")  # to listen at; nobody can be called there

PASSED_ON = (
    "PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_*", "MKL_*", "CUDA_*", "NCCL_*", "GLOO_*", "TORCH_*",
    "HORA_*",
)  # fmt: skip
KEPT_HERE = (*NAMES, "HORA_SSH", "HORA_DASHBOARD", "HORA_HOST", "HORA_TOKEN_FILE", "HORA_FORKSERVER")

Opener = Callable[[RunConfig, SignalPipe, contextlib.ExitStack], "OpenedHosts"]


@dataclasses.dataclass(frozen=True)
class OpenedHosts:
    """The sites of a run, and who goes where: the seats of each site in order. `sorry` explains one that is silent."""

    sites: Sequence[RemoteHost]
    seats: Sequence[Sequence[Seat]]
    sorry: Callable[[RemoteHost], str]


def run(config: RunConfig, opener: Opener) -> int:
    """Runs `config` over the hosts that `opener` opens and returns the exit code. Main thread only; blocks.

    ValueError for what is wrong with a host, before any rank starts.
    """
    open_standard_descriptors()
    config, why = settle_servers(config)
    run_id, token = secrets.token_hex(8), secrets.token_bytes(32)
    crew = ProcessSet(size=config.size, servers=config.servers, workers=config.size, serves=config.serve is not None)
    screen = Screen(size=config.size, color=config.color)
    if config.progress == "auto":
        config = dataclasses.replace(config, progress="panel" if screen.can_panel else "plain")
    with SignalPipe() as wake, contextlib.ExitStack() as undo:
        try:
            opening = opener(config, wake, undo)
            sites = HostSet(opening.sites, wake)
            undo.callback(sites.close)
            notes = _greet(sites, opening, config, run_id, token)
            desk = _open_desk(config, crew, run_id, token, sites)
            undo.callback(desk.close)
            notes += _connect(sites, config, desk)
            notes += _whereabouts(config, opening)
        except SignalReceived as stopped:
            return exit_codes.of_signal(stopped.number)
        _seat(sites, opening.seats, config, crew)
        notes += [why] if why else []
        return conduct(open_stage(config, crew, run_id, token, desk, screen, wake, undo, notes, sites=sites), undo)


def by_ssh(config: RunConfig, wake: SignalPipe, undo: contextlib.ExitStack) -> OpenedHosts:
    """One site per host of `config.hosts`. Workers fill the hosts in order; servers are dealt from the last host on,
    the predictor is on the first."""
    sites: list[RemoteHost] = []
    try:
        for host in config.hosts:
            sites.append(ssh.open_site(host, config.ssh, config.python))
    except ValueError:
        close_all(sites)
        raise
    hosts = {site.name: host for site, host in zip(sites, config.hosts, strict=True)}
    python = config.python or sys.executable

    def sorry(site: RemoteHost) -> str:
        return ssh.explain(hosts[site.name], site.complaints, python, config.ssh)

    return OpenedHosts(sites, place(config), sorry)


def place(config: RunConfig) -> list[list[Seat]]:
    """For each host its seats."""
    seats: list[list[Seat]] = []
    first = 0
    for host in config.hosts:
        assert host.slots is not None
        seats.append([("worker", rank) for rank in range(first, first + host.slots)])
        first += host.slots
    for number in range(config.servers if isinstance(config.servers, int) else 0):
        seats[-1 - number % len(seats)].append(("server", number))
    if config.serve is not None:
        seats[0].append(("predictor", 0))
    return seats


# -- before anything starts --------------------------------------------------------------------------------------------


def _greet(sites: HostSet, opening: OpenedHosts, config: RunConfig, run_id: str, token: bytes) -> list[str]:
    """What every host is: refused if one could not run this; a line for what is merely odd."""
    env, modules = forwarded(config), list(preloaded(config))
    processes: Counter[str] = Counter()  # by machine
    for site, seats in zip(sites.all, opening.seats, strict=True):
        processes[site.machine] += len(seats)
    for number, site in enumerate(sites.all):
        site.mark = f"{run_id}.{number}"  # of its own: an agent that ends takes along what carries its mark

    def hello(site: RemoteHost) -> AgentHello:
        where = os.getcwd(), config.command[0], config.module
        return AgentHello(PROTOCOL, site.name, site.mark, token, *where, env, processes[site.machine], modules)

    began_ns = time.time_ns()
    found = sites.ask(hello, HostFacts, OPEN_S, opening.sorry)
    ended_ns = time.time_ns()
    compare([site.name for site in sites.all], found)
    if config.hosts:
        distinguish([site.name for site in sites.all], found)
    for site, each in zip(sites.all, found, strict=True):
        site.facts = each
    return clocks([site.name for site in sites.all], [each.time_ns for each in found], began_ns, ended_ns)


def forwarded(config: RunConfig) -> dict[str, str]:
    """What of our environment goes along: what makes programs find their things, settings, what the user named."""
    wanted = (*PASSED_ON, *config.forward)
    mine = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted) and name not in KEPT_HERE
    }
    if config.engine is not None:
        mine.pop("CUDA_VISIBLE_DEVICES", None)  # whoever places the processes has handed out the GPUs
    return {**mine, **dict(config.env)}


def compare(names: Sequence[str], found: Sequence[HostFacts]) -> None:
    """ValueError naming the host where something is missing, or that differs from this machine."""
    for name, each in zip(names, found, strict=True):
        if each.problem:
            raise ValueError(f"host {name}: {harmless(each.problem, 500)}")
    ours = {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": versions()["torch"] or "",
        "Hora": hora.__version__,
    }
    for name, each in zip(names, found, strict=True):
        theirs = {"Python": ".".join(each.python.split(".")[:2]), "torch": each.torch, "Hora": each.hora}
        for what, version in theirs.items():
            if not version:
                raise ValueError(f"host {name}: its {each.executable} has no {what}; install {what} {ours[what]} there")
            if version != ours[what]:
                raise ValueError(
                    f"host {name} has {what} {version}, this machine {ours[what]}: install the same on all hosts, or "
                    "say --python PATH"
                )


def distinguish(names: Sequence[str], found: Sequence[HostFacts]) -> None:
    """ValueError for one machine under two names: each would give its GPUs and cores away a second time."""
    machines: dict[str, str] = {}
    for name, each in zip(names, found, strict=True):
        other = machines.setdefault(each.machine or name, name)
        if other != name:
            raise ValueError(f"hosts {other} and {name} are the same machine: name it once, with all its ranks")


def clocks(names: Sequence[str], times_ns: Sequence[int], began_ns: int, ended_ns: int) -> list[str]:
    """A line for each host whose clock was outside of the time in which it answered."""
    lines = []
    for name, at_ns in zip(names, times_ns, strict=True):
        ahead_s = max(at_ns - ended_ns, 0) / 1e9 - max(began_ns - at_ns, 0) / 1e9
        if abs(ahead_s) > APART_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            lines.append(
                f"the clock of host {name} is {abs(ahead_s):.1f} s {way} this machine's: its times in logs and traces "
                "will be too (is NTP running there?)"
            )
    return lines


def _open_desk(config: RunConfig, crew: ProcessSet, run_id: str, token: bytes, sites: HostSet) -> CoordinatorService:
    """The coordinator, at every address of ours by which a host reaches us, and no other."""
    for site in sites.all:
        site.road = _road(config, site)
    roads = list(dict.fromkeys(site.road for site in sites.all if site.road))
    if config.bind in ANYWHERE:
        desk = open_desk(config, crew, run_id, token)
        ports = dict.fromkeys([*roads, LOOPBACK if config.bind == "0.0.0.0" else "::1"], desk.address[1])
    else:
        desk = open_desk(dataclasses.replace(config, bind=roads[0] if roads else config.bind), crew, run_id, token)
        ports = {desk.address[0]: desk.address[1]}
        try:
            ports |= {road: desk.listen(road) for road in roads[1:]}
        except OSError as problem:
            desk.close()
            raise ValueError(f"cannot listen on {', '.join(roads[1:])}: {problem.strerror or problem}") from None
    for site in sites.all:
        road = site.road or next(iter(ports))
        site.desk = (road, ports[road])
    return desk


def _road(config: RunConfig, site: RemoteHost) -> str:
    """Our address as that host should call it; empty where any will do. Whoever opened the site may know it."""
    if site.road:
        return site.road
    if config.bind not in (LOOPBACK, *ANYWHERE):
        return config.bind
    if config.interface:
        with contextlib.suppress(ValueError):  # the launcher may be outside of the network between the hosts
            return interface.named(config.interface)
    if not site.facts.server:
        return ""
    if site.facts.client in interface.addresses().values():
        return site.facts.client
    try:
        return interface.route_to(site.facts.server)
    except OSError as problem:
        raise ValueError(
            f"host {site.name} is reached at {site.facts.server}, and there is no way back from it: {problem}; "
            "--interface says by which network"
        ) from None


def _connect(sites: HostSet, config: RunConfig, desk: CoordinatorService) -> list[str]:
    """Every host reaches the coordinator and every other host; the line that says by which network."""

    def route(site: RemoteHost) -> RouteRequest:
        return RouteRequest(*site.desk, config.interface or "")

    silent: Callable[[RemoteHost], str] = lambda site: site.lost or "its agent does not answer"  # noqa: E731
    for site, routed in zip(sites.all, sites.ask(route, RouteReply, ROUTE_S, silent), strict=True):
        if routed.problem:
            raise ValueError(
                f"host {site.name} cannot reach this machine: {routed.problem}; --interface NAME or NETWORK chooses "
                "another way"
            )
        site.address, site.interface, site.port = routed.address, routed.interface, routed.port
    peers = [ProbedPeer(site.name, site.address, site.port) for site in sites.all]
    slowest = 0.0
    for site, probed in zip(
        sites.all, sites.ask(lambda site: ProbeRequest(peers), ProbeReply, PROBE_S, silent), strict=True
    ):
        if len(probed.problems) != len(peers) or len(probed.seconds) != len(peers):
            raise ValueError(f"host {site.name}: its agent answers what nobody asked")
        for peer, problem, seconds in zip(peers, probed.problems, probed.seconds, strict=True):
            if problem:
                raise ValueError(
                    f"host {site.name} cannot reach host {peer.name} at {peer.host}: {problem}; --interface NAME or "
                    "NETWORK chooses another network"
                )
            slowest = max(slowest, seconds)
    machines = list({site.machine: site for site in sites.all}.values())
    if len(machines) == 1:
        return []
    networks = ", ".join(dict.fromkeys(site.interface or "an interface without a name" for site in machines))
    some = ", ".join(f"{site.name} {site.address}" for site in machines[:4]) + (", …" if len(machines) > 4 else "")
    return [f"{len(machines)} hosts over {networks} ({some}): all reach each other, in {slowest * 1e3:.1f} ms at most"]


def _whereabouts(config: RunConfig, opening: OpenedHosts) -> list[str]:
    """The address that a predictor prints is its own host's."""
    there = [site for site, seats in zip(opening.sites, opening.seats, strict=True) if ("predictor", 0) in seats]
    if config.serve is None or not there or not there[0].facts.server:
        return []
    near = interface.is_loopback(config.serve.host)
    way = "; only it can ask there: --serve 0.0.0.0:PORT lets others" if near else ""
    return [f"predictions are answered on host {there[0].name}{way}"]


# -- who goes where ----------------------------------------------------------------------------------------------------


def _seat(sites: HostSet, seats: Sequence[Sequence[Seat]], config: RunConfig, crew: ProcessSet) -> None:
    where = {seat: site for site, those in zip(sites.all, seats, strict=True) for seat in those}
    workers: dict[str, list[Seat]] = {}
    for seat in sorted(seat for seat in where if seat[0] == "worker"):
        workers.setdefault(where[seat].machine, []).append(seat)
    for seat, site in where.items():
        mates = workers.get(site.machine, [])
        sites.places[seat] = ProcessPlace(site, mates.index(seat) if seat in mates else 0, max(1, len(mates)))

    def describe(seat: Seat) -> StartProcess:
        at = sites.places[seat]
        env = identity(config, crew, at.site.desk, seat, at.local_rank, at.local_size)
        return StartProcess(*seat, config.argv()[1:], env, config.trace is not None)

    sites.describe = describe
