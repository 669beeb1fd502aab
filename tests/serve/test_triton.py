"""NVIDIA's own client for the Open Inference Protocol works unchanged, and gets what the model itself says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from predictors import Recorder, Steps, answering, served
from torch import nn

from hora.serve.signature import signature_of
from hora.serve.snapshot_buffer import ParameterVersion

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")
triton = pytest.importorskip("tritonclient.http")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

VALUES = {
    "BOOL": "bool", "UINT8": "uint8", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip


class Echo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def tensor(name: str, array: Any, datatype: str, binary: bool) -> Any:
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


class _Client:
    """The client against a model that was learned from one forward."""

    def __init__(self, model: Recorder, source: Steps, client: Any) -> None:
        self.model, self.source, self.client = model, source, client


@pytest.fixture
def place() -> Iterator[_Client]:
    model, source = Recorder(), Steps(ParameterVersion(step=7, round=2))
    with answering(model, source, signature=model.learned) as batcher, served(batcher) as port:
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        yield _Client(model, source, client)
        client.close()


def test_the_client_finds_server_and_model_alive_and_ready(place: _Client) -> None:
    assert place.client.is_server_live() and place.client.is_server_ready() and place.client.is_model_ready("net")
    assert not place.client.is_model_ready("other")
    place.source.version = ParameterVersion(step=8)
    assert place.client.is_model_ready("net", "8") and not place.client.is_model_ready("net", "7")
    assert place.client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = place.client.get_model_metadata("net")
    assert metadata["versions"] == ["8"]
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True, None])
def test_answers_are_the_models_own_in_json_and_in_bytes(
    place: _Client, binary_in: bool, binary_out: bool | None
) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    outputs = None if binary_out is None else [triton.InferRequestedOutput("output", binary_data=binary_out)]
    result = place.client.infer("net", [tensor("x", x, "FP32", binary_in)], outputs=outputs, request_id="r1")
    assert np.array_equal(result.as_numpy("output"), place.model.layer(torch.from_numpy(x)).detach().numpy())
    said = result.get_response()
    assert (said["id"], said["model_name"], said["model_version"]) == ("r1", "net", "7")
    assert said["parameters"] == {"step": 7, "round": 2}


@pytest.mark.parametrize(
    ("datatype", "binary"),
    [(name, binary) for name in VALUES for binary in (False, True) if binary or name != "FP16"],  # a rule of the client
)
def test_every_datatype_comes_back_as_it_went(datatype: str, binary: bool) -> None:
    low = 0 if datatype in ("BOOL", "UINT8") else -2
    x = np.arange(low, low + 6).reshape(2, 3).astype(VALUES[datatype])
    with answering(Echo()) as batcher, served(batcher) as port:
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        back = client.infer("net", [tensor("x", x, datatype, binary)]).as_numpy("output")
        assert back.dtype == x.dtype and np.array_equal(back, x)
        client.close()


def test_bf16_and_texts_come_back_as_they_went() -> None:
    with answering(Echo(), predict=lambda model, x: x) as batcher, served(batcher) as port:
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        texts = np.array(["a", "grün", ""], dtype=np.object_)
        for binary in (False, True):
            back = client.infer("net", [tensor("x", texts, "BYTES", binary)]).as_numpy("output")
            assert [text.decode() for text in back] == ["a", "grün", ""]
        x = np.array([[1.5, -2.0]], dtype=ml_dtypes.bfloat16)
        back = client.infer("net", [tensor("x", x, "BF16", True)]).as_numpy("output")
        assert back.astype(np.float32).tolist() == [[1.5, -2.0]]
        client.close()


def test_several_inputs_and_outputs_go_by_name() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"difference": a - b, "sum": a + b}

    a, b = np.array([5.0, 6.0], dtype=np.float32), np.array([1, 2], dtype=np.int64)
    signature = signature_of(
        ["a", "b"], [torch.from_numpy(a), torch.from_numpy(b)], Two()(torch.ones(1), torch.ones(1))
    )
    with answering(Two(), signature=lambda: signature) as batcher, served(batcher) as port:
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        inputs = [tensor("b", b, "INT64", False), tensor("a", a, "FP32", True)]
        both = client.infer("net", inputs)
        assert both.as_numpy("difference").tolist() == [4, 4] and both.as_numpy("sum").tolist() == [6, 8]
        wanted = [triton.InferRequestedOutput("sum", binary_data=True)]
        one = client.infer("net", inputs, outputs=wanted)
        assert one.as_numpy("sum").tolist() == [6, 8] and one.as_numpy("difference") is None
        client.close()


def test_the_client_is_told_what_is_wrong(place: _Client) -> None:
    wrong = tensor("x", np.zeros((3, 5), dtype=np.float32), "FP32", True)
    with pytest.raises(InferenceServerException, match=r"input 'x' has shape \[3, 5\], expected \[-1, 4\]") as caught:
        place.client.infer("net", [wrong])
    assert caught.value.status() == "400"
    right = tensor("x", np.zeros((3, 4), dtype=np.float32), "FP32", True)
    with pytest.raises(InferenceServerException, match="no version '3'"):
        place.client.infer("net", [right], model_version="3")
    with pytest.raises(InferenceServerException, match="classification, which is not supported"):
        place.client.infer("net", [right], outputs=[triton.InferRequestedOutput("output", class_count=2)])
    with pytest.raises(InferenceServerException, match="content encoding 'gzip' is not supported"):
        place.client.infer("net", [right], request_compression_algorithm="gzip")
    assert place.client.infer("net", [right], model_version="7").as_numpy("output").shape == (3, 2)
