"""On GPUs every strategy trains as one process does, and no step waits for the GPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

Run = Callable[..., str]

TRAIN = """
STEPS, BATCH = 6, 24

def build():
    torch.manual_seed(0)
    if KIND == "cnn":
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GELU(), torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.GELU(),
            torch.nn.Flatten(), torch.nn.Linear(8 * 64, 10),
        ).to(device, memory_format=torch.channels_last)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 2000), torch.nn.GELU(),
        torch.nn.Linear(2000, 10),
    ).to(device)

def data(step, rank=0, size=1):
    g = torch.Generator().manual_seed(step)
    shape = (BATCH, 3, 8, 8) if KIND == "cnn" else (BATCH, 64)
    x, y = torch.randn(shape, generator=g), torch.randint(10, (BATCH,), generator=g)
    n = BATCH // size
    x, y = x[rank * n : rank * n + n].to(device), y[rank * n : rank * n + n].to(device)
    return (x.contiguous(memory_format=torch.channels_last), y) if KIND == "cnn" else (x, y)

def train(rank, size, prepare, accumulate=None):
    model = build()
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) if KIND == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=1e-3, fused=KIND != "foreach")
    )
    scaler = torch.amp.GradScaler(init_scale=64.0) if KIND == "fp16" else None
    prepare(model, optimizer, scaler)
    forward = torch.compile(model, fullgraph=True) if KIND == "compile" else model
    if KIND == "checkpoint":
        from torch.utils.checkpoint import checkpoint
        forward = lambda x: checkpoint(model, x, use_reentrant=False)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(KIND)
    for step in range(STEPS):
        x, y = data(step, rank, size)
        parts = list(zip(x.chunk(2), y.chunk(2))) if KIND == "accumulate" else [(x, y)]
        for number, (a, b) in enumerate(parts):
            with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
                loss = F.cross_entropy(forward(a), b) / len(parts)
            if scaler is not None:
                loss = scaler.scale(loss)
            if number < len(parts) - 1 and accumulate is not None:
                with accumulate():
                    loss.backward()
            else:
                loss.backward()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach().float().cpu() for p in model.parameters()]

mine = train(job.rank, job.size, lambda m, o, s: job.prepare(m, o, scaler=s), job.accumulate)
digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in mine)).hexdigest()
start = [p.detach().float().cpu() for p in build().parameters()]
wanted = train(0, 1, lambda m, o, s: None)
moved = sum(float((a - b).square().sum()) for a, b in zip(wanted, start)) ** 0.5
apart = sum(float((a - b).square().sum()) for a, b in zip(wanted, mine)) ** 0.5
print(f"digest {digest[:16]} apart {apart / moved:.6f} end")
"""


def check(output: str, size: int, within: float) -> None:
    found = re.findall(r"digest (\w+) apart (\S+) end", output)
    assert len(found) == size, output
    assert len({digest for digest, _ in found}) == 1, f"replicas differ: {found}"
    assert all(float(apart) <= within for _, apart in found), found


@pytest.mark.parametrize(
    ("strategy", "kind", "size"),
    [
        ("shared", "adamw", 2), ("shared", "sgd", 4), ("shared", "fp16", 2), ("shared", "compile", 2),
        ("ring", "adamw", 2), ("ring", "cnn", 2), ("auto", "bf16", 2), ("auto", "foreach", 3),
        ("shared", "accumulate", 2), ("engine", "checkpoint", 2), ("shared:update=sharded", "adamw", 2),
        ("tree", "sgd", 2), ("ps", "adamw", 2),
    ],
)  # fmt: skip
def test_a_strategy_trains_as_one_process(run: Run, strategy: str, kind: str, size: int) -> None:
    output = run(f"KIND = {kind!r}\n{TRAIN}", strategy, size, servers="1" if strategy == "ps" else "")
    check(output, size, 0.3 if kind in ("bf16", "fp16") else 0.05)


@pytest.mark.parametrize("strategy", ["local:every=3", "diloco:every=3"])
def test_workers_that_average_in_rounds_end_with_the_same_parameters(run: Run, strategy: str) -> None:
    check(run(f"KIND = 'adamw'\n{TRAIN}", strategy), 2, 1.5)


SYNC_FREE = """
from torch.profiler import ProfilerActivity, profile
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(24)]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
job.prepare(model, optimizer)
x = torch.randn(64, 1024, device=device)

def step():
    loss = model(x).square().mean()
    with torch.profiler.record_function("WINDOW"):
        torch.cuda.set_sync_debug_mode("error")
        loss.backward()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    optimizer.zero_grad()

for _ in range(4):
    torch.cuda.set_sync_debug_mode("default")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
events = list(prof.events())
windows = [(e.time_range.start, e.time_range.end) for e in events if e.name == "WINDOW" and "CPU" in str(e.device_type)]
assert len(windows) == 3, windows
waits = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
bad = [e.name for e in events if e.name in waits and any(a <= e.time_range.start <= b for a, b in windows)]
kernels = [e for e in events if "CUDA" in str(e.device_type)]
beside = [e for e in kernels if "nccl" in e.name.lower()]
print("waits in the window:", bad, "nccl kernels", len(beside), "end")
assert not bad
assert bool(beside) == (NCCL and job.size > 1)
print("fine", job.rank)
"""


@pytest.mark.parametrize(("strategy", "nccl"), [("shared", False), ("ring", True)])
def test_no_step_waits_for_the_gpu(run: Run, strategy: str, nccl: bool) -> None:
    assert run(f"NCCL = {nccl}\n{SYNC_FREE}", strategy).count("fine") == 2


NONFINITE = """
model = torch.nn.Linear(64, 10).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=FUSED)
job.prepare(model, optimizer)
for k in range(1, 9):
    x = torch.ones(8, 64, device=device)
    if k == 4 and job.rank == 1:
        x[0, 0] = float("nan")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if SKIPS:
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    job.barrier() if hasattr(job, "barrier") else hora.barrier()
print("end of the script")
"""


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_that_is_not_finite_ends_the_run_and_the_step_is_named(run: Run, fused: bool) -> None:
    output = run(f"FUSED, SKIPS = {fused}, False\n{NONFINITE}", code=1)
    assert "in step 4 is not finite" in output and "end of the script" not in output


def test_a_step_that_is_not_finite_may_be_skipped(run: Run) -> None:
    output = run(f"FUSED, SKIPS = True, True\n{NONFINITE}", init='on_nonfinite="skip"')
    assert output.count("end of the script") == 2 and "this step is not taken" in output
