"""A ball that holds the minimisers, for certificates on singular designs.

The dual of a singular quadratic is minus infinity off its range, so a gap needs to know how far out a minimiser can lie.
For quadratic losses that follows from the value already reached: no minimiser is worse, so the penalty bounds all differences
inside a component and the summed curvature of the component bounds its level. For other losses the radius is the user's
(`Problem.radius`), or an assumption that the solution states: ten times the largest parameter found.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedkin.problem import FusedObjective
from fedkin.terms import QuadraticTerms

Array = NDArray[np.float64]


class MinimizerBall:
    """Radius of a ball around 0 that holds every ``theta_u`` of some minimiser.

    Attributes
    ----------
    proven : bool
        Whether the radius is a theorem (level sets of a quadratic) and not the user's word or an assumption.
    """

    def __init__(self, objective: FusedObjective) -> None:
        self._given = objective.radius
        self._levels = None
        if self._given is None and isinstance(objective.terms, QuadraticTerms):
            self._levels = _LevelSets.of(objective, objective.terms)
        self.proven = self._levels is not None

    def radius(self, theta: Array, value: float) -> float:
        """The radius, given a point ``theta (V, p)`` and its objective value."""
        if self._given is not None:
            return self._given
        if self._levels is not None:
            return self._levels.radius(value)
        return 10.0 * max(float(np.sqrt((theta**2).sum(axis=1)).max()), 1.0)


class _LevelSets:
    """Level sets of a quadratic fused objective whose summed curvature is regular on every component."""

    def __init__(self, objective: FusedObjective, terms: QuadraticTerms, smallest: Array) -> None:
        own = terms.minimizers()
        self._labels = objective.graph.components()
        self._smallest = smallest
        # M_u is at least its own minimum, so the rest of a value bounds every term and the penalty
        self._least = float(terms.values(own).sum())
        lightest = float(objective.graph.weights.min()) if objective.graph.n_edges else np.inf
        self._spread = objective.penalty.euclidean_bound(terms.n_params) / (objective.strength * lightest)
        self._root = np.sqrt(np.linalg.eigvalsh(terms.A)[:, -1].clip(0))
        self._length = np.sqrt(np.einsum("vp,vp->v", terms.apply(own), own).clip(0))

    @classmethod
    def of(cls, objective: FusedObjective, terms: QuadraticTerms) -> _LevelSets | None:
        """None where a component's summed curvature is singular: its minimiser may lie anywhere."""
        if terms.isotropic or objective.strength == 0:
            return None
        labels = objective.graph.components()
        summed = np.zeros((int(labels.max()) + 1, terms.n_params, terms.n_params))
        np.add.at(summed, labels, terms.A)
        curvature = np.linalg.eigvalsh(summed)
        if (curvature[:, 0] <= 1e-10 * curvature[:, -1]).any():
            return None
        return cls(objective, terms, curvature[:, 0])

    def radius(self, value: float) -> float:
        excess = max(value - self._least, 0.0)
        spread = self._spread * excess
        # |A_u^(1/2) theta_u| <= |A_u^(1/2) own_u| + sqrt(2 excess); theta_u is within `spread` of its component
        reach = self._length + np.sqrt(2 * excess) + self._root * spread
        squared = np.bincount(self._labels, weights=reach**2)
        return float(np.sqrt(squared / self._smallest).max()) + spread
