"""Requests of the page to a run's predictor. Its address comes from the run database, and must be of this machine."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import socket
from typing import Any
from urllib.parse import quote, urlsplit

from ..http.errors import HttpError
from ..http.listening import ANY_ADDRESS
from ..runs.run_directory import RunRecord
from .catalogue import encode

STATE_S = 2.0  # deadline for its state
ANSWER_S = 15.0  # deadline for a prediction
MAX_BYTES = 4 << 20  # of a prediction
MAX_WAITING = 32


def state(run: RunRecord) -> bytes:
    """{"serving": its address or "", "ready", "step", "inputs", "problem"}."""
    state: dict[str, Any] = {"serving": "", "ready": False, "step": None, "name": None, "inputs": [], "problem": ""}
    try:
        state["serving"] = address = _address(run)
        if address:
            index = json.loads(_request(address, "GET", "/", None, STATE_S)[1])
            state |= {key: index.get(key) for key in ("ready", "step", "name")}
            model = json.loads(_request(address, "GET", f"/v2/models/{quote(str(state['name']))}", None, STATE_S)[1])
            state["inputs"] = model.get("inputs", [])
    except (HttpError, ValueError, AttributeError) as error:
        state["problem"] = str(error)
    return encode(state)


def predict(run: RunRecord, body: bytes) -> tuple[int, bytes]:
    """The predictor's own response to POST /predict; HttpError 409 if the run has no predictor."""
    address = _address(run)
    if not address and not run.live and run.config.get("serve") is not None:
        raise HttpError("the run has ended, and its predictor with it", 409)
    if not address:
        raise HttpError("this run has no predictor; start it with hora run --serve 8000 …", 409)
    return _request(address, "POST", "/predict", body, ANSWER_S)


def _address(run: RunRecord) -> str:
    """The predictor's address in the database of a live run, or ""."""
    if run.live:
        with contextlib.suppress(ValueError):
            reader = run.reader()
            return reader.status().serving if reader is not None else ""
    return ""


def _request(address: str, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*_host_and_port(address), timeout=timeout_s)
    headers = {"Content-Type": "application/json"} if body is not None else {}
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        content = response.read(MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise HttpError(f"the predictor at {address[:80]} cannot be reached: {why}", 502) from None
    finally:
        connection.close()
    if len(content) > MAX_BYTES:
        too_long = f"the predictor's response is longer than {MAX_BYTES} bytes; send the request to {address[:80]}"
        raise HttpError(too_long, 502)
    return response.status, content


def _host_and_port(address: str) -> tuple[str, int]:
    """HttpError for an address of another machine: a database must not direct requests elsewhere."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "http" and port and parts.path in ("", "/") and not parts.username and _is_local(host):
            return "127.0.0.1" if host == "0.0.0.0" else "::1" if host == "::" else host, port
    raise HttpError(f"the predictor's address {address[:80]!r} is not on this machine; send the request to it", 409)


def _is_local(host: str) -> bool:
    if host in ANY_ADDRESS or host in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(ValueError, OSError):
        version = ipaddress.ip_address(host).version
        with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # only an address of this machine can be bound
        return True
    return False
