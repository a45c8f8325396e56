"""The sites' curvatures: whole matrices, or diagonal plus low rank where there are many coefficients and few rows.

Both answer the same questions. Of low rank no inverse and no product of two p by p matrices of a site is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg.lapack import dpstrf

from fedkin._base import Array, Index

#: Up to so many coefficients matrices are whole.
FEW = 50
#: Low rank is worth its while up to this share of the coefficients.
SHORT = 0.5
#: Curvature below this share of the largest is rounding.
ROUNDING = 1e-11


class Sums(NamedTuple):
    """Sums over sites, of ``A = M (I + M)^-1`` and of ``I - A``, that the evidence of variances needs.

    ``spent (p,)`` the diagonal of ``A C A``; ``open (p,)`` that of ``I - A``; ``squares (p, p)`` the squared entries of
    ``A``; ``inner (p,)`` the diagonal of ``A (I - A)``, and ``pull`` the trace of that matrix times ``C``; ``trace``
    that of ``A``, and ``rest`` that of the square of ``I - A``.
    """

    spent: Array
    open: Array
    squares: Array
    inner: Array
    pull: float
    trace: float
    rest: float


@dataclass(frozen=True, eq=False)
class Dense:
    """Whole matrices ``(V, p, p)``, symmetric and positive semidefinite."""

    matrices: Array

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of sites and of coefficients."""
        return self.matrices.shape[0], self.matrices.shape[1]

    def scaled(self, root: Array, weight: Array) -> Dense:
        """``weight_u diag(root) M_u diag(root)``."""
        return Dense(self.matrices * (weight[:, None, None] * (root[:, None] * root)))

    def resolved(self) -> tuple[Dense, Array]:
        """``M_u (I + M_u)^-1``, and ``log |I + M_u|``."""
        p = self.shape[1]
        more = self.matrices + np.eye(p)
        logs = 2 * np.log(np.einsum("ujj->uj", np.linalg.cholesky(more))).sum(axis=1)
        return Dense(np.eye(p) - np.linalg.inv(more)), np.asarray(logs)

    def apply(self, vectors: Array) -> Array:
        """``M_u v_u`` for ``(V, p)`` or one ``(p,)``."""
        return np.asarray(np.matmul(self.matrices, vectors[..., None])[..., 0])

    def times(self, u: int, matrix: Array) -> Array:
        """``M_u X`` of one site, for ``X (p, k)``."""
        return np.asarray(self.matrices[u] @ matrix)

    def of(self, u: int) -> Array:
        """The matrix of one site."""
        return np.asarray(self.matrices[u])

    def sum(self, sites: Index | None = None) -> Array:
        """The sum over some sites, or all."""
        return np.asarray((self.matrices if sites is None else self.matrices[sites]).sum(axis=0))


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
    def shape(self) -> tuple[int, int]:
        """Numbers of sites and of coefficients."""
        return self.diagonal.shape[0], self.diagonal.shape[1]

    def scaled(self, root: Array, weight: Array) -> LowRank:
        """``weight_u diag(root) M_u diag(root)``."""
        factor = self.factor * (root[:, None] * np.sqrt(weight)[:, None, None])
        return LowRank(self.diagonal * (root**2 * weight[:, None]), factor)

    def resolved(self) -> tuple[LowRank, Array]:
        """``M_u (I + M_u)^-1``, and ``log |I + M_u|``: with ``D`` of ``I + diagonal`` it is ``I - 1/D + N N'``."""
        diagonal = 1.0 + self.diagonal
        flat = self.factor / diagonal[:, :, None]
        root = np.linalg.cholesky(np.eye(self.factor.shape[2]) + np.swapaxes(self.factor, 1, 2) @ flat)
        logs = np.log(diagonal).sum(axis=1) + 2 * np.log(np.einsum("ujj->uj", root)).sum(axis=1)
        N = flat @ np.swapaxes(np.linalg.inv(root), 1, 2)
        return LowRank(self.diagonal / diagonal, N), np.asarray(logs)

    def apply(self, vectors: Array) -> Array:
        """``M_u v_u`` for ``(V, p)`` or one ``(p,)``."""
        inside = np.matmul(np.swapaxes(self.factor, 1, 2), vectors[..., None])
        return np.asarray(self.diagonal * vectors + np.matmul(self.factor, inside)[..., 0])

    def times(self, u: int, matrix: Array) -> Array:
        """``M_u X`` of one site, for ``X (p, k)``."""
        return np.asarray(self.diagonal[u][:, None] * matrix + self.factor[u] @ (self.factor[u].T @ matrix))

    def of(self, u: int) -> Array:
        """The matrix of one site."""
        made = self.factor[u] @ self.factor[u].T
        made[np.diag_indices(len(made))] += self.diagonal[u]
        return np.asarray(made)

    def sum(self, sites: Index | None = None) -> Array:
        """The sum over some sites, or all."""
        diagonal, factor = (self.diagonal, self.factor) if sites is None else (self.diagonal[sites], self.factor[sites])
        stacked = np.swapaxes(factor, 1, 2).reshape(-1, diagonal.shape[1])
        return np.asarray(stacked.T @ stacked + np.diag(diagonal.sum(axis=0)))

    def congruent(self, A: Array) -> LowRank | None:
        """``A'M_u A``, where that is diagonal plus low rank: entries of A beside its diagonal are in few rows."""
        beside = np.flatnonzero((np.diag(np.diag(A)) != A).any(axis=1) & self.diagonal.any(axis=0))
        if len(beside) + self.factor.shape[2] > SHORT * len(A):
            return None
        diagonal = self.diagonal * np.diag(A) ** 2
        diagonal[:, beside] = 0.0
        more = np.sqrt(self.diagonal[:, beside])[:, None, :] * A[beside].T
        return LowRank(diagonal, np.concatenate([A.T @ self.factor, more], axis=2))

    def take(self, sites: Index) -> LowRank:
        """Some sites, in that order."""
        return LowRank(self.diagonal[sites], self.factor[sites])

    def posterior_cov(self, C: Array) -> Iterator[Array]:
        """``I - A + (I - A) C (I - A)`` of one site after another, with ``A`` that these matrices are."""
        for u in range(self.shape[0]):
            yield np.eye(len(C)) - self.of(u) + shrunk(self, u, C)

    def sums(self, C: Array) -> Sums:
        """Of ``A`` that these matrices are, with ``C (p, p)``: one site after another, such matrices are large."""
        V, p = self.shape
        spent, squares = np.zeros(p), np.zeros((p, p))
        for u in range(V):
            a, N = self.diagonal[u], self.factor[u]
            squares += self.of(u) ** 2
            CN = C @ N
            # the diagonal of (a + N N') C (a + N N')
            spent += a**2 * np.diag(C) + 2 * a * (CN * N).sum(axis=1) + ((N @ (N.T @ CN)) * N).sum(axis=1)
        total = self.sum()
        trace, inner = float(np.trace(total)), np.diag(total) - squares.sum(axis=1)
        pull = float((C * total).sum() - spent.sum())
        return Sums(spent, V - np.diag(total), squares, inner, pull, trace, V * p - 2 * trace + float(squares.sum()))


Matrices = Dense | LowRank


def shrunk(A: Matrices, u: int, C: Array, share: float = 1.0) -> Array:
    """``(I - share A_u) C (I - share A_u)`` of one site, for a symmetric ``C (p, p)``."""
    half = C - share * A.times(u, C)
    return np.asarray(half - share * A.times(u, half.T).T)


def dense_sums(inverse: Array, C: Array, *, noise: bool) -> Sums:
    """The same from whole matrices ``I - A``; what only the noise needs is left out without it."""
    p = len(C)
    A = np.eye(p) - inverse
    spent = ((A.reshape(-1, p) @ C) * A.reshape(-1, p)).reshape(A.shape).sum(axis=(0, 2))
    left, squares = np.einsum("ujj->j", inverse), np.einsum("ujk,ujk->jk", A, A)
    if not noise:
        return Sums(spent, left, squares, np.zeros(0), 0.0, 0.0, 0.0)
    stacked = inverse.reshape(-1, p)
    square = stacked.T @ stacked
    inner = inverse.sum(axis=0) - square
    pull, trace = float((C * inner).sum()), float(np.einsum("ujj->", A))
    return Sums(spent, left, squares, np.diag(inner), pull, trace, float(np.trace(square)))


def low_rank(G: Array, most: int) -> LowRank | None:
    """Matrices ``(V, p, p)`` as a low rank, by Cholesky's factors with pivots; None where that does not pay.

    ``most`` is what ranks are at most, as far as the number of rows tells.
    """
    V, p = G.shape[:2]
    if p <= FEW or most > SHORT * p:
        return None
    found = []
    for matrix in G:
        upper, pivots, rank, _ = dpstrf(matrix, tol=ROUNDING * max(float(matrix.diagonal().max()), 1e-300))
        columns = np.zeros((p, rank))
        columns[pivots - 1] = np.triu(upper)[:rank].T
        found.append(columns)
    r = max(max(one.shape[1] for one in found), 1)
    if r > SHORT * p:
        return None
    factor = np.zeros((V, p, r))
    for out, one in zip(factor, found, strict=True):
        out[:, : one.shape[1]] = one
    return LowRank(np.zeros((V, p)), factor)
