"""Curvatures of the sites: dense matrices, or diagonal plus low rank where there are many coefficients and few rows.

Both answer the same questions. Of low rank no inverse and no product of two p by p matrices of a site is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg.lapack import dpstrf

from fedkin._base import Array, Index

#: Up to so many coefficients matrices are dense.
FEW = 50
#: Low rank is worth its while up to this share of the coefficients.
SHORT = 0.5
#: Curvature below this share of the largest is rounding.
ROUNDING = 1e-11


class Sums(NamedTuple):
    """Sums over sites, of ``A = M (I + M)^-1`` and of ``I - A``, that the evidence of variances needs.

    ``spent (p,)`` the diagonal of ``A C A``; ``left (p,)`` that of ``I - A``; ``squares (p, p)`` the squared entries of
    ``A``; ``inner (p,)`` the diagonal of ``A (I - A)``, and ``pull`` the trace of that matrix times ``C``; ``trace``
    that of ``A``, and ``rest`` that of the square of ``I - A``.
    """

    spent: Array
    left: Array
    squares: Array
    inner: Array
    pull: float
    trace: float
    rest: float

    @classmethod
    def from_total(cls, total: Array, spent: Array, squares: Array, C: Array, V: int) -> Sums:
        """Return all of them from the sum ``total (p, p)`` of ``A``, and those that need each site."""
        trace, inner = float(np.trace(total)), np.diag(total) - squares.sum(axis=1)
        pull = float((C * total).sum() - spent.sum())
        rest = V * len(C) - 2 * trace + float(squares.sum())
        return cls(spent, V - np.diag(total), squares, inner, pull, trace, rest)


@dataclass(frozen=True, eq=False)
class Dense:
    """Symmetric, positive semidefinite matrices ``(V, p, p)``."""

    matrices: Array

    @property
    def rank(self) -> int:
        return int(self.matrices.shape[1])

    def scaled(self, root: Array, weight: Array) -> Dense:
        """Return ``weight_u diag(root) M_u diag(root)``."""
        return Dense(self.matrices * (weight[:, None, None] * (root[:, None] * root)))

    def resolved(self) -> tuple[Dense, Array]:
        """Return ``M_u (I + M_u)^-1``, and ``log |I + M_u|``."""
        one = np.eye(self.rank)
        more = self.matrices + one
        logs = 2 * np.log(np.einsum("ujj->uj", np.linalg.cholesky(more))).sum(axis=1)
        return Dense(one - np.linalg.inv(more)), np.asarray(logs)

    def apply(self, vectors: Array) -> Array:
        """Return ``M_u v_u`` for ``(V, p)`` or one ``(p,)``."""
        return np.asarray(np.matmul(self.matrices, vectors[..., None])[..., 0])

    def times(self, u: int, matrix: Array) -> Array:
        """Return ``M_u X`` of one site, for ``X (p, k)``."""
        return np.asarray(self.matrices[u] @ matrix)

    def of(self, u: int) -> Array:
        """Return the matrix of one site."""
        return np.asarray(self.matrices[u])

    def sum(self, sites: Index | None = None) -> Array:
        """Return the sum over some sites, or all."""
        return np.asarray((self.matrices if sites is None else self.matrices[sites]).sum(axis=0))

    def posterior_cov(self, C: Array) -> Iterable[Array]:
        """Return ``I - A + (I - A) C (I - A)`` of all sites, where ``A`` are these matrices."""
        keep = np.eye(len(C)) - self.matrices
        return np.asarray(keep + keep @ C @ keep)

    def sums(self, C: Array) -> Sums:
        """Return the sums where ``A`` are these matrices, with ``C (p, p)``."""
        A = self.matrices
        rows = A.reshape(-1, len(C))
        spent = ((rows @ C) * rows).reshape(A.shape).sum(axis=(0, 2))
        return Sums.from_total(self.sum(), spent, np.einsum("ujk,ujk->jk", A, A), C, len(A))


@dataclass(frozen=True, eq=False)
class LowRank:
    """The matrices ``diag(diagonal_u) + factor_u factor_u'``, ``diagonal (V, p)`` and ``factor (V, p, r)``.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin.matrices import Dense, LowRank
    >>> rng = np.random.default_rng(0)
    >>> short = LowRank(rng.random((2, 5)), rng.normal(size=(2, 5, 2)))
    >>> whole = Dense(np.stack([short.of(0), short.of(1)]))
    >>> (one, log_one), (two, log_two) = short.resolved(), whole.resolved()
    >>> bool(np.allclose(one.of(1), two.of(1)) and np.allclose(log_one, log_two))
    True
    """

    diagonal: Array
    factor: Array

    @property
    def rank(self) -> int:
        return int(self.factor.shape[2])

    def scaled(self, root: Array, weight: Array) -> LowRank:
        factor = self.factor * (root[:, None] * np.sqrt(weight)[:, None, None])
        return LowRank(self.diagonal * (root**2 * weight[:, None]), factor)

    def resolved(self) -> tuple[LowRank, Array]:
        # with D of I + diagonal it is I - 1/D + N N'
        diagonal = 1.0 + self.diagonal
        flat = self.factor / diagonal[:, :, None]
        root = np.linalg.cholesky(np.eye(self.rank) + np.swapaxes(self.factor, 1, 2) @ flat)
        logs = np.log(diagonal).sum(axis=1) + 2 * np.log(np.einsum("ujj->uj", root)).sum(axis=1)
        N = flat @ np.swapaxes(np.linalg.inv(root), 1, 2)
        return LowRank(self.diagonal / diagonal, N), np.asarray(logs)

    def apply(self, vectors: Array) -> Array:
        inside = np.matmul(np.swapaxes(self.factor, 1, 2), vectors[..., None])
        return np.asarray(self.diagonal * vectors + np.matmul(self.factor, inside)[..., 0])

    def times(self, u: int, matrix: Array) -> Array:
        return np.asarray(self.diagonal[u][:, None] * matrix + self.factor[u] @ (self.factor[u].T @ matrix))

    def of(self, u: int) -> Array:
        return np.asarray(self.factor[u] @ self.factor[u].T + np.diag(self.diagonal[u]))

    def sum(self, sites: Index | None = None) -> Array:
        diagonal, factor = (self.diagonal, self.factor) if sites is None else (self.diagonal[sites], self.factor[sites])
        stacked = np.swapaxes(factor, 1, 2).reshape(-1, diagonal.shape[1])
        return np.asarray(stacked.T @ stacked + np.diag(diagonal.sum(axis=0)))

    def posterior_cov(self, C: Array) -> Iterable[Array]:
        # one site after another: such matrices are large
        return (np.eye(len(C)) - self.of(u) + shrunk(self, u, C) for u in range(len(self.diagonal)))

    def sums(self, C: Array) -> Sums:
        spent, squares = np.zeros(len(C)), np.zeros(C.shape)
        for u, (a, N) in enumerate(zip(self.diagonal, self.factor, strict=True)):
            squares += self.of(u) ** 2
            CN = C @ N
            # the diagonal of (a + N N') C (a + N N')
            spent += a**2 * np.diag(C) + 2 * a * (CN * N).sum(axis=1) + ((N @ (N.T @ CN)) * N).sum(axis=1)
        return Sums.from_total(self.sum(), spent, squares, C, len(self.diagonal))

    def congruent(self, A: Array) -> LowRank | None:
        """Return ``A'M_u A`` where that is of low rank: few rows of A have entries off its diagonal."""
        beside = np.flatnonzero((np.diag(np.diag(A)) != A).any(axis=1) & self.diagonal.any(axis=0))
        if len(beside) + self.rank > SHORT * len(A):
            return None
        diagonal = self.diagonal * np.diag(A) ** 2
        diagonal[:, beside] = 0.0
        more = np.sqrt(self.diagonal[:, beside])[:, None, :] * A[beside].T
        return LowRank(diagonal, np.concatenate([A.T @ self.factor, more], axis=2))

    def take(self, sites: Index) -> LowRank:
        return LowRank(self.diagonal[sites], self.factor[sites])


Matrices = Dense | LowRank


def shrunk(A: Matrices, u: int, C: Array, share: float = 1.0) -> Array:
    """Return ``(I - share A_u) C (I - share A_u)`` of one site, for a symmetric ``C (p, p)``."""
    half = C - share * A.times(u, C)
    return np.asarray(half - share * A.times(u, half.T).T)


def low_rank(G: Array, most: int) -> LowRank | None:
    """Return matrices ``(V, p, p)`` of rank ``most`` or less as a low rank; None where that does not pay."""
    V, p = G.shape[:2]
    if p <= FEW or most > SHORT * p:
        return None
    factor, largest = np.zeros((V, p, p)), 1
    for out, matrix in zip(factor, G, strict=True):
        upper, pivots, rank, _ = dpstrf(matrix, tol=ROUNDING * max(float(matrix.diagonal().max()), 1e-300))
        out[pivots - 1, :rank] = np.triu(upper)[:rank].T
        largest = max(largest, rank)
    return None if largest > SHORT * p else LowRank(np.zeros((V, p)), factor[:, :, :largest].copy())
