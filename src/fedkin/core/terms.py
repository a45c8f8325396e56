"""`SiteTerms`: the sites' mean losses as functions of the stacked parameters ``theta (V, p)``.

Everything that a solver or a certificate needs of the data, vectorised over sites: values, gradients, Hessians and
the Fenchel-Young gap ``M_u(theta_u) + M_u*(-s_u) + <s_u, theta_u>``, a site's share of a duality gap. The terms of
losses on linear predictors and `build_terms` are in `rows`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core.newton import generalized_inverse, solve_and_rest, sum_groups
from fedkin.data import Rows
from fedkin.losses import Loss

#: Share of the cautious Hessian where the Hessian itself may vanish in directions in which the gradient does not.
LEAST_CAUTION = 1e-6
#: Singular values below this share of the largest one count as zero.
SINGULAR_TOLERANCE = 1e-12


class SiteTerms(ABC):
    """Mean losses of V sites, each a convex function on R^p."""

    n_sites: int
    n_params: int

    @abstractmethod
    def values(self, theta: Array) -> Array:
        """``M_u(theta_u)``, shape ``(V,)``."""

    @abstractmethod
    def gradients(self, theta: Array) -> Array:
        """Shape ``(V, p)``."""

    @abstractmethod
    def hessians(self, theta: Array) -> Array:
        """Shape ``(V, p, p)``."""

    def hessian_blocks(self, theta: Array, columns: Mask) -> Array:
        """The rows and columns ``columns (p,)`` of the Hessians, where all of them would cost more."""
        return self.hessians(theta)[:, columns][:, :, columns]

    def cautious_hessians(self, theta: Array) -> Array:
        """Matrices ``(V, p, p)`` of quadratic models at ``theta`` that can be trusted farther away than Hessians."""
        return self.hessians(theta)

    def caution(self) -> tuple[Array, Array]:
        """Shares ``(V,)`` of the cautious Hessians that Newton's method begins with, and that it should always keep."""
        return np.zeros(self.n_sites), np.zeros(self.n_sites)

    def lower_bounds(self) -> Array:
        """Numbers ``(V,)`` that ``M_u`` never falls below, minus infinity where none is known."""
        return np.full(self.n_sites, -np.inf)

    @abstractmethod
    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        """Upper bounds ``(V,)`` on ``M_u(theta_u) + <s_u, theta_u> - min_v (M_u(v) + <s_u, v>)``.

        The minimum is over v in the ball of that ``radius``. Without one, a site is infinite when its minimum is not
        finite (a residual outside the range of a singular design), or when no bound was found.
        """

    @abstractmethod
    def take(self, sites: Index) -> SiteTerms:
        """The terms of some sites, in that order."""


def _times(matrices: Array, v: Array) -> Array:
    """``A_u v_u`` of matrices ``(V, p, p)``, or of multiples of the identity ``(V,)``, and ``v (V, p)``."""
    return matrices[:, None] * v if matrices.ndim == 1 else np.asarray(np.matmul(matrices, v[:, :, None])[:, :, 0])


class QuadraticTerms(SiteTerms):
    """``M_u(theta) = theta' A_u theta / 2 - b_u' theta + c_u``: Gram statistics, no rows.

    ``A (V, p, p)``, or ``(V,)`` when every ``A_u`` is a multiple of the identity; ``b (V, p)``; ``c (V,)``; ``factors``
    of sites whose matrix is so close to singular that ``A`` and ``b`` do not tell their minimiser.
    """

    def __init__(self, A: Array, b: Array, c: Array, *, factors: RowFactors | None = None) -> None:
        self.A, self.b, self.c, self.factors = A, b, c, factors
        #: What solvers worked out from the matrices and may use again.
        self.shared: dict[str, Array] = {}
        self.isotropic = A.ndim == 1
        self.n_sites, self.n_params = b.shape

    def apply(self, theta: Array) -> Array:
        """``A_u theta_u``, shape ``(V, p)``."""
        return _times(self.A, theta)

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

    @cached_property
    def typical_size(self) -> float:
        """How large the parameters are that sites would have on their own, roughly."""
        curvature = max(float(self.mean_curvature.mean()), np.finfo(float).tiny)
        return float(np.abs(self.b).max(initial=0.0)) / curvature

    def resolvent(self, weight: Array) -> Callable[[Array], Array]:
        """The map ``v -> (A_u + diag(weight_u))^{-1} v_u`` for positive ``weight (V, p)``."""
        if self.isotropic:
            scale = 1.0 / (self.A[:, None] + weight)
            return lambda v: v * scale
        shifted, diagonal = self.A.copy(), np.arange(self.n_params)
        shifted[:, diagonal, diagonal] += weight
        inverse = np.asarray(np.linalg.inv(shifted), dtype=np.float64)
        return lambda v: _times(inverse, v)

    @cached_property
    def _inverse(self) -> tuple[Array, Mask]:
        if self.isotropic:
            inverse = np.divide(1.0, self.A, out=np.zeros_like(self.A), where=self.A > 0)
            return inverse, np.asarray(self.A <= 0)
        return generalized_inverse(self.A)

    @property
    def inverses(self) -> Array:
        """Inverses of the matrices ``(V, p, p)``, generalised where they are singular; ``(V,)`` if isotropic."""
        return self._inverse[0]

    @property
    def singular(self) -> Mask:
        """Sites whose matrix counts as singular, ``(V,)``."""
        return self._inverse[1]

    @cached_property
    def unseen(self) -> Array:
        """Projections of the M `singular` sites onto what lies outside the range of their matrices, ``(M, p, p)``."""
        one, bad = np.eye(self.n_params), self.singular
        if self.isotropic:
            return np.tile(one, (int(bad.sum()), 1, 1))
        return np.asarray(one - np.matmul(self.A[bad], self.inverses[bad]))

    def minimizers(self) -> Array:
        """Each site's own minimiser (the shortest one in standardised units where it is not unique), ``(V, p)``."""
        own = _times(self.inverses, self.b)
        if self.factors is not None:
            own[self.factors.sites] = self.factors.minimizers()
        return own

    def lower_bounds(self) -> Array:
        return self.values(self.minimizers())

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        residual = self.gradients(theta) + s
        step = _times(self.inverses, residual)
        gaps = np.asarray(0.5 * np.einsum("vp,vp->v", residual, step))
        bad = self.singular
        if bad.any():
            left = residual[bad] - self.apply(step)[bad]
            gaps[bad] += ball_gap(left, theta[bad], radius)
        if self.factors is not None:
            # where nothing pulls at a site, its gap is what its rows tell
            free = ~s[self.factors.sites].any(axis=1)
            gaps[self.factors.sites[free]] = self.factors.excess(theta[self.factors.sites])[free]
        return gaps

    def take(self, sites: Index) -> QuadraticTerms:
        factors = None if self.factors is None else self.factors.take(new_places(sites, self.n_sites))
        return QuadraticTerms(self.A[sites], self.b[sites], self.c[sites], factors=factors)


@dataclass(frozen=True, eq=False)
class RowFactors:
    """``M_u(theta) = |R_u (scale_u theta) - z_u|^2 / 2 + rest_u``: least squares on nearly collinear rows of M sites.

    A Gram matrix squares the condition number: of features whose singular values span more than 1e5, it hardly tells
    which directions it still sees. A triangular factor of the rows has the same size and keeps what the rows know.
    """

    sites: Index  # ascending positions among the terms
    R: Array  # (M, p, p), of features scaled to mean square 1
    z: Array  # (M, p)
    rest: Array  # (M,)
    scale: Array  # (M, p)

    @classmethod
    def from_rows(cls, sites: Index, X: Array, y: Array, ridge: Array) -> RowFactors:
        """Factors of rows ``X (M, n, p)`` with responses ``y (M, n)``, and a ridge ``(p,)``."""
        m, n, p = X.shape
        # the ridge is p further rows, whose response is 0
        further = np.broadcast_to(np.diag(np.sqrt(ridge)), (m, p, p))
        X = np.concatenate([X / np.sqrt(n), further], axis=1)
        y = np.concatenate([y / np.sqrt(n), np.zeros((m, p))], axis=1)
        scale = np.sqrt((X**2).sum(axis=1))
        scale[scale == 0] = 1.0
        Q, R = np.linalg.qr(X / scale[:, None, :])
        z = np.matmul(y[:, None, :], Q)[:, 0, :]
        return cls(sites, R, z, 0.5 * ((y - _times(Q, z)) ** 2).sum(axis=1), scale)

    @classmethod
    def joined(cls, parts: Sequence[RowFactors]) -> RowFactors | None:
        """The factors of all parts, by site; None when there are none."""
        if not parts:
            return None
        columns = [(one.sites, one.R, one.z, one.rest, one.scale) for one in parts]
        sites, *others = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(sites)
        return cls(sites[order], *(other[order] for other in others))

    def values(self, theta: Array) -> Array:
        """``M_u(theta_u)`` for ``theta (M, p)``."""
        return np.asarray(0.5 * (self._misfit(theta) ** 2).sum(axis=1) + self.rest)

    def excess(self, theta: Array) -> Array:
        """``M_u(theta_u) - min M_u``, shape ``(M,)``."""
        U, values, _ = self._svd
        seen = np.matmul(self._misfit(theta)[:, None, :], U)[:, 0, :] * (values > 0)
        return np.asarray(0.5 * (seen**2).sum(axis=1))

    def minimizers(self) -> Array:
        """Minimisers ``(M, p)``, the shortest ones in scaled units where they are not unique."""
        U, values, Vt = self._svd
        roots = np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)
        theta = np.zeros_like(self.z)
        for _ in range(2):  # the second time refines the first
            seen = np.matmul(self._misfit(theta)[:, None, :], U)[:, 0, :] * roots
            theta = theta - np.matmul(seen[:, None, :], Vt)[:, 0, :] / self.scale
        return theta

    def take(self, place: Index) -> RowFactors | None:
        """The factors of sites whose new ``place`` is not negative; None when there are none."""
        chosen = np.flatnonzero(place[self.sites] >= 0)
        parts = (part[chosen] for part in (self.R, self.z, self.rest, self.scale))
        return RowFactors.joined([RowFactors(place[self.sites[chosen]], *parts)] if chosen.size else [])

    def _misfit(self, theta: Array) -> Array:
        return _times(self.R, theta * self.scale) - self.z

    @cached_property
    def _svd(self) -> tuple[Array, Array, Array]:
        U, values, Vt = np.linalg.svd(self.R)
        return U, np.where(values > SINGULAR_TOLERANCE * values[:, :1], values, 0.0), Vt


def ball_gap(left: Array, theta: Array, radius: float) -> Array:
    """Bound ``<left, theta> + radius * |left|`` on what an unbalanced direction may cost, 0 where nothing is left."""
    size = np.sqrt(np.einsum("vp,vp->v", left, left))
    if not np.isfinite(radius):
        return np.where(size > 0, np.inf, 0.0)
    return np.asarray(np.einsum("vp,vp->v", left, theta) + radius * size)


def new_places(sites: Index, n_sites: int) -> Index:
    """Where each of ``n_sites`` is in ``sites``, -1 for those that are not."""
    place = np.full(n_sites, -1)
    place[sites] = np.arange(sites.size)
    return place


class LossTerms(SiteTerms):
    """Mean losses known only as functions (`UserLoss`), one site after the other, and ``ridge (p,)``."""

    def __init__(self, loss: Loss, rows: Sequence[Rows], ridge: Array) -> None:
        self.loss, self.rows, self.ridge = loss, tuple(rows), ridge
        self.n_sites, self.n_params = len(self.rows), ridge.size

    def _each(self, function: Callable[..., Array | float], theta: Array) -> Array:
        return np.stack([function(own, *rows.arrays) for own, rows in zip(theta, self.rows, strict=True)])

    def values(self, theta: Array) -> Array:
        return np.asarray(self._each(self.loss.value, theta) + 0.5 * (theta**2) @ self.ridge)

    def gradients(self, theta: Array) -> Array:
        return self._each(self.loss.gradient, theta) + theta * self.ridge

    def hessians(self, theta: Array) -> Array:
        return self._each(self.loss.hessian, theta) + np.diag(self.ridge)

    def cautious_hessians(self, theta: Array) -> Array:
        hessians, gradients = self.hessians(theta), self.gradients(theta)
        # nothing is known but the derivatives: curb the step to about the length of theta
        size, steepness = np.linalg.norm(theta, axis=1), np.linalg.norm(gradients, axis=1)
        curb = np.maximum(np.einsum("vii->v", hessians) / self.n_params, steepness / (1.0 + size))
        return np.asarray(hessians + curb[:, None, None] * np.eye(self.n_params))

    def caution(self) -> tuple[Array, Array]:
        return np.ones(self.n_sites), np.full(self.n_sites, LEAST_CAUTION)

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        residual = self.gradients(theta) + s
        modulus = self.loss.strong_convexity + self.ridge.min()
        strong = np.full(self.n_sites, np.inf)
        if modulus > 0:
            strong = np.einsum("vp,vp->v", residual, residual) / (2 * modulus)
        return np.asarray(np.minimum(strong, ball_gap(residual, theta, radius)))

    def take(self, sites: Index) -> LossTerms:
        return LossTerms(self.loss, [self.rows[u] for u in sites], self.ridge)


class MixedTerms(SiteTerms):
    """Sites of several kinds: ``parts`` are (sites, terms) that together cover ``0 .. V-1``."""

    def __init__(self, parts: Sequence[tuple[Index, SiteTerms]]) -> None:
        self.parts = tuple(parts)
        self.n_sites = sum(sites.size for sites, _ in self.parts)
        self.n_params = self.parts[0][1].n_params

    def _gather(self, shape: tuple[int, ...], piece: Callable[[Index, SiteTerms], Array]) -> Array:
        out = np.empty((self.n_sites, *shape))
        for sites, terms in self.parts:
            out[sites] = piece(sites, terms)
        return out

    def values(self, theta: Array) -> Array:
        return self._gather((), lambda u, terms: terms.values(theta[u]))

    def gradients(self, theta: Array) -> Array:
        return self._gather((self.n_params,), lambda u, terms: terms.gradients(theta[u]))

    def hessians(self, theta: Array) -> Array:
        return self._gather((self.n_params,) * 2, lambda u, terms: terms.hessians(theta[u]))

    def cautious_hessians(self, theta: Array) -> Array:
        return self._gather((self.n_params,) * 2, lambda u, terms: terms.cautious_hessians(theta[u]))

    def caution(self) -> tuple[Array, Array]:
        start = self._gather((), lambda u, terms: terms.caution()[0])
        return start, self._gather((), lambda u, terms: terms.caution()[1])

    def lower_bounds(self) -> Array:
        return self._gather((), lambda u, terms: terms.lower_bounds())

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        return self._gather((), lambda u, terms: terms.young_gaps(theta[u], s[u], radius))

    def take(self, sites: Index) -> SiteTerms:
        place, parts = new_places(sites, self.n_sites), []
        for members, terms in self.parts:
            chosen = np.flatnonzero(place[members] >= 0)
            if chosen.size:
                parts.append((place[members[chosen]], terms.take(chosen)))
        return MixedTerms(parts)


class SummedTerms(SiteTerms):
    """Groups of sites that share one parameter: ``M_g(theta) = sum of M_u(theta)`` over the group's sites."""

    def __init__(self, terms: SiteTerms, labels: Index) -> None:
        self.terms, self.labels = terms, labels
        self.n_sites, self.n_params = int(labels.max()) + 1, terms.n_params

    def _sum(self, values: Array) -> Array:
        return sum_groups(values, self.labels, self.n_sites)

    def values(self, theta: Array) -> Array:
        return self._sum(self.terms.values(theta[self.labels]))

    def gradients(self, theta: Array) -> Array:
        return self._sum(self.terms.gradients(theta[self.labels]))

    def hessians(self, theta: Array) -> Array:
        return self._sum(self.terms.hessians(theta[self.labels]))

    def cautious_hessians(self, theta: Array) -> Array:
        return self._sum(self.terms.cautious_hessians(theta[self.labels]))

    def caution(self) -> tuple[Array, Array]:
        start, least = np.zeros(self.n_sites), np.zeros(self.n_sites)
        for total, own in zip((start, least), self.terms.caution(), strict=True):
            np.maximum.at(total, self.labels, own)
        return start, least

    def lower_bounds(self) -> Array:
        return self._sum(self.terms.lower_bounds())

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        # any split of s over a group's sites bounds its conjugate: each takes what balances it, and its curvature's
        # share of the rest
        own = theta[self.labels]
        gradients, hessians = self.terms.gradients(own), self.terms.hessians(own)
        u, rest = solve_and_rest(self._sum(hessians), self._sum(gradients) + s)
        shares = np.einsum("vij,vj->vi", hessians, u[self.labels])
        gaps = self._sum(self.terms.young_gaps(own, shares - gradients, radius))
        return np.asarray(gaps + ball_gap(rest, theta, radius))

    def take(self, sites: Index) -> SiteTerms:
        raise NotImplementedError("groups are not taken apart")


def summed_terms(terms: SiteTerms, labels: Index) -> SiteTerms:
    """The terms of groups whose sites share one parameter; ``labels (V,)`` number the groups from 0."""
    if not isinstance(terms, QuadraticTerms):
        return SummedTerms(terms, labels)
    groups = int(labels.max()) + 1
    A, b, c = (sum_groups(values, labels, groups) for values in (terms.A, terms.b, terms.c))
    return QuadraticTerms(A, b, c)
