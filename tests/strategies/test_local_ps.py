"""Local SGD through servers: with a barrier it is the mean of an all-reduce, without one no worker waits."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.collectives import Group
from hora.data import Shard, shard
from hora.strategies.common.sync import LoopEvent
from hora.training import Training, checkpointing
from rounds import OPTIMIZERS, SMALL, Replicas, assert_same, even, local, uneven, work
from trainings import batch, building, fail, loss_of, mlp, parameters_of, part, training
from workers import Worker, assert_alike, data, mse, net, state, workers

SERVERS = ("1", "2", "3", "1tcp", "2tcp")
PATIENCE_S = 20.0


def leased(one: Training, group: Group, rows: list[Any], **cut: Any) -> Shard:
    """A loader as job.shard makes it."""
    service = trainings.data_service(one, group, one._strategy.leased)
    return one.adopt(shard(rows, one, service=service, **cut))


class Track:
    """How far each worker has come; others may wait for it."""

    def __init__(self, size: int) -> None:
        self.steps = [0] * size
        self._moved = threading.Condition()

    def step(self, rank: int) -> None:
        with self._moved:
            self.steps[rank] += 1
            self._moved.notify_all()

    def until(self, true: Callable[[list[int]], bool]) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: true(self.steps), PATIENCE_S), f"a worker is held back: {self.steps}"


# -- with a barrier --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_via_ps_equals_the_plain_loop(servers: str, optimizer: str) -> None:
    wanted = local(Replicas(3, uneven(3), optimizer), 10, 4)
    assert_same(ranks.run(3, lambda g: work(g, f"local:every=4,via=ps/{servers}", 10, uneven(3), optimizer)), wanted)


@pytest.mark.parametrize("servers", ["1", "2tcp"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_via_ps_equals_via_workers_on_any_transport(servers: str, transport: str) -> None:
    wanted = ranks.run(3, lambda g: work(g, "local:every=4,warmup=3", 13, uneven(3), "momentum"), transport)
    text = f"local:every=4,warmup=3,via=ps/{servers}"
    assert_same(ranks.run(3, lambda g: work(g, text, 13, uneven(3), "momentum"), transport), wanted[0])


def test_large_parameters_travel_in_pieces() -> None:
    def script(group: Group, strategy: str) -> list[torch.Tensor]:
        one, model = training(group, strategy), mlp(150)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
        one.depart()
        return parameters_of(model)

    wanted = ranks.run(2, lambda g: script(g, "local:every=2"))
    assert_same(ranks.run(2, lambda g: script(g, "local:every=2,via=ps,block_bytes=65536/2")), wanted[0])


@pytest.mark.parametrize("count", [0, 1, 2, 7, 20])
@pytest.mark.parametrize("strategy", ["local:every=3,via=ps", "local:every=3,via=ps,warmup=4/2"])
def test_short_batches_and_absent_workers_count_by_their_samples(count: int, strategy: str) -> None:
    cut = {"global_batch": 3, "shuffle": True, "optimizer": "adamw"}
    found = workers(4, strategy, lambda w: w.epochs(2), count, **cut)
    wanted = workers(4, strategy.replace(",via=ps", "").removesuffix("/2"), lambda w: w.epochs(2), count, **cut)
    assert_alike(found)
    torch.testing.assert_close(found[0].state, wanted[0].state, rtol=0, atol=1e-9)


@pytest.mark.parametrize("state_option", ["keep", "average", "reset"])
def test_buffers_and_state_are_averaged_as_via_workers(state_option: str) -> None:
    def build() -> torch.nn.Module:
        with building():
            return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).double()

    def script(group: Group, via: str) -> list[torch.Tensor]:
        one, model = training(group, f"local:every=3,via={via},state={state_option}"), build()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
        one.depart()
        return parameters_of(model) + [buffer.clone() for buffer in model.buffers()]

    wanted = ranks.run(2, lambda g: script(g, "workers"))
    assert_same(ranks.run(2, lambda g: script(g, "ps")), wanted[0], rtol=1e-6)  # a bias before a norm is noise


@pytest.mark.parametrize("breaker", [0, 1])
def test_one_that_breaks_out_alone_takes_all_out(breaker: int) -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(3):
            for number, (x, y, _) in enumerate(worker.loader):
                if worker.one.rank == breaker and number == 4:
                    break
                mse(worker.model, x, y).backward()
                worker.step()

    found = workers(3, "local:every=3,via=ps", work, 60, global_batch=3)
    assert all(worker.state.equal(found[0].state) and worker.one.stopped() for worker in found)
    assert [worker.one.step for worker in found] == [4 if rank == breaker else 6 for rank in range(3)]


@pytest.mark.parametrize("servers", ["1", "2"])
def test_parameters_that_are_not_finite_are_named_and_do_not_reach_the_servers(servers: str) -> None:
    def script(one: Any) -> None:
        model = mlp(SMALL)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
            if step == 2 and one.rank == 1:
                with torch.no_grad():
                    model[2].weight[0, 0] = float("nan")
                model.forward = lambda x: model[0](x)  # so that no gradient tells

    for said in fail(script, f"local:every=4,via=ps/{servers}"):
        assert said.startswith("HoraError: the value of 2.weight on rank 1"), said


@pytest.mark.parametrize("when", [3, 5])
def test_layers_may_be_unfrozen_and_what_the_servers_do_not_have_is_named(when: int) -> None:
    def script(group: Group, strategy: str, later: bool) -> list[torch.Tensor]:
        one, model = training(group, strategy), mlp(SMALL)
        model[0].requires_grad_(False)
        held = model[2:].parameters() if later else model.parameters()
        optimizer = torch.optim.SGD(held, lr=0.05)
        one.prepare(model, optimizer)
        for step in range(9):
            optimizer.zero_grad()
            if step == when:
                model[0].requires_grad_(True)
                if later:
                    optimizer.add_param_group({"params": list(model[0].parameters())})
            loss_of(model, even(2)(group.rank, step)).backward()
            optimizer.step()
        one.depart()
        return parameters_of(model)

    wanted = ranks.run(2, lambda g: script(g, "local:every=4", False))
    assert_same(ranks.run(2, lambda g: script(g, "local:every=4,via=ps/2", False)), wanted[0])
    for error in ranks.failures(2, lambda g: script(g, "local:every=4,via=ps", True)):
        assert "0.weight is in no optimizer that job.prepare() got" in str(error)


def test_the_bytes_are_what_a_worker_gives_to_the_servers() -> None:
    def script(group: Group) -> int:
        sent: list[int] = []
        work(group, "local:every=4,via=ps/2", 8, each=lambda one, m, s: sent.append(one.sync.traffic.sent_bytes))
        return sent[-1]

    numel = sum(p.numel() for p in mlp(SMALL).parameters())
    assert ranks.run(2, script) == [2 * numel * 8] * 2


# -- without -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", ["1", "1tcp"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("count", "batch_size", "every"), [(24, 2, 3), (25, 2, 4), (7, 3, 5), (5, 1, "2/3@2/4@5")])
def test_one_worker_alone_trains_as_plain_pytorch(
    count: int, batch_size: int, every: object, optimizer: str, servers: str
) -> None:
    """Whatever is left at the end of a loop, and however short its last batch: its share is all."""
    model = net()
    plain = OPTIMIZERS[optimizer](model.parameters())
    rows = data(count)
    for _ in range(2):
        for at in range(0, count, batch_size):
            x, y = (torch.stack([row[which] for row in rows[at : at + batch_size]]) for which in (0, 1))
            plain.zero_grad()
            mse(model, x, y).backward()
            plain.step()

    def script(group: Group) -> torch.Tensor:
        one, mine = training(group, f"local:every={every},via=ps,barrier=false/{servers}"), net()
        chosen = OPTIMIZERS[optimizer](mine.parameters())
        one.prepare(mine, chosen)
        loader = leased(one, group, rows, batch_size=batch_size)
        for _ in one.epochs(2):
            for x, y, _ in loader:
                chosen.zero_grad()
                mse(mine, x, y).backward()
                chosen.step()
        return state(mine)

    torch.testing.assert_close(ranks.run(1, script)[0], state(model), rtol=1e-9, atol=1e-11)


def test_reports_follow_the_schedule() -> None:
    """A round that has begun keeps its length: 2 from step 0, 3 from step 2 on, 4 from step 4 on."""

    def script(group: Group) -> list[int]:
        rounds: list[int] = []
        work(group, "local:every=2/3@2/4@4,via=ps,barrier=false", 10,
             each=lambda one, model, step: rounds.append(one.sync.rounds))  # fmt: skip
        return rounds

    assert ranks.run(1, script) == [[0, 1, 1, 1, 2, 2, 2, 2, 3, 3]]


@pytest.mark.parametrize("first", [0, 1])
def test_two_optimizers_of_one_worker_leave_nothing_behind(first: int) -> None:
    """Whichever steps first, in steps of two backwards that weigh differently."""

    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(SMALL)
        pair = [torch.optim.SGD(model[:2].parameters(), lr=0.05), torch.optim.SGD(model[2:].parameters(), lr=0.03)]
        one.prepare(model, pair)
        for step in range(5):
            for number in range(2):
                one.weight(1)
                loss_of(model, batch(10 * step + number)).backward()
            pair[first].step()
            pair[1 - first].step()
            model.zero_grad()
        if not isinstance(one, trainings.Plain):
            one.sync.join(LoopEvent.FINISHED)
        return parameters_of(model)

    wanted = script(trainings.Plain())
    found = ranks.run(1, lambda group: script(training(group, "local:every=2,via=ps,barrier=false")))
    assert_same(found, wanted)


@pytest.mark.parametrize("servers", SERVERS[:2] + SERVERS[3:])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_reports_from_the_same_point_make_the_mean(servers: str, order: tuple[int, int]) -> None:
    """Both take their steps, then one reports after the other; the second one then has the mean of both."""
    turns = [threading.Event(), threading.Event()]
    turns[0].set()

    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, f"local:every=3,via=ps,barrier=false/{servers}"), mlp(SMALL)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        one.prepare(model, optimizer)
        one.sync.join(LoopEvent.ENTERED)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, even(2)(group.rank, step)).backward()
            if step == 2:
                group.barrier("both are there")
                mine = order.index(group.rank)
                assert turns[mine].wait(PATIENCE_S)
            optimizer.step()
        if mine == 0:
            turns[1].set()
        group.barrier("both have reported")
        one.sync.join(LoopEvent.FINISHED)
        return parameters_of(model)

    replicas = Replicas(2, even(2), "momentum")
    assert_same(ranks.run(2, script), local(replicas, 3, 3))


@pytest.mark.parametrize("servers", ["1", "2tcp"])
def test_a_slow_worker_never_blocks_the_fast_one(servers: str) -> None:
    """Rank 1 does not take its second step, in the middle of its round, before rank 0 has closed 12 rounds."""
    track = Track(2)

    def script(group: Group) -> int:
        one, model = training(group, f"local:every=2,via=ps,barrier=false/{servers}"), mlp(SMALL)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        one.sync.join(LoopEvent.ENTERED)
        for step in range(25 if group.rank == 0 else 3):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            if group.rank == 1 and step == 1:
                track.until(lambda steps: steps[0] >= 24)
            optimizer.step()
            track.step(group.rank)
        rounds = one.sync.rounds
        one.sync.join(LoopEvent.FINISHED)
        return rounds

    assert ranks.run(2, script) == [12, 1]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 5, 29])
def test_without_a_barrier_every_sample_is_done_once_and_all_end_with_the_servers_model(size: int, count: int) -> None:
    def script(group: Group) -> tuple[list[int], torch.Tensor]:
        one, model = training(group, "local:every=3,via=ps,barrier=false"), net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        loader = leased(one, group, data(count), batch_size=2, shuffle=True)
        seen: list[int] = []
        for _ in one.epochs(3):
            for x, y, numbers in loader:
                seen += numbers.tolist()
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
        group.barrier("all have reported")
        one.sync._refresh()
        return seen, state(model)

    found = ranks.run(size, script)
    assert sorted(n for seen, _ in found for n in seen) == sorted([*range(count)] * 3)
    assert all(mine.equal(found[0][1]) and bool(torch.isfinite(mine).all()) for _, mine in found)


def test_without_a_barrier_a_round_counts_by_its_share_of_the_samples() -> None:
    """Two workers; rank 0's batches are of 6, of 6 and of 3 samples: of 15 + 18 it has 15."""

    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, "local:every=3,via=ps,barrier=false"), mlp(SMALL)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        group.barrier("begin")
        if group.rank == 0:
            for step, samples in enumerate((6, 6, 3)):
                one.weight(samples)
                optimizer.zero_grad()
                loss_of(model, batch(step)[:samples]).backward()
                optimizer.step()
        group.barrier("end")
        return parameters_of(model)

    begin, replicas = parameters_of(mlp(SMALL)), Replicas(1, lambda rank, step: batch(step)[: (6, 6, 3)[step]])
    for step in range(3):
        replicas.step(step)
    wanted = [a + (b - a) * (15 / 33) for a, b in zip(begin, replicas.result(), strict=True)]
    assert_same(ranks.run(2, script)[:1], wanted)


def test_without_a_barrier_values_that_are_not_finite_are_named_and_not_reported() -> None:
    def script(one: Any) -> None:
        model = mlp(SMALL)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            if step == 1 and one.rank == 1:
                with torch.no_grad():
                    model[2].weight[0, 0] = float("inf")
                model.forward = lambda x: model[0](x)
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())

    said = fail(script, "local:every=3,via=ps,barrier=false")
    assert said[0] == "" and said[1].startswith("HoraError: the value of 2.weight on rank 1"), said


@pytest.mark.parametrize("fused", [False, True])
def test_without_a_barrier_a_refused_step_is_one_workers_own_affair(fused: bool) -> None:
    def script(group: Group) -> tuple[int, float]:
        one, model = training(group, "local:every=2,via=ps,barrier=false"), mlp(SMALL).float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        one.prepare(model, optimizer, None, scaler)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step).float())
            one.weight(4)
            scaler.scale(loss * float("inf") if step in (1, 2) and group.rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        seen = one.sync._largest_batch
        one.sync.join(LoopEvent.FINISHED)
        return one.sync.rounds, seen

    assert ranks.run(2, script) == [(3, 4.0), (2, 4.0)]


@pytest.mark.parametrize(
    "strategy", ["local:every=3,via=ps", "local:every=3,via=ps/2tcp", "local:every=3,via=ps,barrier=false"]
)
def test_a_run_that_is_restored_goes_on_as_the_one_that_saved(strategy: str, tmp_path: pathlib.Path) -> None:
    """In the middle of a round, with one worker where none waits; twice in one process."""
    size = 1 if "barrier" in strategy else 2

    def script(group: Group, restore: bool) -> list[torch.Tensor]:
        one, model = training(group, strategy), mlp(SMALL)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one.prepare(model, optimizer)
        if restore:
            loss_of(model, batch(99)).backward()
            optimizer.step()  # a step that the restored state knows nothing of
            optimizer.zero_grad()
            if size == 2:
                one.depart()
            checkpointing.restore(one, group, str(tmp_path))
        for step in range(4 if restore else 0, 11):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
            if step == 3 and not restore:
                checkpointing.save(one, group, str(tmp_path), "local", 2)
        one.depart()
        one.sync.join(LoopEvent.FINISHED)
        return parameters_of(model)

    wanted = ranks.run(size, lambda g: script(g, False))
    found = ranks.run(size, lambda g: script(g, True))
    assert_same(found, wanted[0], rtol=1e-12)
