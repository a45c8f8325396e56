"""What sites say about groups, for every share of the spread that may be inside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.kernels.bundles import packed
from fedkin.kin.options import SHARES
from fedkin.kin.quadratics import apply
from fedkin.kin.sampler.neighbours import Neighbours

#: Sites whose matrices are turned at once.
CHUNK = 2048
#: Groups times sites up to which membership is a dense matrix.
DENSE = 20_000


@dataclass(frozen=True, eq=False)
class Sites:
    """What sites say, with effects inside groups integrated out for each of R shares of the spread.

    ``sums (R, V, T + p)``: upper triangles of ``H``, row by row (`packed`), then ``c``: the log likelihood of ``nu`` is
    ``c'nu - nu'H nu / 2 + k``, ``k (R, V)``.
    """

    sums: Array
    k: Array
    neighbours: Neighbours

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of sites and of coefficients."""
        V, length = self.sums.shape[1:]
        return V, _coefficients(length)

    @property
    def H(self) -> Array:
        """Triangles ``(R, V, T)``."""
        return self.sums[:, :, : -self.size[1]]

    @property
    def c(self) -> Array:
        """``(R, V, p)``."""
        return self.sums[:, :, -self.size[1] :]

    def with_neighbours(self, neighbours: Neighbours) -> Sites:
        """What the same sites say, with another graph."""
        return replace(self, neighbours=neighbours)


def _coefficients(length: int) -> int:
    """The p for which ``p (p + 1) / 2 + p`` is this."""
    return (math.isqrt(9 + 8 * length) - 3) // 2


def integrate_effects(W: Array, c: Array, neighbours: Neighbours) -> Sites:
    """What sites say about groups, ``W (V, p, p)`` and ``c (V, p)``."""
    V, p = c.shape
    T = p * (p + 1) // 2
    sums, k = np.empty((len(SHARES), V, T + p)), np.empty((len(SHARES), V))
    for start in range(0, V, CHUNK):
        part = slice(start, start + CHUNK)
        values, vectors = np.linalg.eigh(W[part])
        values = np.maximum(values, 0.0)
        turned = apply(np.swapaxes(vectors, 1, 2), c[part])
        for r, share in enumerate(SHARES):
            kept = 1.0 / (1.0 + share * values)
            sums[r, part, :T] = packed((vectors * (values * kept)[:, None, :]) @ np.swapaxes(vectors, 1, 2))
            sums[r, part, T:] = apply(vectors, kept * turned)
            k[r, part] = 0.5 * (share * kept * turned**2 - np.log1p(share * values)).sum(axis=1)
    return Sites(sums, k, neighbours)


def group_sums(sums: Array, z: Index, n_groups: int) -> Array:
    """Sums ``(..., K, T + p)`` over the members of each group, of ``sums (..., V, T + p)``."""
    V = len(z)
    if n_groups == V == np.unique(z).size:  # single sites
        return np.asarray(sums[..., np.argsort(z), :])
    if n_groups * V <= DENSE:
        member = np.zeros((n_groups, V))
        member[z, np.arange(V)] = 1.0
        return np.asarray(member @ sums)
    from scipy.sparse import csr_array  # slow to load

    first = np.concatenate([[0], np.cumsum(np.bincount(z, minlength=n_groups))])
    sparse = csr_array((np.ones(V), np.argsort(z, kind="stable"), first), shape=(n_groups, V))
    each = [sparse @ part for part in sums.reshape(-1, V, sums.shape[-1])]
    return np.stack(each).reshape(*sums.shape[:-2], n_groups, -1)
