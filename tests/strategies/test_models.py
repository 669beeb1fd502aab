"""What models do: the user's loop stays as it is, and n workers train what plain PyTorch trains on the whole batch."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ranks
from hora.parameters.shards import is_sole_owner
from trainings import (
    FAMILY,
    REPLICATED,
    batch,
    building,
    loss_of,
    mlp,
    parameters_of,
    part,
    same,
    training,
    uneven,
)  # fmt: skip

family = pytest.mark.parametrize("strategy", FAMILY)
replicated = pytest.mark.parametrize("strategy", REPLICATED)


def sgd(model: torch.nn.Module, **more: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **more)


# -- several backwards ---------------------------------------------------------------------------------------------


@family
@pytest.mark.parametrize("bucket_bytes", [1024, 4 << 20])
@pytest.mark.parametrize("dealt", [part, uneven])
def test_accumulated_backwards_count_exactly(strategy: str, bucket_bytes: int, dealt: Any) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            with one.accumulate():
                for micro in range(2):
                    (loss_of(model, dealt(one, batch(3 * step + micro))) / 3).backward()
            (loss_of(model, dealt(one, batch(3 * step + 2))) / 3).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, f"{strategy}{',' if ':' in strategy else ':'}bucket_bytes={bucket_bytes}", 3)


@family
def test_micro_batches_of_different_sizes_weigh_by_their_samples(strategy: str) -> None:
    """Tokens: the mean over all samples of all micro-batches of all workers, times the number of micro-batches."""
    sizes = {0: [5, 1], 1: [2, 4]}

    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            rows = batch(step).split([5, 1, 2, 4])
            if one.size == 1:
                (2 * loss_of(model, batch(step))).backward()
            else:
                mine = rows[2 * one.rank : 2 * one.rank + 2]
                assert [len(r) for r in mine] == sizes[one.rank]
                one.weight(len(mine[0]))
                with one.accumulate():
                    loss_of(model, mine[0]).backward()
                one.weight(len(mine[1]))
                loss_of(model, mine[1]).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)


@family
@pytest.mark.parametrize("dealt", [part, uneven])
def test_a_step_after_accumulation_alone_does_what_backward_left_undone(strategy: str, dealt: Any) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            with one.accumulate():
                loss_of(model, dealt(one, batch(step))).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, 3)


def test_a_step_after_accumulation_of_unlike_weights_counts_no_backward_twice() -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        if one.size == 1:
            (2 * loss_of(model, batch(0))).backward()
        else:
            rows = batch(0).split([5, 1, 2, 4])[2 * one.rank : 2 * one.rank + 2]
            with one.accumulate():
                for row in rows:
                    one.weight(len(row))
                    loss_of(model, row).backward()
        optimizer.step()
        return parameters_of(model)

    same(script, "shared")


@replicated
@pytest.mark.parametrize("retain", [True, False])
def test_two_synchronising_backwards_add_up(strategy: str, retain: bool) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, part(one, batch(step)))
            loss.backward(retain_graph=retain)
            (loss if retain else loss_of(model, part(one, batch(step + 50)))).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, 3)


@family
def test_clearing_gradients_to_zero_is_as_good_as_to_none(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)


@family
def test_samples_weigh_as_the_user_says(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, uneven(one, batch(step))).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, 3)


# -- parameters that do not take part ------------------------------------------------------------------------------


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(6, 8)
        self.arms = torch.nn.ModuleList(torch.nn.Linear(8, 2) for _ in range(4))
        self.never = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, arms: list[int]) -> torch.Tensor:
        trunk = torch.tanh(self.trunk(x))
        return sum(self.arms[arm](trunk) for arm in arms)


@family
@pytest.mark.parametrize("bucket_bytes", [1024, 4 << 20])
def test_parameters_may_be_unused_now_and_then_or_on_some_ranks(strategy: str, bucket_bytes: int) -> None:
    """Weight decay and momentum tell a gradient of None from one of zeros: None only if None on every rank."""

    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Branches().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        one.prepare(model, optimizer)
        for step in range(8):
            optimizer.zero_grad()
            halves = batch(step).chunk(2)
            arms = [[step % 3], [(step + 1) % 3]]  # arm 3 never
            if one.size == 1:
                loss = sum(model(h, a).square().mean() for h, a in zip(halves, arms, strict=True)) / 2
            else:
                loss = model(halves[one.rank], arms[one.rank]).square().mean()
            loss.backward()
            used = {step % 3, (step + 1) % 3}
            for arm in range(4):
                assert (model.arms[arm].weight.grad is not None) == (arm in used)
            assert model.never.bias.grad is None
            optimizer.step()
        return parameters_of(model)

    joint = "," if ":" in strategy else ":"
    same(script, f"{strategy}{joint}bucket_bytes={bucket_bytes}")


class Methods(torch.nn.Module):
    """Trained by a method of its own: the model itself is never called, so no forward hook runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))).square().mean()


@family
@pytest.mark.parametrize("by_method", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1024, 4 << 20])
def test_frozen_parameters_may_be_unfrozen_and_frozen_again(strategy: str, by_method: bool, bucket_bytes: int) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Methods().double()
        model.body.requires_grad_(False)
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(9):
            if step == 3:
                model.body[2].requires_grad_(True)
            if step == 5:
                model.body.requires_grad_(True)
            if step == 7:
                model.head.requires_grad_(False)
            optimizer.zero_grad()
            x = part(one, batch(step))
            (model.loss(x) if by_method else model(x).square().mean()).backward()
            optimizer.step()
        return parameters_of(model)

    joint = "," if ":" in strategy else ":"
    same(script, f"{strategy}{joint}bucket_bytes={bucket_bytes}", 3)


@family
def test_a_parameter_unfrozen_between_backwards_is_exchanged_before_the_step(strategy: str) -> None:
    """Unfrozen after the forward: nobody watched it, and its gradient comes with a later graph."""

    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Methods().double()
        model.body.requires_grad_(False)
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            x = part(one, batch(step))
            loss = model(x).square().mean()
            if step == 1:
                model.body.requires_grad_(True)  # no gradient yet: the graph was built without it
            if step == 2:
                model.body[0].weight.requires_grad_(False)
            loss.backward()
            optimizer.step()
            if step == 0:
                assert model.body[0].weight.grad is None
        return parameters_of(model)

    same(script, strategy)


@family
@pytest.mark.parametrize("dealt", [part, uneven])
@pytest.mark.parametrize("others", [True, False])
def test_a_backward_of_unfrozen_parameters_alone_is_exchanged_before_the_step(
    strategy: str, dealt: Any, others: bool
) -> None:
    """No hook runs in it: the model is not called, and nobody watches them yet. The rest is not exchanged again."""

    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Methods().double()
        model.body.requires_grad_(False)
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            x = dealt(one, batch(step))
            if others or step != 1:
                model.loss(x).backward()
            if step == 1:
                model.body.requires_grad_(True)
                model.body(x).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, 3)


@family
@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_that_piled_up_before_its_parameter_was_frozen_counts(strategy: str, late: bool) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(3):
            model.requires_grad_(True)
            optimizer.zero_grad()
            with one.accumulate():
                loss_of(model, part(one, batch(step))).backward()
            model[0].requires_grad_(False)
            if late or step != 1:
                loss_of(model, part(one, batch(step + 10))).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, 3)


@family
def test_models_that_freeze_each_other_in_turn_use_their_buckets_again(strategy: str) -> None:
    made = []

    def script(one: Any) -> list[torch.Tensor]:
        first, second = mlp(seed=1), mlp(seed=2, inputs=3)
        optimizers = [sgd(first), sgd(second)]
        one.prepare([first, second], optimizers)
        for step in range(6):
            x = part(one, batch(step))
            first.requires_grad_(False), second.requires_grad_(True)
            optimizers[1].zero_grad()
            second(first(x)).square().mean().backward()
            optimizers[1].step()
            first.requires_grad_(True), second.requires_grad_(False)
            optimizers[0].zero_grad()
            (1 - second(first(x))).square().mean().backward()
            optimizers[0].step()
            if one.size > 1:
                made.append((one.rank, id(one.sync._plans.reducer)))
        if one.size > 1:
            assert len({courier for rank, courier in made if rank == one.rank}) <= 2
        return parameters_of(first, second)

    same(script, strategy)


@family
def test_a_gan_steps_its_optimizers_in_turn(strategy: str) -> None:
    """The generator's backward also reaches the discriminator, whose gradients are cleared before its own."""

    def script(one: Any) -> list[torch.Tensor]:
        generator, critic = mlp(inputs=6, outputs=6, seed=1), mlp(inputs=6, outputs=1, seed=2)
        to_generate = torch.optim.Adam(generator.parameters(), lr=1e-3)
        to_judge = torch.optim.Adam(critic.parameters(), lr=1e-3)
        one.prepare([generator, critic], [to_generate, to_judge])
        for step in range(6):
            real, noise = part(one, batch(step)), part(one, batch(step + 500))
            to_judge.zero_grad()
            (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
            to_judge.step()
            to_generate.zero_grad()
            (-critic(generator(noise)).mean()).backward()
            to_generate.step()
        return parameters_of(generator, critic)

    same(script, strategy)


# -- tied weights --------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        if how == "one parameter":
            self.second.weight = self.first.weight
        else:
            self.second.weight = torch.nn.Parameter(self.first.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@family
@pytest.mark.parametrize("how", ["one parameter", "one storage"])
def test_tied_weights_stay_tied(strategy: str, how: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Tied(how).double()
        if how == "one storage":  # double() has cut the tie
            model.second.weight = torch.nn.Parameter(model.first.weight.data)
        optimizer = sgd(model, foreach=False)
        one.prepare(model, optimizer)
        for step in range(5):
            optimizer.zero_grad()
            model(part(one, batch(step))).square().mean().backward()
            optimizer.step()
        assert model.first.weight.data_ptr() == model.second.weight.data_ptr()
        found = parameters_of(model)
        if one.size > 1:
            one.close()  # what lay in shared memory moves out of it, still tied
            assert model.first.weight.data_ptr() == model.second.weight.data_ptr()
            assert torch.equal(model.first.weight, found[0])
        return found

    same(script, strategy, 3)


# -- optimizers ----------------------------------------------------------------------------------------------------


@family
def test_a_group_may_be_added_later(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(150)
        optimizer = torch.optim.Adam(model[4].parameters(), lr=0.01)
        one.prepare(model, optimizer)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.003})
            model.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)


@family
def test_a_scheduler_and_groups_with_rates_of_their_own_go_on_working(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(150)
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2:].parameters(), "weight_decay": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.02], total_steps=10, cycle_momentum=False)
        one.prepare(model, optimizer)
        for step in range(10):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
            if step < 9:
                scheduler.step()
        return [*parameters_of(model), torch.tensor([group["lr"] for group in optimizer.param_groups])]

    same(script, strategy)


@replicated
def test_torchs_clipping_sees_the_mean_gradient(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            (9 * loss_of(model, part(one, batch(step)))).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).double())
            optimizer.step()
        return [*parameters_of(model), torch.stack(norms)]

    same(script, strategy)


@family
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_horas_clipping_equals_torchs_under_every_strategy(strategy: str, norm_type: float) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(150)
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            (9 * loss_of(model, part(one, batch(step)))).backward()
            norms.append(one.clip(model.parameters(), 0.5, norm_type).float().view(1))
            optimizer.step()
        return [*parameters_of(model), torch.cat(norms)]

    same(script, strategy, 3, rtol=1e-6, atol=1e-9)


class Viewed(torch.nn.Module):
    """Biases are added through views, without broadcasting: their gradients lie in the memory of the sum's, and both in
    one place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 512), torch.nn.Linear(512, 3)
        self.biases = torch.nn.ParameterList(torch.randn(512) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + self.biases[0].view(1, -1) + self.biases[1].view(1, -1)
        out: torch.Tensor = self.last(torch.tanh(hidden))
        return out


@family
@pytest.mark.parametrize("bucket_bytes", [1024, 4 << 20])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_a_gradient_whose_memory_another_branch_still_reads_leaves_it_alone(
    strategy: str, bucket_bytes: int, weights: tuple[float, float]
) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Viewed().double()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            if one.size > 1:
                one.weight(weights[one.rank])
                loss_of(model, part(one, batch(step, 2))).backward()
            else:
                shares = [weight / sum(weights) for weight in weights]
                halves = batch(step, 2).split(1)
                sum(share * loss_of(model, x) for share, x in zip(shares, halves, strict=True)).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, f"{strategy}{',' if ':' in strategy else ':'}bucket_bytes={bucket_bytes}")


@replicated
def test_gradients_that_lie_in_a_vector_of_the_users_stay_there(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        whole, at = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64), 0
        for parameter in model.parameters():
            parameter.grad = whole[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        found = []
        for step in range(3):
            whole.zero_()
            loss_of(model, part(one, batch(step))).backward()
            found.append(whole.clone())
            optimizer.step()
        return [*found, *parameters_of(model)]

    same(script, f"{strategy}:bucket_bytes=1024")


@family
@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_nobody_else_holds_is_not_copied(
    strategy: str, to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    monkeypatch.setattr(
        "hora.strategies.allreduce.flat_gradients.is_sole_owner",
        lambda grad: found.append(is_sole_owner(grad)) or found[-1],
    )

    def work(group: Any) -> None:
        one = training(group, strategy)
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()

    ranks.run(2, work)
    assert found and all(found)


@family
def test_a_closure_is_evaluated_once_and_synchronised(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            calls = []

            def closure(step: int = step, calls: list[int] = calls) -> torch.Tensor:
                calls.append(step)
                optimizer.zero_grad()
                loss = loss_of(model, part(one, batch(step)))
                loss.backward()
                return loss

            assert torch.is_tensor(optimizer.step(closure))
            assert calls == [step]
        return parameters_of(model)

    same(script, strategy)


@replicated
def test_lbfgs_evaluates_as_often_as_it_likes(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(8)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        one.prepare(model, optimizer)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, part(one, batch(0)))
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return parameters_of(model)

    same(script, strategy, rtol=1e-7, atol=1e-9)


@family
def test_a_model_may_be_called_several_times_before_its_backward(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            x = part(one, batch(step))
            (model(x) - model(2 * x)).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)


# -- graphs --------------------------------------------------------------------------------------------------------


@family
def test_a_gradient_penalty_differentiates_twice(strategy: str) -> None:
    """autograd.grad is no backward: it exchanges nothing."""

    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            x = part(one, batch(step)).clone().requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            ((slope.norm(dim=1) - 1).square().mean() + out.square().mean()).backward()
            optimizer.step()
        if one.size > 1:
            assert one.sync.hooks.num_exchanges == 4
        return parameters_of(model)

    same(script, strategy)


@family
def test_one_rank_alone_may_look_at_slopes(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            x = part(one, batch(step))
            optimizer.zero_grad()
            loss_of(model, x).backward()
            if one.rank == 0:
                image = x.clone().requires_grad_()
                torch.autograd.grad(model(image).sum(), image)
                model(image).sum().backward(inputs=[image])
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)


@family
def test_gradients_that_the_script_assigns_are_averaged_before_the_step(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(3):
            loss = loss_of(model, part(one, batch(step)))
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)


class Checkpointed(torch.nn.Module):
    def __init__(self, reentrant: bool, all_inside: bool, twice: bool) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6))
        if not all_inside:
            self.before, self.after = torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)
        self.all_inside = all_inside
        self.twice = twice
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if self.all_inside else self.before(x)
        x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        if self.twice:
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return x if self.all_inside else self.after(x)


@family
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("all_inside", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_checkpoints_end_no_backward_but_their_own(
    strategy: str, reentrant: bool, all_inside: bool, twice: bool
) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Checkpointed(reentrant, all_inside, twice).double()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            model(part(one, batch(step)).clone()).square().mean().backward()
            optimizer.step()
        if one.size > 1:
            assert one.sync.hooks.num_exchanges == 4
        return parameters_of(model)

    same(script, f"{strategy}{',' if ':' in strategy else ':'}bucket_bytes=1024")


@family
def test_a_backward_that_ran_wholly_inside_of_checkpoints_is_exchanged_before_the_step(strategy: str) -> None:
    """The model itself is not called, so nothing outside of the checkpoint tells of the outer backward."""

    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Checkpointed(True, True, False).double()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            x = part(one, batch(step)).clone().requires_grad_()
            checkpoint(model.inner, x, use_reentrant=True).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)


@pytest.mark.cases(1)
@family
@pytest.mark.parametrize("order", ["compiled, then prepared", "prepared, then compiled"])
def test_a_compiled_model_trains_as_it_is(strategy: str, order: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        if order.startswith("compiled"):
            with building():
                called = torch.compile(model, backend="eager")
            one.prepare(called, optimizer)
        else:
            one.prepare(model, optimizer)
            with building():
                called = torch.compile(model, backend="eager")
        for step in range(3):
            optimizer.zero_grad()
            with building():  # the compiler is the process's too
                loss = called(part(one, batch(step))).square().mean()
            loss.backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)


# -- dtypes and layouts --------------------------------------------------------------------------------------------


@family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_models_of_any_precision_train(strategy: str, dtype: torch.dtype) -> None:
    tolerance = {torch.bfloat16: 0.03, torch.float16: 5e-3, torch.float32: 1e-4}[dtype]

    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(192).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step)).to(dtype)).backward()
            assert all(p.grad.dtype is dtype for p in model.parameters())
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, rtol=tolerance, atol=tolerance)


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.double_, self.single = torch.nn.Linear(6, 150).double(), torch.nn.Linear(150, 150)
        self.coarse, self.last = torch.nn.Linear(150, 4).bfloat16(), torch.nn.Linear(4, 2).double()
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.single(torch.tanh(self.double_(x)).float())) * self.scalar
        return self.last(torch.tanh(self.coarse(x.bfloat16())).double())


@family
def test_one_model_may_mix_precisions_with_empty_and_scalar_parameters(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            model(part(one, batch(step))).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, 3, rtol=0.02, atol=0.02)


@family
def test_autocast_in_bfloat16_needs_nothing(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(150).float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, part(one, batch(step)).float())
            loss.backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, rtol=0.05, atol=0.02)


@family
def test_channels_last_parameters_keep_their_strides_and_those_of_their_gradients(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = torch.nn.Sequential(
                torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 40, 3), torch.nn.ReLU(),
                torch.nn.Conv2d(40, 4, 1)
            ).double()  # fmt: skip
        model = model.to(memory_format=torch.channels_last)
        strides = [p.stride() for p in model.parameters()]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            x = batch(step, 6, 3 * 6 * 6).view(6, 3, 6, 6)
            model(part(one, x).contiguous(memory_format=torch.channels_last)).square().mean().backward()
            assert [p.grad.stride() for p in model.parameters()] == strides
            optimizer.step()
        assert [p.stride() for p in model.parameters()] == strides
        return parameters_of(model)

    same(script, strategy, 3)


@pytest.mark.parametrize(("strategy", "transport"), [*((s, "memory") for s in FAMILY), ("ring:update=sharded", "tcp")])
def test_parameters_that_leave_gaps_in_their_memory_train(strategy: str, transport: str) -> None:
    class Gaps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(6, 8, dtype=torch.float64)
            self.even, self.odd = torch.nn.Parameter(whole[:, ::2]), torch.nn.Parameter(whole[:, 1::2])
            self.turned = torch.nn.Parameter(torch.randn(160, 4, dtype=torch.float64).t())
            self.large = torch.nn.Parameter(torch.randn(160, 160, dtype=torch.float64).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.even * (x @ self.odd)) @ self.turned @ self.large

    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Gaps()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(part(one, batch(step))).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, 3, transport, rtol=1e-7, atol=1e-9)


# -- sparse gradients ----------------------------------------------------------------------------------------------


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 4, sparse=True)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, words: torch.Tensor | None) -> torch.Tensor:
        return self.last(self.table(words)) if words is not None else self.last(torch.ones(2, 4).double())


@replicated
@pytest.mark.parametrize("dealt", [part, uneven])
def test_sparse_gradients_are_the_mean_too(strategy: str, dealt: Any) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Words().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            words = (batch(step)[:, :2].abs() * 9).long().clamp(max=19)
            with one.accumulate():
                model(dealt(one, words)).square().mean().backward()
            model(dealt(one, words.flip(1))).square().mean().backward()
            assert model.table.weight.grad.is_sparse
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, 3)


@replicated
def test_a_sparse_gradient_may_be_absent_on_some_ranks(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Words().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            words = (batch(step)[:, :2].abs() * 9).long().clamp(max=19)
            if one.size == 1:
                ((model(words).square().mean() + model(None).square().mean()) / 2).backward()
            else:
                model(words if one.rank == step % 2 else None).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)


# -- buffers -------------------------------------------------------------------------------------------------------


def normed() -> torch.nn.Sequential:
    with building():
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)).double()


def statistics(one: Any, steps: int) -> list[torch.Tensor]:
    model = normed()
    optimizer = sgd(model)
    one.prepare(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        model(part(one, batch(step))).square().mean().backward()
        optimizer.step()
    return [buffer.clone() for buffer in model.buffers()]


@family
def test_rank_0s_batch_statistics_win(strategy: str) -> None:
    for steps in (1, 3):
        found = ranks.run(3, lambda group, steps=steps: statistics(training(group, strategy), steps))
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
        if steps == 1:  # later parameters have moved
            alone = normed()
            alone(batch(0)[:4])
            assert all(torch.equal(a, b) for a, b in zip(found[2], alone.buffers(), strict=True))


@pytest.mark.parametrize("strategy", ["shared:sync_buffers=mean", "ring:update=sharded,sync_buffers=mean"])
def test_batch_statistics_may_be_averaged(strategy: str) -> None:
    found = ranks.run(2, lambda group: statistics(training(group, strategy), 1))
    expected = []
    for half in batch(0).chunk(2):
        model = normed()
        model(half)
        expected.append([b.clone() for b in model.buffers()])
    for number, (a, b) in enumerate(zip(*expected, strict=True)):
        wanted = (a + b) / 2 if a.is_floating_point() else a
        torch.testing.assert_close(found[0][number], wanted)
        assert torch.equal(found[0][number], found[1][number])


@family
def test_a_buffer_that_is_replaced_by_another_tensor_is_still_rank_0s(strategy: str) -> None:
    class Running(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(6, 2).double()
            self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen * 0.5 + x.detach().sum(0)
            return self.fc(x)

    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = Running()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            x = batch(step)
            model(x[:6] if one.rank == 0 else x[6:]).square().mean().backward()
            optimizer.step()
        return [model.seen.clone()]

    found = ranks.run(2, lambda group: script(training(group, strategy)))
    wanted = torch.zeros(6, dtype=torch.float64)
    for step in range(3):
        wanted = wanted * 0.5 + batch(step)[:6].sum(0)
    for mine in found:
        torch.testing.assert_close(mine[0], wanted)


# -- nothing is renamed --------------------------------------------------------------------------------------------


@family
def test_prepare_changes_no_class_and_no_name(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(150)
        optimizer = torch.optim.Adam(model.parameters())
        kinds, keys = (type(model), type(optimizer), type(model[0])), list(model.state_dict())
        identities = [id(p) for p in model.parameters()]
        one.prepare(model, optimizer)
        loss_of(model, part(one, batch(0))).backward()
        optimizer.step()
        assert kinds == (type(model), type(optimizer), type(model[0]))
        assert keys == list(model.state_dict())
        assert identities == [id(p) for p in model.parameters()]
        assert identities == [id(p) for group in optimizer.param_groups for p in group["params"]]
        file = io.BytesIO()
        torch.save(model[4].state_dict(), file)
        assert file.tell() < 16 * 1024, "a small layer is saved with everything else"
        plain = mlp(150, seed=5)
        plain.load_state_dict(model.state_dict())
        return parameters_of(plain)

    same(script, strategy, rtol=1e-8, atol=1e-9)


@family
def test_an_ema_copy_stays_behind_and_belongs_to_its_rank(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        ema = copy.deepcopy(model).requires_grad_(False)
        for step in range(4):
            optimizer.zero_grad()
            x = part(one, batch(step))
            (loss_of(model, x) + (model(x) - ema(x)).square().mean()).backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return parameters_of(model, ema)

    same(script, strategy)


@family
def test_all_workers_start_from_rank_0s_model(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(150, seed=one.rank)
        one.prepare(model, sgd(model))
        return parameters_of(model)

    same(script, strategy, 3, rtol=0, atol=0)


@family
def test_an_evaluation_on_one_rank_alone_waits_for_nobody(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
            if one.rank == 0:
                model.eval()
                with torch.no_grad():
                    model(batch(step))
                model(batch(step))
                model.train()
        return parameters_of(model)

    same(script, strategy)


@family
def test_an_exception_inside_backward_is_the_users_and_the_next_backward_starts_afresh(strategy: str) -> None:
    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, armed: bool) -> torch.Tensor:
            ctx.armed = armed
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            if ctx.armed:
                raise KeyError("the user's own")
            return grad, None

    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = sgd(model)
        one.prepare(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            hidden = model[:2](part(one, batch(step)))
            if step == 2:
                with pytest.raises(KeyError, match="own"):
                    model[2:](Trap.apply(hidden, True)).square().mean().backward()
                optimizer.zero_grad()
            model(part(one, batch(step))).square().mean().backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)
