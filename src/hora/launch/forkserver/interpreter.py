"""Interpreter: makes a forked child what a newly started `python script.py` would be, and runs the script in it.

What a new interpreter has of its own is made anew here: process group, descriptors, environment, signal handling,
working folder, `sys.argv`, `sys.path`, `__main__`, random seeds, the command line in /proc. What it shares with the
fork server is what was imported before any user code ran. `python` itself decides what a script's end means (exit
code, uncaught exception, atexit, threads), and so it does here: `run` leaves by SystemExit or KeyboardInterrupt out of
the top frame.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib.machinery
import io
import os
import pkgutil
import signal
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

ROOM = {"HORA_ROOM": "-" * 4096}
"""A variable of the fork server: /proc/PID/environ of its children shows in its place what else is in theirs."""

IMPORT_TIME = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "NPY_",
    "TORCH_",
    "PYTORCH_",
    "MALLOC_",
    "LD_",
    "PYTHON",
    "LC_",
    "LANG",
    "TZ",
)
"""Variables that begin so are read when an interpreter starts or torch is imported, not later."""

THREADS = "OMP_NUM_THREADS"
BLAS_THREADS = "OPENBLAS_NUM_THREADS"

started_with: dict[str, str] | None = None
"""In a forked process: its variables of that kind when the script began."""

_PR_SET_PDEATHSIG = 1
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_libc = ctypes.CDLL(None, use_errno=True)


def import_time(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(IMPORT_TIME)}


def changed_too_late() -> list[str]:
    """Variables that the script has set for a torch that was still to be imported, and that had been already."""
    if started_with is None:
        return []
    names = {name for name in (*started_with, *os.environ) if name.startswith(("OMP_", "MKL_", "TORCH_"))}
    return sorted(name for name in names if os.environ.get(name) != started_with.get(name))


# -- the process -------------------------------------------------------------------------------------------------------


def detach(parent: int, descriptors: Sequence[int]) -> list[int]:
    """In a forked child: a session of its own, an end with its parent's, Ctrl-C as usual, and `descriptors` as
    stdin, stdout, stderr and whatever comes after; no others. Returns the numbers of those that come after."""
    os.setsid()
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = []
    for number, descriptor in enumerate(descriptors):
        if number < 3:
            os.dup2(descriptor, number, inheritable=True)
        else:
            os.set_inheritable(descriptor, True)
            wanted.append(descriptor)
    for descriptor in _open_descriptors():
        if descriptor > 2 and descriptor not in wanted:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    return wanted


def end_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _open_descriptors() -> list[int]:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir(folder)]
    return list(range(256))


def adopt_environment(env: Mapping[str, str], cwd: str) -> None:
    """`env` and `cwd` become the process's own: in os.environ, for getenv() and, at placeholders, in /proc."""
    before = dict(os.environ)
    for name in before.keys() - env.keys():
        del os.environ[name]
    new = {name: value for name, value in env.items() if before.get(name) != value}
    os.environ.update(new)
    _show_environment(new)
    if os.getcwd() != cwd:
        os.chdir(cwd)
    tempfile.tempdir = None  # TMPDIR may be another


def _show_environment(new: Mapping[str, str]) -> None:
    start, end = _area("env")
    (room,) = (os.fsencode(f"{name}={value}") for name, value in ROOM.items())
    at = ctypes.string_at(start, end - start).find(room)
    if at < 0:
        return
    shown = b""
    for name in sorted(new, key=lambda name: not name.startswith("HORA_")):
        entry = os.fsencode(f"{name}={new[name]}") + b"\0"
        shown += entry if len(shown) + len(entry) <= len(room) else b""
    ctypes.memmove(start + at, shown.ljust(len(room), b"\0"), len(room))


def show_command(argv: Sequence[str]) -> None:
    """What /proc/PID/cmdline, and so `ps` and `pgrep -f`, show. It has as much room as the fork server's own had."""
    start, end = _area("arg")
    if end - start < 2:
        return
    text = os.fsencode(" ".join(argv))[: end - start - 2]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))
    ctypes.memset(end - 1, ord("."), 1)  # an end that is not zero tells the kernel that this is a title


def _area(which: str) -> tuple[int, int]:
    """Where the kernel finds arguments (arg) or environment (env) of this process; (0, 0) where it does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        first = {"arg": 45, "env": 47}[which]
        return int(fields[first]), int(fields[first + 1])
    return 0, 0


def end_quickly() -> None:
    """At the very end, after Python's own finalisation, output is flushed and the process is over. Without this it
    would first touch, and so copy, most of the memory that it shares with the fork server, to destroy torch's statics.
    """
    if hasattr(_libc, "on_exit") and hasattr(_libc, "fcloseall"):
        _libc.on_exit(_libc._exit, None)  # these run in reverse order, after those of libraries that are loaded later
        _libc.on_exit(_libc.fcloseall, None)


# -- what was imported -------------------------------------------------------------------------------------------------


def reseed() -> None:
    """Random numbers as a new interpreter has them: every process its own. Python's own generator does it at fork."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def set_threads(count: str) -> None:
    """As OMP_NUM_THREADS=`count` would have, had it been there when torch was imported."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(count))


def set_blas_threads(count: str) -> None:
    """The fork server keeps OpenBLAS, which NumPy brings, from starting threads; a process may have as many as it would
    have had by itself."""
    if "numpy" not in sys.modules or not count.isdecimal() or int(count) < 2:
        return
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        for path in {line.split()[-1] for line in maps if "openblas" in line.rpartition("/")[2]}:
            library = ctypes.CDLL(path)
            for name in (
                "scipy_openblas_set_num_threads64_",
                "scipy_openblas_set_num_threads",
                "openblas_set_num_threads",
            ):
                if hasattr(library, name):
                    getattr(library, name)(int(count))
                    break


def shadowed(argv: Sequence[str]) -> str:
    """A module that was imported already and that the script's own folder has too: a new interpreter would take that
    one, so this process cannot be forked. Empty if there is none."""
    folder = _first_path(argv)
    try:
        there = {name.partition(".")[0]: name for name in os.listdir(folder or ".")}
    except OSError:
        return ""
    for module in list(sys.modules):
        if module in there and module != "__main__" and not _is_from(sys.modules[module], folder):
            name = there[module]
            if name.endswith((".py", ".so")) or os.path.exists(os.path.join(folder, name, "__init__.py")):
                return os.path.join(folder, name)
    return ""


def _is_from(module: Any, folder: str) -> bool:
    path = getattr(module, "__file__", None)
    if path is None:
        return module.__name__ in sys.builtin_module_names
    return os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)


# -- the script --------------------------------------------------------------------------------------------------------


def run(argv: Sequence[str]) -> NoReturn:
    """Runs `[python, script, …]` or `[python, -m, module, …]` as the interpreter would, to its end.

    SystemExit carries the exit code. KeyboardInterrupt means that the script let one pass: the interpreter, which gets
    it, ends the process by SIGINT, as it always does."""
    sys.orig_argv = list(argv)
    show_command(argv)
    try:
        _execute(argv)
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None
            raise KeyboardInterrupt from None
        raise SystemExit(1) from None
    raise SystemExit(0)


def _execute(argv: Sequence[str]) -> None:
    import runpy

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    first = _first_path(argv)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, first)
    if argv[1] == "-m":
        sys.argv = list(argv[2:])
        runpy._run_module_as_main(argv[2])  # type: ignore[attr-defined]
        return
    sys.argv = list(argv[1:])
    if first == os.path.abspath(argv[1]):  # a folder or a zip file, with a __main__ in it
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    path = os.path.abspath(argv[1])
    if path.endswith(".pyc"):
        loader: Any = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, main.__dict__)


def _first_path(argv: Sequence[str]) -> str:
    """What the interpreter puts first in sys.path: the script's folder; of a module, the working folder."""
    if argv[1] == "-m":
        return os.getcwd()
    path = os.path.abspath(argv[1])
    if pkgutil.get_importer(path) is not None:
        return path
    return os.path.dirname(os.path.realpath(path))


def _report(error: BaseException) -> None:
    """An uncaught exception, to whoever is the script's excepthook, with the script's own frames only."""
    trace = _without_ours(error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit:
        raise
    except BaseException as second:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(second), second, second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)
    sys.stderr.flush()


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return trace
