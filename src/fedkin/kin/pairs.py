"""Probabilities that two sites are kin, for more sites than an array of all pairs can hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkin._base import Array, Index


@dataclass(frozen=True, eq=False)
class Pairs:
    """Partitions that were drawn, from which the probability of any pair follows.

    Attributes
    ----------
    labels : int array (S, V)
        Groups of all sites in each of S partitions.
    chance : array (S,)
        Probability of each partition; together with what is left to models without groups they sum to 1.
    base : float
        Probability of being kin that is common to all pairs: one model for all.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin import Pairs
    >>> pairs = Pairs(np.array([[0, 0, 1], [0, 1, 1]]), np.array([0.5, 0.25]), 0.125)
    >>> pairs[0, 1].item(), pairs.block([0, 2], [1, 2]).tolist()
    (0.625, [[0.625, 0.125], [0.375, 1.0]])
    """

    labels: Index
    chance: Array
    base: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.labels.shape[1], self.labels.shape[1]

    def __getitem__(self, key: tuple[object, object]) -> Array:
        """Probabilities of pairs ``(i, j)``, which may be arrays of equal length."""
        i, j = (np.asarray(part) for part in key)
        same = np.tensordot(self.chance, self.labels[:, i] == self.labels[:, j], 1) + self.base
        return np.asarray(np.where(i == j, 1.0, same))

    def block(self, rows: object, columns: object) -> Array:
        """Probabilities ``(len(rows), len(columns))`` of all pairs of these positions."""
        i, j = np.asarray(rows), np.asarray(columns)
        total = np.full((len(i), len(j)), self.base)
        for chance, labels in zip(self.chance, self.labels, strict=True):
            total += chance * (labels[i][:, None] == labels[j])
        return np.asarray(np.where(i[:, None] == j, 1.0, total))

    def take(self, order: Index) -> Pairs:
        """The same for some sites, in that order."""
        return Pairs(self.labels[:, order], self.chance, self.base)

    def shared(self, groups: Index) -> Array:
        """How many members of each site's group are expected to be kin with it ``(V,)``, itself included."""
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
        """How many of all pairs are expected to be kin."""
        sizes = (np.bincount(labels) for labels in self.labels)
        drawn = np.array([0.5 * (size * (size - 1.0)).sum() for size in sizes])
        V = self.labels.shape[1]
        return float(self.chance @ drawn + self.base * 0.5 * V * (V - 1))


def in_order(probability: Array | Pairs, order: Index) -> Array | Pairs:
    """Probabilities of all pairs, with sites in another order."""
    if isinstance(probability, Pairs):
        return probability.take(order)
    return np.asarray(probability[np.ix_(order, order)])
