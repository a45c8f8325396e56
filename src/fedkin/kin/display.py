"""Hard groups to show: a cut of the probabilities' dendrogram, and whether to show it at all."""

from __future__ import annotations

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from fedkin._base import Array, Index
from fedkin.kin.pairs import Pairs

#: Groups are resolved when the agreement that is expected between them and the true ones is at least this...
AGREEMENT = 0.9
#: ... and the members of each are kin with at least this probability, on average.
CERTAIN = 0.5


def display_groups(same: Array | Pairs) -> Index:
    """Labels ``(V,)``, 0 for the largest group: the cut of least expected variation of information.

    Candidates are the cuts of the average-linkage tree, and for more sites than it can take the drawn partitions.

    Parameters
    ----------
    same : array (V, V) or Pairs
        Probability that two sites are in one group.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin import display_groups
    >>> display_groups(np.array([[1, 0.1, 0.9], [0.1, 1, 0.2], [0.9, 0.2, 1]])).tolist()
    [0, 1, 0]
    """
    if isinstance(same, Pairs):
        if not len(same.labels):  # the mixed model, which has no groups, has all the weight
            return np.zeros(same.shape[0], dtype=np.int64)
        drawn = np.unique(np.array([by_size(labels) for labels in same.labels]), axis=0)
        return np.asarray(min(drawn, key=lambda labels: _variation(labels, same.shared(labels))))
    V = len(same)
    if V < 2:
        return np.zeros(V, dtype=np.int64)
    return by_size(_best_cut(same))


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
    """The same groups, numbered by falling size, then by first member.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin.display import by_size
    >>> by_size(np.array([7, 2, 2, 5])).tolist()
    [1, 0, 0, 2]
    """
    _, first, inverse, size = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    rank = np.empty(len(size), dtype=np.int64)
    rank[np.lexsort([first, -size])] = np.arange(len(size))
    return np.asarray(rank[inverse])


def _variation(labels: Index, shared: Array) -> float:
    return float((np.log(np.bincount(labels)[labels]) - 2 * np.log(shared)).mean())


def _shared(same: Array | Pairs, labels: Index) -> Array:
    """How many members of its group are expected to be kin with each site ``(V,)``, itself included."""
    if isinstance(same, Pairs):
        return same.shared(labels)
    member = labels[:, None] == np.unique(labels)
    return np.asarray(((same @ member) * member).sum(axis=1))


def inside_probabilities(same: Array | Pairs, labels: Index) -> Array:
    """Mean probability ``(K,)`` that two members of each group are kin; 1 for a site on its own.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin.display import inside_probabilities
    >>> same = np.array([[1, 0.8, 0.1], [0.8, 1, 0.3], [0.1, 0.3, 1]])
    >>> inside_probabilities(same, np.array([0, 0, 1])).round(6).tolist()
    [0.8, 1.0]
    """
    size = np.bincount(labels)
    kin = np.bincount(labels, weights=_shared(same, labels) - 1.0)
    return np.asarray(np.where(size > 1, kin / np.maximum(size * (size - 1.0), 1.0), 1.0))


def between_probability(same: Array | Pairs, labels: Index) -> float:
    """Mean probability that two sites of different groups are kin; 0 where there is one group."""
    inside, expected, kin, pairs = _counts(same, labels)
    return float((expected - kin) / (pairs - inside)) if pairs > inside else 0.0


def agreement(same: Array | Pairs, labels: Index) -> float:
    """The adjusted Rand index that is expected between groups and the true ones (Fritsch and Ickstadt 2009).

    1 where every pair in a group is surely kin, and no other; 0 where groups say no more than chance.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin.display import agreement
    >>> same = np.kron(np.eye(2), np.ones((3, 3)))
    >>> sure = agreement(same, np.array([0, 0, 0, 1, 1, 1]))
    >>> same[0, 1:3] = same[1:3, 0] = 0.4
    >>> sure, round(agreement(same, np.array([0, 0, 0, 1, 1, 1])), 2)
    (1.0, 0.83)
    """
    inside, expected, kin, pairs = _counts(same, labels)
    chance = inside * expected / pairs if pairs else 0.0
    most = 0.5 * (inside + expected) - chance
    return float((kin - chance) / most) if most > 0 else 0.0


def _counts(same: Array | Pairs, labels: Index) -> tuple[float, float, float, float]:
    """Pairs inside groups, pairs that are expected to be kin, those inside groups, all pairs."""
    V, size = len(labels), np.bincount(labels)
    pairs = 0.5 * V * (V - 1)
    expected = same.expected() if isinstance(same, Pairs) else 0.5 * (float(same.sum()) - float(np.trace(same)))
    return float(0.5 * (size * (size - 1.0)).sum()), expected, 0.5 * float((_shared(same, labels) - 1.0).sum()), pairs


def resolved(same: Array | Pairs, labels: Index) -> bool:
    """Whether groups are to be shown: several, expected to agree with the true ones, and nobody in a doubtful one."""
    several = int(labels.max(initial=0)) > 0
    certain = bool(inside_probabilities(same, labels).min(initial=1.0) >= CERTAIN)
    return several and certain and agreement(same, labels) >= AGREEMENT
