"""Make devices that an iteration left almost equal exactly equal, and coordinates that it left almost 0 exactly 0."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.graph import Graph
from fedkin.objective import DeviceTerms, FusedObjective, QuadraticTerms, generalized_inverse, summed_terms

#: A dual that stays inside its ball by this share belongs to a difference (or a coordinate) that is 0 at the optimum.
INTERIOR = 1e-3
#: Parameters that differ by this share of what devices would have on their own are clearly different.
CLEARLY = 1e-3


def fused_parameters(objective: FusedObjective, theta: Array, alpha: Array, zeta: Array | None) -> Array:
    """Parameters ``(V, p)`` in which fused neighbours are bitwise equal and sparse coordinates 0.

    At the optimum an edge whose dual lies strictly inside its ball joins equal parameters. Each connected group of such
    edges is set to its mean, coordinate by coordinate for a separable penalty; in the same way a coordinate whose
    sparsity dual lies strictly inside its box is 0 for the whole group. The caller decides by the gap what to keep.

    Parameters
    ----------
    objective : FusedObjective
        Graph, penalty and radii.
    theta : array (V, p)
        Parameters that are almost optimal.
    alpha : array (E, p)
        Edge duals.
    zeta : array (V, p) or None
        Sparsity duals.
    """
    limit = (1.0 - INTERIOR) * objective.edge_radius
    sparse = None
    if objective.sparsity is not None and zeta is not None:
        sparse = np.abs(zeta) < (1.0 - INTERIOR) * objective.sparsity
    i, j = objective.graph.edges[:, 0], objective.graph.edges[:, 1]
    if not objective.penalty.separable:
        inside = objective.penalty.dual_norm(alpha) < limit
        return _grouped(i[inside], j[inside], theta, sparse)
    # every coordinate of every device is a node of its own
    p = theta.shape[1]
    edge, column = np.nonzero(np.abs(alpha) < limit[:, None])
    shape = (theta.size, 1)
    zero = None if sparse is None else sparse.reshape(shape)
    return _grouped(i[edge] * p + column, j[edge] * p + column, theta.reshape(shape), zero).reshape(theta.shape)


def far_from_fused(terms: QuadraticTerms, graph: Graph, theta: Array) -> bool:
    """Whether most of some edges clearly join different parameters: then `fused_components` would be in vain."""
    sample = graph.edges[:: graph.n_edges // 200 + 1]
    one, other = theta[sample[:, 0]], theta[sample[:, 1]]
    different = np.abs(one - other).max(axis=1, initial=0.0) > CLEARLY * terms.typical_size
    return bool(np.count_nonzero(different) > 0.5 * len(sample))


def fused_components(objective: FusedObjective, theta: Array, slack: float) -> Array:
    """Parameters in which every connected component is fused that is better off so.

    Parameters
    ----------
    objective : FusedObjective
        All of it.
    theta : array (V, p)
        Parameters that are almost optimal.
    slack : float
        Components whose mean is worse by more than this are not tried.
    """
    labels = objective.graph.components()
    size = np.bincount(labels)
    means = np.stack([np.bincount(labels, column) / size for column in theta.T], axis=1)
    if not (_changes(objective, labels, theta, means[labels]) <= slack)[size > 1].any():
        return theta
    level = (_better(summed_terms(objective.terms, labels), means) if objective.sparsity is None else means)[labels]
    better = (_changes(objective, labels, theta, level) <= 0) & (size > 1)
    return np.where(better[labels, None], level, theta)


def _better(pooled: DeviceTerms, level: Array) -> Array:
    """What one Newton step makes of the level of each component."""
    inverse, _ = generalized_inverse(pooled.hessians(level))
    return np.asarray(level - np.matmul(inverse, pooled.gradients(level)[:, :, None])[:, :, 0])


def _changes(objective: FusedObjective, labels: Index, theta: Array, level: Array) -> Array:
    """Change of the objective of each component when its parameters go from ``theta`` to a common ``level``."""
    terms = objective.terms
    change = terms.values(level) - terms.values(theta)
    if objective.sparsity is not None:
        change += (objective.sparsity * (np.abs(level) - np.abs(theta))).sum(axis=1)
    saved = objective.edge_radius * objective.penalty.value(objective.differences(theta))
    total = np.bincount(labels, change)
    # an edge counts for the component of either of its ends
    return np.asarray(total - np.bincount(labels[objective.graph.edges[:, 0]], saved, total.size), dtype=np.float64)


def _grouped(i: Index, j: Index, theta: Array, sparse: Mask | None) -> Array:
    """Means of ``theta (N, k)`` over groups joined by edges ``(i, j)``, 0 where any member of the group is sparse."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

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
