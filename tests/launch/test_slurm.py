"""Real `srun` on a real, small Slurm: on one node, and on two that are network namespaces."""

from __future__ import annotations

import pathlib
import re
import secrets
import sys
from collections.abc import Iterator

import pytest
import slurm
from started import Started

from hora_benchmarks.bench import links

OBSTACLE = slurm.obstacle()
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.ecosystem,
    pytest.mark.skipif(bool(OBSTACLE), reason=f"no Slurm of our own here: {OBSTACLE}"),
]


@pytest.fixture
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("tmp"))
    yield started
    started.end()


def test_srun_on_one_node_is_adopted_with_a_server_out_of_its_tasks(started: Started, tmp_path: pathlib.Path) -> None:
    folder, trained = tmp_path / "slurm", tmp_path / "trained"
    folder.mkdir()
    trained.mkdir()
    with slurm.Cluster(folder, ["127.0.0.1"], [[]]) as cluster:
        chosen = {"HORA_STRATEGY": "ps", "HORA_SERVERS": "1"}
        command = ["srun", "-n", "3", sys.executable]
        code, out = started.run(command, "digits_alike.py", trained, **cluster.env, **chosen)
    assert code == 0, out
    wanted = [f"trained: rank {rank} of 2 under slurm by ps" for rank in range(2)]
    assert sorted(re.findall(r"trained: .*", out)) == wanted


@pytest.mark.skipif(bool(links.obstacle()), reason="no network namespaces here")
def test_srun_on_two_nodes_meets_at_the_first_with_a_token_from_a_file(
    started: Started, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "slurm"
    folder.mkdir()
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_bytes(secrets.token_bytes(32))
    with links.Namespaces(2, "1gbit") as hosts:
        names = "".join(f"{hosts.address(number)} n{number}\n" for number in range(2)) + "127.0.0.1 localhost\n"
        (tmp_path / "hosts").write_text(names)  # where both nodes look up names
        mount = f'mount --bind {tmp_path / "hosts"} /etc/hosts && exec "$@"'
        inside = [
            ["nsenter", f"--net=/run/netns/{hosts.host(number)}", "unshare", "--mount", "sh", "-c", mount, "sh"]
            for number in range(2)
        ]
        with slurm.Cluster(folder, [hosts.address(0), hosts.address(1)], inside) as cluster:
            command = [*inside[0], "srun", "-N", "2", "-n", "4", sys.executable]
            refused, why = started.run(command, "agree.py", **cluster.env)
            code, out = started.run(command, "agree.py", **cluster.env, HORA_TOKEN_FILE=str(token))
    assert refused != 0 and "set HORA_TOKEN_FILE to a file of 32 random bytes" in why
    assert code == 0, out
    assert sorted(re.findall(r"agreed: rank (\d) of 4 under slurm over tcp", out)) == ["0", "1", "2", "3"]
    assert len(re.findall(r"the coordinator listens for other hosts at 10\.83\.0\.1:\d+ \(eth0\)", out)) == 1
