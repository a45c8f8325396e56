"""Maximising a likelihood within bounds by Fisher scoring: steps by the expected curvature, halved where need be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedkin._base import Array

#: Steps at most, and how often each is halved.
STEPS, HALVINGS = 60, 25
#: No parameter moves by more than this in one step; they are logarithms.
FARTHEST = 2.0
#: Half of the squared length of a step, measured by the curvature, that ends the search: units of log likelihood.
#: Little of it matters to what is estimated from it, and less of it where the search goes on from there anyway.
ENOUGH, ROUGHLY = 1e-5, 1e-2
#: Share of the promised gain that a step must bring.
_SHARE = 1e-4


def scored(
    negative: Callable[[Array], tuple[float, Array, Array]],
    start: Array,
    low: Array,
    high: Array,
    *,
    enough: float = ENOUGH,
) -> Array:
    """Where a negative log likelihood is least, from ``start`` on, within ``low <= x <= high``.

    Parameters
    ----------
    negative : callable
        Value, gradient ``(n,)`` and expected second derivatives ``(n, n)``, at least positive semidefinite.
    start, low, high : arrays (n,)
        Parameters with equal bounds stay there.
    enough : float
        A step that promises to gain less than this ends the search.

    Examples
    --------
    >>> import numpy as np
    >>> H = np.array([[2.0, 1.0], [1.0, 3.0]])
    >>> bowl = lambda x: (0.5 * x @ H @ x - x.sum(), H @ x - 1.0, H)
    >>> scored(bowl, np.zeros(2), np.full(2, -9.0), np.full(2, 9.0)).round(6).tolist()
    [0.4, 0.2]
    >>> scored(bowl, np.zeros(2), np.full(2, -9.0), np.array([9.0, 0.1])).round(6).tolist()
    [0.45, 0.1]
    """
    x = np.clip(start, low, high)
    value, gradient, curvature = negative(x)
    light = 1e-6 * np.eye(len(x))
    for _ in range(STEPS):
        free = (low < high) & ~((x <= low) & (gradient > 0)) & ~((x >= high) & (gradient < 0))
        if not free.any():
            break
        inside = np.ix_(free, free)
        step = np.zeros_like(x)
        step[free] = -np.linalg.solve(curvature[inside] + light[inside], gradient[free])
        step *= min(1.0, FARTHEST / max(float(np.abs(step).max()), 1e-300))
        if -0.5 * float(gradient @ step) < enough:
            break
        for _ in range(HALVINGS):
            trial = np.clip(x + step, low, high)
            found = negative(trial)
            if found[0] <= value + _SHARE * float(gradient @ (trial - x)):
                break
            step *= 0.5
        else:
            break
        x, (value, gradient, curvature) = trial, found
    return x
