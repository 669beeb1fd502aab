"""DiLoCo is the loop of its paper: the mean pseudo-gradient is the gradient of an outer Nesterov step.

The reference (tests/rounds.py) has torch's own SGD for the outer step; parameters in float64 agree to 1e-9.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ranks
from hora.strategies import parse
from rounds import SMALL, Replicas, assert_same, diloco, even, uneven, work
from trainings import batch, building, loss_of, mlp, parameters_of, training


def cut_of(size_of: list[int], num_fragments: int) -> list[list[int]]:
    """By the number of elements before a parameter."""
    cut: list[list[int]] = [[] for _ in range(num_fragments)]
    at = 0
    for index, numel in enumerate(size_of):
        cut[min(num_fragments - 1, at * num_fragments // sum(size_of))].append(index)
        at += numel
    return cut


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(("size", "every", "steps"), [(2, 4, 16), (3, 5, 13), (1, 3, 9), (4, 1, 6)])
def test_it_equals_the_loop_of_the_paper(size: int, every: int, steps: int, optimizer: str) -> None:
    wanted = diloco(Replicas(size, even(size), optimizer), steps, every)
    assert_same(ranks.run(size, lambda g: work(g, f"diloco:every={every}", steps, optimizer=optimizer)), wanted)


@pytest.mark.parametrize("size", [2, 3])
def test_pseudo_gradients_count_by_samples(size: int) -> None:
    wanted = diloco(Replicas(size, uneven(size)), 11, 4)
    assert_same(ranks.run(size, lambda g: work(g, "diloco:every=4", 11, uneven(size))), wanted)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.3, 0.0), (0.5, 0.5)])
def test_the_outer_step_is_that_of_torch(lr: float, momentum: float) -> None:
    wanted = diloco(Replicas(2, even(2)), 10, 3, lr, momentum)
    text = f"diloco:every=3,outer_lr={lr},outer_momentum={momentum}"
    assert_same(ranks.run(2, lambda g: work(g, text, 10)), wanted)


def test_without_momentum_and_at_rate_1_it_is_local_sgd() -> None:
    plain = ranks.run(3, lambda g: work(g, "local:every=4", 10, uneven(3)))
    assert_same(ranks.run(3, lambda g: work(g, "diloco:every=4,outer_lr=1.0,outer_momentum=0.0", 10, uneven(3))),
                plain[0])  # fmt: skip


@pytest.mark.parametrize(("fragments", "every", "steps"), [(2, 4, 12), (3, 6, 13), (3, 7, 17), (4, 4, 10)])
def test_each_fragment_is_exchanged_at_its_own_steps(fragments: int, every: int, steps: int) -> None:
    numels = [p.numel() for p in mlp(SMALL).parameters()]
    wanted = diloco(Replicas(2, uneven(2)), steps, every, cut=cut_of(numels, fragments))
    text = f"diloco:every={every},fragments={fragments}"
    assert_same(ranks.run(2, lambda g: work(g, text, steps, uneven(2))), wanted)


def test_more_fragments_than_parameters_leave_some_empty() -> None:
    def build() -> torch.nn.Module:
        with building():
            return torch.nn.Linear(6, 3).double()

    wanted = diloco(Replicas(2, even(2), build=build), 11, 5, cut=cut_of([18, 3], 5))
    assert_same(ranks.run(2, lambda g: work(g, "diloco:every=5,fragments=5", 11, build=build)), wanted)


@pytest.mark.parametrize(
    ("fragments", "overlap", "every", "steps"),
    [(1, 1, 4, 12), (1, 3, 4, 14), (2, 1, 4, 13), (3, 2, 9, 22), (1, 2, 5, 6)],
)
def test_steps_during_an_exchange_are_kept(fragments: int, overlap: int, every: int, steps: int) -> None:
    """The pseudo-gradient is of step t, and its result is applied after step t + overlap."""
    numels = [p.numel() for p in mlp(SMALL).parameters()]
    wanted = diloco(Replicas(3, uneven(3)), steps, every, cut=cut_of(numels, fragments), overlap=overlap)
    text = f"diloco:every={every},fragments={fragments},overlap={overlap}"
    assert_same(ranks.run(3, lambda g: work(g, text, steps, uneven(3))), wanted)


def test_an_exchange_in_flight_changes_nothing_before_it_is_due() -> None:
    """Between the exchange and its arrival a worker's parameters are those of its own steps alone."""

    def script(group: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        work(group, "diloco:every=4,overlap=3", 7, each=lambda one, model, step: found.extend(parameters_of(model)))
        return found

    count = len(parameters_of(mlp(SMALL)))
    replicas = Replicas(2, even(2))
    alone: list[list[torch.Tensor]] = [[], []]
    for step in range(6):
        replicas.step(step)
        for rank, model in enumerate(replicas.models):
            alone[rank] += parameters_of(model)
    for mine, wanted in zip(ranks.run(2, script), alone, strict=True):
        assert all(a.equal(b) for a, b in zip(mine[: 6 * count], wanted, strict=True))
        assert not mine[6 * count].equal(mine[5 * count])


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving", "star", "shared", "auto"])
def test_any_collective_gives_the_same(algorithm: str) -> None:
    wanted = diloco(Replicas(3, uneven(3), "adamw"), 9, 4)
    text = f"diloco:every=4,algorithm={algorithm}"
    assert_same(ranks.run(3, lambda g: work(g, text, 9, uneven(3), "adamw")), wanted)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_any_transport_gives_the_same(transport: str) -> None:
    wanted = diloco(Replicas(3, uneven(3)), 9, 4, overlap=2)
    found = ranks.run(3, lambda g: work(g, "diloco:every=4,overlap=2", 9, uneven(3)), transport)
    assert_same(found, wanted)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_the_warm_up_comes_first_and_the_common_point_is_where_it_ends(optimizer: str) -> None:
    wanted = diloco(Replicas(2, uneven(2), optimizer), 14, 4, warmup=5)
    assert_same(ranks.run(2, lambda g: work(g, "diloco:every=4,warmup=5", 14, uneven(2), optimizer)), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", [0, 2])
def test_half_precision_keeps_its_common_point_in_single(dtype: torch.dtype, overlap: int) -> None:
    """A step of a rate so small that a half would not move: the point does, and in the end so do the parameters."""

    def script(group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        one = training(group, f"diloco:every=4,outer_lr=0.01,outer_momentum=0.0,overlap={overlap}")
        model = torch.nn.Linear(1, 1, bias=False).to(dtype)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-7)
        one.prepare(model, optimizer)
        first = None
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.ones(1, 1, dtype=dtype)).sum().backward()
            optimizer.step()
            if one.sync.rounds == 1 and first is None:
                first = one.sync.agreed_parameters()[0].clone()
        one.depart()
        return first, model.weight.detach().clone()

    found = ranks.run(2, script)
    for first, last in found:
        assert first.dtype == torch.float32 and 0.999 < first.item() < 1.0
        assert last.item() < 1.0 and last.equal(found[0][1])


@pytest.mark.parametrize("strategy", ["diloco:every=4", "diloco:every=4,fragments=2", "diloco:every=4,overlap=2"])
def test_a_layer_that_was_frozen_stays_where_it_is(strategy: str) -> None:
    """Its momentum does not move it on: no worker has a pseudo-gradient for it."""

    def script(group: Any) -> bool:
        kept: list[torch.Tensor] = []

        def each(one: Any, model: Any, step: int) -> None:
            if step == 7:
                one.sync._finish_in_flight()
                model[0].requires_grad_(False)
                model[0].weight.grad = model[0].bias.grad = None
            if step == 11:
                one.sync._finish_in_flight()
                kept.append(model[0].weight.detach().clone())
            if step == 19:
                kept.append(model[0].weight.detach().clone())

        work(group, strategy, 20, each=each)
        return kept[0].equal(kept[1])

    assert ranks.run(2, script) == [True, True]


@pytest.mark.parametrize("strategy", ["diloco:every=6", "diloco:every=6,fragments=3", "diloco:every=6,overlap=4",
                                      "diloco:every=6,fragments=2,overlap=2", "diloco:every=6,wire=int8,overlap=3",
                                      "local:every=6"])  # fmt: skip
@pytest.mark.parametrize("when", [4, 6, 7, 8])
def test_a_layer_may_be_unfrozen_in_the_middle_of_a_round(strategy: str, when: int) -> None:
    """Also while an exchange is in flight that has no part of it."""

    def script(group: Any) -> list[torch.Tensor]:
        def build() -> torch.nn.Module:
            model = mlp(SMALL)
            model[0].requires_grad_(False)
            return model

        def each(one: Any, model: Any, step: int) -> None:
            if step == when:
                model[0].requires_grad_(True)

        return work(group, strategy, 21, uneven(2), "momentum", build, each)

    found = ranks.run(2, script)
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert not found[0][0].equal(parameters_of(mlp(SMALL))[0])


@pytest.mark.parametrize("strategy", ["diloco:every=4", "diloco:every=4,overlap=2", "local:every=4"])
def test_memory_in_another_order_and_tied_weights_are_averaged_as_any_other(strategy: str) -> None:
    def build() -> torch.nn.Module:
        with building():
            model = torch.nn.Sequential(
                torch.nn.Unflatten(1, (2, 3, 1)), torch.nn.Conv2d(2, 6, (3, 1), padding=(1, 0)), torch.nn.Flatten(),
                torch.nn.Linear(18, 18), torch.nn.Tanh(), torch.nn.Linear(18, 18)
            ).double()  # fmt: skip
        model[5].weight = model[3].weight
        return model

    contiguous = ranks.run(2, lambda g: work(g, strategy, 10, uneven(2), build=build))
    odd = ranks.run(
        2, lambda g: work(g, strategy, 10, uneven(2), build=lambda: build().to(memory_format=torch.channels_last))
    )
    assert_same(odd, contiguous[0])


def test_a_parameter_with_gaps_in_its_memory_is_averaged_too() -> None:
    def build() -> torch.nn.Module:
        model = mlp(SMALL)
        wide = torch.zeros(SMALL, 12, dtype=torch.float64)
        wide[:, ::2] = model[0].weight.detach()
        model[0].weight = torch.nn.Parameter(wide[:, ::2])
        return model

    for strategy in ("local:every=4", "diloco:every=4", "diloco:every=4,overlap=2"):
        plain = ranks.run(2, lambda g, s=strategy: work(g, s, 10, uneven(2)))
        assert_same(ranks.run(2, lambda g, s=strategy: work(g, s, 10, uneven(2), build=build)), plain[0])


def test_buffers_that_are_infinite_survive_an_overlapped_round() -> None:
    """A mask of -inf beside running means, which do change."""

    def build() -> torch.nn.Module:
        with building():
            model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).double()
        model.register_buffer("mask", torch.full((2, 2), float("-inf"), dtype=torch.float64).triu(1))
        return model

    def script(group: Any, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
        one, model = training(group, strategy), build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        one.prepare(model, optimizer)
        for step in range(11):
            optimizer.zero_grad()
            loss_of(model, even(2)(group.rank, step)).backward()
            optimizer.step()
        one.depart()
        return model.mask.clone(), model[1].running_mean.clone()

    for strategy in ("local:every=4", "diloco:every=4,overlap=2"):
        found = ranks.run(2, lambda g, s=strategy: script(g, s))
        for mask, running in found:
            assert mask.equal(torch.full((2, 2), float("-inf"), dtype=torch.float64).triu(1)), strategy
            assert running.equal(found[0][1]) and running.abs().sum() > 0


def test_values_that_are_not_finite_are_named_during_an_overlapped_exchange_too() -> None:
    def script(group: Any) -> str:
        def each(one: Any, model: Any, step: int) -> None:
            if group.rank == 1 and step == 2:
                with torch.no_grad():
                    model[2].bias[0] = float("inf")

        try:
            work(group, "diloco:every=4,overlap=1", 12, each=each)
        except Exception as error:
            return str(error)
        return ""

    for said in ranks.run(2, script):
        assert "the value of 2.bias on rank 1" in said or "gradient" in said, said


def test_a_run_of_two_loops_equals_the_reference_that_closes_its_round_between() -> None:
    from hora.data import shard

    def script(group: Any) -> list[torch.Tensor]:
        one, model = training(group, "diloco:every=4"), mlp(SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        one.prepare(model, optimizer)
        rows = [row for step in range(6) for row in batch(step)]
        loader = one.adopt(shard(rows, one, global_batch=12))
        for _ in one.epochs(2):
            for x in loader:
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
        return parameters_of(model)

    replicas = Replicas(2, lambda rank, step: batch(step % 6).chunk(2)[rank])
    points = [column[0].clone() for column in replicas.columns]
    outer = torch.optim.SGD(points, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(12):
        replicas.step(step)
        if step in (3, 5, 9, 11):
            for point, column in zip(points, replicas.columns, strict=True):
                point.grad = replicas.mean([point - p for p in column])
            outer.step()
            for point, column in zip(points, replicas.columns, strict=True):
                for parameter in column:
                    parameter.copy_(point)
            replicas.seen = [0.0, 0.0]
    assert_same(ranks.run(2, script), replicas.result())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("diloco:outer_lr=0", "outer_lr takes a number above 0"),
        ("diloco:outer_lr=inf", "outer_lr takes a number above 0"),
        ("diloco:outer_lr=nan", "outer_lr takes a number above 0"),
        ("diloco:outer_momentum=1", "from 0 to below 1"),
        ("diloco:outer_momentum=-0.1", "from 0 to below 1"),
        ("diloco:outer_momentum=nan", "from 0 to below 1"),
        ("diloco:fragments=0", "fragments takes a number from 1 to 32"),
        ("diloco:fragments=33", "fragments takes a number from 1 to 32"),
        ("diloco:every=16/4@10,fragments=5", "fragments takes a number from 1 to 4"),
        ("diloco:overlap=32", "overlap takes a number of steps from 0 to below 32"),
        ("diloco:overlap=-1", "overlap takes"),
        ("diloco:every=8,fragments=4,overlap=2", "below 2"),
        ("diloco:overlap=1,state=average", "state=average needs exchanges during which no step is taken"),
        ("diloco:overlap=1,state=reset", "state=reset needs"),
        ("diloco:wire=int4", "wire='int4' is unknown; there are: fp32, fp16, bf16, int8, topk"),
        ("diloco:wire=int8,algorithm=ring", "algorithm cannot be chosen with wire=int8"),
        ("diloco:wire=bf16,algorithm=star", "algorithm cannot be chosen with wire=bf16"),
        ("diloco:wire=bfloat16", "did you mean bf16?"),
        ("diloco:wire=powersgd", "there are: fp32, fp16, bf16, int8, topk"),
        ("diloco:wire=int8,topk=0.1", "topk=0.1 has an effect only with wire=topk"),
        ("diloco:wire=topk,topk=0", "above 0 and up to 1"),
        ("diloco:via=ps", "has no option 'via'"),
        ("diloco:outer_lr=fast", "takes a number, not 'fast'"),
        ("diloco:state=forget", "state='forget' is unknown; there are: keep, average, reset"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["diloco", "diloco:every=16/64@1000", "diloco:warmup=10,fragments=4,overlap=3,wire=int8",
     "diloco:outer_lr=0.5,outer_momentum=0.0", "diloco:every=8,pace=time,state=reset,algorithm=tree"],
)  # fmt: skip
def test_it_is_spelt_as_it_was_read(text: str) -> None:
    made = parse(text)
    assert parse(made.spell()) == made
    assert set(made.spell().partition(":")[2].split(",")) == set(text.partition(":")[2].split(","))
