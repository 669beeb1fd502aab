"""Protocol: the messages of the Open Inference Protocol v2, as JSON and with its binary extension. Pure functions.

    body = JSON                                   the tensors' elements stand in it, or
    body = JSON | bytes of a tensor | bytes …     in the order of the tensors that say `binary_data_size`; the header
                                                  Inference-Header-Content-Length tells where the JSON ends

Triton's and KServe's clients speak this unchanged. What its shared memory, classification or unsigned integers beyond
8 bits would need is refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ..http.errors import HttpError, quoted
from .signature import Signature, TensorSpec, signature_of
from .source import ParameterVersion
from .tensor_codec import DTYPES, MAX_RANK, TEXT, Value, datatype_of, decoded, from_bytes, from_json, to_bytes, uniform

__all__ = ["HEADER", "InferenceRequest", "Signature", "TensorSpec", "encode", "parse", "signature_of"]

HEADER = "Inference-Header-Content-Length"
MAX_TENSORS = 256

Parameters = dict[str, bool | int | float | str]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class _Tensor(msgspec.Struct):
    name: str
    shape: Annotated[list[Size], msgspec.Meta(min_length=1, max_length=MAX_RANK)]
    datatype: str
    parameters: Parameters = {}
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Wanted(msgspec.Struct):
    name: str
    parameters: Parameters = {}


class _Asked(msgspec.Struct):
    inputs: Annotated[list[_Tensor], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
    id: str = ""
    parameters: Parameters = {}
    outputs: Annotated[list[_Wanted], msgspec.Meta(max_length=MAX_TENSORS)] = []


class _Given(msgspec.Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] = {}
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET


class _Answered(msgspec.Struct, omit_defaults=True):
    model_name: str
    model_version: str
    parameters: ParameterVersion
    outputs: list[_Given]
    id: str = ""


class InferenceRequest(msgspec.Struct):
    """A request that is sound in itself: what it asks with, which outputs it wants (none named: all), and for each
    whether as bytes; `binary` where it does not say."""

    id: str
    inputs: dict[str, Value]
    wanted: dict[str, bool]
    binary: bool


_asked = msgspec.json.Decoder(_Asked)


def parse(body: bytes, header: str | None) -> InferenceRequest:
    """The request in a body. `header` is what Inference-Header-Content-Length says, if it came."""
    view = memoryview(body)
    length = len(body) if header is None else _length(header, len(body))
    asked: _Asked = decoded(bytes(view[:length]), _asked, "the request")
    inputs, at = {}, length
    for tensor in asked.inputs:
        where = f"input {tensor.name[:80]!r}"
        _refuse(tensor.parameters, "shared_memory_region", where)
        if tensor.name in inputs:
            raise HttpError(f"{where} is there twice")
        if tensor.datatype not in DTYPES and tensor.datatype != TEXT:
            raise HttpError(f"{where} has datatype {tensor.datatype[:80]!r}, expected one of {quoted([*DTYPES, TEXT])}")
        size = tensor.parameters.get("binary_data_size")
        if (size is None) == (tensor.data is msgspec.UNSET):
            raise HttpError(f"{where} needs either data or the parameter binary_data_size")
        if size is None:
            assert isinstance(tensor.data, msgspec.Raw)
            inputs[tensor.name] = from_json(tensor.data, tensor.datatype, tensor.shape, where)
            continue
        if type(size) is not int or not 0 <= size <= len(body) - at:
            raise HttpError(
                f"{where} has a binary_data_size of {size}, but {len(body) - at} bytes are left in the body"
            )
        inputs[tensor.name] = from_bytes(view[at : at + size], tensor.datatype, tensor.shape, where)
        at += size
    if at < len(body):
        raise HttpError(f"{len(body) - at} bytes of the body belong to no input")
    binary = _flag(asked.parameters, "binary_data_output", False, "the request")
    return InferenceRequest(
        asked.id, inputs, {wanted.name: _binary(wanted, binary) for wanted in asked.outputs}, binary
    )


def encode(
    request: InferenceRequest, outputs: Mapping[str, Value], stamp: ParameterVersion, name: str
) -> tuple[bytes, int | None]:
    """The answer's body, and where its JSON ends if bytes follow it."""
    unknown = [wanted for wanted in request.wanted if wanted not in outputs]
    if unknown:
        raise HttpError(f"there is no output {quoted(unknown)}; the outputs are {quoted(outputs)}")
    given, tail = [], []
    for output, binary in (request.wanted or dict.fromkeys(outputs, request.binary)).items():
        value = uniform(outputs[output])
        shape = [len(value)] if isinstance(value, list) else list(value.shape)
        if binary:
            tail.append(to_bytes(value))
            given.append(_Given(output, datatype_of(value), shape, {"binary_data_size": len(tail[-1])}))
        else:
            flat = value if isinstance(value, list) else value.reshape(-1).tolist()
            given.append(_Given(output, datatype_of(value), shape, data=flat))
    head = msgspec.json.encode(_Answered(name, str(stamp.step), stamp, given, request.id))
    return (b"".join([head, *tail]), len(head)) if tail else (head, None)


def _length(header: str, most: int) -> int:
    if not (header.isascii() and header.isdecimal() and len(header) < 20):
        raise HttpError(f"the header {HEADER} says {header[:40]!r}, expected the number of bytes of the JSON")
    if int(header) > most:
        raise HttpError(f"the header {HEADER} says {int(header)}, but the body has {most} bytes")
    return int(header)


def _binary(wanted: _Wanted, default: bool) -> bool:
    where = f"output {wanted.name[:80]!r}"
    _refuse(wanted.parameters, "shared_memory_region", where)
    _refuse(wanted.parameters, "classification", where)
    return _flag(wanted.parameters, "binary_data", default, where)


def _refuse(parameters: Parameters, name: str, where: str) -> None:
    if parameters.get(name):
        raise HttpError(f"{where} asks for {name}, which is not offered here")


def _flag(parameters: Parameters, name: str, default: bool, where: str) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise HttpError(f"{where} has {name} {value!r}, expected true or false")
    return value
