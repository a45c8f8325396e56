"""Minimise quadratics by over-relaxed, diagonally preconditioned primal-dual iterations (PDHG).

On a general graph there is one dual vector per edge. With ``s = D' y`` and ``d_i`` the degree of site i, an iteration
is

    xhat_i = argmin M_i(x) + (rho d_i / 2) ||x - x_i + s_i / (rho d_i)||^2
    yhat_e = projection of y_e + (rho / 2) (2 xhat - x)_{i-j} onto the dual ball of radius r_e

followed by over-relaxation of both: network-lasso ADMM with its copies eliminated. Sparsity and the ball add one dual
per site, as if every site had an edge to a neighbour fixed at 0. For the separable l1 penalty, ``rho`` has one entry
per coordinate, which makes the iteration invariant to the units of the features; with a ball it does not. With a ball,
parameters are projected onto it before they are certified.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedkin._base import TINY, Array, Index, Mask, frozen
from fedkin.core import (
    RANK_TOLERANCE,
    FusedObjective,
    QuadraticTerms,
    generalized_inverse,
    sum_groups,
    summed_terms,
)
from fedkin.graph import Graph
from fedkin.solvers import pdhg_kernels as kernels

#: A dual that stays inside its ball by this share belongs to a difference (or a coordinate) that is 0 at the optimum.
INTERIOR = 1e-3
#: Parameters that differ by this share of what sites would have on their own are clearly different.
CLEARLY = 1e-3
#: Relative changes of the objective below this are rounding.
SAME_VALUE = 1e-13
#: Without a proof, a minimiser is assumed to be at most this many times longer than the parameters found.
ASSUMED_FACTOR = 10.0


def fused_parameters(objective: FusedObjective, theta: Array, alpha: Array, zeta: Array | None) -> Array:
    """Return parameters ``(V, p)`` in which fused neighbours are bitwise equal and sparse coordinates 0.

    At the optimum an edge whose dual lies strictly inside its ball joins equal parameters. Each connected group of such
    edges is set to its mean, coordinate by coordinate for l1; in the same way a coordinate whose sparsity dual lies
    strictly inside its box is 0 for the whole group. The caller compares gaps to decide what to keep.
    """
    p, none = theta.shape[1], np.empty((0, theta.shape[1]))
    kind = kernels.L1 if p == 1 else kernels.KINDS.get(objective.penalty.name)
    if kind is None:
        return theta
    kernels.load_kernels()
    sparse = objective.sparsity is not None and zeta is not None
    z, box = (np.array(zeta), np.array(objective.sparsity)) if sparse else (none, none)
    head, tail = (frozen(end) for end in objective.graph.edges.astype(np.int32).T.copy())
    edges = kernels.EdgeArrays(head, tail, frozen(np.array(objective.edge_radius)), kind)
    groups = kernels.empty_groups(edges, np.empty_like(theta), z)
    kernels.group_sums(0, p, edges, np.array(alpha), 1.0 - INTERIOR, z, frozen(box), np.array(theta), groups)
    kernels.group_means(0, p, groups)
    return np.asarray(groups.out)


def far_from_fused(terms: QuadraticTerms, graph: Graph, theta: Array) -> bool:
    """Return whether most of the sampled edges clearly join different parameters, so that fusion cannot help."""
    sample = graph.edges if graph.cliques is None else graph.cliques.followers
    sample = sample[:: len(sample) // 200 + 1]
    ends = theta.take(sample, axis=0)
    # what sites would have on their own, typically
    size = float(np.abs(terms.b).max(initial=0.0)) / max(float(terms.mean_curvature.mean()), TINY)
    different = (np.abs(ends[:, 0] - ends[:, 1]) > CLEARLY * size).any(axis=1)
    return bool(np.count_nonzero(different) > 0.5 * len(sample))


def fused_components(objective: FusedObjective, theta: Array, slack: float) -> Array:
    """Return ``theta`` with components fused where that is better, if some mean costs no more than ``slack``."""
    labels = objective.graph.components()
    size = np.bincount(labels)
    means = np.stack([np.bincount(labels, column) / size for column in theta.T], axis=1)
    if not (_changes(objective, labels, theta, means[labels]) <= slack)[size > 1].any():
        return theta
    if objective.sparsity is None:  # one Newton step makes them better
        pooled = summed_terms(objective.terms, labels)
        inverse, _ = generalized_inverse(pooled.hessians(means))
        means = means - np.matmul(inverse, pooled.gradients(means)[:, :, None])[:, :, 0]
    level = objective.inside(means[labels])
    # a tie within rounding goes to the fused level, so that equal problems from other sums have equal solutions
    rounding = SAME_VALUE * np.bincount(labels, np.abs(objective.terms.values(level)))
    better = (_changes(objective, labels, theta, level) <= rounding) & (size > 1)
    return np.where(better[labels, None], level, theta)


def _changes(objective: FusedObjective, labels: Index, theta: Array, level: Array) -> Array:
    """Return the change of the objective of each component from ``theta`` to a common ``level``."""
    terms = objective.terms
    change = terms.values(level) - terms.values(theta)
    if objective.sparsity is not None:
        change += (objective.sparsity * (np.abs(level) - np.abs(theta))).sum(axis=1)
    return np.asarray(np.bincount(labels, change) - objective.penalty_by_component(theta), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class MinimizerBall:
    """Bound the norms ``||theta_u||`` of some minimiser of ``objective``, for certificates on singular designs.

    The dual of a singular quadratic is minus infinity outside its range, so a gap needs a bound on the minimiser. The
    current value provides one: no minimiser has a larger value and no loss is below its lower bound, so the difference
    bounds the sparsity term, the differences within a component and, for quadratic losses, the level of the component.
    If this proves nothing, the solution states an assumed radius: ten times the largest parameter.
    """

    objective: FusedObjective

    def radius(self, theta: Array, value: float) -> tuple[float, bool]:
        """Return the radius, given a point ``theta (V, p)`` and its value, and whether it is proven."""
        if self.objective.radius is not None:
            return self.objective.radius, True
        proven = self._proven(value)
        if np.isfinite(proven):
            return proven, True
        return ASSUMED_FACTOR * max(float(np.sqrt((theta**2).sum(axis=1)).max()), 1.0), False

    def _proven(self, value: float) -> float:
        excess, radius = max(value - self._least, 0.0), np.inf
        sparsity = self.objective.sparsity
        if sparsity is not None and sparsity.min() > 0 and np.isfinite(excess):
            radius = excess / float(sparsity.min())
        if self._levels is not None:
            radius = min(radius, self._levels.radius(excess))
        return radius

    @cached_property
    def _least(self) -> float:
        return float(self.objective.terms.lower_bounds().sum())

    @cached_property
    def _levels(self) -> _LevelSets | None:
        terms = self.objective.terms
        if not isinstance(terms, QuadraticTerms):
            return None
        levels = _LevelSets(self.objective, terms)
        # directions that no site determines are free for a component, unless there is sparsity
        return levels if self.objective.sparsity is None or levels.regular else None


class _LevelSets:
    def __init__(self, objective: FusedObjective, terms: QuadraticTerms) -> None:
        graph = objective.graph
        linked = objective.strength > 0 and graph.n_edges > 0
        labels = graph.components() if linked else np.arange(graph.n_sites)
        hessians = terms.hessians(terms.b)
        # ||A_u^(1/2) own_u||^2 (twice what own_u gains) and a bound on the largest eigenvalue of A_u, summed over each
        # component
        self._length = np.sqrt(np.bincount(labels, 2.0 * (terms.c - terms.lower_bounds()).clip(0)))
        self._top = np.sqrt(np.bincount(labels, np.linalg.norm(hessians, axis=(1, 2))))
        # the penalty bounds the sum of phi along any path
        self._reach_per_excess = 0.0
        if linked:
            cliques = objective.cliques
            lightest = objective.strength * (float(graph.weights.min()) if cliques is None else cliques.lightest)
            self._reach_per_excess = objective.penalty.euclidean_bound(terms.n_params) / lightest
        self._root, self.regular = _smallest_root(sum_groups(hessians, labels, self._length.size))

    def radius(self, excess: float) -> float:
        apart = self._reach_per_excess * excess
        # For v in a component, (sum_u |A_u^(1/2) theta_v|^2)^(1/2) is at most the same for own_u, plus that for
        # theta_u - own_u (at most sqrt(2 excess)), plus that for theta_v - theta_u; and it is at least |theta_v| times
        # the root of the smallest eigenvalue of sum_u A_u.
        reach = (self._length + np.sqrt(2 * excess) + self._top * apart) / self._root
        return float(reach.max()) + (0.0 if self.regular else apart)


def _smallest_root(summed: Array) -> tuple[Array, bool]:
    """Return roots ``(C,)`` of the smallest eigenvalues of ``(C, p, p)`` that are not zero, and whether none is."""
    diagonal = np.einsum("cii->ci", summed)
    scale = np.sqrt(np.where(diagonal > 0, diagonal, diagonal.max(axis=1, keepdims=True).clip(TINY)))
    values = np.linalg.eigvalsh(summed / (scale[:, :, None] * scale[:, None, :]))
    zero = values <= RANK_TOLERANCE * values[:, -1:].clip(TINY)
    if not zero.any():
        return np.sqrt(np.linalg.eigvalsh(summed)[:, 0].clip(TINY)), True
    # after scaling to unit diagonal, the level is bounded in determined directions and may be 0 in others
    seen = np.where(zero, np.inf, values).min(axis=1)
    return np.sqrt(seen) * scale.min(axis=1), False


RELAXATION = 1.8
#: rho is rebalanced after this many iterations for the first time, when it is off by more than REBALANCE_AT, and by at
#: most REBALANCE_BY.
FIRST_REBALANCE, REBALANCE_AT, REBALANCE_BY = 10, 2.0, 10.0
#: A check costs about this many iterations.
LEAST_STRETCH = 3
#: Squared lengths ``(p,)`` of the moves of duals ``2 ||dy||^2 + ||dz||^2``, and parameters ``sum_i weight_i dx_i^2``.
Moves = tuple[Array, Array]


@dataclass(frozen=True)
class PrimalDual:
    """Primal point and duals: the input and output of an iteration."""

    theta: Array  # (V, p)
    alpha: Array  # duals of the edges
    zeta: Array | None  # (V, p), duals of sparsity and ball
    balance: Array  # (V, p), D' alpha + zeta
    rho: Array  # (p,) or (1,)


def initial_rho(objective: FusedObjective, quadratic: QuadraticTerms) -> Array:
    """Return ``4 * mean curvature / mean degree``, per coordinate for a separable penalty."""
    weight, curvature = weights_of_sites(objective), quadratic.mean_curvature
    degree = max(float(weight.sum()) / weight.size, 1e-12)
    if not objective.penalty.separable or objective.radius is not None:
        curvature = curvature.sum(keepdims=True) / curvature.size
    floor = 1e-6 * max(float(curvature.max()), TINY)
    return np.asarray(4.0 * np.maximum(curvature, floor) / degree)


def weights_of_sites(objective: FusedObjective) -> Array:
    """Return the degree of each site (in cliques, its weight) plus 1 if it has a site dual; ``(V,)``."""
    linked, sparse = objective.graph.degree.astype(np.float64), float(objective.box is not None)
    if not objective.strength:
        return np.full(linked.size, sparse)
    return linked + sparse if objective.cliques is None else np.where(linked > 0, objective.cliques.weights, sparse)


def starting_point(start: PrimalDual | None, own: Array, singular: Mask, alone: Mask) -> Array:
    """Return initial parameters ``(V, p)``: by default each site's ``own`` minimiser; isolated sites stay there."""
    x = np.where(singular[:, None], 0.0, own) if start is None else np.array(start.theta, dtype=np.float64)
    x[alone] = own[alone]
    return np.asarray(x)


def check_after(done: int, rows: Sequence[tuple[int, float, float]] = (), tol: float = 0.0) -> int:
    """Predict the iterations until the next check can succeed, from the last two ``rows`` (n_iter, value, gap)."""
    usual = max(5, done // 10)
    if len(rows) < 2:
        return usual
    (before, _, larger), (at, _, smaller) = rows[-2:]
    if not 0 < smaller < larger < math.inf:
        return usual
    rate = math.log(larger / smaller) / (at - before)
    return min(max(math.ceil(math.log(smaller / tol) / rate), LEAST_STRETCH), 2 * usual)


class Iteration(ABC):
    """Primal-dual iteration with its state after ``n_iter`` steps."""

    #: Whether every site has a minimiser of its own, so that `certificate` needs no radius.
    regular: bool
    rho: Array

    def __init__(self, rho: Array) -> None:
        self.n_iter, self._rebalance_at = 0, FIRST_REBALANCE
        self._factor: Array | None = None
        self.set_rho(rho)

    @abstractmethod
    def set_rho(self, rho: Array) -> None: ...

    @abstractmethod
    def balance_duals(self) -> None:
        """Compute the balance from the duals."""

    @abstractmethod
    def run(self, n: int, last: float, measure: bool) -> Moves | None:
        """Take ``n`` over-relaxed steps; the last one uses its own relaxation and can return its changes."""

    def advance(self, n: int) -> None:
        """Take ``n`` steps, the last one without over-relaxation, and reach a feasible primal-dual pair."""
        try:
            self._advance(self.n_iter + n)
        except KeyboardInterrupt:
            # half a step may be done: any point is good to start from, once the balance fits the duals again
            self.balance_duals()
            self.run(1, 1.0, measure=False)
            self.n_iter += 1
            raise

    def _advance(self, end: int) -> None:
        while self.n_iter < end:
            if self._factor is not None:
                self.set_rho(self.rho * self._factor)
                self._factor = None
            stop = min(self._rebalance_at, end)
            # relaxed duals may leave their balls, and a gap computed from them would be void
            last = 1.0 if stop == end else RELAXATION
            moves = self.run(stop - self.n_iter, last, measure=stop == self._rebalance_at)
            self.n_iter = stop
            if moves is not None:
                self._rebalance_at = 2 * stop + FIRST_REBALANCE
                self._factor = rebalancing_factor(*moves, self.rho)

    @abstractmethod
    def inside(self) -> Array | None:
        """Return parameters projected onto the ball, for `certificate` and `pair`; None without a ball."""

    @abstractmethod
    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        """Return objective value and duality gap of the pair, or of other parameters with its duals, if `regular`."""

    @abstractmethod
    def fused(self) -> Array:
        """Return parameters in the ball with fused sites exactly equal, for `certificate` and `pair`."""

    @abstractmethod
    def pair(self, theta: Array | None = None) -> PrimalDual:
        """Return the current pair, or other parameters with its duals; it is valid until the next step."""

    def close(self) -> None:  # noqa: B027  (most have no threads)
        """Stop the threads, if any."""


def rebalancing_factor(dual: Array, primal: Array, rho: Array) -> Array | None:
    """Return factors for ``rho`` that balance primal and dual changes; None if they are balanced already."""
    if rho.size == 1:
        dual, primal = dual.sum(keepdims=True), primal.sum(keepdims=True)
    # duals that all lie on their balls do not move: then a smaller rho lets the primal moves be longer
    known = (dual > TINY) | (primal > TINY)
    ratio = np.sqrt(np.where(known, dual, 1.0) / np.maximum(np.where(known, primal, 1.0), TINY))
    ratio = np.where(known, ratio / rho, 1.0)
    off = (ratio > REBALANCE_AT) | (ratio < 1.0 / REBALANCE_AT)
    return np.where(off, np.clip(ratio, 1.0 / REBALANCE_BY, REBALANCE_BY), 1.0) if off.any() else None


class NumpyIteration(Iteration):
    """Reference iteration on edges in numpy; ``quadratic`` replaces the objective's own terms."""

    def __init__(
        self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: PrimalDual | None = None
    ) -> None:
        self._objective, self._quadratic = replace(objective, terms=quadratic), quadratic
        linked, own, singular = weights_of_sites(objective), quadratic.minimizers(), quadratic.singular
        self.regular = not bool(singular.any())
        self._alone = linked == 0
        self._own, self._weight = own[self._alone], np.where(self._alone, 1.0, linked)[:, None]
        self._x = starting_point(start, own, singular, self._alone)
        self._y = np.zeros(objective.dual_shape) if start is None else start.alpha
        cold = None if objective.box is None else np.zeros_like(self._x)
        self._z = cold if start is None else start.zeta
        self.balance_duals()
        super().__init__(rho)

    def set_rho(self, rho: Array) -> None:
        self.rho, self._metric = rho, self._weight * rho
        self._resolve = self._quadratic.resolvent(self._metric)

    def balance_duals(self) -> None:
        s = self._objective.balance(self._y)
        self._s = s if self._z is None else s + self._z

    def run(self, n: int, last: float, measure: bool) -> Moves | None:
        for _ in range(n - 1):
            self._step(RELAXATION)
        return self._step(last, measure)

    def _step(self, relax: float, measure: bool = False) -> Moves | None:
        x, y, z, rho, objective = self._x, self._y, self._z, self.rho, self._objective
        xhat = self._resolve(self._quadratic.b + self._metric * x - self._s)
        xhat[self._alone] = self._own
        ahead = 2.0 * xhat - x
        yhat = objective.penalty.project(y + 0.5 * rho * objective.differences(ahead), objective.edge_radius)
        self._x, self._y = x + relax * (xhat - x), y + relax * (yhat - y)
        if z is not None and (box := objective.box) is not None:
            zhat = np.clip(v := z + rho * ahead, -box, box)
            if objective.radius is not None:
                zhat = v - rho * objective.inside((v - zhat) / rho)
            self._z = z + relax * (zhat - z)
        self.balance_duals()
        if not measure:
            return None
        dual = 2.0 * ((yhat - y) ** 2).sum(axis=0)
        dual += 0.0 if z is None else ((zhat - z) ** 2).sum(axis=0)
        return dual, (self._weight * (xhat - x) ** 2).sum(axis=0)

    def inside(self) -> Array | None:
        return None if self._objective.radius is None else self._objective.inside(self._x)

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        x = self._x if theta is None else theta
        return self._objective.value(x), self._objective.gap(x, self._y, self._z, self._s)[0]

    def fused(self) -> Array:
        return self._objective.inside(fused_parameters(self._objective, self._x, self._y, self._z))

    def pair(self, theta: Array | None = None) -> PrimalDual:
        return PrimalDual(self._x if theta is None else theta, self._y, self._z, self._s, self.rho)
