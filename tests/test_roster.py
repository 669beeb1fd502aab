"""The registry knows every parameter once, by name, and brings everybody rank 0's values."""

from __future__ import annotations

import pytest
import torch

import ranks
from hora.collectives import Group
from hora.errors import HoraError
from hora.parameters.registry import ParameterRegistry
from trainings import building


class Everything(torch.nn.Module):
    """Parameters and buffers of many kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with building(seed):
            self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.coarse = torch.nn.Parameter(torch.randn(5).bfloat16())
            self.fine = torch.nn.Parameter(torch.randn(5, 2).double().t())
            self.empty = torch.nn.Parameter(torch.empty(0))
            self.scalar = torch.nn.Parameter(torch.randn(()))
            self.norm = torch.nn.BatchNorm2d(4)
            self.norm.running_mean.normal_()
            self.register_buffer("mask", torch.rand(9) > 0.5)
            self.register_buffer("counts", torch.randint(0, 99, (4,)))
            self.register_buffer("hidden", torch.randn(3), persistent=False)


def optimizer_of(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_everybody_gets_rank_0s_parameters_and_buffers(transport: str) -> None:
    def check(group: Group) -> None:
        model = Everything(seed=group.rank)
        strides = [p.stride() for p in model.parameters()]
        ParameterRegistry([model], [optimizer_of(model)]).agree(group)
        first = Everything(seed=0)
        for mine, wanted in zip(model.parameters(), first.parameters(), strict=True):
            assert torch.equal(mine, wanted) and mine.requires_grad
        for mine, wanted in zip(model.buffers(), first.buffers(), strict=True):
            assert torch.equal(mine, wanted)
        assert [p.stride() for p in model.parameters()] == strides

    ranks.run(3, check, transport)


def test_a_tied_parameter_is_there_once_under_its_first_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    registry = ParameterRegistry([model], [optimizer_of(model)])
    assert registry.names == ["0.weight", "0.bias", "1.bias"]


def test_several_models_have_names_of_their_own() -> None:
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    registry = ParameterRegistry(models, [optimizer_of(model) for model in models])
    assert registry.names == ["model0.weight", "model0.bias", "model1.weight", "model1.bias"]


def test_what_models_lose_or_exchange_among_themselves_harms_nobody() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    registry = ParameterRegistry([model], [optimizer_of(model)])
    model[0], model[1] = model[1], model[0]
    registry.check_unchanged()
    del model[1]
    registry.check_unchanged()
    model[0].weight = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(HoraError, match=r"0\.weight \[3, 3\] is new since job\.prepare"):
        registry.check_unchanged()


def test_the_signature_changes_with_every_buffer() -> None:
    model = torch.nn.BatchNorm1d(3)
    registry = ParameterRegistry([model], [optimizer_of(model)])
    seen = [registry.signature()]
    for change in (
        lambda: model.running_mean.add_(1),
        lambda: setattr(model, "running_var", model.running_var * 2),
        lambda: model(torch.randn(4, 3)),
    ):
        change()
        registry.refresh_buffers()
        assert registry.signature() not in seen
        seen.append(registry.signature())
    registry.refresh_buffers()
    assert registry.signature() == seen[-1]
