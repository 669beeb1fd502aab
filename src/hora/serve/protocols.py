"""Request and response formats of the predictor: pure functions between HTTP bodies and tensors.

Plain JSON, POST /predict:
    [[…], […]]    {"inputs": [[…], …]}    {"instances": [[…], …]}    {"inputs": {"a": [[…], …], "b": […]}}
    -> {"outputs": [[…], …], "step": 12}          with several outputs, a list under each name

Open Inference Protocol v2 with its binary extension, as clients of Triton and KServe send it:
    body = JSON                                   with the tensors' elements, or
    body = JSON | bytes of a tensor | bytes …     for the tensors with `binary_data_size`, in their order; the header
                                                  Inference-Header-Content-Length is the length of the JSON
Shared memory, classification and unsigned integers of more than 8 bits are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from msgspec import UNSET, Raw, UnsetType

from ..http.errors import HttpError, quoted
from .signature import Signature
from .snapshot_buffer import ParameterVersion
from .tensor_codec import (
    DTYPES,
    MAX_RANK,
    TEXT,
    Value,
    datatype_of,
    decode_json,
    from_bytes,
    from_json,
    from_rows,
    to_bytes,
    to_uniform,
)  # fmt: skip

HEADER = "Inference-Header-Content-Length"
MAX_TENSORS = 256

Parameters = dict[str, bool | int | float | str]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class _InputTensor(msgspec.Struct):
    name: str
    shape: Annotated[list[Size], msgspec.Meta(min_length=1, max_length=MAX_RANK)]
    datatype: str
    parameters: Parameters = {}
    data: Raw | UnsetType = UNSET


class _RequestedOutput(msgspec.Struct):
    name: str
    parameters: Parameters = {}


class _InferBody(msgspec.Struct):
    inputs: Annotated[list[_InputTensor], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
    id: str = ""
    parameters: Parameters = {}
    outputs: Annotated[list[_RequestedOutput], msgspec.Meta(max_length=MAX_TENSORS)] = []


class InferenceRequest(msgspec.Struct):
    """A valid request. `outputs` maps the requested outputs (empty: all) to whether they are binary; `binary` is the
    default."""

    id: str
    inputs: dict[str, Value]
    outputs: dict[str, bool]
    binary: bool


def parse_plain(body: bytes, signature: Signature | None) -> dict[str, Value]:
    """The inputs by name; rows without a name belong to the only input."""
    rows = Raw(body)
    if _is_object(rows):
        fields: dict[str, Raw] = decode_json(body, dict[str, Raw], "the request")
        if [*fields] not in (["inputs"], ["instances"]):
            raise HttpError(f"the request has the fields {quoted(fields)}, expected either inputs or instances")
        (rows,) = fields.values()
    datatypes = {spec.name: spec.datatype for spec in signature.inputs} if signature else {}
    if _is_object(rows):
        named: dict[str, Raw] = decode_json(rows, dict[str, Raw], "the inputs")
        return {name: from_rows(raw, datatypes.get(name), f"input {name[:80]!r}") for name, raw in named.items()}
    if len(datatypes) > 1:
        raise HttpError(f'the model has the inputs {quoted(datatypes)}: send {{"inputs": {{name: rows, …}}}}')
    name, datatype = next(iter(datatypes.items()), ("input", None))
    return {name: from_rows(rows, datatype, f"input {name!r}")}


def encode_plain(outputs: Mapping[str, Value], version: ParameterVersion) -> bytes:
    lists: Any = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}
    if len(lists) == 1:
        (lists,) = lists.values()
    return msgspec.json.encode({"outputs": lists, **msgspec.to_builtins(version)})


def _is_object(data: Raw) -> bool:
    return bytes(data).lstrip(b" \t\r\n")[:1] == b"{"


def parse_infer(body: bytes, header: str | None) -> InferenceRequest:
    """`header` is the value of Inference-Header-Content-Length, or None."""
    view = memoryview(body)
    at = len(body) if header is None else _json_length(header, len(body))
    request: _InferBody = decode_json(bytes(view[:at]), _InferBody, "the request")
    inputs: dict[str, Value] = {}
    for tensor in request.inputs:
        where = f"input {tensor.name[:80]!r}"
        _reject(tensor.parameters, "shared_memory_region", where)
        if tensor.name in inputs:
            raise HttpError(f"{where} appears twice")
        if tensor.datatype not in DTYPES and tensor.datatype != TEXT:
            raise HttpError(f"{where} has datatype {tensor.datatype[:80]!r}, expected one of {quoted([*DTYPES, TEXT])}")
        size = tensor.parameters.get("binary_data_size")
        if (size is None) == (tensor.data is UNSET):
            raise HttpError(f"{where} needs either data or the parameter binary_data_size")
        if size is None:
            assert isinstance(tensor.data, Raw)
            inputs[tensor.name] = from_json(tensor.data, tensor.datatype, tensor.shape, where)
            continue
        left = len(body) - at
        if type(size) is not int or not 0 <= size <= left:
            raise HttpError(f"{where} has a binary_data_size of {size}, but {left} bytes are left in the body")
        inputs[tensor.name] = from_bytes(view[at : at + size], tensor.datatype, tensor.shape, where)
        at += size
    if at < len(body):
        raise HttpError(f"{len(body) - at} bytes of the body belong to no input")
    binary = _flag(request.parameters, "binary_data_output", False, "the request")
    outputs = {}
    for output in request.outputs:
        where = f"output {output.name[:80]!r}"
        _reject(output.parameters, "shared_memory_region", where)
        _reject(output.parameters, "classification", where)
        outputs[output.name] = _flag(output.parameters, "binary_data", binary, where)
    return InferenceRequest(request.id, inputs, outputs, binary)


def encode_infer(
    request: InferenceRequest, outputs: Mapping[str, Value], version: ParameterVersion, model_name: str
) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON if bytes follow it."""
    unknown = [name for name in request.outputs if name not in outputs]
    if unknown:
        raise HttpError(f"the model has no output {quoted(unknown)}; its outputs are {quoted(outputs)}")
    tensors, tail = [], []
    for name, binary in (request.outputs or dict.fromkeys(outputs, request.binary)).items():
        value = to_uniform(outputs[name])
        shape = [len(value)] if isinstance(value, list) else list(value.shape)
        tensor: dict[str, Any] = {"name": name, "datatype": datatype_of(value), "shape": shape}
        if binary:
            tail.append(to_bytes(value))
            tensor["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            tensor["data"] = value if isinstance(value, list) else value.reshape(-1).tolist()
        tensors.append(tensor)
    response = {"model_name": model_name, "model_version": str(version.step), "parameters": version, "outputs": tensors}
    head = msgspec.json.encode(response | ({"id": request.id} if request.id else {}))
    return (b"".join([head, *tail]), len(head)) if tail else (head, None)


def _json_length(header: str, most: int) -> int:
    if not (header.isascii() and header.isdecimal() and len(header) < 20):
        raise HttpError(f"the header {HEADER} is {header[:40]!r}, expected the length of the JSON in bytes")
    if int(header) > most:
        raise HttpError(f"the header {HEADER} is {int(header)}, but the body has {most} bytes")
    return int(header)


def _reject(parameters: Parameters, name: str, where: str) -> None:
    if parameters.get(name):
        raise HttpError(f"{where} asks for {name}, which is not supported")


def _flag(parameters: Parameters, name: str, default: bool, where: str) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise HttpError(f"{where} has {name} {value!r}, expected true or false")
    return value
