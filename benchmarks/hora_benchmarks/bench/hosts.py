"""`hora bench hosts`: Hora and its peers over several hosts, held against what the links alone would take.

Hosts are network namespaces whose links the kernel shapes both ways (links.py). Four parts, each of which starts its
contestants side by side and has them take turns (hosts_turns.py):

allreduce   Hora, Gloo and Open MPI, one rank on each host; Hora and Gloo, two on each
train       steps of the MLP: Hora's strategies against DDP on Gloo
ps          push and pull through 1, 2 and 4 servers on hosts of their own
picture     the star's time, which grows with the hosts, and the ring's, which does not
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence

from hora import strategies
from hora.launch.launched import ending_on_signals
from hora.net.machine import machine_text, num_cores
from hora.runs import exit_codes
from hora_benchmarks.bench.bench_table import Row

from . import hosts_mpi, hosts_table, limits, links, peers
from .hosts_turns import Entry, take
from .process_pool import ProcessPool

PARTS = ("allreduce", "train", "ps", "picture")
MOST_HOSTS = 64
OURS = ("ring", "auto")
DDP = "ddp/gloo"
STRATEGIES = ("ring", "auto", "ring:wire=bf16", "ring:wire=int8")
MODEL = "mlp"
STEPS = 2
SHORT_S = 0.5  # calls that take less than this are made several times in a turn
CALLS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Size of the benchmark: `hosts` and `rate` are of the first three parts; the picture has its own."""

    hosts: int = 4
    rate: str = "1gbit"
    sizes: Sequence[int] = (25 << 20, 100 << 20)
    rounds: int = 7
    servers: Sequence[int] = (1, 2, 4)
    params: int = 6_250_000
    picture_hosts: Sequence[int] = (2, 4, 8, 16)
    picture_rate: str = "200mbit"
    picture_bytes: int = 8 << 20
    picture_rounds: int = 3

    def __post_init__(self) -> None:
        if not 2 <= self.hosts <= MOST_HOSTS:
            raise ValueError(f"--hosts-sim takes 2 to {MOST_HOSTS} hosts, not {self.hosts}; e.g. --hosts-sim 4")
        links.bits_per_s(self.rate)

    @property
    def bits_per_s(self) -> int:
        return links.bits_per_s(self.rate)


def quick(plan: Plan) -> Plan:
    """The same with little data: only to see that it works."""
    return dataclasses.replace(
        plan,
        sizes=(4 << 20,),
        rounds=1,
        servers=(1, 2),
        params=500_000,
        picture_hosts=(2, 4),
        picture_bytes=1 << 20,
        picture_rounds=1,
    )


def choose(names: Sequence[str] | None = None, *, picture: bool = False) -> list[str]:
    """Parts by name, in their own order; without names all, the picture only if it is wanted. ValueError for others."""
    wanted = (PARTS if picture else PARTS[:-1]) if names is None else names
    for name in wanted:
        if name not in PARTS:
            raise ValueError(f"no part is called {name!r}; there are: {', '.join(PARTS)}")
    if not wanted:
        raise ValueError(f"--parts names nothing; there are: {', '.join(PARTS)}")
    if picture and "picture" not in wanted:
        raise ValueError("--picture draws the part picture, which --parts leaves out; add it there")
    return [part for part in PARTS if part in wanted]


def main(
    plan: Plan,
    parts: Sequence[str],
    json_path: str | None = None,
    plot_path: str | None = None,
    picture_path: str | None = None,
) -> int:
    """Measures, prints the tables, writes JSON lines and the plots; returns the exit code."""
    obstacle = links.obstacle()
    if obstacle:
        raise ValueError(
            f"there can be no network namespaces here: {obstacle}. Run it as root on Linux with ip and tc (iproute2), "
            "in a container with --privileged; or use hora bench local, which does without"
        )
    rows: list[Row] = []
    failures: list[str] = []
    with ending_on_signals():
        for part in parts:
            found, failed = MEASURES[part](plan)
            rows += found
            failures += failed
            hosts_table.print_rows(found)
    print(machine_text())
    print(f"MPI: {peers.mpi_version() or 'left out: mpirun and mpi4py are not both installed'}; {LINKS_TEXT}")
    if json_path:
        pathlib.Path(json_path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path, draw in ((plot_path, hosts_table.plot_rows), (picture_path, hosts_table.plot_picture)):
        missing = draw(rows, path) if path and rows else None
        if missing:
            print(f"no plot: {missing}", file=sys.stderr)
    for failure in failures:
        print(f"hora bench: {failure}", file=sys.stderr)
    return exit_codes.SCRIPT_FAILED if failures else exit_codes.OK


LINKS_TEXT = (
    f"network namespaces, links shaped both ways by tc tbf, TCP with {links.CONTROL}, {num_cores()} cores for all"
)


def measure_allreduce(plan: Plan) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    failures: list[str] = []
    for per_host in (1, 2):
        size = plan.hosts * per_host
        with links.Namespaces(plan.hosts, plan.rate) as where, tempfile.TemporaryDirectory() as folder:
            ours = _pool("hora", where, 0, size, per_host)
            those = [(ours, name, name) for name in OURS] + [(_pool("gloo", where, 1, size, per_host), "gloo", "ring")]
            if per_host == 1 and peers.mpi_version():
                for name, options in (("mpi", ()), ("mpi/ring", hosts_mpi.RING)):
                    command = hosts_mpi.command(where, folder, plan.hosts, options)
                    those.append((ProcessPool(name, [[*command, *_program("mpi")]]), name, "ring"))
            entries = [
                _all_reduce(pool, name, algorithm, num_bytes, plan.hosts, per_host, plan.rate, "allreduce")
                for num_bytes in plan.sizes
                for pool, name, algorithm in those
            ]
            title = f"all-reduce, {plan.hosts} hosts × {per_host}"
            found, failed = take(title, entries, plan.rounds)
        rows += found
        failures += failed
    return rows, failures


def measure_picture(plan: Plan) -> tuple[list[Row], list[str]]:
    with links.Namespaces(max(plan.picture_hosts), plan.picture_rate) as where:
        entries = []
        for number, hosts in enumerate(plan.picture_hosts):
            pool = _pool(f"hora on {hosts} hosts", where, number, hosts, 1)
            for name in ("star", "ring"):
                entries.append(
                    _all_reduce(pool, name, name, plan.picture_bytes, hosts, 1, plan.picture_rate, "picture")
                )
        return take("star and ring", entries, plan.picture_rounds)


def _all_reduce(
    pool: ProcessPool, name: str, algorithm: str, num_bytes: int, hosts: int, per_host: int, rate: str, part: str
) -> Entry:
    limit = limits.star_s if algorithm == "star" else limits.ring_s
    limit_s = limit(hosts, num_bytes, links.bits_per_s(rate))
    calls = CALLS if limit_s < SHORT_S and part == "allreduce" else 1
    request = {"algorithm": algorithm, "bytes": num_bytes, "calls": calls}
    row = {
        "part": part, "name": name, "hosts": hosts, "per_host": per_host, "rate": rate, "bytes": num_bytes,
        "limit_s": limit_s,
    }  # fmt: skip
    return Entry(pool=pool, warm_up={**request, "verify": True}, request=request, row=row)


def _pool(how: str, where: links.Namespaces, meeting: int, size: int, per_host: int) -> ProcessPool:
    commands = [
        [*where.command(rank, meeting, size=size, per_host=per_host), *_program(how.split()[0])] for rank in range(size)
    ]
    return ProcessPool(how, commands)


def _program(how: str) -> list[str]:
    return [sys.executable, "-m", "hora_benchmarks.bench.hosts_rank", how, COUNTER]


COUNTER = f"/sys/class/net/{links.DEVICE}/statistics/tx_bytes"


def measure_train(plan: Plan) -> tuple[list[Row], list[str]]:
    with links.Namespaces(plan.hosts, plan.rate) as where:
        entries = []
        for number, name in enumerate((DDP, *_known(STRATEGIES))):
            how = ["ddp"] if name == DDP else ["hora"]
            strategy = [] if name == DDP else [f"HORA_STRATEGY={name}"]
            program = [*strategy, sys.executable, "-m", "hora_benchmarks.bench.local_rank", *how, MODEL, COUNTER]
            pool = ProcessPool(name, [[*where.command(rank, number), *program] for rank in range(plan.hosts)])
            request = {"lead": 1, "steps": STEPS, "settle": False}
            row = {"part": "train", "name": name, "model": MODEL, "hosts": plan.hosts, "rate": plan.rate}
            entries.append(Entry(pool=pool, warm_up=request, request=request, row=row))
        return take("training steps", entries, plan.rounds)


def _known(names: Sequence[str]) -> list[str]:
    """Those that are strategies; the others are left out with a message."""
    found = []
    for name in names:
        try:
            strategies.parse(name)
            found.append(name)
        except ValueError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def measure_ps(plan: Plan) -> tuple[list[Row], list[str]]:
    """As many workers as hosts were asked for; the servers' hosts come on top."""
    num_bytes = 4 * plan.params
    with links.Namespaces(plan.hosts + max(plan.servers), plan.rate) as where:
        entries = []
        for number, servers in enumerate(plan.servers):
            size = plan.hosts + servers
            program = [
                "HORA_STRATEGY=ps",
                f"HORA_SERVERS={servers}",
                sys.executable,
                "-m",
                "hora_benchmarks.bench.hosts_ps_rank",
            ]
            commands = [
                [*where.command(rank, number, size=size), *program, str(plan.params), COUNTER] for rank in range(size)
            ]
            pool = ProcessPool(f"ps with {servers}", commands)
            one_way_s = limits.one_way_s(plan.hosts, servers, num_bytes, plan.bits_per_s)
            row = {
                "part": "ps", "name": "ps", "workers": plan.hosts, "servers": servers, "rate": plan.rate,
                "bytes": num_bytes, "one_way_s": one_way_s, "limit_s": 2 * one_way_s,
            }  # fmt: skip
            entries.append(Entry(pool=pool, warm_up={"calls": 1}, request={"calls": 1}, row=row))
        return take("push and pull", entries, plan.rounds)


MEASURES: dict[str, Callable[[Plan], tuple[list[Row], list[str]]]] = {
    "allreduce": measure_allreduce,
    "train": measure_train,
    "ps": measure_ps,
    "picture": measure_picture,
}
