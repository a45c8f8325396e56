"""The few special functions that finding kin needs: importing `scipy.special` takes longer than all of them.

Arguments are positive. Tests compare them with scipy's.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array

_LGAMMA = np.frompyfunc(math.lgamma, 1, 1)
#: Bernoulli numbers B_2, B_4, ...
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_SHIFT = np.arange(10.0)  # by which arguments grow before the asymptotic series holds to all digits


def log_gamma(x: ArrayLike) -> Array:
    """Logarithms of the gamma function.

    Examples
    --------
    >>> from fedkin.kin.special import log_gamma
    >>> log_gamma([1.0, 2.0, 3.0]).round(4).tolist()
    [0.0, 0.0, 0.6931]
    """
    return np.asarray(_LGAMMA(x), dtype=np.float64)


def log_beta(a: ArrayLike, b: ArrayLike) -> Array:
    """Logarithms of the beta function."""
    return log_gamma(a) + log_gamma(b) - log_gamma(np.add(a, b))


def digamma(x: ArrayLike) -> Array:
    """The derivative of `log_gamma`."""
    below, y = _shifted(x)
    series = sum(b / (2 * k * y ** (2 * k)) for k, b in enumerate(_BERNOULLI, 1))
    return np.asarray(np.log(y) - 0.5 / y - series - (1 / below).sum(axis=-1))


def trigamma(x: ArrayLike) -> Array:
    """The derivative of `digamma`."""
    below, y = _shifted(x)
    series = sum(b / y ** (2 * k + 1) for k, b in enumerate(_BERNOULLI, 1))
    return np.asarray(1 / y + 0.5 / y**2 + series + (below**-2).sum(axis=-1))


def tetragamma(x: ArrayLike) -> Array:
    """The derivative of `trigamma`."""
    below, y = _shifted(x)
    series = sum((2 * k + 1) * b / y ** (2 * k + 2) for k, b in enumerate(_BERNOULLI, 1))
    return np.asarray(-1 / y**2 - 1 / y**3 - series - 2 * (below**-3).sum(axis=-1))


def _shifted(x: ArrayLike) -> tuple[Array, Array]:
    """The arguments that a recurrence passes through, ``(..., 10)``, and the one where it ends."""
    given = np.asarray(x, dtype=np.float64)
    return given[..., None] + _SHIFT, given + len(_SHIFT)
