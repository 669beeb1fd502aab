"""What cannot work on several machines is refused before any rank starts: one line, the host, the way out, code 2."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import hora
from hora.runs import exit_codes

from .conftest import Make
from .machines import REPOSITORY, SCRIPTS, Machines, Run

pytestmark = [pytest.mark.timeout(120), pytest.mark.full]

SCRIPT = "places.py"


def refused(run: Run, *words: str) -> None:
    assert run.code == exit_codes.USAGE, run
    assert not run.out and len(run.err) == 1, run
    assert run.err[0].startswith("hora run: "), run
    for word in words:
        assert word in run.err[0], run


def under(those: Machines, *options: object, hosts: str = "a,b", **settings: object) -> Run:
    return those.hora("run", "--hosts", hosts, *options, SCRIPT, limit_s=60, **settings)


def test_without_an_ssh_it_says_so(machines: Make) -> None:
    refused(under(machines(), ssh="no-such-ssh -v"), "no-such-ssh", "--ssh")


def test_an_unknown_host_key_is_not_accepted_for_the_user(machines: Make, tmp_path: pathlib.Path) -> None:
    those = machines()
    config = tmp_path / "strangers"
    (tmp_path / "known_a").write_text((tmp_path / "known_hosts").read_text().splitlines()[0] + "\n")
    those.configure(config, UserKnownHostsFile=tmp_path / "known_a")
    refused(under(those, ssh=f"ssh -F {config}"), "host b: its host key is not known", "by hand", f"ssh -F {config} b")
    assert len((tmp_path / "known_a").read_text().splitlines()) == 1


def test_a_host_key_that_has_changed_is_not_called_unknown(machines: Make, tmp_path: pathlib.Path) -> None:
    those = machines()
    config = tmp_path / "changed"
    first, second = (tmp_path / "known_hosts").read_text().splitlines()
    other = first.replace("10.83.0.1 ", "10.83.0.2 ")
    assert other.split()[0] == second.split()[0]
    (tmp_path / "known_other").write_text(f"{first}\n{other}\n")
    those.configure(config, UserKnownHostsFile=tmp_path / "known_other")
    refused(under(those, ssh=f"ssh -F {config}"), "host b: its host key is not the one known")


def test_an_address_where_nobody_is_is_named(machines: Make) -> None:
    refused(under(machines(), hosts="a,10.83.0.77"), "host 10.83.0.77", "reached")


def test_a_name_that_nobody_knows_is_named(machines: Make) -> None:
    refused(under(machines(), hosts="a,nowhere.invalid"), "host nowhere.invalid", "no such host")


def test_a_refused_connection_is_named(machines: Make, tmp_path: pathlib.Path) -> None:
    those = machines()
    config = tmp_path / "ports"
    those.configure(config)
    config.write_text(f"Host b\n  Port 2222\n{config.read_text()}")
    refused(under(those, ssh=f"ssh -F {config}"), "host b", "refused", "2222")


def test_who_is_not_let_in_is_told_what_must_work(machines: Make, tmp_path: pathlib.Path) -> None:
    those = machines(sshd={"b": ["AllowUsers nobody"]})
    refused(under(those), "host b", "ermission denied", "password")


def test_a_host_listed_twice_is_refused(machines: Make) -> None:
    refused(under(machines(1), hosts="a:2,a:1"), "'a' is listed twice", "a:2")


def test_the_same_machine_by_two_names_is_refused_or_runs(machines: Make) -> None:
    """Its name and its address: no run may wait forever for itself."""
    those = machines()
    run = under(those, hosts="a,10.83.0.1")
    assert run.code in (exit_codes.OK, exit_codes.USAGE), run


def test_more_ranks_than_slots_are_refused(machines: Make) -> None:
    refused(under(machines(), "-n", 5, hosts="a:2,b:2"), "-n 5", "4")


def test_a_script_that_is_missing_on_one_host_is_named(machines: Make, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / SCRIPT).write_text((SCRIPTS / SCRIPT).read_text())
    those = machines(before={"b": [f"mount -t tmpfs tmpfs {folder}"]})
    refused(under(those, cwd=folder), "host b", SCRIPT, str(folder))


def test_a_folder_that_is_missing_on_one_host_is_named(machines: Make, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "outer" / "project"
    folder.mkdir(parents=True)
    (folder / SCRIPT).write_text((SCRIPTS / SCRIPT).read_text())
    those = machines(before={"b": [f"mount -t tmpfs tmpfs {folder.parent}"]})
    refused(under(those, cwd=folder), "host b", str(folder))


def test_a_module_that_is_missing_on_one_host_is_named(machines: Make, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "project"
    (folder / "pack").mkdir(parents=True)
    (folder / "pack" / "__init__.py").touch()
    (folder / "pack" / "places.py").write_text((SCRIPTS / SCRIPT).read_text())
    those = machines(before={"b": [f"mount -t tmpfs tmpfs {folder / 'pack'}"]})
    run = those.hora("run", "--hosts", "a,b", "-m", "pack.places", cwd=folder)
    refused(run, "host b", "pack.places")


@pytest.mark.parametrize("mode", ["missing", "not executable"])
def test_a_python_that_cannot_be_run_there_is_named(machines: Make, tmp_path: pathlib.Path, mode: str) -> None:
    python = tmp_path / "Python3"
    if mode == "not executable":
        python.touch()
    refused(under(machines(), "--python", python), "host ", str(python), "--python")


def test_a_python_without_hora_is_named(machines: Make, tmp_path: pathlib.Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 -I "$@"\n')
    python.chmod(0o755)
    refused(under(machines(), "--python", python, hosts="b"), "host b", "Hora", str(python))


def other_version(package: str, folder: pathlib.Path) -> list[str]:
    """Lines of shell after which this package is of version 0.0.7 on a machine."""
    lines = []
    (metadata,) = pathlib.Path(sys.prefix).glob(f"lib/python*/site-packages/{package}-*.dist-info/METADATA")
    modules = {"torch": metadata.parents[1] / "torch" / "version.py", "hora": REPOSITORY / "src/hora/__init__.py"}
    for number, path in enumerate((metadata, modules[package])):
        changed = re.sub(r"(?m)^(Version: |__version__ = ['\"])[^'\"\n]+", r"\g<1>0.0.7", path.read_text())
        assert "0.0.7" in changed
        other = folder / f"other-{package}-{number}"
        other.write_text(changed)
        lines.append(f"mount --bind {other} {shlex.quote(str(path))}")
    return lines


@pytest.mark.parametrize("package", ["torch", "hora"])
def test_another_version_on_one_host_is_named(machines: Make, tmp_path: pathlib.Path, package: str) -> None:
    those = machines(3, before={"b": other_version(package, tmp_path)})
    run = under(those, hosts="a,b,c")
    refused(run, "host b", package, "0.0.7")
    assert (hora.__version__ if package == "hora" else "2.") in run.err[0]


def test_another_python_on_one_host_is_named(machines: Make, tmp_path: pathlib.Path) -> None:
    """Its modules are this one's; only what it says of itself differs."""
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.python_version = lambda: '3.77.1'\n")
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\n[ $(hostname) = machine-b ] && export PYTHONPATH={tmp_path}:$PYTHONPATH\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    refused(under(machines(), "--python", python), "host b", "3.77")


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, at);
    if (id == CLOCK_REALTIME) at->tv_sec += 70;
    return result;
}
"""


def test_clocks_apart_are_said_and_the_run_goes_on(machines: Make, tmp_path: pathlib.Path) -> None:
    (tmp_path / "clock.c").write_text(CLOCK)
    made = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "clock.so"), str(tmp_path / "clock.c"), "-ldl"]
    try:
        subprocess.run(made, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler to make a clock with")
    those = machines(3, sshd={"b": [f"SetEnv LD_PRELOAD={tmp_path / 'clock.so'}"]})
    run = under(those, hosts="a,b,c")
    assert run.code == exit_codes.OK, run
    said = [line for line in run.err if "clock" in line]
    assert len(said) == 1 and "host b" in said[0], run
    (seconds,) = re.findall(r"([\d.]+) s", said[0])
    assert 60 < float(seconds) < 80 and "ahead" in said[0]


def test_a_shell_that_talks_before_commands_is_named(machines: Make, tmp_path: pathlib.Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("echo welcome to this machine\n")
    those = machines(before={"b": [f"mount --bind {home} $HOME"]})
    refused(under(those), "host b")


def test_an_interface_that_a_host_does_not_have_is_named(machines: Make) -> None:
    refused(under(machines(), "--interface", "eth7"), "eth7")


@pytest.mark.parametrize("wanted", ["eth0", "10.83.0.0/24"])
def test_the_interface_may_be_chosen(machines: Make, wanted: str) -> None:
    run = under(machines(), "--interface", wanted)
    assert run.code == exit_codes.OK, run
    assert any("2 hosts" in line and "eth0" in line for line in run.err), run


def test_hosts_that_do_not_reach_each_other_are_named_with_the_address(machines: Make) -> None:
    """Both are reached from the launcher's; between them nothing passes."""
    wall = "ip route add blackhole 10.83.0.3/32"
    those = machines(3, before={"b": [wall]})
    refused(under(those, hosts="a,b,c"), "host b", "10.83.0.3")
