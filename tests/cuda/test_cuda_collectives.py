"""CUDA tensors: by way of the host over our own transports, and through NCCL where every rank has a GPU."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

SCRIPT = """
import torch, hora
job = hora.init()
assert job.device.type == "cuda"
for algorithm in ("auto", "ring", "tree", "halving", "star", "shared", "engine"):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        if algorithm == "engine" and dtype is torch.bfloat16 and job.size > torch.cuda.device_count():
            continue  # through Gloo on the host, which rounds by its own rules
        t = torch.full((100_001,), job.rank + 1, dtype=dtype, device=job.device)
        assert hora.all_reduce(t, algorithm=algorithm) is t and t.is_cuda
        assert bool((t == sum(range(1, job.size + 1))).all()), (algorithm, dtype)
strided = torch.ones(64, 64, device=job.device)[:, ::2]
hora.all_reduce(strided)
assert bool((strided == job.size).all())
parts = hora.all_gather(torch.full((job.rank + 1,), job.rank, device=job.device))
assert all(part.is_cuda for part in parts) and [len(p) for p in parts] == list(range(1, job.size + 1))
t = torch.full((5,), float(job.rank), device=job.device)
hora.broadcast(t, root=job.size - 1)
assert bool((t == job.size - 1).all())
handle = hora.all_reduce(torch.ones(1000, device=job.device), wait=False)
assert float(handle.wait().sum()) == 1000 * job.size
bits = torch.full((1000,), 1 << job.rank, dtype=torch.int16, device=job.device)
assert int(hora.all_reduce(bits, "xor", "ring")[-1]) == (1 << job.size) - 1  # NCCL knows neither
assert not job.group.own_gpus and "nccl" not in job.group._engines
print("fine", job.rank)
"""

ALONE = """
import torch, hora
from hora.collectives import engine
from hora.collectives.reduction import OPERATIONS
job = hora.init()
group = job.group
flat = torch.arange(1000.0, device=job.device)
for algorithm in ("auto", "ring", "shared"):
    assert hora.all_reduce(flat, "mean", algorithm) is flat
assert not group._engines  # without peers NCCL is not even started
engine._by_engine(group, flat, OPERATIONS["mean"], "nccl")  # the way these three take with a GPU for each rank
assert "nccl" in group._engines and torch.equal(flat.cpu(), torch.arange(1000.0))
print("fine", job.rank)
"""


def launch(folder: pathlib.Path, script: str, size: int) -> str:
    path = folder / "cuda.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "hora.cli.main", "run", "-n", str(size), str(path)],
        capture_output=True,
        text=True,
        timeout=58,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine") == size
    return done.stdout + done.stderr


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_reduce_cuda_tensors_alone_and_sharing_one_gpu(tmp_path: pathlib.Path, size: int) -> None:
    launch(tmp_path, SCRIPT, size)


def test_a_rank_with_a_gpu_of_its_own_reduces_through_nccl(tmp_path: pathlib.Path) -> None:
    launch(tmp_path, ALONE, 1)
