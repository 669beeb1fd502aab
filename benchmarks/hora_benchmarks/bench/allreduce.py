"""`hora bench allreduce`: every algorithm and transport against Gloo and MPI, in the same processes, interleaved.

The ranks are started by mpirun where it is installed, since MPI can only be measured there; Hora and Gloo run in the
very same processes. A measurement is a batch of calls back to back, timed by each rank; the slowest rank counts.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from hora.net.machine import machine_text, num_cores
from hora_benchmarks.bench import bench_table

from . import peers

OURS = ["auto"]
PEERS = ["gloo", "mpi"]


def main(
    ranks: int,
    sizes: list[int],
    repeats: int = 20,
    json_path: str | None = None,
    plot_path: str | None = None,
    only: list[str] | None = None,
) -> int:
    """Measures, prints the tables, writes JSON lines and the plot; returns the exit code."""
    mpi = peers.mpi_version()
    with tempfile.TemporaryDirectory(prefix="hora-bench-") as folder:
        results = str(pathlib.Path(folder) / "results.jsonl")
        arguments = ["-m", "hora_benchmarks.bench.allreduce_rank", results, ",".join(map(str, sizes)), str(repeats)]
        arguments += [",".join(only)] if only else []
        code = subprocess.call(_command(ranks, arguments, mpi is not None), env=_environment())
        if code:
            return code
        rows = [json.loads(line) for line in pathlib.Path(results).read_text().splitlines()]
    if only and not rows:
        print(f"hora bench: nothing is called {', '.join(only)}", file=sys.stderr)
        return 2
    title = f"all-reduce of float32, {ranks} ranks, one thread each"
    bench_table.print_times(rows, title)
    bench_table.print_ratios(rows, OURS, PEERS)
    print(machine_text())
    print(f"MPI: {mpi or 'not installed (mpirun and mpi4py)'}; Gloo ran over TCP with {congestion_control()}")
    hops = {bench_table.size_text(row["bytes"]): row["core_to_core_ns"] for row in rows}
    print("a flag from core to core took, in ns, as Python sees it, before each size:", hops)
    if json_path:
        pathlib.Path(json_path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if plot_path:
        missing = bench_table.plot_times(rows, title, plot_path)
        if missing:
            print(f"no plot: {missing}", file=sys.stderr)
    return 0


def _command(ranks: int, arguments: list[str], mpi: bool) -> list[str]:
    if not mpi:
        return [sys.executable, "-m", "hora.cli.main", "run", "-n", str(ranks), *arguments]
    # Unbound, as the other launchers leave their ranks: where a rank may run must not differ between the compared.
    crowd = ["--oversubscribe"] if ranks > num_cores() else []
    return ["mpirun", "-n", str(ranks), "--bind-to", "none", *crowd, sys.executable, *arguments]


def _environment() -> dict[str, str]:
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    if os.getuid() == 0:
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return env


def congestion_control() -> str:
    path = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return path.read_text().strip() if path.exists() else "the system's congestion control"
