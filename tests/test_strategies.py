"""One word chooses the architecture; a misspelt one is answered with what exists."""

from __future__ import annotations

import pytest

import hora
from hora import strategies


@pytest.mark.parametrize("text", ["ring", "auto", "auto:deterministic=true", "engine:backend=gloo", "shared"])
def test_a_strategy_is_spelt_as_it_was_read(text: str) -> None:
    assert strategies.parse(text).spell() == text


def test_every_known_strategy_parses_by_its_name_and_is_public() -> None:
    for name, kind in strategies.known().items():
        assert strategies.parse(name) == kind()
        assert getattr(hora, kind.__name__) is kind


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "rnig",
            "unknown strategy 'rnig'; did you mean 'ring'? there are: auto, diloco, engine, halving, local, ps, ring, "
            "shared, star, tree",
        ),
        ("", "unknown strategy ''"),
        ("ring:chunks=3", "strategy 'ring' has no option 'chunks'; its options are: update, overlap"),
        (
            "auto:determinstic=true",
            "has no option 'determinstic'; did you mean 'deterministic'? its options are: update",
        ),
        ("auto:deterministic=maybe", "takes true or false, not 'maybe'"),
        ("auto:deterministic", "needs a value"),
        ("auto:deterministic=true,deterministic=false", "is given twice"),
        ("ring:update=shared", "update='shared' is unknown; there are: replicated, sharded"),
        ("ring:sync_buffers=max", "there are: rank0, mean"),
        ("ring:bucket_bytes=3", "at least 1024"),
        ("engine:backend=carrier-pigeon", "there are: auto, gloo, nccl, mpi"),
    ],
)
def test_a_bad_strategy_is_refused_saying_what_exists(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"strategy|backend|update|sync_buffers|bucket_bytes") as caught:
        strategies.parse(text)
    assert said in str(caught.value)


def test_a_strategy_cannot_be_changed_once_made() -> None:
    with pytest.raises(AttributeError):
        hora.Auto().deterministic = True  # type: ignore[misc]
