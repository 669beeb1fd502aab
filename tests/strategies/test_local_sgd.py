"""Local SGD: workers train alone and agree in rounds, as a plain loop over all of them would.

The references are in tests/rounds.py; parameters in float64 agree to 1e-9, and bit for bit between workers.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.collectives import Group
from hora.data import Shard, shard
from hora.strategies import parse
from hora.strategies.local.round import adapt_interval
from hora.training import Training
from rounds import OPTIMIZERS, SMALL, Replicas, assert_same, even, local, uneven, work
from trainings import batch, building, fail, loss_of, mlp, parameters_of, part, same, training
from workers import Worker, assert_alike, data, mse, net, state, workers

NAN = float("nan")


def leased(one: Training, group: Group, rows: list[Any], **cut: Any) -> Shard:
    """A loader as job.shard makes it."""
    service = trainings.data_service(one, group, one._strategy.leased)
    return one.adopt(shard(rows, one, service=service, **cut))


# -- equivalence -----------------------------------------------------------------------------------------------------


def equal_steps(one: Any, optimizer: str = "sgd", steps: int = 12) -> list[torch.Tensor]:
    model = mlp(SMALL)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    one.prepare(model, chosen)
    for step in range(steps):
        chosen.zero_grad()
        loss_of(model, part(one, batch(step))).backward()
        chosen.step()
    return parameters_of(model)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree", "halving", "star", "shared"])
def test_every_1_with_plain_sgd_equals_one_process_on_the_whole_batch(algorithm: str, size: int) -> None:
    same(equal_steps, f"local:every=1,algorithm={algorithm}", size, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strategy", ["local:every=1", "local:every=1/1@3", "local:every=9,warmup=100"])
def test_every_1_with_plain_sgd_equals_the_ring_on_dealt_data_of_any_size(strategy: str) -> None:
    for count, global_batch in ((31, 6), (7, 3), (2, 5), (10, 4)):
        cut = {"global_batch": global_batch, "shuffle": True}

        def plain(w: Worker) -> None:
            w.optimizer.param_groups[0]["momentum"] = 0.0
            w.epochs(2)

        assert_alike(found := workers(3, strategy, plain, count, **cut))
        wanted = workers(3, "ring", plain, count, **cut)
        torch.testing.assert_close(found[0].state, wanted[0].state, rtol=0, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(("size", "every", "steps"), [(2, 2, 8), (3, 5, 13), (2, 7, 7), (4, 3, 2), (1, 4, 9)])
def test_any_interval_equals_the_plain_loop(size: int, every: int, steps: int, optimizer: str) -> None:
    wanted = local(Replicas(size, even(size), optimizer), steps, every)
    assert_same(ranks.run(size, lambda g: work(g, f"local:every={every}", steps, optimizer=optimizer)), wanted)


@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree", "halving", "star", "shared", "engine"])
@pytest.mark.parametrize("size", [2, 3])
def test_any_collective_gives_the_same(algorithm: str, size: int) -> None:
    wanted = local(Replicas(size, uneven(size), "momentum"), 9, 4)
    text = f"local:every=4,algorithm={algorithm}"
    assert_same(ranks.run(size, lambda g: work(g, text, 9, uneven(size), "momentum")), wanted)


@pytest.mark.parametrize("transport", ["shm", "tcp", "engine"])
def test_any_transport_gives_the_same(transport: str) -> None:
    wanted = local(Replicas(3, uneven(3), "adamw"), 9, 4, warmup=2)
    assert_same(ranks.run(3, lambda g: work(g, "local:every=4,warmup=2", 9, uneven(3), "adamw"), transport), wanted)


def test_workers_count_by_what_job_weight_says() -> None:
    """A worker that says 0 has no say in the mean."""
    assert_same(ranks.run(3, lambda g: work(g, "local:every=3", 10, uneven(3))), local(Replicas(3, uneven(3)), 10, 3))

    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, "local:every=2"), mlp(SMALL)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(2):
            one.weight(0 if group.rank else 5)
            optimizer.zero_grad()
            loss_of(model, even(2)(group.rank, step)).backward()
            optimizer.step()
        return parameters_of(model)

    replicas = Replicas(1, lambda rank, step: batch(step).chunk(2)[0])
    replicas.step(0)
    replicas.step(1)
    assert_same(ranks.run(2, script), replicas.result())


class Log:
    """What a worker was given in which step, so that the reference can be given the same."""

    def __init__(self, group: Group, strategy: str, optimizer: str, epochs: int, rows: list[Any], **cut: Any) -> None:
        one, model = training(group, strategy), mlp(SMALL)
        chosen = OPTIMIZERS[optimizer](model.parameters())
        one.prepare(model, chosen)
        loader = one.adopt(shard(rows, one, **cut))
        self.given: dict[int, torch.Tensor] = {}
        self.ends: list[int] = []
        for _ in one.epochs(epochs):
            for x in loader:
                self.given[one.step] = x
                chosen.zero_grad()
                loss_of(model, x).backward()
                chosen.step()
            self.ends.append(one.step)
        self.result = parameters_of(model)


@pytest.mark.parametrize("seed", range(12))
def test_any_size_any_batch_any_number_of_workers_trains_as_the_plain_loop(seed: int) -> None:
    """12 x 4 random cases: short last batches, workers without samples, epochs that no interval divides."""
    dice = random.Random(seed)
    for _ in range(4):
        size, count, epochs = dice.randint(2, 5), dice.choice([0, 1, 2, dice.randint(3, 40)]), dice.randint(1, 3)
        every, optimizer = dice.randint(1, 6), dice.choice(["momentum", "adamw"])
        warmup = dice.choice([0, 0, dice.randint(1, 9)])
        cut = {"global_batch": dice.randint(1, 9), "shuffle": dice.random() < 0.5}
        case = f"{size} workers, {count} samples, {epochs} epochs, every={every}, warmup={warmup}, {optimizer}, {cut}"
        rows = [row for step in range(-(-count // 12)) for row in batch(step)][:count]
        given = (f"local:every={every},warmup={warmup}", optimizer, epochs, rows)
        logs = ranks.run(size, lambda g, given=given, cut=cut: Log(g, *given, **cut))
        replicas = Replicas(size, lambda rank, step, logs=logs: logs[rank].given.get(step), optimizer)
        begin = warmup
        for step in range(logs[0].ends[-1]):
            if step < warmup:
                replicas.step_together(step)
            else:
                replicas.step(step)
            if step + 1 in logs[0].ends or (step >= warmup and step + 1 - begin >= every):
                replicas.average()
                begin = max(step + 1, warmup)
        assert logs[0].ends == [(n + 1) * -(-count // cut["global_batch"]) for n in range(epochs)], case
        try:
            assert_same([log.result for log in logs], replicas.result())
        except AssertionError as error:
            raise AssertionError(case) from error


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_warm_up_equals_the_ring_and_rounds_begin_after_it(optimizer: str, size: int) -> None:
    def until(steps: int, strategy: str) -> list[list[torch.Tensor]]:
        found = []

        def script(group: Group) -> list[torch.Tensor]:
            kept: list[list[torch.Tensor]] = []
            work(group, strategy, steps, uneven(size), optimizer,
                 each=lambda one, model, step: kept.append(parameters_of(model)))  # fmt: skip
            return kept[-1]

        found = ranks.run(size, script)
        return found

    ring = until(6, "ring")
    assert_same(until(6, "local:every=4,warmup=6"), ring[0])
    assert_same(ranks.run(size, lambda g: work(g, "local:every=4,warmup=6", 15, uneven(size), optimizer)),
                local(Replicas(size, uneven(size), optimizer), 15, 4, warmup=6))  # fmt: skip


def test_the_interval_follows_its_schedule() -> None:
    """A round that has begun keeps its length: 2 from step 0, 3 from step 5 on, 5 from step 11 on."""
    ends: list[int] = []

    def script(group: Group) -> list[torch.Tensor]:
        before = [0]

        def each(one: Any, model: Any, step: int) -> None:
            if one.sync.rounds != before[0]:
                before[0] = one.sync.rounds
                if group.rank == 0:
                    ends.append(step + 1)

        return work(group, "local:every=2/3@5/5@11", 23, uneven(2), "momentum", each=each)

    def interval(step: int) -> int:
        return 5 if step >= 11 else 3 if step >= 5 else 2

    assert_same(ranks.run(2, script), local(Replicas(2, uneven(2), "momentum"), 23, interval))
    assert ends == [2, 4, 6, 9, 12, 17, 22]


@pytest.mark.parametrize("way", ["accumulate", "plain"])
@pytest.mark.parametrize(
    "strategy", ["local:every=1", "local:every=1,warmup=100", "diloco:every=1,outer_lr=1.0,outer_momentum=0.0"]
)
def test_backwards_that_pile_up_count_by_their_samples(way: str, strategy: str) -> None:
    """Three backwards before a step, of parts of different lengths, as one process would do it."""

    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(SMALL)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(6):
            optimizer.zero_grad()
            for number in range(3):
                whole = batch(10 * step + number)
                edges = [0, 12] if one.size == 1 else [[0, 4, 12], [0, 7, 12], [0, 1, 12]][number]
                x = whole[edges[one.rank] : edges[one.rank + 1]]
                one.weight(len(x))
                if way == "accumulate" and number < 2:
                    with one.accumulate():
                        loss_of(model, x).backward()
                else:
                    loss_of(model, x).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, rtol=1e-9, atol=1e-11)


def test_an_accumulation_that_was_given_up_has_no_say() -> None:
    """Rank 1 clears the gradients of a batch and takes the next one: only that counts."""

    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, "local:every=1"), mlp(SMALL)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            if group.rank == 1:
                one.weight(1000)
                loss_of(model, batch(50 + step)).backward()
                optimizer.zero_grad()
            x = uneven(2)(group.rank, step)
            one.weight(len(x))
            loss_of(model, x).backward()
            optimizer.step()
        return parameters_of(model)

    assert_same(ranks.run(2, script), local(Replicas(2, uneven(2)), 3, 1))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("strategy", ["local:every=1", "local:every=3,warmup=100", "local:every=1,warmup=2"])
def test_several_optimizers_share_a_backward(strategy: str, first: int) -> None:
    """Each backward of its own weight, two per step; whichever optimizer comes first."""

    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(SMALL)
        pair = [torch.optim.SGD(model[:2].parameters(), lr=0.05), torch.optim.SGD(model[2:].parameters(), lr=0.03)]
        one.prepare(model, pair)
        for step in range(4):
            for number in range(2):
                whole = batch(10 * step + number)
                edges = [0, 12] if one.size == 1 else [[0, 4, 12], [0, 7, 12]][number]
                x = whole[edges[one.rank] : edges[one.rank + 1]]
                one.weight(len(x))
                loss_of(model, x).backward()
            for optimizer in (pair[first], pair[1 - first]):
                optimizer.step()
            for optimizer in pair:
                optimizer.zero_grad()
        if hasattr(one, "depart"):
            one.depart()
        return parameters_of(model)

    same(script, strategy, rtol=1e-9, atol=1e-11)


def test_optimizers_that_take_turns_leave_nothing_behind() -> None:
    """A pair as in a GAN, each with its own forward and backward: after the loop all is the same everywhere."""

    def script(group: Group) -> list[torch.Tensor]:
        one, models = training(group, "local:every=2"), [mlp(SMALL), mlp(SMALL, seed=1)]
        pair = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
        one.prepare(models, pair)
        rows = [row for step in range(5) for row in batch(step)]
        loader = one.adopt(shard(rows, one, global_batch=12))
        for x in loader:
            for model, optimizer in zip(models, pair, strict=True):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
        return parameters_of(*models)

    found = ranks.run(3, script)
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


# -- what else a round averages --------------------------------------------------------------------------------------


def normed() -> torch.nn.Module:
    with building():
        return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).double()


@pytest.mark.parametrize("strategy", ["local:every=3", "diloco:every=3", "diloco:every=3,fragments=2"])
def test_buffers_become_their_mean_and_counts_rank_0s(strategy: str) -> None:
    """Rank r's batches are 1 + r samples more; the counter of rank 0 is set apart to be recognised."""

    def script(group: Group) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
        one, model = training(group, strategy), normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        one.prepare(model, optimizer)
        before: list[torch.Tensor] = []
        for step in range(3):
            x = batch(step)[: 4 + 2 * group.rank]
            one.weight(len(x))
            optimizer.zero_grad()
            loss_of(model, x).backward()
            if step == 2:
                if group.rank == 0:
                    model[1].num_batches_tracked += 40
                before = [buffer.clone() for buffer in model.buffers()]
            optimizer.step()
        return before, [buffer.clone() for buffer in model.buffers()], float(group.rank)

    found = ranks.run(3, script)
    shares = [4 / 18, 6 / 18, 8 / 18]
    for number in (0, 1):
        wanted = sum(before[number] * share for (before, _, _), share in zip(found, shares, strict=True))
        for _, after, _ in found:
            torch.testing.assert_close(after[number], wanted)
            assert after[number].equal(found[0][1][number])
    assert [after[2].item() for _, after, _ in found] == [43, 43, 43]


@pytest.mark.parametrize("state_option", ["keep", "average", "reset"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_the_optimizers_state_is_kept_averaged_or_reset(state_option: str, optimizer: str) -> None:
    replicas = Replicas(2, uneven(2), optimizer)
    for step in range(12):
        replicas.step(step)
        if step % 4 == 3:
            seen = list(replicas.seen)
            replicas.average()
            if state_option == "reset":
                for each in replicas.optimizers:
                    each.state.clear()
            if state_option == "average":
                replicas.seen = seen
                states = [list(each.state.values()) for each in replicas.optimizers]
                for column in zip(*states, strict=True):
                    for key in column[0]:
                        mean = replicas.mean([kept[key] for kept in column])
                        for kept in column:
                            kept[key].copy_(mean)
                replicas.seen = [0.0, 0.0]
    text = f"local:every=4,state={state_option}"
    assert_same(ranks.run(2, lambda g: work(g, text, 12, uneven(2), optimizer)), replicas.result())


def test_a_state_that_only_some_have_is_averaged_over_these() -> None:
    """Rank 1 has never had a gradient of the second layer: it gets rank 0's state of it, unweighted."""

    def script(group: Group) -> torch.Tensor:
        one, model = training(group, "local:every=2,state=average"), mlp(SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        one.prepare(model, optimizer)
        for step in range(2):
            optimizer.zero_grad()
            whole = model if group.rank == 0 else model[:1]
            whole(batch(step)[:, :6]).square().mean().backward()
            if step == 1 and group.rank == 0:
                kept = optimizer.state[model[2].weight]["momentum_buffer"]
                wanted = kept * 0.9 + model[2].weight.grad
            optimizer.step()
        found = optimizer.state[model[2].weight]["momentum_buffer"].clone()
        if group.rank == 0:
            torch.testing.assert_close(found, wanted)
        return found

    found = ranks.run(2, script)
    assert found[0].equal(found[1]) and found[0].abs().sum() > 0


def test_sparse_momentum_is_left_alone_by_an_average_of_states() -> None:
    def script(group: Group) -> torch.Tensor:
        one = training(group, "local:every=2,state=average")
        with building():
            table = torch.nn.Embedding(9, 4, sparse=True).double()
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
        one.prepare(table, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            table(torch.tensor([step, step + group.rank])).square().sum().backward()
            optimizer.step()
        one.depart()
        return table.weight.detach().clone()

    found = ranks.run(2, script)
    assert found[0].equal(found[1])


# -- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "algorithm"), [("memory", "ring"), ("tcp", "ring"), ("shm", "shared")])
@pytest.mark.parametrize("size", [2, 3])
def test_a_round_every_8_steps_sends_an_eighth_of_what_the_ring_does(transport: str, algorithm: str, size: int) -> None:
    def sent(group: Group, strategy: str) -> int:
        one, model = training(group, strategy), mlp(64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        for step in range(16):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
        return one.sync.traffic.sent_bytes

    ring = ranks.run(size, lambda g: sent(g, f"{algorithm}:overlap=false"), transport)
    found = ranks.run(size, lambda g: sent(g, f"local:every=8,algorithm={algorithm}"), transport)
    for mine, theirs in zip(found, ring, strict=True):
        if algorithm == "shared":  # memory is shared: by how much others read, and as a ring would
            assert mine == pytest.approx(2 * 2 * (size - 1) / size * sum(p.numel() for p in mlp(64).parameters()) * 8)
        else:
            assert mine == pytest.approx(theirs / 8, rel=0.05)


# -- leaving and stopping --------------------------------------------------------------------------------------------

SOME = ["local:every=3", "local:every=3,warmup=2", "diloco:every=4,fragments=2", "diloco:every=4,overlap=2",
        "local:every=100", "diloco:every=4,wire=int8"]  # fmt: skip


@pytest.mark.parametrize("strategy", SOME)
@pytest.mark.parametrize("breaker", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 4, 5])
def test_one_that_breaks_out_alone_takes_all_out_after_the_same_round(strategy: str, breaker: int, at: int) -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(3):
            for number, (x, y, _) in enumerate(worker.loader):
                if worker.one.rank == breaker and number == at and not worker.one.stopped():
                    break
                mse(worker.model, x, y).backward()
                worker.step()
        assert worker.one._group.all_reduce(torch.ones(1)).item() == 3

    found = workers(3, strategy, work, 60, global_batch=3)
    assert all(worker.state.equal(found[0].state) for worker in found)
    others = {worker.one.step for worker in found if worker.one.rank != breaker}
    assert found[breaker].one.step == at and len(others) == 1
    assert all(worker.one.stopped() for worker in found)
    assert max(others) <= (20 if "100" in strategy else at + 8), "they went on beyond the round"


@pytest.mark.parametrize("breaker", [0, 1])
def test_it_is_said_who_left_its_loop(breaker: int, caplog: pytest.LogCaptureFixture) -> None:
    def work(worker: Worker) -> None:
        for number, (x, y, _) in enumerate(worker.loader):
            mse(worker.model, x, y).backward()
            worker.step()
            if worker.one.rank == breaker and number == 3:
                break
        worker.one.stopped()

    with caplog.at_level(logging.WARNING):
        workers(2, "local:every=3", work, 60, global_batch=2)
    said = [record.getMessage() for record in caplog.records if "stopped after" in record.getMessage()]
    assert len(said) == 1 and f"rank {breaker}" in said[0] and "left its loop after step 4" in said[0], said


@pytest.mark.parametrize("strategy", SOME)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_when_all_break_out_together_none_is_stopped(strategy: str, at: int) -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(3):
            for number, (x, y, _) in enumerate(worker.loader):
                mse(worker.model, x, y).backward()
                worker.step()
                if number == at:
                    break

    found = workers(3, strategy, work, 30, global_batch=3)
    assert_alike(found)
    assert found[0].one.step == 3 * (at + 1) and not found[0].one.stopped()


@pytest.mark.parametrize("strategy", SOME)
@pytest.mark.parametrize("who", [{0}, {2}, {0, 1, 2}])
def test_stop_ends_all_after_the_same_round(strategy: str, who: set[int]) -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(3):
            for x, y, _ in worker.loader:
                mse(worker.model, x, y).backward()
                worker.step()
                if worker.one.step == 5 and worker.one.rank in who:
                    worker.one.stop("enough")

    found = workers(3, strategy, work, 60, global_batch=3)
    assert_alike(found)
    assert all(worker.one.stopped() for worker in found)
    assert 5 < found[0].one.step <= (20 + 20 if "100" in strategy else 12)


@pytest.mark.parametrize("strategy", SOME)
@pytest.mark.parametrize("size", [1, 3])
def test_max_steps_ends_all_there(strategy: str, size: int) -> None:
    def work(worker: Worker) -> None:
        worker.one.max_steps = 7
        worker.epochs(5)

    found = workers(size, strategy, work, 12, global_batch=3)
    assert_alike(found)
    assert found[0].one.step == 7


@pytest.mark.parametrize(
    "strategy", ["local:every=4", "local:every=4,warmup=5", "diloco:every=4,overlap=3", "diloco:every=6,fragments=3"]
)
@pytest.mark.parametrize("steps", [(5, 9, 12), (1, 8, 8), (7, 3, 2), (4, 4, 5)])
def test_plain_loops_of_different_lengths_do_not_hang(strategy: str, steps: tuple[int, ...]) -> None:
    """Without job.shard: a worker that is done takes part in the others' rounds."""

    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, strategy), mlp(SMALL)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one.prepare(model, optimizer)
        for again in range(2):
            for step in range(steps[(group.rank + again) % 3]):
                optimizer.zero_grad()
                loss_of(model, batch(step)).backward()
                optimizer.step()
            one.depart()
        return parameters_of(model)

    found = ranks.run(3, script)
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("strategy", SOME)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("quits", [False, True])
def test_a_break_in_a_batch_in_which_one_has_no_samples_is_a_break_for_it_too(
    strategy: str, quits: bool, saves: bool
) -> None:
    """Three batches of 4, 4 and 1 samples: ranks 0 and 1, or 0 alone, break out of the last one; of job.epochs too, or
    not. Rank 2 could not see it."""

    def work(worker: Worker) -> None:
        for epoch in worker.one.epochs(4):
            for number, (x, y, _) in enumerate(worker.loader):
                mse(worker.model, x, y).backward()
                worker.step()
                if number == 2:
                    break
            if saves:
                worker.one.depart()
            if quits and epoch == 1 and worker.one.rank < 2:
                break
        worker.one.depart()

    found = workers(3, strategy, work, 9, global_batch=4)
    assert all(worker.state.equal(found[0].state) for worker in found)
    assert [worker.one.step for worker in found] == ([6, 6, 6] if quits else [12, 12, 12])


def test_one_may_depart_from_inside_of_its_loop_and_another_after_it() -> None:
    """As two that save in different places: no worker waits in vain, whichever comes first."""

    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(2):
            for number, (x, y, _) in enumerate(worker.loader):
                mse(worker.model, x, y).backward()
                worker.step()
                if number == 4 and worker.one.rank == 0:
                    worker.one.depart()
            if worker.one.rank != 0:
                worker.one.depart()

    assert_alike(workers(3, "local:every=4", work, 15, global_batch=3))


def test_evaluations_in_between_are_dealt_and_change_nothing() -> None:
    def work(worker: Worker, evaluate: bool) -> None:
        test = worker.one.adopt(shard(data(7), worker.one, global_batch=2))
        for _ in worker.one.epochs(2):
            for number, (x, y, _) in enumerate(worker.loader):
                mse(worker.model, x, y).backward()
                worker.step()
                if evaluate and number == 1:
                    with torch.no_grad():
                        worker.seen += [n for _, _, numbers in test for n in numbers.tolist()]
            if evaluate:
                worker.model.eval()
                worker.seen += [n for _, _, numbers in test for n in numbers.tolist()]
                worker.model.train()

    found = workers(3, "local:every=4", lambda w: work(w, True), 20, global_batch=3)
    plain = workers(3, "local:every=4", lambda w: work(w, False), 20, global_batch=3)
    assert_alike(found)
    assert found[0].state.equal(plain[0].state)
    assert sorted(n for w in found for n in w.seen) == sorted([*range(7)] * 4)


@pytest.mark.parametrize("strategy", SOME)
def test_schedulers_and_clipping_are_each_workers_own(strategy: str) -> None:
    def script(group: Group) -> tuple[torch.Tensor, float]:
        one, model = training(group, strategy), mlp(SMALL)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        one.prepare(model, optimizer, scheduler)
        for step in range(9):
            optimizer.zero_grad()
            loss_of(model, even(2)(group.rank, step)).backward()
            norm = one.clip(model.parameters(), 0.1, 2.0)
            assert norm > 0
            optimizer.step()
            scheduler.step()
        one.depart()
        return parameters_of(model)[0], optimizer.param_groups[0]["lr"]

    found = ranks.run(2, script)
    assert found[0][0].equal(found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize("strategy", [*SOME, "local:every=4,via=ps"])
def test_schedulers_of_a_worker_without_samples_go_along(strategy: str) -> None:
    """Batches of 4, 4 and 1 samples for three workers, with a scheduler that is stepped in each."""
    assert_alike(found := workers(3, strategy, lambda w: w.epochs(2), 9, global_batch=4, schedule=True))
    assert found[2].scheduler.last_epoch == 6


# -- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SOME[:2])
def test_a_gradient_that_is_not_finite_is_named_by_its_worker(strategy: str) -> None:
    def script(one: Any) -> None:
        model = mlp(SMALL)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, part(one, batch(step)))
            (loss * NAN if step == 4 and one.rank == 1 else loss).backward()
            optimizer.step()

    said = fail(script, strategy, timeout_s=1.0)
    assert said[1].startswith("HoraError: the gradient of 0.weight") and "on rank 1" in said[1]
    assert "is not finite" in said[1] and "The step was not taken" in said[1]


@pytest.mark.parametrize("strategy", SOME)
def test_skip_leaves_out_the_step_of_one_worker_and_its_samples(strategy: str) -> None:
    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, strategy, on_nonfinite="skip"), mlp(SMALL)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(9):
            optimizer.zero_grad()
            loss = loss_of(model, even(2)(group.rank, step))
            (loss * NAN if step in (1, 4) and group.rank == 1 else loss).backward()
            optimizer.step()
        one.depart()
        return parameters_of(model)

    found = ranks.run(2, script)
    assert all(a.equal(b) and bool(torch.isfinite(a).all()) for a, b in zip(*found, strict=True))
    if strategy == "local:every=3":
        replicas = Replicas(
            2, lambda rank, step: None if rank == 1 and step in (1, 4) else even(2)(rank, step), "momentum"
        )
        assert_same(found, local(replicas, 9, 3))


@pytest.mark.cases(2)
@pytest.mark.parametrize("strategy", ["local:every=4", "diloco:every=4", "diloco:every=4,wire=int8",
                                      "diloco:every=4,wire=bf16", "diloco:every=4,fragments=2"])  # fmt: skip
@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # the broken loops end in silence
def test_parameters_that_are_not_finite_are_named_on_every_worker(strategy: str, value: float) -> None:
    def script(one: Any) -> None:
        model = mlp(SMALL)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        rows = [row for step in range(5) for row in batch(step)]
        for number, x in enumerate(one.adopt(shard(rows, one, global_batch=6))):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            if number == 2 and one.rank == 1:
                with torch.no_grad():
                    model[2].weight[0, 0] = value
                model.forward = lambda x: model[0](x)  # so that no gradient tells

    for said in fail(script, strategy, 3):
        assert said.startswith("HoraError: the value of 2.weight on rank 1"), said
        assert "rank 0" not in said and "this round is not closed" in said
    gc.collect()


# -- scalers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("strategy", ["local:every=3", "local:every=3,warmup=6", "diloco:every=4,overlap=1"])
def test_a_step_that_one_workers_scaler_refuses_keeps_the_rounds_in_step(
    strategy: str, fused: bool, explicit: bool
) -> None:
    """Rank 1 overflows in steps 1 and 4: none hangs, rounds end after the same steps, all agree afterwards."""

    def script(group: Group) -> tuple[list[torch.Tensor], list[int]]:
        one, model = training(group, strategy), mlp(SMALL).float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        one.prepare(model, optimizer, None, scaler)
        counts = []
        for step in range(10):
            optimizer.zero_grad()
            loss = loss_of(model, even(2)(group.rank, step).float())
            scaler.scale(loss * float("inf") if step in (1, 4) and group.rank == 1 else loss).backward()
            if explicit:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            counts.append(one.sync._round.num_steps)
        one.depart()
        assert scaler.get_scale() == (2.0 if group.rank == 1 else 8.0)
        return parameters_of(model), counts

    found = ranks.run(2, script)
    assert all(a.equal(b) and bool(torch.isfinite(a).all()) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] == found[1][1] == list(range(1, 11))


@pytest.mark.parametrize("fused", [False, True])
def test_in_the_warm_up_a_refused_step_is_taken_by_none_as_under_the_ring(fused: bool) -> None:
    def script(group: Group, strategy: str) -> list[torch.Tensor]:
        one, model = training(group, strategy), mlp(SMALL).float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        one.prepare(model, optimizer, None, scaler)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, even(2)(group.rank, step).float())
            scaler.scale(loss * float("inf") if step == 2 and group.rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return parameters_of(model)

    found = ranks.run(2, lambda g: script(g, "local:every=4,warmup=6"))
    ring = ranks.run(2, lambda g: script(g, "ring"))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    for mine, theirs in zip(found[0], ring[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, "local:every=3"), mlp(SMALL)
        optimizer, scaler = OPTIMIZERS["sgd"](model.parameters()), torch.amp.GradScaler("cpu", enabled=False)
        one.prepare(model, optimizer, None, scaler)
        for step in range(7):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, even(2)(group.rank, step))).backward()
            scaler.step(optimizer)
            scaler.update()
        one.depart()
        return parameters_of(model)

    assert_same(ranks.run(2, script), local(Replicas(2, even(2)), 7, 3))


# -- rare models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_averaged_in_single_and_rounded_once(dtype: torch.dtype) -> None:
    def script(group: Group) -> torch.Tensor:
        one = training(group, "local:every=1")
        model = torch.nn.Linear(4, 1, bias=False).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        one.prepare(model, optimizer)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 3.0, 30000.0, 1e-3]]) * (group.rank + 1))
        model(torch.zeros(1, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    parts = [(torch.tensor([[1.0, 3.0, 30000.0, 1e-3]]) * (r + 1)).to(dtype).float() for r in range(2)]
    for found in ranks.run(2, script):
        assert found.equal(((parts[0] + parts[1]) / 2).to(dtype))


def test_what_was_frozen_from_the_start_keeps_its_bits_and_does_not_travel() -> None:
    def script(group: Group) -> tuple[bool, int]:
        def build() -> torch.nn.Module:
            model = mlp(SMALL)
            model[2].requires_grad_(False)
            return model

        before = parameters_of(mlp(SMALL))[2]
        sent: list[int] = []
        found = work(group, "local:every=2,algorithm=ring", 5, uneven(3), build=build,
                     each=lambda one, model, step: sent.append(one.sync.traffic.sent_bytes))  # fmt: skip
        return found[2].equal(before), sent[-1]

    frozen, whole = parameters_of(mlp(SMALL))[2:4], parameters_of(mlp(SMALL))
    numel = sum(p.numel() for p in whole) - sum(p.numel() for p in frozen)
    for kept, sent in ranks.run(3, script):
        assert kept and 0 < sent <= 2 * (2 * 2 * numel * 8 // 3 + 64), "two rounds, without what is frozen"


@pytest.mark.parametrize("strategy", ["local:every=3", "local:every=3,warmup=4", "diloco:every=3,overlap=1"])
@pytest.mark.parametrize("when", [2, 3, 4])
def test_a_parameter_may_come_to_the_optimizer_later(strategy: str, when: int) -> None:
    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, strategy), mlp(SMALL)
        optimizer = torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], lr=0.05, momentum=0.9)
        one.prepare(model, optimizer)
        for step in range(10):
            model.zero_grad()
            loss_of(model, even(2)(group.rank, step)).backward()
            if step == when:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
            optimizer.step()
        one.depart()
        return parameters_of(model)

    found = ranks.run(2, script)
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert not found[0][2].equal(parameters_of(mlp(SMALL))[2])


def test_a_layer_that_only_one_worker_unfreezes_is_named() -> None:
    def script(one: Any) -> None:
        model = mlp(SMALL)
        model[2].requires_grad_(False)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(6):
            optimizer.zero_grad()
            if step == 2 and one.rank == 1:
                model[2].requires_grad_(True)
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()

    for said in fail(script, "local:every=4"):
        assert "rank 1" in said and "do not train the same parameters" in said


@pytest.mark.parametrize("strategy", ["local:every=1", "local:every=9,warmup=100", "local:every=1,warmup=2"])
def test_sparse_gradients_train_as_one_process(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            table, layer = torch.nn.Embedding(20, 6, sparse=True).double(), torch.nn.Linear(6, 3).double()
        pair = [torch.optim.SGD(table.parameters(), lr=0.1), torch.optim.SGD(layer.parameters(), lr=0.05)]
        one.prepare([table, layer], pair)
        for step in range(6):
            for optimizer in pair:
                optimizer.zero_grad()
            rows = torch.randint(0, 20, (12,), generator=torch.Generator().manual_seed(step))
            x = part(one, rows)
            layer(table(x)).square().sum(1).mean().backward()
            for optimizer in pair:
                optimizer.step()
        if hasattr(one, "depart"):
            one.depart()
        return parameters_of(table, layer)

    same(script, strategy, 2, rtol=1e-9, atol=1e-11)


def test_a_worker_without_a_gradient_for_a_layer_takes_part_in_its_mean() -> None:
    """In the warm-up: rank 1 uses the first layer alone; as under the ring, the others' gradients count by share."""

    def script(group: Group, strategy: str) -> list[torch.Tensor]:
        one, model = training(group, strategy), mlp(SMALL)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            x = even(2)(group.rank, step)
            (model(x) if group.rank == 0 else model[0](x) + 0 * model(x).detach().sum()).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    found = ranks.run(2, lambda g: script(g, "local:every=4,warmup=4"))
    assert_same(found, ranks.run(2, lambda g: script(g, "ring"))[0])


def test_lbfgs_trains_alone_between_rounds_and_each_step_counts_once() -> None:
    """Rank r evaluates its closure more often the higher its rank; it counts no more for that."""

    def make(model: torch.nn.Module, rank: int) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2 + 2 * rank)

    def step(model: torch.nn.Module, optimizer: torch.optim.LBFGS, x: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        optimizer.step(closure)

    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, "local:every=2"), mlp(SMALL)
        optimizer = make(model, group.rank)
        one.prepare(model, optimizer)
        for number in range(5):
            x = uneven(2)(group.rank, number)
            one.weight(len(x))
            step(model, optimizer, x)
        one.depart()
        return parameters_of(model)

    replicas = Replicas(2, uneven(2))
    optimizers = [make(model, rank) for rank, model in enumerate(replicas.models)]
    for number in range(5):
        for rank in range(2):
            x = uneven(2)(rank, number)
            step(replicas.models[rank], optimizers[rank], x)
            replicas.seen[rank] += len(x)
        if number % 2:
            replicas.average()
    replicas.average()
    assert_same(ranks.run(2, script), replicas.result(), rtol=1e-6)


def test_lbfgs_refuses_a_warm_up_and_lets_a_worker_be_without_samples() -> None:
    def script(group: Group, strategy: str) -> torch.Tensor:
        one, model = training(group, strategy), net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        one.prepare(model, optimizer)
        for x, y, _ in one.adopt(shard(data(7), one, global_batch=3)):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mse(model, x, y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return state(model)

    found = ranks.run(3, lambda g: script(g, "local:every=2"))
    assert found[0].equal(found[1]) and found[0].equal(found[2])
    for error in ranks.failures(2, lambda g: script(g, "local:every=2,warmup=1")):
        assert isinstance(error, ValueError) and "LBFGS" in str(error) and "warmup" in str(error)


def test_a_worker_without_samples_applies_what_it_had_piled_up_once() -> None:
    """Accumulating over all batches of an epoch, the last of which has no sample for rank 1."""

    def script(group: Group) -> tuple[torch.Tensor, float]:
        one, model = training(group, "local:every=2"), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        one.prepare(model, optimizer)
        loader = one.adopt(shard(data(5), one, global_batch=4))
        for _ in one.epochs(2):
            for number, (x, y, _) in enumerate(loader):
                mse(model, x, y).backward()
                if number == 1:
                    optimizer.step()
                    optimizer.zero_grad()
        left = sum(p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None)
        return state(model), left

    found = ranks.run(2, script)
    assert found[0][0].equal(found[1][0]) and [left for _, left in found] == [0.0, 0.0]


# -- by time ---------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds as each rank's own work makes them: `time.perf_counter` of the strategy, by thread."""

    def __init__(self) -> None:
        self._mine = threading.local()

    def perf_counter(self) -> float:
        return float(getattr(self._mine, "now", 0.0))

    def work(self, seconds: float) -> None:
        self._mine.now = self.perf_counter() + seconds


@pytest.mark.parametrize(("speeds", "every"), [((1.0, 1.0), 4), ((1.0, 2.0), 6), ((1.0, 4.0), 5), ((1.0, 2.0, 4.0), 7)])
def test_by_time_steps_are_in_proportion_to_speed(
    speeds: tuple[float, ...], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 1 s / speed. After a first round of one step each, all do in a round what their time allows."""
    clock = Clock()
    monkeypatch.setattr("hora.strategies.local.exchange.time", clock)

    def script(group: Group) -> list[int]:
        one, model = training(group, f"local:every={every},pace=time"), mlp(SMALL)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        one.prepare(model, optimizer)
        lengths, last = [], 0
        step = 0
        while one.sync.rounds < 4:
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            before = one.sync.rounds
            clock.work(1.0 / speeds[group.rank])
            optimizer.step()
            step += 1
            if one.sync.rounds != before:
                lengths.append(step - last)
                last = step
        return lengths

    found = ranks.run(len(speeds), script)
    fair = [every * len(speeds) * speed / sum(speeds) for speed in speeds]
    for lengths, steps in zip(found, fair, strict=True):
        assert lengths == [1] + [max(1, round(steps))] * 3


@pytest.mark.parametrize(
    "strategy",
    ["local:every=3,pace=time", "local:every=3,pace=time,warmup=4", "diloco:every=4,pace=time,overlap=1",
     "diloco:every=4,pace=time,fragments=2"],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 3])
def test_by_time_every_sample_is_done_once_and_all_agree(strategy: str, size: int) -> None:
    for count, batch_size, epochs in ((29, 2, 2), (2, 3, 3), (7, 1, 2), (1, 1, 1), (0, 2, 2)):

        def script(group: Group, cut: tuple[int, int, int] = (count, batch_size, epochs)) -> tuple[list[int], Any, int]:
            one, model = training(group, strategy), net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            one.prepare(model, optimizer)
            loader = leased(one, group, data(cut[0]), batch_size=cut[1], shuffle=True)
            seen: list[int] = []
            for _ in one.epochs(cut[2]):
                for x, y, numbers in loader:
                    seen += numbers.tolist()
                    optimizer.zero_grad()
                    mse(model, x, y).backward()
                    optimizer.step()
            one.depart()
            return seen, state(model), one.step

        found = ranks.run(size, script)
        case = f"{count} samples, batches of {batch_size}, {epochs} epochs"
        assert sorted(n for seen, _, _ in found for n in seen) == sorted([*range(count)] * epochs), case
        assert all(mine.equal(found[0][1]) for _, mine, _ in found), case


def test_by_time_a_worker_that_gets_no_samples_of_an_epoch_keeps_none_waiting() -> None:
    """Rank 1 comes to each epoch only when rank 0 has taken all blocks of it and waits at its round, or is done."""
    taken = threading.Event()

    def script(group: Group) -> tuple[int, torch.Tensor]:
        one, model = training(group, "local:every=8,pace=time"), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        loader = leased(one, group, data(6), batch_size=1)
        steps = 0
        for epoch in one.epochs(2):
            if group.rank == 1 and epoch == 0:
                assert taken.wait(20.0)
            for x, y, _ in loader:
                steps += 1
                if steps == 1 and epoch == 0:
                    while loader.view().num_pending:  # rank 0 takes the others' blocks from the lease manager
                        grabbed = loader.ledger._request(ahead=False)
                        if not hasattr(grabbed, "name"):
                            break
                        loader.ledger.done(grabbed)
                    taken.set()
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
        one.depart()
        return steps, state(model)

    found = ranks.run(2, script, timeout_s=10.0)
    assert found[0][1].equal(found[1][1])


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("local:every=0", "every takes a number of steps, 1 or more, or a schedule"),
        ("local:every=-3", "every takes"),
        ("local:every=1.5", "every takes"),
        ("local:every=often", "every takes"),
        ("local:every=", "every takes"),
        ("local:every=²", "every takes"),
        ("local:every=4/8", "every takes"),
        ("local:every=4/0@9", "every takes"),
        ("local:every=4@3/8@9", "every takes"),
        ("local:every=4/8@", "every takes"),
        ("local:every=4/8@100/16@50", "later stages of a schedule must begin at later steps"),
        ("local:every=4/8@0", "later stages of a schedule must begin at later steps"),
        ("local:every=4/8@7/9@7", "later stages of a schedule must begin at later steps"),
        ("local:warmup=-1", "warmup takes a number of steps, 0 or more"),
        ("local:warmup=few", "takes a whole number, not 'few'"),
        ("local:pace=fast", "pace='fast' is unknown; there are: steps, time"),
        ("local:state=sum", "state='sum' is unknown; there are: keep, average, reset"),
        ("local:algorithm=star-shaped", "algorithm='star-shaped' is unknown"),
        ("local:via=mail", "via='mail' is unknown; there are: workers, ps"),
        ("local:barrier=false", "barrier=false has an effect only with via=ps"),
        ("local:block_bytes=65536", "block_bytes has an effect only with via=ps"),
        ("local:via=ps,algorithm=ring", "algorithm cannot be chosen with via=ps"),
        ("local:via=ps,barrier=false,warmup=3", "warmup needs rounds in which all workers take part"),
        ("local:via=ps,barrier=false,pace=time", "pace needs rounds"),
        ("local:via=ps,barrier=false,state=reset", "state needs rounds"),
        ("local:via=ps,block_bytes=1", "block_bytes"),
        ("local:evry=3", "did you mean 'every'?"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["local", "local:every=1", "local:every=4/8@100/16@1000", "local:every=32,warmup=5,pace=time,state=average",
     "local:via=ps,barrier=false", "local:via=ps,block_bytes=1048576", "local:algorithm=halving"],
)  # fmt: skip
def test_it_is_spelt_as_it_was_read(text: str) -> None:
    made = parse(text)
    assert parse(made.spell()) == made
    assert set(made.spell().partition(":")[2].split(",")) == set(text.partition(":")[2].split(","))


def test_a_schedule_says_how_long_the_round_is_that_begins_there() -> None:
    chosen = parse("local:every=4/8@100/16@1000")
    assert [chosen.interval(step) for step in (0, 99, 100, 999, 1000, 10**6)] == [4, 4, 8, 8, 16, 16]
    assert parse("local:every= 7 ").interval(0) == 7 and parse("local:every=8").spell() == "local"


@pytest.mark.parametrize("strategy", ["local:every=2", "diloco:every=2,overlap=1"])
def test_a_worker_that_took_no_step_leaves_only_with_the_others(strategy: str) -> None:
    """In a plain loop no worker knows how many steps another takes."""

    def script(group: Group) -> torch.Tensor:
        one, model = training(group, strategy), mlp(SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(5 if group.rank else 0):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        one.depart(for_good=True)
        return torch.cat([p.flatten() for p in parameters_of(model)])

    first, second = ranks.run(2, script)
    assert first.equal(second)


def test_statistics_that_are_not_finite_do_not_spread() -> None:
    def script(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        with building():
            model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)).double()
        one = training(group, "local:every=1", on_nonfinite="skip")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(2):
            x = batch(step)
            if group.rank == 1 and step == 1:
                x = x * float("nan")
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model[0].running_mean.clone(), model[1].weight.detach().clone()

    (mean, weight), (other, again) = ranks.run(2, script)
    assert bool(torch.isfinite(mean).all()) and mean.equal(other)
    assert bool(torch.isfinite(weight).all()) and weight.equal(again)


def test_who_has_not_had_a_sample_does_not_shorten_the_rounds_of_others() -> None:
    assert [adapt_interval(rank, 8, [1.0, 0.0], 1) for rank in range(2)] == [8, 8]
    assert [adapt_interval(rank, 8, [1.0, 4.0], 1) for rank in range(2)] == [12, 3]
    assert adapt_interval(0, 8, [0.0, 0.0], 1) == 1
