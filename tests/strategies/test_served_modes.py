"""Where workers do not step together: async, ssp, sync_every, backup and prefetch, with ranks as threads.

Nothing here measures time. A worker's pace is scripted: it waits until the others have come somewhere, or until they
come no further.
"""

from __future__ import annotations

import json
import pathlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.collectives import Group
from hora.data import DataService, Shard, shard
from hora.rendezvous.context import RunContext
from hora.strategies.common.sync import LoopEvent
from hora.training import Training
from trainings import batch, fail, loss_of, mlp, parameters_of
from workers import CLOSE, Worker, data, mse, net, state, workers

PATIENCE_S = 20.0  # until this long nothing happens, nobody says "no further"
STILL_S = 0.25  # who has not moved for so long is held back


def sgd(model: torch.nn.Module, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)


def leased(one: Training, group: Group, count: int, **cut: Any) -> Shard:
    """A loader as job.shard makes it: blocks are leased where the strategy says so."""
    service = trainings.data_service(one, group, one._strategy.leased)
    return one.adopt(shard(data(count), one, service=service, **cut))


def enter(one: Training, group: Group) -> None:
    """All train, and every server knows it: one whose word came late would stand where the others are by then."""
    assert one.sync is not None
    one.sync.join(LoopEvent.ENTERED)
    one.sync.stats()  # type: ignore[attr-defined]  # the answer comes after what was said before
    group.barrier("all are in")


def history(folder: pathlib.Path, server: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"server-{server}.jsonl").read_text().splitlines()]


class Track:
    """How many steps each worker has behind it."""

    def __init__(self, size: int) -> None:
        self.steps = [0] * size
        self._moved = threading.Condition()

    def step(self, rank: int) -> None:
        with self._moved:
            self.steps[rank] += 1
            self._moved.notify_all()

    def until(self, true: Callable[[list[int]], bool]) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: true(self.steps), PATIENCE_S), f"somebody is held back: {self.steps}"

    def until_still(self) -> list[int]:
        """Where all are once nobody has moved for a while."""
        with self._moved:
            before = None
            while before != self.steps:
                before = list(self.steps)
                self._moved.wait_for(lambda before=before: self.steps != before, STILL_S)
            return before


# -- who waits for whom ----------------------------------------------------------------------------------------------


@pytest.mark.cases(4)
@pytest.mark.parametrize("servers", ["1", "2", "2tcp"])
@pytest.mark.parametrize(("mode", "lead"), [("sync", 1), ("ssp,staleness=0", 1), ("ssp,staleness=2", 3),
                                            ("ssp,staleness=5", 6)])  # fmt: skip
def test_a_lasting_straggler_holds_the_others_back_by_what_the_mode_allows(mode: str, lead: int, servers: str) -> None:
    """Rank 2 takes a step only when the others come no further: they have begun `lead` steps more than it has done."""
    track, leads = Track(3), []

    def rank(group: Group) -> None:
        one = trainings.training(group, f"ps:mode={mode}/{servers}")
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        enter(one, group)
        for step in range(4 if group.rank == 2 else 4 + lead - 1):
            loss_of(model, batch(step)).backward()
            if group.rank == 2:
                reached = track.until_still()
                leads.append(max(reached) - reached[2])
            optimizer.step()
            optimizer.zero_grad()
            track.step(group.rank)
        one.sync.join(LoopEvent.FINISHED)

    ranks.run(3, rank)
    assert set(leads) == {lead - 1}, "steps that the fast ones have behind them beyond the slow one's"


@pytest.mark.parametrize("servers", ["1", "2tcp"])
@pytest.mark.parametrize("mode", ["async", "ssp,staleness=40"])
def test_a_worker_slowed_four_times_costs_the_others_nothing(mode: str, servers: str) -> None:
    """Before each of its steps rank 2 waits until the others have done four: they get there, without it."""
    track = Track(3)

    def rank(group: Group) -> None:
        one = trainings.training(group, f"ps:mode={mode}/{servers}")
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        enter(one, group)
        for step in range(10 if group.rank == 2 else 40):
            loss_of(model, batch(step)).backward()
            if group.rank == 2:
                track.until(lambda steps, step=step: min(steps[:2]) >= 4 * (step + 1))
            optimizer.step()
            optimizer.zero_grad()
            track.step(group.rank)
        one.sync.join(LoopEvent.FINISHED)

    ranks.run(3, rank)
    assert track.steps == [40, 40, 10]


def test_hiccups_shorter_than_the_bound_hold_nobody_back() -> None:
    """Now and then one of three pauses until both others are three steps further: with staleness=3 they get there."""
    track, pauses = Track(3), {(0, 5), (1, 12), (2, 19), (0, 26), (1, 33)}

    def rank(group: Group) -> None:
        one = trainings.training(group, "ps:mode=ssp,staleness=3/2")
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        enter(one, group)
        for step in range(40):
            loss_of(model, batch(step)).backward()
            if (group.rank, step) in pauses:
                track.until(lambda steps, step=step: min(s for r, s in enumerate(steps) if r != group.rank) >= step + 3)
            optimizer.step()
            optimizer.zero_grad()
            track.step(group.rank)
        one.sync.join(LoopEvent.FINISHED)

    ranks.run(3, rank)
    assert track.steps == [40, 40, 40]


@pytest.mark.parametrize("servers", [1, 2])
def test_the_bound_is_kept_in_the_servers_history(servers: int, tmp_path: pathlib.Path) -> None:
    def rank(group: Group) -> None:
        one = trainings.training(group, f"ps:mode=ssp,staleness=2/{servers}", history=str(tmp_path))
        model = net()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        loader = leased(one, group, 90, batch_size=1)
        for _ in one.epochs(2):
            for x, y, _ in loader:
                time.sleep(0.002 * (group.rank == 1))
                mse(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        one.close()

    ranks.run(3, rank)
    for server in range(servers):
        said = history(tmp_path, server)
        clocks = {e["worker"]: e["clock"] for e in said if e["kind"] == "step"}
        assert len(clocks) == 3 and max(e["staleness"] for e in said if e["kind"] == "free") <= 2


# -- nobody is lost, nothing twice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ps:mode=async/1", "ps:mode=async/2", "ps:mode=async/2tcp", "ps:mode=ssp/2",
                                      "ps:mode=async,sync_every=3/2", "ps:mode=async,prefetch=true/2",
                                      "ps:mode=async,correct=scale/1", "ps:mode=async,correct=dc/2"])  # fmt: skip
def test_every_gradient_is_applied_once_and_every_sample_done_once(strategy: str, tmp_path: pathlib.Path) -> None:
    """A slow worker, two epochs, and at the end all have the servers' parameters."""

    def rank(group: Group) -> tuple[list[int], int, torch.Tensor, torch.Tensor]:
        one = trainings.training(group, strategy, history=str(tmp_path))
        model = torch.nn.Sequential(net(), torch.nn.BatchNorm1d(2).double())
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        loader = leased(one, group, 50, batch_size=2, shuffle=True)
        seen = []
        for _ in one.epochs(2):
            for x, y, numbers in loader:
                seen += numbers.tolist()
                time.sleep(0.003 * (group.rank == 2))
                mse(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        group.barrier("all are out of their loops")
        one.sync.snapshot()
        return seen, one.step, state(model), model[1].running_mean.clone()

    found = ranks.run(3, rank)
    assert sorted(n for seen, *_ in found for n in seen) == sorted([*range(50)] * 2)
    assert sum(step for _, step, *_ in found) == 50
    assert all(each[2].equal(found[0][2]) for each in found), "the newest parameters, on all"
    for server in range(int(strategy.partition("/")[2][0])):
        said = history(tmp_path, server)
        applied = Counter((e["worker"], e["step"], e["chunk"]) for e in said if e["kind"] == "apply")
        done = {(e["worker"], e["step"]) for e in said if e["kind"] == "step"}
        assert set(applied.values()) == {1}
        assert done == {(w, s) for w, (_, steps, *_) in enumerate(found) for s in range(steps)}
        assert {(w, s) for w, s, _ in applied} == done


def test_zip_of_two_leased_loaders_of_different_length_ends_for_all() -> None:
    """Rank 0 waits at b for rank 1's block, rank 1 then at a for rank 0's: each has said first what it has done."""
    began, waits = threading.Barrier(2), threading.Event()

    def rank(group: Group) -> list[tuple[list[int], list[int]]]:
        one = trainings.training(group, "ps:mode=async/1")
        idle = one.idle

        def idle_and_say(waiting: bool) -> None:
            idle(waiting)
            if group.rank == 0:
                waits.set()

        model = net()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        context = RunContext(control=group.control, rank=one.rank, token=ranks.TOKEN, timeout_s=10.0)
        service = DataService(context, leased=True, last=one.last_epoch, idle=idle_and_say)
        a, b = (one.adopt(shard(data(count), one, service=service, batch_size=2)) for count in (6, 4))
        seen = []
        for _ in one.epochs(1):
            for (x, y, numbers), (_, _, others) in zip(a, b, strict=False):
                seen.append((numbers.tolist(), others.tolist()))
                began.wait(PATIENCE_S)
                assert group.rank == 0 or waits.wait(PATIENCE_S)
                mse(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return seen

    found = [pair for seen in ranks.run(2, rank) for pair in seen]
    assert sorted(numbers for numbers, _ in found) == sorted(numbers for _, numbers in found) == [[0, 1], [2, 3]]


def test_one_worker_under_async_is_plain_pytorch() -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        for step in range(20):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    for strategy in ("ps:mode=async/1", "ps:mode=ssp/1tcp", "ps:mode=async,correct=dc/1", "ps:mode=sync,backup=0/1"):
        trainings.same(script, strategy, 1)


# -- sync_every ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", ["1", "2", "2tcp"])
@pytest.mark.parametrize("every", [1, 4])
def test_all_hold_identical_parameters_after_every_kth_step(every: int, servers: str) -> None:
    def rank(group: Group) -> list[torch.Tensor]:
        one = trainings.training(group, f"ps:mode=async,sync_every={every}/{servers}")
        model = mlp()
        optimizer = sgd(model, 0.9)
        one.prepare(model, optimizer)
        enter(one, group)
        after = []
        for step in range(24):
            loss_of(model, batch(3 * step + group.rank)).backward()
            time.sleep(0.002 * ((step + group.rank) % 3 == 0))
            optimizer.step()
            optimizer.zero_grad()
            after.append(state(model))
        one.sync.join(LoopEvent.FINISHED)
        return after

    found = ranks.run(3, rank)
    for step, held in enumerate(zip(*found, strict=True)):
        if (step + 1) % every == 0:
            assert all(each.equal(held[0]) for each in held), f"after step {step + 1}"
    if every > 1:
        assert any(not each.equal(held[0]) for held in zip(*found, strict=True) for each in held), "between they differ"


# -- backup ----------------------------------------------------------------------------------------------------------


def backed(strategy: str, work: Any, *args: Any, **options: Any) -> list[Worker]:
    """Workers that hear a wish to stop as the coordinator would tell it."""
    said: list[str] = []

    def heard(worker: Worker) -> None:
        worker.one.stop_reason = lambda: said[0] if said else None
        stop = worker.one._control.stop
        worker.one._control.stop = lambda reason: (said.append(reason), stop(reason))  # type: ignore[method-assign]
        work(worker)

    return workers(int(options.pop("size", 3)), strategy, heard, *args, **options)


def slowly(worker: Worker, epochs: int, slow: set[int], each: Callable[[Worker], None] = lambda w: None) -> None:
    """Trains; the slow ones pause in every third of their batches. Then an evaluation that all take part in."""
    for epoch in worker.one.epochs(epochs):
        for number, (x, y, numbers) in enumerate(worker.loader):
            worker.seen += [(epoch, n) for n in numbers.tolist()]  # type: ignore[misc]
            if worker.one.rank in slow and number % 3 == 0:
                time.sleep(0.02)
            each(worker)
            mse(worker.model, x, y).backward()
            worker.step()
        worker.model.eval()
        test = worker.one.adopt(shard(data(5), worker.one, global_batch=2))
        count = torch.tensor([sum(len(x) for x, _, _ in test)])
        assert worker.one._group.all_reduce(count).item() == 5
        worker.model.train()


@pytest.mark.parametrize("servers", ["1", "2", "2tcp"])
@pytest.mark.parametrize(("size", "backup", "slow"), [(3, 1, {2}), (3, 1, {0}), (4, 2, {1, 3})])
def test_exactly_the_backups_are_dropped_each_is_said_and_a_slow_worker_catches_up(
    size: int, backup: int, slow: set[int], servers: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trainings.training
    monkeypatch.setattr(trainings, "training", lambda group, text: plain(group, text, history=str(tmp_path)))
    found = backed(f"ps:backup={backup}/{servers}", lambda w: slowly(w, 3, slow), 12 * size, size=size,
                   global_batch=size)  # fmt: skip
    assert {worker.one.step for worker in found} == {36}, "all have come to the same step"
    assert all(worker.state.equal(found[0].state) for worker in found)
    assert all(len(worker.seen) == len(set(worker.seen)) for worker in found), "no batch twice"
    assert all(found[rank].one.sync.num_dropped for rank in slow)
    chosen = {e["step"]: set(e["workers"]) for e in history(tmp_path) if e["kind"] == "chosen"}
    assert sorted(chosen) == [*range(36)] and {len(those) for those in chosen.values()} == {size - backup}
    for server in range(int(servers[0])):
        said = history(tmp_path, server)
        complete = {(e["worker"], e["step"]) for e in said if e["kind"] == "step"}
        dropped = Counter((e["worker"], e["step"]) for e in said if e["kind"] == "dropped")
        used: dict[int, set[int]] = defaultdict(set)
        for e in said:
            if e["kind"] == "mean":
                used[e["step"]] |= set(e["workers"])
        assert used == chosen, "every server has used those that server 0 chose"
        assert set(dropped) == {(w, s) for w, s in complete if w not in chosen[s]} and set(dropped.values()) <= {1}
    told = sum(worker.one.sync.num_dropped for worker in found)
    assert told == sum(1 for e in history(tmp_path) if e["kind"] == "dropped")


@pytest.mark.parametrize("servers", ["1", "2tcp"])
@pytest.mark.parametrize(("count", "batch_size"), [(13, 3), (13, 2), (7, 4)])
def test_backup_with_batches_in_which_workers_are_absent_ends_for_all(
    count: int, batch_size: int, servers: str
) -> None:
    for slow in (0, 1, 2):
        found = backed(f"ps:backup=1/{servers}", lambda w, s=slow: slowly(w, 3, {s}), count, global_batch=batch_size)
        assert {worker.one.step for worker in found} == {3 * -(-count // batch_size)}
        assert all(worker.state.equal(found[0].state) for worker in found)


@pytest.mark.parametrize("who", [{0}, {2}, {0, 1, 2}])
def test_a_stop_under_backup_ends_all_after_the_same_step(who: set[int]) -> None:
    def ask(worker: Worker) -> None:
        if worker.one.rank in who and worker.one.step >= 7:
            worker.one.stop("enough")

    for servers in ("1", "2"):
        found = backed(f"ps:backup=1/{servers}", lambda w: slowly(w, 4, {2}, ask), 12, global_batch=3)
        assert len({worker.one.step for worker in found}) == 1 and 8 <= found[0].one.step < 16
        assert all(worker.one.stopped() and worker.state.equal(found[0].state) for worker in found)


def test_max_steps_under_backup_ends_all_after_that_step() -> None:
    def work(worker: Worker) -> None:
        worker.one.max_steps = 6
        slowly(worker, 3, {1})

    assert {worker.one.step for worker in backed("ps:backup=1/2", work, 12, global_batch=3)} == {6}


@pytest.mark.parametrize("who", [{0}, {1, 2}])
def test_workers_that_break_out_under_backup_do_not_hold_the_others_up(who: set[int]) -> None:
    def work(worker: Worker) -> None:
        for epoch in worker.one.epochs(2):
            for number, (x, y, _) in enumerate(worker.loader):
                if epoch == 0 and number == 2 and worker.one.rank in who:
                    break
                mse(worker.model, x, y).backward()
                worker.step()
            assert worker.one._group.all_reduce(torch.ones(1)).item() == 3

    backed("ps:backup=1/1", work, 12, global_batch=3)


def test_backup_with_several_optimizers_is_refused() -> None:
    def script(one: Any) -> None:
        models = [mlp(seed=1), mlp(seed=2)]
        one.prepare(models, [sgd(model) for model in models])

    for said in fail(script, "ps:backup=1/1"):
        assert said == "ValueError: backup counts the steps of one optimizer, and job.prepare() got several"


def test_as_many_backups_as_workers_are_refused() -> None:
    def script(one: Any) -> None:
        model = mlp()
        one.prepare(model, sgd(model))

    for said in fail(script, "ps:backup=2/1"):
        assert said.startswith("ValueError: backup=2 of 2 workers leaves no worker")


# -- prefetch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", ["1", "1tcp"])
def test_prefetch_is_one_step_of_staleness_exactly(servers: str) -> None:
    """The gradient of step t is computed on the result of step t − 2; leaving the loop waits for the last one."""
    steps, samples = 15, data(30)

    def rank(group: Group) -> tuple[list[torch.Tensor], torch.Tensor]:
        one = trainings.training(group, f"ps:mode=async,prefetch=true/{servers}")
        model = net()
        optimizer = sgd(model, 0.9)
        one.prepare(model, optimizer)
        loader = one.adopt(shard(samples, one, global_batch=2))
        seen = []
        for x, y, _ in loader:
            seen.append(state(model))
            mse(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen, state(model)

    ((seen, last),) = ranks.run(1, rank)
    true, stale = net(), net()
    optimizer = sgd(true, 0.9)
    results = [state(true)]
    for step in range(steps):
        vector = results[max(0, step - 1)]  # results[t] is that of step t, counted from 1
        torch.nn.utils.vector_to_parameters(vector.clone(), stale.parameters())
        torch.testing.assert_close(seen[step], vector, rtol=0, atol=CLOSE)
        rows = samples[2 * step : 2 * step + 2]
        stale.zero_grad()
        mse(stale, torch.stack([x for x, _, _ in rows]), torch.stack([y for _, y, _ in rows])).backward()
        for mine, other in zip(true.parameters(), stale.parameters(), strict=True):
            mine.grad = other.grad.clone()
        optimizer.step()
        results.append(state(true))
    torch.testing.assert_close(last, results[-1], rtol=0, atol=CLOSE)


# -- NaN -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ps:mode=async/2", "ps:mode=ssp/1", "ps:mode=async/1tcp"])
def test_a_nan_is_named_not_applied_and_only_that_workers(strategy: str) -> None:
    def rank(group: Group, how: str | None) -> tuple[str, int, torch.Tensor]:
        one = trainings.training(group, strategy, on_nonfinite=how)
        model = net()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        said = ""
        one.sync.join(LoopEvent.ENTERED)
        try:
            for step in range(6):
                x = batch(step)[:, :4]
                bad = group.rank == 1 and step == 2
                mse(model, x * float("nan") if bad else x, torch.ones(12, 2).double()).backward()
                optimizer.step()
                optimizer.zero_grad()
        except Exception as error:
            said = str(error)
        one.sync.join(LoopEvent.FINISHED)
        group.barrier("all have ended")
        one.sync._refresh()
        return said, one.step, state(model)

    raised = ranks.run(2, lambda group: rank(group, "raise"))
    assert "the gradient of 0.weight" in raised[1][0] and "on rank 1" in raised[1][0] and "not finite" in raised[1][0]
    assert (raised[0][0], raised[0][1], raised[1][1]) == ("", 6, 2)
    skipped = ranks.run(2, lambda group: rank(group, "skip"))
    assert [(said, step) for said, step, _ in skipped] == [("", 6), ("", 5)]
    assert all(bool(torch.isfinite(vector).all()) for _, _, vector in [*raised, *skipped])


def test_a_prefetched_gradient_is_one_update_late_at_most_also_after_a_loop_has_ended() -> None:
    """Between loops all is read: the first gradient of the next one is based on that."""

    def work(group: Any) -> dict[str, int]:
        one = trainings.training(group, "ps:mode=async,prefetch=true")
        trainings.fit(one, "sgd", steps=20, count=60, global_batch=12)  # epochs of five batches
        return json.loads(one.sync.stats()[0])["lags"]  # type: ignore[union-attr]

    lags = trainings.ranks.run(1, work)[0]
    assert max(map(int, lags)) == 1 and lags["0"] > 1


def test_workers_that_step_different_optimizers_are_both_named() -> None:
    def script(one: Any) -> None:
        model = mlp(20)
        halves = list(model.parameters())
        optimizers = [torch.optim.SGD(halves[:2], lr=0.1), torch.optim.SGD(halves[2:], lr=0.1)]
        one.prepare(model, optimizers)
        loss_of(model, batch(0)).backward()
        optimizers[one.rank].step()

    for said in fail(script, "ps/1"):
        assert "rank 0" in said and "rank 1" in said and "optimizer" in said
