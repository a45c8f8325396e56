"""Compiled kernels (numba): their shared options, and a progress line while they are compiled. numba keeps compiled
kernels on disk and recompiles them when their file changes, but not when a kernel in another file that they call does:
kernels that call each other belong in one file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from numba import njit, typeof

from fedkin._base import tracked

#: Decorate a kernel. Sums may be reordered and products fused; infinities and NaN keep their meaning.
kernel: Callable[[Callable[..., Any]], Any] = njit(
    cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz", "arcp"}, error_model="numpy"
)


def load(function: Any, *arguments: Any) -> None:
    """Compile a kernel for the types of these arguments, or read it from numba's cache, without calling it."""
    signature = tuple(typeof(one) for one in arguments)  # type: ignore[no-untyped-call]
    if signature not in function.signatures:
        with compiling():
            function.compile(signature)


@contextmanager
def compiling() -> Iterator[None]:
    """Report to the listener of `tracked` that kernels are compiled, if the block takes longer than a second."""
    context, line, started = copy_context(), tracked([0], "Compiling, once per installation"), threading.Event()

    def start() -> None:
        started.set()
        context.run(next, line)

    timer = threading.Timer(1.0, start)  # by then they would have been read from the disk
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if started.is_set():
            context.run(next, line, None)
