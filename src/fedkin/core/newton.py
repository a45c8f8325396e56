"""Stacks of small symmetric matrices, in units of a unit diagonal, and damped Newton for many functions at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import sparse

from fedkin._base import Array, Index, Mask

#: Eigenvalues of a matrix with unit diagonal below this share of the largest one count as zero.
RANK_TOLERANCE = 1e-10
#: Pivots of a Cholesky factor above this are far from those of singular matrices.
SAFE_PIVOT = 1e-3

#: ``value(theta (A, p), who (A,)) -> (A,)``: the functions number ``who`` at ``theta``.
ValueFunction = Callable[[Array, Index], Array]
#: ``derivatives(theta (A, p), who (A,)) -> gradient (A, p), matrix (A, p, p)``.
DerivativeFunction = Callable[[Array, Index], tuple[Array, Array]]

_SUFFICIENT = 1e-4  # share of the promised decrease that a step has to keep (Armijo)
_HALVINGS = 60


def unit_diagonal(matrices: Array) -> tuple[Array, Array]:
    """``matrices (..., p, p)`` scaled to a unit diagonal, and the scale ``(..., p)`` (1 for zeros on the diagonal)."""
    diagonal = np.einsum("...ii->...i", matrices)
    scale = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    return np.asarray(matrices / (scale[..., :, None] * scale[..., None, :])), scale


def least_eigenvalue(matrices: Array) -> Array:
    """Smallest eigenvalues ``(...)`` of ``matrices (..., p, p)`` in units in which they have unit diagonal."""
    return np.asarray(np.linalg.eigvalsh(unit_diagonal(matrices)[0])[..., 0])


def surely_regular(scaled: Array) -> Mask:
    """Which matrices with unit diagonal are far from singular, by the pivots of a Cholesky factor, which is cheap."""
    try:
        pivots = np.einsum("vii->vi", np.linalg.cholesky(scaled))
    except np.linalg.LinAlgError:
        if len(scaled) == 1:
            return np.zeros(1, dtype=bool)
        half = len(scaled) // 2
        return np.concatenate([surely_regular(scaled[:half]), surely_regular(scaled[half:])])
    return np.asarray(pivots.min(axis=1, initial=1.0) > SAFE_PIVOT)


def generalized_inverse(matrices: Array) -> tuple[Array, Mask]:
    """Generalised inverses ``G_u (V, p, p)`` of semi-definite matrices, and which of these are singular ``(V,)``.

    ``A G A = A`` and ``G A G = G`` up to directions that count as zero. They are Moore-Penrose inverses in the units in
    which ``A`` has unit diagonal, so that the units of the features do not matter.
    """
    scaled, scale = unit_diagonal(matrices)
    singular = np.zeros(len(matrices), dtype=bool)
    try:
        inverse = np.linalg.inv(scaled)
        size = np.linalg.norm(scaled, axis=(1, 2)) * np.linalg.norm(inverse, axis=(1, 2))
        poor = ~(size < 0.1 / RANK_TOLERANCE)  # NaN counts as poor
    except np.linalg.LinAlgError:
        inverse, poor = np.empty_like(scaled), np.ones(len(matrices), dtype=bool)
    if poor.any():
        values, vectors = np.linalg.eigh(scaled[poor])
        kept = values > RANK_TOLERANCE * np.maximum(values[:, -1:], np.finfo(float).tiny)
        roots = np.divide(1.0, values, out=np.zeros_like(values), where=kept)
        inverse[poor] = np.matmul(vectors * roots[:, None, :], np.swapaxes(vectors, 1, 2))
        singular[poor] = ~kept.all(axis=1)
    return np.asarray(inverse / (scale[:, :, None] * scale[:, None, :])), singular


def solve_and_rest(matrices: Array, v: Array) -> tuple[Array, Array]:
    """``A_u^- v_u`` and the part of ``v_u`` outside the range of ``A_u``, both ``(V, p)``."""
    scaled, scale = unit_diagonal(matrices)
    if surely_regular(scaled).all():
        return np.asarray(np.linalg.solve(scaled, (v / scale)[:, :, None])[:, :, 0] / scale), np.zeros_like(v)
    inverse, singular = generalized_inverse(matrices)
    solution = np.matmul(inverse, v[:, :, None])[:, :, 0]
    rest = np.zeros_like(v)
    rest[singular] = v[singular] - np.matmul(matrices[singular], solution[singular, :, None])[:, :, 0]
    return np.asarray(solution), rest


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


def inverse_of(matrices: Array) -> Array:
    """Inverses of positive definite matrices, exactly symmetric."""
    scaled, scale = unit_diagonal(matrices)
    try:
        inverse = np.linalg.inv(scaled)
    except np.linalg.LinAlgError:
        # rows without noise make a ridge that is lost in rounding
        lost = np.linalg.eigvalsh(scaled)[:, 0] <= RANK_TOLERANCE
        inverse = np.linalg.inv(scaled + lost[:, None, None] * RANK_TOLERANCE * np.eye(scaled.shape[1]))
    inverse = inverse / (scale[:, :, None] * scale[:, None, :])
    return np.asarray(0.5 * (inverse + np.swapaxes(inverse, 1, 2)))


def sum_groups(values: Array, labels: Index, groups: int) -> Array:
    """Sums of ``values (V, ...)`` over each group, ``(groups, ...)``, in the order of the sites."""
    # a sparse product: several times quicker than np.add.at
    members = sparse.csc_array((np.ones(labels.size), labels, np.arange(labels.size + 1)), shape=(groups, labels.size))
    return np.asarray(members @ values.reshape(labels.size, -1)).reshape(groups, *values.shape[1:])


def damped_newton(
    value: ValueFunction, derivatives: DerivativeFunction, start: Array, tol: float = 1e-15, max_iter: int = 100
) -> tuple[Array, Mask]:
    """Minimisers ``theta (B, p)`` of B convex functions, each with its own step length, and which converged ``(B,)``.

    Values may be infinite, but not NaN, and are finite at ``start (B, p)``; matrices are positive definite: Hessians,
    or anything above them where a Hessian is singular. A function is done when half its squared Newton decrement is
    below ``tol`` times the largest of the value, the value at the start and the first decrement. The step that shows it
    is still taken, so that the error left is of the order of the square.
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
