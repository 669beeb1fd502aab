"""Two machines, one command: the ranks know their places, train as one process does, and write in one place."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
import torch

from hora.runs import exit_codes

from .conftest import Make, endings
from .machines import SCRIPTS, Run

pytestmark = pytest.mark.timeout(240)  # several processes import torch on whatever cores there are


def told(run: Run) -> list[dict[str, Any]]:
    found = [json.loads(line.partition("] ")[2]) for line in run.out if "] {" in line]
    return sorted(found, key=lambda place: place["rank"])


def test_ranks_on_two_machines_know_their_places_and_all_that_they_write_is_in_one(
    machines: Make, tmp_path: pathlib.Path
) -> None:
    those = machines()
    settings = ["--env", "GIVEN_A=1 with = and space", "--forward", "MY_*", "--log-dir", tmp_path / "logs"]
    run = those.hora(
        *("run", "--hosts", "a:2,b:2", "--strategy", "ring", *settings, "places.py", "--lr", "0.1", "two words", ""),
        env={"MY_KEY": "x y", "MY_OTHER": "$HOME", "OTHER_KEY": "not passed on"},
    )
    assert run.code == exit_codes.OK, run
    places = told(run)
    assert [place["rank"] for place in places] == [0, 1, 2, 3] and {place["size"] for place in places} == {4}
    assert [(place["host"], place["local_rank"], place["local_size"]) for place in places] == [
        ("a", 0, 2), ("a", 1, 2), ("b", 0, 2), ("b", 1, 2),
    ]  # fmt: skip
    for place in places:
        assert place["machine"] == f"machine-{place['host']}"
        assert place["bind"] == those.address(place["host"])
        assert place["arguments"] == ["--lr", "0.1", "two words", ""]
        assert place["cwd"] == str(SCRIPTS)
        assert place["env"] == {"GIVEN_A": "1 with = and space", "MY_KEY": "x y", "MY_OTHER": "$HOME"}
    for rank in range(4):
        assert f"[{rank}] sum [10.0, 10.0, 10.0]" in run.out
        assert f"[{rank}] rank {rank} on stderr" in run.err
        assert (tmp_path / "logs" / f"rank-{rank}.out").read_text().endswith("sum [10.0, 10.0, 10.0]\n")
        assert (tmp_path / "logs" / f"rank-{rank}.err").read_text() == f"rank {rank} on stderr\n"
    network = [line for line in run.err if re.match(r"hora: 2 hosts over .*\beth0\b", line)]
    assert len(network) == 1, run


@pytest.mark.parametrize("first", ["a", pytest.param("10.83.0.1", marks=pytest.mark.full)])
def test_two_machines_train_to_the_parameters_of_one_process(
    machines: Make, tmp_path: pathlib.Path, alone: dict[str, Any], first: str
) -> None:
    """`a` is reached over ssh; as its own address the machine is known to be this one, and needs none."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"# where\n{first} slots=2\n\nb:2  # there\n")
    out = tmp_path / "out"
    out.mkdir()
    run = machines().hora("run", "--hostfile", hosts, "--strategy", "ring", "training.py", "--out", out)
    assert run.code == exit_codes.OK, run
    results = endings(out)
    assert [result["rank"] for result in results] == [0, 1, 2, 3]
    for result in results:
        assert result["parameters"] == results[0]["parameters"]
        torch.testing.assert_close(torch.tensor(result["parameters"]), torch.tensor(alone["parameters"]))
        assert result["step"] == alone["step"] == 16
