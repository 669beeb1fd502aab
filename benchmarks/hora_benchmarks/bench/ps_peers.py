"""The peers of `hora bench ps`: where they live, how they get there, and one measurement of each.

Each has a virtual environment of its own under ~/.cache/hora/peers, so that the project's stays light; where a peer can
be imported here, that one is used instead of none.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

from .process_pool import PoolContestant, ProcessPool, Result

PACKAGES = {"ray": ["ray==2.60.*", "numpy"], "tensorflow": ["tensorflow==2.21.*"]}
MODES = {
    "ray/async": ("ray", {"mode": "async"}),
    "ray/sync": ("ray", {"mode": "sync"}),
    "tensorflow": ("tensorflow", {}),
}
"""What can be measured: which peer does it, and what to ask it for."""


def home() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "hora" / "peers"


def python_of(peer: str) -> str | None:
    """The interpreter that can import this peer: that of its own environment, else this one; None if neither can."""
    folder = home() / peer
    if any(folder.glob(f"lib/python*/site-packages/{peer}/__init__.py")):
        return str(folder / "bin" / "python")
    return sys.executable if importlib.util.find_spec(peer) is not None else None


def how_to_get(peer: str) -> str:
    return f"{peer} is not installed: `hora bench ps --install-peers` puts it into {home() / peer}"


def install(peer: str) -> None:
    """Makes the peer's environment, or brings it up to date. CalledProcessError if pip cannot."""
    if peer not in PACKAGES:
        raise ValueError(f"no peer is called {peer!r}; there are: {', '.join(PACKAGES)}")
    folder = home() / peer
    print(f"installing {' '.join(PACKAGES[peer])} into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PACKAGES[peer]], check=True)
    print(f"{peer} is there", flush=True)


def contestants(names: list[str], workers: int, params: int) -> tuple[list[PoolContestant], list[str]]:
    """Those that are installed, and a sentence for each that is not. One Ray serves both of Ray's modes."""
    found: list[PoolContestant] = []
    missing: dict[str, str] = {}
    pools: dict[str, ProcessPool] = {}
    for name in names:
        if name not in MODES:
            raise ValueError(f"no peer is called {name!r}; there are: {', '.join(MODES)}")
        peer, request = MODES[name]
        python = python_of(peer)
        if python is None:
            missing[peer] = how_to_get(peer)
            continue
        if peer not in pools:
            script = pathlib.Path(__file__).with_name(f"ps_{peer}.py")
            pools[peer] = ProcessPool(peer, [[python, str(script), str(workers), str(params)]])
        found.append(PoolContestant(name=name, pool=pools[peer], workers=workers, params=params, request=dict(request)))
    return found, list(missing.values())


def measure(name: str, workers: int, params: int, seconds: float) -> Result:
    """One measurement in processes of its own. RuntimeError where the peer is not installed, or fails."""
    found, missing = contestants([name], workers, params)
    if missing:
        raise RuntimeError(missing[0])
    (one,) = found
    try:
        one.start()
        return one.measure(seconds)
    finally:
        one.stop()
