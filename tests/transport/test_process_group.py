"""torch's default process group over the workers of a run: opened once, ended with the job, refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import hora
from hora.collectives import Group
from hora.transport.process_group import _choose
from ranks import Run


@pytest.fixture
def job() -> Iterator[hora.Job]:
    job = hora.init()
    yield job
    job.close()


def test_it_is_opened_once_and_ends_with_the_job(job: hora.Job) -> None:
    hook = sys.excepthook
    group = job.process_group()
    assert dist.group.WORLD is group and job.process_group() is group
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    assert sys.excepthook is hook
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert ones.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"job.process_group\('nccl'\): it was opened as 'default'"):
        job.process_group("nccl")
    job.close()
    assert not dist.is_initialized()


def test_a_group_that_the_user_has_opened_is_left_alone(job: hora.Job) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"call it instead of torch\.distributed\.init_process_group"):
            job.process_group()
        job.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_ranks_that_name_different_backends_are_told_at_every_attempt() -> None:
    calls = [("nccl", "gloo"), ("gloo", None)]

    def work(group: Group) -> list[str]:
        world = ranks.worlds[group.rank]
        assert world is not None
        told = []
        for words in calls:
            with pytest.raises(hora.Mismatch) as caught:
                world.torch_group(words[group.rank], torch.device("cpu"))
            told.append(str(caught.value))
        return told

    ranks = Run(2)
    ranks.start(work).finish()
    assert ranks.errors == [None, None]
    for first, second in ranks.results:
        assert first.startswith(
            "rank 0 called job.process_group('nccl') and rank 1 job.process_group('gloo'): all must"
        )
        assert second.startswith("rank 0 called job.process_group('gloo') and rank 1 job.process_group(): all must")
    assert not dist.is_initialized()


def test_backends_fit_the_gpus_of_all_ranks() -> None:
    assert _choose(["", ""]) == _choose(["a", ""]) == "gloo"
    assert _choose(["a", "b"]) == "cpu:gloo,cuda:nccl"
    with pytest.raises(ValueError, match="ranks 0 and 2 share a GPU"):
        _choose(["a", "b", "a"])
