"""Losses on linear predictors (generalised linear models), many sites with equally many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedkin._base import AnyArray, Array, Index, Mask
from fedkin.core.newton import RANK_TOLERANCE, solve_and_rest, surely_regular, unit_diagonal
from fedkin.core.terms import (
    LEAST_CAUTION,
    LossTerms,
    MixedTerms,
    QuadraticTerms,
    RowFactors,
    SiteTerms,
    ball_gap,
    new_places,
)
from fedkin.data import Federation, Rows
from fedkin.errors import DataError, ParameterError, UnknownSiteError, argument
from fedkin.losses import Loss, RowLoss, by_loss, make_loss, weighted_gram

#: Sites whose numbers of rows differ by at most this factor make one batch, if it has at most so many numbers.
PADDED, ROOM = 1.25, 20_000_000
#: Sites ``(B,)`` with the same number of rows, and these: ``X (B, n, q)``, ``y (B, n)``, ``offset (B, n)``.
RowBlock = tuple[Index, Rows]
LossLike = str | Loss | Mapping[Hashable, str | Loss]


def row_blocks(federation: Federation, sites: Index) -> list[RowBlock]:
    """Sites grouped by their number of rows, in the order given within each group."""
    sizes = federation.n_samples[sites]
    blocks: list[RowBlock] = []
    for size in np.unique(sizes):
        members = sites[sizes == size]
        rows = (federation.starts[members][:, None] + np.arange(size)).reshape(-1)
        contiguous = rows.size > 0 and bool((np.diff(rows) == 1).all())
        where = slice(int(rows[0]), int(rows[-1]) + 1) if contiguous else rows
        shape = (members.size, int(size))

        def fold(array: Array, shape: tuple[int, int] = shape) -> Array:
            return array.reshape(*shape, *array.shape[1:])

        blocks.append((members, federation.rows.take(where).map(fold)))
    return blocks


def unit_weights(rows: Rows) -> Array | None:
    """The weights of rows ``(..., n)``, scaled to have mean 1 on each site; None where all rows count alike."""
    if rows.weight is None:
        return None
    return np.asarray(rows.weight / rows.weight.mean(axis=-1, keepdims=True))


@dataclass(frozen=True, eq=False)
class RowBatch:
    """B sites of one loss, with n rows each: ``X (B, n, q)``, ``y (B, n)``, ``offset (B, n)`` or None.

    Methods take ``theta (A, p)`` of the sites ``who (A,)``, or of all of them when it is None.
    """

    loss: RowLoss
    rows: Rows
    weight: Array | None = None  # (B, n), with mean 1 on each site; None for equal weights

    @property
    def X(self) -> Array:
        return self.rows.X

    @property
    def y(self) -> Array:
        assert self.rows.y is not None
        return self.rows.y

    @property
    def n_rows(self) -> int:
        return int(self.X.shape[1])

    @property
    def n_sites(self) -> int:
        return int(self.X.shape[0])

    @property
    def n_params(self) -> int:
        return self.loss.n_params(self.X.shape[2])

    def take(self, who: Index | Mask) -> RowBatch:
        """Some of the sites."""
        return RowBatch(self.loss, self.rows.take(who), None if self.weight is None else self.weight[who])

    def columns(self, features: Index) -> RowBatch:
        """The same rows with some of their features."""
        return RowBatch(self.loss, replace(self.rows, X=self.X[:, :, features]), self.weight)

    def predictors(self, theta: Array, who: Index | None = None) -> Array:
        """Linear predictors ``(A, n, k)``."""
        k, offset = self.loss.n_outputs, self.rows.offset
        eta = np.matmul(_of(self.X, who), np.swapaxes(theta.reshape(theta.shape[0], k, -1), 1, 2))
        return np.asarray(eta if offset is None else eta + _of(offset, who)[:, :, None])

    def values(self, theta: Array, who: Index | None = None) -> Array:
        """Mean losses ``(A,)``."""
        return self.average(self.loss.value_at(self.predictors(theta, who), _of(self.y, who)), who)

    def average(self, values: Array, who: Index | None = None) -> Array:
        """Means ``(A,)`` of ``values (A, n)`` over each site's rows, by their weights."""
        if self.weight is None:
            return np.asarray(values.mean(axis=1))
        weight = _of(self.weight, who)
        # a row that does not count may be infinite
        return np.asarray((np.where(weight > 0, values, 0.0) * weight).mean(axis=1))

    def gradients(self, theta: Array, who: Index | None = None) -> Array:
        """Gradients ``(A, p)``."""
        return self.mean_of(self.loss.slope_at(self.predictors(theta, who), _of(self.y, who)), who)

    def hessians(self, theta: Array, who: Index | None = None) -> Array:
        """Hessians ``(A, p, p)``."""
        return self.grams(theta, self.loss.curvature_at, who)

    def grams(self, theta: Array, weights_at: Callable[[Array, Array], Array], who: Index | None = None) -> Array:
        """Means of ``x x' (x) W`` with ``W = weights_at(eta, y)``, shape ``(A, p, p)``."""
        return self.gram_of(weights_at(self.predictors(theta, who), _of(self.y, who)), who)

    def mean_of(self, slope: Array, who: Index | None = None) -> Array:
        """Means of ``slope (x) x`` over a site's rows, ``(A, p)``, for ``slope (A, n, k)``."""
        if self.weight is not None:
            slope = slope * _of(self.weight, who)[:, :, None]
        mean = np.matmul(np.swapaxes(slope, 1, 2), _of(self.X, who)) / self.n_rows
        return np.asarray(mean).reshape(slope.shape[0], -1)

    def gram_of(self, weights: Array, who: Index | None = None) -> Array:
        """Means of ``x x' (x) W`` for ``weights (A, n, k, k)``."""
        if self.weight is not None:
            weights = weights * _of(self.weight, who)[:, :, None, None]
        return weighted_gram(_of(self.X, who), weights)

    @cached_property
    def gram(self) -> Array:
        """``mean_k x_k x_k'``, shape ``(B, q, q)``."""
        return self.gram_of(np.ones((*self.X.shape[:2], 1, 1)))

    @cached_property
    def _gram_spectrum(self) -> tuple[Array, Array, Array]:
        scaled, scale = unit_diagonal(self.gram)
        values, vectors = np.linalg.eigh(scaled)
        return values, vectors, scale

    @cached_property
    def rank(self) -> Index:
        """Rank ``(B,)`` of each design."""
        values, _, _ = self._gram_spectrum
        return np.asarray((values > RANK_TOLERANCE).sum(axis=1))

    def information(self, theta: Array) -> Array:
        """Least information about any direction, ``(B,)``: smallest eigenvalue of ``n H`` relative to the Gram matrix.

        One row whose curvature is 1 contributes 1 on average. For full-rank designs.
        """
        values, vectors, scale = self._gram_spectrum
        root = vectors / np.sqrt(np.maximum(values, RANK_TOLERANCE))[:, None, :] / scale[:, :, None]
        k, q = self.loss.n_outputs, self.X.shape[2]
        hessian = self.hessians(theta).reshape(-1, k, q, k, q)
        relative = np.einsum("bqi,bkqlr,brj->bkilj", root, hessian, root, optimize=True)
        relative = relative.reshape(-1, k * q, k * q)
        return np.asarray(self.n_rows * np.linalg.eigvalsh(relative)[:, 0])


class RowTerms(SiteTerms):
    """Mean losses of one row loss on ``blocks`` that cover sites ``0 .. V-1``, and ``ridge (p,)``."""

    def __init__(self, loss: RowLoss, blocks: Sequence[RowBlock], ridge: Array) -> None:
        self.loss, self.blocks, self.ridge = loss, tuple(blocks), ridge
        self._batches = [_padded(loss, blocks) for blocks in _alike(self.blocks)]
        self.n_sites = sum(sites.size for sites, _ in self.blocks)
        self.n_params = ridge.size

    def _gather(self, shape: tuple[int, ...], piece: Callable[[Index, RowBatch], Array]) -> Array:
        out = np.empty((self.n_sites, *shape))
        for sites, batch in self._batches:
            out[sites] = piece(sites, batch)
        return out

    def values(self, theta: Array) -> Array:
        return np.asarray(self._gather((), lambda u, batch: batch.values(theta[u])) + 0.5 * (theta**2) @ self.ridge)

    def gradients(self, theta: Array) -> Array:
        return self._gather((self.n_params,), lambda u, batch: batch.gradients(theta[u])) + theta * self.ridge

    def hessians(self, theta: Array) -> Array:
        return self._grams(theta, self.loss.curvature_at)

    def hessian_blocks(self, theta: Array, columns: Mask) -> Array:
        # each output has the same features
        chosen = columns.reshape(self.loss.n_outputs, -1)
        features = np.flatnonzero(chosen.any(axis=0))
        inside = chosen[:, features].reshape(-1)
        out = np.empty((self.n_sites, int(columns.sum()), int(columns.sum())))
        for sites, batch in self._batches:
            curvature = self.loss.curvature_at(batch.predictors(theta[sites]), batch.y)
            out[sites] = batch.columns(features).gram_of(curvature)[:, inside][:, :, inside]
        return out + np.diag(self.ridge[columns])

    def cautious_hessians(self, theta: Array) -> Array:
        return self._grams(theta, self.loss.cautious_at)

    def caution(self) -> tuple[Array, Array]:
        bounded = bool(np.isfinite(self.loss.curvature_bound))
        start = 0.0 if self.loss.strictly_convex and bounded else 1.0
        least = 0.0 if self.loss.strictly_convex else LEAST_CAUTION
        return np.full(self.n_sites, start), np.full(self.n_sites, least)

    def lower_bounds(self) -> Array:
        def bounds(_: Index, batch: RowBatch) -> Array:
            zero = np.zeros((*batch.y.shape, self.loss.n_outputs))
            return -batch.average(self.loss.conjugate_at(zero, batch.y))

        return self._gather((), bounds)  # a function is never below minus its conjugate at 0

    def _grams(self, theta: Array, weights_at: Callable[[Array, Array], Array]) -> Array:
        out = self._gather((self.n_params,) * 2, lambda u, batch: batch.grams(theta[u], weights_at))
        diagonal = np.arange(self.n_params)
        out[:, diagonal, diagonal] += self.ridge
        return out

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        return self._gather((), lambda u, batch: self._gaps(batch, theta[u], s[u], radius))

    def _gaps(self, batch: RowBatch, theta: Array, s: Array, radius: float) -> Array:
        # With a dual point a per row and t for the ridge, M*(X'a/n + t) <= mean m*(a) + t' ridge^-1 t / 2. The slopes
        # at theta and t = ridge theta make that tight but miss -s by the residual. Moving them by -W X u and -ridge u,
        # where (X'WX/n + ridge) u = residual, balances it; the Fenchel-Young sum at the moved point is the gap.
        loss, y, eta = self.loss, batch.y, batch.predictors(theta)
        slope, weights = loss.slope_at(eta, y), loss.repair_at(eta, y)
        residual = batch.mean_of(slope) + theta * self.ridge + s
        gram = batch.gram_of(weights)
        diagonal = np.arange(self.n_params)
        gram[:, diagonal, diagonal] += self.ridge
        u, left = solve_and_rest(gram, residual)
        shift = np.matmul(batch.X, np.swapaxes(u.reshape(u.shape[0], loss.n_outputs, -1), 1, 2))
        a = slope - np.matmul(weights, shift[..., None])[..., 0]
        rows = loss.value_at(eta, y) + loss.conjugate_at(a, y) - (a * eta).sum(axis=-1)
        moved = np.maximum(batch.average(rows), 0.0) + 0.5 * (u**2) @ self.ridge + ball_gap(left, theta, radius)
        # the slopes may leave the conjugate's domain: then move only the ridge's part, and charge the rest to the ball
        held = self.ridge > 0
        resting = 0.5 * (residual[:, held] ** 2) @ (1.0 / self.ridge[held])
        resting = resting + ball_gap(np.where(held, 0.0, residual), theta, radius)
        return np.asarray(np.minimum(moved, resting))

    def take(self, sites: Index) -> RowTerms:
        place, blocks = new_places(sites, self.n_sites), []
        for members, rows in self.blocks:
            chosen = place[members] >= 0
            if chosen.any():
                blocks.append((place[members[chosen]], rows.take(chosen)))
        return RowTerms(self.loss, blocks, self.ridge)


def _alike(blocks: Sequence[RowBlock]) -> list[list[RowBlock]]:
    """Blocks whose numbers of rows differ so little that they can be one batch."""
    groups: list[list[RowBlock]] = []
    for block in sorted(blocks, key=lambda block: len(block[1].X[0])):
        n_rows = len(block[1].X[0])
        padded = n_rows * sum(len(sites) for sites, _ in [*(groups[-1] if groups else []), block])
        if groups and n_rows <= PADDED * len(groups[-1][0][1].X[0]) and padded * block[1].X.shape[2] <= ROOM:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _padded(loss: RowLoss, blocks: Sequence[RowBlock]) -> tuple[Index, RowBatch]:
    """One batch of blocks with ascending numbers of rows: shorter ones repeat their first row, with weight 0."""
    if len(blocks) == 1:
        return blocks[0][0], RowBatch(loss, blocks[0][1], unit_weights(blocks[0][1]))
    at = np.arange(len(blocks[-1][1].X[0]))

    def longer(part: AnyArray) -> AnyArray:
        return part[:, np.where(at < part.shape[1], at, 0)]

    def weights(rows: Rows) -> Array:
        given, shape = unit_weights(rows), rows.X.shape[:2]
        own = longer(np.ones(shape) if given is None else given)
        return np.where(at < shape[1], own * (at.size / shape[1]), 0.0)

    joined = Rows.stack([rows.map(longer) for _, rows in blocks])
    weight = np.concatenate([weights(rows) for _, rows in blocks])
    return np.concatenate([sites for sites, _ in blocks]), RowBatch(loss, joined, weight)


def _of(array: Array, who: Index | None) -> Array:
    return array if who is None or who.size == array.shape[0] else array[who]


def build_terms(federation: Federation, losses: Sequence[Loss], ridge: Array, alone: Mask | None = None) -> SiteTerms:
    """The terms of V sites with one loss each, and ``sum_c ridge_c theta_c^2 / 2`` of ``ridge (p,)`` on each of them.

    ``alone (V,)`` are sites that nothing ties to others, so that their own minimiser has to be exact; by default all.
    """
    alone = np.ones(federation.n_sites, dtype=bool) if alone is None else alone
    parts = [(sites, _terms_of_kind(federation, sites, loss, ridge, alone)) for sites, loss in by_loss(losses)]
    return parts[0][1] if len(parts) == 1 else MixedTerms(parts)


def _terms_of_kind(federation: Federation, sites: Index, loss: Loss, ridge: Array, alone: Mask) -> SiteTerms:
    if not loss.quadratic and loss.rowwise is None:
        return LossTerms(loss, [federation[federation.sites[u]] for u in sites], ridge)
    place = new_places(sites, federation.n_sites)
    blocks = [(place[members], rows) for members, rows in row_blocks(federation, sites)]
    if loss.quadratic:
        return _quadratic_terms(loss, blocks, ridge, alone[sites])
    assert loss.rowwise is not None
    return RowTerms(loss.rowwise, blocks, ridge)


def _quadratic_terms(loss: Loss, blocks: Sequence[RowBlock], ridge: Array, alone: Mask) -> QuadraticTerms:
    """The terms of a quadratic loss on ``blocks`` of sites ``0 .. V-1``, of which some are ``alone (V,)``."""
    p, even = ridge.size, bool((ridge == ridge[:1]).all())
    A, b, c = np.empty(0), np.empty((alone.size, p)), np.empty(alone.size)
    for sites, rows in blocks:
        matrices, b[sites], c[sites] = loss.quadratic_terms(*rows.arrays, unit_weights(rows))
        if matrices.ndim == 1 and not even:
            matrices = matrices[:, None, None] * np.eye(p)
        if not A.size:
            A = np.empty((alone.size, *matrices.shape[1:]))
        A[sites] = matrices
    if A.ndim == 1:
        return QuadraticTerms(A + ridge[0], b, c)
    diagonal = np.arange(p)
    A[:, diagonal, diagonal] += ridge
    factors = []
    for sites, rows in blocks:
        poor = np.flatnonzero(alone[sites])
        if not poor.size:
            continue
        poor = poor[~surely_regular(unit_diagonal(A[sites[poor]])[0])]
        some = rows.take(poor)
        least_squares = loss.least_squares_rows(*some.arrays, unit_weights(some)) if poor.size else None
        if least_squares is not None:
            factors.append(RowFactors.from_rows(sites[poor], *least_squares, ridge))
    return QuadraticTerms(A, b, c, factors=RowFactors.joined(factors))


def resolve_losses(loss: LossLike, federation: Federation) -> tuple[Loss, ...]:
    """One loss per site, in site order, each checked against the site's target."""
    if isinstance(loss, Mapping):
        losses = _losses_by_site(loss, federation)
    else:
        losses = (make_loss(loss, federation.y),) * federation.n_sites
    if federation.weight is not None:
        for one in losses:
            if one.rowwise is None and not one.quadratic:
                raise ParameterError(f"the {one.name} loss takes no weights of rows: leave {argument('weight')} out")
    try:
        # the whole column first: the loop over sites is slow
        for one in {id(one): one for one in losses}.values():
            one.check_target(federation.y, "all")
    except DataError:
        for site, one in zip(federation.sites, losses, strict=True):
            one.check_target(federation[site].y, site)
    return losses


def _losses_by_site(loss: Mapping[Hashable, str | Loss], federation: Federation) -> tuple[Loss, ...]:
    for site in loss:
        if site not in federation:
            raise UnknownSiteError(f"loss names site {site!r}, which the federation does not have")
    missing = [site for site in federation.sites if site not in loss]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise DataError(f"no loss is given for site {missing[0]!r}{others}; name every site")
    # one object for each name: grouping sites by loss is quicker
    names = dict.fromkeys(one for one in loss.values() if isinstance(one, str))
    made = {name: make_loss(name, federation.y) for name in names}
    wanted = [loss[site] for site in federation.sites]
    losses = [made[one] if isinstance(one, str) else one for one in wanted]
    sizes = {one.n_params(federation.n_features): one for one in losses}
    if len(sizes) > 1:
        described = ", ".join(f"{one.name}: {p}" for p, one in sizes.items())
        raise DataError(f"the sites' losses have parameters of different length ({described}); they must agree")
    return tuple(losses)
