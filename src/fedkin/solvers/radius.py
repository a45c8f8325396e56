"""A ball that holds a minimiser, for certificates on singular designs.

The dual of a singular quadratic is minus infinity off its range, so a gap needs to know how far out a minimiser can
lie. The value already reached tells: no minimiser is worse, and no loss is below its lower bound, so the rest bounds
the sparsity term, the differences inside a component and, for quadratic losses, the level of the component. Where that
proves nothing, the radius is the user's word (`Problem.radius`) or an assumption that the solution states: ten times
the largest parameter found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkin._base import Array
from fedkin.core import RANK_TOLERANCE, FusedObjective, QuadraticTerms, sum_groups

#: Without a proof, a minimiser is assumed to be at most this many times as long as the parameters found.
ASSUMED_FACTOR = 10.0


@dataclass(frozen=True, eq=False)
class MinimizerBall:
    """Radius of a ball around 0 that holds every ``theta_u`` of some minimiser of ``objective``."""

    objective: FusedObjective

    def radius(self, theta: Array, value: float) -> tuple[float, bool]:
        """The radius, given a point ``theta (V, p)`` and its value, and whether it is proven."""
        if self.objective.radius is not None:
            return self.objective.radius, False
        proven = self._proven(value)
        if np.isfinite(proven):
            return proven, True
        return ASSUMED_FACTOR * max(float(np.sqrt((theta**2).sum(axis=1)).max()), 1.0), False

    def _proven(self, value: float) -> float:
        excess = max(value - self._least, 0.0)
        radius = np.inf
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
    """Roots ``(C,)`` of the smallest eigenvalues of ``summed (C, p, p)``, and whether none of them counts as zero.

    Where some count as zero, the root is that of a bound on the others.
    """
    diagonal = np.einsum("cii->ci", summed)
    scale = np.sqrt(np.where(diagonal > 0, diagonal, diagonal.max(axis=1, keepdims=True).clip(np.finfo(float).tiny)))
    values = np.linalg.eigvalsh(summed / (scale[:, :, None] * scale[:, None, :]))
    zero = values <= RANK_TOLERANCE * values[:, -1:].clip(np.finfo(float).tiny)
    if not zero.any():
        return np.sqrt(np.linalg.eigvalsh(summed)[:, 0].clip(np.finfo(float).tiny)), True
    # in units with unit diagonal a component's level is bounded on the directions that are seen, and may be 0 on others
    seen = np.where(zero, np.inf, values).min(axis=1)
    return np.sqrt(seen) * scale.min(axis=1), False
