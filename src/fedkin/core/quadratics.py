"""Define functions of sites' parameters: `SiteTerms`, `QuadraticTerms`, and `Quadratics` (sums by fold).

`SiteTerms` provides everything that solvers and certificates need from the data, vectorised over sites: values,
gradients, Hessians, and the Fenchel-Young gap ``M_u(theta_u) + M_u*(-s_u) + <s_u, theta_u>``, a site's share of the
duality gap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core.linalg import generalized_inverse

#: Singular values below this share of the largest one count as zero.
SINGULAR_TOLERANCE = 1e-12
_SUMS = ("count", "value", "gradient", "hessian")


class SiteTerms(ABC):
    """Mean losses of V sites, each a convex function on R^p."""

    n_sites: int
    n_params: int

    @abstractmethod
    def values(self, theta: Array) -> Array:
        """Return ``M_u(theta_u)``, shape ``(V,)``."""

    @abstractmethod
    def gradients(self, theta: Array) -> Array:
        """Return the gradients, shape ``(V, p)``."""

    @abstractmethod
    def hessians(self, theta: Array) -> Array:
        """Return the Hessians, shape ``(V, p, p)``."""

    def hessian_blocks(self, theta: Array, columns: Mask) -> Array:
        """Return the Hessians restricted to the rows and columns in ``columns (p,)``."""
        return self.hessians(theta)[:, columns][:, :, columns]

    def cautious_hessians(self, theta: Array) -> Array:
        """Return matrices ``(V, p, p)`` of quadratic models that are valid farther from ``theta`` than Hessians."""
        return self.hessians(theta)

    def caution(self) -> tuple[Array, Array]:
        """Return the initial and the minimum shares ``(V,)`` of cautious Hessians in Newton's method."""
        return np.zeros(self.n_sites), np.zeros(self.n_sites)

    def lower_bounds(self) -> Array:
        """Return lower bounds ``(V,)`` on ``M_u``, minus infinity if none is known."""
        return np.full(self.n_sites, -np.inf)

    @abstractmethod
    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        """Return upper bounds ``(V,)`` on ``M_u(theta_u) + <s_u, theta_u> - min_v (M_u(v) + <s_u, v>)``.

        The minimum is over v in the ball of that ``radius``. Without a radius, the bound is infinite when the minimum
        is not finite (a residual outside the range of a singular design) or no bound is found.
        """

    def gaps_in_ball(self, theta: Array, s: Array, radius: float) -> Array:
        """Return `young_gaps` in a ball whose boundary may absorb outward forces on ``theta (V, p)``."""
        gaps = self.young_gaps(theta, s, radius)
        length = np.sqrt(np.einsum("vp,vp->v", theta, theta))
        outward = -np.einsum("vp,vp->v", self.gradients(theta) + s, theta)
        pull = np.divide(outward, length, out=np.zeros_like(length), where=(length > 0) & (outward > 0))
        if not pull.any():
            return gaps
        direction = theta / np.where(length > 0, length, 1.0)[:, None]
        held = self.young_gaps(theta, s + pull[:, None] * direction, radius) + pull * (radius - length)
        return np.asarray(np.minimum(gaps, held))

    @abstractmethod
    def take(self, sites: Index) -> SiteTerms:
        """Return the terms of the given sites, in that order."""


def times(matrices: Array, v: Array) -> Array:
    """Return ``A_u v_u`` of matrices ``(V, p, p)``, or of multiples of the identity ``(V,)``, and ``v (V, p)``."""
    return matrices[:, None] * v if matrices.ndim == 1 else np.asarray(np.matmul(matrices, v[:, :, None])[:, :, 0])


class QuadraticTerms(SiteTerms):
    """``M_u(theta) = theta' A_u theta / 2 - b_u' theta + c_u``: Gram statistics, no rows.

    ``A (V, p, p)``, or ``(V,)`` when every ``A_u`` is a multiple of the identity; ``b (V, p)``; ``c (V,)``; ``factors``
    of sites whose matrix is too close to singular to find the minimiser from ``A`` and ``b``.
    """

    def __init__(self, A: Array, b: Array, c: Array, *, factors: RowFactors | None = None) -> None:
        self.A, self.b, self.c, self.factors = A, b, c, factors
        #: Results that solvers computed from the matrices and may reuse.
        self.shared: dict[str, Array] = {}
        self.isotropic = A.ndim == 1
        self.n_sites, self.n_params = b.shape

    def apply(self, theta: Array) -> Array:
        """Return ``A_u theta_u``, shape ``(V, p)``."""
        return times(self.A, theta)

    def values(self, theta: Array) -> Array:
        out = ((0.5 * self.apply(theta) - self.b) * theta).sum(axis=1) + self.c
        if self.factors is not None:
            out[self.factors.sites] = self.factors.values(theta[self.factors.sites])
        return np.asarray(out)

    def gradients(self, theta: Array) -> Array:
        return self.apply(theta) - self.b

    def hessians(self, theta: Array) -> Array:
        if self.isotropic:
            return self.A[:, None, None] * np.eye(self.n_params)
        return self.A

    @cached_property
    def mean_curvature(self) -> Array:
        """Mean diagonal of the matrices, ``(p,)``."""
        if self.isotropic:
            return np.full(self.n_params, self.A.mean())
        return np.asarray(np.einsum("vii->i", self.A) / self.n_sites)

    def resolvent(self, weight: Array) -> Callable[[Array], Array]:
        """Return the map ``v -> (A_u + diag(weight_u))^{-1} v_u`` for positive ``weight (V, p)``."""
        if self.isotropic:
            scale = 1.0 / (self.A[:, None] + weight)
            return lambda v: v * scale
        shifted, diagonal = self.A.copy(), np.arange(self.n_params)
        shifted[:, diagonal, diagonal] += weight
        inverse = np.asarray(np.linalg.inv(shifted), dtype=np.float64)
        return lambda v: times(inverse, v)

    @cached_property
    def _inverse(self) -> tuple[Array, Mask]:
        if self.isotropic:
            inverse = np.divide(1.0, self.A, out=np.zeros_like(self.A), where=self.A > 0)
            return inverse, np.asarray(self.A <= 0)
        return generalized_inverse(self.A)

    @property
    def inverses(self) -> Array:
        """Inverses of the matrices ``(V, p, p)``, generalised if singular; ``(V,)`` if isotropic."""
        return self._inverse[0]

    @property
    def singular(self) -> Mask:
        """Mask of sites whose matrix is numerically singular, ``(V,)``."""
        return self._inverse[1]

    @cached_property
    def _outside(self) -> Array:
        bad = self.singular
        if self.isotropic:
            return np.tile(np.eye(self.n_params), (int(bad.sum()), 1, 1))
        return np.asarray(np.eye(self.n_params) - np.matmul(self.A[bad], self.inverses[bad]))

    def unseen(self, v: Array) -> Array:
        """Return the parts of ``v (V, p)`` outside the range of the sites' matrices, 0 for regular ones."""
        out = np.zeros_like(v)
        out[self.singular] = times(self._outside, v[self.singular])
        return out

    def minimizers(self) -> Array:
        """Return each site's own minimiser ``(V, p)``; if there are several, the shortest in standardised units."""
        own = times(self.inverses, self.b)
        if self.factors is not None:
            own[self.factors.sites] = self.factors.minimizers()
        return own

    def lower_bounds(self) -> Array:
        return self.values(self.minimizers())

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        residual = self.gradients(theta) + s
        step = times(self.inverses, residual)
        gaps = np.asarray(0.5 * np.einsum("vp,vp->v", residual, step))
        bad = self.singular
        if bad.any():
            left = residual[bad] - self.apply(step)[bad]
            gaps[bad] += ball_gap(left, theta[bad], radius)
        if self.factors is not None:
            # without a force at a site, its gap depends on its rows only
            free = ~s[self.factors.sites].any(axis=1)
            gaps[self.factors.sites[free]] = self.factors.excess(theta[self.factors.sites])[free]
        return gaps

    def take(self, sites: Index) -> QuadraticTerms:
        factors = None if self.factors is None else self.factors.take(new_places(sites, self.n_sites))
        return QuadraticTerms(self.A.take(sites, axis=0), self.b[sites], self.c[sites], factors=factors)


@dataclass(frozen=True, eq=False)
class RowFactors:
    """``M_u(theta) = |S_u V_u (scale_u theta) - z_u|^2 / 2 + rest_u``: least squares on nearly collinear rows.

    A Gram matrix squares the condition number; a singular value decomposition of the rows keeps small directions.
    """

    sites: Index  # (M,), ascending positions among the terms
    S: Array  # (M, p), singular values of features scaled to mean square 1; 0 where they count as zero
    V: Array  # (M, p, p)
    z: Array  # (M, p)
    rest: Array  # (M,)
    scale: Array  # (M, p)

    @classmethod
    def from_rows(cls, sites: Index, X: Array, y: Array, ridge: Array) -> RowFactors:
        """Return factors of rows ``X (M, n, p)`` with responses ``y (M, n)``, and a ridge ``(p,)``."""
        m, n, p = X.shape
        # the ridge is p further rows, whose response is 0
        further = np.broadcast_to(np.diag(np.sqrt(ridge)), (m, p, p))
        X = np.concatenate([X / np.sqrt(n), further], axis=1)
        y = np.concatenate([y / np.sqrt(n), np.zeros((m, p))], axis=1)
        scale = np.sqrt((X**2).sum(axis=1))
        scale[scale == 0] = 1.0
        U, S, V = np.linalg.svd(X / scale[:, None, :], full_matrices=False)
        z = times(np.swapaxes(U, 1, 2), y)
        S = np.where(SINGULAR_TOLERANCE * S[:, :1] < S, S, 0.0)
        return cls(sites, S, V, z, 0.5 * ((y - times(U, z)) ** 2).sum(axis=1), scale)

    @classmethod
    def joined(cls, parts: list[RowFactors]) -> RowFactors | None:
        """Return the factors of all parts, by site; None if there are none."""
        if not parts:
            return None
        arrays = [np.concatenate([getattr(one, item.name) for one in parts]) for item in fields(cls)]
        order = np.argsort(arrays[0])
        return cls(*(array[order] for array in arrays))

    def take(self, place: Index) -> RowFactors | None:
        """Return the factors of sites whose new ``place`` is not negative; None if there are none."""
        chosen = np.flatnonzero(place[self.sites] >= 0)
        _, *others = (getattr(self, item.name)[chosen] for item in fields(self))
        return RowFactors.joined([RowFactors(place[self.sites[chosen]], *others)] if chosen.size else [])

    def values(self, theta: Array) -> Array:
        """Return ``M_u(theta_u)`` for ``theta (M, p)``."""
        return np.asarray(0.5 * (self._misfit(theta) ** 2).sum(axis=1) + self.rest)

    def excess(self, theta: Array) -> Array:
        """Return ``M_u(theta_u) - min M_u``, shape ``(M,)``."""
        return np.asarray(0.5 * (np.where(self.S > 0, self._misfit(theta), 0.0) ** 2).sum(axis=1))

    def minimizers(self) -> Array:
        """Return minimisers ``(M, p)``; if they are not unique, the shortest in scaled units."""
        theta = np.zeros_like(self.z)
        for _ in range(2):  # the second time refines the first
            step = np.divide(self._misfit(theta), self.S, out=np.zeros_like(theta), where=self.S > 0)
            theta = theta - times(np.swapaxes(self.V, 1, 2), step) / self.scale
        return theta

    def _misfit(self, theta: Array) -> Array:
        return self.S * times(self.V, theta * self.scale) - self.z


def ball_gap(left: Array, theta: Array, radius: float) -> Array:
    """Return the bound ``<left, theta> + radius * |left|`` on the cost of unbalanced directions, 0 if none."""
    size = np.sqrt(np.einsum("vp,vp->v", left, left))
    if not np.isfinite(radius):
        return np.where(size > 0, np.inf, 0.0)
    return np.asarray(np.einsum("vp,vp->v", left, theta) + radius * size)


def new_places(sites: Index, n_sites: int) -> Index:
    """Return the position of each of ``n_sites`` sites in ``sites``, or -1."""
    place = np.full(n_sites, -1)
    place[sites] = np.arange(sites.size)
    return place


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Sums of the loss, its gradient and its Hessian at ``at (V, p)`` over rows of V sites in K parts.

    With folds, the last part holds the rows that always train (fold -1).
    """

    at: Array
    count: Index | Array  # (V, K), rows, or sums of their weights
    value: Array  # (V, K)
    gradient: Array  # (V, K, p)
    hessian: Array  # (V, K, p, p), or (V, K) when all Hessians are multiples of the identity

    @classmethod
    def zeros(cls, at: Array, parts: int) -> Quadratics:
        """Return sums of zero with this number of parts."""
        v, p = at.shape
        return cls(at, np.zeros((v, parts)), np.zeros((v, parts)), np.zeros((v, parts, p)), np.zeros((v, parts, p, p)))

    @classmethod
    def from_terms(cls, terms: SiteTerms, n: Array, at: Array) -> Quadratics:
        """Return sums of ``n (V,)`` times the mean losses at ``at (V, p)``, as one part."""
        if isinstance(terms, QuadraticTerms) and not at.any():
            value, gradient, hessian = terms.c, -terms.b, terms.A
        else:
            value, gradient = terms.values(at), terms.gradients(at)
            hessian = terms.A if isinstance(terms, QuadraticTerms) else terms.hessians(at)
        if hessian.ndim == 3:
            hessian = 0.5 * (hessian + np.swapaxes(hessian, 1, 2))  # messages hold one triangle
        hessian = n.reshape(-1, *[1] * (hessian.ndim - 1)) * hessian
        return cls(at, n[:, None], (n * value)[:, None], (n[:, None] * gradient)[:, None], hessian[:, None])

    @property
    def n_sites(self) -> int:
        return len(self.at)

    @property
    def n_params(self) -> int:
        return int(self.at.shape[1])

    @property
    def folds(self) -> int:
        """Number of folds, excluding the part that always trains."""
        return int(self.count.shape[1]) - 1

    def take(self, sites: Index) -> Self:
        """Return the sums of the given sites, in that order."""
        return replace(self, at=self.at[sites], **{name: getattr(self, name)[sites] for name in _SUMS})

    def add(self, sites: Index, more: Quadratics) -> None:
        """Add the sums of more rows of some sites, in place."""
        for name in _SUMS:
            getattr(self, name)[sites] += getattr(more, name)

    def single_rows_train(self, single: Mask) -> None:
        """Move the rows of ``single`` sites ``(V,)`` to the part that always trains, in place."""
        for name in _SUMS:
            each = getattr(self, name)
            each[single, -1], each[single, :-1] = each[single].sum(axis=1), 0.0

    def rotated(self, by: Index) -> Quadratics:
        """Rotate the folds of each site: fold ``k`` becomes fold ``k + by (V,)``, modulo the number of folds."""
        k = (np.arange(self.folds) - by[:, None]) % self.folds
        order = np.concatenate([k, np.full((len(k), 1), self.folds)], axis=1)
        return replace(self, **{name: getattr(self, name)[np.arange(len(k))[:, None], order] for name in _SUMS})

    def pooled(self) -> Quadratics:
        """Return the total over all sites, with ``at`` equal to 0."""
        return Quadratics(self.at[:1], *(getattr(self, name).sum(axis=0, keepdims=True) for name in _SUMS))

    def total(self, without: int | None = None, *, forward: bool = False) -> Quadratics:
        """Return sums over all rows as one part, without a fold if given, and without later ones if ``forward``."""
        last = self.folds if without is None or not forward else without
        kept = [k for k in (*range(last), self.folds) if k != without]  # the last part always trains
        parts = (getattr(self, name)[:, kept] for name in ("count", "value", "gradient"))
        hessian = self.hessian[:, kept[:1]]
        for k in kept[1:]:  # one after another: of many coefficients they are large
            hessian += self.hessian[:, k : k + 1]
        count, value, gradient = (part.sum(axis=1, keepdims=True) for part in parts)
        return Quadratics(self.at, count, value, gradient, hessian)

    def map(self, A: Array, shift: Array | float = 0.0) -> Quadratics:
        """Return the sums in terms of ``phi``, where ``theta = A phi + shift``."""
        at = (self.at - shift) @ np.linalg.inv(A).T
        H = self.hessian[..., None, None] * np.eye(len(A)) if self.hessian.ndim == 2 else self.hessian
        return replace(self, at=at, gradient=self.gradient @ A, hessian=A.T @ H @ A)

    def coefficients(self) -> tuple[Array, Array, Array]:
        """Return ``A (V, K, p, p)``, ``b (V, K, p)``, ``c (V, K)`` of ``theta'A theta / 2 - b'theta + c``."""
        at = self.at[:, None, :]
        A = self.hessian
        bend = A[..., None] * at if A.ndim == 2 else np.matmul(A, at[..., None])[..., 0]
        return A, bend - self.gradient, self.value + ((0.5 * bend - self.gradient) * at).sum(axis=-1)

    def terms(self, part: int = 0, ridge: Array | None = None) -> QuadraticTerms:
        """Return the mean losses of one part, with a ridge ``(p,)``; every site must have rows in it."""
        one = replace(self, **{name: getattr(self, name)[:, part : part + 1] for name in _SUMS})
        n = one.count[:, 0].astype(np.float64)
        A, b, c = (each[:, 0] for each in one.coefficients())
        A, b, c = A / n.reshape(-1, *[1] * (A.ndim - 1)), b / n[:, None], c / n
        if ridge is not None and ridge.any():
            if A.ndim == 1 and (ridge == ridge[0]).all():
                return QuadraticTerms(A + ridge[0], b, c)
            A = (A[:, None, None] * np.eye(ridge.size) if A.ndim == 1 else A) + np.diag(ridge)
        return QuadraticTerms(A, b, c)
