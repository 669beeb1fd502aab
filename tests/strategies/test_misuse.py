"""What cannot work is refused where it is written, by name, on every worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainings import FAMILY, batch, building, fail, loss_of, mlp, part

family = pytest.mark.parametrize("strategy", FAMILY)


def adam(model: torch.nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters())


@pytest.mark.parametrize("size", [1, 2])
def test_prepare_is_called_once(size: int) -> None:
    def script(one: Any) -> None:
        model = mlp()
        one.prepare(model, adam(model))
        one.prepare(model, adam(model))

    assert all("job.prepare() was called before" in said for said in fail(script, "ring", size))


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_without_parameters_is_refused(size: int) -> None:
    def script(one: Any) -> None:
        one.prepare(torch.nn.ReLU(), torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))

    assert all("has no parameters: there is nothing to train" in said for said in fail(script, "ring", size))


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_over_other_parameters_is_refused(size: int) -> None:
    def script(one: Any) -> None:
        one.prepare(mlp(), adam(mlp(30)))

    said = fail(script, "ring", size)
    assert all("Adam holds a parameter of shape [30, 6] that is in none of the models" in text for text in said)


@pytest.mark.parametrize(
    ("model", "optimizer", "wanted"),
    [
        (3, "own", "model must be a torch.nn.Module, or a list of them, not int"),
        ("own", 3, "optimizer must be a torch.optim.Optimizer"),
        ([], "own", "the list of models is empty"),
    ],
)
def test_anything_but_models_and_optimizers_is_refused(model: Any, optimizer: Any, wanted: str) -> None:
    def script(one: Any) -> None:
        own = mlp()
        one.prepare(own if model == "own" else model, adam(own) if optimizer == "own" else optimizer)

    assert all(wanted in said for said in fail(script, "ring"))


def test_a_lazy_module_is_refused_with_the_way_out() -> None:
    def script(one: Any) -> None:
        model = torch.nn.LazyLinear(3)
        one.prepare(model, adam(model))

    assert all("weight has no shape yet" in said and "run one batch" in said for said in fail(script, "ring"))


@family
@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("shape", ["rank 1", "0.weight [30, 6] of float64", "rank 0", "0.weight [24, 6] of float64"]),
        ("dtype", ["rank 1", "0.weight [24, 6] of float32", "0.weight [24, 6] of float64"]),
        ("more", ["rank 1", "has 5.weight [2, 3] of float64 where", "has nothing"]),
        ("frozen", ["rank 1", "2.bias [24] of float64 (strides [1], frozen)", "(strides [1], trained)"]),
        ("strides", ["rank 1", "2.weight [24, 24] of float64 (strides [1, 24], trained)"]),
    ],
)
def test_models_that_differ_are_named_by_their_first_difference(strategy: str, what: str, wanted: list[str]) -> None:
    def script(one: Any) -> None:
        model = mlp()
        if one.rank == 1:
            if what == "shape":
                model = mlp(30)
            elif what == "dtype":
                model = model.float()
            elif what == "more":
                model.append(torch.nn.Linear(3, 2).double())
            elif what == "frozen":
                model[2].bias.requires_grad_(False)
            else:
                model[2].weight = torch.nn.Parameter(model[2].weight.detach().t().contiguous().t())
        one.prepare(model, adam(model))

    for said in fail(script, strategy, 3):
        assert said.startswith("Mismatch: the models differ") and all(text in said for text in wanted), said


@family
def test_requires_grad_that_comes_to_differ_is_noticed_by_all(strategy: str) -> None:
    """At the first backward by name; later as calls that differ. Nobody hangs."""

    def script(one: Any, when: int) -> None:
        model = mlp()
        optimizer = adam(model)
        one.prepare(model, optimizer)
        for step in range(3):
            if step == when and one.rank == 1:
                model[2].bias.requires_grad_(False)
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()

    for said in fail(lambda one: script(one, 0), strategy, 3):
        assert "rank 1" in said and "does not train 2.bias" in said and "requires_grad must be the same" in said
    for said in fail(lambda one: script(one, 1), strategy, 3):
        assert said.startswith("Mismatch")


@family
def test_ranks_that_train_sets_of_equal_size_in_turn_are_told_apart(strategy: str) -> None:
    """Buckets that are used again must not meet those of another set."""

    def script(one: Any) -> None:
        first, second = mlp(seed=1), mlp(seed=2)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        one.prepare([first, second], optimizer)
        for step in range(6):
            turn = step % 2 if step < 4 or one.rank == 0 else 1 - step % 2
            first.requires_grad_(turn == 0), second.requires_grad_(turn == 1)
            optimizer.zero_grad()
            loss_of(first if turn == 0 else second, part(one, batch(step))).backward()
            optimizer.step()

    for said in fail(script, strategy, 2):
        assert said.startswith("Mismatch"), said


@family
def test_a_new_parameter_of_the_model_is_named(strategy: str) -> None:
    def script(one: Any) -> None:
        model = mlp()
        one.prepare(model, adam(model))
        with building():
            model.append(torch.nn.Linear(3, 2).double())
        model(part(one, batch(0)))

    assert all("5.weight [2, 3] is new since job.prepare()" in said for said in fail(script, strategy))


@family
def test_a_new_parameter_of_the_optimizer_is_named(strategy: str) -> None:
    def script(one: Any) -> None:
        model = mlp()
        optimizer = adam(model)
        one.prepare(model, optimizer)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(7, 2))]})
        loss_of(model, part(one, batch(0))).backward()
        optimizer.step()

    said = fail(script, strategy)
    assert all("parameter group 1 of Adam has got a parameter of shape [7, 2]" in text for text in said)


@family
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_without_a_backward_is_refused(strategy: str, steps_before: int) -> None:
    def script(one: Any) -> None:
        model = mlp()
        optimizer = adam(model)
        one.prepare(model, optimizer)
        for step in range(steps_before):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
        optimizer.step()

    assert all("Adam.step() without a backward()" in said for said in fail(script, strategy))


def test_words_for_a_batch_come_after_prepare() -> None:
    def accumulating(one: Any) -> None:
        with one.accumulate():
            pass

    assert all("comes after job.prepare()" in said for said in fail(accumulating, "ring"))
    assert all("comes after job.prepare()" in said for said in fail(lambda one: one.weight(3), "ring"))
    assert all("0 or more, not -1" in said for said in fail(lambda one: one.weight(-1), "ring"))


def test_shared_between_hosts_is_refused_with_the_way_out() -> None:
    def script(one: Any) -> None:
        model = mlp()
        one.prepare(model, adam(model))
        loss_of(model, part(one, batch(0))).backward()

    for said in fail(script, "shared", transport="tcp"):
        assert "'shared' needs ranks that share memory" in said and "use 'ring' or 'auto'" in said


@pytest.mark.parametrize("strategy", ["ring", "ring:update=sharded"])
def test_a_failure_with_many_buckets_under_way_is_told_once(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    def script(one: Any) -> None:
        model = mlp(60)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            if step == 2 and one.rank == 1:
                raise RuntimeError("enough")
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()

    errors = fail(script, f"{strategy}{',' if ':' in strategy else ':'}bucket_bytes=1024", timeout_s=1.0)
    assert errors[0].startswith("Timeout: rank 0 ") and errors[1] == "RuntimeError: enough"
    assert "never waited for" not in caplog.text
