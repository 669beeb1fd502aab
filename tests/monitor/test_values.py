"""What `job.log` takes, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from hora import Histogram
from hora.monitor.messages import BINS
from hora.monitor.values import check_values, read_values


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2), "loss has 2 elements; log one, e.g. its mean"),
        ("low", "loss is a str; log a number"),
        (None, "loss is a NoneType"),
    ],
)
def test_what_is_no_number_is_refused(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_values({"loss": value})


def test_a_name_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1000 characters; at most 64 are allowed"):
        check_values({"x" * 1000: 1.0})


def test_a_value_is_what_it_was_when_it_was_logged() -> None:
    total = torch.tensor(1.0, requires_grad=True)
    with torch.no_grad():
        scalars, _ = check_values({"total": total, "flag": True})
        total += 5
    assert scalars == {"total": 1.0, "flag": 1.0}


class Elsewhere(torch.Tensor):
    """A tensor that says that it lies on another device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def test_a_tensor_on_a_device_is_copied_there_and_read_later_in_one_go() -> None:
    one = torch.tensor([2.5]).as_subclass(Elsewhere)
    scalars, _ = check_values({"loss": one, "rate": 0.1})
    one.zero_()
    assert isinstance(scalars["loss"], torch.Tensor), "it was not read"
    assert read_values([scalars, {"rate": 0.2}]) == [{"loss": 2.5, "rate": 0.1}, {"rate": 0.2}]


def test_a_histogram_counts_every_finite_element_in_its_bin() -> None:
    tensor = torch.tensor([0.0, 0.0, 1.0, 3.2, math.nan, math.inf, 0.05])
    low, high, *counts = Histogram(tensor).count().tolist()
    assert (low, high) == (0.0, pytest.approx(3.2)) and len(counts) == BINS
    assert counts[0] == 3 and counts[int(1.0 / 3.2 * BINS)] == 1 and counts[-1] == 1 and sum(counts) == 5


def test_a_histogram_of_one_value_and_of_integers() -> None:
    assert Histogram(torch.full((7,), 2.0)).count().tolist()[:3] == [2.0, 2.0, 7.0]
    assert sum(Histogram(torch.arange(100)).count().tolist()[2:]) == 100


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(2, dtype=torch.complex64), [1.0]])
def test_what_has_no_distribution_is_refused(tensor: object) -> None:
    with pytest.raises(ValueError, match=r"hora.Histogram takes a tensor"):
        Histogram(tensor)  # type: ignore[arg-type]


def test_numbers_of_other_libraries_and_ones_without_measure() -> None:
    numpy = pytest.importorskip("numpy")
    assert check_values({"a": numpy.float32(0.5), "b": numpy.int64(3)})[0] == {"a": 0.5, "b": 3.0}
    with pytest.raises(ValueError, match="big is too large"):
        check_values({"big": 10**400})
    with pytest.raises(ValueError, match="cannot be encoded as UTF-8"):
        check_values({"\ud800": 1.0})
