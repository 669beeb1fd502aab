"""The worked pages of CONTRIBUTING.md: the strategy, the transport and the claim are read out of the page and work."""

from __future__ import annotations

import importlib
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner

import hora_benchmarks.claims
import ranks
from hora.errors import Mismatch
from hora.runs import exit_codes
from hora.strategies import base, parse
from hora.transport import Transport
from hora_benchmarks.claims import catalogue, record
from hora_benchmarks.claims.cli import claims
from launching import Launcher
from trainings import training

PAGE = (pathlib.Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
STEPS, LEARNING_RATE = 5, 0.1

SCRIPT = """import hora, sys, torch
job = hora.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.prepare(model, optimizer)
for x, y in job.shard([(torch.ones(4), torch.ones(1))] * 40, batch_size=2):
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if job.step == 3 and sys.argv[1] == 'break' and job.rank == 1:
        break
    if job.step == 3 and sys.argv[1] == 'stop' and job.rank == 1:
        job.stop('enough')
job.save('checkpoints')
kept = model.weight.detach().clone()
with torch.no_grad():
    model.weight.zero_()
job.restore('checkpoints')
print(job.step, job.strategy.spell(), bool(job.rank or torch.equal(model.weight, kept)), job.traffic.sent_bytes > 0)
"""


def block(heading: str, language: str = "python") -> str:
    """The first block of code under a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, f"{heading} has no {language} block"
    return found[1]


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A distribution with the strategy of the page, installed in a folder of the path."""
    (tmp_path / "gossip.py").write_text(block("Add a strategy"))
    metadata = tmp_path / "gossip-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gossip\nVersion: 1.0\n")
    group, _, entry = block("Add a strategy", "toml").strip().partition("\n")
    assert group == '[project.entry-points."hora.strategies"]'
    (metadata / "entry_points.txt").write_text(f"[hora.strategies]\n{entry}\n".replace('"', ""))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    base.REGISTERED.pop("gossip", None)
    sys.modules.pop("gossip", None)


def samples(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model


def simulated(size: int, own: float) -> list[list[torch.Tensor]]:
    """Gossip in one loop: mixes the parameters of neighbours, then applies each worker's gradient."""
    models = [linear() for _ in range(size)]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(samples(rank, step)).square().mean().backward()
        before = [[p.detach().clone() for p in model.parameters()] for model in models]
        for rank, model in enumerate(models):
            neighbours = {(rank - 1) % size, (rank + 1) % size}
            for index, parameter in enumerate(model.parameters()):
                others = sum(before[peer][index] for peer in neighbours) / len(neighbours)
                assert parameter.grad is not None
                parameter.data = own * before[rank][index] + (1 - own) * others - LEARNING_RATE * parameter.grad
    return [[p.detach() for p in model.parameters()] for model in models]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_strategy_of_the_page_trains_as_its_simulation(package: pathlib.Path, size: int) -> None:
    def script(group: ranks.Group) -> list[torch.Tensor]:
        one = training(group, "gossip:own=0.4")
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        one.prepare(model, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(samples(group.rank, step)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    parse("gossip")  # before the ranks, which are threads, import it at the same time
    for found, wanted in zip(ranks.run(size, script), simulated(size, 0.4 if size > 1 else 1.0), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_strategy_of_the_page_describes_and_checks_itself(package: pathlib.Path) -> None:
    assert parse("gossip:own=0.4").spell() == "gossip:own=0.4" and parse("gossip").spell() == "gossip"
    with pytest.raises(ValueError, match="own takes a weight above 0 and up to 1, not 2"):
        parse("gossip:own=2")
    with pytest.raises(ValueError, match=r"unknown strategy 'gosip'; did you mean 'gossip'\?"):
        parse("gosip")


@pytest.mark.parametrize(("how", "steps"), [("whole", 10), ("break", 3), ("stop", 4)])
def test_the_launcher_runs_the_strategy_of_the_page(
    package: pathlib.Path, launcher: Launcher, how: str, steps: int
) -> None:
    """To the end of the data, until a worker leaves its loop, and until one asks all to stop; with a checkpoint."""
    (package / "train.py").write_text(SCRIPT)
    path = f"{package}:{launcher.env['PYTHONPATH']}"
    done = launcher.run("run", "-n", 2, "--strategy", "gossip:own=0.4", "train.py", how, cwd=package, PYTHONPATH=path)
    assert done.returncode == exit_codes.OK, done.stderr
    wanted = [f"[{rank}] {steps} gossip:own=0.4 True True" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == wanted


@pytest.fixture
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """The transport of the page, registered; the folder of its messages."""
    (tmp_path / "files_transport.py").write_text(block("Add a transport"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    importlib.import_module("files_transport")
    (tmp_path / "messages").mkdir()
    yield tmp_path / "messages"
    Transport.REGISTERED.pop("files", None)
    sys.modules.pop("files_transport", None)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving", "star"])
def test_collectives_run_over_the_transport_of_the_page(files: pathlib.Path, algorithm: str) -> None:
    def script(group: ranks.Group) -> tuple[str, list[torch.Tensor]]:
        summed = [group.all_reduce(torch.arange(n) + group.rank, algorithm=algorithm) for n in (0, 1, 5, 1000)]
        root = torch.full((3,), float(group.rank))
        return group.transport.kind, [*summed, group.broadcast(root, root=2)]

    for kind, found in ranks.run(3, script, f"files:{files}"):
        assert kind == "files"
        wanted = [3 * torch.arange(n) + 3 for n in (0, 1, 5, 1000)]
        assert all(torch.equal(one, other) for one, other in zip(found, [*wanted, torch.full((3,), 2.0)], strict=True))
    assert not list(files.iterdir())  # every message was received


def test_the_transport_of_the_page_refuses_calls_that_differ_and_a_missing_folder(files: pathlib.Path) -> None:
    def differ(group: ranks.Group) -> None:
        group.all_reduce(torch.zeros(4 + group.rank), algorithm="ring")

    for error in ranks.failures(2, differ, f"files:{files}"):
        assert isinstance(error, Mismatch)
    for error in ranks.failures(2, differ, "files:/nonexistent"):
        assert isinstance(error, ValueError) and "files transport needs a folder" in str(error)


@pytest.fixture
def claim(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The claim of the page as a module of the claims package."""
    (tmp_path / "order.py").write_text(block("Add a claim"))
    monkeypatch.setattr(hora_benchmarks.claims, "__path__", [*hora_benchmarks.claims.__path__, str(tmp_path)])
    yield
    sys.modules.pop("hora_benchmarks.claims.order", None)


@pytest.mark.usefixtures("claim")
def test_the_claim_of_the_page_is_listed_measured_judged_and_drawn(tmp_path: pathlib.Path) -> None:
    assert catalogue.names()[-1] == "order"
    assert "The order of a sum" in CliRunner().invoke(claims, ["--list"], standalone_mode=False).output
    done = CliRunner().invoke(claims, ["order", "--quick", "--into", str(tmp_path / "out")], standalone_mode=False)
    assert done.return_value == exit_codes.OK, done.output
    assert "holds: at least" in done.output
    (found,) = record.read_all(tmp_path / "out")
    assert found.claim == "order" and len(found.rows) == 2
    assert (tmp_path / "out" / f"{found.stem}.png").read_bytes().startswith(b"\x89PNG")
