"""Loops that tell how far they are. Nobody listens unless asked to: `listening` says who."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

#: ``say(words)``: tells whoever waits what is being done.
Say = Callable[[str], None]
#: ``listener(words, done, total)``: called before every turn of a loop and once after the last.
Listener = Callable[[str, int, int], None]

logger = logging.getLogger("fedkin")
logger.addHandler(logging.NullHandler())

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Let ``listener`` hear of every `tracked` loop within this context."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def tracked(items: Sequence[T], words: str) -> Iterator[T]:
    """The items, one after the other, while whoever listens is told how many are done.

    The logger ``fedkin`` has a line for every loop, at the level INFO, and one for every turn at DEBUG.

    Examples
    --------
    >>> from fedkin._base import listening, tracked
    >>> with listening(lambda words, done, total: print(f"{words}: {done} of {total}")):
    ...     for _ in tracked(["a", "b"], "letters"):
    ...         pass
    letters: 0 of 2
    letters: 1 of 2
    letters: 2 of 2
    """
    listener, began = _listener.get(), time.monotonic()
    for done, item in enumerate(items):
        if listener is not None:
            listener(words, done, len(items))
        logger.debug("%s: %d of %d", words, done + 1, len(items))
        yield item
    if listener is not None:
        listener(words, len(items), len(items))
    logger.info("%s: %d in %.2f s", words, len(items), time.monotonic() - began)
