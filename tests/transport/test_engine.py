"""The engine transport: an engine that is not here is refused on every rank, with the way out."""

from __future__ import annotations

import pytest
import torch

import ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_nccl_without_a_gpu_is_refused_with_the_way_out() -> None:
    problems = ranks.failures(2, lambda group: group.engine("nccl"))
    assert all(isinstance(problem, ValueError) for problem in problems)
    assert all("'nccl' needs GPUs" in str(problem) and "'ring'" in str(problem) for problem in problems)
