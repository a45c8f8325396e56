"""Partitions to start chains from: one group, merging by what sites say, by the graph, and by both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.display import by_size
from fedkin.kin.options import MANY_SITES, Given
from fedkin.kin.sampler.merging import merge
from fedkin.kin.sampler.neighbours import Neighbours
from fedkin.kin.sampler.sites import Sites

#: Up to this many sites merging starts from single sites, beyond it from k-means.
MERGE_ALL = 400
#: Most groups that merging starts from beyond that, and most sites that k-means moves its centres by.
MOST_SEEDS, MOST_POINTS = 400, 5000
#: Widths of groups that merging assumes, in units of the spread between sites: usual ones, and such of a few far off.
MERGE_WIDTH, WIDE_WIDTH = 0.8, 10.0
#: Eigenvectors of the modularity matrix at either end of its spectrum, principal directions of what sites say.
GRAPH_DIRECTIONS, DIRECTIONS = 6, 5
#: Up to this many sites all eigenvectors are computed.
DENSE = 1500


@dataclass(frozen=True, eq=False)
class Start:
    """Groups ``z (V,)``, numbered by falling size, and the number of the within-group share to begin with."""

    name: str
    z: Index
    share: int


def make_starts(sites: Sites, rng: np.random.Generator, given: Given | None = None) -> list[Start]:
    """Partitions that differ in what they believe, and the one that was given."""
    V, p = sites.size
    many = min(V, max(12, int(np.sqrt(V)) * (2 if V <= MERGE_ALL else 6)), MOST_SEEDS)
    effects = sites.c[-1]  # the mixed model's, in units of their spread
    _, _, directions = np.linalg.svd(effects, full_matrices=False)
    seen = effects @ directions[:DIRECTIONS].T

    def merged(z: Index, rates: tuple[float, float] = (0.5, 0.5), share: int = 0, width: float = MERGE_WIDTH) -> Index:
        return by_size(merge(sites.sums[share], np.full(p, 1.0 / width), sites.neighbours, rates, by_size(z)))

    def fine() -> Index:
        return np.arange(V) if V <= MERGE_ALL else kmeans(effects, many, rng)

    wide = min(3, len(sites.sums) - 1)
    starts = [
        Start("one group", np.zeros(V, dtype=np.int64), len(sites.sums) - 1),
        Start("merged", merged(fine()), 0),
        Start("merged in principal directions", merged(kmeans(seen, many, rng)), 0),
        Start("merged with spread", merged(fine(), share=wide), wide),
    ]
    if V < MANY_SITES:
        starts.append(Start("merged far off", merged(fine(), share=1, width=WIDE_WIDTH), 1))
    if 0 < sites.neighbours.neighbour.size < V * (V - 1):
        starts += _graph_starts(sites, seen, many, starts[1].z, merged, rng)
    if given is not None:
        starts.append(Start("given", merged(given.z) if given.fine else by_size(given.z), 0))
    return starts


def _graph_starts(
    sites: Sites, seen: Array, many: int, merged_z: Index, merged: Callable[..., Index], rng: np.random.Generator
) -> list[Start]:
    top, bottom = modularity_directions(sites.neighbours)
    both = np.column_stack([seen / max(seen.std(), 1e-300), top / max(top.std(), 1e-300)])
    starts = []
    for name, places in (("graph", top), ("graph, inverted", bottom), ("graph and sites", both)):
        rates = edge_rates(kmeans(places, min(6, len(seen)), rng), sites.neighbours)
        starts.append(Start(name, merged(kmeans(places, many, rng), rates), 0))
    rates = edge_rates(merged_z, sites.neighbours)
    V = len(seen)
    fine = np.arange(V) if V <= MERGE_ALL else kmeans(sites.c[-1], many, rng)
    return [*starts, Start("merged with the graph", merged(fine, rates), 0)]


def edge_rates(z: Index, neighbours: Neighbours) -> tuple[float, float]:
    """Shares of pairs that are edges, inside and between groups, each with one imagined edge and one gap."""
    V, size = len(z), np.bincount(z)
    inside_pairs = float((size * (size - 1)).sum()) / 2
    inside = neighbours.inside(z)
    between = float(neighbours.weight.sum()) / 2 - inside
    return (inside + 1) / (inside_pairs + 2), (between + 1) / (V * (V - 1) / 2 - inside_pairs + 2)


def modularity_directions(neighbours: Neighbours) -> tuple[Array, Array]:
    """Sites as points ``(V, k)`` by the largest and by the smallest eigenvalues of ``A - d d' / sum d``."""
    first, neighbour, weight = neighbours
    V = len(first) - 1
    k = min(GRAPH_DIRECTIONS, V // 2)
    row = np.repeat(np.arange(V), np.diff(first))
    degree = np.bincount(row, weights=weight, minlength=V)
    if V <= DENSE:
        dense = np.zeros((V, V))
        np.add.at(dense, (row, neighbour), weight)
        values, vectors = np.linalg.eigh(dense - np.outer(degree, degree) / degree.sum())
    else:
        from scipy.sparse import csr_array
        from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

        A = csr_array((weight, neighbour, first), shape=(V, V))
        operator = LinearOperator(
            (V, V), matvec=lambda x: A @ x - degree * (degree @ x) / degree.sum(), dtype=np.float64
        )
        # rough directions will do, and ones would be a bad start: they are in the null space
        begin = np.random.default_rng(0).normal(size=V)
        try:
            values, vectors = eigsh(operator, k=2 * k, which="BE", v0=begin, ncv=6 * k, tol=1e-2, maxiter=30)
        except ArpackNoConvergence as some:
            values, vectors = some.eigenvalues, some.eigenvectors
        k = min(k, len(values))
    points = vectors * np.sqrt(np.abs(values))
    order = np.argsort(values)
    return points[:, order[-k:]], points[:, order[:k]]


def kmeans(points: Array, k: int, rng: np.random.Generator, rounds: int = 15) -> Index:
    """Labels ``(V,)`` of at most k groups, from k-means++ seeds; many points only follow the centres of some."""
    if len(points) > MOST_POINTS:
        some = points[np.linspace(0, len(points) - 1, MOST_POINTS).astype(np.int64)]
        labels = kmeans(some, k, rng, rounds)
        size = np.bincount(labels, minlength=k)
        sums = np.stack([np.bincount(labels, weights=part, minlength=k) for part in some.T], axis=1)
        return _nearest(points, sums[size > 0] / size[size > 0, None])
    centres = points[[rng.integers(len(points))]]
    distance = ((points - centres[0]) ** 2).sum(axis=1)
    while len(centres) < k and distance.sum() > 0:
        centres = np.vstack([centres, points[rng.choice(len(points), p=distance / distance.sum())]])
        distance = np.minimum(distance, ((points - centres[-1]) ** 2).sum(axis=1))
    for _ in range(rounds):
        labels = _nearest(points, centres)
        sums = np.zeros_like(centres)
        np.add.at(sums, labels, points)
        size = np.bincount(labels, minlength=len(centres))
        centres[size > 0] = sums[size > 0] / size[size > 0, None]
    return labels


def _nearest(points: Array, centres: Array) -> Index:
    """The centre next to each point ``(V,)``."""
    return np.asarray(((centres**2).sum(axis=1) - 2 * points @ centres.T).argmin(axis=1), dtype=np.int64)
