"""How probable partitions are before any row: a mixture of finite mixtures (Miller and Harrison 2018).

A number of kinds M, and their shares of the sites drawn from a Dirichlet distribution that is more or less even. Given
both, a site joins a group of n with weight n + evenness. Unlike a Chinese restaurant process it does not add small
groups beside the true ones as sites become many.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.special import log_gamma

#: How even the kinds' shares may be, all alike beforehand: parameters of the Dirichlet distribution, 1 is uniform.
EVENNESS = np.array([1.0, 3.0, 10.0, 30.0])
#: Up to so many sites there is room for as many groups.
ALL_SINGLE = 512
#: Logarithms that are lower by this add nothing to a sum.
NOTHING = 60.0


def room_for(V: int, groups: int) -> int:
    """Return for how many groups of V sites to make room, so that chains with ``groups`` of them can add more.

    As many as there are sites, unless these are many: then arrays grow with the groups, of which no sweep adds as many
    again as there are.
    """
    return min(V, max(ALL_SINGLE, 1 << (2 * groups).bit_length()))


@cache
def partition_table(V: int, most: int) -> Array:
    """Return `log_partitions`, computed once."""
    return log_partitions(V, most)


def log_partitions(V: int, most: int) -> Array:
    """Return the log prior of a partition of V sites into t <= most groups given the evenness, but for its sizes.

    The table is ``(E, most + 2)``; what sizes add is in `log_sizes`. The number of kinds has the beta-negative-binomial
    prior (1, 4, 3) of Gruen, Malsiner-Walli and Fruehwirth-Schnatter (2021), up to V: one kind is likeliest, and the
    tail is a power. The first column (no groups) and the last are minus infinity.
    """
    kinds = np.arange(1.0, V + 1)
    prior = log_gamma(kinds + 2) - log_gamma(kinds + 7)
    prior -= np.logaddexp.reduce(prior)
    even = EVENNESS[:, None]
    each = prior + log_gamma(kinds + 1) + log_gamma(even * kinds) - log_gamma(even * kinds + V)
    orders, group = log_gamma(kinds), log_gamma(EVENNESS)
    # sums end where those of the most groups, whose tails are the longest, have nothing to add
    ways = each[:, most - 1 :] - orders[: V - most + 1]
    last = most + int(np.flatnonzero((ways > ways.max(axis=1, keepdims=True) - NOTHING).any(axis=0))[-1])
    logs = np.full((len(EVENNESS), most + 2), -np.inf)
    for t in range(1, most + 1):
        ways = each[:, t - 1 : last] - orders[: last - t + 1]
        logs[:, t] = np.logaddexp.reduce(ways, axis=1) - t * group
    return logs


def log_sizes(sizes: Array | Index) -> Array:
    """What the groups' sizes add to the log prior of their partition, for each evenness ``(E,)``."""
    return np.asarray(log_gamma(np.asarray(sizes, dtype=np.float64) + EVENNESS[:, None]).sum(axis=1))


def log_prior(table: Array, sizes: Array | Index) -> float:
    """Log prior of a partition into groups of these sizes, by the table of `log_partitions`.

    Examples
    --------
    Three sites have five partitions: one of them whole, three into two groups, one into single sites.

    >>> import numpy as np
    >>> from fedkin.kin.partitions import log_partitions, log_prior
    >>> table = log_partitions(3, 3)
    >>> whole, pairs, single = (np.exp(log_prior(table, sizes)) for sizes in ([3], [2, 1], [1, 1, 1]))
    >>> round(float(whole + 3 * pairs + single), 6)
    1.0
    """
    return float(np.logaddexp.reduce(table[:, len(sizes)] + log_sizes(sizes)) - np.log(len(EVENNESS)))
