"""Damped Newton for many functions at once, and with it the minimisers of mean losses of many sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core.linalg import RANK_TOLERANCE, least_eigenvalue, solve_positive
from fedkin.core.rows import RowBatch
from fedkin.data import Rows
from fedkin.losses import LinearLoss, Loss

#: ``value(theta (A, p), who (A,)) -> (A,)``: the functions number ``who`` at ``theta``.
ValueFunction = Callable[[Array, Index], Array]
#: ``derivatives(theta (A, p), who (A,)) -> gradient (A, p), matrix (A, p, p)``.
DerivativeFunction = Callable[[Array, Index], tuple[Array, Array]]

#: Information about some direction, in rows' worth, below which a likelihood counts as having no maximum.
SEPARATION_TOLERANCE = 1e-6
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


def minimise(batch: RowBatch) -> tuple[Array, Mask]:
    """Minimisers ``theta (B, p)`` of full-rank sites, and which of them exist.

    A likelihood without a maximum (separated classes, a class or all counts missing) shows in the Hessian at the end of
    the iterations: they follow some direction until practically no information about it is left.
    """
    if batch.loss.quadratic:
        return _least_squares(batch), np.ones(batch.n_sites, dtype=bool)
    theta, converged = _newton(batch, np.zeros((batch.n_sites, batch.n_params)))
    exists = np.isfinite(theta).all(axis=1)
    if batch.loss.minimiser == "separable":
        unit = batch.loss.informative_curvature(batch.y)
        known = np.where(np.isfinite(theta), theta, 0.0)
        exists &= (unit > 0) & (batch.information(known) > SEPARATION_TOLERANCE * unit)
    elif batch.loss.minimiser == "unknown":
        exists &= converged
    return theta, np.asarray(exists)


def minimise_with_ridge(batch: RowBatch, ridge: Array, *, start: Array | None = None, tol: float = 1e-15) -> Array:
    """Minimisers ``(B, p)`` of the mean loss plus ``sum_c ridge_c theta_c^2 / 2``, ``ridge (B, p)`` positive.

    ``start (B, p)`` may be the minimisers of a similar problem; ``tol`` is that of `damped_newton`.
    """
    return _newton(batch, ridge, start, tol)[0]


def _newton(batch: RowBatch, ridge: Array, start: Array | None = None, tol: float = 1e-15) -> tuple[Array, Mask]:
    diagonal = np.arange(batch.n_params)

    def value(theta: Array, who: Index) -> Array:
        return np.asarray(batch.values(theta, who) + 0.5 * (ridge[who] * theta**2).sum(axis=1))

    def derivatives(theta: Array, who: Index, caution: float) -> tuple[Array, Array]:
        gradient, matrix = _derivatives(batch, theta, who, caution)
        matrix[:, diagonal, diagonal] += ridge[who]
        return gradient + ridge[who] * theta, matrix

    begin = _start(batch) if start is None else start
    theta, converged = damped_newton(value, partial(derivatives, caution=0.01), begin, tol, max_iter=150)
    if converged.all() or batch.loss.strictly_convex:
        return theta, converged
    # rarely, far-reaching steps run in circles; careful ones do not
    return damped_newton(value, partial(derivatives, caution=1.0), theta, tol, max_iter=300)


def _derivatives(batch: RowBatch, theta: Array, who: Index, caution: float) -> tuple[Array, Array]:
    """Gradients ``(A, p)`` and Hessians ``(A, p, p)`` of the sites ``who``.

    Singular Hessians get ``caution`` times the matrix of the loss's cautious model on top. With 1 the full step
    decreases the loss; smaller values reach further, and a line search makes up for what goes too far.
    """
    loss, y, eta = batch.loss, batch.y[who], batch.predictors(theta, who)
    gradients, matrices = batch.mean_of(loss.slope_at(eta, y), who), batch.gram_of(loss.curvature_at(eta, y), who)
    if not loss.strictly_convex:
        singular = least_eigenvalue(matrices) <= 100 * RANK_TOLERANCE
        if singular.any():
            matrices[singular] += caution * batch.gram_of(loss.cautious_at(eta[singular], y[singular]), who[singular])
    return gradients, matrices


def _least_squares(batch: RowBatch) -> Array:
    theta = np.zeros((batch.n_sites, batch.n_params))
    for _ in range(2):  # the second solve refines the first
        theta = theta - solve_positive(batch.gram, batch.gradients(theta))
    return theta


def _start(batch: RowBatch) -> Array:
    """A start with finite value, close enough for counts of any size."""
    zero = np.zeros((batch.n_sites, batch.n_params))
    working = batch.loss.working_response(batch.y)
    if working is None:
        return zero
    response, weight = working
    if weight is None:
        return _least_squares(_regression(batch, response, batch.weight))
    weight = weight if batch.weight is None else weight * batch.weight
    theta = _least_squares(_regression(batch, response, weight))
    return np.where((batch.values(theta) < batch.values(zero))[:, None], theta, zero)


def _regression(batch: RowBatch, response: Array, weight: Array | None) -> RowBatch:
    return RowBatch(LinearLoss(), Rows(batch.X, response, batch.rows.offset), weight)


def minimise_sum(parts: Sequence[tuple[float, Loss, Rows]], n_rows: float, p: int) -> tuple[Array, Array, str]:
    """Minimiser of a weighted sum of mean losses, the ridge that it needed (0 for none), and why."""

    def sums(theta: Array, ridge: Array) -> tuple[float, Array, Array]:
        value, gradient, hessian = 0.5 * float(ridge @ theta**2), ridge * theta, np.diag(ridge)
        for factor, loss, rows in parts:
            value += factor * loss.value(theta, *rows.arrays)
            gradient = gradient + factor * loss.gradient(theta, *rows.arrays)
            hessian = hessian + factor * loss.hessian(theta, *rows.arrays)
        return value, gradient, hessian

    def run(ridge: Array) -> tuple[Array, bool]:
        theta, converged = damped_newton(
            lambda theta, who: np.array([sums(row, ridge)[0] for row in theta]),
            lambda theta, who: (sums(theta[0], ridge)[1][None], sums(theta[0], ridge)[2][None]),
            np.zeros((1, p)),
            max_iter=300,
        )
        return theta[0], bool(converged[0])

    none = np.zeros(p)
    start = np.einsum("pp->p", sums(none, none)[2])
    theta, converged = run(none)
    if converged and np.isfinite(theta).all():
        hessian = sums(theta, none)[2]
        # curvature that has vanished, in some direction or compared with where the iterations began, means no minimiser
        regular = least_eigenvalue(hessian) > RANK_TOLERANCE
        if regular and n_rows * np.diag(hessian).max() > 1e-6 * start.max():
            return theta, none, ""
    scale = np.where(start > 0, start, start[start > 0].mean() if (start > 0).any() else 1.0)
    ridge = scale / n_rows
    return run(ridge)[0], ridge, "the loss has no unique minimiser: ridge fit with one row's worth of curvature"
