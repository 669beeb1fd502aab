"""Hora's own rows of `hora bench ps`: a run of workers and servers under the real launcher.

    python -m hora_benchmarks.bench.ps_hora WORKERS SERVERS PARAMS STRATEGY HOW OPTIMIZER

It answers requests on stdin and stdout as process_pool.py says, and passes each request on to its workers.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from .process_pool import START_S, Contestant, PoolContestant, ProcessPool

OURS = (
    ("hora/async", "ps:mode=async", "write"),
    ("hora/sync", "ps", "write"),
    ("hora/async step", "ps:mode=async", "step"),
)


def contestants(workers: int, servers: int, params: int, optimizer: str = "sgd") -> Sequence[Contestant]:
    """Hora's contestants."""
    found = []
    for name, strategy, how in OURS:
        arguments = [str(workers), str(servers), str(params), strategy, how, optimizer]
        pool = ProcessPool(name, [[sys.executable, "-m", "hora_benchmarks.bench.ps_hora", *arguments]])
        found.append(PoolContestant(name=name, pool=pool, workers=workers, servers=servers, params=params))
    return found


def main(workers: int, servers: int, params: int, strategy: str, how: str, optimizer: str) -> None:
    with tempfile.TemporaryDirectory(prefix="hora-bench-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = os.path.join(folder, "socket")
        listener.bind(path)
        listener.listen(workers)
        listener.settimeout(START_S)
        command = ["run", "-n", str(workers), "--servers", str(servers), "--strategy", strategy]
        command += [
            "--run-dir",
            os.path.join(folder, "run"),
            "-m",
            "hora_benchmarks.bench.ps_rank",
            path,
            str(params),
            how,
            optimizer,
        ]
        run = subprocess.Popen(
            [sys.executable, "-m", "hora.cli.main", *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        lines = {}
        for _ in range(workers):
            file = listener.accept()[0].makefile("rw")
            lines[json.loads(file.readline())["rank"]] = file
        _log({"ready": True})
        for request in sys.stdin:
            for line in lines.values():
                line.write(request)
                line.flush()
            answers = [json.loads(lines[rank].readline()) for rank in sorted(lines)]
            _log(
                {
                    "updates_per_s": sum(answer["updates_per_s"] for answer in answers),
                    "latency_s": statistics.median(answer["latency_s"] for answer in answers),
                    "server_cpu": answers[0]["server_cpu"],
                }
            )
        for line in lines.values():
            line.close()
        run.wait()


def _log(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:7])
