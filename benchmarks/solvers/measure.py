"""Clocks, memory, bandwidth, and what a row of results has to say about where it comes from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from pathlib import Path

import numpy as np

from fedkin._base import available_cores


def surroundings() -> dict[str, object]:
    """Machine, versions and load: part of every row."""
    packages = ("fedkin", "numpy", "scipy", "numba", "cvxpy", "clarabel", "scs", "osqp")
    return {
        "cpu": _cpu(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "load": round(os.getloadavg()[0], 2),
        "started": round(time.time()),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def peak_gigabytes() -> float:
    """The most memory that this process ever held."""
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def bandwidth(n_threads: int) -> float:
    """Bytes per second of ``a = b + 3 c`` on arrays of 160 MB, the best of several runs."""
    from concurrent.futures import ThreadPoolExecutor

    from numba import njit

    @njit(nogil=True, fastmath=True)
    def triad(a, b, c, lo, hi):  # type: ignore[no-untyped-def]
        for k in range(lo, hi):
            a[k] = b[k] + 3.0 * c[k]

    n = 20_000_000
    a, b, c = np.zeros(n), np.ones(n), np.ones(n)
    cuts = np.linspace(0, n, n_threads + 1).astype(int)
    triad(a, b, c, 0, 10)
    best = np.inf
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(8):
            start = time.perf_counter()
            list(pool.map(lambda k: triad(a, b, c, cuts[k], cuts[k + 1]), range(n_threads)))
            best = min(best, time.perf_counter() - start)
    return 24.0 * n / best
