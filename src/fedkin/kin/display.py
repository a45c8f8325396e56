"""Hard groups to show: a cut of the probabilities' dendrogram, and whether to show it at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from fedkin._base import Array, Index

#: Most groups that are considered for display.
MOST_SHOWN = 60
#: Groups are resolved when members of one are kin with at least this probability, on average over sites...
CERTAIN = 0.5
#: ... and the mixed model, which has none, has less than this weight.
PLAUSIBLE = 0.5


def display_groups(same: Array) -> Index:
    """Labels ``(V,)``, 0 for the largest group: the average-linkage cut of least expected variation of information.

    Parameters
    ----------
    same : array (V, V)
        Probability that two sites are in one group.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin import display_groups
    >>> display_groups(np.array([[1, 0.1, 0.9], [0.1, 1, 0.2], [0.9, 0.2, 1]])).tolist()
    [0, 1, 0]
    """
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
    member = labels[:, None] == np.unique(labels)
    size = member @ member.sum(axis=0)
    shared = ((same @ member) * member).sum(axis=1)
    return float((np.log(size) - 2 * np.log(shared)).mean())


def certainty(same: Array, labels: Index) -> float:
    """Mean probability of being kin with the other members of one's group, over sites that have some; else 0."""
    together = (labels[:, None] == labels) & ~np.eye(len(labels), dtype=bool)
    company = together.sum(axis=1)
    if not company.any():
        return 0.0
    share = (same * together).sum(axis=1)[company > 0] / company[company > 0]
    return float(share.mean())


def resolved(same: Array, labels: Index, weight_mixed: float) -> bool:
    """Whether groups are to be shown: there are several, they are certain enough, and more likely than none."""
    several = int(labels.max(initial=0)) > 0
    return several and weight_mixed < PLAUSIBLE and certainty(same, labels) >= CERTAIN
