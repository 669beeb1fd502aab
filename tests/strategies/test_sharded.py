"""Under update=sharded each worker updates its share alone; what would break that is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ranks
from hora.strategies.allreduce.reducers import MAX_COPIES
from trainings import SHARDED, batch, building, fail, loss_of, mlp, parameters_of, part, same, training

sharded = pytest.mark.parametrize("strategy", SHARDED)


def step_once(one: Any, width: int = 150, before_step: Any = None, optimizer: Any = None, steps: int = 1) -> Any:
    model = mlp(width)
    chosen = (optimizer or torch.optim.Adam)(model.parameters())
    one.prepare(model, chosen)
    for step in range(steps):
        chosen.zero_grad()
        loss_of(model, part(one, batch(step))).backward()
        if before_step:
            before_step(one, model)
        chosen.step()
    return model, chosen


@sharded
@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_a_worker_keeps_optimizer_state_for_its_share_alone(strategy: str, transport: str) -> None:
    if transport == "tcp" and strategy.startswith("shared"):
        strategy = strategy.replace("shared", "auto", 1)

    def held(group: Any) -> tuple[int, int, int]:
        model, optimizer = step_once(training(group, strategy))
        assert set(optimizer.state) <= set(model.parameters())
        state = optimizer.state_dict()["state"]
        moments = sum(part["exp_avg"].numel() for part in state.values())
        optimizer.load_state_dict(optimizer.state_dict())  # and it goes on with that
        loss_of(model, batch(5)).backward()
        return moments, len(state), sum(p.numel() for p in model.parameters())

    found = ranks.run(3, held, transport)
    assert sum(moments for moments, _, _ in found) == found[0][2]
    assert max(moments for moments, _, _ in found) < 0.5 * found[0][2]


@sharded
def test_an_optimizer_that_was_loaded_whole_goes_on_with_its_share(strategy: str) -> None:
    """Before prepare or after it, as a script that resumes by itself does."""
    model = mlp(150)
    first = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        first.zero_grad()
        loss_of(model, batch(step)).backward()
        first.step()

    def script(one: Any, late: bool) -> list[torch.Tensor]:
        mine = mlp(150)
        mine.load_state_dict(model.state_dict())
        optimizer = torch.optim.Adam(mine.parameters(), lr=0.01)
        for after in (False, True):
            if late == after:
                optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
            if not after:
                one.prepare(mine, optimizer)
        for step in range(2, 5):
            optimizer.zero_grad()
            loss_of(mine, part(one, batch(step))).backward()
            optimizer.step()
        return parameters_of(mine)

    for late in (False, True):
        same(lambda one, late=late: script(one, late), strategy, 3, rtol=1e-8, atol=1e-10)


class Norms(torch.optim.Optimizer):
    """Needs whole parameters: each step is as long as the parameter."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})
        self.shapes: set[tuple[int, ...]] = set()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.shapes.add(tuple(parameter.shape))
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    length = parameter.norm() / (parameter.grad.norm() + 1e-9)
                    parameter.sub_(parameter.grad * length, alpha=group["lr"])


@sharded
def test_an_optimizer_that_is_not_known_gets_whole_parameters(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model, optimizer = step_once(one, optimizer=Norms, steps=4)
        assert optimizer.shapes <= {tuple(p.shape) for p in model.parameters()}
        return parameters_of(model)

    same(script, strategy, 3)


@sharded
def test_a_subclass_of_a_known_optimizer_gets_whole_parameters(strategy: str) -> None:
    class Mine(torch.optim.SGD):
        pass

    def look(group: Any) -> list[int]:
        one = training(group, strategy)
        step_once(one, optimizer=Mine)
        return [len(lanes) for lanes in one.sync._shards_of]

    assert set(ranks.run(2, look)[0]) == {1}


@sharded
@pytest.mark.parametrize("kind", ["Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "SGD"])
def test_every_optimizer_that_gets_slices_trains_as_on_whole_parameters(strategy: str, kind: str) -> None:
    make = getattr(torch.optim, kind)
    same(lambda one: parameters_of(step_once(one, optimizer=make, steps=4)[0]), strategy, 3, rtol=1e-8, atol=1e-10)


@sharded
@pytest.mark.parametrize("second", ["a new loss", "the same graph"])
def test_a_second_synchronising_backward_raises_at_the_step(strategy: str, second: str) -> None:
    def script(one: Any) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        loss = loss_of(model, part(one, batch(0)))
        loss.backward(retain_graph=True)
        (loss if second == "the same graph" else loss_of(model, part(one, batch(1)))).backward()
        optimizer.step()

    for said in fail(script, strategy):
        assert "a second backward() that synchronises" in said and "job.accumulate()" in said


@sharded
def test_gradients_that_were_never_cleared_raise(strategy: str) -> None:
    def script(one: Any) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(2):
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()

    for said in fail(script, strategy):
        assert "a second backward() that synchronises" in said


@sharded
@pytest.mark.parametrize("how", ["in place", "replaced", "torch's clipping"])
def test_a_gradient_changed_by_hand_raises_and_names_rank_and_parameter(strategy: str, how: str) -> None:
    def meddle(one: Any, model: torch.nn.Module) -> None:
        if one.rank == 1 or how == "torch's clipping":
            if how == "in place":
                model[2].weight.grad.mul_(2)
            elif how == "replaced":
                model[2].weight.grad = model[2].weight.grad * 2
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    for said in fail(lambda one: step_once(one, before_step=meddle), strategy):
        if how == "torch's clipping":
            assert "the gradient of 0.weight was changed" in said
        else:
            assert "rank 1" in said and "the gradient of 2.weight was changed between backward() and step()" in said
        assert "hora.clip_grad_norm_" in said


@sharded
def test_a_gradient_changed_by_hand_is_not_excused_by_clipping(strategy: str) -> None:
    def meddle(one: Any, model: torch.nn.Module) -> None:
        model[2].weight.grad.mul_(2)
        one.clip(model.parameters(), 1.0, 2.0)

    for said in fail(lambda one: step_once(one, before_step=meddle), strategy):
        assert "the gradient of 2.weight was changed" in said


@sharded
@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_parameter_written_by_hand_raises_and_names_rank_and_parameter(strategy: str, how: str) -> None:
    def meddle(one: Any, model: torch.nn.Module) -> None:
        if one.rank == 1:
            if how == "data":
                model[0].bias.data = torch.zeros_like(model[0].bias)
            else:
                with torch.no_grad():
                    model[0].bias.zero_()

    for said in fail(lambda one: step_once(one, before_step=meddle), strategy):
        assert "rank 1" in said and "0.bias was written by the script" in said and "update=replicated" in said


@sharded
def test_lbfgs_and_sparse_gradients_are_refused_with_the_way_out(strategy: str) -> None:
    for said in fail(lambda one: step_once(one, optimizer=torch.optim.LBFGS), strategy):
        assert "LBFGS needs all parameters" in said and "update=replicated" in said

    def sparse(one: Any) -> None:
        with building():
            table = torch.nn.Embedding(5, 3, sparse=True)
        one.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))
        table(torch.tensor([1])).sum().backward()

    for said in fail(sparse, strategy):
        assert "weight has a sparse gradient" in said and "update=replicated" in said


@sharded
def test_an_old_graph_notices_that_the_parameters_have_changed(strategy: str) -> None:
    """The optimizer's writes, the others' too, count as changes for autograd: a stale graph fails, never lies."""

    def script(one: Any) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        old = loss_of(model, part(one, batch(0)))
        loss_of(model, part(one, batch(1))).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()

    assert fail(script, strategy) == ["", ""]


@sharded
def test_closing_moves_the_parameters_out_of_shared_memory(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model, _ = step_once(one, steps=2)
        found = parameters_of(model)
        if one.size > 1:
            places = [p.data_ptr() for p in model.parameters()]
            one.close()
            assert all(p.data_ptr() != place for p, place in zip(model.parameters(), places, strict=True))
            with torch.no_grad():
                model[0].weight.add_(one.rank)  # its own from now on
            assert torch.equal(model[0].weight, found[0] + one.rank)
        return found

    same(script, strategy, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("transport", ["memory", "tcp"])
@pytest.mark.parametrize("strategy", ["ring", "ring:update=sharded"])
def test_many_buckets_share_a_few_copies_and_train_as_one_process(strategy: str, transport: str) -> None:
    chosen = strategy + (":" if ":" not in strategy else ",") + "bucket_bytes=1024"
    found: list[tuple[int, int]] = []

    def script(one: Any) -> list[torch.Tensor]:
        model, _ = step_once(one, width=60, steps=4)
        if one.size > 1:
            courier = one.sync._plans.reducer
            found.append((len(one.sync._backward.buckets), sum(map(len, courier._copies.values()))))
        return parameters_of(model)

    same(script, chosen, size=3, transport=transport)
    assert all(num_buckets > 2 * MAX_COPIES and num_copies <= MAX_COPIES for num_buckets, num_copies in found), found
    assert len(found) == 3


def test_a_parameter_with_gaps_in_memory_is_gathered_in_several_buckets() -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = torch.nn.Linear(30, 40).double()
            model.weight = torch.nn.Parameter(torch.randn(40, 60).double()[:, ::2])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(part(one, batch(step, inputs=30))).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    same(script, "ring:update=sharded,bucket_bytes=1024", transport="tcp")
