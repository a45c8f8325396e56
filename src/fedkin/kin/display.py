"""Hard groups to show: a cut of the probabilities' dendrogram, and whether to show it at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from fedkin._base import Array, Index
from fedkin.kin.pairs import Pairs

#: Most groups that are considered for display.
MOST_SHOWN = 60
#: Groups are resolved when the members of each are kin with at least this probability, on average...
CERTAIN = 0.5
#: ... and the mixed model, which has none, has less than this weight.
PLAUSIBLE = 0.5


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
    distance = np.clip(1.0 - same, 0.0, 1.0)
    np.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), "average")
    cuts = list(_cuts(tree, V))
    costs = [expected_variation(same, cut) for cut in cuts]
    return by_size(cuts[int(np.argmin(costs))])


def _cuts(tree: Array, V: int) -> Iterator[Index]:
    """Labels after every merge that leaves few enough groups, the single sites among them (scipy's cut_tree trips on
    ties)."""
    labels = np.arange(V)
    if V <= MOST_SHOWN:
        yield labels.copy()
    for merge, (a, b) in enumerate(tree[:, :2].astype(np.int64).tolist()):
        labels[(labels == a) | (labels == b)] = V + merge
        if V - merge - 1 <= MOST_SHOWN:
            yield labels.copy()


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


def expected_variation(same: Array, labels: Index) -> float:
    """A lower bound on the expected variation of information, up to a constant (Wade and Ghahramani 2018)."""
    return _variation(labels, _shared(same, labels))


def _variation(labels: Index, shared: Array) -> float:
    return float((np.log(np.bincount(labels)[labels]) - 2 * np.log(shared)).mean())


def _shared(same: Array | Pairs, labels: Index) -> Array:
    """How many members of its group are expected to be kin with each site ``(V,)``, itself included."""
    if isinstance(same, Pairs):
        return same.shared(labels)
    member = labels[:, None] == np.unique(labels)
    return np.asarray(((same @ member) * member).sum(axis=1))


def certainty(same: Array | Pairs, labels: Index) -> float:
    """The least, over groups of several sites, of the mean probability that members are kin; 0 without such groups.

    The least and not the mean: one large group that is certain says nothing about the others.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin.display import certainty
    >>> same = np.eye(5)
    >>> same[:3, :3] = 1
    >>> same[3, 4] = same[4, 3] = 0.25
    >>> certainty(same, np.array([0, 0, 0, 1, 1])), certainty(same, np.array([0, 0, 0, 1, 2]))
    (0.25, 1.0)
    """
    size = np.bincount(labels)
    pairs = (size * (size - 1.0))[size > 1]
    kin = np.bincount(labels, weights=_shared(same, labels) - 1.0)[size > 1]
    return float((kin / pairs).min(initial=1.0)) if len(pairs) else 0.0


def resolved(same: Array | Pairs, labels: Index, weight_mixed: float) -> bool:
    """Whether groups are to be shown: there are several, each is certain enough, and they are likelier than none."""
    several = int(labels.max(initial=0)) > 0
    return several and weight_mixed < PLAUSIBLE and certainty(same, labels) >= CERTAIN
