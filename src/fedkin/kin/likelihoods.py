"""`QuadraticLikelihoods`: losses as quadratics around 0, in units in which one prior suits all coefficients.

Curvatures are dense matrices, or diagonal plus low rank if there are many coefficients and few rows. Both have the same
methods. With low rank, no p by p matrix of a site is inverted or multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg.lapack import dpstrf

from fedkin._base import Array, Index, Mask
from fedkin.core import AffineMap, Quadratics

#: Gauss-Hermite nodes of a standard normal, and their shares.
NODES, SHARE_OF_NODES = np.polynomial.hermite_e.hermegauss(7)
SHARE_OF_NODES = SHARE_OF_NODES / SHARE_OF_NODES.sum()
#: A column whose variance is below this share of its mean square is constant.
CONSTANT = 1e-10
#: Up to so many coefficients matrices are dense, and groups are looked for in all directions; beyond that in the ones
#: in which sites differ most.
FEW = 50
#: Low rank is worth its while up to this share of the coefficients.
SHORT = 0.5


@dataclass(frozen=True, eq=False)
class QuadraticLikelihoods(Quadratics):
    """`Quadratics` around 0, ``theta'G_u theta / 2 - c_u'theta + yy_u / 2``, with the roles of coefficients.

    Least squares is one: ``G = X'X``, ``c = X'y``, ``yy = y'y``. A smooth loss is expanded at a point: ``G`` is its
    Hessian there and ``c = G at - gradient``. ``G_u`` is never inverted, so it may be singular, even zero. ``n (V,)``
    counts the observations that determine the noise: rows, or rows times columns for the mean loss.

    Attributes
    ----------
    known : LowRank, optional
        ``G`` as diagonal plus low rank, if sites have sent it in that form.
    fixed : bool array (p,), optional
        Coefficients that are the same at all sites; none of them by default.
    district : int array (V,), optional
        The district of each site, if districts differ too.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin import QuadraticLikelihoods
    >>> one = QuadraticLikelihoods.from_products([[[2.0]]], [[3.0]], [5.0], [2.0])
    >>> one.values(np.array([[1.5]])).tolist()
    [0.25]
    """

    known: LowRank | None = field(default=None, repr=False)
    fixed: Mask | None = None
    district: Index | None = None

    @classmethod
    def from_products(cls, G: ArrayLike, c: ArrayLike, yy: ArrayLike, n: ArrayLike, **roles: Any) -> Self:
        """Return the losses with ``G (V, p, p)``, ``c (V, p)``, ``yy (V,)`` and ``n (V,)``."""
        c, count = np.asarray(c), np.asarray(n)[:, None]
        return cls(
            np.zeros(c.shape), count, 0.5 * np.asarray(yy)[:, None], -c[:, None], np.asarray(G)[:, None], **roles
        )

    @property
    def G(self) -> Array:
        return self.hessian[:, 0]

    @property
    def c(self) -> Array:
        return -self.gradient[:, 0]

    @property
    def yy(self) -> Array:
        return 2.0 * self.value[:, 0]

    @property
    def n(self) -> Index | Array:
        return self.count[:, 0]

    @cached_property
    def matrices(self) -> Matrices:
        """``G``, as diagonal plus low rank if that saves work."""
        if self.district is not None:
            return Dense(self.G)
        return self.known or low_rank(self.G, int(self.n.max(initial=0.0))) or Dense(self.G)

    def values(self, theta: Array) -> Array:
        """Return the losses ``(V,)`` at ``theta (V, p)``."""
        return np.asarray(((0.5 * apply(self.G, theta) - self.c) * theta).sum(axis=1) + 0.5 * self.yy)

    def take(self, sites: Index) -> Self:
        known = None if self.known is None else self.known.take(sites)
        district = None if self.district is None else self.district[sites]
        return replace(super().take(sites), known=known, district=district)

    def varying(self) -> tuple[QuadraticLikelihoods, Array, Array]:
        """Return the likelihoods of the varying coefficients, for several responses.

        The first response is the target, the others are the k fixed columns: ``responses (V, p - k, 1 + k)`` holds
        their products with the varying columns, and ``products (V, 1 + k, 1 + k)`` those with each other.
        """
        if self.fixed is None or not self.fixed.any():
            return self, self.c[:, :, None], self.yy[:, None, None]
        free, fixed = np.flatnonzero(~self.fixed), np.flatnonzero(self.fixed)
        k, rows = len(fixed), self.G[:, free]
        products = np.empty((self.n_sites, 1 + k, 1 + k))
        products[:, 0, 0], products[:, 1:, 1:] = self.yy, self.G[:, fixed[:, None], fixed]
        products[:, 0, 1:] = products[:, 1:, 0] = self.c[:, fixed]
        known = None if self.known is None else self.known.part(~self.fixed)
        roles = {"known": known, "district": self.district}
        alone = self.from_products(rows[:, :, free], self.c[:, free], self.yy, self.n, **roles)
        return alone, np.concatenate([self.c[:, free, None], rows[:, :, fixed]], axis=2), products


@dataclass(frozen=True, eq=False)
class Units(AffineMap):
    """Transformation between the user's parameters and the fitted ones: ``theta = A fitted + shift``.

    Features are centred (if there is an intercept) and scaled, and a target with a scale is divided by it, over the
    rows of all sites. Sums suffice to compute this.
    """

    A: Array  # (p, p), the target's scale included
    shift: Array  # (p,)
    target: float  # scale of the target; 1 for losses with units of their own
    fixed: Mask | None = None  # (p,), coefficients that are the same at all sites

    @property
    def fixed_mask(self) -> Mask:
        """Mask ``(p,)`` of coefficients that are equal at all sites."""
        return np.zeros(len(self.shift), dtype=bool) if self.fixed is None else self.fixed

    def fitted(self, sums: QuadraticLikelihoods) -> QuadraticLikelihoods:
        """Return the losses as functions of the fitted parameters, divided by the square of the target's scale."""
        scaled = self.A / self.target
        c = (sums.c - sums.G @ self.shift) @ scaled / self.target
        yy = (sums.yy - (2 * sums.c - sums.G @ self.shift) @ self.shift) / self.target**2
        known = None if sums.known is None else sums.known.congruent(scaled)
        roles = {"known": known, "fixed": self.fixed, "district": sums.district}
        return sums.from_products(scaled.T @ sums.G @ scaled, c, np.maximum(yy, 0.0), sums.n, **roles)


def common_units(sums: QuadraticLikelihoods, intercepts: Mask, *, has_scale: bool, location: bool = False) -> Units:
    """Return units from the sums of all sites.

    ``intercepts (p,)`` marks the parameters of columns of ones: one for every block of ``p / intercepts.sum()``
    parameters (a class of the multinomial loss), or none. ``has_scale`` states whether the target has units (least
    squares). ``location`` states that the parameters are points among the rows, which share one scale.
    """
    p, G = sums.n_params, sums.G.sum(axis=0)
    shift = np.zeros(p)
    if location:
        centre = sums.c.sum(axis=0) / np.diag(G)
        spread = (sums.yy.sum() - sums.c.sum(axis=0) @ centre) / sums.n.sum()
        size = np.sqrt(spread) if spread > CONSTANT * sums.yy.sum() / sums.n.sum() else 1.0
        return Units(np.eye(p) * size, centre, float(size))
    blocks = max(int(intercepts.sum()), 1)
    block = p // blocks
    first = G[:block, :block]
    rows = max(first[0, 0] if intercepts[0] else sums.n.sum(), 1e-300)
    square = np.diag(first) / rows
    mean = first[0] / rows if intercepts[0] else np.zeros(block)
    variance = square - mean**2
    usable = variance > CONSTANT * square
    scale = np.where(usable, np.sqrt(np.where(usable, variance, 1.0)), 1.0)
    each = np.diag(1.0 / scale)
    if intercepts[0]:
        each[0, 1:] = -mean[1:] / scale[1:]
        each[0, 0] = 1.0
    A = np.asarray(np.kron(np.eye(blocks), each))
    target = 1.0
    if has_scale:
        shift[0] = sums.c[:, 0].sum() / rows if intercepts[0] else 0.0
        spread = (sums.yy.sum() - rows * shift[0] ** 2) / sums.n.sum()
        target = float(np.sqrt(spread)) if spread > CONSTANT * sums.yy.sum() / sums.n.sum() else 1.0
    return Units(A * target, shift, target)


def apply(matrices: Array | Matrices, vectors: Array) -> Array:
    """Return ``M_u v_u`` for ``(V, p, p)`` and ``(V, p)`` or one ``(p,)``."""
    return np.asarray((matrices @ vectors[..., None])[..., 0])


def given_mean(variance: Array, S: Array) -> tuple[Array, Array]:
    """Return covariances ``C (..., p, p)`` of effects given the mean, and ``I - C S``, the factor of the mean that
    remains."""
    p, root = len(variance), np.sqrt(variance)
    own = np.linalg.inv(np.eye(p) + root[:, None] * S * root) * np.outer(root, root)
    return np.asarray(own), np.asarray(np.eye(p) - own @ S)


# --- curvatures of the sites --------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Sums over sites of ``A = M (I + M)^-1`` and of ``I - A``, as the evidence of variances needs them.

    ``spent (p,)`` is the diagonal of ``A C A``; ``left (p,)`` that of ``I - A``; ``squares (p, p)`` the squared entries
    of ``A``; ``inner (p,)`` the diagonal of ``A (I - A)``; ``rest`` the trace of the square of ``I - A``.
    """

    spent: Array
    left: Array
    squares: Array
    inner: Array
    rest: float

    @classmethod
    def from_total(cls, total: Array, spent: Array, squares: Array, V: int) -> Sums:
        """Return the sums from ``total (p, p)``, the sum of ``A``, and the terms that need each site."""
        diagonal = np.diag(total)
        rest = V * len(total) - 2 * float(diagonal.sum()) + float(squares.sum())
        return cls(spent, V - diagonal, squares, diagonal - squares.sum(axis=1), rest)


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

    def part(self, kept: Mask) -> Dense:
        """Return the rows and columns that are kept."""
        return Dense(self.matrices[:, kept][:, :, kept])

    def resolved(self) -> tuple[Dense, Array]:
        """Return ``M_u (I + M_u)^-1``, and ``log |I + M_u|``."""
        one = np.eye(self.rank)
        more = self.matrices + one
        logs = 2 * np.log(np.einsum("ujj->uj", np.linalg.cholesky(more))).sum(axis=1)
        return Dense(one - np.linalg.inv(more)), np.asarray(logs)

    def __matmul__(self, blocks: Array) -> Array:
        """Return ``M_u X_u`` for ``(V, p, m)`` or one ``(p, m)``."""
        return np.asarray(np.matmul(self.matrices, blocks))

    def times(self, u: int, matrix: Array) -> Array:
        """Return ``M_u X`` of one site, for ``X (p, k)``."""
        return np.asarray(self.matrices[u] @ matrix)

    def of(self, u: int) -> Array:
        """Return the matrix of one site."""
        return np.asarray(self.matrices[u])

    def sum(self, sites: Index | None = None) -> Array:
        """Return the sum over some sites, or all."""
        return np.asarray((self.matrices if sites is None else self.matrices[sites]).sum(axis=0))

    def posterior_cov(self, C: Array) -> Array:
        """Return ``I - A + (I - A) C (I - A)`` for the matrices ``A`` of all sites."""
        keep = np.eye(self.rank) - self.matrices
        return np.asarray(keep + keep @ C @ keep)

    def sums(self, C: Array) -> Sums:
        """Return these sums for the matrices ``A``, with one ``C (p, p)`` for all sites or one per site."""
        A = self.matrices
        spent = ((A @ C) * A).sum(axis=(0, 2))
        return Sums.from_total(self.sum(), spent, np.einsum("ujk,ujk->jk", A, A), len(A))


@dataclass(frozen=True, eq=False)
class LowRank:
    """The matrices ``diag(diagonal_u) + factor_u factor_u'``, ``diagonal (V, p)`` and ``factor (V, p, r)``.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin.likelihoods import Dense, LowRank
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

    def part(self, kept: Mask) -> LowRank:
        return LowRank(self.diagonal[:, kept], self.factor[:, kept])

    def resolved(self) -> tuple[LowRank, Array]:
        # with D of I + diagonal it is I - 1/D + N N'
        diagonal = 1.0 + self.diagonal
        flat = self.factor / diagonal[:, :, None]
        root = np.linalg.cholesky(np.eye(self.rank) + np.swapaxes(self.factor, 1, 2) @ flat)
        logs = np.log(diagonal).sum(axis=1) + 2 * np.log(np.einsum("ujj->uj", root)).sum(axis=1)
        N = flat @ np.swapaxes(np.linalg.inv(root), 1, 2)
        return LowRank(self.diagonal / diagonal, N), np.asarray(logs)

    def __matmul__(self, blocks: Array) -> Array:
        inside = np.matmul(np.swapaxes(self.factor, 1, 2), blocks)
        return np.asarray(self.diagonal[:, :, None] * blocks + np.matmul(self.factor, inside))

    def times(self, u: int, matrix: Array) -> Array:
        return np.asarray(self.diagonal[u][:, None] * matrix + self.factor[u] @ (self.factor[u].T @ matrix))

    def of(self, u: int) -> Array:
        return np.asarray(self.factor[u] @ self.factor[u].T + np.diag(self.diagonal[u]))

    def sum(self, sites: Index | None = None) -> Array:
        diagonal, factor = (self.diagonal, self.factor) if sites is None else (self.diagonal[sites], self.factor[sites])
        stacked = np.swapaxes(factor, 1, 2).reshape(-1, diagonal.shape[1])
        return np.asarray(stacked.T @ stacked + np.diag(diagonal.sum(axis=0)))

    def sums(self, C: Array) -> Sums:
        spent, squares = np.zeros(len(C)), np.zeros(C.shape)
        for u, (a, N) in enumerate(zip(self.diagonal, self.factor, strict=True)):
            squares += self.of(u) ** 2
            CN = C @ N
            # the diagonal of (a + N N') C (a + N N')
            spent += a**2 * np.diag(C) + 2 * a * (CN * N).sum(axis=1) + ((N @ (N.T @ CN)) * N).sum(axis=1)
        return Sums.from_total(self.sum(), spent, squares, len(self.diagonal))

    def congruent(self, A: Array) -> LowRank | None:
        """Return ``A'M_u A`` as low rank; few rows of A have entries off its diagonal."""
        mixed_rows = np.flatnonzero((np.diag(np.diag(A)) != A).any(axis=1) & self.diagonal.any(axis=0))
        if len(mixed_rows) + self.rank > SHORT * len(A):
            return None
        diagonal = self.diagonal * np.diag(A) ** 2
        diagonal[:, mixed_rows] = 0.0
        more = np.sqrt(self.diagonal[:, mixed_rows])[:, None, :] * A[mixed_rows].T
        return LowRank(diagonal, np.concatenate([A.T @ self.factor, more], axis=2))

    def take(self, sites: Index) -> LowRank:
        return LowRank(self.diagonal[sites], self.factor[sites])


Matrices = Dense | LowRank


def shrunk(A: Matrices, u: int, C: Array, share: float = 1.0) -> Array:
    """Return ``(I - share A_u) C (I - share A_u)`` of one site, for a symmetric ``C (p, p)``."""
    half = C - share * A.times(u, C)
    return np.asarray(half - share * A.times(u, half.T).T)


def carried(S: Matrices, away: Matrices, root: Array, varying: Mask, u: int, C: Array) -> Array:
    """Return ``(I - C_u S_u) C (I - C_u S_u)'`` of one site, as `given_mean`, without a product of two such matrices.

    The covariance ``C_u`` given the mean is ``T (I - away_u) T`` for the varying coefficients, with ``T = diag(root)``.
    """
    for _ in range(2):
        pulled = root[:, None] * S.times(u, C)[varying]
        C = C.copy()
        C[varying] -= root[:, None] * (pulled - away.times(u, pulled))
        C = C.T
    return C


def low_rank(G: Array, most: int) -> LowRank | None:
    """Return matrices ``(V, p, p)`` of rank ``most`` or less as low rank; None if that does not save work."""
    V, p = G.shape[:2]
    if p <= FEW or most > SHORT * p:
        return None
    factor, largest = np.zeros((V, p, p)), 1
    for out, matrix in zip(factor, G, strict=True):
        upper, pivots, rank, _ = dpstrf(matrix, tol=1e-11 * max(float(matrix.diagonal().max()), 1e-300))
        out[pivots - 1, :rank] = np.triu(upper)[:rank].T
        largest = max(largest, rank)
    return None if largest > SHORT * p else LowRank(np.zeros((V, p)), factor[:, :, :largest].copy())
