"""Probabilities that two sites are kin, groups to show, and how well chains have mixed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from fedkin._base import Array, Index

#: Groups are resolved when the agreement that is expected between them and the true ones is at least this...
AGREEMENT = 0.9
#: ... and the members of each are kin with at least this probability, on average.
CERTAIN = 0.5
#: R-hat up to which chains agree, and up to which they nearly do.
AGREE, NEARLY = 1.05, 1.2


@dataclass(frozen=True, eq=False)
class Pairs:
    """Partitions that were drawn, from which the probability of any pair follows.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin import Pairs
    >>> pairs = Pairs(np.array([[0, 0, 1], [0, 1, 1]]), np.array([0.5, 0.25]), 0.125)
    >>> pairs[0, 1].item(), pairs.block([0, 2], [1, 2]).tolist()
    (0.625, [[0.625, 0.125], [0.375, 1.0]])
    """

    labels: Index  # (S, V) groups of all sites in each of S partitions
    chance: Array  # (S,) probability of each; they sum to 1 with what is left to models without groups
    base: float  # probability of being kin that is common to all pairs: one model for all

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
        """Return the same for some sites, in that order."""
        return Pairs(self.labels[:, order], self.chance, self.base)

    def shared(self, groups: Index) -> Array:
        """Return how many members of each site's group are expected to be kin with it ``(V,)``, itself included."""
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
        """Return how many of all pairs are expected to be kin."""
        drawn, V = np.array([_pairs_inside(labels) for labels in self.labels]), self.labels.shape[1]
        return float(self.chance @ drawn + self.base * 0.5 * V * (V - 1))


def in_order(probability: Array | Pairs, order: Index) -> Array | Pairs:
    """Return probabilities of all pairs, with sites in another order."""
    if isinstance(probability, Pairs):
        return probability.take(order)
    return np.asarray(probability[np.ix_(order, order)])


def display_groups(same: Array | Pairs) -> Index:
    """Return labels ``(V,)``, 0 for the largest group: the cut of least expected variation of information."""
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
    """Return the same groups, numbered by falling size, then by first member."""
    _, first, inverse, size = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    rank = np.empty(len(size), dtype=np.int64)
    rank[np.lexsort([first, -size])] = np.arange(len(size))
    return np.asarray(rank[inverse])


def _shared(same: Array | Pairs, labels: Index) -> Array:
    """Return how many members of its group are expected to be kin with each site ``(V,)``, itself included."""
    if isinstance(same, Pairs):
        return same.shared(labels)
    member = labels[:, None] == np.unique(labels)
    return np.asarray(((same @ member) * member).sum(axis=1))


def inside_probabilities(same: Array | Pairs, labels: Index) -> Array:
    """Return the mean probability ``(K,)`` that two members of each group are kin; 1 for a site on its own."""
    size = np.bincount(labels)
    kin = np.bincount(labels, weights=_shared(same, labels) - 1.0)
    return np.asarray(np.where(size > 1, kin / np.maximum(size * (size - 1.0), 1.0), 1.0))


def between_probability(same: Array | Pairs, labels: Index) -> float:
    """Return the mean probability that two sites of different groups are kin; 0 where there is one group."""
    inside, expected, kin, pairs = _counts(same, labels)
    return float((expected - kin) / (pairs - inside)) if pairs > inside else 0.0


def agreement(same: Array | Pairs, labels: Index) -> float:
    """Return the adjusted Rand index expected between groups and the true ones (Fritsch and Ickstadt 2009)."""
    inside, expected, kin, pairs = _counts(same, labels)
    chance = inside * expected / pairs if pairs else 0.0
    most = 0.5 * (inside + expected) - chance
    return float((kin - chance) / most) if most > 0 else 0.0


def _counts(same: Array | Pairs, labels: Index) -> tuple[float, float, float, float]:
    """Return pairs inside groups, pairs that are expected to be kin, those inside groups, all pairs."""
    pairs = 0.5 * len(labels) * (len(labels) - 1)
    expected = same.expected() if isinstance(same, Pairs) else 0.5 * (float(same.sum()) - float(np.trace(same)))
    return _pairs_inside(labels), expected, 0.5 * float((_shared(same, labels) - 1.0).sum()), pairs


def _pairs_inside(labels: Index) -> float:
    size = np.bincount(labels)
    return float(0.5 * (size * (size - 1.0)).sum())


def resolved(same: Array | Pairs, labels: Index) -> bool:
    """Return whether groups are to be shown: several, expected to agree with the true ones, nobody in doubt."""
    several = int(labels.max(initial=0)) > 0
    certain = bool(inside_probabilities(same, labels).min(initial=1.0) >= CERTAIN)
    return several and certain and agreement(same, labels) >= AGREEMENT


def split_rhat(draws: Array, variance: Array | None = None) -> Array:
    """Return the potential scale reduction of chains cut in half; near 1 when they agree.

    ``draws (chains, draws, ...)``, at least four of each chain. Where they are expectations given a part of the state,
    ``variance (...)`` is that of what they are expectations of. 1 where nothing varies.
    """
    halves = _split(draws)
    n, rounding = halves.shape[1], 1e-12 * (1e-300 + np.abs(halves).max(axis=(0, 1)) ** 2)
    within = halves.var(axis=1, ddof=1).mean(axis=0) if variance is None else variance
    between = n * halves.mean(axis=1).var(axis=0, ddof=1)
    moving = within > rounding
    ratio = np.divide(between, within, out=np.zeros_like(within), where=moving)
    still = np.where(between > rounding, np.inf, 1.0)
    return np.asarray(np.where(moving, np.sqrt((n - 1 + ratio) / n), still))


def effective_size(draws: Array, variance: Array | None = None) -> Array:
    """Return the effective sample size of all chains together, by Geyer's initial monotone sequence on split chains.

    Arguments are those of `split_rhat`. The mean of expectations is known better than from as many draws: with a
    variance the size is at most the number of draws, which it is where nothing varies.
    """
    halves = _split(draws)
    m, n = halves.shape[:2]
    chains = halves.reshape(m, n, -1)
    total = float(m * n)
    centred = chains - chains.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * n, axis=1)
    power = (spectrum.real**2 + spectrum.imag**2).mean(axis=0)
    covariance = np.fft.irfft(power, 2 * n, axis=0)[:n] / n
    plus = covariance[0] + (chains.mean(axis=1).var(axis=0, ddof=1) if m > 1 else 0.0)
    still = np.ptp(chains, axis=(0, 1)) <= 1e-12 * (1e-300 + np.abs(chains).max(axis=(0, 1)))
    correlation = 1.0 - (covariance[0] * n / (n - 1) - covariance) / np.where(still, 1.0, plus)
    correlation[0] = 1.0
    # sums of neighbours are positive in theory, and fall: the rest is noise
    pairs = correlation[: 2 * (n // 2)].reshape(n // 2, 2, -1).sum(axis=1)[: max((n - 3) // 2, 1)]
    kept = np.logical_and.accumulate(pairs > 0, axis=0)
    last = np.minimum(2 * kept.sum(axis=0), n - 1)
    time = -1.0 + 2.0 * (np.minimum.accumulate(pairs, axis=0) * kept).sum(axis=0)
    time = time + np.maximum(correlation[last, np.arange(len(last))], 0.0)
    sizes = total / np.maximum(time, 1.0 / np.log10(total))
    if variance is not None:
        total_variance = np.where(still, 1.0, covariance[0] * n / (n - 1) + chains.mean(axis=1).var(axis=0))
        sizes = np.minimum(sizes * np.maximum(variance.ravel() / total_variance, 1.0), total)
    return np.asarray(np.where(still, total, sizes).reshape(halves.shape[2:]))


def _split(draws: Array) -> Array:
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, draws.shape[1] - half :]])
