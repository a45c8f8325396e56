"""The prox of all pairs in a clique: sort and pool."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from fedkin.solvers.kernels.bundles import L1D, R1, R2, W2
from fedkin.solvers.kernels.jit import INT, outlined, part, writable

#: Moves per site after which sorting anew is quicker than mending the last order.
MOVES = 8


@part
def _sort(keys: Any, order: Any) -> None:
    """Sort ``keys`` and ``order`` along with them: by insertion, which is quick where little has changed."""
    left = MOVES * keys.shape[0]
    for k in range(1, keys.shape[0]):
        key, site, at = keys[k], order[k], k
        while at > 0 and keys[at - 1] > key:
            keys[at], order[at] = keys[at - 1], order[at - 1]
            at -= 1
        keys[at], order[at] = key, site
        left -= k - at
        if left < 0:
            again = np.argsort(keys)
            keys[:], order[:] = keys[again], order[again]
            return


@outlined(types.void, L1D, R1, R1, R2, writable(INT, 2), W2)
def pool(starts: Any, weight: Any, tau: Any, v: Any, order: Any, out: Any) -> None:
    """As `fedkin.solvers.cliques.SortedProx`; ``order (p, V)`` are the sites clique by clique, and stays sorted."""
    n, p = v.shape
    keys, level, mass, end = np.empty(n), np.empty(n), np.empty(n), np.empty(n, dtype=np.int64)
    for c in range(p):
        for k in range(starts.shape[0] - 1):
            lo, hi = starts[k], starts[k + 1]
            total = 0.0
            for t in range(lo, hi):
                keys[t] = v[order[c, t], c]
                total += weight[order[c, t]]
            _sort(keys[lo:hi], order[c, lo:hi])
            blocks, before = 0, 0.0
            for t in range(lo, hi):
                own = weight[order[c, t]]
                value, size = keys[t] - tau[c] * (2.0 * before + own - total), own
                before += own
                while blocks > 0 and level[blocks - 1] >= value:
                    blocks -= 1
                    value = (level[blocks] * mass[blocks] + value * size) / (mass[blocks] + size)
                    size += mass[blocks]
                level[blocks], mass[blocks], end[blocks] = value, size, t + 1
                blocks += 1
            t = lo
            for block in range(blocks):
                while t < end[block]:
                    out[order[c, t], c] = level[block]
                    t += 1
