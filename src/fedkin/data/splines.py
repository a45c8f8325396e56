"""Natural cubic splines: curves as columns of a table, by knots that a contract names or quantiles give.

The columns are the cardinal basis without its first function (Wood 2017, section 5.3.1): the coefficient of the column
at a knot is how much higher the curve is there than at the first knot. Beyond the outer knots the curve is straight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkin._base import Array

#: Knots unless told otherwise, at equally spaced quantiles between the outer ones (Harrell 2015, section 2.4.6).
N_KNOTS, OUTER = 5, (0.05, 0.95)
_DENSE = 64  # points between two knots at which the range of a column is found


def natural_basis(values: Array, knots: Sequence[float]) -> Array:
    """Return the columns ``(n, K - 1)`` of a natural cubic spline with K knots; NaN where a value is."""
    t, eye = np.asarray(knots, dtype=np.float64), np.eye(len(knots))
    h, bend = np.diff(t), _second_derivatives(t)
    inside = np.clip(values, t[0], t[-1])
    at = np.clip(np.searchsorted(t, inside, side="right") - 1, 0, len(h) - 1)
    right = ((inside - t[at]) / h[at])[:, None]
    left, square = 1.0 - right, (h[at] ** 2)[:, None] / 6.0
    found = left * eye[at] + right * eye[at + 1]
    found += square * ((left**3 - left) * bend[at] + (right**3 - right) * bend[at + 1])
    first = (eye[1] - eye[0]) / h[0] - h[0] / 6.0 * bend[1]
    last = (eye[-1] - eye[-2]) / h[-1] + h[-1] / 6.0 * bend[-2]
    beyond = (values - inside)[:, None]
    return np.asarray((found + beyond * np.where(beyond < 0, first, last))[:, 1:])


def _second_derivatives(t: Array) -> Array:
    """Return the second derivatives ``(K, K)`` at the knots of the functions that are 1 at one knot, 0 at the others.

    They are 0 at the outer knots; between, those of both sides of a knot agree in the first derivative.
    """
    h, k = np.diff(t), np.arange(len(t) - 2)
    slopes, widths = np.zeros((k.size, len(t))), np.zeros((k.size, len(t)))
    slopes[k, k], slopes[k, k + 1], slopes[k, k + 2] = 1 / h[:-1], -1 / h[:-1] - 1 / h[1:], 1 / h[1:]
    widths[k, k], widths[k, k + 1], widths[k, k + 2] = h[:-1] / 6, (h[:-1] + h[1:]) / 3, h[1:] / 6
    return np.pad(np.linalg.solve(widths[:, 1:-1], slopes), ((1, 1), (0, 0)))


def basis_range(knots: Sequence[float], low: float, high: float) -> tuple[Array, Array]:
    """Return bounds ``(K - 1,)`` of the columns for values from low to high."""
    ends = np.unique([low, *(knot for knot in knots if low < knot < high), high])
    grid = np.linspace(ends[:-1], ends[1:], _DENSE + 1).reshape(-1)
    found = natural_basis(grid, knots)
    # how far a function with these second derivatives can be from its chord between two points of the grid
    beyond = (np.diff(ends).max() / _DENSE) ** 2 / 8 * np.abs(_second_derivatives(np.asarray(knots)))[:, 1:].max()
    return found.min(axis=0) - beyond, found.max(axis=0) + beyond


def quantile_knots(values: Array, n_knots: int = N_KNOTS) -> tuple[float, ...]:
    """Return knots at quantiles, rounded to about three digits; () for fewer than three different values."""
    known = values[np.isfinite(values)]
    distinct = np.unique(known)
    if distinct.size <= n_knots:
        return tuple(distinct.tolist()) if distinct.size > 2 else ()
    digits = 2 - int(np.floor(np.log10(distinct[-1] - distinct[0])))
    for cells in (known, distinct):  # where most values are alike, quantiles of the different ones
        found = np.quantile(cells, np.linspace(*OUTER, n_knots))
        if np.unique(np.round(found, digits)).size == n_knots:
            return tuple(np.round(found, digits).tolist())
    return tuple(found.tolist())
