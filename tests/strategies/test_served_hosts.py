"""Servers on other hosts: the workers of one host push one gradient and pull once, and nothing else changes.

Hosts are made up (`World(hosts=…)`) and servers are reached over TCP, so that they count as being elsewhere.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch

import ranks
from hora.collectives import Group
from hora.errors import HoraError, PeerLost
from hora.strategies import parse
from hora.strategies.common.sync import LoopEvent, Snapshot
from hora.training import Training
from trainings import Plain, batch, fit, loss_of, mlp, parameters_of, part, training, uneven
from workers import Worker, alone, assert_alike, mse

PAIRS, ODD, APART = (0, 0, 2, 2), (0, 0, 0, 3), (0, 1, 2, 3)
SHAPES = [PAIRS, ODD, (0, 1, 0, 1)]
shapes = pytest.mark.parametrize("hosts", SHAPES, ids=["2+2", "3+1", "interleaved"])


def run(hosts: tuple[int, ...], work: Any, **options: Any) -> list[Any]:
    return ranks.run(len(hosts), work, "memory", hosts=hosts, **options)


def script(one: Any, optimizer: str = "adam", share: Any = part, steps: int = 8) -> list[torch.Tensor]:
    model = mlp(width=40)
    made = {
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    }[optimizer](model.parameters())
    one.prepare(model, made)
    for step in range(steps):
        loss_of(model, share(one, batch(step))).backward()
        made.step()
        made.zero_grad()
    return parameters_of(model)


def two_optimizers(one: Any) -> list[torch.Tensor]:
    """The second steps at every other step only, and a parameter has no gradient now and then."""
    model = mlp(width=40)
    first = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)
    second = torch.optim.Adam([*model[2].parameters(), *model[4].parameters()], lr=1e-2)
    one.prepare(model, [first, second])
    for step in range(6):
        loss_of(model, uneven(one, batch(step))).backward()
        if step == 3:
            model[0].bias.grad = None
        first.step()
        if step % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()
    return parameters_of(model)


def assert_same(found: list[list[torch.Tensor]], wanted: list[torch.Tensor]) -> None:
    for rank, mine in enumerate(found):
        for number, (value, first, expected) in enumerate(zip(mine, found[0], wanted, strict=True)):
            assert torch.equal(value, first), f"tensor {number} on rank {rank} is not that of rank 0"
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


@shapes
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
@pytest.mark.parametrize("share", [part, uneven])
def test_hosts_that_push_once_train_as_one_process(hosts: tuple[int, ...], optimizer: str, share: Any) -> None:
    found = run(hosts, lambda group: script(training(group, "ps/2tcp"), optimizer, share))
    assert_same(found, script(Plain(), optimizer, share))


@shapes
def test_several_optimizers_and_missing_gradients(hosts: tuple[int, ...]) -> None:
    assert_same(run(hosts, lambda group: two_optimizers(training(group, "ps/2tcp"))), two_optimizers(Plain()))


@pytest.mark.parametrize("strategy", ["ps:clip_norm=0.05/2tcp", "ps:clip_norm=0.05/1tcp"])
def test_servers_clip_the_mean_of_all_hosts(strategy: str) -> None:
    """As without hosts: where each worker pushes for itself."""
    folded = run(PAIRS, lambda group: script(training(group, strategy), "momentum", uneven))
    flat = run(APART, lambda group: script(training(group, strategy), "momentum", uneven))
    free = script(Plain(), "momentum", uneven)
    assert_same(folded, flat[0])
    assert not torch.allclose(folded[0][0], free[0], atol=1e-4)  # so it has clipped


@pytest.mark.parametrize("hosts", [PAIRS, ODD], ids=["2+2", "3+1"])
@pytest.mark.parametrize(("count", "global_batch"), [(9, 4), (7, 3), (3, 5)])
def test_absent_workers_and_uneven_data(hosts: tuple[int, ...], count: int, global_batch: int) -> None:
    def work(group: Group) -> Worker:
        return Worker(group, "ps/2tcp", count, global_batch=global_batch).epochs(3)

    assert_alike(run(hosts, work), alone(lambda w: w.epochs(3), count, global_batch=global_batch))


def test_accumulation_counts_every_sample_once() -> None:
    def train(worker: Worker) -> None:
        for _ in worker.one.epochs(2):
            for number, (x, y, _) in enumerate(worker.loader):
                mse(worker.model, x, y).backward()
                if number % 2:
                    worker.step()
        worker.step() if number % 2 == 0 else None

    def work(group: Group) -> Worker:
        worker = Worker(group, "ps/2tcp", 20, global_batch=5)
        train(worker)
        return worker

    assert_alike(run(ODD, work), alone(train, 20, global_batch=5))


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_a_gradient_that_is_not_finite_is_named_by_rank_and_parameter(culprit: int) -> None:
    def work(group: Group) -> None:
        one = training(group, "ps/2tcp")
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(3):
            loss_of(model, part(one, batch(step))).backward()
            if step == 2 and one.rank == culprit:
                model[2].weight.grad[0, 0] = float("nan")
            optimizer.step()
            optimizer.zero_grad()

    errors = ranks.failures(4, work, "memory", hosts=PAIRS, timeout_s=10.0)
    for error in errors:
        assert isinstance(error, HoraError) and f"the gradient of 2.weight on rank {culprit} " in str(error)


def test_a_wish_to_stop_of_one_that_does_not_push_ends_all_after_the_same_step() -> None:
    def work(group: Group) -> Worker:
        worker = Worker(group, "ps/2tcp", 40, global_batch=4)
        for _ in worker.one.epochs(5):
            for number, (x, y, _) in enumerate(worker.loader):
                if number == 3 and worker.one.rank == 3:
                    worker.one.stop("enough")
                mse(worker.model, x, y).backward()
                worker.step()
        return worker

    found = run(PAIRS, work)
    assert_alike(found)
    assert found[0].one.step < 10


def pushes(
    hosts: tuple[int, ...], strategy: str, steps: int = 6, transport: str = "memory"
) -> tuple[int, int, list[Any]]:
    """Bytes of gradients into the servers and of parameters out of them, by the servers' own count, in `steps`."""

    def work(group: Group) -> Any:
        one = training(group, strategy)
        model = mlp(width=64).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        group.barrier("all are bound")
        before = [_counts(each) for each in one.sync.stats()]  # type: ignore[union-attr]
        group.barrier("all have asked")
        for step in range(steps):
            loss_of(model, part(one, batch(step).float())).backward()
            optimizer.step()
            optimizer.zero_grad()
        group.barrier("all have trained")
        after = [_counts(each) for each in one.sync.stats()]  # type: ignore[union-attr]
        client = one.sync._client  # type: ignore[union-attr]
        group.barrier("all have asked again")
        grown = [sum(b[side] - a[side] for a, b in zip(before, after, strict=True)) for side in (0, 1)]
        return grown, client.pushed_bytes, [p.detach().clone() for p in model.parameters()]

    found = ranks.run(len(hosts), work, transport, hosts=hosts)
    return found[0][0][0], found[0][0][1], found


def _counts(blob: bytes) -> tuple[int, int]:
    stats = json.loads(blob)
    return stats["bytes_in"], stats["bytes_out"]


SIZE = 4 * sum(p.numel() for p in mlp(width=64).parameters())


@pytest.mark.parametrize(("hosts", "num_hosts"), [(PAIRS, 2), (ODD, 2), (APART, 4), ((0, 0, 0, 0), 1)])
def test_each_host_pushes_and_pulls_once_a_step(hosts: tuple[int, ...], num_hosts: int) -> None:
    came, went, found = pushes(hosts, "ps/2tcp")
    assert came == 6 * num_hosts * SIZE
    assert 6 * num_hosts * SIZE <= went < 6 * num_hosts * SIZE * 1.2  # chunks are padded
    sent = [each[1] for each in found]
    assert [bytes_ > 0 for bytes_ in sent] == [hosts.index(host) == rank for rank, host in enumerate(hosts)]
    assert sum(sent) == came


def test_mates_add_up_in_shared_memory_too() -> None:
    """Ranks are threads here, but the transport is the one that hosts have."""
    came, _, found = pushes((0, 0), "ps/1tcp", transport="shm")
    assert came == 6 * SIZE and all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))


def test_a_server_on_the_host_is_reached_through_memory_as_ever() -> None:
    came, _, found = pushes((0, 0), "ps/1")
    assert came == 2 * 6 * SIZE and [each[1] for each in found] == [6 * SIZE] * 2


# -- compressed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wire", "share"), [("fp16", 0.55), ("bf16", 0.55), ("int8", 0.3), ("topk,topk=0.05", 0.15)])
@pytest.mark.parametrize("hosts", [PAIRS, APART], ids=["2+2", "1+1+1+1"])
def test_encoded_pushes_are_smaller_and_what_is_sent_is_what_counts(
    wire: str, share: float, hosts: tuple[int, ...]
) -> None:
    came, _, found = pushes(hosts, f"ps:wire={wire}/2tcp")
    num_hosts = len(set(hosts))
    assert 0 < came < share * 6 * num_hosts * SIZE
    assert sum(each[1] for each in found) == came


@pytest.mark.cases(1)
@pytest.mark.parametrize("wire", ["wire=fp16", "wire=bf16", "wire=int8", "wire=topk,topk=0.1"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_with_encoded_pushes_comes_where_plain_pushes_come(wire: str, mode: str) -> None:
    """On a convex problem, with what rounding takes fed back: far nearer to the optimum than the start."""

    def work(group: Group) -> tuple[float, float]:
        one = training(group, f"ps:mode={mode},{wire}/2tcp")
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(64, 200, generator=generator)
        y = x @ torch.randn(200, 8, generator=generator)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = torch.nn.Linear(200, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        one.prepare(model, optimizer)
        mine, theirs = x.chunk(one.size)[one.rank], y.chunk(one.size)[one.rank]
        losses = []
        for _ in range(150):
            loss = torch.nn.functional.mse_loss(model(mine), theirs)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses[0], losses[-1]

    for first, last in run(PAIRS, work):
        assert last < first / 20


def test_error_feedback_makes_up_for_what_topk_leaves_out() -> None:
    """A constant gradient: after many steps every element has moved as far as it should, within a few steps' worth."""

    def work(group: Group) -> torch.Tensor:
        one = training(group, "ps:wire=topk,topk=0.1/1tcp")
        model = torch.nn.Linear(64, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        one.prepare(model, optimizer)
        x = torch.linspace(1.0, 2.0, 64)[None]
        for _ in range(100):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().clone()

    moved = -run((0, 0), work)[0].view(-1) / torch.linspace(1.0, 2.0, 64)
    assert float(moved.min()) > 60 and float(moved.max()) <= 100.5  # without it most would stay at 0


SLOPE = torch.linspace(1.0, 2.0, 64)


def steep(one: Training, steps: int, spoilt: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps of rate 1 down a slope that never changes; on the last rank one is not finite. How far that led in all, and
    what this worker still owes."""
    model = torch.nn.Linear(64, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    one.prepare(model, optimizer)
    for step in range(steps):
        factor = float("nan") if step == spoilt and one.rank == one.size - 1 else 1.0
        (model(SLOPE[None]).sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    (link,) = one.sync._client.connections
    return -model.weight.detach().view(-1), link.codec.residuals.get(0, torch.zeros(64)).clone()


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 2)], ids=["1+1", "2+1"])
def test_a_step_that_is_not_taken_pays_no_debts(hosts: tuple[int, ...]) -> None:
    """What was sent and what is owed are together all gradients but those of the step that was not taken."""
    found = run(hosts, lambda group: steep(training(group, "ps:wire=topk,topk=0.1/1tcp", on_nonfinite="skip"), 9, 6))
    owed = sum(each * hosts.count(host) for (_, each), host in zip(found, hosts, strict=True))  # a leader, of the mean
    torch.testing.assert_close(found[0][0] * len(hosts) + owed, 8 * len(hosts) * SLOPE)


def test_a_gradient_that_came_too_late_pays_no_debts() -> None:
    """With a backup worker: what one has sent, as far as it counted, and what it owes are together what counted."""

    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor, int]:
        one = training(group, "ps:wire=topk,topk=0.1,backup=1/1tcp")
        _, owed = steep(one, 12)
        group.barrier()  # the other may still have sent something after this one's last step
        one.sync._refresh()
        return -one.sync.registry.parameters[0].detach().view(-1).clone(), owed, one.sync.num_dropped

    found = run((0, 1), work)
    assert sum(dropped for _, _, dropped in found) > 0
    counted = sum(12 - dropped for _, _, dropped in found)
    torch.testing.assert_close(found[0][0] + sum(owed for _, owed, _ in found), counted * SLOPE)


def test_a_restored_run_owes_nothing() -> None:
    def work(group: Group) -> torch.Tensor:
        one = training(group, "ps:wire=topk,topk=0.1/1tcp")
        steep(one, 3)
        sync = one.sync
        kept = {name: p.detach().clone() for name, p in zip(sync.registry.names, sync.registry.parameters, strict=True)}
        sync.restore(Snapshot(kept, {}, [{}]))
        return sum(
            (owed for link in sync._client.connections for owed in link.codec.residuals.values()), torch.zeros(64)
        )

    assert not any(bool(owed.any()) for owed in run((0, 1), work))


def test_half_and_double_precision_travel_encoded_too() -> None:
    for strategy in ("ps:wire=int8/1tcp", "ps:wire=bf16/1tcp"):
        for dtype in (torch.float64, torch.bfloat16, torch.float32):

            def work(group: Group, strategy: str = strategy, dtype: torch.dtype = dtype) -> float:
                one = training(group, strategy)
                model = mlp().to(dtype)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                one.prepare(model, optimizer)
                losses = []
                for _ in range(15):
                    loss = loss_of(model, part(one, batch(0).to(dtype)))
                    loss.backward()
                    losses.append(loss.item())
                    optimizer.step()
                    optimizer.zero_grad()
                return losses[-1] - losses[0]

            assert all(change < 0 for change in run((0, 0), work))


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_a_mean_that_half_precision_holds_is_not_lost_in_a_sum_that_it_does_not(wire: str) -> None:
    def work(group: Group) -> torch.Tensor:
        one = training(group, f"ps:wire={wire}/1tcp")
        model = torch.nn.Linear(64, 1, bias=False).half()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-14)
        one.prepare(model, optimizer)
        model.weight.grad = torch.full((1, 64), 40000.0, dtype=torch.float16)
        one.sync.after_backward()
        optimizer.step()
        return -model.weight.detach().float()

    for moved in run((0, 0, 0), work):
        torch.testing.assert_close(moved, torch.full((1, 64), 40000.0 / 2**14), rtol=0.01, atol=0.0)


@pytest.mark.parametrize(
    ("spelled", "word"),
    [
        ("ps:wire=int4", "fp32, fp16, bf16, int8, topk"),
        ("ps:wire=float16", "did you mean fp16"),
        ("ps:topk=0.1", "only with wire=topk"),
        ("ps:wire=topk,topk=0", "above 0"),
        ("ps:wire=topk,topk=1.5", "up to 1"),
    ],
)
def test_a_wire_that_does_not_exist_is_refused(spelled: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse(spelled)


def test_the_wire_is_spelled_as_it_is_read() -> None:
    for spelled in ("ps:wire=int8", "ps:mode=async,wire=topk,topk=0.05"):
        assert parse(parse(spelled).spell()) == parse(spelled) and parse(spelled).spell() == spelled


def test_the_end_of_a_run_says_what_the_wire_has_saved() -> None:
    def work(group: Group, strategy: str) -> str:
        one = training(group, strategy)
        fit(one, steps=4)
        return one.sync.describe().summary  # type: ignore[union-attr]

    assert run((0, 0), lambda g: work(g, "ps:wire=int8/1tcp"))[0].startswith("wire=int8: pushes 0.0 MB instead of")
    assert "no effect" in run((0, 0), lambda g: work(g, "ps:wire=int8/1"))[0]
    assert run((0, 0), lambda g: work(g, "ps/1tcp"))[0] == ""


# -- vanished --------------------------------------------------------------------------------------------------------


class Vanishing:
    """Workers under ssp without slack: `silent` takes one step and then says nothing more, with its lines open."""

    def __init__(self, size: int, silent: int) -> None:
        self.silent = silent
        self.quiet, self.over = threading.Event(), threading.Event()
        self.waits = threading.Event()
        self.run = ranks.Run(size, "memory", timeout_s=5.0).start(self.work)

    def work(self, group: Group) -> int:
        one = training(group, "ps:mode=ssp,staleness=0/1tcp")
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        group.barrier("all are bound")
        one.sync.join(LoopEvent.ENTERED)  # type: ignore[union-attr]
        one.sync.stats()  # type: ignore[union-attr]  # answered once the server knows that this one is in
        group.barrier("all are in")
        for step in range(1 if group.rank == self.silent else 3):
            if step == 1 and group.rank == 1:
                self.waits.set()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        if group.rank == self.silent:
            self.quiet.set()
        if group.rank in (0, self.silent):
            self.over.wait(30)
        return one.step

    def finish(self) -> ranks.Run:
        self.over.set()
        return self.run.finish()


def test_a_worker_that_is_reported_dead_holds_nobody_up_though_its_lines_are_open() -> None:
    scene = Vanishing(3, silent=2)
    assert scene.quiet.wait(20) and scene.waits.wait(20)
    scene.run._threads[1].join(0.3)
    assert scene.run._threads[1].is_alive()  # it waits for the silent one
    scene.run.hub.died(2, "its host does not answer")
    scene.run._threads[1].join(20)
    assert not scene.run._threads[1].is_alive()
    done = scene.finish()
    assert done.errors[1] is None and done.results[1] == 3


def test_who_waits_for_a_server_that_is_reported_dead_learns_who_it_was() -> None:
    scene = Vanishing(3, silent=2)
    assert scene.quiet.wait(20) and scene.waits.wait(20)
    scene.run._threads[1].join(0.3)
    assert scene.run._threads[1].is_alive()
    scene.run.hub.died(0, "its host does not answer")  # rank 0's process has the server
    scene.run._threads[1].join(20)
    done = scene.finish()
    error = done.errors[1]
    assert isinstance(error, PeerLost) and "rank 0" in str(error) and "its host does not answer" in str(error)
