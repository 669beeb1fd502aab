"""Every strategy on four machines, started by one command: the same training, and the same end where promised."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import torch

from hora.runs import exit_codes

from .conftest import Make, endings

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]


@dataclasses.dataclass(frozen=True)
class Promise:
    """`equal`: all workers end with the same parameters. `near`: how near to one process's, None: only as good."""

    strategy: str
    slots: int = 1
    servers: str = ""
    equal: bool = True
    near: float | None = 1e-5
    each: bool = False  # workers take batches of their own, when they like

    def __str__(self) -> str:
        return f"{self.strategy}-{self.slots}" + (f"-servers={self.servers}" if self.servers else "")


PROMISES = [
    Promise("ring"),
    Promise("ring", slots=2),
    Promise("tree"),
    Promise("halving"),
    Promise("star"),
    Promise("shared", slots=2),
    Promise("engine"),
    Promise("auto", slots=2),
    Promise("ring:update=sharded"),
    Promise("ring:wire=int8", near=0.05),
    Promise("ps:mode=sync", servers="1"),
    Promise("ps:mode=sync", slots=2, servers="2"),
    Promise("ps:mode=sync", servers="colocated"),
    Promise("ps:mode=async", servers="1", equal=False, near=None, each=True),
    Promise("ps:mode=async", servers="colocated", equal=False, near=None, each=True),
    Promise("ps:mode=ssp", servers="1", equal=False, near=None, each=True),
    Promise("local:every=4", near=None),
    Promise("diloco:every=4", slots=2, near=None),
]
BEFORE = 1.2  # the loss of a model that has not learned is above


@pytest.mark.parametrize("promise", PROMISES, ids=str)
def test_four_machines_keep_what_the_strategy_promises(
    machines: Make, tmp_path: pathlib.Path, alone: dict[str, Any], promise: Promise
) -> None:
    those = machines(4)
    out = tmp_path / "out"
    out.mkdir()
    servers = ["--servers", promise.servers] if promise.servers else []
    script = ["training.py", "--out", out, *(["--each"] if promise.each else [])]
    run = those.hora("run", "--hosts", those.hosts(promise.slots), "--strategy", promise.strategy, *servers, *script)
    assert run.code == exit_codes.OK, run
    results = endings(out)
    size = 4 * promise.slots
    assert [result["rank"] for result in results] == list(range(size)), run
    parameters = [torch.tensor(result["parameters"]) for result in results]
    for result, mine in zip(results, parameters, strict=True):
        assert torch.isfinite(mine).all()
        if promise.equal:
            assert torch.equal(mine, parameters[0])
        if promise.near is not None:
            torch.testing.assert_close(mine, torch.tensor(alone["parameters"]), rtol=0.0, atol=promise.near)
        assert result["loss"] < min(BEFORE, alone["loss"] + 0.3)
