"""Ssh: opens the way to an agent on another host with the user's own ssh and keys, and says in words why it failed.

The command line has no secret in it: token and environment travel on stdin. Nothing is asked on a terminal (BatchMode):
whoever must type a password or confirm a host key does so once, by hand.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

from .host import HostSpec
from .remote_host import RemoteHost

CONNECT_S = 10
OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}")
AGENT = "hora.launch.hosts.agent"


def open_site(host: HostSpec, ssh: str, python: str | None) -> RemoteHost:
    """Starts the agent there, or here if the host is this machine; does not wait for it. ValueError without an ssh."""
    command = [python or sys.executable, "-m", AGENT]
    path = os.pathsep.join(os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)
    if host.is_here:  # how this user came here says nothing about the way to the other hosts
        return _popen(host, command, {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"})
    try:
        words = shlex.split(ssh)
    except ValueError as problem:
        raise ValueError(f"--ssh {ssh!r} is no command: {str(problem).lower()}") from None
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"there is no {words[0] if words else 'ssh'!r} here; install ssh, or say --ssh COMMAND")
    remote = ["exec", *(["env", f"PYTHONPATH={path}"] if path else []), *command]
    return _popen(host, [*words, *OPTIONS, host.target, shlex.join(remote)], dict(os.environ))


def _popen(host: HostSpec, argv: list[str], env: dict[str, str]) -> RemoteHost:
    """In a session of its own: a Ctrl-C is ours to hear and to pass on."""
    try:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as problem:
        raise ValueError(f"{argv[0]} cannot be run: {problem.strerror}") from None
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    there, back, about = (os.dup(pipe.fileno()) for pipe in (process.stdin, process.stdout, process.stderr))
    for pipe in (process.stdout, process.stdin, process.stderr):
        pipe.close()

    def end(patience_s: float) -> None:
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    return RemoteHost(host.name, back, there, about, end)


def explain(host: HostSpec, complaints: list[str], python: str, ssh: str) -> str:
    """Why no agent answered, from what ssh or the shell there said, and the way out."""
    said = " ".join(complaints)
    last = complaints[-1] if complaints else ""
    low = said.lower()
    by_hand = f"{ssh} {host.target}"
    if "host identification has changed" in low:
        return f"its host key is not the one known here: was it installed anew, or is it another machine? ({by_hand})"
    if "host key verification failed" in low or "host key is known" in low:
        return f"its host key is not known here; look at it and connect once by hand: {by_hand}"
    if "permission denied (" in low:  # with the methods that were tried; a shell's own refusal has none
        return f"ssh is not let in ({last}); it must work without a password: ssh-copy-id {host.target}"
    if "could not resolve" in low or "name or service not known" in low:
        return f"there is no such host ({last})"
    for words in ("connection refused", "timed out", "no route to host", "network is unreachable", "connection closed"):
        if words in low:
            return f"it cannot be reached by ssh: {last}"
    if re.search(r"no module named '?hora\b", low):
        return f"its {python} has no Hora; install it there, or say --python PATH"
    if python in last:
        return f"its {python} cannot be run ({last}); say --python PATH"
    return f"no agent answered there{': ' + said if said else ''}; try by hand: {by_hand}"
