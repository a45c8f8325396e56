"""How much of this machine a process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_threads() -> int:
    """Threads for compiled loops: a core each, but no more than ``NUMBA_NUM_THREADS`` says, where that is set."""
    limit = os.environ.get("NUMBA_NUM_THREADS", "")
    return min(available_cores(), max(int(limit), 1)) if limit.isdecimal() else available_cores()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within this context linear algebra stays in the calling thread.

    Matrices of single sites are small: sharing one out among threads takes more processor time than it saves.
    """
    from threadpoolctl import threadpool_limits  # slow to load for those who only read a model

    with threadpool_limits(limits=1, user_api="blas"):
        yield
