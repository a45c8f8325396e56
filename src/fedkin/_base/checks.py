"""Array types, and checks of parameters that name the culprit and what would do."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import ParameterError

Array = NDArray[np.float64]  #: numbers
Index = NDArray[np.int64]  #: positions and counts
Mask = NDArray[np.bool_]  #: which ones
AnyArray = NDArray[Any]  #: numbers, labels or ids

_T = TypeVar("_T", bound=np.generic)


def frozen(array: NDArray[_T]) -> NDArray[_T]:
    """Make an array read only and return it."""
    array.flags.writeable = False
    return array


def check_whole(name: str, value: object, *, least: int) -> None:
    """Raise `ParameterError` unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ParameterError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_level(value: float) -> None:
    """Raise `ParameterError` unless a level lies between 0 and 1.

    Examples
    --------
    >>> check_level(95)
    Traceback (most recent call last):
    fedkin.errors.ParameterError: level must lie between 0 and 1, got 95: say 0.95 for 95%
    """
    if not 0 < value < 1:
        hint = f": say {value / 100:g} for {value:g}%" if 1 < value < 100 else ""
        raise ParameterError(f"level must lie between 0 and 1, got {value:g}{hint}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `ParameterError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ParameterError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_nonnegative(name: str, value: float) -> None:
    """Raise `ParameterError` unless ``value`` is a finite number of at least 0."""
    if not isinstance(value, int | float | np.number) or not np.isfinite(value) or value < 0:
        raise ParameterError(f"{name} must be a finite number of at least 0, got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Raise `ParameterError` unless ``value`` is a finite number above 0."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 < float(value) < np.inf:  # type: ignore[arg-type]
        raise ParameterError(f"{name} must be a positive number, got {value!r}")
