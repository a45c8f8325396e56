"""Which code does the rounds: numpy, the reference, or compiled kernels where the work pays for the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedkin.engine.inprocess import LocalShards
from fedkin.errors import ParameterError

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Backend = Literal["auto", "numpy", "numba"]
Advance = Callable[[int, int, Mask | None, Array | None], None]

#: From this many multiplications on, waiting for the compiler pays.
COMPILE_WORK = 2e10


def choose_backend(local: LocalShards, backend: Backend, work: float) -> tuple[Backend, Advance]:
    """The name of the backend and the function ``(first, count, available, probability)`` that does rounds.

    Parameters
    ----------
    local : LocalShards
        What is to be advanced.
    backend : "auto", "numpy" or "numba"
        What the user asked for.
    work : float
        Multiplications of the whole run.
    """
    if backend not in ("auto", "numpy", "numba"):
        raise ParameterError(f"backend must be 'auto', 'numpy' or 'numba', got {backend!r}")
    return "numpy", local.run
