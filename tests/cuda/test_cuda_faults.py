"""Deaths and exhaustion on a GPU: the survivors are released, and the message names rank and cause. MPS is off: with it
NVIDIA promises nothing to the other processes of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Run = Callable[..., str]

KILLED = """
import signal, time
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
job.prepare(model, optimizer)
x = torch.randn(32, 1024, device=device)
for k in range(100_000):
    if job.rank == 1 and k == 20:
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    if k == 20:
        before = [p.detach().clone() for p in model.parameters()]  # no exchange ends any more
    try:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    except BaseException:
        torch.cuda.synchronize()  # the stream was released, and the context lives
        same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before))
        print("alive, and the optimizer did not step on what was left:", same)
        raise
"""


@pytest.mark.parametrize("strategy", ["shared", "ring"])
def test_a_rank_that_is_killed_in_an_exchange_releases_the_streams_of_the_others(run: Run, strategy: str) -> None:
    output = run(KILLED, strategy, code=3)
    assert "did not step on what was left: True" in output
    assert "rank 1" in output and "killed by SIGKILL; the others were stopped" in output


def test_a_rank_that_runs_out_of_memory_is_named_with_sizes(run: Run) -> None:
    script = """
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.prepare(model, optimizer)
for k in range(10):
    if job.rank == 1 and k == 5:
        torch.empty(1 << 42, dtype=torch.uint8, device=device)
    model(torch.ones(4, 1024, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    output = run(script, code=1)
    assert "rank 1" in output and "CUDA out of memory. Tried to allocate 4096.00 GiB" in output
