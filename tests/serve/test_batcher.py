"""The thread that answers: how requests become batches, whose answer is whose, and what happens to the bad ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from predictors import PATIENCE_S, Recorder, Steps, answering, threads
from torch import nn

from hora.http.errors import HttpError
from hora.parameters.registry import ParameterRegistry
from hora.serve import batcher as module
from hora.serve.batcher import Batcher, NotReady, Prediction
from hora.serve.signature import Signature, TensorSpec, signature_of
from hora.serve.snapshot_buffer import ParameterVersion
from hora.serve.sources import StagedParameters


def rows(*values: float) -> dict[str, Any]:
    """One row of four equal numbers for each value."""
    return {"x": torch.tensor([[float(value)] * 4 for value in values])}


def wait(future: Future[Prediction]) -> Prediction:
    return future.result(PATIENCE_S)


def refusal(future: Future[Any]) -> HttpError:
    error = future.exception(PATIENCE_S)
    assert isinstance(error, HttpError), error
    assert "\n" not in str(error)
    return error


def behind_the_gate(batcher: Batcher, model: Recorder, *requests: dict[str, Any]) -> list[Future[Prediction]]:
    """Hold the thread within a forward, queue the requests behind it, and let go: no timing decides the batches."""
    model.gate.clear()
    model.entered.clear()
    first = batcher.submit(rows(1))
    assert model.entered.wait(PATIENCE_S)
    futures = [batcher.submit(request) for request in requests]
    model.gate.set()
    wait(first)
    return futures


# batches


def test_an_answer_is_the_models_own_and_carries_the_stamp() -> None:
    model, version = Recorder(), ParameterVersion(step=12, round=3, local_step=2)
    with answering(model, Steps(version)) as batcher:
        answer = wait(batcher.submit(rows(1, 2, 3)))
        assert torch.equal(answer.outputs["output"], model.layer(rows(1, 2, 3)["x"]))
        assert answer.version == version == batcher.version


def test_requests_that_wait_become_one_forward_and_each_gets_its_own_rows() -> None:
    model = Recorder()
    with answering(model) as batcher:
        futures = behind_the_gate(batcher, model, rows(1, 2), rows(3), rows(4, 5, 6))
        for future, request in zip(futures, (rows(1, 2), rows(3), rows(4, 5, 6)), strict=True):
            assert torch.equal(wait(future).outputs["output"], model.layer(request["x"]))
    assert model.batches == [1, 6]


def test_a_first_request_waits_for_company() -> None:
    model = Recorder()
    with answering(model, max_wait_ms=60_000, max_batch=3) as batcher:
        futures = [batcher.submit(rows(0))]
        time.sleep(0.1)  # the thread has long taken it, if it would
        futures += [batcher.submit(rows(number)) for number in (1, 2)]
        for future in futures:
            wait(future)
    assert model.batches == [3]


def test_a_lone_client_is_not_kept_waiting_for_others() -> None:
    model = Recorder()
    with answering(model, max_wait_ms=300) as batcher:
        wait(batcher.submit(rows(0)))  # waits the whole time once, in vain
        begin = time.monotonic()
        for number in range(20):
            wait(batcher.submit(rows(number)))
        assert time.monotonic() - begin < 20 * 0.3 / 2
    assert model.batches == [1] * 21


def test_a_batch_never_has_more_rows_than_max_batch_and_a_larger_request_is_answered_in_slices() -> None:
    model = Recorder()
    with answering(model, source := Steps(), max_batch=4, max_wait_ms=0) as batcher:
        many = rows(*range(9))
        futures = behind_the_gate(batcher, model, rows(1, 2), rows(3, 4), rows(5), many, rows(6))
        assert torch.equal(wait(futures[3]).outputs["output"], model.layer(many["x"]))
        for future in futures:
            wait(future)
    assert model.batches == [1, 4, 1, 4, 4, 1, 1]
    assert source.num_refreshes == 5, "all slices are of one moment"


def test_slices_whose_answers_do_not_fit_together_are_refused() -> None:
    with answering(Recorder(), max_batch=2, predict=lambda model, x: x[:, : len(x)]) as batcher:
        error = refusal(batcher.submit(rows(1, 2, 3)))
        assert error.status == 500 and "differ in shape" in str(error)


def test_a_buffer_that_forward_puts_anew_can_be_loaded_afterwards() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + len(x)
            return self.layer(x)

    model = Counting()
    registry = ParameterRegistry([model], [torch.optim.SGD(model.parameters(), lr=1.0)])
    staging = StagedParameters(registry)

    class Loading(Steps):
        def refresh(self) -> ParameterVersion | None:
            for tensor in (*staging.parameters, *staging.buffers.values()):
                tensor.fill_(3.0)
            staging.load()
            return super().refresh()

    with answering(model, Loading()) as batcher:
        for _ in range(2):
            wait(batcher.submit(rows(1)))
    assert float(model.seen) == 4.0


def test_only_requests_of_one_kind_are_joined() -> None:
    class Echo(Recorder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(torch.zeros(len(x), 4))
            return x

    model, source = Echo(), Steps()
    kinds = [torch.zeros(2, 4), torch.zeros(1, 5), torch.zeros(1, 4).double(), torch.zeros(1, 4, 1)]
    with answering(model, source, max_wait_ms=0) as batcher:
        futures = behind_the_gate(batcher, model, *({"x": kind} for kind in kinds), {"y": kinds[0]}, {"y": kinds[0]})
        for future, kind in zip(futures, kinds, strict=False):
            output = wait(future).outputs["output"]
            assert isinstance(output, torch.Tensor) and output.shape == kind.shape and output.dtype == kind.dtype
        wait(futures[-1])
    assert model.batches == [1, 2, 1, 1, 1, 4]
    assert source.num_refreshes == 6  # none of them was tried together with another kind first


def test_parameters_are_refreshed_before_each_batch_on_the_same_thread_and_never_within() -> None:
    told: list[tuple[str, int]] = []

    class Told(Steps):
        def refresh(self) -> ParameterVersion | None:
            told.append(("refresh", threading.get_ident()))
            return super().refresh()

    class Telling(Recorder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            told.append(("forward", threading.get_ident()))
            return super().forward(x)

    model = Telling()
    with answering(model, Told(), max_wait_ms=0) as batcher:
        for future in behind_the_gate(batcher, model, rows(1), rows(2)):
            wait(future)
    assert [word for word, _ in told] == ["refresh", "forward"] * 2
    assert len({thread for _, thread in told} | {threading.get_ident()}) == 2


def test_answers_tell_the_step_that_they_were_computed_with() -> None:
    """The parameters change with every refresh; a torn or mislabelled answer would not fit its step."""
    model = Recorder()

    class Moving(Steps):
        def refresh(self) -> ParameterVersion | None:
            self.num_refreshes += 1
            with torch.no_grad():
                model.layer.weight.fill_(self.num_refreshes)
            return ParameterVersion(step=self.num_refreshes)

    with answering(model, Moving()) as batcher:

        def one(number: int) -> list[bool]:
            answers = [wait(batcher.submit(rows(1))) for _ in range(20)]
            return [answer.outputs["output"].tolist() == [[4.0 * answer.version.step] * 2] for answer in answers]  # type: ignore[union-attr]

        results = threads(8, one)
        assert all(fits for result in results for fits in result) and len(results) == 8


def test_the_model_answers_in_eval_mode_without_gradients() -> None:
    seen = []

    class Curious(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((self.training, torch.is_grad_enabled()))
            self.train()
            return x

    with answering(Curious().train()) as batcher:
        wait(batcher.submit(rows(1)))
        wait(batcher.submit(rows(1)))
    assert seen == [(False, False)] * 2


# what a model takes and gives


def test_several_inputs_reach_the_model_by_name() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, *, b: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"difference": a - b, "sum": a + b}

    with answering(Two()) as batcher:
        outputs = wait(batcher.submit({"b": torch.tensor([1, 2]), "a": torch.tensor([5, 5])})).outputs
        assert {name: value.tolist() for name, value in outputs.items()} == {"difference": [4, 3], "sum": [6, 7]}  # type: ignore[union-attr]


def test_a_tuple_is_answered_by_numbered_names() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x * 2

    with answering(Pair()) as batcher:
        outputs = wait(batcher.submit(rows(1))).outputs
        assert [*outputs] == ["output_0", "output_1"]


def test_predict_stands_before_the_model_and_sees_texts() -> None:
    def predict(model: nn.Module, texts: list[str]) -> list[dict[str, Any]]:
        lengths = torch.tensor([[float(len(text))] * 4 for text in texts])
        return [{"text": text, "score": score} for text, score in zip(texts, model(lengths)[:, 1], strict=True)]

    model = Recorder()
    with answering(model, predict=predict, signature=model.learned) as batcher:
        answer = wait(batcher.submit({"anything": ["a", "bcd"]}))
        weight = float(model.layer.weight[1].sum().detach())
        assert answer.outputs == {"output": [{"text": "a", "score": weight}, {"text": "bcd", "score": 3 * weight}]}
        assert batcher.signature is None


def test_predict_gets_all_models_and_inputs_where_there_are_several() -> None:
    first, second = Recorder(), Recorder()

    def predict(models: list[nn.Module], inputs: dict[str, Any]) -> dict[str, Any]:
        assert models == [first, second]
        return {"both": models[0](inputs["x"]) + models[1](inputs["x"]), "tags": inputs["tag"]}

    with answering([first, second], predict=predict) as batcher:
        answer = wait(batcher.submit({**rows(1, 2), "tag": ["a", "b"]}))
        assert torch.equal(answer.outputs["both"], 2 * first.layer(rows(1, 2)["x"]))
        assert answer.outputs["tags"] == ["a", "b"]


def test_arrays_of_numpy_are_answers_too() -> None:
    pytest.importorskip("numpy")
    with answering(Recorder(), predict=lambda model, x: model(x).numpy().argmax(1)) as batcher:
        assert wait(batcher.submit(rows(1, -1))).outputs == {"output": [1, 0]}


# what is refused


def test_nothing_is_answered_before_parameters_were_published() -> None:
    source = Steps(None)
    with answering(Recorder(), source) as batcher:
        error = refusal(batcher.submit(rows(1)))
        assert isinstance(error, NotReady) and error.status == 503
        assert str(error) == "no parameters have been published yet"
        assert batcher.newest_version().result(PATIENCE_S) is None
        source.version = ParameterVersion(step=0)
        assert wait(batcher.submit(rows(1))).version.step == 0
        assert batcher.newest_version().result(PATIENCE_S) == ParameterVersion(step=0)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"x": torch.tensor([[1.0, float("nan"), 0, 0]])}, "input 'x' has NaN or infinite values"),
        ({"x": torch.tensor([[1.0, float("inf"), 0, 0]])}, "input 'x' has NaN or infinite values"),
        (
            {"x": torch.tensor([[1.0, -float("inf"), 0, 0]], dtype=torch.bfloat16)},
            "input 'x' has NaN or infinite values",
        ),
        ({"x": torch.tensor(1.0)}, "at least one row"),
        ({"x": torch.zeros(0, 4)}, "at least one row"),
        ({"x": torch.zeros(1, 4, dtype=torch.complex64)}, "has dtype torch.complex64"),
        ({"x": []}, "input 'x' has no rows"),
        ({"x": ["text"]}, "job.prepare(…, predict=fn)"),
        ({"x": torch.zeros(1, 4), "y": torch.zeros(2, 4)}, "same number of rows, got {'x': 1, 'y': 2}"),
        ({}, "the request has no inputs"),
    ],
)
def test_what_cannot_be_rows_is_refused_before_it_is_queued(inputs: dict[str, Any], says: str) -> None:
    source = Steps()
    with answering(Recorder(), source) as batcher:
        future = batcher.submit(inputs)
        assert future.done()
        assert says in str(refusal(future)) and refusal(future).status == 400
        assert source.num_refreshes == 0
        wait(batcher.submit(rows(1)))


def test_a_known_signature_is_held_against_requests_before_they_are_queued() -> None:
    model = Recorder()
    with answering(model, signature=model.learned) as batcher:
        future = batcher.submit({"x": torch.zeros(3, 5)})
        assert future.done() and str(refusal(future)) == "input 'x' has shape [3, 5], expected [-1, 4]"
        assert "named 'z', expected 'x'" in str(refusal(batcher.submit({"z": torch.zeros(3, 4)})))
        wait(batcher.submit(rows(1)))
    assert model.batches == [1]


def test_a_longer_sequence_than_the_training_showed_is_the_models_to_judge() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.LazyLinear(2))
    ids = torch.zeros(3, 5, dtype=torch.int64)
    signature = signature_of(["input"], [ids], model(ids))
    with answering(model, signature=lambda: signature) as batcher:
        error = refusal(batcher.submit({"input": torch.zeros(3, 6, dtype=torch.int64)}))
        assert error.status == 400 and "cannot be multiplied" in str(error)
        assert "index out of range" in str(refusal(batcher.submit({"input": torch.full((3, 5), 10)})))
        wait(batcher.submit({"input": ids}))
    with answering(
        nn.Embedding(10, 4), signature=lambda: Signature([TensorSpec("i", "INT64", [-1, 5])], [])
    ) as batcher:
        assert wait(batcher.submit({"i": torch.zeros(1, 9, dtype=torch.int64)})).outputs["output"].shape == (1, 9, 4)  # type: ignore[union-attr]


def picky(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Dislikes rows that begin with 13."""
    if (x[:, 0] == 13).any():
        raise ValueError("thirteen\nand a second line")
    return x


def test_one_bad_request_fails_alone() -> None:
    model = Recorder()
    with answering(model, predict=lambda m, x: m(picky(m, x))) as batcher:
        futures = behind_the_gate(batcher, model, rows(1), rows(13), rows(2))
        assert torch.equal(wait(futures[0]).outputs["output"], model.layer(rows(1)["x"]))
        assert torch.equal(wait(futures[2]).outputs["output"], model.layer(rows(2)["x"]))
        assert str(refusal(futures[1])) == "predict raised ValueError: thirteen"
        assert refusal(futures[1]).status == 400


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError])
def test_what_the_model_complains_of_is_the_requests_fault(error: type[Exception]) -> None:
    def predict(model: nn.Module, x: Any) -> Any:
        raise error("because")

    with answering(Recorder(), predict=predict) as batcher:
        said = refusal(batcher.submit(rows(1)))
        assert said.status == 400 and error.__name__ in str(said) and "because" in str(said)


@pytest.mark.parametrize("error", [AttributeError, NameError, OSError, SystemExit, KeyboardInterrupt, StopIteration])
def test_what_is_no_complaint_is_answered_500_and_the_thread_lives_on(error: type[BaseException]) -> None:
    broken = [True]

    def predict(model: nn.Module, x: Any) -> Any:
        if broken:
            raise error("secret")
        return x

    with answering(Recorder(), predict=predict) as batcher:
        said = refusal(batcher.submit(rows(1)))
        assert said.status == 500 and error.__name__ in str(said) and "secret" not in str(said)
        broken.clear()
        wait(batcher.submit(rows(1)))


def test_a_source_that_fails_fails_its_batch_and_no_other() -> None:
    class Failing(Steps):
        def refresh(self) -> ParameterVersion | None:
            if super().refresh() and self.num_refreshes == 1:
                raise OSError("gone")
            return self.version

    with answering(Recorder(), Failing()) as batcher:
        assert refusal(batcher.submit(rows(1))).status == 500
        wait(batcher.submit(rows(1)))


def test_too_little_memory_is_no_fault_of_the_request() -> None:
    def predict(model: nn.Module, x: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    with answering(Recorder(), predict=predict) as batcher:
        assert refusal(batcher.submit(rows(1))).status == 503


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (lambda x: x.mean(), "predict returned output 'output' of shape [] for 3 rows, expected [3, …]"),
        (lambda x: x[:2], "predict returned output 'output' of shape [2, 4] for 3 rows"),
        (lambda x: [1, 2], "predict returned output 'output' of shape [2] for 3 rows"),
        (lambda x: {"a": x, "b": x.t()}, "predict returned output 'b' of shape [4, 3] for 3 rows"),
        (lambda x: {}, "predict returned no outputs"),
        (lambda x: None, "output 'output' is a NoneType, expected a tensor or a list"),
        (lambda x: "abc", "output 'output' is a str"),
        (lambda x: [1, 2, object()], "output 'output' has a object"),
        (lambda x: x.to(torch.complex64), "output 'output' has dtype torch.complex64"),
    ],
)
def test_outputs_that_are_not_one_for_each_row_are_predicts_fault(output: Callable[[Any], Any], says: str) -> None:
    with answering(Recorder(), predict=lambda model, x: output(x)) as batcher:
        error = refusal(batcher.submit(rows(1, 2, 3)))
        assert error.status == 500 and says in str(error)


def test_a_model_whose_answer_has_no_rows_is_told_of_predict() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    with answering(Mean()) as batcher:
        assert "job.prepare(…, predict=fn)" in str(refusal(batcher.submit(rows(1, 2))))


def test_a_predict_that_can_do_one_row_only_still_answers_requests_that_wait_together() -> None:
    model = Recorder()
    with answering(model, predict=lambda m, x: m(x)[:1]) as batcher:
        futures = behind_the_gate(batcher, model, rows(1), rows(2))
        for future, value in zip(futures, (1, 2), strict=True):
            assert torch.equal(wait(future).outputs["output"], model.layer(rows(value)["x"]))


def test_outputs_that_are_not_finite_are_no_answer_and_neighbours_get_theirs() -> None:
    model = Recorder()
    for as_list in (False, True):

        def predict(m: nn.Module, x: torch.Tensor, as_list: bool = as_list) -> Any:
            logs = m(x)[:, :1] * 0 + x.log()
            return logs.tolist() if as_list else logs

        with answering(model, Steps(ParameterVersion(step=41)), predict=predict) as batcher:
            good, bad = rows(1), {"x": torch.tensor([[1.0, 1, 0, 1]])}
            futures = behind_the_gate(batcher, model, good, bad, good)
            assert wait(futures[0]).version.step == wait(futures[2]).version.step == 41
            error = refusal(futures[1])
            assert error.status == 500
            assert str(error) == "output 'output' has NaN or infinite values with the parameters of step 41"


def test_inputs_that_no_model_can_take_are_the_requests_fault() -> None:
    model = Recorder()
    with answering(
        model, Steps(ParameterVersion(step=41)), predict=lambda m, x: m(x)[:, :1] * 0 + x.square()
    ) as batcher:
        error = refusal(behind_the_gate(batcher, model, {"x": torch.full((1, 4), 3e38)})[0])
    assert error.status == 400
    assert str(error).endswith("the inputs go up to 3e+38; scale them as in training")


# limits


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 3)
    model = Recorder()
    with answering(model) as batcher:
        futures = behind_the_gate(batcher, model, *(rows(number) for number in range(5)))
        assert [refusal(future).status for future in futures[3:]] == [503, 503]
        assert all(wait(future) for future in futures[:3])


def test_a_request_that_waited_too_long_is_sent_away_without_a_forward() -> None:
    model = Recorder()
    with answering(model, timeout_s=0.2, max_wait_ms=0) as batcher:
        model.gate.clear()
        first = batcher.submit(rows(0))
        assert model.entered.wait(PATIENCE_S)
        late = batcher.submit(rows(1))
        time.sleep(0.3)
        model.gate.set()
        wait(first)
        assert refusal(late).status == 503 and "0.2 s" in str(refusal(late))
    assert model.batches == [1]


def test_a_cancelled_request_costs_no_forward() -> None:
    model = Recorder()
    with answering(model, max_wait_ms=0) as batcher:
        model.gate.clear()
        first = batcher.submit(rows(0))
        assert model.entered.wait(PATIENCE_S)
        assert batcher.submit(rows(1)).cancel()
        model.gate.set()
        wait(first)
        wait(batcher.submit(rows(2, 3)))
    assert model.batches == [1, 2]


def test_close_answers_what_is_queued_and_then_refuses() -> None:
    model = Recorder()
    with answering(model, max_wait_ms=0, max_batch=1) as batcher:
        futures = behind_the_gate(batcher, model, *(rows(number) for number in range(8)))
        batcher.close()
        assert all(wait(future) for future in futures)
        error = refusal(batcher.submit(rows(1)))
        assert error.status == 503 and "closing" in str(error)
        assert batcher.newest_version().result(PATIENCE_S) == ParameterVersion(step=7)


def test_close_does_not_wait_for_a_forward_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    model = Recorder()
    with answering(model, max_wait_ms=0) as batcher:
        model.gate.clear()
        futures = [batcher.submit(rows(0))]
        assert model.entered.wait(PATIENCE_S)
        futures.append(batcher.submit(rows(1)))
        asked = batcher.newest_version()
        batcher.close()
        assert ["closing" in str(refusal(future)) for future in futures] == [True, True]
        assert asked.result(PATIENCE_S) == ParameterVersion(step=7)


def test_options_that_mean_nothing_raise() -> None:
    for options in ({"max_batch": 0}, {"max_wait_ms": -1}, {"max_wait_ms": float("nan")}):
        with pytest.raises(ValueError, match="expected at least 1 row and 0 ms"):
            Batcher([Recorder()], Steps(), signature=lambda: None, **options)  # type: ignore[arg-type]
