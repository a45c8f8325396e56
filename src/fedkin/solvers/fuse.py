"""Make devices that an iteration left almost equal exactly equal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedkin.graph import Graph
from fedkin.problem import FusedObjective

Array = NDArray[np.float64]

#: An edge whose dual stays inside its ball by this share is fused at the optimum.
INTERIOR = 1e-3


def fuse_exactly(objective: FusedObjective, theta: Array, alpha: Array) -> Array | None:
    """Parameters in which fused neighbours are bitwise equal, or None when nothing is fused.

    At the optimum an edge whose dual lies strictly inside its ball joins equal parameters. Each connected group of such edges is set
    to its mean, coordinate by coordinate for a separable penalty. The caller decides by the gap whether to keep it.
    """
    graph = objective.graph
    if graph.n_edges == 0 or objective.strength == 0:
        return None
    limit = (1.0 - INTERIOR) * objective.edge_radius
    if objective.penalty.separable:
        fused = np.abs(alpha) < limit[:, None]
        out = theta.copy()
        for column in range(theta.shape[1]):
            out[:, column] = _group_means(graph, fused[:, column], theta[:, [column]])[:, 0]
        return out
    inside = objective.penalty.dual_norm(alpha) < limit
    return _group_means(graph, inside, theta) if inside.any() else None


def _group_means(graph: Graph, fused: NDArray[np.bool_], theta: Array) -> Array:
    labels = graph.keep(fused).components()
    sums = np.zeros((int(labels.max()) + 1, theta.shape[1]))
    np.add.at(sums, labels, theta)
    return np.asarray((sums / np.bincount(labels)[:, None])[labels])
