"""The page's address, and who answers there."""

from __future__ import annotations

import socket
import subprocess
from typing import Any

import pytest

from hora.launch import dashboard_socket
from hora.launch.dashboard_socket import DashboardSocket


def test_a_port_that_is_taken_moves_the_bell() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bell = DashboardSocket(port)
        try:
            assert bell.moved and bell.port != port and bell.address("x") == f"http://127.0.0.1:{bell.port}/runs/x"
            assert bell.waiting
        finally:
            bell.end()


def test_a_page_that_cannot_be_started_is_said_once_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    bell = DashboardSocket(0)
    try:
        with pytest.raises(ValueError, match="the dashboard cannot be started: Resource temporarily"):
            bell.start("x", "/tmp", "/tmp")
        assert not bell.waiting
    finally:
        bell.end()


def test_a_page_that_keeps_failing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_socket.sys, "executable", "/bin/false")
    bell = DashboardSocket(0)
    try:
        for _ in range(dashboard_socket.MAX_STARTS):
            assert bell.waiting
            bell.start("x", "/tmp", "/tmp")
            assert bell._process is not None
            bell._process.wait()
        assert not bell.waiting
    finally:
        bell.end()
