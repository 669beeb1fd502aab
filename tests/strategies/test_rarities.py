"""What reviewers found: rare loops in which numbers once went wrong, or somebody waited in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ranks
from hora.data import shard
from trainings import FAMILY, SHARDED, batch, building, fail, loss_of, mlp, parameters_of, part, same, training


@pytest.mark.parametrize("strategy", ["shared", "ring", "shared:update=sharded"])
def test_a_backward_that_broke_off_and_was_caught_outside_the_loop_stops_the_others(strategy: str) -> None:
    def script(group: Any) -> tuple[int, bool]:
        one = training(group, strategy + (",bucket_bytes=1024" if ":" in strategy else ":bucket_bytes=1024"))
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)

        def boom(*_: Any) -> None:
            if one.rank == 1 and one.step == 3:
                raise RuntimeError("boom")

        model[0].register_full_backward_hook(boom)  # buckets of later layers have left by then
        loader = shard([torch.ones(6, dtype=torch.float64)] * 20, one, global_batch=2)
        one.adopt(loader)
        broke = False
        try:
            for x in loader:
                loss_of(model, x.requires_grad_()).backward()
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError:
            broke = True
        assert group.all_reduce(torch.ones(1)).item() == 2
        return one.step, broke

    assert ranks.run(2, script) == [(3, False), (3, True)]


@pytest.mark.parametrize("strategy", SHARDED)
def test_clipping_by_torch_after_a_scaler_is_refused_where_a_worker_holds_a_share(strategy: str) -> None:
    def script(one: Any) -> None:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        one.prepare(model, optimizer, None, scaler)
        scaler.scale(loss_of(model, part(one, batch(0)))).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)

    assert all("was changed between backward() and step()" in words for words in fail(script, strategy))


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_an_accumulation_given_up_at_the_end_of_an_epoch_counts_no_more(set_to_none: bool, tokens: bool) -> None:
    def script(group: Any) -> float:
        one = training(group, "shared")
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        numbers = [torch.Generator().manual_seed(seed) for seed in range(27)]
        loader = shard([torch.randn(6, dtype=torch.float64, generator=g) for g in numbers], one, global_batch=4)
        one.adopt(loader)
        norm = torch.zeros(())
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            for number, x in enumerate(loader):
                if tokens:
                    one.weight((50 if number == 4 else 1) * len(x))
                if number % 4 != 3:
                    with one.accumulate():
                        loss_of(model, x).backward()
                else:
                    loss_of(model, x).backward()
                    norm = model[0].weight.grad.norm()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
        return norm.item()

    alone = ranks.run(1, script)[0]
    assert ranks.run(2, script) == pytest.approx([alone, alone])


@pytest.mark.parametrize("strategy", FAMILY)
def test_a_step_that_is_left_out_stays_so_when_a_layer_is_unfrozen_before_it(strategy: str) -> None:
    def script(group: Any) -> tuple[int, bool]:
        one = training(group, strategy, on_nonfinite="skip")
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        model[0].requires_grad_(False)
        for number in range(3):
            loss = loss_of(model, part(one, batch(number))) * (float("nan") if number == 1 else 1.0)
            loss.backward()
            if number == 1:
                model[0].requires_grad_(True)
            optimizer.step()
            optimizer.zero_grad()
        return one.step, bool(torch.isfinite(model[4].weight).all())

    assert ranks.run(2, script) == [(2, True), (2, True)]


@pytest.mark.parametrize("strategy", ["ring", "tree", "halving", "star", "shared", "ring:update=sharded"])
def test_the_mean_of_large_halves_is_finite(strategy: str) -> None:
    def script(group: Any) -> list[float]:
        one = training(group, strategy)
        with building():
            model = torch.nn.Linear(4, 1, bias=False).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        one.prepare(model, optimizer)
        (model.weight * 40000).sum().backward()
        optimizer.step()
        return [value for value in model.weight.flatten().tolist() if value != value or abs(value) > 60000]

    assert ranks.run(2, script) == [[], []]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", FAMILY)
def test_a_prepared_model_inside_a_checkpoint_is_exchanged_once_per_backward(strategy: str, reentrant: bool) -> None:
    counts = []

    def script(one: Any) -> list[torch.Tensor]:
        with building():
            encoder, decoder = torch.nn.Linear(6, 64).double(), torch.nn.Linear(64, 200).double()
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
        one.prepare([encoder, decoder], optimizer)
        for number in range(3):
            x = part(one, batch(number)).requires_grad_()
            decoder(checkpoint(encoder, x, use_reentrant=reentrant).tanh()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if getattr(one, "sync", None) is not None:
            counts.append(one.sync.hooks.num_exchanges)
        return parameters_of(encoder, decoder)

    same(script, strategy)
    assert counts == [3, 3]


def test_a_parameter_that_the_model_returns_collects_no_hooks() -> None:
    class Policy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)
            self.log_std = torch.nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), self.log_std

    def script(group: Any) -> int:
        one = training(group, "shared")
        model = Policy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for _ in range(5):
            mean, log_std = model(torch.ones(2, 6))
            (mean.sum() + log_std.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        hooks = len(model.log_std._backward_hooks or ())
        one.close()
        model(torch.ones(2, 6))[0].sum().backward()  # plain PyTorch again
        return hooks

    assert ranks.run(2, script) == [0, 0]


@pytest.mark.parametrize("strategy", FAMILY)
def test_two_optimizers_may_clear_by_zeros_one_after_the_other(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        pair = [torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 2)]
        one.prepare(model, pair)
        for number in range(3):
            loss_of(model, part(one, batch(number))).backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        return parameters_of(model)

    same(script, strategy)


def test_a_loader_made_anew_in_every_epoch_goes_on_where_it_stood() -> None:
    def script(group: Any) -> list[int]:
        seen: list[int] = []
        states: list[dict[str, Any]] = []
        first = training(group, "shared")
        second = training(group, "shared")
        for one in (first, second):
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            one.prepare(model, optimizer)
            if one is second:
                second.resume(states, first.next_epoch())
            for _ in one.epochs(3):
                loader = one.adopt(shard(list(range(12)), one, global_batch=4))
                for x in loader:
                    model(x.float().view(-1, 1)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if one is second:
                        seen += x.tolist()
                    elif one.step == 7:
                        states = [{**s.state(), "global_batch": s.global_batch} for s in one.shards]
                        break
                if one.step == 7 and one is first:
                    break
        return seen

    found = ranks.run(2, script)
    assert sorted(found[0] + found[1]) == list(range(4, 12))


@pytest.mark.parametrize("strategy", ["shared", "ring"])
def test_a_step_that_one_worker_leaves_out_is_named_at_the_next_backward(strategy: str) -> None:
    def script(one: Any) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for number in range(4):
            loss_of(model, part(one, batch(number))).backward()
            if one.rank == 0 or number != 2:
                optimizer.step()
            optimizer.zero_grad()

    for words in fail(script, strategy):
        assert "on rank 1" in words and "2 steps were taken, on rank 0" in words and "optimizer.step()" in words


@pytest.mark.parametrize("breaker", [0, 1])
@pytest.mark.parametrize("strategy", ["shared", "ring", "shared:update=sharded"])
def test_one_that_breaks_out_alone_ends_its_epochs_where_the_others_do(strategy: str, breaker: int) -> None:
    def script(group: Any) -> tuple[int, int]:
        one = training(group, strategy)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        loader = one.adopt(shard([torch.ones(6, dtype=torch.float64)] * 20, one, global_batch=4))
        bodies = 0
        for _ in one.epochs(3):
            for number, x in enumerate(loader):
                loss_of(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
                if one.rank == breaker and number == 2:
                    break
            assert group.all_reduce(torch.ones(1)).item() == 2  # an evaluation after every epoch
            bodies += 1
        return bodies, one.step

    assert ranks.run(2, script) == [(1, 3), (1, 3)]
