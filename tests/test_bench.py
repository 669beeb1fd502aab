"""The benchmark runs, verifies its sums and writes what it promises. Nothing here looks at how long anything took."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from hora_benchmarks.bench import bench_table

HORA = [sys.executable, "-m", "hora.cli.main"]


@pytest.mark.full
@pytest.mark.parametrize("mpi", [True, False])
def test_bench_allreduce_writes_a_line_per_name_and_size(tmp_path: pathlib.Path, mpi: bool) -> None:
    if mpi and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
    out, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    path = "/nowhere" if not mpi else None  # without mpirun on the path the launcher of Hora starts the ranks
    done = subprocess.run(
        [*HORA, "bench", "allreduce", "-n", "2", "--sizes", "4K,1M", "--json", str(out), "--plot", str(plot)],
        capture_output=True,
        text=True,
        timeout=55,
        env={**__import__("os").environ, **({"PATH": path} if path else {})},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {row["name"] for row in rows}
    wanted = {"shared", "auto", "gloo"}
    wanted |= {f"{a}/{t}" for a in ("ring", "tree", "halving", "star") for t in ("shm", "tcp")}
    assert names == wanted | ({"mpi"} if mpi else set())
    assert len(rows) == 2 * len(names)
    for row in rows:
        assert {"name", "ranks", "bytes", "median_s", "p10_s", "p90_s"} <= set(row)
        assert row["ranks"] == 2 and 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"] and row["repeats"] >= 20
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert "auto against gloo" in done.stdout and "core to core" in done.stdout and "TCP with" in done.stdout


def test_sizes_and_times_are_written_for_people() -> None:
    assert [bench_table.size_text(n) for n in (4096, 65536, 1 << 20, 100 << 20, 1000)] == [
        "4K",
        "64K",
        "1M",
        "100M",
        "1000",
    ]
    assert [bench_table.time_text(s) for s in (2.3e-6, 110e-6, 2.5e-3, 43e-3)] == ["0.0023", "0.110", "2.50", "43.0"]
