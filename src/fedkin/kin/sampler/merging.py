"""Greedy merging of groups, which finds starts for chains."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.kernels.bundles import LANES, Prior, in_lanes, make_groups, make_room
from fedkin.kin.kernels.marginals import join
from fedkin.kin.sampler.neighbours import Neighbours
from fedkin.kin.sampler.sites import group_sums

#: Groups that have merged are cleared away when this share is left.
FULL = 0.75


def merge(sums: Array, precision: Array, neighbours: Neighbours, rates: tuple[float, float], z: Index) -> Index:
    """Merge groups ``z (V,)`` (numbered 0..K-1), the best pair first, while the evidence rises.

    ``sums (V, T + p)`` are what sites say, ``precision (p,)`` that of the groups' centres around 0, ``rates`` those of
    edges inside and between groups.
    """
    K = int(z.max()) + 1
    label = np.arange(K)  # where each of the first groups is now
    totals, size = group_sums(sums, z, K), np.bincount(z, minlength=K).astype(np.float64)
    edges = neighbours.between(z, K)
    edge, gap = np.log(rates[0] / rates[1]), np.log((1 - rates[0]) / (1 - rates[1]))
    groups, room = make_groups(K, sums.shape[1]), make_room(len(precision))
    prior = Prior(precision, np.zeros(len(precision)))

    def fill() -> None:
        blocks = -(-len(totals) // LANES)
        groups.sums[:blocks] = in_lanes(totals, blocks)
        groups.used[0] = len(totals)

    def gains(a: int, others: int) -> Array:
        """What the evidence gains where group ``a`` merges with each of the first ``others``."""
        groups.used[0] = others
        join(groups, totals[a], prior, room)
        linked = edges[a, :others]
        apart = size[a] * size[:others] - linked
        return np.asarray(groups.new[:others] - log[a] - log[:others] + linked * edge + apart * gap)

    fill()
    join(groups, totals[0], prior, room)  # room.take is 0: the groups as they are
    log = groups.new[:K].copy()
    room.take[:] = 1.0
    gain = np.full((K, K), -np.inf)
    for a in range(1, K):
        gain[a, :a] = gain[:a, a] = gains(a, a)
    while True:
        into, gone = sorted(int(k) for k in np.unravel_index(gain.argmax(), gain.shape))
        if not gain[into, gone] > 0:
            return label[z]
        apart = size[into] * size[gone] - edges[into, gone]
        log[into] += log[gone] + gain[into, gone] - edges[into, gone] * edge - apart * gap
        totals[into] += totals[gone]
        groups.sums[into // LANES, :, into % LANES] = totals[into]
        size[into] += size[gone]
        size[gone] = 0.0
        edges[into] += edges[gone]
        edges[:, into] = edges[into]
        label[label == gone] = into
        gain[gone] = gain[:, gone] = -np.inf
        left = np.flatnonzero(size)
        if len(left) <= FULL * len(size):
            totals, size, log = totals[left], size[left], log[left]
            edges, gain = edges[np.ix_(left, left)], gain[np.ix_(left, left)]
            place = np.zeros(int(left[-1]) + 1, dtype=np.int64)
            place[left] = np.arange(len(left))
            label, into = place[label], int(place[into])
            fill()
        row = np.where(size > 0, gains(into, len(size)), -np.inf)
        row[into] = -np.inf
        gain[into] = gain[:, into] = row
