"""Groups that split and merge as a whole: Metropolis steps that moves of single sites would take for ever to do.

Two sites are picked at random. If they are in different groups these may merge, if they are in one group it may split
around them, the other members joining one of the two after another (Dahl 2003). Steps are accepted so that chains keep
their target.
"""

from __future__ import annotations

import math

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.kernels.bundles import LANES, Groups, make_groups
from fedkin.kin.kernels.splits import share_out
from fedkin.kin.sampler.walk import Walk
from fedkin.kin.special import log_gamma

#: Pairs of sites in a sweep, and how often they may split: rarely, since that takes longest, and merging is what chains
#: from fine starts need.
TRIES, SPLITS = 8, 0.05
_ODDS = math.log(SPLITS / (1.0 - SPLITS))


def split_and_merge(walk: Walk) -> None:
    """Try to split or merge groups some times."""
    V, rng = len(walk.alone), walk.rng
    splits = rng.random(TRIES) < SPLITS
    one, other = rng.integers(V, size=TRIES), rng.integers(V - 1, size=TRIES)
    other += other >= one
    limits = np.log(1.0 - rng.random(TRIES))
    left = np.arange(TRIES)
    while left.size:
        walk.logs()
        z = walk.state.z
        a, b = z[one], z[other]
        left = left[(a == b)[left] == splits[left]]
        merges = left[~splits[left]]
        gains = np.full(TRIES, -np.inf)
        gains[merges] = _apart(walk, a[merges], b[merges])
        left = left[splits[left] | (limits[left] <= _ODDS - gains[left])]  # whatever the way back is
        moved = False
        while left.size and not moved:
            t, left = left[0], left[1:]
            moved = _try(walk, int(one[t]), int(other[t]), float(gains[t]), float(limits[t]))


def _apart(walk: Walk, a: Index, b: Index) -> Array:
    """Log density with groups ``a`` and ``b`` apart, minus that with them together."""
    if not a.size:
        return np.zeros(0)
    groups, n = walk.groups, walk.groups.n
    sums = groups.sums[a // LANES, :, a % LANES] + groups.sums[b // LANES, :, b % LANES]
    gain = groups.log[a] + groups.log[b] - 2 * walk.base - walk.log_marginals(sums)
    even = walk.odds[3]
    gain += _prior(walk, 0) + log_gamma(n[a] + even) + log_gamma(n[b] + even) - log_gamma(n[a] + n[b] + even)
    if walk.edges:
        edges = walk.sites.neighbours.between(walk.state.z, int(groups.used[0]))[a, b]
        gain -= edges * walk.odds[1] + (n[a] * n[b] - edges) * walk.odds[2]
    return np.asarray(gain)


def _prior(walk: Walk, more: int) -> float:
    """Log prior of as many groups as there are, and ``more``, against one group less."""
    t = int(np.count_nonzero(walk.groups.n)) + more
    return float(walk.odds[4 + t] - walk.odds[3 + t])


def _try(walk: Walk, one: int, other: int, gain: float, limit: float) -> bool:
    """Split the group of two sites, or merge their groups, if chance has it so."""
    z, groups = walk.state.z, walk.groups
    a, b = int(z[one]), int(z[other])
    splits = a == b
    if splits:
        empty = np.flatnonzero(groups.n[: walk.most] == 0)
        if not empty.size:
            return False
        b = int(empty[0])
    members = np.flatnonzero((z == a) | (z == b))
    members = walk.rng.permutation(members[(members != one) & (members != other)])
    side = np.full(len(z), -1)
    side[members] = 2 if splits else np.where(z[members] == a, 3, 4)
    both = np.concatenate([[one, other], members])
    halves = make_groups(2, walk.sums.shape[1])
    # whoever merges must also have been able to split like that, which few can: most are found out soon
    least = -np.inf if splits else limit - _ODDS + gain
    path = share_out(walk.moving(both), halves, walk.prior, walk.room, walk.odds, both, side, least)
    if splits:
        gain = _gain_of_halves(walk, halves, a, side)
        if limit > gain - path - _ODDS:
            return False
    elif limit > _ODDS + path - gain:
        return False
    z[side == 1] = b if splits else a
    walk.collect()
    return True


def _gain_of_halves(walk: Walk, halves: Groups, whole: int, side: Index) -> float:
    """Log density of a split minus that of the group as it is."""
    n = halves.n[:2]
    gain = float(halves.log[:2].sum() - walk.groups.log[whole]) - walk.base + _prior(walk, 1)
    even = walk.odds[3]
    gain += float(log_gamma(n + even).sum() - log_gamma(n.sum() + even))
    if walk.edges:
        edges = float(walk.sites.neighbours.between(side + 1, 3)[1, 2])
        gain -= edges * walk.odds[1] + (float(n[0]) * float(n[1]) - edges) * walk.odds[2]
    return gain
