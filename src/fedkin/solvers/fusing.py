"""Parameters that are exactly fused, and a ball that holds a minimiser, for certificates on singular designs.

The dual of a singular quadratic is minus infinity off its range, so a gap needs to know how far out a minimiser can
lie. The value already reached tells: no minimiser is worse, and no loss is below its lower bound, so the rest bounds
the sparsity term, the differences inside a component and, for quadratic losses, the level of the component. Where that
proves nothing, the radius is an assumption that the solution states: ten times the largest parameter found. A problem
that has a ball (`Problem.radius`) needs no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fedkin._base import Array, Index, Mask
from fedkin.core import (
    RANK_TOLERANCE,
    FusedObjective,
    QuadraticTerms,
    SiteTerms,
    generalized_inverse,
    sum_groups,
    summed_terms,
)
from fedkin.graph import Graph

#: A dual that stays inside its ball by this share belongs to a difference (or a coordinate) that is 0 at the optimum.
INTERIOR = 1e-3
#: Parameters that differ by this share of what sites would have on their own are clearly different.
CLEARLY = 1e-3
#: Relative changes of the objective below this are rounding.
SAME_VALUE = 1e-13
#: Without a proof, a minimiser is assumed to be at most this many times as long as the parameters found.
ASSUMED_FACTOR = 10.0


def fused_parameters(objective: FusedObjective, theta: Array, alpha: Array, zeta: Array | None) -> Array:
    """Return parameters ``(V, p)`` in which fused neighbours are bitwise equal and sparse coordinates 0.

    At the optimum an edge whose dual lies strictly inside its ball joins equal parameters. Each connected group of such
    edges is set to its mean, coordinate by coordinate for a separable penalty; in the same way a coordinate whose
    sparsity dual lies strictly inside its box is 0 for the whole group. The caller decides by the gap what to keep.
    """
    limit = (1.0 - INTERIOR) * objective.edge_radius
    sparse = None
    if objective.sparsity is not None and zeta is not None:
        sparse = np.abs(zeta) < (1.0 - INTERIOR) * objective.sparsity
    i, j = objective.graph.edges[:, 0], objective.graph.edges[:, 1]
    if not objective.penalty.separable:
        inside = objective.penalty.dual_norm(alpha) < limit
        return _grouped(i[inside], j[inside], theta, sparse)
    # every coordinate of every site is a node of its own
    p = theta.shape[1]
    edge, column = np.nonzero(np.abs(alpha) < limit[:, None])
    shape = (theta.size, 1)
    zero = None if sparse is None else sparse.reshape(shape)
    return _grouped(i[edge] * p + column, j[edge] * p + column, theta.reshape(shape), zero).reshape(theta.shape)


def far_from_fused(terms: QuadraticTerms, graph: Graph, theta: Array) -> bool:
    """Return whether most of some edges clearly join different parameters: then `fused_components` would be in vain."""
    sample = graph.edges if graph.cliques is None else graph.cliques.followers
    sample = sample[:: len(sample) // 200 + 1]
    ends = theta.take(sample, axis=0)
    different = (np.abs(ends[:, 0] - ends[:, 1]) > CLEARLY * terms.typical_size).any(axis=1)
    return bool(np.count_nonzero(different) > 0.5 * len(sample))


def fused_components(objective: FusedObjective, theta: Array, slack: float) -> Array:
    """``theta`` with components fused where that is better, tried where a mean costs no more than ``slack``."""
    labels = objective.graph.components()
    size = np.bincount(labels)
    means = np.stack([np.bincount(labels, column) / size for column in theta.T], axis=1)
    if not (_changes(objective, labels, theta, means[labels]) <= slack)[size > 1].any():
        return theta
    level = (_better(summed_terms(objective.terms, labels), means) if objective.sparsity is None else means)[labels]
    level = objective.inside(level)
    # a tie within rounding goes to the fused level, so that equal problems from other sums have equal solutions
    rounding = SAME_VALUE * np.bincount(labels, np.abs(objective.terms.values(level)))
    better = (_changes(objective, labels, theta, level) <= rounding) & (size > 1)
    return np.where(better[labels, None], level, theta)


def _better(pooled: SiteTerms, level: Array) -> Array:
    """Return what one Newton step makes of the level of each component."""
    inverse, _ = generalized_inverse(pooled.hessians(level))
    return np.asarray(level - np.matmul(inverse, pooled.gradients(level)[:, :, None])[:, :, 0])


def _changes(objective: FusedObjective, labels: Index, theta: Array, level: Array) -> Array:
    """Return the change of the objective of each component from ``theta`` to a common ``level``."""
    terms = objective.terms
    change = terms.values(level) - terms.values(theta)
    if objective.sparsity is not None:
        change += (objective.sparsity * (np.abs(level) - np.abs(theta))).sum(axis=1)
    return np.asarray(np.bincount(labels, change) - objective.penalty_by_component(theta), dtype=np.float64)


def _grouped(i: Index, j: Index, theta: Array, sparse: Mask | None) -> Array:
    """Return means of ``theta (N, k)`` over groups joined by edges ``(i, j)``, 0 where a member is sparse."""
    n = theta.shape[0]
    joined = coo_array((np.ones(i.size, dtype=np.int8), (i, j)), shape=(n, n))
    groups, labels = connected_components(joined, directed=False)
    size = np.bincount(labels, minlength=groups)
    out = np.empty_like(theta)
    for column in range(theta.shape[1]):
        means = np.bincount(labels, weights=theta[:, column], minlength=groups) / size
        if sparse is not None:
            means[labels[sparse[:, column]]] = 0.0
        out[:, column] = means[labels]
    return out


@dataclass(frozen=True, eq=False)
class MinimizerBall:
    """Radius of a ball around 0 that holds every ``theta_u`` of some minimiser of ``objective``."""

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
        # a component may be moved along directions that no site sees, but not for free when there is sparsity
        return levels if self.objective.sparsity is None or levels.regular else None


class _LevelSets:
    """Level sets of a quadratic fused objective, component by component."""

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
        self._spread = 0.0
        if linked:
            cliques = objective.cliques
            lightest = objective.strength * (float(graph.weights.min()) if cliques is None else cliques.lightest)
            self._spread = objective.penalty.euclidean_bound(terms.n_params) / lightest
        self._root, self.regular = _smallest_root(sum_groups(hessians, labels, self._length.size))

    def radius(self, excess: float) -> float:
        spread = self._spread * excess
        # For v in a component, (sum_u |A_u^(1/2) theta_v|^2)^(1/2) is at most the same for own_u, plus that for
        # theta_u - own_u (at most sqrt(2 excess)), plus that for theta_v - theta_u; and it is at least |theta_v| times
        # the root of the smallest eigenvalue of sum_u A_u.
        reach = (self._length + np.sqrt(2 * excess) + self._top * spread) / self._root
        return float(reach.max()) + (0.0 if self.regular else spread)


def _smallest_root(summed: Array) -> tuple[Array, bool]:
    """Return roots ``(C,)`` of the smallest eigenvalues of ``(C, p, p)`` that are not zero, and whether none is."""
    diagonal = np.einsum("cii->ci", summed)
    scale = np.sqrt(np.where(diagonal > 0, diagonal, diagonal.max(axis=1, keepdims=True).clip(np.finfo(float).tiny)))
    values = np.linalg.eigvalsh(summed / (scale[:, :, None] * scale[:, None, :]))
    zero = values <= RANK_TOLERANCE * values[:, -1:].clip(np.finfo(float).tiny)
    if not zero.any():
        return np.sqrt(np.linalg.eigvalsh(summed)[:, 0].clip(np.finfo(float).tiny)), True
    # in units with unit diagonal a component's level is bounded on the directions that are seen, and may be 0 on others
    seen = np.where(zero, np.inf, values).min(axis=1)
    return np.sqrt(seen) * scale.min(axis=1), False
