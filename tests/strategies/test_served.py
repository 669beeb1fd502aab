"""The synchronous parameter server is one training more: ps:mode=sync == the ring == plain PyTorch on the whole batch.

What holds for the all-reduce family of models, uneven data and stopping is claimed here again, by running those very
tests under ps, over shared memory and over TCP. What differs has tests of its own: under ps `p.grad` stays this
worker's own, so clipping acts on it, and an exchange is the step itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_equivalence
import test_misuse
import test_models
import test_nonfinite
import test_rarities
import torch

import test_stopping
import test_uneven
import tiers
import trainings
from hora.data import shard
from trainings import OPTIMIZERS, batch, building, fail, loss_of, mlp, parameters_of, part, same, uneven
from workers import Worker, alone, assert_alike, data, mse, workers

LINES = ("ps/1", "ps/2", "ps/2tcp")
lines = pytest.mark.parametrize("strategy", LINES)


def cases(check: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """What a test is parametrised with, but for its strategy and transport: every pair of values."""
    axes = []
    for mark in [mark for mark in getattr(check, "pytestmark", []) if mark.name == "parametrize"]:
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
        if not {"strategy", "transport", "bucket_bytes"} & set(names):
            axes.append(
                [dict(zip(names, value if len(names) > 1 else (value,), strict=True)) for value in mark.args[1]]
            )
    product = [functools.reduce(lambda a, b: a | b, chosen, {}) for chosen in itertools.product(*axes)]
    chosen = tiers.covering([list(case.values()) for case in product]) if len(axes) > 1 else range(len(product))
    return (product[number] for number in sorted(chosen))


SAME = [
    test_equivalence.test_dealt_data_and_sliced_shares_train_as_one_process,
    test_equivalence.test_two_runs_have_the_same_bits,
    test_models.test_micro_batches_of_different_sizes_weigh_by_their_samples,
    test_models.test_a_step_after_accumulation_alone_does_what_backward_left_undone,
    test_models.test_two_synchronising_backwards_add_up,
    test_models.test_clearing_gradients_to_zero_is_as_good_as_to_none,
    test_models.test_samples_weigh_as_the_user_says,
    test_models.test_a_parameter_unfrozen_between_backwards_is_exchanged_before_the_step,
    test_models.test_a_backward_of_unfrozen_parameters_alone_is_exchanged_before_the_step,
    test_models.test_a_gradient_that_piled_up_before_its_parameter_was_frozen_counts,
    test_models.test_a_gan_steps_its_optimizers_in_turn,
    test_models.test_a_scheduler_and_groups_with_rates_of_their_own_go_on_working,
    test_models.test_a_closure_is_evaluated_once_and_synchronised,
    test_models.test_a_model_may_be_called_several_times_before_its_backward,
    test_models.test_gradients_that_the_script_assigns_are_averaged_before_the_step,
    test_models.test_models_of_any_precision_train,
    test_models.test_one_model_may_mix_precisions_with_empty_and_scalar_parameters,
    test_models.test_channels_last_parameters_keep_their_strides_and_those_of_their_gradients,
    test_models.test_rank_0s_batch_statistics_win,
    test_models.test_a_buffer_that_is_replaced_by_another_tensor_is_still_rank_0s,
    test_models.test_prepare_changes_no_class_and_no_name,
    test_models.test_all_workers_start_from_rank_0s_model,
    test_models.test_an_evaluation_on_one_rank_alone_waits_for_nobody,
    test_models.test_an_exception_inside_backward_is_the_users_and_the_next_backward_starts_afresh,
    test_nonfinite.test_skip_leaves_that_step_out_on_every_worker_and_training_goes_on,
    test_nonfinite.test_half_precision_with_a_scaler_trains,
    test_rarities.test_two_optimizers_may_clear_by_zeros_one_after_the_other,
    test_rarities.test_a_prepared_model_inside_a_checkpoint_is_exchanged_once_per_backward,
    test_misuse.test_models_that_differ_are_named_by_their_first_difference,
    test_misuse.test_a_new_parameter_of_the_model_is_named,
    test_misuse.test_a_new_parameter_of_the_optimizer_is_named,
    test_uneven.test_fewer_samples_than_workers_and_batches_in_which_somebody_is_always_absent,
    test_uneven.test_batch_size_is_per_worker_and_drop_last_drops_the_uneven_batch,
    test_uneven.test_a_learning_rate_changed_by_hand_reaches_absent_workers,
    test_uneven.test_accumulation_across_batches_with_absent_workers_counts_every_sample_once,
    test_uneven.test_an_evaluation_inside_the_training_loop_disturbs_no_step,
    test_uneven.test_a_break_in_a_batch_with_absent_workers_leaves_nobody_behind,
    test_stopping.test_stop_in_the_last_batch_of_an_epoch_ends_all_in_the_next,
    test_stopping.test_stop_in_a_batch_with_absent_workers_ends_them_too,
    test_stopping.test_all_break_after_the_same_batch_and_train_on_in_the_next_epoch,
    test_stopping.test_only_one_worker_breaks_and_goes_on_with_its_next_epoch,
]  # fmt: skip


@pytest.mark.cases(14)
@pytest.mark.parametrize("check", SAME, ids=lambda check: check.__name__.removeprefix("test_"))
def test_what_holds_for_the_all_reduce_family_holds_for_servers(check: Callable[..., None]) -> None:
    """Each case on one server, or two, or two that are reached over TCP."""
    for case, strategy in zip(cases(check), itertools.cycle(LINES[1:]), strict=False):
        check(strategy=strategy, **case)
    last = list(cases(check))[-1]
    check(strategy="ps/2tcp", **last)


THROUGH = [
    test_models.test_parameters_that_leave_gaps_in_their_memory_train,
    test_stopping.test_a_worker_that_breaks_out_stops_the_others_after_the_same_step,
    test_stopping.test_a_worker_that_breaks_while_the_others_accumulate_stops_them_too,
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("check", THROUGH, ids=lambda check: check.__name__.removeprefix("test_"))
@pytest.mark.parametrize(("strategy", "transport"), [("ps/2", "memory"), ("ps/1tcp", "tcp")])
def test_what_holds_over_any_transport_holds_for_servers(
    check: Callable[..., None], strategy: str, transport: str
) -> None:
    for case in cases(check):
        check(strategy=strategy, transport=transport, **case)


# -- equal -----------------------------------------------------------------------------------------------------------


def all_optimizers(one: Any, steps: int = 50) -> list[torch.Tensor]:
    """A model for each optimizer, one of them with a scheduler."""
    models = [mlp(seed=seed)[:3] for seed in range(len(OPTIMIZERS))]
    chosen = [make(model.parameters()) for make, model in zip(OPTIMIZERS.values(), models, strict=True)]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(chosen[-1], steps)
    one.prepare(models, chosen, scheduler)
    for step in range(steps):
        x = part(one, batch(step))
        for optimizer in chosen:
            optimizer.zero_grad()
        sum(loss_of(model, x) for model in models).backward()
        for optimizer in chosen:
            optimizer.step()
        scheduler.step()
    return parameters_of(*models)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("size", "strategy"),
    [(1, "ps/1"), (2, "ps/1"), (2, "ps/2"), (2, "ps/2tcp"), (3, "ps/3"), (3, "ps/1tcp"), (4, "ps/2"), (4, "ps/3tcp")],
)  # fmt: skip
def test_sync_is_the_ring_is_one_process(size: int, strategy: str) -> None:
    """SGD, momentum, Adam and fused AdamW with a scheduler, parameter by parameter after 50 steps."""
    served = same(all_optimizers, strategy, size, rtol=1e-9, atol=1e-11)
    if size > 1:
        ring = same(all_optimizers, "ring", size, rtol=1e-9, atol=1e-11)
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(served, ring, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_any_size_any_batch_any_number_of_servers_trains_as_one_process_does(seed: int) -> None:
    import random

    dice = random.Random(seed)
    for _ in range(5):
        size, count, epochs = dice.randint(1, 4), dice.choice([0, 1, 2, 3, dice.randint(4, 40)]), dice.randint(1, 2)
        strategy = f"ps/{dice.randint(1, min(size, 3))}{dice.choice(['', 'tcp'])}"
        cut = {"global_batch": dice.randint(1, 12), "shuffle": dice.random() < 0.5, "seed": dice.randint(0, 9)}
        options: dict[str, Any] = {**cut, "optimizer": dice.choice(["momentum", "adamw"]), "schedule": True}
        case = f"{size} workers, {count} samples, {strategy}, {options}"
        found = workers(size, strategy, lambda w, epochs=epochs: w.epochs(epochs), count, **options)
        assert sorted(n for w in found for n in w.seen) == sorted([*range(count)] * epochs), case
        try:
            assert_alike(found, alone(lambda w, epochs=epochs: w.epochs(epochs), count, **options))
        except AssertionError as error:
            raise AssertionError(case) from error


@pytest.mark.parametrize("strategy", ["ps:block_bytes=1024/2", "ps:block_bytes=9000/1", "ps:block_bytes=9000/3tcp"])
def test_the_size_of_blocks_does_not_matter(strategy: str) -> None:
    same(lambda one: test_equivalence.script(one, "adam", 4, width=100), strategy, 3, rtol=1e-9, atol=1e-11)


@lines
@pytest.mark.parametrize("dealt", [part, uneven])
def test_accumulated_backwards_count_exactly_for_every_optimizer(strategy: str, dealt: Any) -> None:
    """The second optimizer steps when the first has already, with gradients of the same backwards."""

    def script(one: Any) -> list[torch.Tensor]:
        models = [mlp(seed=1), mlp(seed=2)]
        optimizers = [test_models.sgd(models[0]), torch.optim.Adam(models[1].parameters(), lr=0.01, eps=1e-3)]
        one.prepare(models, optimizers)
        for step in range(4):
            with one.accumulate():
                for micro in range(2):
                    x = dealt(one, batch(3 * step + micro))
                    sum(loss_of(model, x) / 3 for model in models).backward()
            x = dealt(one, batch(3 * step + 2))
            sum(loss_of(model, x) / 3 for model in models).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return parameters_of(*models)

    same(script, strategy, 3)


@lines
def test_micro_batches_of_unlike_weights_count_for_every_optimizer(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        models = [mlp(seed=1), mlp(seed=2)]
        optimizers = [test_models.sgd(model) for model in models]
        one.prepare(models, optimizers)
        for step in range(3):
            if one.size == 1:
                sum(2 * loss_of(model, batch(step)) for model in models).backward()
            else:
                for rows in batch(step).split([5, 1, 2, 4])[2 * one.rank : 2 * one.rank + 2]:
                    one.weight(len(rows))
                    sum(loss_of(model, rows) for model in models).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return parameters_of(*models)

    same(script, strategy)


@lines
def test_parameters_without_a_gradient_are_left_alone_only_if_nobody_has_one(strategy: str) -> None:
    """Weight decay and momentum tell a gradient of None from one of zeros."""

    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = test_models.Branches().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        one.prepare(model, optimizer)
        for step in range(8):
            optimizer.zero_grad()
            halves, arms = batch(step).chunk(2), [[step % 3], [(step + 1) % 3]]  # arm 3 never
            if one.size == 1:
                sum(model(h, a).square().mean() for h, a in zip(halves, arms, strict=True)).div(2).backward()
            else:
                model(halves[one.rank], arms[one.rank]).square().mean().backward()
                for arm in range(4):
                    assert (model.arms[arm].weight.grad is not None) == (arm in arms[one.rank]), "it is its own"
            optimizer.step()
        return parameters_of(model)

    same(script, strategy)


@lines
@pytest.mark.parametrize("by_method", [False, True])
def test_frozen_parameters_may_be_unfrozen_and_frozen_again(strategy: str, by_method: bool) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        with building():
            model = test_models.Methods().double()
        model.body.requires_grad_(False)
        optimizer = test_models.sgd(model)
        one.prepare(model, optimizer)
        for step in range(9):
            if step in (3, 5, 7):
                {3: model.body[2], 5: model.body, 7: model.head}[step].requires_grad_(step != 7)
            optimizer.zero_grad()
            x = part(one, batch(step))
            (model.loss(x) if by_method else model(x).square().mean()).backward()
            optimizer.step()
        return parameters_of(model)

    same(script, strategy, 3)


@lines
def test_a_parameter_that_two_modules_have_is_one(strategy: str) -> None:
    test_models.test_tied_weights_stay_tied(strategy=strategy, how="one parameter")


def test_two_parameters_in_one_memory_are_refused() -> None:
    def script(one: Any) -> None:
        with building():
            model = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)])
        model[1].weight = torch.nn.Parameter(model[0].weight.data)
        one.prepare(model, test_models.sgd(model))

    for said in fail(script, "ps/2"):
        assert said.startswith("ValueError: parameters 1.weight and 0.weight share memory")


@lines
def test_a_step_that_overflows_on_one_worker_is_skipped_on_all(strategy: str) -> None:
    for kind in ("sgd", "fused"):
        for layout in (torch.contiguous_format, torch.channels_last):
            test_nonfinite.test_a_step_that_overflows_on_one_worker_is_skipped_on_all(
                strategy=strategy, kind=kind, clip=False, layout=layout
            )


# -- clipping --------------------------------------------------------------------------------------------------------


def clipping(one: Any, most: float, by: str, steps: int = 6) -> list[torch.Tensor]:
    model = mlp()
    optimizer = test_models.sgd(model)
    one.prepare(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, part(one, batch(step))).backward()
        if by == "hora":
            one.clip(model.parameters(), most, 2.0)
        optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize(("size", "servers"), [(1, "1"), (3, "1"), (3, "2"), (3, "3"), (3, "2tcp")])
def test_clip_norm_on_the_servers_equals_clipping_on_the_ring(size: int, servers: str) -> None:
    (ring, *_) = trainings.ranks.run(size, lambda group: clipping(trainings.training(group, "ring"), 0.5, "hora"))
    free = clipping(trainings.Plain(), 0.0, "nobody")
    for found in trainings.ranks.run(
        size, lambda group: clipping(trainings.training(group, f"ps:clip_norm=0.5/{servers}"), 0.0, "nobody")
    ):
        for mine, wanted, unclipped in zip(found, ring, free, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-11)
            assert not torch.allclose(mine, unclipped, rtol=1e-3), "it was clipped"


def test_clip_norm_counts_the_whole_batch_also_with_absent_workers_and_accumulation() -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(2):
            for number, (x, y, _) in enumerate(worker.loader):
                mse(worker.model, x, y).backward()
                if number % 2 == 1 or number == len(worker.loader) - 1:
                    if worker.one.size == 1:
                        worker.one.clip(worker.model.parameters(), 0.3, 2.0)
                    worker.step()

    found = workers(3, "ps:clip_norm=0.3/2", work, 13, global_batch=4)
    assert_alike(found, alone(work, 13, global_batch=4))


def test_a_users_clipping_acts_on_the_workers_own_gradient() -> None:
    """Each worker clips its own; the servers apply the mean of what is left."""

    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        loss_of(model, part(one, batch(0))).backward()
        norm = one.clip(model.parameters(), 0.5, 2.0)
        assert float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) <= 0.5 < float(norm)
        optimizer.step()
        return parameters_of(model)

    found = trainings.ranks.run(2, lambda group: script(trainings.training(group, "ps/2")))
    model = mlp()
    halves = []
    for rows in batch(0).chunk(2):
        model.zero_grad()
        loss_of(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        halves.append([p.grad.clone() for p in model.parameters()])
    for mine, start, one, other in zip(found[0], model.parameters(), *halves, strict=True):
        torch.testing.assert_close(mine, start.detach() - 0.1 * (one + other) / 2, rtol=1e-10, atol=1e-12)


# -- stopping --------------------------------------------------------------------------------------------------------


@lines
@pytest.mark.parametrize("who", [{0}, {2}, {0, 1, 2}])
def test_stop_before_a_step_from_any_worker_ends_all_after_it(strategy: str, who: set[int]) -> None:
    """Under ps the exchange is the step, so a wish that is older counts with it, wherever it was said."""

    def work(worker: Worker) -> None:
        batches = 0
        for _ in worker.one.epochs(3):
            for x, y, _ in worker.loader:
                mse(worker.model, x, y).backward()
                if batches == 2 and worker.one.rank in who:
                    worker.one.stop("enough")
                worker.step()
                batches += 1
        assert worker.one.stopped()
        test_stopping.still_works(worker)

    found = workers(3, strategy, work, 12, global_batch=3)
    assert_alike(found)
    assert found[0].one.step == 3


@lines
@pytest.mark.parametrize("size", [1, 3])
def test_max_steps_ends_all_and_an_evaluation_afterwards_runs_to_its_end(strategy: str, size: int) -> None:
    def work(worker: Worker) -> None:
        worker.one.max_steps = 5
        test = worker.one.adopt(shard(data(7), worker.one, global_batch=2))
        for _ in worker.one.epochs(3):
            for x, y, _ in worker.loader:
                mse(worker.model, x, y).backward()
                worker.step()
            worker.model.eval()
            worker.seen += [number for _, _, numbers in test for number in numbers.tolist()]
            worker.model.train()

    if size == 1:
        strategy = strategy.replace("2", "1")
    found = workers(size, strategy, work, 12, global_batch=3)
    assert_alike(found)
    assert found[0].one.step == 5 and sorted(n for w in found for n in w.seen) == sorted([*range(7)] * 2)


# -- what cannot be --------------------------------------------------------------------------------------------------


def trained_with(one: Any, change: Callable[[torch.nn.Module], None]) -> None:
    model = mlp()
    optimizer = test_models.sgd(model)
    one.prepare(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, part(one, batch(step))).backward()
        if one.rank == 1 and step == 1:
            change(model)
        optimizer.step()


def test_a_gradient_of_another_dtype_is_named() -> None:
    def change(model: torch.nn.Module) -> None:
        model[0].weight.grad = None
        model[0].weight.grad_dtype = None
        model[0].weight.grad = torch.zeros(24, 6, dtype=torch.float32)

    if not hasattr(torch.nn.Parameter(torch.zeros(1)), "grad_dtype"):
        pytest.skip("this torch refuses such a gradient itself")
    said = fail(lambda one: trained_with(one, change), "ps/2", timeout_s=1.0)
    assert "the gradient of 0.weight is [24, 6] of torch.float32, the parameter [24, 6] of torch.float64" in said[1]


def test_more_servers_than_blocks_is_refused_with_the_most_there_can_be() -> None:
    def script(one: Any) -> None:
        with building():
            model = torch.nn.Linear(3, 2, bias=False)
        one.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    for said in fail(script, "ps/2"):
        assert (
            "2 servers for a model of 1 block: each server needs at least one block. Use --servers 1 or fewer" in said
        )


@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "sync,backup=1"])
def test_lbfgs_is_refused(mode: str) -> None:
    def script(one: Any) -> None:
        model = mlp()
        one.prepare(model, torch.optim.LBFGS(model.parameters()))

    for said in fail(script, f"ps:mode={mode}/1"):
        assert said.startswith("ValueError: LBFGS needs all parameters at once")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ps:mode=ssp,staleness=-1", "staleness takes a number of steps, 0 or more, not -1"),
        ("ps:mode=async,staleness=2", "staleness has an effect only with mode=ssp"),
        ("ps:mode=async,backup=1", "backup has an effect only with mode=sync"),
        ("ps:mode=ssp,sync_every=3", "sync_every has an effect only with mode=async"),
        ("ps:prefetch=true", "prefetch has no effect with mode=sync"),
        ("ps:backup=-1", "backup takes a number of workers"),
        ("ps:mode=later", "there are: sync, async, ssp"),
    ],
)
def test_options_that_cannot_take_effect_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        trainings.parse(text)
