"""Partitions of the sites into groups: prior, site likelihoods, graphs, pair probabilities and reported groups.

The prior is a mixture of finite mixtures (Miller and Harrison 2018): a random number of components M, with shares of
the sites from a symmetric Dirichlet distribution. Given both, a site joins a group of size n with weight
n + evenness. Unlike a Chinese restaurant process, it does not add spurious small groups as the number of sites grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.sparse import csr_array
from scipy.spatial.distance import squareform
from scipy.special import gammaln

from fedkin._base import Array, Index, Mask
from fedkin.kin.likelihoods import apply

#: How a graph was used.
GraphUse = Literal["none", "used", "ignored", "inverted"]
#: Possible shares of the between-site variance inside groups: 0 means groups alone, 1 no groups.
SHARES = np.array([0.0, 0.03, 0.1, 0.3, 0.6, 1.0])
#: If more than this share of the variance is inside groups, sites form a continuum, whatever a graph says.
CONTINUUM = 2 / 3
#: How even the kinds' shares may be, all alike beforehand: parameters of the Dirichlet distribution, 1 is uniform.
EVENNESS = np.array([1.0, 3.0, 10.0, 30.0])
#: Sites whose matrices are decomposed at once.
CHUNK = 2048
#: Chances below this are nothing.
UNLIKELY = 1e-3
#: Groups are resolved if their expected agreement with the true ones is at least this.
AGREEMENT = 0.9


def are_kin(share: Index | int, groups: Index | int) -> Mask:
    """Return whether members of a group count as alike, given the index of the share inside groups and of groups."""
    # not in one group with a variance inside, nor where less than a third of what differs is between groups
    return np.asarray((np.asarray(share) == 0) | ((np.asarray(groups) > 1) & (SHARES[share] <= CONTINUUM)))


def capacity(V: int, groups: int) -> int:
    """Return the number of groups to allocate arrays for where V sites form ``groups`` groups."""
    # as many as there are sites, unless these are more than 512: no sweep doubles the groups
    return min(V, max(512, 1 << (2 * groups).bit_length()))


@cache
def log_partitions(V: int, most: int) -> Array:
    """Return the log prior of a partition of V sites into t <= most groups given the evenness, without the factor of
    their sizes.

    The table is ``(E, most + 2)``; `log_sizes` has the factor of the sizes. The number of components has the
    beta-negative-binomial prior (1, 4, 3) of Gruen, Malsiner-Walli and Fruehwirth-Schnatter (2021), up to V: one
    component is most likely, and the tail follows a power law. The first column (no groups) and the last are minus
    infinity.
    """
    kinds = np.arange(1.0, V + 1)
    prior = gammaln(kinds + 2) - gammaln(kinds + 7)
    prior -= np.logaddexp.reduce(prior)
    even = EVENNESS[:, None]
    each = prior + gammaln(kinds + 1) + gammaln(even * kinds) - gammaln(even * kinds + V)
    orders, group = gammaln(kinds), gammaln(EVENNESS)
    # sums end where those of the most groups, whose tails are the longest, have nothing to add to 16 digits
    ways = each[:, most - 1 :] - orders[: V - most + 1]
    last = most + int(np.flatnonzero((ways > ways.max(axis=1, keepdims=True) - 60.0).any(axis=0))[-1])
    logs = np.full((len(EVENNESS), most + 2), -np.inf)
    for t in range(1, most + 1):
        ways = each[:, t - 1 : last] - orders[: last - t + 1]
        logs[:, t] = np.logaddexp.reduce(ways, axis=1) - t * group
    return logs


def log_sizes(sizes: Array | Index) -> Array:
    """Return the contribution of group sizes to the log prior of their partition, for each evenness ``(E,)``."""
    return np.asarray(gammaln(np.asarray(sizes, dtype=np.float64) + EVENNESS[:, None]).sum(axis=1))


def log_prior(table: Array, sizes: Array | Index) -> float:
    """Return the log prior of a partition into groups of these sizes, from the table of `log_partitions`."""
    return float(np.logaddexp.reduce(table[:, len(sizes)] + log_sizes(sizes)) - np.log(len(EVENNESS)))


class Neighbours(NamedTuple):
    """Adjacency lists: neighbours of site u are ``neighbour[first[u]:first[u + 1]]``, with edge weights ``weight``."""

    first: Index
    neighbour: Index
    weight: Array

    @classmethod
    def from_edges(cls, V: int, edges: Index, weights: Array | None = None) -> Neighbours:
        """Return adjacency lists from pairs of sites ``(E, 2)`` and their weights ``(E,)``, by default 1 each."""
        weights = np.ones(len(edges)) if weights is None else weights
        ends, others = np.concatenate([edges[:, 0], edges[:, 1]]), np.concatenate([edges[:, 1], edges[:, 0]])
        order = np.lexsort([others, ends])
        first = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=V))])
        return cls(first.astype(np.int64), others[order].astype(np.int64), np.tile(weights, 2)[order])

    @classmethod
    def none(cls, V: int) -> Neighbours:
        return cls.from_edges(V, np.empty((0, 2), dtype=np.int64))

    def between(self, z: Index, n_groups: int) -> Array:
        """Return the total edge weight between any two groups ``(K, K)``; edges inside groups count twice."""
        pairs = np.repeat(z, np.diff(self.first)) * n_groups + z[self.neighbour]
        made = np.bincount(pairs, weights=self.weight, minlength=n_groups**2)
        return made.reshape(n_groups, n_groups).astype(np.float64)

    def inside(self, z: Index) -> float:
        """Return the total weight of edges inside groups."""
        return 0.5 * float(self.weight[np.repeat(z, np.diff(self.first)) == z[self.neighbour]].sum())


@dataclass(frozen=True, eq=False)
class SiteLikelihoods:
    """Likelihoods of group centres, with effects inside groups integrated out for each of R shares of the variance.

    ``sums (R, V, T + p)`` holds upper triangles of ``H``, row by row (`packed`), then ``c``: the log likelihood of
    ``nu`` is ``c'nu - nu'H nu / 2 + k``, with ``k (R, V)``.
    """

    sums: Array
    k: Array
    neighbours: Neighbours

    @classmethod
    def from_effects(cls, W: Array, c: Array, neighbours: Neighbours) -> SiteLikelihoods:
        """Integrate out effects with log likelihoods ``c'b - b'W b / 2``, ``W (V, p, p)`` and ``c (V, p)``."""
        V, p = c.shape
        T = p * (p + 1) // 2
        sums, k = np.empty((len(SHARES), V, T + p)), np.empty((len(SHARES), V))
        for start in range(0, V, CHUNK):
            part = slice(start, start + CHUNK)
            values, vectors = np.linalg.eigh(W[part])
            values = np.maximum(values, 0.0)
            turned = apply(np.swapaxes(vectors, 1, 2), c[part])
            for r, share in enumerate(SHARES):
                kept = 1.0 / (1.0 + share * values)
                sums[r, part, :T] = packed((vectors * (values * kept)[:, None, :]) @ np.swapaxes(vectors, 1, 2))
                sums[r, part, T:] = apply(vectors, kept * turned)
                k[r, part] = 0.5 * (share * kept * turned**2 - np.log1p(share * values)).sum(axis=1)
        return cls(sums, k, neighbours)

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of sites and of coefficients p; a site has ``p (p + 1) / 2 + p`` sums."""
        V, length = self.sums.shape[1:]
        return V, n_coefficients(length)

    @property
    def H(self) -> Array:
        """Upper triangles ``(R, V, T)``."""
        return self.sums[:, :, : -self.size[1]]

    @property
    def c(self) -> Array:
        """``(R, V, p)``."""
        return self.sums[:, :, -self.size[1] :]


def n_coefficients(length: int) -> int:
    """Return the number of coefficients p of a site with ``p (p + 1) / 2 + p`` sums."""
    return (math.isqrt(9 + 8 * length) - 3) // 2


def group_sums(sums: Array, z: Index, n_groups: int) -> Array:
    """Return sums ``(..., K, T + p)`` over the members of each group, from ``sums (..., V, T + p)``."""
    V = len(z)
    if n_groups == V == np.unique(z).size:  # single sites
        return np.asarray(sums[..., np.argsort(z), :])
    if n_groups * V <= 20_000:
        member = np.zeros((n_groups, V))
        member[z, np.arange(V)] = 1.0
        return np.asarray(member @ sums)
    sparse = csr_array((np.ones(V), (z, np.arange(V))), shape=(n_groups, V))
    each = [np.asarray(sparse @ part) for part in sums.reshape(-1, V, sums.shape[-1])]
    return np.stack(each).reshape(*sums.shape[:-2], n_groups, -1)


def packed(matrices: Array) -> Array:
    """Return upper triangles ``(..., T)`` of symmetric matrices ``(..., p, p)``, row by row."""
    i, j = triangle(matrices.shape[-1])
    return np.asarray(matrices[..., i, j])


def pack_prior(mean: Array, variance: Array) -> Array:
    """Return a normal prior of group centres as a row of sums ``(T + p,)`` and the logarithm of its constant."""
    p, pull = len(mean), mean / variance
    row = np.zeros(p * (p + 1) // 2 + p + 1)
    row[_places(p).diagonal()] = 1.0 / variance
    row[-p - 1 : -1], row[-1] = pull, -0.5 * float(np.log(variance).sum() + mean @ pull)
    return row


def unpacked(triangles: Array, p: int) -> Array:
    """Return symmetric matrices ``(..., p, p)`` with these upper triangles."""
    return np.asarray(triangles[..., _places(p)])


@cache
def triangle(p: int) -> tuple[Index, Index]:
    """Return rows and columns of the entries of a triangle."""
    return np.triu_indices(p)


@cache
def _places(p: int) -> Index:
    """Return where in its triangle each entry of a symmetric matrix ``(p, p)`` is."""
    i, j = triangle(p)
    places = np.empty((p, p), dtype=np.int64)
    places[i, j] = places[j, i] = np.arange(len(i))
    return places


# --- who is kin, and groups to show ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pairs:
    """Sampled partitions, which determine the probability that any two sites are alike.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin import Pairs
    >>> pairs = Pairs(np.array([[0, 0, 1], [0, 1, 1]]), np.array([0.5, 0.25]), 0.125)
    >>> pairs[0, 1].item(), pairs.block([0, 2], [1, 2]).tolist()
    (0.625, [[0.625, 0.125], [0.375, 1.0]])
    """

    labels: Index  # (S, V) groups of all sites in each of S partitions
    chance: Array  # (S,) probability of each; with that of models without groups they sum to 1
    base: float  # probability of being alike that is common to all pairs: one model for all

    @property
    def shape(self) -> tuple[int, int]:
        return self.labels.shape[1], self.labels.shape[1]

    def __getitem__(self, key: tuple[object, object]) -> Array:
        """Return probabilities of pairs ``(i, j)``, which may be arrays of equal length."""
        i, j = (np.asarray(part) for part in key)
        same = np.tensordot(self.chance, self.labels[:, i] == self.labels[:, j], 1) + self.base
        return np.asarray(np.where(i == j, 1.0, same))

    def block(self, rows: object, columns: object) -> Array:
        """Return probabilities ``(len(rows), len(columns))`` of all pairs of these positions."""
        i, j = np.asarray(rows), np.asarray(columns)
        total = np.full((len(i), len(j)), self.base)
        for chance, labels in zip(self.chance, self.labels, strict=True):
            total += chance * (labels[i][:, None] == labels[j])
        return np.asarray(np.where(i[:, None] == j, 1.0, total))

    def take(self, order: Index) -> Pairs:
        """Return the pairs of some sites, in the given order."""
        return Pairs(self.labels[:, order], self.chance, self.base)

    def shared(self, groups: Index) -> Array:
        """Return the expected number of members of each site's group that are like it ``(V,)``, including itself."""
        size = np.bincount(groups)[groups]
        total = 1.0 + self.base * (size - 1)
        for chance, labels in zip(self.chance, self.labels, strict=True):
            joint = groups * (int(labels.max()) + 1) + labels
            if int(joint.max()) < 8 * len(joint):
                total += chance * (np.bincount(joint)[joint] - 1)
            else:
                _, both, count = np.unique(joint, return_inverse=True, return_counts=True)
                total += chance * (count[both] - 1)
        return np.asarray(total)

    def expected(self) -> float:
        """Return the expected number of pairs that are alike."""
        sizes, V = [np.bincount(labels) for labels in self.labels], self.labels.shape[1]
        drawn = np.array([0.5 * float(size @ (size - 1.0)) for size in sizes])
        return float(self.chance @ drawn + self.base * 0.5 * V * (V - 1))


def display_groups(same: Array | Pairs) -> Index:
    """Return labels ``(V,)``, 0 for the largest group, that minimise the expected variation of information."""
    # cuts of the average-linkage tree, or for more sites than it can take the drawn partitions
    if isinstance(same, Pairs):
        if not len(same.labels):  # the mixed model, which has no groups, has all the weight
            return np.zeros(same.shape[0], dtype=np.int64)
        drawn = np.unique(np.array([by_size(labels) for labels in same.labels]), axis=0)

        def variation(labels: Index) -> float:
            return float((np.log(np.bincount(labels)[labels]) - 2 * np.log(same.shared(labels))).mean())

        return np.asarray(min(drawn, key=variation))
    return by_size(_best_cut(same)) if len(same) > 1 else np.zeros(len(same), dtype=np.int64)


def _best_cut(same: Array) -> Index:
    """Return the cut of the average-linkage tree with the least expected variation of information."""
    V = len(same)
    tree = linkage(squareform(np.clip(1.0 - same, 0.0, 1.0), checks=False), "average")
    joined = tree[:, :2].astype(np.int64).tolist()
    members = {u: np.array([u]) for u in range(V)}
    shared, costs = np.ones(V), np.zeros(V)  # single sites cost nothing
    logs = np.zeros(V)  # of each site's group: log size - 2 log(expected number of kin)
    for merge, (a, b) in enumerate(joined):
        one, other = members.pop(a), members.pop(b)
        both = same[np.ix_(one, other)]
        shared[one] += both.sum(axis=1)
        shared[other] += both.sum(axis=0)
        members[V + merge] = group = np.concatenate([one, other])
        logs[group] = np.log(len(group)) - 2 * np.log(shared[group])
        costs[merge + 1] = logs.sum()
    labels = np.arange(V)
    for merge, (a, b) in enumerate(joined[: int(np.argmin(costs))]):
        labels[(labels == a) | (labels == b)] = V + merge
    return labels


def by_size(labels: Index) -> Index:
    """Renumber groups by decreasing size, then by first member."""
    _, first, inverse, size = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    rank = np.empty(len(size), dtype=np.int64)
    rank[np.lexsort([first, -size])] = np.arange(len(size))
    return np.asarray(rank[inverse])


def cohesion(same: Array | Pairs, labels: Index) -> tuple[Array, float]:
    """Return the mean probability ``(K,)`` that two members of each group are alike, 1 for a single site, and that of
    two sites of different groups, 0 if there is one group."""
    size, kin, expected, pairs = _counts(same, labels)
    inside = np.where(size > 1, kin / np.maximum(0.5 * size * (size - 1.0), 1.0), 1.0)
    others = pairs - 0.5 * float(size @ (size - 1.0))
    return inside, float((expected - kin.sum()) / others) if others > 0 else 0.0


def agreement(same: Array | Pairs, labels: Index) -> float:
    """Return the expected adjusted Rand index between these groups and the true ones (Fritsch and Ickstadt 2009)."""
    size, kin, expected, pairs = _counts(same, labels)
    inside = 0.5 * float(size @ (size - 1.0))
    chance = inside * expected / pairs if pairs else 0.0
    most = 0.5 * (inside + expected) - chance
    return float((kin.sum() - chance) / most) if most > 0 else 0.0


def _counts(same: Array | Pairs, labels: Index) -> tuple[Index, Array, float, float]:
    """Return sizes of groups ``(K,)``, pairs inside them and in all that are expected to be alike, and all pairs."""
    if isinstance(same, Pairs):
        shared, expected = same.shared(labels), same.expected()
    else:
        member = labels[:, None] == np.unique(labels)
        shared, expected = ((same @ member) * member).sum(axis=1), 0.5 * (float(same.sum()) - float(np.trace(same)))
    kin = 0.5 * np.bincount(labels, weights=shared - 1.0)
    return np.bincount(labels).astype(np.int64), kin.astype(np.float64), expected, 0.5 * len(labels) * (len(labels) - 1)


def resolved(same: Array | Pairs, labels: Index) -> bool:
    """Return whether groups are resolved: several groups, expected to agree with the true ones, and the members of each
    more likely alike than not, on average."""
    several, inside = int(labels.max(initial=0)) > 0, cohesion(same, labels)[0]
    return several and bool(inside.min(initial=1.0) >= 0.5) and agreement(same, labels) >= AGREEMENT


def edge_rates(z: Index, neighbours: Neighbours) -> tuple[float, float]:
    """Return the shares of pairs that are edges, inside and between groups, each with one pseudo-edge and one gap."""
    V, size = len(z), np.bincount(z)
    inside_pairs = float((size * (size - 1)).sum()) / 2
    inside = neighbours.inside(z)
    between = float(neighbours.weight.sum()) / 2 - inside
    return (inside + 1) / (inside_pairs + 2), (between + 1) / (V * (V - 1) / 2 - inside_pairs + 2)
