"""How kernels are compiled: eagerly, for fixed types, into numba's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import config, njit, types

from fedkin.solvers.kernels.cache import drop_stale

drop_stale()

INT, FLOAT = types.int64, types.float64
PAIR = types.UniTuple(FLOAT, 2)  # type: ignore[no-untyped-call]
#: Sums may be reordered and products fused; infinities and NaN mean what they always do.
NUMERICS = {"contract", "reassoc", "nsz", "arcp"}


def readable(dtype: Any, ndim: int) -> Any:
    """The type of C-ordered arrays that are only read, so that read-only ones pass too."""
    return types.Array(dtype, ndim, "C", readonly=True)


def writable(dtype: Any, ndim: int) -> Any:
    """The type of C-ordered arrays that are written to."""
    return types.Array(dtype, ndim, "C")


def kernel(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for these types when it is defined: nothing is compiled later, during a fit."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        # blocks of neighbouring coordinates become vector instructions only with this pass, which numba leaves off
        before = config.SLP_VECTORIZE  # type: ignore[attr-defined]
        config.SLP_VECTORIZE = 1  # type: ignore[attr-defined]
        try:
            return njit(  # type: ignore[no-any-return]
                result(*arguments), cache=True, nogil=True, fastmath=NUMERICS, error_model="numpy"
            )(function)
        finally:
            config.SLP_VECTORIZE = before  # type: ignore[attr-defined]

    return compiled
