"""The messages of the predictor: what comes back is what was sent, and what is wrong is refused by a sentence."""

from __future__ import annotations

import json
import math
import random
import struct
from typing import Any

import msgspec
import pytest
import torch

from hora.http.errors import HttpError
from hora.serve.protocols import InferenceRequest, encode_infer, encode_plain, parse_infer, parse_plain
from hora.serve.signature import Signature, TensorSpec, check_inputs, signature_of
from hora.serve.snapshot_buffer import ParameterVersion
from hora.serve.tensor_codec import DTYPES, MAX_RANK, to_bytes

X = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4.5]}


def request(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def binary(datatype: str, shape: list[int], data: bytes, size: Any = None, **more: Any) -> tuple[bytes, str]:
    size = len(data) if size is None else size
    head = request(
        {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}, **more
    )
    return head + data, str(len(head))


def refusal(body: bytes, header: str | None = None) -> str:
    with pytest.raises(HttpError) as caught:
        parse_infer(body, header)
    assert caught.value.status == 400
    sentence = str(caught.value)
    assert sentence and "\n" not in sentence and len(sentence) < 500
    return sentence


def refused_plain(body: Any, expected: Signature | None = None) -> str:
    with pytest.raises(HttpError) as caught:
        parse_plain(body if isinstance(body, bytes) else json.dumps(body).encode(), expected)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


def sample(datatype: str) -> torch.Tensor:
    if datatype == "BOOL":
        return torch.tensor([[True, False, True], [False, False, True]])
    low = 0 if datatype == "UINT8" else -3
    return torch.arange(low, low + 6).reshape(2, 3).to(DTYPES[datatype])


# v2: what was sent


def test_flat_and_nested_data_are_the_same_tensor() -> None:
    flat = parse_infer(request(X), None).inputs["x"]
    nested = parse_infer(request({**X, "data": [[1, 2], [3, 4.5]]}), None).inputs["x"]
    assert isinstance(flat, torch.Tensor) and isinstance(nested, torch.Tensor)
    assert flat.dtype == torch.float32 and flat.tolist() == nested.tolist() == [[1, 2], [3, 4.5]]


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_comes_through_json_and_bytes(datatype: str) -> None:
    tensor = sample(datatype)
    by_json = parse_infer(request({"name": "x", "shape": [2, 3], "datatype": datatype, "data": tensor.tolist()}), None)
    by_bytes = parse_infer(*binary(datatype, [2, 3], to_bytes(tensor)))
    for came in (by_json.inputs["x"], by_bytes.inputs["x"]):
        assert isinstance(came, torch.Tensor)
        assert came.dtype == tensor.dtype and torch.equal(came, tensor)


@pytest.mark.parametrize("datatype", DTYPES)
def test_bytes_are_little_endian_and_as_long_as_the_datatype_says(datatype: str) -> None:
    code = {"BOOL": "?", "UINT8": "B", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f",
            "FP64": "d"}  # fmt: skip
    tensor = sample(datatype)
    values = tensor.reshape(-1).tolist()
    if datatype == "BF16":  # the upper half of a float32
        expected = b"".join(struct.pack("<f", value)[2:] for value in values)
    else:
        expected = struct.pack(f"<6{code[datatype]}", *values)
    assert to_bytes(tensor) == expected
    assert to_bytes(tensor.t()) != expected  # in the order of its rows, not of its memory
    assert to_bytes(tensor.t().contiguous().t()) == expected


def test_texts_come_through_json_and_bytes_as_their_shape_says() -> None:
    texts = ["", "a", "grün", "x" * 300]
    data = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    by_bytes = parse_infer(*binary("BYTES", [2, 2], data))
    by_json = parse_infer(request({"name": "x", "shape": [2, 2], "datatype": "BYTES", "data": texts}), None)
    nested = parse_infer(
        request({"name": "x", "shape": [2, 2], "datatype": "BYTES", "data": [texts[:2], texts[2:]]}), None
    )
    assert by_bytes.inputs["x"] == by_json.inputs["x"] == nested.inputs["x"] == [texts[:2], texts[2:]]
    assert to_bytes(texts) == data


def test_json_and_bytes_mix_in_the_order_of_the_inputs() -> None:
    size = {"binary_data_size": 8}
    head = request(
        {"name": "a", "shape": [1], "datatype": "INT64", "parameters": size},
        X,
        {"name": "b", "shape": [2], "datatype": "FP32", "parameters": size},
        id="77",
    )
    asked = parse_infer(head + struct.pack("<q", -5) + struct.pack("<2f", 1.5, 2.5), str(len(head)))
    assert {name: value.tolist() for name, value in asked.inputs.items()} == {  # type: ignore[union-attr]
        "a": [-5], "x": [[1, 2], [3, 4.5]], "b": [1.5, 2.5]
    }  # fmt: skip
    assert asked.id == "77"


def test_a_tensor_of_bytes_is_its_own_memory() -> None:
    body, header = binary("FP32", [1], struct.pack("<f", 1.5))
    tensor = parse_infer(body, header).inputs["x"]
    assert isinstance(tensor, torch.Tensor)
    tensor += 1  # a view of the immutable body would crash or warn
    assert parse_infer(body, header).inputs["x"].tolist() == [1.5]  # type: ignore[union-attr]


# v2: what is refused


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": [2, 3]}, "input 'x' has 4 elements, expected 6 for shape [2, 3]"),
        ({"shape": [2, -2]}, "Expected `int` >= 1"),
        ({"shape": [0, 4]}, "Expected `int` >= 1"),
        ({"shape": [True, 4]}, "got `bool`"),
        ({"shape": [2.0, 2]}, "got `float`"),
        ({"shape": []}, "length >= 1"),
        ({"shape": [1] * (MAX_RANK + 1)}, f"length <= {MAX_RANK}"),
        ({"shape": [1 << 40, 1 << 40]}, "has 4 elements, expected"),
        ({"shape": [10**30]}, "Expected `int` <="),
        ({"shape": "2,2"}, "got `str`"),
        ({"datatype": "FP31"}, "datatype 'FP31', expected one of 'BOOL'"),
        ({"datatype": "UINT64"}, "datatype 'UINT64', expected one of"),
        ({"datatype": None}, "got `null`"),
        ({"datatype": "INT64"}, "Expected `int`, got `float`"),
        ({"datatype": "BOOL"}, "Expected `bool`, got `int`"),
        ({"datatype": "BYTES"}, "Expected `str`, got `int`"),
        ({"datatype": "UINT8", "data": [1, 2, 3, -1]}, "has -1, which UINT8 cannot hold"),
        ({"datatype": "INT8", "data": [1, 2, 3, 128]}, "has 128, which INT8 cannot hold"),
        ({"datatype": "INT64", "data": [1, 2, 3, 2**63]}, "input 'x'"),
        ({"data": [1, 2, 3, 10**400]}, "out of range"),
        ({"data": [1, 2, 3, True]}, "got `bool`"),
        ({"data": [1, 2, 3, "4"]}, "got `str`"),
        ({"data": [1, 2, 3, None]}, "got `null`"),
        ({"data": [1, 2, 3]}, "has 3 elements, expected 4"),
        ({"data": [[1, 2], [3]]}, "input 'x'"),
        ({"data": [[1, 2, 3, 4]]}, "data of shape [1, 4], but its shape field is [2, 2]"),
        ({"data": [[[1], [2]], [[3], [4]]]}, "nested 3 deep"),
        ({"data": [[1, 2], 3, 4]}, "got `int`"),
        ({"data": 4}, "nested 0 deep"),
        ({"data": {}}, "nested 0 deep"),
        ({"name": 3}, "got `int`"),
        ({"parameters": {"binary_data_size": 16}}, "either data or the parameter binary_data_size"),
        ({"parameters": {"shared_memory_region": "r"}}, "shared_memory_region, which is not supported"),
        ({"parameters": {"deep": [1]}}, "got `array`"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused(change: dict[str, Any], says: str) -> None:
    assert says in refusal(request({**X, **change}))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "truncated"),
        (b"\xff\xfe\x00", "malformed"),
        (b"[1, 2]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `inputs`"),
        (b'{"inputs": []}', "length >= 1"),
        (b'{"inputs": [{}]}', "missing required field"),
        (request(X)[:-3], "truncated"),
        (request(X) + b"}", "trailing"),
        (request(X).replace(b"4.5", b"NaN"), "malformed"),
        (request(X).replace(b"4.5", b"Infinity"), "malformed"),
        (request(X).replace(b"4.5", b"1e999"), "out of range"),
        (request(X, X), "input 'x' appears twice"),
        (request({**X, "name": "\ud800"}), "request"),
        (b'{"inputs": ' + b"[" * 100_000, "got `array`"),
        (b'{"other": ' + b"[" * 100_000, "too deeply"),
        (b'{"other": ' + b'{"a":' * 100_000, "too deeply"),
        (b"[" * 100_000, "Expected `object`"),
        (request({**X, "data": "D"}).replace(b'"D"', b"[" * 100_000 + b"]" * 100_000), "deep"),
        (request(X, outputs=[{"name": "y", "parameters": {"classification": 3}}]), "classification, which is not"),
        (request(X, outputs=[{"name": "y", "parameters": {"binary_data": 1}}]), "expected true or false"),
        (request(X, parameters={"binary_data_output": "yes"}), "expected true or false"),
    ],
)  # fmt: skip
def test_a_request_that_is_none_is_refused(body: bytes, says: str) -> None:
    assert says in refusal(body)


@pytest.mark.parametrize("header", ["", "-1", "1.5", "abc", "٣", "9" * 50, " 5", "0x10", "100000"])
def test_a_header_that_is_no_length_within_the_body_is_refused(header: str) -> None:
    assert "Inference-Header-Content-Length" in refusal(request(X), header)


def test_a_header_that_cuts_the_json_short_is_refused() -> None:
    body = request(X)
    for length in range(len(body)):
        refusal(body, str(length))


def test_sizes_that_lie_are_refused() -> None:
    data = struct.pack("<4f", 1, 2, 3, 4)
    for size in (-1, 15, 17, 10**18, True, 16.0, "16"):
        refusal(*binary("FP32", [2, 2], data, size))
    assert "has a binary_data_size of 16, but 12 bytes are left" in refusal(*binary("FP32", [2, 2], data[:12], 16))
    assert "1 bytes of the body belong to no input" in refusal(*binary("FP32", [2, 2], data + b"!", 16))
    assert "has 16 bytes, expected 24" in refusal(*binary("FP32", [2, 3], data))
    assert "expected 4835703278458516698824704" in refusal(*binary("FP32", [1 << 40, 1 << 40], data))


def test_texts_that_lie_about_their_length_are_refused() -> None:
    assert "ends within the length" in refusal(*binary("BYTES", [1], b"\x01\x00"))
    assert "beyond its data" in refusal(*binary("BYTES", [1], b"\xff\xff\xff\xffabc"))
    assert "not UTF-8" in refusal(*binary("BYTES", [1], b"\x01\x00\x00\x00\xff"))
    assert "has 2 elements, expected 1" in refusal(*binary("BYTES", [1], b"\x00" * 8))


def test_random_damage_is_a_refusal_or_a_request_but_never_another_error() -> None:
    luck = random.Random(0)
    whole, header = binary("INT16", [2, 3], bytes(12), id="a", outputs=[{"name": "y"}], parameters={"p": 1.5})
    fine = refused = 0
    for _ in range(3000):
        body = bytearray(whole)
        for _ in range(luck.randint(1, 4)):
            at = luck.randrange(len(body))
            damage = luck.randrange(3)
            if damage == 0:
                body[at] = luck.randrange(256)
            elif damage == 1:
                del body[at : at + luck.randint(1, 5)]
            else:
                body[at:at] = luck.choice([b"[", b"{", b'"', b"0", b"9" * 30, b"-", b"null", b"1e5", b"\x00", b"\\u00"])
        try:
            parse_infer(bytes(body), luck.choice([header, None, str(luck.randrange(len(body) + 5))]))
            fine += 1
        except HttpError:
            refused += 1
    assert refused > 1000 and fine > 0


# v2: the answer


def answer(
    outputs: dict[str, Any], asked: InferenceRequest | None = None, version: ParameterVersion | None = None
) -> dict[str, Any]:
    body, length = encode_infer(
        asked or InferenceRequest("", {}, {}, False), outputs, version or ParameterVersion(step=7), "net"
    )
    assert length is None
    decoded: dict[str, Any] = json.loads(body)
    return decoded


def test_an_answer_carries_the_model_the_step_and_only_what_is_set() -> None:
    said = answer({"output": torch.tensor([[1, 2]])}, InferenceRequest("abc", {}, {}, False))
    assert said == {
        "model_name": "net", "model_version": "7", "id": "abc", "parameters": {"step": 7},
        "outputs": [{"name": "output", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}],
    }  # fmt: skip
    local = answer({"output": torch.zeros(1)}, version=ParameterVersion(step=7, round=2, local_step=1, spread=0))
    assert local["parameters"] == {"step": 7, "round": 2, "local_step": 1, "spread": 0}


def test_only_the_wanted_outputs_come_in_the_wanted_form() -> None:
    outputs = {"a": torch.tensor([1.5]), "b": torch.tensor([2]), "c": torch.tensor([True])}
    asked = parse_infer(
        request(X, outputs=[{"name": "c"}, {"name": "a", "parameters": {"binary_data": True}}]), None
    )  # fmt: skip
    body, length = encode_infer(asked, outputs, ParameterVersion(step=1), "net")
    assert length is not None
    said = json.loads(body[:length])["outputs"]
    assert [output["name"] for output in said] == ["c", "a"]
    assert said[0]["data"] == [True]
    assert said[1]["parameters"] == {"binary_data_size": 4} and "data" not in said[1]
    assert body[length:] == struct.pack("<f", 1.5)


def test_binary_for_all_has_exceptions() -> None:
    outputs = {"a": torch.tensor([1.5]), "b": torch.tensor([2])}
    every = parse_infer(request(X, parameters={"binary_data_output": True}), None)
    body, length = encode_infer(every, outputs, ParameterVersion(step=1), "net")
    assert body[length:] == struct.pack("<f", 1.5) + struct.pack("<q", 2)
    wanted = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}]
    but_one = parse_infer(request(X, parameters={"binary_data_output": True}, outputs=wanted), None)
    body, length = encode_infer(but_one, outputs, ParameterVersion(step=1), "net")
    assert body[length:] == struct.pack("<f", 1.5)


def test_an_unknown_output_is_refused_with_the_known_ones() -> None:
    with pytest.raises(HttpError, match="no output 'z'; its outputs are 'a', 'b'"):
        answer({"a": torch.zeros(1), "b": torch.zeros(1)}, InferenceRequest("", {}, {"z": False}, False))


def test_lists_are_answered_as_numbers_if_they_are_and_as_texts_otherwise() -> None:
    said = answer({"n": [1, 2], "f": [0.1, 2], "s": ["a", "b"], "d": [{"label": "a"}, None], "r": [[1], [1, 2]]})
    by_name = {output["name"]: (output["datatype"], output["shape"], output["data"]) for output in said["outputs"]}
    assert by_name == {
        "n": ("INT64", [2], [1, 2]), "f": ("FP64", [2], [0.1, 2.0]), "s": ("BYTES", [2], ["a", "b"]),
        "d": ("BYTES", [2], ['{"label":"a"}', "null"]), "r": ("BYTES", [2], ["[1]", "[1,2]"]),
    }  # fmt: skip
    body, length = encode_infer(InferenceRequest("", {}, {}, True), {"s": ["a", "bc"]}, ParameterVersion(step=1), "net")
    assert body[length:] == b"\x01\x00\x00\x00a\x02\x00\x00\x00bc"


# signatures


def test_a_signature_has_free_rows_and_the_rest_as_seen() -> None:
    signature = signature_of(["ids", "mask"], [torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3)], torch.zeros(3, 2))
    assert signature == Signature(
        [TensorSpec("ids", "INT64", [-1, 5]), TensorSpec("mask", "FP32", [-1])], [TensorSpec("output", "FP32", [-1, 2])]
    )
    several = signature_of(["x"], [torch.zeros(1)], (torch.zeros(1), torch.zeros(1)))
    assert several is not None and [spec.name for spec in several.outputs] == ["output_0", "output_1"]
    by_name = signature_of(["x"], [torch.zeros(1)], {"logits": torch.zeros(1)})
    assert by_name is not None and by_name.outputs[0].name == "logits"


@pytest.mark.parametrize(
    ("args", "output"),
    [
        ([3], torch.zeros(1)),
        ([torch.zeros(())], torch.zeros(1)),
        ([torch.zeros(1)], torch.zeros(())),
        ([torch.zeros(1)], None),
        ([torch.zeros(1)], (torch.zeros(1), "hidden")),
        ([torch.zeros(1)], {}),
        ([torch.zeros(1, dtype=torch.complex64)], torch.zeros(1)),
        ([torch.zeros(1), torch.zeros(1)], torch.zeros(1)),
        ([], torch.zeros(1)),
    ],
)
def test_there_is_no_signature_of_what_is_no_tensor_with_rows(args: list[Any], output: Any) -> None:
    assert signature_of(["x"], args, output) is None


def test_a_request_is_told_what_came_and_what_is_expected() -> None:
    signature = Signature([TensorSpec("x", "FP32", [-1, 64]), TensorSpec("ids", "INT64", [-1, 8])], [])
    fine = {"x": torch.zeros(3, 64), "ids": torch.zeros(3, 8, dtype=torch.int64)}
    check_inputs(signature, fine)
    check_inputs(
        signature, {**fine, "ids": torch.zeros(3, 11, dtype=torch.int64)}
    )  # a longer sequence: the model decides
    for change, says in (
        ({"x": torch.zeros(3, 65)}, "input 'x' has shape [3, 65], expected [-1, 64]"),
        ({"x": torch.zeros(64)}, "input 'x' has shape [64], expected [-1, 64]; put a single row into a list"),
        ({"x": torch.zeros(3, 64).double()}, "input 'x' has datatype FP64, expected FP32"),
        ({"x": ["a"]}, "input 'x' has datatype BYTES, expected FP32"),
        ({"ids": torch.zeros(3, 8, 1, dtype=torch.int64)}, "input 'ids' has shape [3, 8, 1], expected [-1, 8]"),
        ({"ids": torch.zeros(3, 8, dtype=torch.int32)}, "input 'ids' has datatype INT32, expected INT64"),
        ({"y": torch.zeros(3)}, "the inputs are named 'x', 'ids', 'y', expected 'x', 'ids'"),
    ):
        with pytest.raises(HttpError) as caught:
            check_inputs(signature, {**fine, **change})
        assert str(caught.value) == says
    with pytest.raises(HttpError, match="named 'x', expected 'x', 'ids'"):
        check_inputs(signature, {"x": fine["x"]})


# /predict


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"inputs": rows}, lambda rows: {"instances": rows}])
def test_rows_come_bare_or_under_inputs_or_instances(wrap: Any) -> None:
    (value,) = parse_plain(b" \n" + json.dumps(wrap([[1.5, 2], [3, 4]])).encode(), None).values()
    assert isinstance(value, torch.Tensor)
    assert value.dtype == torch.float32 and value.tolist() == [[1.5, 2], [3, 4]]


def test_several_inputs_come_by_name() -> None:
    inputs = parse_plain(b'{"inputs": {"a": [1, 2], "b": [[true], [false]], "c": ["x", "y"]}}', None)
    assert inputs["a"].dtype == torch.int64 and inputs["b"].dtype == torch.bool  # type: ignore[union-attr]
    assert inputs["c"] == ["x", "y"]


def expecting(**datatypes: str) -> Signature:
    return Signature([TensorSpec(name, datatype, [-1, 2]) for name, datatype in datatypes.items()], [])


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name != "BOOL"])
def test_whole_numbers_become_the_expected_datatype(datatype: str) -> None:
    inputs = parse_plain(b"[[1, 2], [3, 4]]", expecting(x=datatype))
    assert list(inputs) == ["x"]
    assert isinstance(inputs["x"], torch.Tensor)
    assert inputs["x"].dtype == DTYPES[datatype] and inputs["x"].tolist() == [[1, 2], [3, 4]]


def test_nothing_is_lost_on_the_way_to_the_expected_datatype() -> None:
    assert "has floating-point numbers, expected INT64" in refused_plain([[1.5, 2]], expecting(x="INT64"))
    assert "has 300, which UINT8 cannot hold" in refused_plain([[300, 2]], expecting(x="UINT8"))
    assert "has -1, which UINT8 cannot hold" in refused_plain([[-1, 2]], expecting(x="UINT8"))
    (double,) = parse_plain(b"[[0.1, 2]]", expecting(x="FP64")).values()
    assert double.tolist() == [[0.1, 2]]  # type: ignore[union-attr]
    (number,) = parse_plain(b"[[1, 0]]", expecting(x="BOOL")).values()
    assert number.dtype == torch.int64  # type: ignore[union-attr] # for `check` to refuse


def test_a_bare_list_for_a_model_of_several_inputs_is_told_how() -> None:
    assert "has the inputs 'a', 'b': send" in refused_plain([[1, 2]], expecting(a="FP32", b="FP32"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "nested 0 deep"),
        (b"hello", "nested 0 deep"),
        (b"x=1&y=2", "nested 0 deep"),
        (b"3", "nested 0 deep"),
        (b"[", "truncated"),
        (b"[1, 2", "truncated"),
        (b"[NaN]", "malformed"),
        (b"[1, NaN]", "malformed"),
        (b"[Infinity]", "malformed"),
        (b"[1e999]", "out of range"),
        (b"[1, null]", "got `null`"),
        (b"[null]", "got `null`"),
        (b"[1, true]", "got `bool`"),
        (b"[true, 1]", "got `int`"),
        (b'["a", 1]', "got `int`"),
        (b'[1, "a"]', "got `str`"),
        (b"[[1, 2], [3]]", "expected sequence of length 2"),
        (b"[[1, 2], 3]", "got `int`"),
        (b"[1] [2]", "trailing"),
        (b"[{}]", "got `object`"),
        (b"[9223372036854775808]", "input 'input'"),
        (b'["\xff"]', "utf-8"),
        (b"{}", "either inputs or instances"),
        (b'{"inputs": [1], "instances": [1]}', "either inputs or instances"),
        (b'{"input": [1]}', "has the fields 'input', expected either"),
        (b'{"inputs": 3}', "nested 0 deep"),
        (b'{"inputs": {"a": 3}}', "input 'a' is nested 0 deep"),
        (b'{"inputs": {"a": {"b": [1]}}}', "nested 0 deep"),
        (b"[" * 100_000, "deep"),
        (b"[" * 100_000 + b"]" * 100_000, "deep"),
        (b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"inputs": ' + b'{"a":' * 100_000, "deep"),
        (b"{" * 100_000, "malformed"),
    ],
)  # fmt: skip
def test_plain_json_that_is_no_rows_is_refused(body: bytes, says: str) -> None:
    assert says in refused_plain(body)


def test_random_bytes_are_refused_by_predict() -> None:
    luck = random.Random(1)
    for _ in range(500):
        body = bytes(luck.choice(b'[]{}",:0123456789.eE-+ntfINa\\ \xff') for _ in range(luck.randint(0, 40)))
        try:
            parse_plain(body, luck.choice([None, expecting(x="FP32"), expecting(x="INT8")]))
        except HttpError:
            continue


def test_the_plain_answer_is_a_list_or_lists_by_name_with_the_step() -> None:
    version = ParameterVersion(step=12, round=3)
    one = json.loads(encode_plain({"output": torch.tensor([[1.5]])}, version))
    assert one == {"outputs": [[1.5]], "step": 12, "round": 3}
    two = json.loads(encode_plain({"a": torch.tensor([1]), "b": ["x"]}, ParameterVersion(step=12)))
    assert two == {"outputs": {"a": [1], "b": ["x"]}, "step": 12}


def test_decoders_do_not_take_what_json_has_not() -> None:
    """The refusal of NaN leans on this."""
    for word in (b"NaN", b"Infinity", b"-Infinity"):
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(word)
    assert math.isnan(json.loads("NaN"))
