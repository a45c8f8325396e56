"""Waiting for something, with an end to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


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
    """Look again and again, at growing intervals, until something is so or the time is over.

    Parameters
    ----------
    ready : callable
        True when the wait is over. It is called at least once.
    seconds : float
        How long to wait at most.
    pause, longest_pause : float
        Seconds between the first two looks, and the most that this grows to (by half each time).
    complain : callable, optional
        Called with the seconds waited so far: at the first look in vain, and then ever less often.
    silence : float
        Seconds between the first two complaints; every silence is twice as long as the one before.
    sleep : callable
        How to pause, for example ``event.wait`` to look at once when an event is set.

    Returns
    -------
    bool
        Whether it was so in the end.

    Examples
    --------
    >>> looks = iter([False, False, True])
    >>> wait_until(lambda: next(looks), 5.0, pause=0.001), wait_until(lambda: False, 0.01, pause=0.001)
    (True, False)
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
