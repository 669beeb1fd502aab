"""Turns a forked child into what a newly started `python script.py` would be, and runs the script in it.

These are set as in a new interpreter: process group, descriptors, environment, signal handling, working folder,
`sys.argv`, `sys.path`, `__main__`, random seeds, the command line in /proc. Shared with the fork server is what was
imported before any user code ran. `python` itself decides what a script's end means (exit code, uncaught exception,
atexit, threads), and so it does here: `run` leaves by SystemExit or KeyboardInterrupt out of the top frame.
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

ENV_PLACEHOLDER = {"HORA_ROOM": "-" * 4096}
"""A variable of the fork server. /proc/PID/environ of a child shows in its place the variables that the child adds."""

IMPORT_TIME = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NPY_", "TORCH_", "PYTORCH_", "MALLOC_", "LD_", "PYTHON", "LC_",
    "LANG", "TZ",
)  # fmt: skip
"""Variables with these prefixes are read when an interpreter starts or torch is imported, not later."""

THREADS = "OMP_NUM_THREADS"
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
BLAS_VARIANTS = (("scipy_", "64_"), ("scipy_", ""), ("", ""))  # affixes of OpenBLAS's functions

started_with: dict[str, str] | None = None
"""In a forked process: its variables with these prefixes when the script began."""

_PR_SET_PDEATHSIG = 1
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_libc = ctypes.CDLL(None, use_errno=True)


def import_time(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(IMPORT_TIME)}


def changed_too_late() -> list[str]:
    """Variables that the script has set before its `import torch` and that had been read already."""
    if started_with is None:
        return []
    names = {name for name in (*started_with, *os.environ) if name.startswith(("OMP_", "MKL_", "TORCH_"))}
    return sorted(name for name in names if os.environ.get(name) != started_with.get(name))


# -- the process -------------------------------------------------------------------------------------------------------


def detach(parent: int, descriptors: Sequence[int]) -> list[int]:
    """In a forked child: a new session, killed with its parent, default Ctrl-C handling, and `descriptors` as stdin,
    stdout, stderr and further ones; all others are closed. Returns the numbers of the further ones."""
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


def load_environment(env: Mapping[str, str], cwd: str) -> None:
    """Sets `env` and `cwd`: in os.environ, for getenv() and, in place of the placeholder, in /proc."""
    before = dict(os.environ)
    for name in before.keys() - env.keys():
        del os.environ[name]
    new = {name: value for name, value in env.items() if before.get(name) != value}
    os.environ.update(new)
    _show_environment(new)
    if os.getcwd() != cwd:
        os.chdir(cwd)
    tempfile.tempdir = None  # TMPDIR may have changed


def _show_environment(new: Mapping[str, str]) -> None:
    start, end = _area("env")
    (placeholder,) = (os.fsencode(f"{name}={value}") for name, value in ENV_PLACEHOLDER.items())
    at = ctypes.string_at(start, end - start).find(placeholder)
    if at < 0:
        return
    shown = b""
    for name in sorted(new, key=lambda name: not name.startswith("HORA_")):
        entry = os.fsencode(f"{name}={new[name]}") + b"\0"
        shown += entry if len(shown) + len(entry) <= len(placeholder) else b""
    ctypes.memmove(start + at, shown.ljust(len(placeholder), b"\0"), len(placeholder))


def show_command(argv: Sequence[str]) -> None:
    """Sets what /proc/PID/cmdline, `ps` and `pgrep -f` show, cut to the length of the fork server's command line."""
    start, end = _area("arg")
    if end - start < 2:
        return
    text = os.fsencode(" ".join(argv))[: end - start - 2]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))
    ctypes.memset(end - 1, ord("."), 1)  # a last byte other than zero marks a title to the kernel


def _area(which: str) -> tuple[int, int]:
    """Addresses of this process's arguments (arg) or environment (env); (0, 0) where the kernel does not show them."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        first = {"arg": 45, "env": 47}[which]
        return int(fields[first]), int(fields[first + 1])
    return 0, 0


def end_quickly() -> None:
    """After Python's own finalisation, flushes C's output and ends the process at once. Without this, destroying
    torch's statics would touch, and so copy, most of the memory that is shared with the fork server."""
    if hasattr(_libc, "on_exit") and hasattr(_libc, "fcloseall"):
        _libc.on_exit(_libc._exit, None)  # these run in reverse order, after those of libraries that are loaded later
        _libc.on_exit(_libc.fcloseall, None)


# -- what was imported -------------------------------------------------------------------------------------------------


def reseed() -> None:
    """Seeds torch and NumPy anew, as in a new interpreter. Python's own generator does it at fork."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def set_threads(count: str) -> None:
    """Has the effect of OMP_NUM_THREADS=`count` when torch is imported."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(count))


def set_blas_threads(count: str) -> None:
    """Gives OpenBLAS, which NumPy brings, the threads that it was kept from starting in the fork server."""
    if "numpy" not in sys.modules or not count.isdecimal() or int(count) < 2:
        return
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        for path in {line.split()[-1] for line in maps if "openblas" in line.rpartition("/")[2]}:
            library = ctypes.CDLL(path)
            names = [prefix + "openblas_set_num_threads" + suffix for prefix, suffix in BLAS_VARIANTS]
            if name := next((name for name in names if hasattr(library, name)), ""):
                getattr(library, name)(int(count))


def shadowed(argv: Sequence[str]) -> str:
    """The path of a module in the script's folder whose name was imported from elsewhere already: a new interpreter
    would take the script's own, so the script cannot run in this one. Empty if there is none."""
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
    """Runs `[python, script, …]` or `[python, -m, module, …]` as the interpreter would.

    Raises SystemExit with the exit code, or KeyboardInterrupt if the script did not catch one: the interpreter then
    ends the process by SIGINT, as it always does."""
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
    """What the interpreter puts first in sys.path: the script's folder; for a module, the working folder."""
    if argv[1] == "-m":
        return os.getcwd()
    path = os.path.abspath(argv[1])
    if pkgutil.get_importer(path) is not None:
        return path
    return os.path.dirname(os.path.realpath(path))


def _report(error: BaseException) -> None:
    """Passes an uncaught exception to sys.excepthook, with the script's own frames only."""
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
