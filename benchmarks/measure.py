"""Clocks, memory, bandwidth, and what a row of results has to say about where it comes from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fedkin._base import available_cores
from fedkin.studies.run import processor


def surroundings() -> dict[str, Any]:
    """Return machine, versions and load: part of every row."""
    packages = ("fedkin", "numpy", "scipy", "numba", "cvxpy", "clarabel", "scs", "osqp")
    return {
        "cpu": processor(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "load": round(os.getloadavg()[0], 2),
        "started": round(time.time()),
    }


def version(name: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that one call takes, by the clock."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every repeat, taken in turns, so that a busy machine slows all of them alike."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            found[name].append(seconds_of(work))
    return found


def peak_gigabytes() -> float:
    """Return the most memory that this process ever held."""
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def bandwidth(n_threads: int = 1) -> float:
    """Return bytes per second of ``a = b + c`` on arrays of 160 MB, the best of several runs."""
    a, b, c = (np.ones(20_000_000) for _ in range(3))
    parts = [np.array_split(one, n_threads) for one in (b, c, a)]
    with ThreadPoolExecutor(n_threads) as pool:
        return 3 * a.nbytes / min(seconds_of(lambda: list(pool.map(np.add, *parts))) for _ in range(8))
