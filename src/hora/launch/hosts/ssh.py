"""Starts the agent of a host by the user's own ssh and keys, and explains why ssh failed.

The command line has no secret in it: token and environment are sent on stdin. ssh never prompts (BatchMode): passwords
and host keys must be settled once by hand.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

from .host_spec import HostSpec
from .remote_host import RemoteHost

CONNECT_S = 10
OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}")
AGENT = "hora.launch.hosts.agent"


def open_host(host: HostSpec, ssh: str, python: str | None) -> RemoteHost:
    """Starts the agent on the host, without ssh if that is this machine. Does not wait. ValueError without an ssh."""
    command = [python or sys.executable, "-m", AGENT]
    path = os.pathsep.join(os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)
    if host.is_here:  # how this user logged in here says nothing about the route to the other hosts
        return _popen(host, command, {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"})
    try:
        words = shlex.split(ssh)
    except ValueError as problem:
        raise ValueError(f"--ssh {ssh!r} is not a command: {str(problem).lower()}") from None
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"{words[0] if words else 'ssh'!r} was not found here; install ssh, or use --ssh COMMAND")
    remote = ["exec", *(["env", f"PYTHONPATH={path}"] if path else []), *command]
    return _popen(host, [*words, *OPTIONS, host.target, shlex.join(remote)], dict(os.environ))


def _popen(host: HostSpec, argv: list[str], env: dict[str, str]) -> RemoteHost:
    """In a session of its own, so that Ctrl-C reaches the launcher only."""
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
    write_fd, read_fd, err_fd = (os.dup(pipe.fileno()) for pipe in (process.stdin, process.stdout, process.stderr))
    for pipe in (process.stdout, process.stdin, process.stderr):
        pipe.close()

    def end(timeout_s: float) -> None:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    return RemoteHost(host.name, read_fd, write_fd, err_fd, end)


def explain(host: HostSpec, error_lines: list[str], python: str, ssh: str) -> str:
    """Why no agent answered, from the error output of ssh and the remote shell, and what to do."""
    said = " ".join(error_lines)
    last = error_lines[-1] if error_lines else ""
    low = said.lower()
    by_hand = f"{ssh} {host.target}"
    if "host identification has changed" in low:
        return f"its host key is not the one known here: was it installed anew, or is it another machine? Try {by_hand}"
    if "host key verification failed" in low or "host key is known" in low:
        return f"its host key is not known here; check it and connect once by hand: {by_hand}"
    if "permission denied (" in low:  # ssh lists the methods that it tried; a shell does not
        return f"ssh was denied ({last}); it must work without a password: ssh-copy-id {host.target}"
    if "could not resolve" in low or "name or service not known" in low:
        return f"no such host ({last})"
    for words in ("connection refused", "timed out", "no route to host", "network is unreachable", "connection closed"):
        if words in low:
            return f"it cannot be reached by ssh: {last}"
    if re.search(r"no module named '?hora\b", low):
        return f"its {python} has no Hora; install it there, or use --python PATH"
    if python in last:
        return f"its {python} cannot be run ({last}); use --python PATH"
    return f"no agent answered there{': ' + said if said else ''}; try by hand: {by_hand}"
