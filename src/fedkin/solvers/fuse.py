"""Make devices that an iteration left almost equal exactly equal, and coordinates that it left almost 0 exactly 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedkin.graph import Graph
from fedkin.problem import FusedObjective
from fedkin.solvers.pdhg import PrimalDual

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: A dual that stays inside its ball by this share belongs to a difference (or a coordinate) that is 0 at the optimum.
INTERIOR = 1e-3


def fuse_exactly(objective: FusedObjective, pair: PrimalDual) -> Array:
    """Parameters ``(V, p)`` in which fused neighbours are bitwise equal and sparse coordinates 0.

    At the optimum an edge whose dual lies strictly inside its ball joins equal parameters. Each connected group of such
    edges is set to its mean, coordinate by coordinate for a separable penalty; in the same way a coordinate whose sparsity
    dual lies strictly inside its box is 0 for the whole group. The caller decides by the gap whether to keep it.
    """
    theta, alpha = pair.theta, pair.alpha
    limit = (1.0 - INTERIOR) * objective.edge_radius
    sparse = np.zeros(theta.shape, dtype=bool)
    if objective.sparsity is not None and pair.zeta is not None:
        sparse = np.abs(pair.zeta) < (1.0 - INTERIOR) * objective.sparsity
    if not objective.penalty.separable:
        return _grouped(objective.graph, objective.penalty.dual_norm(alpha) < limit, theta, sparse)
    inside = np.abs(alpha) < limit[:, None]
    columns = [
        _grouped(objective.graph, inside[:, c], theta[:, [c]], sparse[:, [c]]) for c in range(theta.shape[1])
    ]
    return np.concatenate(columns, axis=1)


def _grouped(graph: Graph, inside: Mask, theta: Array, sparse: Mask) -> Array:
    """Group means of ``theta``, 0 where any member of the group is sparse."""
    if not inside.any():
        return np.where(sparse, 0.0, theta)
    labels = graph.keep(inside).components()
    size = np.bincount(labels)
    sums, zeros = np.zeros((size.size, theta.shape[1])), np.zeros((size.size, theta.shape[1]), dtype=bool)
    np.add.at(sums, labels, theta)
    np.logical_or.at(zeros, labels, sparse)
    return np.asarray(np.where(zeros, 0.0, sums / size[:, None])[labels])
