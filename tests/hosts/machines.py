"""Machines: namespaces of this one, each with its own address, processes, name, /tmp and sshd, joined by shaped links.

        a (10.83.0.1) ── veth ──┐
        b (10.83.0.2) ── veth ──┼── bridge, in a namespace of its own
        c (10.83.0.3) ── veth ──┘

What they share are the files outside of /tmp, and the folder of the test: a home directory on a network disk. They see
neither each other's processes nor each other's memory, so that whoever is watched must be watched from its own host.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from hora_benchmarks.bench import links

SSHD = "/usr/sbin/sshd"
REPOSITORY = pathlib.Path(__file__).parents[2]
SCRIPTS = pathlib.Path(__file__).parent / "scripts"
START_S = 20.0
RUN_S = 120.0


def obstacle() -> str:
    """Why there can be no such machines here; empty if there can."""
    for tool in ("ssh", "ssh-keygen", "unshare", "nsenter", "setpriv"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not os.path.exists(SSHD):
        return f"{SSHD} is missing (Debian: apt-get install openssh-server)"
    if problem := links.obstacle():
        return f"no network namespaces here: {problem}"
    tried = subprocess.run(
        ["unshare", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "true"], capture_output=True, text=True
    )
    return f"no namespaces of processes here: {tried.stderr.strip()}" if tried.returncode else ""


class Machines:
    """A context manager; after it nothing is left of them, whatever happened.

    `before` are lines of shell by machine, run on it before its sshd starts: mounts are its own. `sshd` are lines of
    its sshd's configuration.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        size: int = 2,
        *,
        before: Mapping[str, Sequence[str]] | None = None,
        sshd: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.folder = folder
        self.names = [chr(ord("a") + number) for number in range(size)]
        self.config = folder / "ssh_config"
        self.state = folder / "state"
        self._before = before or {}
        self._sshd = sshd or {}
        self._links = links.Namespaces(size, "1gbit")
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}
        self._roots: dict[str, int] = {}  # the first process of each machine, as this one counts them
        self._runs: list[Run] = []
        drop = re.compile(r"HORA_|OMP_NUM_THREADS|NO_COLOR|RANK|WORLD_SIZE|SSH_")
        self.env = {key: value for key, value in os.environ.items() if not drop.match(key)}
        self.env |= {
            "XDG_STATE_HOME": str(self.state),
            "HORA_DASHBOARD": "off",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TMPDIR": "/tmp",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def __enter__(self) -> Machines:
        self._links.__enter__()
        try:
            os.makedirs("/run/sshd", exist_ok=True)
            self._make_keys()
            for name in self.names:
                self._start(name)
            for name in self.names:
                self._wait(name)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def address(self, name: str) -> str:
        return self._links.address(self.names.index(name))

    def hosts(self, slots: int) -> str:
        """All machines with so many slots each, as --hosts takes them."""
        return ",".join(f"{name}:{slots}" for name in self.names)

    # -- what runs on them -------------------------------------------------------------------------------------------

    def hora(self, *arguments: object, limit_s: float = RUN_S, **settings: object) -> Run:
        """Runs `hora …` on the first machine to its end."""
        run = self.start(*arguments, **settings)  # type: ignore[arg-type]
        run.end(limit_s)
        return run

    def start(
        self,
        *arguments: object,
        ssh: str | None = None,
        cwd: pathlib.Path = SCRIPTS,
        on: str = "a",
        env: Mapping[str, str] | None = None,
    ) -> Run:
        """`hora ARGUMENTS` on a machine; `run` knows its ssh by HORA_SSH."""
        environment = {**self.env, "HORA_SSH": ssh or f"ssh -F {self.config}", **(env or {})}
        command = [sys.executable, "-m", "hora.cli.main", *map(str, arguments)]
        run = Run(["nsenter", *self._entrance(on), "env", "-C", str(cwd), *command], environment)
        self._runs.append(run)
        return run

    def call(self, *command: str, on: str = "a") -> subprocess.CompletedProcess[str]:
        """Any program on a machine."""
        return subprocess.run(
            ["nsenter", *self._entrance(on), *command],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            stdin=subprocess.DEVNULL,
        )

    def cut(self, name: str) -> None:
        """The machine's cable is pulled. It and its processes live on."""
        _call("ip", "-n", self._host(name), "link", "set", links.DEVICE, "down")

    def mend(self, name: str) -> None:
        """The cable is back."""
        _call("ip", "-n", self._host(name), "link", "set", links.DEVICE, "up")

    # -- what is left of it ------------------------------------------------------------------------------------------

    def alive(self, *names: str) -> dict[int, str]:
        """The processes on these machines, all without names, by their command lines; not those of sshd."""
        spaces = {os.readlink(f"/proc/{self._roots[name]}/ns/pid") for name in names or self.names}
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") in spaces:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line and not re.match(r"(/usr/sbin/)?sshd\b", line):
                        found[int(entry.name)] = line
        return found

    def wait_until_nobody(self, *names: str, limit_s: float) -> dict[int, str]:
        """Who is still alive after `limit_s`; returns early when nobody is."""
        deadline = time.monotonic() + limit_s
        while (alive := self.alive(*names)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return alive

    def ranks(self, name: str, script: str) -> dict[int, int]:
        """The workers' processes on that machine by their rank, as this one counts processes."""
        found = {}
        for pid, line in self.alive(name).items():
            with contextlib.suppress(OSError):
                words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                env = dict(word.partition("=")[::2] for word in words)
                if script in line and "HORA_RANK" in env and env.get("HORA_ROLE", "worker") == "worker":
                    found[int(env["HORA_RANK"])] = pid
        return found

    def agents(self, name: str) -> list[int]:
        """The agent itself, without the shell that may have started it."""
        alive = self.alive(name).items()
        return sorted(pid for pid, line in alive if re.match(r"\S*python\S* (\S+ )*-m hora\.launch\S*\bagent", line))

    def residue(self) -> list[str]:
        """Files that somebody left in the machines' own /tmp and /dev/shm."""
        found = []
        for name in self.names:
            for place in ("tmp", "dev/shm"):
                for file in os.listdir(f"/proc/{self._roots[name]}/root/{place}"):
                    path = pathlib.Path("/", place, file)
                    shared = any(path in (part, *part.parents) for part in self._shared())
                    if not shared and not file.startswith("torchinductor_"):
                        found.append(f"{name}:{path}")
        return found

    # -- how they are made -------------------------------------------------------------------------------------------

    def _host(self, name: str) -> str:
        return self._links.host(self.names.index(name))

    def _entrance(self, name: str) -> list[str]:
        return ["--target", str(self._roots[name]), "--net", "--pid", "--mount", "--uts", "--ipc"]

    def _shared(self) -> list[pathlib.Path]:
        """What would be hidden by a /tmp of its own but is common to all machines."""
        wanted = [self.folder, REPOSITORY, pathlib.Path(sys.prefix), pathlib.Path(sys.base_prefix)]
        return [path.resolve() for path in wanted if path.resolve().is_relative_to("/tmp")]

    def _make_keys(self) -> None:
        for key in ("user", *self.names):
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", str(self.folder / f"key-{key}"))
        known = [f"{self.address(name)} {(self.folder / f'key-{name}.pub').read_text()}" for name in self.names]
        (self.folder / "known_hosts").write_text("".join(known))
        self.configure(self.config)

    def configure(self, path: pathlib.Path, **options: object) -> None:
        """Writes a client's configuration, with options of its own, say Port=22."""
        own = {
            "IdentityFile": self.folder / "key-user",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self.folder / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
        }
        lines = [f"Host {name}\n  HostName {self.address(name)}\n" for name in self.names]
        lines += ["Host *\n", *(f"  {key} {value}\n" for key, value in (own | options).items())]
        path.write_text("".join(lines))

    def _start(self, name: str) -> None:
        config = self.folder / f"sshd-{name}"
        said = {
            "ListenAddress": self.address(name),
            "HostKey": self.folder / f"key-{name}",
            "AuthorizedKeysFile": self.folder / "key-user.pub",
            "PidFile": self.folder / f"sshd-{name}.pid",
            "StrictModes": "no",
            "UsePAM": "no",
            "UseDNS": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
        }
        lines = [*(f"{key} {value}" for key, value in said.items()), *self._sshd.get(name, ())]
        config.write_text("\n".join(lines) + "\n")
        shared = [shlex.quote(str(path)) for path in self._shared()]
        script = [
            "set -e",
            f"hostname machine-{name}",
            "mount -t tmpfs tmpfs /dev/shm",
            "mount -t tmpfs tmpfs /mnt",
            *(f"mkdir /mnt/{number}; mount --bind {path} /mnt/{number}" for number, path in enumerate(shared)),
            "mount -t tmpfs tmpfs /tmp",
            *(f"mkdir -p {path}; mount --bind /mnt/{number} {path}" for number, path in enumerate(shared)),
            "umount --lazy /mnt",
            *self._before.get(name, ()),
            f"exec {SSHD} -D -E {self.folder}/sshd-{name}.log -f {config}",
        ]
        tied = ["setpriv", "--pdeathsig", "KILL"]  # to this process, however it ends
        own = ["unshare", "--pid", "--uts", "--ipc", "--mount-proc", "--fork", "--kill-child"]
        self._sshds[name] = subprocess.Popen(
            [*tied, "ip", "netns", "exec", self._host(name), *own, "sh", "-c", "\n".join(script)],
            env={key: value for key, value in self.env.items() if key in ("PATH", "HOME", "LANG")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / f"machine-{name}.err").open("wb"),
        )

    def _wait(self, name: str) -> None:
        deadline = time.monotonic() + START_S
        log = self.folder / f"sshd-{name}.log"
        while not (log.exists() and "Server listening" in log.read_text()):
            ended = self._sshds[name].poll()
            if ended is not None or time.monotonic() > deadline:
                said = (self.folder / f"machine-{name}.err").read_text() + (log.read_text() if log.exists() else "")
                raise RuntimeError(f"machine {name} did not start: {said.strip() or ended}")
            time.sleep(0.02)
        self._roots[name] = _child(self._sshds[name].pid)

    def _end(self) -> None:
        for run in self._runs:
            run.kill()
        for name, sshd in self._sshds.items():
            if name in self._roots and sshd.poll() is None:
                os.kill(self._roots[name], signal.SIGKILL)  # with a machine's first process go all others
            else:
                sshd.kill()
        for sshd in self._sshds.values():
            sshd.wait(timeout=START_S)
        self._links.__exit__(None, None, None)


class Run:
    """A `hora` that goes on. Both its streams are read as it writes, and each line has its time."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=_as_from_a_terminal,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._times: list[tuple[float, str]] = []
        self._news = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self._process.stdout, self.out), (self._process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """The launcher's, as this machine counts: what was started first only waits for it."""
        return _child(self._process.pid)

    @property
    def code(self) -> int:
        code = self._process.returncode
        assert code is not None, f"it still runs; {self}"
        return code

    @property
    def stdout(self) -> str:
        return "\n".join(self.out)

    @property
    def stderr(self) -> str:
        return "\n".join(self.err)

    def __repr__(self) -> str:
        return f"exit code {self._process.poll()}\n-- stdout:\n{self.stdout}\n-- stderr:\n{self.stderr}\n"

    def wait_for(self, *wanted: str, limit_s: float = 60.0) -> float:
        """Until each pattern was found in a line; the time at which the last of them was."""
        deadline = time.monotonic() + limit_s
        with self._news:
            while True:
                found = [next((at for at, line in self._times if re.search(w, line)), None) for w in wanted]
                if None not in found:
                    return max(at for at in found if at is not None)
                missing = [text for text, at in zip(wanted, found, strict=True) if at is None]
                over = time.monotonic() > deadline or not any(reader.is_alive() for reader in self._readers)
                assert not over, f"{missing} was not said; {self}"
                self._news.wait(0.1)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, limit_s: float = RUN_S) -> int:
        """Waits for it; the exit code."""
        try:
            self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it did not end within {limit_s} s; {self}") from None
        for reader in self._readers:
            reader.join(timeout=5.0)  # somebody whom it left may hold the pipe
        return self.code

    def kill(self) -> None:
        with contextlib.suppress(OSError, IndexError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(timeout=20)

    def _read(self, stream: Iterator[str], lines: list[str]) -> None:
        for line in stream:
            with self._news:
                lines.append(line.rstrip("\n"))
                self._times.append((time.monotonic(), line))
                self._news.notify_all()


def _as_from_a_terminal() -> None:
    """The suite may run under nohup or in the background, and ignored signals are inherited."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _child(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
