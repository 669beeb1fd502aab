"""A Ray cluster of two nodes on this machine: the processes are placed on both, and all else is as on one machine."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hora.runs import exit_codes

from .conftest import endings
from .machines import SCRIPTS

pytest.importorskip("ray", reason="Ray is not installed: pip install 'hora[ray]'")
pytestmark = [pytest.mark.timeout(400), pytest.mark.ecosystem]
SRC = pathlib.Path(__file__).parents[2] / "src"


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of two CPUs each. Ray's own start is not what is tested: it may take a second try."""
    from ray.cluster_utils import Cluster

    def start() -> Any:
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            made.second = made.add_node(num_cpus=2)
        except BaseException:
            made.shutdown()
            raise
        return made

    try:
        made = start()
    except Exception as problem:
        print(f"Ray did not start: {problem}; once more", file=sys.stderr)
        made = start()
    try:
        yield made
    finally:
        made.shutdown()


def start(tmp_path: pathlib.Path, *arguments: object, address: str = "") -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HORA_", "RAY_"))}
    env |= {"XDG_STATE_HOME": str(tmp_path / "state"), "HORA_DASHBOARD": "off", "PYTHONPATH": str(SRC)}
    env |= {"RAY_ADDRESS": address} if address else {}
    return subprocess.Popen(
        [sys.executable, "-m", "hora.cli.main", "run", "--engine", "ray", *map(str, arguments)],
        cwd=SCRIPTS, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(tmp_path: pathlib.Path, *arguments: object, address: str = "") -> tuple[int, str, str]:
    process = start(tmp_path, *arguments, address=address)
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, out, err


def test_two_nodes_train_to_the_parameters_of_one_process(
    cluster: Any, tmp_path: pathlib.Path, alone: dict[str, Any]
) -> None:
    code, out, err = run(
        tmp_path, "-n", 3, "--strategy", "ps:mode=sync", "--servers", 1, "training.py", "--out", tmp_path,
        address=cluster.address,
    )  # fmt: skip
    assert code == exit_codes.OK, (out, err)
    assert re.search(r"hora: 2 hosts over ", err), err
    results = endings(tmp_path)
    assert [result["rank"] for result in results] == [0, 1, 2]
    for result in results:
        assert result["parameters"] == results[0]["parameters"]
        torch.testing.assert_close(torch.tensor(result["parameters"]), torch.tensor(alone["parameters"]))


def test_a_local_ray_is_started_where_there_is_none(tmp_path: pathlib.Path, alone: dict[str, Any]) -> None:
    code, out, err = run(tmp_path, "-n", 2, "--strategy", "ring", "training.py", "--out", tmp_path)
    assert code == exit_codes.OK, (out, err)
    for result in endings(tmp_path):
        torch.testing.assert_close(torch.tensor(result["parameters"]), torch.tensor(alone["parameters"]))


def test_what_fails_on_a_node_is_told_last_and_once(cluster: Any, tmp_path: pathlib.Path) -> None:
    code, out, err = run(tmp_path, "-n", 2, "training.py", "--raises", 1, address=cluster.address)
    assert code == exit_codes.SCRIPT_FAILED, (out, err)
    assert re.search(r"^hora: rank 1 \(host \S+, pid \d+\) failed with exit code 1", err, re.M), err
    assert err.rstrip().endswith("RuntimeError: bad sample"), err


def test_more_than_the_cluster_has_is_refused(cluster: Any, tmp_path: pathlib.Path) -> None:
    code, out, err = run(tmp_path, "-n", 9, "training.py", address=cluster.address)
    assert code == exit_codes.USAGE and "needs 9 CPUs" in err and "has 4" in err, (out, err)
    code, out, err = run(tmp_path, "-n", 1, "--gpus", 1, "training.py", address=cluster.address)
    assert code == exit_codes.USAGE and "needs 1 GPUs" in err, (out, err)


def test_a_node_that_dies_is_named(cluster: Any, tmp_path: pathlib.Path) -> None:
    until = tmp_path / "never"
    process = start(
        tmp_path, "-n", 4, "--strategy", "ring", "training.py", "--pause", 0.2, "--epochs", 1000, "--until", until,
        address=cluster.address,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "step 3" in line:
                break
        cluster.remove_node(cluster.second, allow_graceful=False)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == exit_codes.RANK_KILLED, (out, err)
    assert re.search(r"hora: host \S+ .*is lost: ", err), err


def test_ctrl_c_stops_all(cluster: Any, tmp_path: pathlib.Path) -> None:
    process = start(
        tmp_path, "-n", 3, "--strategy", "ring", "training.py", "--pause", 0.2, "--epochs", 1000,
        address=cluster.address,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "step 3" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == exit_codes.INTERRUPTED, (out, err)
    deadline = time.monotonic() + 20
    while (left := _trainings(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _trainings(tmp_path: pathlib.Path) -> list[str]:
    """Ranks of a run whose state is kept there."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            ours = entry.name.isdigit() and b"training.py" in (entry / "cmdline").read_bytes()
            if ours and str(tmp_path).encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found
