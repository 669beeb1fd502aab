"""`hora claims NAME --quick`, as a reader runs it. Asserted is what is exact: counts, bytes, orders; never a time."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from hora.runs import exit_codes
from hora_benchmarks.bench import links
from hora_benchmarks.claims import record
from hora_benchmarks.claims.claim import Row

LIMIT_S = 280
GUESSING = 10.0  # per cent of ten classes


def quick(name: str, into: pathlib.Path) -> list[Row]:
    """The rows of its record; its figure is there too."""
    command = [sys.executable, "-m", "hora.cli.main", "claims", name, "--quick", "--into", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    assert done.returncode == exit_codes.OK, done.stderr
    (found,) = record.read_all(into)
    assert found.quick and (into / f"{found.stem}.png").is_file()
    return list(found.rows)


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 20)
def test_master_adds_and_its_link_carries_what_the_schedules_say(tmp_path: pathlib.Path) -> None:
    problem = links.obstacle()
    if problem:
        pytest.skip(f"no network namespaces here: {problem}")
    found = {(row["name"], row["hosts"]): row for row in quick("master", tmp_path)}
    assert set(found) == {(name, hosts) for name in ("star", "ring") for hosts in (2, 4, 8)}
    for (name, hosts), row in found.items():
        additions, sent = (hosts - 1, hosts - 1) if name == "star" else ((hosts - 1) / hosts, 2 * (hosts - 1) / hosts)
        assert row["additions"] == additions
        assert sent <= row["wire_bytes"] / row["bytes"] <= 1.1 * sent  # headers, acknowledgements and heartbeats


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 20)
def test_lines_are_counted_and_the_scripts_run(tmp_path: pathlib.Path) -> None:
    found = {row["style"]: row for row in quick("lines", tmp_path)}
    assert {style: row["changed"] for style, row in found.items()} == {
        "Hora": 11, "DDP": 16, "Horovod": 16, "TensorFlow's servers": 21,
    }  # fmt: skip
    assert set(found["Hora"]["ran"]) == {"ring", "ps"} and found["Horovod"]["ran"] == {}
    assert all(accuracy > 2 * GUESSING for style in ("Hora", "DDP") for accuracy in found[style]["ran"].values())
