"""Greedy merging of groups, which finds starts for chains."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.kernels.bundles import LANES, Prior, make_groups, make_room
from fedkin.kin.kernels.marginals import join
from fedkin.kin.sampler.neighbours import Neighbours
from fedkin.kin.sampler.sites import group_sums


def merge(sums: Array, precision: Array, neighbours: Neighbours, rates: tuple[float, float], z: Index) -> Index:
    """Merge groups ``z (V,)`` (numbered 0..K-1), the best pair first, while the evidence rises.

    ``sums (V, T + p)`` are what sites say, ``precision (p,)`` that of the groups' centres around 0, ``rates`` those of
    edges inside and between groups.
    """
    K = int(z.max()) + 1
    totals, size = group_sums(sums, z, K), np.bincount(z, minlength=K).astype(np.float64)
    edges = neighbours.between(z, K)
    edge, gap = np.log(rates[0] / rates[1]), np.log((1 - rates[0]) / (1 - rates[1]))
    groups, room = make_groups(K, sums.shape[1]), make_room(len(precision))
    prior = Prior(precision, np.zeros(len(precision)))
    groups.used[0] = K
    for k in range(K):
        groups.sums[k // LANES, :, k % LANES] = totals[k]
    join(groups, totals[0], prior, room)  # room.take is 0: the groups as they are
    log = groups.new[:K].copy()
    room.take[:] = 1.0
    gain = np.full((K, K), -np.inf)

    def ask(a: int) -> None:
        join(groups, totals[a], prior, room)
        row = groups.new[:K] - log[a] - log + edges[a] * edge + (size[a] * size - edges[a]) * gap
        gain[a] = gain[:, a] = np.where(size > 0, row, -np.inf)
        gain[a, a] = -np.inf

    for a in range(K):
        ask(a)
    label = np.arange(K)
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
        ask(into)
