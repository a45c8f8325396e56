"""`Source`: quadratic expansions of the sites' losses, around any point for rows, or at each summary's point.

A row beyond the threshold of a robust loss (Huber) has a second derivative of 0; a row within it has the full one.
Summed over few rows this is noisy. It is 0 if the threshold is small relative to the noise, which makes steps
unbounded. So every row gets the expected curvature, in proportion to the share of rows within the threshold (Huber
1973). With it, the sandwich variance of the scores is valid.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index, Mask, count, free_memory, listed
from fedkin.core import Quadratics, RowData, SiteData, damped_newton, global_fit
from fedkin.data import INTERCEPT, Federation
from fedkin.errors import DataError, DegenerateSiteWarning, ParameterError, argument
from fedkin.kin.likelihoods import CONSTANT, FEW, NODES, SHARE_OF_NODES, SHORT, LowRank, QuadraticLikelihoods, Units
from fedkin.losses import Loss

#: Rounds of a model of a smooth loss, and the change of standardised parameters, or in standard errors, that ends them.
ROUNDS, STEP = 20, 0.01
#: Residuals are counted up to the threshold, and up to wider ones: this many, four for every doubling.
THRESHOLDS = 240
#: Share of rows that tells how dense residuals are: a smaller threshold is judged by a wider one, since fits of few
#: rows pass through some of them.
LEAST_SHARE = 0.5


def memory_of(n_sites: int, n_params: int) -> float:
    """Return the bytes that a fit takes, of which nearly all are four matrices of each site."""
    return 8.0 * 4 * n_sites * n_params**2


class Source:
    """Losses of V sites as functions of p parameters in certain ``units``, those of the columns at first.

    Values are divided by the square of the target's scale.
    """

    def __init__(self, data: SiteData) -> None:
        self.data, self.sites, self.loss, self.names, self.n_samples = data, data.sites, data.loss, data.names, data.n
        self.has_rows = data.has_rows  # there are rows, so that losses can be expanded anywhere
        if not self.n_samples.all():
            empty = self.sites[int(np.flatnonzero(self.n_samples == 0)[0])]
            raise DataError(f"site {empty!r} has no rows: leave it out, and ask for its model with `join`")
        p = len(self.names)
        self.units = Units(np.eye(p), np.zeros(p), 1.0)
        self._first: QuadraticLikelihoods | None = None
        self._last: tuple[Array, Quadratics] | None = None
        self.fixed = np.zeros(p, dtype=bool)  # coefficients that are the same at all sites
        self.district: Index | None = None  # (V,) in which each site is, where districts differ, too

    def take(self, order: Index) -> Source:
        """Return the source with sites in another order. Quadratics fully describe a quadratic loss, so its rows are
        not copied."""
        made = copy.copy(self)
        made.sites, made.n_samples = tuple(self.sites[u] for u in order.tolist()), self.n_samples[order]
        made.district = None if self.district is None else self.district[order]
        if self.loss.quadratic:
            made._first = self.first().take(order)
        else:
            made.data = self.data.take(order)
        made._last = None if self._last is None else (self._last[0][order], self._last[1].take(order))
        made.__dict__.pop("_gram", None)
        return made

    def in_units(self, units: Units) -> Source:
        """Return the source as functions of the parameters in these units."""
        made = copy.copy(self)
        made.units = units
        return made

    def first(self) -> QuadraticLikelihoods:
        """Return the first quadratics, which also determine the units."""
        if self._first is not None:
            return self._first
        zero = np.zeros((len(self.sites), len(self.names)))
        if not self.has_rows:
            made = self._of_summaries(zero)
        elif self.loss.quadratic or not self.loss.scale_equivariant:
            made = self.expand(zero)
        else:  # where residuals are small; as least squares, whose curvature is 1
            sums = self.expand(self.start())
            share = max(float(np.einsum("ujj->", sums.G) / max(np.einsum("ujj->", self._gram), 1e-300)), 1e-300)
            made = QuadraticLikelihoods.from_products(sums.G / share, sums.c / share, sums.yy / share, sums.n)
        self._first = made if self.loss.quadratic else None  # others need the memory
        return made

    def with_fixed(self, named: Sequence[str], first: QuadraticLikelihoods) -> Source:
        """Return the source with these columns fixed, and with those that are constant within sites."""
        columns = self.data.feature_names
        unknown = [name for name in named if name not in columns[int(columns[0] == INTERCEPT) :]]
        if unknown:
            known = listed([name for name in columns if name != INTERCEPT], 12)
            raise ParameterError(f"fixed names {unknown[0]!r}, which is not a column; the columns are {known}")
        if named and self.loss.location:
            raise ParameterError(f"the {self.loss.name} loss has no column effects: leave {argument('fixed')} out")
        fixed = np.isin(columns, list(named)) | self._constant_within(first)
        if fixed.all():
            raise ParameterError("all columns are fixed, so sites do not differ: leave one out, or add an intercept")
        made = copy.copy(self)
        made.fixed = np.tile(fixed, len(self.names) // len(columns))
        return made

    def refuse_large(self, fixed: int) -> None:
        """Raise `ParameterError` if matrices exceed the free memory, or a site takes more than half a minute.

        ``fixed`` columns do not vary between sites.
        """
        V, p, free = len(self.sites), len(self.names), free_memory()
        needed = memory_of(V, p)
        if free is not None and needed > free:
            raise ParameterError(
                f"{count(V, 'site')} with {count(p, 'coefficient')} need about {needed / 1e9:.2g} GB, and "
                f"{free / 1e9:.2g} GB are free: name fewer columns ({argument('features')})"
            )
        said, p = None if self.has_rows else self.data.curvature, p - fixed
        rank = float(np.max(self.n_samples if said is None else [p if one is None else one.rank for one in said]))
        seconds = 3e-8 * p**2 * (rank if rank <= SHORT * p else p)
        if seconds > 30.0:
            raise ParameterError(
                f"{count(p, 'coefficient')} that vary between sites take about {seconds:.0f} seconds per site: name "
                f"fewer columns ({argument('features')}), keep some the same at all sites ({argument('fixed')}), or "
                "fit summaries of low rank (summarise(rank=10), fedkin site share --rank 10)"
            )

    def _constant_within(self, first: QuadraticLikelihoods) -> Mask:
        """Return which columns ``(q,)`` are constant within 95% of the sites of several rows, if there is an
        intercept."""
        columns, several = self.data.feature_names, self.n_samples > 1
        if columns[0] != INTERCEPT or self.loss.location or several.sum() < 2:
            return np.zeros(len(columns), dtype=bool)
        G = first.G[several][:, : len(columns), : len(columns)]
        square = np.einsum("ujj->uj", G)
        left = square - G[:, 0] ** 2 / np.maximum(G[:, :1, 0], 1e-300)
        constant = (left <= CONSTANT * square).mean(axis=0) >= 0.95
        # a column that never varies is no effect at all
        whole = G.sum(axis=0)
        varies = np.diag(whole) - whole[0] ** 2 / max(whole[0, 0], 1e-300) > CONSTANT * np.diag(whole)
        return np.asarray(constant & varies & (np.array(columns) != INTERCEPT))

    def expand(self, at: Array) -> QuadraticLikelihoods:
        """Return quadratics around ``at (V, p)``."""
        return self.fitted(self._expansion(self._expanded(self.units.theta(at)), self.n_samples))

    def fitted(self, sums: QuadraticLikelihoods) -> QuadraticLikelihoods:
        """Return quadratics in these units, from those in the units of the columns."""
        return replace(self.units.fitted(sums), district=self.district)

    def values(self, at: Array) -> Array:
        """Return the sites' losses ``(V,)`` at ``at (V, p)``; infinite if they cannot be computed."""
        theta = self.units.theta(at)
        with np.errstate(over="ignore", invalid="ignore"):
            each = self.data.values(theta) if self.data.in_memory else self._expanded(theta).value[:, 0]
        return np.asarray(np.where(np.isfinite(each), each, np.inf)) / self.units.target**2

    def value(self, at: Array) -> float:
        """Return their sum."""
        return float(self.values(at).sum())

    @property
    def can_average(self) -> bool:
        """Whether expansions can be averaged: losses with at most one predictor that are smooth everywhere."""
        smooth = not self.loss.quadratic and self.loss.linear_beyond is None
        return smooth and self.has_rows and self.loss.n_outputs < 2

    @property
    def averages(self) -> bool:
        """Whether sites' estimates need averaged expansions, because a row of two classes has little information."""
        return self.can_average and self.loss.target == "class"

    def averaged(self, at: Array, covariance: Array, shared: Array | None = None) -> QuadraticLikelihoods:
        """Return quadratics with value, gradient and Hessian averaged over ``N(at (V, p), covariance (V, p, p))``.

        ``shared (V, p, p)`` is the covariance of the sites' parameters due to the estimated mean. Averaging over it,
        too, would change gradients; those of losses with canonical links are adjusted by that change with the opposite
        sign (Firth 1993).

        At a point alone, losses of classes look steeper than they are for uncertain parameters, so variances and means
        come out too small (Breslow and Lin 1995). Averaged expansions are a Gaussian variational approximation (Ormerod
        and Wand 2012).
        """
        theta, average = self.units.theta(at), self._over_points if self.loss.rowwise is None else self._over_nodes
        spread = self.units.covariance(covariance)
        sums = average(theta, spread)
        if shared is not None and self.loss.canonical:
            more = average(theta, spread + self.units.covariance(shared)).gradient
            sums = replace(sums, gradient=2 * sums.gradient - more)
        return self.fitted(self._expansion(sums, self.n_samples))

    def sums(self, at: Array, covariance: Array) -> QuadraticLikelihoods:
        """Return quadratics at a point, averaged around it if the sites' estimates need that."""
        return self.averaged(at, covariance) if self.averages else self.expand(at)

    def _over_nodes(self, theta: Array, covariance: Array) -> Quadratics:
        """Average over the predictors of rows, by quadrature."""
        sums, rowwise = Quadratics.zeros(theta, 1), self.loss.rowwise
        assert rowwise is not None
        for part, sites in self._parts():
            for u, site in zip(sites.tolist(), part.sites, strict=True):
                rows = part.rows[site]
                (X, y, offset), weight = rows.arrays, SHARE_OF_NODES[:, None]
                assert y is not None
                width = np.sqrt(np.maximum(((X @ covariance[u]) * X).sum(axis=1), 0.0))
                eta = (X @ theta[u] + (0.0 if offset is None else offset) + NODES[:, None] * width)[:, :, None]
                weight = weight * (1.0 if rows.weight is None else rows.weight)
                curvature = (weight * rowwise.curvature_at(eta, y)[:, :, 0, 0]).sum(axis=0)
                sums.value[u] += (weight * rowwise.value_at(eta, y)).sum()
                sums.gradient[u] += (weight * rowwise.slope_at(eta, y)[:, :, 0]).sum(axis=0) @ X
                sums.hessian[u] += (X * curvature[:, None]).T @ X
        return sums

    def _over_points(self, theta: Array, covariance: Array) -> Quadratics:
        """Average over 2p points (McNamee and Stenger 1967), for losses without predictors of rows."""
        p, (value, vectors) = theta.shape[1], np.linalg.eigh(covariance)
        steps = np.sqrt(p * np.maximum(value, 0.0))[:, None, :] * vectors
        sums = Quadratics.zeros(theta, 1)
        for step in np.moveaxis(np.concatenate([steps, -steps], axis=2), 2, 0):
            each = self.data.expand(theta + step)
            for total, more in ((sums.value, each.value), (sums.gradient, each.gradient), (sums.hessian, each.hessian)):
                total += more / (2 * p)
        return sums

    @cached_property
    def _gram(self) -> Array:
        """Sums ``X'X (V, q, q)`` of every site, in the units of the columns."""
        q = self.data.n_features
        out = np.zeros((len(self.sites), q, q))
        for part, sites in self._parts():
            for u, site in zip(sites.tolist(), part.sites, strict=True):
                rows = part.rows[site]
                out[u] = (rows.X if rows.weight is None else rows.X * rows.weight[:, None]).T @ rows.X
        return out

    def start(self) -> Array:
        """Return one common parameter for all sites, ``(V, p)``."""
        return self.units.to_fitted(np.tile(self._pooled, (len(self.sites), 1)))

    @cached_property
    def _pooled(self) -> Array:
        if self.data.rows is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DegenerateSiteWarning)
                return global_fit(self.data.rows, self.loss)
        V = len(self.sites)

        def derivatives(theta: Array, who: Index) -> tuple[Array, Array]:
            sums = self._expanded(np.tile(theta, (V, 1)))
            return sums.gradient.sum(axis=0), sums.hessian.sum(axis=0)

        def value(theta: Array, who: Index) -> Array:
            total = self._expanded(np.tile(theta, (V, 1))).value.sum(axis=0)
            return np.where(np.isfinite(total), total, np.inf)

        return np.asarray(
            damped_newton(value, derivatives, np.zeros((1, len(self.names))), tol=1e-6, max_iter=10)[0][0]
        )

    def dispersion(self, at: Array, degrees: float) -> float:
        """Return the ratio of the scores' variance to that implied by Hessians, for scores in these units."""
        # 1 for classes, at least 1 for counts: a likelihood is not believed to be less noisy than it says
        if self.loss.target in ("class", "survival"):
            return 1.0
        theta, A, squares = self.units.theta(at), self.units.A, 0.0
        for part, sites in self._parts():
            for u, site in zip(sites.tolist(), part.sites, strict=True):
                rows = part.rows[site]
                own = ((self.loss.scores(theta[u], *rows.arrays) @ A) ** 2).sum(axis=1)
                squares += float(own.sum() if rows.weight is None else rows.weight @ own)
        promised = float(np.einsum("ujj->", self.expand(at).G)) * self.units.target**2
        n = float(self.n_samples.sum())
        found = squares / max(promised, 1e-300) * n / max(n - degrees, 1.0)
        if self.loss.linear_beyond is not None:
            share = promised / max(float(np.einsum("uij,ik,jk->", self._gram, A, A)), 1e-300)
            # scores scatter more than estimates let them, with so many degrees of freedom per row (Huber 1973)
            inside = max(share, LEAST_SHARE)
            found *= (1.0 + degrees / n * (1.0 - inside) / inside) ** 2
        likelihood = self.loss.rowwise is not None and not self.loss.estimates_scale
        return (max(found, 1.0) if likelihood else found) / self.units.target**2

    def shared_dispersion(self) -> float:
        """Return the mean over rows of the dispersions in the summaries; 1 if the loss has none."""
        own = self.data.own
        if self.loss.target == "class" or own is None:
            return 1.0
        return float(self.n_samples @ np.array([one.dispersion for one in own]) / self.n_samples.sum())

    def refuse_small_threshold(self) -> None:
        """Raise `DataError` if less than 35% of the rows of summaries are within the threshold, so that curvature
        carries no information."""
        if self.has_rows or self.loss.linear_beyond is None or self.names[0] != INTERCEPT:
            return
        share = float(self.data.expand(np.zeros(0)).hessian[:, 0, 0, 0].sum() / self.n_samples.sum())
        if share < 0.35:
            delta = self.loss.linear_beyond
            raise DataError(
                f"{max(share, 0.0):.0%} of the rows are within delta={delta:g} of predictions, too few "
                f"for summaries of the {self.loss.name} loss: agree on a larger delta, in units of the target (about "
                "1.3 standard deviations of the noise)"
            )

    def _of_summaries(self, zero: Array) -> QuadraticLikelihoods:
        """Return the sums of summaries, with the low rank stated by the sites."""
        said, n = self.data.curvature, self.n_samples
        if said is not None:  # directions that are left out have no residuals either
            n = n - np.array([0 if one is None else one.left_out for one in said])
        made, each = self._expansion(self.data.expand(zero), n), [one for one in said or () if one is not None]
        rank, p = max([one.rank for one in each], default=0), made.n_params
        # without a diagonal it is found anyway
        if p <= FEW or len(each) < len(self.sites) or rank > SHORT * p or not any(one.diagonal.any() for one in each):
            return made
        factor = np.zeros((len(each), p, max(rank, 1)))
        for out, one in zip(factor, each, strict=True):
            out[:, : one.rank] = one.factor
        return replace(made, known=LowRank(np.stack([one.diagonal for one in each]), factor))

    def _parts(self) -> Iterator[tuple[RowData, Index]]:
        """Return all rows, some at a time, and the positions of their sites."""
        position = {site: u for u, site in enumerate(self.sites)}
        for part in self.data.batches():
            yield part, np.array([position[site] for site in part.sites], dtype=np.int64)

    def _expansion(self, sums: Quadratics, n: Index | Array) -> QuadraticLikelihoods:
        """Return the quadratics of one part, of ``n (V,)`` rows, around 0."""
        A, b, c = (each[:, 0] for each in sums.coefficients())
        loss = self.loss
        p = b.shape[1]
        G = A[:, None, None] * np.eye(p) if A.ndim == 1 else 0.5 * (A + np.swapaxes(A, 1, 2))
        rows = n.astype(np.float64) * (p if loss.location else 1)
        return QuadraticLikelihoods.from_products(G, b, 2 * (np.maximum(c, 0.0) if loss.quadratic else c), rows)

    def _expanded(self, theta: Array) -> Quadratics:
        """Return quadratics around ``theta (V, p)``; the last ones are kept, since files are read for every other."""
        if self._last is not None and np.array_equal(self._last[0], theta):
            return self._last[1]
        with np.errstate(over="ignore", invalid="ignore"):
            if self.loss.linear_beyond is None:
                sums = self.data.expand(theta)
            else:
                sums, counts = Quadratics.zeros(theta, 1), np.zeros((len(theta), THRESHOLDS))
                for part, at in self._parts():
                    sums.add(at, part.expand(theta[at]))
                    counts[at] += residual_counts(self.loss, part.rows, theta[at])
                sums = replace(sums, hessian=(self._gram * expected_shares(counts)[:, None, None])[:, None])
        if not self.data.in_memory:
            self._last = theta.copy(), sums
        return sums


def intercepts_of(names: tuple[str, ...], n_outputs: int) -> Mask:
    """Return which parameters are intercepts ``(p,)``: those of a first column called ``(intercept)``."""
    block = len(names) // max(n_outputs, 1)
    first = np.arange(len(names)) % block == 0
    return first if names[0].split(" [class")[0] == INTERCEPT else np.zeros(len(names), dtype=bool)


def canonical_order(sums: QuadraticLikelihoods, sites: tuple[Hashable, ...]) -> Index:
    """Return an order of the sites by their data, and by their names only if their data are equal."""
    names = np.argsort(np.argsort(np.array([repr(site) for site in sites])))
    # sites that say the same otherwise do not differ off the diagonal: of many coefficients that takes long
    rest = sums.G.reshape(len(names), -1) if sums.n_params <= FEW else np.einsum("ujj->uj", sums.G)
    return np.lexsort([names, *rest.T, sums.yy, *sums.c.T, sums.n]).astype(np.int64)


# --- losses that are linear beyond a threshold ------------------------------------------------------------------------


def residual_counts(loss: Loss, federation: Federation, theta: Array) -> Array:
    """Count the rows of every site at ``theta (V, p)`` by the first threshold that includes them, ``(V,
    THRESHOLDS)``."""
    assert loss.linear_beyond is not None
    out = np.zeros((len(theta), THRESHOLDS))
    for u, site in enumerate(federation.sites):
        rows = federation[site]
        assert rows.y is not None
        residual = rows.y - rows.X @ theta[u] - (0.0 if rows.offset is None else rows.offset)
        size = np.nan_to_num(np.abs(residual) / loss.linear_beyond, nan=np.inf)
        number = np.ceil(4.0 * np.log2(np.clip(size, 1.0, 2.0 ** (0.25 * (THRESHOLDS - 1))))).astype(np.int64)
        out[u] = np.bincount(np.minimum(number, THRESHOLDS - 1), weights=rows.weight, minlength=THRESHOLDS)
    return out


def expected_shares(counts: Array) -> Array:
    """Return the expected curvature ``(V,)`` of a site's rows, and of four of the average site, from
    `residual_counts`."""
    within, n = counts.cumsum(axis=1), counts.sum(axis=1)
    shares = within.sum(axis=0) / n.sum()
    k = int(np.argmax(shares >= LEAST_SHARE))
    return np.asarray((within[:, k] + 4.0 * shares[k]) / (n + 4.0) / 2.0 ** (0.25 * k))
