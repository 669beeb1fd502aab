"""Predictor: the page asks the run's prediction service for its visitor. Where it is, the run's memory alone says."""

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
from .runs import StoredRun
from .view import encode

GLANCE_S = 2.0  # for its state
ANSWER_S = 15.0  # for an answer
MAX_BYTES = 4 << 20  # of an answer
MAX_WAITING = 32


def state(run: StoredRun) -> bytes:
    """{"serving": its address or "", "ready", "step", "inputs", "problem"}."""
    told: dict[str, Any] = {"serving": "", "ready": False, "step": None, "name": None, "inputs": [], "problem": ""}
    try:
        told["serving"] = address = _address(run)
        if address:
            index = json.loads(_ask(address, "GET", "/", None, GLANCE_S)[1])
            told |= {key: index.get(key) for key in ("ready", "step", "name")}
            about = json.loads(_ask(address, "GET", f"/v2/models/{quote(str(told['name']))}", None, GLANCE_S)[1])
            told["inputs"] = about.get("inputs", [])
    except (HttpError, ValueError, AttributeError) as problem:
        told["problem"] = str(problem)
    return encode(told)


def predict(run: StoredRun, body: bytes) -> tuple[int, bytes]:
    """The predictor's own answer to POST /predict, whatever it is. Refusal if there is nobody to ask."""
    address = _address(run)
    if not address and not run.live and run.config.get("serve") is not None:
        raise HttpError("the run has ended, and its predictor with it", 409)
    if not address:
        raise HttpError("nobody answers predictions in this run; hora run --serve 8000 … starts somebody who does", 409)
    return _ask(address, "POST", "/predict", body, ANSWER_S)


def _address(run: StoredRun) -> str:
    """What the memory of a live run says; "" if nothing."""
    if not run.live:
        return ""
    with contextlib.suppress(ValueError):
        reading = run.read()
        return reading.status().serving if reading is not None else ""
    return ""


def _ask(address: str, method: str, path: str, body: bytes | None, seconds: float) -> tuple[int, bytes]:
    host, port = _place(address)
    line = http.client.HTTPConnection(host, port, timeout=seconds)
    headers = {"Content-Type": "application/json"} if body is not None else {}
    try:
        line.request(method, path, body, headers)
        answer = line.getresponse()
        said = answer.read(MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as problem:
        why = "no answer in time" if isinstance(problem, TimeoutError) else str(problem) or type(problem).__name__
        raise HttpError(f"the predictor at {address[:80]} cannot be reached: {why}", 502) from None
    finally:
        line.close()
    if len(said) > MAX_BYTES:
        raise HttpError(
            f"the predictor's answer is longer than {MAX_BYTES} bytes; ask it yourself at {address[:80]}", 502
        )
    return answer.status, said


def _place(address: str) -> tuple[str, int]:
    """Host and port of this machine's own; Refusal for any other, so that a run's memory sends nobody elsewhere."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "http" and port and parts.path in ("", "/") and not parts.username and _is_own(host):
            return "127.0.0.1" if host == "0.0.0.0" else "::1" if host == "::" else host, port
    raise HttpError(f"the predictor's address {address[:80]!r} is none of this machine; ask it yourself", 409)


def _is_own(host: str) -> bool:
    if host in ANY_ADDRESS or host in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(ValueError, OSError):
        version = ipaddress.ip_address(host).version
        with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # only an address of this machine can be bound
        return True
    return False
