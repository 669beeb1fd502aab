"""The dashboard's socket: its port, and the process that is started at the first connection."""

from __future__ import annotations

import socket
import subprocess
from typing import Any

import pytest

from hora.launch import dashboard_socket
from hora.launch.dashboard_socket import DashboardSocket


def test_a_port_that_is_taken_moves_the_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        dashboard = DashboardSocket(port)
        try:
            assert (
                dashboard.moved
                and dashboard.port != port
                and dashboard.address("x") == f"http://127.0.0.1:{dashboard.port}/runs/x"
            )
            assert dashboard.waiting
        finally:
            dashboard.end()


def test_a_page_that_cannot_be_started_is_said_once_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    dashboard = DashboardSocket(0)
    try:
        with pytest.raises(ValueError, match="the dashboard cannot be started: Resource temporarily"):
            dashboard.start("x", "/tmp", "/tmp")
        assert not dashboard.waiting
    finally:
        dashboard.end()


def test_a_page_that_keeps_failing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_socket.sys, "executable", "/bin/false")
    dashboard = DashboardSocket(0)
    try:
        for _ in range(dashboard_socket.MAX_STARTS):
            assert dashboard.waiting
            dashboard.start("x", "/tmp", "/tmp")
            assert dashboard._process is not None
            dashboard._process.wait()
        assert not dashboard.waiting
    finally:
        dashboard.end()
