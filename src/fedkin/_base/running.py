"""Run work: cores and threads, waits with an end, and loops that report their progress."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from threadpoolctl import threadpool_limits

T = TypeVar("T")

#: ``say(text)`` reports what is being done.
Say = Callable[[str], None]
#: ``listener(text, done, total)``: called before every turn of a loop and once after the last.
Listener = Callable[[str, int, int], None]

logger = logging.getLogger("fedkin")
logger.addHandler(logging.NullHandler())

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_threads() -> int:
    """Return the number of threads for compiled loops: one per core, at most ``NUMBA_NUM_THREADS`` where it is set."""
    limit = os.environ.get("NUMBA_NUM_THREADS", "")
    return min(available_cores(), max(int(limit), 1)) if limit.isdecimal() else available_cores()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keep linear algebra in the calling thread: matrices of single sites are too small to share out."""
    with threadpool_limits(limits=1, user_api="blas"):
        yield


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Report every `tracked` loop within this context to ``listener``."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def tracked(items: Sequence[T], text: str) -> Iterator[T]:
    """Iterate over the items and report how many are done.

    The logger ``fedkin`` has a line for every loop, at the level INFO, and one for every turn at DEBUG.

    Examples
    --------
    >>> from fedkin._base import listening, tracked
    >>> with listening(lambda text, done, total: print(f"{text}: {done} of {total}")):
    ...     for _ in tracked(["a"], "letters"):
    ...         pass
    letters: 0 of 1
    letters: 1 of 1
    """
    listener, began = _listener.get(), time.monotonic()
    for done, item in enumerate(items):
        if listener is not None:
            listener(text, done, len(items))
        logger.debug("%s: %d of %d", text, done + 1, len(items))
        yield item
    if listener is not None:
        listener(text, len(items), len(items))
    logger.info("%s: %d in %.2f s", text, len(items), time.monotonic() - began)


def wait_until(
    ready: Callable[[], object],
    seconds: float = math.inf,
    *,
    pause: float = 0.05,
    longest_pause: float = 0.5,
    complain: Callable[[float], object] | None = None,
    silence: float = 10.0,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Call ``ready`` at growing intervals until it is true or the time is over, and return whether it was.

    Parameters
    ----------
    ready : callable
        Called at least once.
    seconds : float
        How long to wait at most.
    pause, longest_pause : float
        Seconds between the first two calls, and the most that this grows to (by half each time).
    complain : callable, optional
        Called with the seconds waited so far: after the first call in vain, and then ever less often.
    silence : float
        Seconds between the first two complaints; it doubles each time.
    sleep : callable
        How to pause, for example ``event.wait``.
    """
    began = time.monotonic()
    complaint = 0.0
    while not ready():
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        if complain is not None and waited >= complaint:
            complain(waited)
            complaint = 2.0 * waited + silence
        sleep(min(pause, seconds - waited))
        pause = min(1.5 * pause, longest_pause)
    return True
