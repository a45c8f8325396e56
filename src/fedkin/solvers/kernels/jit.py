"""The toolkit for kernels: how they are compiled (eagerly, for fixed types, into numba's cache), and their arguments.

Arrays that belong together travel as a NamedTuple, a bundle. numba does not convert what is inside of one, so its
types must match exactly: arrays that a kernel only reads are passed through `frozen` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, njit, types
from numpy.typing import NDArray

from fedkin.solvers.kernels import drop_stale

drop_stale()

INT, FLOAT = types.int64, types.float64
PAIR = types.UniTuple(FLOAT, 2)  # type: ignore[no-untyped-call]
#: Sums may be reordered and products fused; infinities and NaN mean what they always do.
NUMERICS = {"contract", "reassoc", "nsz", "arcp"}
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": NUMERICS, "error_model": "numpy"}


def readable(dtype: Any, ndim: int) -> Any:
    """The type of C-ordered arrays that are only read, so that read-only ones pass too."""
    return types.Array(dtype, ndim, "C", readonly=True)


def writable(dtype: Any, ndim: int) -> Any:
    """The type of C-ordered arrays that are written to."""
    return types.Array(dtype, ndim, "C")


def bundle(cls: type, *fields: Any) -> Any:
    """The type of a NamedTuple whose fields have these types."""
    if len(set(fields)) == 1:
        return types.NamedUniTuple(fields[0], len(fields), cls)  # type: ignore[no-untyped-call]
    return types.NamedTuple(fields, cls)  # type: ignore[no-untyped-call]


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A C-ordered, read-only view of an array (or a copy where it is not C-ordered), for `readable` fields."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


#: Compile a function as a part of the kernels that call it.
part: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(**_OPTIONS)


def kernel(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for these types when it is defined: nothing is compiled later, during a fit."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        # blocks of neighbouring coordinates become vector instructions only with this pass, which numba leaves off
        before = config.SLP_VECTORIZE  # type: ignore[attr-defined]
        config.SLP_VECTORIZE = 1  # type: ignore[attr-defined]
        try:
            return njit(result(*arguments), cache=True, **_OPTIONS)(function)  # type: ignore[no-any-return]
        finally:
            config.SLP_VECTORIZE = before  # type: ignore[attr-defined]

    return compiled
