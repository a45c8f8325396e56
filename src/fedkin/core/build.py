"""From a federation's rows to its terms: one kind for each way to know a loss, and several kinds put together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core.linalg import solve_and_rest, sum_groups, surely_regular, unit_diagonal
from fedkin.core.rows import RowBlock, RowTerms, row_blocks, unit_weights
from fedkin.core.terms import LEAST_CAUTION, QuadraticTerms, RowFactors, SiteTerms, ball_gap, new_places
from fedkin.data import Federation, Rows
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.losses import Loss, by_loss, make_loss

LossLike = str | Loss | Mapping[Hashable, str | Loss]


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
            factors.append(RowFactors.of_rows(sites[poor], *least_squares, ridge))
    return QuadraticTerms(A, b, c, factors=RowFactors.joined(factors))


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


def resolve_losses(loss: LossLike, federation: Federation) -> tuple[Loss, ...]:
    """One loss per site, in site order, each checked against the site's target."""
    if isinstance(loss, Mapping):
        losses = _losses_by_site(loss, federation)
    else:
        losses = (make_loss(loss, federation.y),) * federation.n_sites
    if federation.weight is not None:
        for one in losses:
            if one.rowwise is None and not one.quadratic:
                raise ParameterError(f"the {one.name} loss takes no weights of rows: leave weight= out")
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
