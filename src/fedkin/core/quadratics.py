"""Quadratic functions of sites' parameters: `SiteTerms`, mean losses; `QuadraticTerms`; `Quadratics`, sums by fold.

`SiteTerms` are everything that a solver or a certificate needs of the data, vectorised over sites: values, gradients,
Hessians and the Fenchel-Young gap ``M_u(theta_u) + M_u*(-s_u) + <s_u, theta_u>``, a site's share of a duality gap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from scipy import sparse

from fedkin._base import Array, Index, Mask

#: Eigenvalues of a matrix with unit diagonal below this share of the largest one count as zero.
RANK_TOLERANCE = 1e-10
#: Pivots of a Cholesky factor above this are far from those of singular matrices.
SAFE_PIVOT = 1e-3

#: ``value(theta (A, p), who (A,)) -> (A,)``: the functions number ``who`` at ``theta``.
ValueFunction = Callable[[Array, Index], Array]
#: ``derivatives(theta (A, p), who (A,)) -> gradient (A, p), matrix (A, p, p)``.
DerivativeFunction = Callable[[Array, Index], tuple[Array, Array]]

_SUFFICIENT = 1e-4  # share of the promised decrease that a step has to keep (Armijo)
_HALVINGS = 60


def unit_diagonal(matrices: Array) -> tuple[Array, Array]:
    """``matrices (..., p, p)`` scaled to a unit diagonal, and the scale ``(..., p)`` (1 for zeros on the diagonal)."""
    diagonal = np.einsum("...ii->...i", matrices)
    scale = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    return np.asarray(matrices / (scale[..., :, None] * scale[..., None, :])), scale


def least_eigenvalue(matrices: Array) -> Array:
    """Smallest eigenvalues ``(...)`` of ``matrices (..., p, p)`` in units in which they have unit diagonal."""
    return np.asarray(np.linalg.eigvalsh(unit_diagonal(matrices)[0])[..., 0])


def surely_regular(scaled: Array) -> Mask:
    """Which matrices with unit diagonal are far from singular, by the pivots of a Cholesky factor, which is cheap."""
    try:
        pivots = np.einsum("vii->vi", np.linalg.cholesky(scaled))
    except np.linalg.LinAlgError:
        if len(scaled) == 1:
            return np.zeros(1, dtype=bool)
        half = len(scaled) // 2
        return np.concatenate([surely_regular(scaled[:half]), surely_regular(scaled[half:])])
    return np.asarray(pivots.min(axis=1, initial=1.0) > SAFE_PIVOT)


def generalized_inverse(matrices: Array) -> tuple[Array, Mask]:
    """Generalised inverses ``G_u (V, p, p)`` of semi-definite matrices, and which of these are singular ``(V,)``.

    ``A G A = A`` and ``G A G = G`` up to directions that count as zero. They are Moore-Penrose inverses in the units in
    which ``A`` has unit diagonal, so that the units of the features do not matter.
    """
    scaled, scale = unit_diagonal(matrices)
    singular = np.zeros(len(matrices), dtype=bool)
    try:
        inverse = np.linalg.inv(scaled)
        size = np.linalg.norm(scaled, axis=(1, 2)) * np.linalg.norm(inverse, axis=(1, 2))
        poor = ~(size < 0.1 / RANK_TOLERANCE)  # NaN counts as poor
    except np.linalg.LinAlgError:
        inverse, poor = np.empty_like(scaled), np.ones(len(matrices), dtype=bool)
    if poor.any():
        values, vectors = np.linalg.eigh(scaled[poor])
        kept = values > RANK_TOLERANCE * np.maximum(values[:, -1:], np.finfo(float).tiny)
        roots = np.divide(1.0, values, out=np.zeros_like(values), where=kept)
        inverse[poor] = np.matmul(vectors * roots[:, None, :], np.swapaxes(vectors, 1, 2))
        singular[poor] = ~kept.all(axis=1)
    return np.asarray(inverse / (scale[:, :, None] * scale[:, None, :])), singular


def solve_and_rest(matrices: Array, v: Array) -> tuple[Array, Array]:
    """``A_u^- v_u`` and the part of ``v_u`` outside the range of ``A_u``, both ``(V, p)``."""
    scaled, scale = unit_diagonal(matrices)
    if surely_regular(scaled).all():
        return np.asarray(np.linalg.solve(scaled, (v / scale)[:, :, None])[:, :, 0] / scale), np.zeros_like(v)
    inverse, singular = generalized_inverse(matrices)
    solution = np.matmul(inverse, v[:, :, None])[:, :, 0]
    rest = np.zeros_like(v)
    rest[singular] = v[singular] - np.matmul(matrices[singular], solution[singular, :, None])[:, :, 0]
    return np.asarray(solution), rest


def solve_positive(matrix: Array, right: Array) -> Array:
    """``matrix_a^{-1} right_a`` for positive definite matrices ``(A, p, p)`` and vectors ``(A, p)``.

    Rows and columns are scaled to a unit diagonal first, so that the units of the coordinates do not matter; matrices
    that are singular to working precision are shifted by as little as makes them regular.
    """
    scaled, scale = unit_diagonal(matrix)
    target = right / scale
    solution = np.zeros_like(right)
    pending = np.arange(right.shape[0])
    eye = np.eye(right.shape[1])
    for shift in (0.0, 1e-13, 1e-10, 1e-7, 1e-4, 1e-1, 10.0):
        try:
            found = np.linalg.solve(scaled[pending] + shift * eye, target[pending][:, :, None])[:, :, 0]
        except np.linalg.LinAlgError:
            continue
        good = np.einsum("ap,ap->a", target[pending], found) >= 0  # False for NaN
        solution[pending[good]] = found[good]
        pending = pending[~good]
        if not pending.size:
            break
    return solution / scale


def inverse_of(matrices: Array) -> Array:
    """Inverses of positive definite matrices, exactly symmetric."""
    scaled, scale = unit_diagonal(matrices)
    try:
        inverse = np.linalg.inv(scaled)
    except np.linalg.LinAlgError:
        # rows without noise make a ridge that is lost in rounding
        lost = np.linalg.eigvalsh(scaled)[:, 0] <= RANK_TOLERANCE
        inverse = np.linalg.inv(scaled + lost[:, None, None] * RANK_TOLERANCE * np.eye(scaled.shape[1]))
    inverse = inverse / (scale[:, :, None] * scale[:, None, :])
    return np.asarray(0.5 * (inverse + np.swapaxes(inverse, 1, 2)))


def sum_groups(values: Array, labels: Index, groups: int) -> Array:
    """Sums of ``values (V, ...)`` over each group, ``(groups, ...)``, in the order of the sites."""
    # a sparse product: several times quicker than np.add.at
    members = sparse.csc_array((np.ones(labels.size), labels, np.arange(labels.size + 1)), shape=(groups, labels.size))
    return np.asarray(members @ values.reshape(labels.size, -1)).reshape(groups, *values.shape[1:])


def damped_newton(
    value: ValueFunction, derivatives: DerivativeFunction, start: Array, tol: float = 1e-15, max_iter: int = 100
) -> tuple[Array, Mask]:
    """Minimisers ``theta (B, p)`` of B convex functions, each with its own step length, and which converged ``(B,)``.

    Values may be infinite, but not NaN, and are finite at ``start (B, p)``; matrices are positive definite: Hessians,
    or anything above them where a Hessian is singular. A function is done when half its squared Newton decrement is
    below ``tol`` times the largest of the value, the value at the start and the first decrement. The step that shows it
    is still taken, so that the error left is of the order of the square.
    """
    theta = np.array(start, dtype=np.float64)
    who = np.arange(theta.shape[0])
    converged = np.zeros(who.size, dtype=bool)
    current = value(theta, who)
    size, best = np.abs(current), np.full(who.size, np.inf)
    for iteration in range(max_iter):
        if not who.size:
            break
        gradient, matrix = derivatives(theta[who], who)
        step = -solve_positive(matrix, gradient)
        decrement = -0.5 * np.einsum("ap,ap->a", gradient, step)
        if iteration == 0:
            size = np.maximum(size, decrement)
        scale = np.maximum(size[who], np.abs(current[who]))
        # below the first bound the last step suffices; below the second, rounding no longer lets the decrement shrink
        done = (decrement <= tol * scale) | ((decrement <= 1e-9 * scale) & (decrement > 0.5 * best[who]))
        best[who] = decrement
        theta[who], current[who], stuck = _search(value, theta[who], step, decrement, current[who], scale, who)
        converged[who[done]] = True
        who = who[~(done | stuck)]
    return theta, converged


def _search(
    value: ValueFunction, theta: Array, step: Array, decrement: Array, current: Array, scale: Array, who: Index
) -> tuple[Array, Array, Mask]:
    """Halve each step until its value has decreased enough; functions that never do stay where they are."""
    length = np.ones(who.size)
    reached, values = theta.copy(), current.copy()
    pending = np.arange(who.size)
    slack = 8 * np.finfo(float).eps * scale
    for _ in range(_HALVINGS):
        trial = theta[pending] + length[pending, None] * step[pending]
        at_trial = value(trial, who[pending])
        enough = at_trial <= current[pending] - _SUFFICIENT * length[pending] * 2 * decrement[pending] + slack[pending]
        good = pending[enough]
        reached[good], values[good] = trial[enough], at_trial[enough]
        pending = pending[~enough]
        if not pending.size:
            break
        length[pending] *= 0.5
    stuck = np.zeros(who.size, dtype=bool)
    stuck[pending] = True
    return reached, values, stuck


#: Singular values below this share of the largest one count as zero.
SINGULAR_TOLERANCE = 1e-12
_SUMS = ("count", "value", "gradient", "hessian")


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
        """Return the rows and columns ``columns (p,)`` of the Hessians, where all of them would cost more."""
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

    def gaps_in_ball(self, theta: Array, s: Array, radius: float) -> Array:
        """`young_gaps` in a ball that may bind: its border takes up what pulls ``theta (V, p)`` outwards."""
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
        """Return the terms of some sites, in that order."""


def times(matrices: Array, v: Array) -> Array:
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

    @cached_property
    def typical_size(self) -> float:
        """How large the parameters are that sites would have on their own, roughly."""
        curvature = max(float(self.mean_curvature.mean()), np.finfo(float).tiny)
        return float(np.abs(self.b).max(initial=0.0)) / curvature

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
        """Inverses of the matrices ``(V, p, p)``, generalised where they are singular; ``(V,)`` if isotropic."""
        return self._inverse[0]

    @property
    def singular(self) -> Mask:
        """Sites whose matrix counts as singular, ``(V,)``."""
        return self._inverse[1]

    @cached_property
    def _outside(self) -> Array:
        bad = self.singular
        if self.isotropic:
            return np.tile(np.eye(self.n_params), (int(bad.sum()), 1, 1))
        return np.asarray(np.eye(self.n_params) - np.matmul(self.A[bad], self.inverses[bad]))

    def unseen(self, v: Array) -> Array:
        """The parts of ``v (V, p)`` outside the range of the sites' matrices; 0 where these are not `singular`."""
        out = np.zeros_like(v)
        out[self.singular] = times(self._outside, v[self.singular])
        return out

    def minimizers(self) -> Array:
        """Each site's own minimiser (the shortest one in standardised units where it is not unique), ``(V, p)``."""
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
            # where nothing pulls at a site, its gap is what its rows tell
            free = ~s[self.factors.sites].any(axis=1)
            gaps[self.factors.sites[free]] = self.factors.excess(theta[self.factors.sites])[free]
        return gaps

    def take(self, sites: Index) -> QuadraticTerms:
        factors = None if self.factors is None else self.factors.take(new_places(sites, self.n_sites))
        return QuadraticTerms(self.A[sites], self.b[sites], self.c[sites], factors=factors)


@dataclass(frozen=True, eq=False)
class RowFactors:
    """``M_u(theta) = |S_u V_u (scale_u theta) - z_u|^2 / 2 + rest_u``: least squares on nearly collinear rows.

    A Gram matrix squares the condition number: of features whose singular values span more than 1e5, it hardly tells
    which directions it still sees. Singular values and vectors of the rows keep what the rows know.
    """

    sites: Index  # (M,), ascending positions among the terms
    S: Array  # (M, p), singular values of features scaled to mean square 1; 0 where they count as zero
    V: Array  # (M, p, p)
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
        U, S, V = np.linalg.svd(X / scale[:, None, :], full_matrices=False)
        z = times(np.swapaxes(U, 1, 2), y)
        S = np.where(SINGULAR_TOLERANCE * S[:, :1] < S, S, 0.0)
        return cls(sites, S, V, z, 0.5 * ((y - times(U, z)) ** 2).sum(axis=1), scale)

    @classmethod
    def joined(cls, parts: list[RowFactors]) -> RowFactors | None:
        """Return the factors of all parts, by site; None when there are none."""
        if not parts:
            return None
        arrays = [np.concatenate([getattr(one, item.name) for one in parts]) for item in fields(cls)]
        order = np.argsort(arrays[0])
        return cls(*(array[order] for array in arrays))

    def take(self, place: Index) -> RowFactors | None:
        """Return the factors of sites whose new ``place`` is not negative; None when there are none."""
        chosen = np.flatnonzero(place[self.sites] >= 0)
        _, *others = (getattr(self, item.name)[chosen] for item in fields(self))
        return RowFactors.joined([RowFactors(place[self.sites[chosen]], *others)] if chosen.size else [])

    def values(self, theta: Array) -> Array:
        """``M_u(theta_u)`` for ``theta (M, p)``."""
        return np.asarray(0.5 * (self._misfit(theta) ** 2).sum(axis=1) + self.rest)

    def excess(self, theta: Array) -> Array:
        """``M_u(theta_u) - min M_u``, shape ``(M,)``."""
        return np.asarray(0.5 * (np.where(self.S > 0, self._misfit(theta), 0.0) ** 2).sum(axis=1))

    def minimizers(self) -> Array:
        """Minimisers ``(M, p)``, the shortest ones in scaled units where they are not unique."""
        theta = np.zeros_like(self.z)
        for _ in range(2):  # the second time refines the first
            step = np.divide(self._misfit(theta), self.S, out=np.zeros_like(theta), where=self.S > 0)
            theta = theta - times(np.swapaxes(self.V, 1, 2), step) / self.scale
        return theta

    def _misfit(self, theta: Array) -> Array:
        return self.S * times(self.V, theta * self.scale) - self.z


def ball_gap(left: Array, theta: Array, radius: float) -> Array:
    """Bound ``<left, theta> + radius * |left|`` on what an unbalanced direction may cost, 0 where nothing is left."""
    size = np.sqrt(np.einsum("vp,vp->v", left, left))
    if not np.isfinite(radius):
        return np.where(size > 0, np.inf, 0.0)
    return np.asarray(np.einsum("vp,vp->v", left, theta) + radius * size)


def new_places(sites: Index, n_sites: int) -> Index:
    """Return where each of ``n_sites`` is in ``sites``, -1 for those that are not."""
    place = np.full(n_sites, -1)
    place[sites] = np.arange(sites.size)
    return place


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Sums over rows of V sites in K parts of the loss, its gradient and its Hessian at ``at (V, p)``.

    Cut into folds, the last part has the rows that always train (fold -1). For quadratic losses the sums tell the loss
    everywhere; for others they are its expansion.
    """

    at: Array
    count: Index | Array  # (V, K), rows, or sums of their weights
    value: Array  # (V, K)
    gradient: Array  # (V, K, p)
    hessian: Array  # (V, K, p, p), or (V, K) when all Hessians are multiples of the identity

    @classmethod
    def zeros(cls, at: Array, parts: int) -> Quadratics:
        """No rows, in so many parts."""
        v, p = at.shape
        return cls(at, np.zeros((v, parts)), np.zeros((v, parts)), np.zeros((v, parts, p)), np.zeros((v, parts, p, p)))

    @classmethod
    def from_terms(cls, terms: SiteTerms, n: Array, at: Array) -> Quadratics:
        """Sums of ``n (V,)`` times the mean losses at ``at (V, p)``, as one part."""
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
    def folds(self) -> int:
        """Number of folds, without the part that always trains."""
        return int(self.count.shape[1]) - 1

    def take(self, sites: Index) -> Quadratics:
        """Return the sums of some sites, in that order."""
        return Quadratics(*(getattr(self, item.name)[sites] for item in fields(self)))

    def add(self, sites: Index, more: Quadratics) -> None:
        """Add the sums of more rows of some sites, in place."""
        for name in _SUMS:
            getattr(self, name)[sites] += getattr(more, name)

    def single_rows_train(self, single: Mask) -> None:
        """Move the rows of ``single`` sites ``(V,)`` to the part that always trains, in place."""
        for name in _SUMS:
            each = getattr(self, name)
            each[single, -1], each[single, :-1] = each[single].sum(axis=1), 0.0

    def turned(self, by: Index) -> Quadratics:
        """Return the sums with fold ``k`` of each site as fold ``k + by (V,)``, modulo their number."""
        k = (np.arange(self.folds) - by[:, None]) % self.folds
        order = np.concatenate([k, np.full((len(k), 1), self.folds)], axis=1)
        return replace(self, **{name: getattr(self, name)[np.arange(len(k))[:, None], order] for name in _SUMS})

    def pooled(self) -> Quadratics:
        """Sums over all sites, as one; every ``at`` is 0."""
        return Quadratics(self.at[:1], *(getattr(self, name).sum(axis=0, keepdims=True) for name in _SUMS))

    def total(self, without: int | None = None, *, forward: bool = False) -> Quadratics:
        """Return the sums over all rows (or all but those of one fold and, ``forward``, of later ones), as one part."""
        last = self.folds if without is None or not forward else without
        kept = [k for k in (*range(last), self.folds) if k != without]  # the last part always trains
        parts = (getattr(self, name)[:, kept] for name in ("count", "value", "gradient"))
        hessian = self.hessian[:, kept[:1]]
        for k in kept[1:]:  # one after another: of many coefficients they are large
            hessian += self.hessian[:, k : k + 1]
        count, value, gradient = (part.sum(axis=1, keepdims=True) for part in parts)
        return Quadratics(self.at, count, value, gradient, hessian)

    def map(self, A: Array, shift: Array | float = 0.0) -> Quadratics:
        """Return the sums as functions of ``phi``, where ``theta = A phi + shift``."""
        at = (self.at - shift) @ np.linalg.inv(A).T
        H = self.hessian[..., None, None] * np.eye(len(A)) if self.hessian.ndim == 2 else self.hessian
        return replace(self, at=at, gradient=self.gradient @ A, hessian=A.T @ H @ A)

    def coefficients(self) -> tuple[Array, Array, Array]:
        """``A (V, K, p, p)`` (or ``(V, K)``), ``b (V, K, p)``, ``c (V, K)`` of ``theta'A theta / 2 - b'theta + c``."""
        at = self.at[:, None, :]
        A = self.hessian
        bend = A[..., None] * at if A.ndim == 2 else np.matmul(A, at[..., None])[..., 0]
        return A, bend - self.gradient, self.value + ((0.5 * bend - self.gradient) * at).sum(axis=-1)

    def terms(self, part: int = 0, ridge: Array | None = None) -> QuadraticTerms:
        """Mean losses of one part, with ``sum_c ridge_c theta_c^2 / 2`` on each site; every site has rows there."""
        one = replace(self, **{name: getattr(self, name)[:, part : part + 1] for name in _SUMS})
        n = one.count[:, 0].astype(np.float64)
        A, b, c = (each[:, 0] for each in one.coefficients())
        A, b, c = A / n.reshape(-1, *[1] * (A.ndim - 1)), b / n[:, None], c / n
        if ridge is not None and ridge.any():
            if A.ndim == 1 and (ridge == ridge[0]).all():
                return QuadraticTerms(A + ridge[0], b, c)
            A = (A[:, None, None] * np.eye(ridge.size) if A.ndim == 1 else A) + np.diag(ridge)
        return QuadraticTerms(A, b, c)
