"""mpirun over namespaces: it runs on host 0, and reaches the others through an agent in the place of ssh.

    mpirun (host 0) ── agent 10.83.0.2 "orted …" ── ip netns exec host1 … orted ── rank 1

Each namespace gets a host name of its own, else Open MPI would take them all for one host.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import stat

from . import links

RING = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4")


def command(where: links.Namespaces, folder: str, num_hosts: int, options: tuple[str, ...] = ()) -> list[str]:
    """What the command line of one rank on each host begins with; the program follows. `folder` keeps the agent."""
    agent = pathlib.Path(folder) / "agent"
    agent.write_text(agent_text(where, num_hosts))
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    hosts = ",".join(f"{where.address(number)}:1" for number in range(num_hosts))
    words = ["mpirun", "-n", str(num_hosts), "--host", hosts, "--bind-to", "none", *options]
    if os.getuid() == 0:
        words.append("--allow-run-as-root")
    settings = {
        "plm_rsh_agent": str(agent),
        "plm_rsh_no_tree_spawn": "1",  # hosts cannot resolve each other
        "btl": "tcp,self",
        "btl_tcp_if_include": links.DEVICE,
        "oob_tcp_if_include": links.DEVICE,
        "mpi_yield_when_idle": "1",  # it takes each host's core for its own, and they are the same few
    }
    for name, value in settings.items():
        words += ["--mca", name, value]
    return [*_inside(where.host(0)), *words]


def agent_text(where: links.Namespaces, num_hosts: int) -> str:
    """A script that is called as ssh would be: a host, and what to run there."""
    cases = [
        f'  {where.address(n)}) set -- {shlex.join(_inside(where.host(n)))} sh -c "$2" ;;' for n in range(num_hosts)
    ]
    return "\n".join(
        [
            "#!/bin/sh",
            'host=$1; shift; set -- "$host" "$*"',
            'case "$host" in',
            *cases,
            '  *) echo "no host $host here" >&2; exit 1 ;;',
            "esac",
            'exec "$@"',
            "",
        ]
    )


def _inside(host: str) -> list[str]:
    """What a command on that host begins with."""
    return ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', host]
