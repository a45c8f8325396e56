"""Build the sites' mean losses: linear predictors in batches, custom losses, mixtures, and groups of sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core.linalg import RANK_TOLERANCE, solve_and_rest, sum_groups, surely_regular, unit_diagonal
from fedkin.core.quadratics import QuadraticTerms, RowFactors, SiteTerms, ball_gap, new_places
from fedkin.data import Federation, Rows
from fedkin.losses import Loss, RowLoss, by_loss, weighted_gram

#: Share of the cautious Hessian where the Hessian may vanish in directions with a nonzero gradient.
LEAST_CAUTION = 1e-6
#: Sites whose numbers of rows differ by at most this factor form one batch of at most this many numbers.
PADDED, ROOM = 1.25, 2**22


def row_batches(
    federation: Federation, sites: Index, padding: float = 1.0
) -> Iterator[tuple[Index, Rows, Array | None]]:
    """Yield batches of sites, their rows ``X (B, n, q)``, and their weights ``(B, n)`` with mean 1 on each site.

    Shorter sites repeat their first row, with weight 0. Weights are None if all rows count equally.
    """
    sizes, starts, width = federation.n_samples, federation.starts, max(federation.n_features, 1)
    order = sites[np.argsort(sizes[sites], kind="stable")]
    ordered, first = sizes[order], 0
    while first < order.size:
        last = int(np.searchsorted(ordered, padding * ordered[first], side="right"))
        n = int(ordered[last - 1])
        last = min(last, first + max(1, ROOM // max(n * width, 1)))
        members, n = np.sort(order[first:last]), int(ordered[last - 1])
        shape, at, first = (members.size, n), np.arange(n), last
        inside = at < sizes[members][:, None]
        if inside.all() and members[-1] - members[0] + 1 == members.size:  # a view
            rows = federation.rows.take(slice(int(starts[members[0]]), int(starts[members[-1] + 1])))
            rows = rows.map(lambda part, shape=shape: part.reshape(*shape, *part.shape[1:]))  # type: ignore[misc]
        else:
            rows = federation.rows.take(starts[members][:, None] + np.where(inside, at, 0))
        weight = None
        if rows.weight is not None or not inside.all():
            weight = np.where(inside, 1.0 if rows.weight is None else rows.weight, 0.0)
            weight = weight / weight.mean(axis=1, keepdims=True)
        yield members, rows, weight


class RowTerms(SiteTerms):
    """A loss on linear predictors at B sites with n rows each: ``X (B, n, q)``, ``y (B, n)``, ``offset (B, n)``.

    ``weight (B, n)`` has mean 1 on each site; None for equal weights. ``ridge (p,)`` is 0 by default.
    """

    def __init__(self, loss: RowLoss, rows: Rows, weight: Array | None = None, ridge: Array | None = None) -> None:
        assert rows.y is not None
        self.loss, self.rows, self.weight, self.X, self.y = loss, rows, weight, rows.X, rows.y
        self.n_sites, self.n_rows, q = rows.X.shape
        self.n_params = loss.n_params(q)
        self.ridge = np.zeros(self.n_params) if ridge is None else ridge

    def take(self, sites: Index) -> RowTerms:
        if sites.size == self.n_sites and (np.diff(sites) == 1).all():
            return self
        weight = None if self.weight is None else self.weight[sites]
        return RowTerms(self.loss, self.rows.take(sites), weight, self.ridge)

    # --- sums over rows ---

    def predictors(self, theta: Array) -> Array:
        """Return linear predictors ``(B, n, k)``."""
        offset = self.rows.offset
        eta = np.matmul(self.X, np.swapaxes(theta.reshape(len(theta), self.loss.n_outputs, -1), 1, 2))
        return np.asarray(eta if offset is None else eta + offset[:, :, None])

    def average(self, values: Array) -> Array:
        """Return weighted means ``(B,)`` of ``values (B, n)`` over each site's rows."""
        if self.weight is None:
            return np.asarray(values.mean(axis=1))
        # a row that does not count may be infinite
        return np.asarray((np.where(self.weight > 0, values, 0.0) * self.weight).mean(axis=1))

    def mean_of(self, slope: Array) -> Array:
        """Return means of ``slope (x) x`` over a site's rows, ``(B, p)``, for ``slope (B, n, k)``."""
        if self.weight is not None:
            slope = slope * self.weight[:, :, None]
        return np.asarray(np.matmul(np.swapaxes(slope, 1, 2), self.X) / self.n_rows).reshape(self.n_sites, -1)

    def gram_of(self, weights: Array) -> Array:
        """Return means of ``x x' (x) W`` for ``weights (B, n, k, k)``, ``(B, p, p)``."""
        return weighted_gram(self.X, weights if self.weight is None else weights * self.weight[:, :, None, None])

    @cached_property
    def gram(self) -> Array:
        """``mean_k x_k x_k'``, shape ``(B, q, q)``."""
        return self.gram_of(np.ones((*self.y.shape, 1, 1)))

    @cached_property
    def rank(self) -> Index:
        """Rank ``(B,)`` of each design."""
        return np.asarray((self._gram_spectrum[0] > RANK_TOLERANCE).sum(axis=1))

    @cached_property
    def _gram_spectrum(self) -> tuple[Array, Array, Array]:
        scaled, scale = unit_diagonal(self.gram)
        return (*np.linalg.eigh(scaled), scale)

    def information(self, theta: Array) -> Array:
        """Return the smallest eigenvalue ``(B,)`` of ``n H`` relative to the Gram matrix of a full-rank design."""
        values, vectors, scale = self._gram_spectrum
        root = vectors / np.sqrt(np.maximum(values, RANK_TOLERANCE))[:, None, :] / scale[:, :, None]
        k, q = self.loss.n_outputs, self.X.shape[2]
        hessian = self.hessians(theta).reshape(-1, k, q, k, q)
        relative = np.einsum("bqi,bkqlr,brj->bkilj", root, hessian, root, optimize=True).reshape(-1, k * q, k * q)
        return np.asarray(self.n_rows * np.linalg.eigvalsh(relative)[:, 0])

    # --- as `SiteTerms` ---

    def values(self, theta: Array) -> Array:
        rows = self.loss.value_at(self.predictors(theta), self.y)
        return np.asarray(self.average(rows) + 0.5 * (theta**2) @ self.ridge)

    def gradients(self, theta: Array) -> Array:
        return self.mean_of(self.loss.slope_at(self.predictors(theta), self.y)) + theta * self.ridge

    def hessians(self, theta: Array) -> Array:
        return self._with_ridge(self.gram_of(self.loss.curvature_at(self.predictors(theta), self.y)))

    def cautious_hessians(self, theta: Array) -> Array:
        return self._with_ridge(self.gram_of(self.loss.cautious_at(self.predictors(theta), self.y)))

    def _with_ridge(self, matrices: Array) -> Array:
        diagonal = np.arange(self.n_params)
        matrices[:, diagonal, diagonal] += self.ridge
        return matrices

    def hessian_blocks(self, theta: Array, columns: Mask) -> Array:
        # each output has the same features
        chosen = columns.reshape(self.loss.n_outputs, -1)
        features = np.flatnonzero(chosen.any(axis=0))
        inside = chosen[:, features].reshape(-1)
        curvature = self.loss.curvature_at(self.predictors(theta), self.y)
        if self.weight is not None:
            curvature = curvature * self.weight[:, :, None, None]
        gram = weighted_gram(self.X[:, :, features], curvature)
        return gram[:, inside][:, :, inside] + np.diag(self.ridge[columns])

    def caution(self) -> tuple[Array, Array]:
        strict, bounded = self.loss.strictly_convex, bool(np.isfinite(self.loss.curvature_bound))
        start, least = 0.0 if strict and bounded else 1.0, 0.0 if strict else LEAST_CAUTION
        return np.full(self.n_sites, start), np.full(self.n_sites, least)

    def lower_bounds(self) -> Array:
        # a function is never below minus its conjugate at 0
        return -self.average(self.loss.conjugate_at(np.zeros((*self.y.shape, self.loss.n_outputs)), self.y))

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        # With a dual point a per row and t for the ridge, M*(X'a/n + t) <= mean m*(a) + t' ridge^-1 t / 2. The slopes
        # at theta and t = ridge theta make that tight but miss -s by the residual. Moving them by -W X u and -ridge u,
        # where (X'WX/n + ridge) u = residual, balances it; the Fenchel-Young sum at the moved point is the gap.
        loss, y, eta = self.loss, self.y, self.predictors(theta)
        slope, weights = loss.slope_at(eta, y), loss.repair_at(eta, y)
        residual = self.mean_of(slope) + theta * self.ridge + s
        u, left = solve_and_rest(self._with_ridge(self.gram_of(weights)), residual)
        shift = np.matmul(self.X, np.swapaxes(u.reshape(self.n_sites, loss.n_outputs, -1), 1, 2))
        a = slope - np.matmul(weights, shift[..., None])[..., 0]
        rows = loss.value_at(eta, y) + loss.conjugate_at(a, y) - (a * eta).sum(axis=-1)
        moved = np.maximum(self.average(rows), 0.0) + 0.5 * (u**2) @ self.ridge + ball_gap(left, theta, radius)
        # the slopes may leave the conjugate's domain: then move only the ridge's part, and charge the rest to the ball
        held = self.ridge > 0
        resting = 0.5 * (residual[:, held] ** 2) @ (1.0 / self.ridge[held])
        resting = resting + ball_gap(np.where(held, 0.0, residual), theta, radius)
        return np.asarray(np.minimum(moved, resting))


class LossTerms(SiteTerms):
    """Mean losses given as functions (`UserLoss`), evaluated site by site, with ``ridge (p,)``."""

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
        # only derivatives are known: limit the step to about the length of theta
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

    def hessian_blocks(self, theta: Array, columns: Mask) -> Array:
        return self._gather((int(columns.sum()),) * 2, lambda u, terms: terms.hessian_blocks(theta[u], columns))

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
    """Groups of sites that share one parameter: the sum of their ``M_u``, with weights ``share (V,)`` if given."""

    def __init__(self, terms: SiteTerms, labels: Index, share: Array | None = None) -> None:
        self.terms, self.labels, self.share = terms, labels, share
        self.n_sites, self.n_params = int(labels.max()) + 1, terms.n_params

    def _sum(self, values: Array) -> Array:
        if self.share is not None:
            values = self.share.reshape(-1, *[1] * (values.ndim - 1)) * values
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
        if sites.size < self.n_sites:
            raise NotImplementedError("a subset of sites of a group cannot be selected")
        return self


def summed_terms(terms: SiteTerms, labels: Index) -> SiteTerms:
    """Return the terms of groups whose sites share one parameter; ``labels (V,)`` number the groups from 0."""
    if not isinstance(terms, QuadraticTerms):
        return SummedTerms(terms, labels)
    groups = int(labels.max()) + 1
    A, b, c = (sum_groups(values, labels, groups) for values in (terms.A, terms.b, terms.c))
    return QuadraticTerms(A, b, c)


def build_terms(federation: Federation, losses: Sequence[Loss], ridge: Array, alone: Mask | None = None) -> SiteTerms:
    """Return the terms of V sites with a ridge; minimisers of sites ``alone (V,)``, by default all, are exact."""
    parts: list[tuple[Index, SiteTerms]] = []
    for sites, loss in by_loss(losses):
        if loss.quadratic:
            parts.append((sites, _quadratic_terms(federation, sites, loss, ridge, alone)))
        elif loss.rowwise is not None:
            batches = row_batches(federation, sites, PADDED)
            parts += [(some, RowTerms(loss.rowwise, rows, weight, ridge)) for some, rows, weight in batches]
        else:
            parts.append((sites, LossTerms(loss, [federation[federation.sites[u]] for u in sites], ridge)))
    return parts[0][1] if len(parts) == 1 else MixedTerms(parts)


def _quadratic_terms(
    federation: Federation, members: Index, loss: Loss, ridge: Array, alone: Mask | None
) -> QuadraticTerms:
    p, place, factors = ridge.size, new_places(members, federation.n_sites), []
    A, b, c = np.empty(0), np.empty((members.size, p)), np.empty(members.size)
    for some, rows, weight in row_batches(federation, members):
        sites = place[some]
        matrices, b[sites], c[sites] = loss.quadratic_terms(*rows.arrays, weight)
        if matrices.ndim == 1 and (ridge == ridge[0]).all():
            matrices = matrices + ridge[0]
        else:
            matrices = (matrices[:, None, None] * np.eye(p) if matrices.ndim == 1 else matrices) + np.diag(ridge)
            poor = np.arange(sites.size) if alone is None else np.flatnonzero(alone[some])
            poor = poor[~surely_regular(unit_diagonal(matrices[poor])[0])] if poor.size else poor
            own = None if weight is None else weight[poor]
            pair = loss.least_squares_rows(*rows.take(poor).arrays, own) if poor.size else None
            if pair is not None:
                factors.append(RowFactors.from_rows(sites[poor], *pair, ridge))
        A = A if A.size else np.empty((members.size, *matrices.shape[1:]))
        A[sites] = matrices
    return QuadraticTerms(A, b, c, factors=RowFactors.joined(factors))
