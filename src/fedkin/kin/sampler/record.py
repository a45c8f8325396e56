"""What a chain leaves."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.kernels.bundles import packed, triangle
from fedkin.kin.options import MANY_SITES, MOST_PAIRS, SHARES
from fedkin.kin.quadratics import apply
from fedkin.kin.sampler.sites import CHUNK
from fedkin.kin.sampler.walk import Walk

#: Effects that are traced for diagnostics.
TRACED = 5_000
#: Sweeps from one whose covariances given the partition are computed to the next.
THIN = 5


class Record:
    """Sums over kept sweeps, and a line for each of them.

    ``b (V, p)`` and ``moments (V, T)``: means of effects given the partition, and of their squares (upper triangles);
    what a partition leaves open is computed for every fifth. ``same (V, V)``: probabilities of sharing a group, empty
    for many sites. ``trace (S, 5)``: bound on the evidence, groups, number of the share, rates; ``means (S, T, p)``:
    ``b`` of the first T sites; ``z (S, V)``, ``m (S, p)``, ``w (S, p)``: the states. ``best (V,)`` is
    the partition with the highest density of all sweeps.
    """

    def __init__(self, V: int, p: int, keep: int) -> None:
        full = V if keep else 0
        pairs = full if V <= MOST_PAIRS else 0
        self.b = np.zeros((full, p))
        self.some = np.zeros((full, THIN if V < MANY_SITES else 1, p))  # of sweeps whose sums are still to be taken
        self.moments, self.same = np.zeros((full, p * (p + 1) // 2)), np.zeros((pairs, pairs))
        self.trace, self.means = np.zeros((keep, 5)), np.zeros((keep, min(full, max(TRACED // p, 1)), p))
        self.z: Index = np.zeros((keep, V), dtype=np.int32)
        self.m, self.w = np.zeros((keep, p)), np.zeros((keep, p))
        self.best: Index = np.zeros(V, dtype=np.int64)

    def covariance(self, some: int) -> Array:
        """Covariances ``(some, T)`` of the first sites' effects (upper triangles) in this chain."""
        n, (i, j) = len(self.z), triangle(self.b.shape[1])
        middle = self.b[:some] / n
        return np.asarray(self.moments[:some] / n - middle[:, i] * middle[:, j])

    def keep(self, walk: Walk, s: int) -> None:
        """Add effects given the partition as line ``s``: groups' means plus what sites say about their own effects."""
        state, n = walk.state, len(self.z)
        V, p = self.b.shape
        share, held = SHARES[state.share], s % self.some.shape[1]
        full = held == self.some.shape[1] - 1 or s == n - 1
        spread, stands_for = (walk.spread() if s % THIN == 0 else None), n / len(range(0, n, THIN))
        for start in range(0, V, CHUNK):
            part = slice(start, start + CHUNK)
            labels, sums = walk.labels[part], walk.sums[part]
            b = walk.mean[labels]
            if share > 0:
                B = walk.left(part)
                b = apply(B, b) + share * sums[:, -p:]
            self.some[part, held] = b
            if spread is not None:
                own = packed(share * B + B @ spread[labels] @ B) if share > 0 else packed(spread)[labels]
                self.moments[part] += stands_for * own
            if full:
                some = self.some[part, : held + 1]
                self.b[part] += some.sum(axis=1)
                self.moments[part] += packed(np.swapaxes(some, 1, 2) @ some)
            self.means[s, part] = b[: max(self.means.shape[1] - start, 0)]
        self.z[s], self.m[s], self.w[s] = state.z, state.m, state.w
        self.trace[s, 1:] = walk.n_groups, state.share, *state.rates
