"""How much of this machine a process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_threads() -> int:
    """Threads for compiled loops: a core each, but no more than ``NUMBA_NUM_THREADS`` says, where that is set."""
    limit = os.environ.get("NUMBA_NUM_THREADS", "")
    return min(available_cores(), max(int(limit), 1)) if limit.isdecimal() else available_cores()
