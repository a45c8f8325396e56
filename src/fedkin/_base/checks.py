"""What parameters must be: each check names the culprit and what would do."""

from __future__ import annotations

import numpy as np

from fedkin.errors import ParameterError


def check_whole(name: str, value: object, *, least: int) -> None:
    """Raise `ParameterError` unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ParameterError(f"{name} must be a whole number of at least {least}, got {value!r}")


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
