"""The quadratic core: over-relaxed, diagonally preconditioned primal-dual iterations on the edge duals.

One dual vector per edge. With ``s = D' y`` and ``d_i`` the degree of device i, an iteration is

    xhat_i = argmin M_i(x) + (rho d_i / 2) ||x - x_i + s_i / (rho d_i)||^2
    yhat_e = projection of y_e + (rho / 2) (2 xhat - x)_{i-j} onto the dual ball of radius r_e

followed by over-relaxation of both: network-lasso ADMM with its copies eliminated. Sparsity adds one more dual per
device, as if every device had an edge to a neighbour that stays at 0. For the separable l1 penalty ``rho`` is
a number per coordinate, which makes the iteration indifferent to the units of the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from fedkin.problem import FusedObjective
from fedkin.terms import QuadraticTerms

Array = NDArray[np.float64]

RELAXATION = 1.8
#: rho is rebalanced after these many iterations, when it is off by more than REBALANCE_AT and by at most REBALANCE_BY.
FIRST_REBALANCE = 10
REBALANCE_AT = 2.0
REBALANCE_BY = 10.0


@dataclass(frozen=True)
class PrimalDual:
    """A primal point and duals: what an iteration starts from and what it hands out.

    Attributes
    ----------
    theta : array (V, p)
    alpha : array (E, p)
    zeta : array (V, p) or None
        Duals of the sparsity term.
    balance : array (V, p)
        ``D' alpha + zeta``.
    rho : array (p,) or (1,)
    n_iter : int
    """

    theta: Array
    alpha: Array
    zeta: Array | None
    balance: Array
    rho: Array
    n_iter: int


def initial_rho(objective: FusedObjective, quadratic: QuadraticTerms) -> Array:
    """``4 * mean curvature / mean degree``, per coordinate for a separable penalty."""
    degree = max(float(_weights_of_devices(objective).mean()), 1e-12)
    if quadratic.isotropic:
        curvature = np.full(quadratic.n_params, quadratic.A.mean())
    else:
        curvature = np.einsum("vii->i", quadratic.A) / quadratic.n_devices
    if not objective.penalty.separable:
        curvature = curvature.mean(keepdims=True)
    floor = 1e-6 * max(float(curvature.max()), np.finfo(float).tiny)
    return np.asarray(4.0 * np.maximum(curvature, floor) / degree)


def iterate(
    objective: FusedObjective,
    quadratic: QuadraticTerms,
    theta: Array,
    alpha: Array,
    zeta: Array | None,
    rho: Array,
    check_after: Callable[[int], int],
) -> Iterator[PrimalDual]:
    """Iterate for ever, handing out a feasible primal-dual pair now and then.

    Parameters
    ----------
    objective : FusedObjective
        Graph, penalty and radii; its terms are not looked at.
    quadratic : QuadraticTerms
        The smooth part to minimise.
    theta, alpha, zeta, rho
        Where to start.
    check_after : callable
        Number of iterations until the next pair is wanted, given the number done.
    """
    incidence = objective.graph.incidence()
    transposed = sparse.csr_array(incidence.T)
    radius, project = objective.edge_radius, objective.penalty.project
    box = objective.sparsity
    weight = _weights_of_devices(objective)
    linked = weight > 0
    # a device without duals is on its own from the start
    alone = ~linked
    own = quadratic.minimizers() if alone.any() else None
    safe_weight = np.where(linked, weight, 1.0)[:, None]

    x, y = theta.copy(), alpha.copy()
    z = zeta if box is not None else None
    s = np.asarray(transposed @ y) + (0.0 if z is None else z)
    resolve = quadratic.resolvent(safe_weight * rho)
    since, anchor_x, anchor_y, anchor_z = 0, x, y, z
    rebalance = FIRST_REBALANCE
    next_check = check_after(0)
    n_iter = 0
    while True:
        n_iter += 1
        xhat = resolve(quadratic.b + (safe_weight * rho) * x - s)
        if own is not None:
            xhat[alone] = own[alone]
        ahead = 2.0 * xhat - x
        yhat = project(y + (0.5 * rho) * np.asarray(incidence @ ahead), radius)
        zhat = None if z is None else np.clip(z + rho * ahead, -box, box)  # type: ignore[operator]
        x = x + RELAXATION * (xhat - x)
        y = y + RELAXATION * (yhat - y)
        previous, s = s, np.asarray(transposed @ y)
        if z is not None and zhat is not None:
            z = z + RELAXATION * (zhat - z)
            s = s + z
        if n_iter == next_check:
            # the relaxed y may leave its ball: the certificate needs yhat, whose balance is interpolated
            balance = previous + (s - previous) / RELAXATION
            yield PrimalDual(xhat, yhat, zhat, balance, rho, n_iter)
            next_check = n_iter + check_after(n_iter)
        if n_iter - since == rebalance:
            factor = _imbalance(x - anchor_x, y - anchor_y, None if z is None else z - anchor_z, weight, rho)  # type: ignore[operator]
            since, anchor_x, anchor_y, anchor_z = n_iter, x, y, z
            rebalance *= 2
            if factor is not None:
                rho = rho * factor
                resolve = quadratic.resolvent(safe_weight * rho)


def _weights_of_devices(objective: FusedObjective) -> Array:
    """Degree of each device, plus 1 where it has a sparsity dual; ``(V,)``."""
    weight = objective.graph.degree.astype(np.float64)
    if objective.strength == 0:
        weight = np.zeros_like(weight)
    if objective.sparsity is not None:
        weight = weight + 1.0
    return weight


def _imbalance(dx: Array, dy: Array, dz: Array | None, weight: Array, rho: Array) -> Array | None:
    """Factors for rho that would make primal and dual moves equally long; None when it is good enough."""
    dual = 2.0 * (dy**2).sum(axis=0)
    if dz is not None:
        dual = dual + (dz**2).sum(axis=0)
    primal = weight @ (dx**2)
    if rho.size == 1:
        dual, primal = dual.sum(keepdims=True), primal.sum(keepdims=True)
    known = (dual > 0) & (primal > 0)
    ratio = np.ones_like(rho)
    ratio[known] = np.sqrt(dual[known] / primal[known]) / rho[known]
    ratio = np.where(np.abs(np.log(ratio)) > np.log(REBALANCE_AT), ratio, 1.0)
    if (ratio == 1.0).all():
        return None
    return np.clip(ratio, 1.0 / REBALANCE_BY, REBALANCE_BY)
