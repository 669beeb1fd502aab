"""The run monitor under a million records, and its memory after each COUNT.

python -m hora_benchmarks.bench.observe_records COUNT…
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
import tempfile
import time

from hora.coordinator.messages import Member
from hora.launch.monitor import RunMonitor
from hora.monitor.messages import MetricsRow, WorkerReport, encode

WORKERS = 4
ROWS = 50  # in a report of rank 0


def main(limits: list[int]) -> None:
    rss: dict[int, float] = {}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hora-bench-") as folder:
        watcher = RunMonitor(folder, "bench", WORKERS, "ring", {}, warn=_complain, log=lambda text: None)
        step = 0
        for limit in sorted(limits):
            while step < limit:
                step += ROWS
                for rank in range(WORKERS):
                    watcher.on_report(Member("worker", rank, "a", 100 + rank), _report(step, rank))
                while watcher.num_queued > 1000:
                    time.sleep(0.001)
            rss[limit] = _rss_mb()
        seconds = time.perf_counter() - begun
        lost = watcher.status().lost_reports
        watcher.close({})
        disk = sum(path.stat().st_size for path in pathlib.Path(folder).iterdir()) / 1e6
    told = {"name": "memory", "rss_mb": rss, "records_per_s": max(limits) / seconds, "lost": lost, "disk_mb": disk}
    print(json.dumps(told))


def _report(step: int, rank: int) -> bytes:
    at = step / 1000
    rows = [MetricsRow(step - ROWS + k, at, 1, {"loss": 1 / (step + k), "accuracy": 0.5}) for k in range(ROWS)]
    return encode(
        WorkerReport(
            sent_at=at, step=step, steps=ROWS, seconds=0.05, exposed_s=0.01, comm_s=0.02, sent_bytes=4096 * ROWS,
            samples=8 * ROWS, computes=[0.0008] * 32, epoch=0, epochs=10, progress=min(1.0, step / 1e6),
            peers={(rank + 1) % WORKERS: 4096 * ROWS}, rows=rows if rank == 0 else [],
        )
    )  # fmt: skip


def _rss_mb() -> float:
    match = re.search(r"VmRSS:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def _complain(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
