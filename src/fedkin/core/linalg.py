"""Provide batched linear algebra for small matrices and a batched Newton's method."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import sparse

from fedkin._base import TINY, Array, Index, Mask

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
    """Return matrices ``(..., p, p)`` scaled to a unit diagonal, and the scale ``(..., p)``, 1 for zero entries."""
    diagonal = np.einsum("...ii->...i", matrices)
    scale = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    return np.asarray(matrices / (scale[..., :, None] * scale[..., None, :])), scale


def least_eigenvalue(matrices: Array) -> Array:
    """Return the smallest eigenvalues ``(...)`` of ``matrices (..., p, p)`` scaled to unit diagonal."""
    return np.asarray(np.linalg.eigvalsh(unit_diagonal(matrices)[0])[..., 0])


def surely_regular(scaled: Array) -> Mask:
    """Return a mask of the unit-diagonal matrices that are well conditioned, judged by their Cholesky pivots."""
    try:
        pivots = np.einsum("vii->vi", np.linalg.cholesky(scaled))
    except np.linalg.LinAlgError:
        if len(scaled) == 1:
            return np.zeros(1, dtype=bool)
        half = len(scaled) // 2
        return np.concatenate([surely_regular(scaled[:half]), surely_regular(scaled[half:])])
    return np.asarray(pivots.min(axis=1, initial=1.0) > SAFE_PIVOT)


def generalized_inverse(matrices: Array) -> tuple[Array, Mask]:
    """Return inverses ``(V, p, p)`` of semi-definite matrices, and which are singular ``(V,)``.

    Those are Moore-Penrose inverses after scaling to unit diagonal, so they do not depend on the features' units.
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
        kept = values > RANK_TOLERANCE * np.maximum(values[:, -1:], TINY)
        roots = np.divide(1.0, values, out=np.zeros_like(values), where=kept)
        inverse[poor] = np.matmul(vectors * roots[:, None, :], np.swapaxes(vectors, 1, 2))
        singular[poor] = ~kept.all(axis=1)
    return np.asarray(inverse / (scale[:, :, None] * scale[:, None, :])), singular


def solve_and_rest(matrices: Array, v: Array) -> tuple[Array, Array]:
    """Return ``A_u^- v_u`` and the part of ``v_u`` outside the range of ``A_u``, both ``(V, p)``."""
    scaled, scale = unit_diagonal(matrices)
    if surely_regular(scaled).all():
        return np.asarray(np.linalg.solve(scaled, (v / scale)[:, :, None])[:, :, 0] / scale), np.zeros_like(v)
    inverse, singular = generalized_inverse(matrices)
    solution = np.matmul(inverse, v[:, :, None])[:, :, 0]
    rest = np.zeros_like(v)
    rest[singular] = v[singular] - np.matmul(matrices[singular], solution[singular, :, None])[:, :, 0]
    return np.asarray(solution), rest


def solve_positive(matrix: Array, right: Array) -> Array:
    """Return ``matrix_a^{-1} right_a`` for positive definite matrices ``(A, p, p)``, in units of their diagonals.

    Matrices that are singular to working precision get the smallest diagonal shift that makes them regular.
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
    """Return inverses of positive definite matrices, exactly symmetric."""
    scaled, scale = unit_diagonal(matrices)
    try:
        inverse = np.linalg.inv(scaled)
    except np.linalg.LinAlgError:
        # noise-free rows give a ridge too small to survive rounding
        lost = np.linalg.eigvalsh(scaled)[:, 0] <= RANK_TOLERANCE
        inverse = np.linalg.inv(scaled + lost[:, None, None] * RANK_TOLERANCE * np.eye(scaled.shape[1]))
    inverse = inverse / (scale[:, :, None] * scale[:, None, :])
    return np.asarray(0.5 * (inverse + np.swapaxes(inverse, 1, 2)))


def sum_groups(values: Array, labels: Index, groups: int) -> Array:
    """Return sums of ``values (V, ...)`` over each group, ``(groups, ...)``, in the order of the sites."""
    # a sparse product is several times faster than np.add.at
    members = sparse.csc_array((np.ones(labels.size), labels, np.arange(labels.size + 1)), shape=(groups, labels.size))
    return np.asarray(members @ values.reshape(labels.size, -1)).reshape(groups, *values.shape[1:])


def damped_newton(
    value: ValueFunction, derivatives: DerivativeFunction, start: Array, tol: float = 1e-15, max_iter: int = 100
) -> tuple[Array, Mask]:
    """Return minimisers ``(B, p)`` of B convex functions, each with a step length, and which converged ``(B,)``.

    Values must be finite at ``start (B, p)``, and matrices positive definite: Hessians, or upper bounds on them. A
    function has converged when half its squared Newton decrement is below ``tol`` times the largest of the value, the
    value at the start and the first decrement. That last step is still taken.
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
    """Halve each step until the value decreases enough; keep the current point if it never does."""
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
