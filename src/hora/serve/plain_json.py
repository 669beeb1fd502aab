"""Plain: the JSON of /predict, for people with curl.

[[…], […]]    {"inputs": [[…], …]}    {"instances": [[…], …]}    {"inputs": {"a": [[…], …], "b": […]}}
-> {"outputs": [[…], …], "step": 12}          with several outputs a list under each one's name
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from ..http.errors import HttpError, quoted
from .signature import Signature
from .source import ParameterVersion
from .tensor_codec import Value, decoded, from_rows


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    instances: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_asked = msgspec.json.Decoder(_Asked)
_by_name = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SPACE = b" \t\r\n"


def parse(body: bytes, expected: Signature | None) -> dict[str, Value]:
    """The inputs in a body by name; where it names none, the name is that of the only input."""
    rows: msgspec.Raw | msgspec.UnsetType
    if _opens_with(body, b"{"):
        asked: _Asked = decoded(body, _asked, "the request")
        if (asked.inputs is msgspec.UNSET) == (asked.instances is msgspec.UNSET):
            raise HttpError("the request needs either inputs or instances")
        rows = asked.instances if asked.inputs is msgspec.UNSET else asked.inputs
    else:
        rows = msgspec.Raw(body)
    assert isinstance(rows, msgspec.Raw)
    specs = {spec.name: spec.datatype for spec in expected.inputs} if expected else {}
    if _opens_with(rows, b"{"):
        named: dict[str, msgspec.Raw] = decoded(rows, _by_name, "the inputs")
        return {name: from_rows(raw, specs.get(name), f"input {name[:80]!r}") for name, raw in named.items()}
    if len(specs) > 1:
        raise HttpError(f'the model takes the inputs {quoted(specs)}: send {{"inputs": {{name: rows, …}}}}')
    name, datatype = next(iter(specs.items()), ("input", None))
    return {name: from_rows(rows, datatype, f"input {name!r}")}


def encode(outputs: Mapping[str, Value], stamp: ParameterVersion) -> bytes:
    """The answer's body."""
    lists: Any = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}
    if len(lists) == 1:
        (lists,) = lists.values()
    return msgspec.json.encode({"outputs": lists, **msgspec.to_builtins(stamp)})


def _opens_with(data: bytes | msgspec.Raw, sign: bytes) -> bool:
    return bytes(data).lstrip(_SPACE)[:1] == sign
