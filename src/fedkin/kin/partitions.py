"""How probable partitions are before any row: a mixture of finite mixtures (Miller and Harrison 2018).

A number of kinds M, and their shares of the sites drawn uniformly. Given M, a site joins a group of n with weight
n + 1. Unlike a Chinese restaurant process it does not add small groups beside the true ones as sites become many.
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln, logsumexp

from fedkin._base import Array


def most_groups(V: int) -> int:
    """A cap on the number of groups of V sites."""
    return min(V, max(12, V // 12))


def log_partitions(V: int, most: int) -> Array:
    """Log prior of a partition of V sites into t groups, for t up to ``most``, but for factorials of the groups' sizes.

    The number of kinds has the beta-negative-binomial prior (1, 4, 3) of Gruen, Malsiner-Walli and
    Fruehwirth-Schnatter (2021), up to ``most``: one kind is likeliest, and the tail is a power. The first entry (no
    groups) and the last (more than ``most``) are minus infinity.

    Examples
    --------
    Three sites have five partitions: one of them whole, three into two groups, one into single sites.

    >>> import numpy as np
    >>> from fedkin.kin.partitions import log_partitions
    >>> whole, pairs, single = np.exp(log_partitions(3, 3)[1:4])
    >>> round(float(6 * whole + 3 * 2 * pairs + single), 6)
    1.0
    """
    kinds = np.arange(1.0, most + 1)
    prior = gammaln(kinds + 2) - gammaln(kinds + 7)
    prior -= logsumexp(prior)
    each = prior + gammaln(kinds + 1) + gammaln(kinds) - gammaln(kinds + V)
    logs = np.full(most + 2, -np.inf)
    for t in range(1, most + 1):
        logs[t] = logsumexp(each[t - 1 :] - gammaln(kinds[t - 1 :] - t + 1))
    return logs
