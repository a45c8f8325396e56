"""Damped Newton for many functions at once: local fits and the network lasso are made with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core.linalg import unit_diagonal

#: ``value(theta (A, p), who (A,)) -> (A,)``: the functions number ``who`` at ``theta``.
ValueFunction = Callable[[Array, Index], Array]
#: ``derivatives(theta (A, p), who (A,)) -> gradient (A, p), matrix (A, p, p)``.
DerivativeFunction = Callable[[Array, Index], tuple[Array, Array]]

_SUFFICIENT = 1e-4  # share of the promised decrease that a step has to keep (Armijo)
_HALVINGS = 60


def damped_newton(
    value: ValueFunction, derivatives: DerivativeFunction, start: Array, tol: float = 1e-15, max_iter: int = 100
) -> tuple[Array, Mask]:
    """Minimisers ``theta (B, p)`` of B convex functions, each with its own step length, and which converged ``(B,)``.

    Values may be infinite, but not NaN, and are finite at ``start (B, p)``; matrices are positive definite: Hessians,
    or anything above them where a Hessian is singular. A function is done when half its squared Newton decrement is
    below ``tol`` times the largest of the value, the value at the start and the first decrement. The step that shows it
    is still taken, so that the error left is of the order of the square.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.core import damped_newton
    >>> centre = np.array([[1.0], [3.0]])
    >>> value = lambda theta, who: np.cosh(theta - centre[who]).sum(axis=1)
    >>> derivatives = lambda theta, who: (np.sinh(theta - centre[who]), np.cosh(theta - centre[who])[:, :, None])
    >>> damped_newton(value, derivatives, np.zeros((2, 1)))[0].round(6).ravel().tolist()
    [1.0, 3.0]
    """
    theta = np.array(start, dtype=np.float64)
    who = np.arange(theta.shape[0])
    converged = np.zeros(who.size, dtype=bool)
    current = value(theta, who)
    size, best = np.abs(current), np.full(who.size, np.inf)
    for iteration in range(max_iter):
        if not who.size:
            break
        gradient, matrix = derivatives(theta[who], who)
        step = -solve_positive(matrix, gradient)
        decrement = -0.5 * np.einsum("ap,ap->a", gradient, step)
        if iteration == 0:
            size = np.maximum(size, decrement)
        scale = np.maximum(size[who], np.abs(current[who]))
        # below the first bound the last step suffices; below the second, rounding no longer lets the decrement shrink
        done = (decrement <= tol * scale) | ((decrement <= 1e-9 * scale) & (decrement > 0.5 * best[who]))
        best[who] = decrement
        theta[who], current[who], stuck = _search(value, theta[who], step, decrement, current[who], scale, who)
        converged[who[done]] = True
        who = who[~(done | stuck)]
    return theta, converged


def _search(
    value: ValueFunction, theta: Array, step: Array, decrement: Array, current: Array, scale: Array, who: Index
) -> tuple[Array, Array, Mask]:
    """Halve each step until its value has decreased enough; functions that never do stay where they are."""
    length = np.ones(who.size)
    reached, values = theta.copy(), current.copy()
    pending = np.arange(who.size)
    slack = 8 * np.finfo(float).eps * scale
    for _ in range(_HALVINGS):
        trial = theta[pending] + length[pending, None] * step[pending]
        at_trial = value(trial, who[pending])
        enough = at_trial <= current[pending] - _SUFFICIENT * length[pending] * 2 * decrement[pending] + slack[pending]
        good = pending[enough]
        reached[good], values[good] = trial[enough], at_trial[enough]
        pending = pending[~enough]
        if not pending.size:
            break
        length[pending] *= 0.5
    stuck = np.zeros(who.size, dtype=bool)
    stuck[pending] = True
    return reached, values, stuck


def solve_positive(matrix: Array, right: Array) -> Array:
    """``matrix_a^{-1} right_a`` for positive definite matrices ``(A, p, p)`` and vectors ``(A, p)``.

    Rows and columns are scaled to a unit diagonal first, so that the units of the coordinates do not matter; matrices
    that are singular to working precision are shifted by as little as makes them regular.
    """
    scaled, scale = unit_diagonal(matrix)
    target = right / scale
    solution = np.zeros_like(right)
    pending = np.arange(right.shape[0])
    eye = np.eye(right.shape[1])
    for shift in (0.0, 1e-13, 1e-10, 1e-7, 1e-4, 1e-1, 10.0):
        try:
            found = np.linalg.solve(scaled[pending] + shift * eye, target[pending][:, :, None])[:, :, 0]
        except np.linalg.LinAlgError:
            continue
        good = np.einsum("ap,ap->a", target[pending], found) >= 0  # False for NaN
        solution[pending[good]] = found[good]
        pending = pending[~good]
        if not pending.size:
            break
    return solution / scale
