"""Buckets hold every element once, in order and bounded; backward fills them in its own order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hora.parameters.buckets import FIRST_BYTES, BackwardHooks, Bucket, plan
from hora.parameters.shards import ParameterShard

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def lanes_of(parameters: list[torch.Tensor], num_owners: int, generator: random.Random) -> list[list[ParameterShard]]:
    """Some whole, some cut, not always evenly; some cuts are empty."""
    found = []
    for parameter in parameters:
        numel = parameter.numel()
        if num_owners == 1 or generator.random() < 0.5:
            found.append([ParameterShard(0, numel, generator.randrange(num_owners))])
        else:
            edges = [0, *sorted(generator.randint(0, numel) for _ in range(num_owners - 1)), numel]
            found.append([ParameterShard(edges[r], edges[r + 1], r) for r in range(num_owners)])
    return found


@pytest.mark.parametrize("seed", range(60))
def test_every_element_lies_in_one_bucket_with_its_owner(seed: int) -> None:
    generator = random.Random(seed)
    num_owners, bucket_bytes = generator.choice([1, 1, 2, 3, 5]), generator.choice([1024, 5000, 40_000, 4 << 20])
    parameters = [
        torch.empty(generator.choice([0, 1, 3, 50, 700, 9000, 30_000]), dtype=generator.choice(DTYPES))
        for _ in range(generator.randint(1, 25))
    ]
    lanes = lanes_of(parameters, num_owners, generator)
    order = generator.sample(range(len(parameters)), len(parameters))
    buckets = plan(order, parameters, lanes.__getitem__, bucket_bytes, num_owners)
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    owners = [torch.full((p.numel(),), -1) for p in parameters]
    for bucket in buckets:
        taken = torch.zeros(bucket.numel, dtype=torch.int64)
        for segment in bucket.segments:
            parameter, length = parameters[segment.index], segment.stop - segment.start
            assert length > 0 and parameter.dtype is bucket.dtype and parameter.device == bucket.device
            assert bool((owners[segment.index][segment.start : segment.stop] == -1).all()), "an element lies in two"
            owners[segment.index][segment.start : segment.stop] = segment.owner
            taken[segment.offset : segment.offset + length] += 1
            # each owner's segments lie in its own stretch
            assert segment.owner * bucket.stride <= segment.offset
            assert segment.offset + length <= (segment.owner + 1) * bucket.stride
        for start, stop in bucket.gaps:
            assert start < stop
            taken[start:stop] += 1
        assert bool((taken == 1).all()), "two segments share a place, or a gap is not told"
        # bounded: one element more per lane at most
        limit = min(FIRST_BYTES, bucket_bytes) if bucket.number == 0 else bucket_bytes
        held = sum(segment.stop - segment.start for segment in bucket.segments)
        assert held * bucket.dtype.itemsize <= limit + num_owners * bucket.dtype.itemsize
    for index, parts in enumerate(lanes):
        wanted = torch.full((parameters[index].numel(),), -1)
        for lane in parts:
            wanted[lane.start : lane.stop] = lane.owner
        assert torch.equal(owners[index], wanted), "an element was lost, or lies with another owner"


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_kept_among_gradients_of_one_kind(seed: int) -> None:
    generator = random.Random(seed)
    parameters = [
        torch.empty(generator.randint(1, 900), dtype=generator.choice(DTYPES)) for _ in range(generator.randint(2, 30))
    ]
    order = generator.sample(range(len(parameters)), len(parameters))
    buckets = plan(order, parameters, lambda i: [ParameterShard(0, parameters[i].numel(), 0)], 2048)
    for dtype in DTYPES:
        came = [s.index for bucket in buckets if bucket.dtype is dtype for s in bucket.segments]
        wanted = [index for index in order if parameters[index].dtype is dtype]
        assert list(dict.fromkeys(came)) == wanted


def test_a_large_gradient_travels_without_being_copied_together() -> None:
    parameters = [torch.empty(100), torch.empty(3_000_000), torch.empty(100)]
    buckets = plan([0, 1, 2], parameters, lambda i: [ParameterShard(0, parameters[i].numel(), 0)], 4 << 20)
    assert [bucket.indices for bucket in buckets] == [[0], [1], [1], [1, 2]]
    assert [bucket.contiguous for bucket in buckets] == [True, True, True, False]


# -- backward ------------------------------------------------------------------------------------------------------


class Listener:
    def __init__(self, model: torch.nn.Module, bucket_bytes: int = 1024) -> None:
        self.silent = False
        self.news: list[Any] = []
        self.parameters = list(model.parameters())
        self.backward = BackwardHooks(self.parameters, [name for name, _ in model.named_parameters()], self)
        self.backward.hook()
        self.bucket_bytes = bucket_bytes

    def bucket_ready(self, bucket: Bucket) -> None:
        for segment in bucket.segments:
            assert self.parameters[segment.index].grad is not None
        self.news.append(bucket.number)

    def after_backward(self) -> None:
        self.news.append("end")

    def arm(self) -> None:
        parameters = self.parameters
        order = self.backward.order
        self.backward.set_buckets(
            plan(order, parameters, lambda i: [ParameterShard(0, parameters[i].numel(), 0)], self.bucket_bytes)
        )
        self.news.clear()


def chain(depth: int = 4) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(depth)))


def test_buckets_are_announced_in_order_and_the_end_comes_last() -> None:
    model = chain()
    listener = Listener(model)
    model(torch.ones(2, 16)).sum().backward()
    assert listener.news == ["end"], "without buckets only the end is told"
    assert sorted(listener.backward.order) == list(range(8))
    assert set(listener.backward.order[:2]) == {6, 7}, "the last layer's gradients come first"
    listener.arm()
    for _ in range(2):
        listener.news.clear()
        model(torch.ones(2, 16)).sum().backward()
        assert listener.news == [*range(len(listener.backward.buckets)), "end"]


def test_a_bucket_that_is_full_early_waits_for_those_before_it() -> None:
    model = chain()
    listener = Listener(model)
    model(torch.ones(2, 16)).sum().backward()
    listener.arm()
    torch.nn.Sequential(*model[:3])(torch.ones(2, 16)).sum().backward()  # the last layer, first in order, is unused
    assert listener.news == ["end"]
    assert listener.backward.announced == 0


def test_accumulation_announces_nothing() -> None:
    model = chain()
    listener = Listener(model)
    model(torch.ones(2, 16)).sum().backward()
    listener.arm()
    listener.silent = True
    model(torch.ones(2, 16)).sum().backward()
    assert listener.news == ["end"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_a_backward_does_not_end_it(reentrant: bool) -> None:
    model = chain()
    listener = Listener(model)

    def loss() -> torch.Tensor:
        x = model[0](torch.ones(2, 16))
        for layer in (model[1], model[2], model[1]):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return model[3](x).sum()

    loss().backward()
    assert listener.news == ["end"]
    used_twice = {2, 3}
    assert listener.backward.late == (used_twice if reentrant else set())
    listener.arm()
    loss().backward()
    assert listener.news[-1] == "end" and listener.news.count("end") == 1
    assert listener.news[:-1] == sorted(listener.news[:-1])
    late = {b.number for b in listener.backward.buckets if listener.backward.late & set(b.indices)}
    assert not late & set(listener.news[:-1]), "what comes in several parts is complete only at the end"


def test_a_backward_called_from_a_hook_does_not_end_the_outer_one() -> None:
    model = chain(2)
    listener = Listener(model)
    hidden = model[0](torch.ones(2, 16))
    hidden.register_hook(lambda _: torch.enable_grad()(lambda: model[1](torch.ones(1, 16)).sum().backward())())
    model[1](hidden).sum().backward()
    assert listener.news == ["end"]


def test_autograd_grad_is_no_backward() -> None:
    model = chain(2)
    listener = Listener(model)
    x = torch.ones(2, 16, requires_grad=True)
    out = model(x)
    out.register_hook(lambda _: listener.backward.expect_end())
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    out.sum().backward(inputs=[x], retain_graph=True)
    assert listener.news == [] and listener.backward.passed
    out.sum().backward(inputs=[model[0].weight], retain_graph=True)
    assert listener.news == ["end"]
    model.requires_grad_(False)
    listener.news.clear()
    out = model(x)
    out.register_hook(lambda _: listener.backward.expect_end())
    out.sum().backward()
    assert listener.news == ["end"], "a backward without gradients of ours still ends: others may have some"


def test_hooks_follow_requires_grad() -> None:
    model = chain(3)
    model[0].requires_grad_(False)
    listener = Listener(model)
    assert listener.backward.watched == [2, 3, 4, 5]
    assert not listener.backward.hook()
    model.requires_grad_(True)
    model[2].requires_grad_(False)
    assert listener.backward.unwatched == [0, 1]
    assert listener.backward.hook(keep=True) and listener.backward.watched == [0, 1, 2, 3, 4, 5]
    assert listener.backward.hook() and listener.backward.watched == [0, 1, 2, 3]
    listener.backward.unhook()
    model(torch.ones(2, 16)).sum().backward()
    assert listener.news == [] and listener.backward.watched == []


def test_a_gradient_that_comes_twice_after_it_has_left_is_named() -> None:
    model = chain(3)
    listener = Listener(model)
    model(torch.ones(2, 16)).sum().backward()
    listener.arm()
    x = model[0](torch.ones(2, 16))
    for layer in (model[1], model[2], model[1], model[2]):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"the gradient of [12]\.(weight|bias) came a second time"):
        x.sum().backward()
    listener.backward.forget()
    listener.news.clear()
    model(torch.ones(2, 16)).sum().backward()
    assert listener.news[-1] == "end"
