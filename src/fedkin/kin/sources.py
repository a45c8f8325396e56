"""Where quadratics come from: rows, which can be expanded anywhere, or summaries, which are expanded at one point."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core import FileRows, Summaries, build_terms, global_fit, resolve_losses
from fedkin.data import INTERCEPT, Federation, Rows
from fedkin.errors import DataError, DegenerateSiteWarning
from fedkin.kin.corners import CORNERS, estimated_slack, expected_shares, gram_sums, residual_counts
from fedkin.kin.matrices import FEW, SHORT, LowRank
from fedkin.kin.quadratics import Quadratics, apply
from fedkin.losses import Loss

#: Steps of Newton's method for one model of all rows, where rows are in files.
POOLED = 10

#: Least share of rows within the corner of a loss that summaries need.
SUMMED_SHARE = 0.35

#: Gauss-Hermite nodes of a standard normal, and their shares.
NODES, SHARE_OF_NODES = np.polynomial.hermite_e.hermegauss(7)
SHARE_OF_NODES = SHARE_OF_NODES / SHARE_OF_NODES.sum()


class Source(Protocol):
    """The losses of V sites with p parameters, in the user's units."""

    sites: tuple[Hashable, ...]
    loss: Loss
    names: tuple[str, ...]
    n_samples: Index | Array

    def first(self) -> Quadratics:
        """Quadratics to begin with, and to find units from."""


class SummarySource:
    """Summaries: one expansion for each site, at the point that the site has chosen or was asked about."""

    def __init__(self, summaries: Summaries) -> None:
        self.summaries, self.sites, self.loss = summaries, summaries.sites, summaries.loss
        self.n_samples: Index | Array
        self.names = summaries[summaries.sites[0]].parameter_names
        self.n_samples = summaries.n_samples

    def take(self, order: Index) -> SummarySource:
        return SummarySource(self.summaries.subset([self.sites[u] for u in order]))

    def first(self) -> Quadratics:
        sums, n = self.summaries.sums.total(), self.n_samples
        if self.summaries.curvature is not None:  # directions that are left out have no residuals either
            n = n - np.array([0 if one is None else one.left_out for one in self.summaries.curvature])
        made = expansion(self.loss, sums.at, sums.value[:, 0], sums.gradient[:, 0], sums.hessian[:, 0], n)
        return replace(made, known=self._short())

    def refuse_small_corner(self) -> None:
        """Raise `DataError` where most rows are beyond the corner of the loss: their curvature tells nothing."""
        if self.loss.threshold is None or not self.summaries.has_intercept:
            return
        share = float(self.summaries.sums.total().hessian[:, 0, 0, 0].sum() / self.n_samples.sum())
        if share < SUMMED_SHARE:
            raise DataError(
                f"{max(share, 0.0):.0%} of the rows are within delta={self.loss.threshold:g} of predictions, too few "
                f"for summaries of the {self.loss.name} loss: agree on a larger delta, in units of the target (about "
                "1.3 standard deviations of the noise)"
            )

    def _short(self) -> LowRank | None:
        """What sites said as diagonal plus low rank, if all did and it pays; without a diagonal it is found anyway."""
        said = self.summaries.curvature
        if said is None or self.summaries.n_params <= FEW or not all(one is not None for one in said):
            return None
        each = [one for one in said if one is not None]
        rank, p = max(max(one.rank for one in each), 1), self.summaries.n_params
        if rank > SHORT * p or not any(one.diagonal.any() for one in each):
            return None
        factor = np.zeros((len(each), p, rank))
        for out, one in zip(factor, each, strict=True):
            out[:, : one.rank] = one.factor
        return LowRank(np.stack([one.diagonal for one in each]), factor)

    def dispersion(self) -> float:
        """Mean over rows of what sites found for themselves; 1 where the loss leaves nothing open."""
        own = self.summaries.own
        if self.loss.needs_classes or own is None:
            return 1.0
        each = np.array([one.dispersion for one in own])
        return float(self.n_samples @ each / self.n_samples.sum())


class RowSource:
    """Rows: quadratics at any point."""

    def __init__(self, federation: Federation, loss: str | Loss) -> None:
        if not federation.n_samples.all():
            empty = federation.sites[int(np.flatnonzero(federation.n_samples == 0)[0])]
            raise DataError(f"site {empty!r} has no rows: leave it out, and ask for its model with `join`")
        losses = resolve_losses(loss, federation)
        self.federation, self.sites, self.loss = federation, federation.sites, losses[0]
        # a row of weight w counts as w rows
        self.n_samples = federation.n_samples if federation.weight is None else federation.weight_sums
        p, names = self.loss.n_params(federation.n_features), federation.feature_names
        self.names = (
            names
            if p == len(names)
            else tuple(f"{name} [class {k + 1}]" for k in range(p // len(names)) for name in names)
        )
        self.terms = build_terms(federation, losses, np.zeros(p), np.zeros(len(losses), dtype=bool))
        self.gram = None if self.loss.threshold is None else gram_sums(federation)

    def take(self, order: Index) -> RowSource:
        return RowSource(self.federation.subset([self.sites[u] for u in order]), self.loss)

    def first(self) -> Quadratics:
        if self.loss.threshold is None:
            return self.expand(np.zeros((len(self.sites), len(self.names))))
        # where residuals are small; as least squares, whose curvature is 1
        sums = self.expand(self.start())
        assert self.gram is not None
        share = max(float(np.einsum("ujj->", sums.G) / max(np.einsum("ujj->", self.gram), 1e-300)), 1e-300)
        return Quadratics(sums.G / share, sums.c / share, sums.yy / share, sums.n)

    def expand(self, theta: Array) -> Quadratics:
        """Quadratics around ``theta (V, p)``."""
        n, terms = self.n_samples.astype(np.float64), self.terms
        if self.gram is None:
            hessian = terms.hessians(theta) * n[:, None, None]
        else:
            hessian = self.gram * expected_shares(residual_counts(self.loss, self.federation, theta))[:, None, None]
        gradient = terms.gradients(theta) * n[:, None]
        return expansion(self.loss, theta, terms.values(theta) * n, gradient, hessian, self.n_samples)

    @property
    def averages(self) -> bool:
        """Whether expansions can be averaged: rows that say little each, of two classes."""
        return self.loss.needs_classes and self.loss.n_outputs == 1 and self.loss.rowwise is not None

    def averaged(self, theta: Array, covariance: Array) -> Quadratics:
        """Quadratics with value, gradient and Hessian averaged over ``N(theta (V, p), covariance (V, p, p))``.

        At a point alone, losses of classes look steeper than they are for parameters that are still open, so that
        spreads and means come out too small (Breslow and Lin 1995); averaged, they are those of a Gaussian variational
        approximation (Ormerod and Wand 2012).
        """
        value, gradient, hessian = np.zeros(len(theta)), np.zeros_like(theta), np.zeros_like(covariance)
        position = {site: u for u, site in enumerate(self.sites)}
        for batch in self._batches():
            for site in batch.sites:
                u = position[site]
                own = _averages(self.loss, batch[site], theta[u], covariance[u])
                value[u], gradient[u], hessian[u] = value[u] + own[0], gradient[u] + own[1], hessian[u] + own[2]
        return expansion(self.loss, theta, value, gradient, hessian, self.n_samples)

    def _batches(self) -> Iterable[Federation]:
        """All rows, some at a time."""
        return (self.federation,)

    def values(self, theta: Array) -> Array:
        """The sites' losses ``(V,)`` at ``theta (V, p)``; infinite where they cannot be computed."""
        with np.errstate(over="ignore", invalid="ignore"):
            each = self.terms.values(theta) * self.n_samples
        return np.asarray(np.where(np.isfinite(each), each, np.inf))

    def value(self, theta: Array) -> float:
        """Their sum."""
        return float(self.values(theta).sum())

    def start(self) -> Array:
        """One parameter for all sites, ``(V, p)``."""
        return np.tile(self._pooled, (len(self.sites), 1))

    @cached_property
    def _pooled(self) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DegenerateSiteWarning)
            return global_fit(self.federation, self.loss)

    def dispersion(self, theta: Array, A: Array, degrees: float) -> float:
        """How much scores scatter beyond what Hessians promise, for scores in the units of ``A``.

        1 for classes, at least 1 for counts: a likelihood is not believed to be less noisy than it says.
        """
        if self.loss.needs_classes:
            return 1.0
        return self._dispersion(score_squares(self.loss, self.federation, theta, A), theta, A, degrees)

    def _dispersion(self, squares: float, theta: Array, A: Array, degrees: float) -> float:
        promised = np.einsum("uij,ik,jk->", self.expand(theta).G, A, A)
        n = float(self.n_samples.sum())
        found = squares / max(float(promised), 1e-300) * n / max(n - degrees, 1.0)
        if self.gram is not None:
            share = float(promised) / max(float(np.einsum("uij,ik,jk->", self.gram, A, A)), 1e-300)
            found *= estimated_slack(share, degrees / n)
        likelihood = self.loss.rowwise is not None and not self.loss.estimates_scale
        return max(found, 1.0) if likelihood else max(found, 1e-12)


class FileSource(RowSource):
    """Rows that stay in files: every evaluation is a pass over them, so the last one is kept."""

    def __init__(self, rows: FileRows, order: Index | None = None) -> None:
        self.rows, self.loss = rows, rows.loss
        self.order = np.arange(len(rows.sites)) if order is None else order
        self.sites = tuple(rows.sites[u] for u in self.order.tolist())
        self.n_samples = rows.n_samples[self.order]
        p, names = self.loss.n_params(len(rows.feature_names)), rows.feature_names
        blocks = range(p // len(names))
        self.names = names if len(blocks) == 1 else tuple(f"{one} [class {k + 1}]" for k in blocks for one in names)
        self._last: tuple[Array, Array, Quadratics] | None = None
        self.gram: Array | None = None

    def take(self, order: Index) -> FileSource:
        return FileSource(self.rows, self.order[order])

    def _batches(self) -> Iterable[Federation]:
        return self.rows.batches()

    def _evaluated(self, theta: Array) -> tuple[Array, Array, Quadratics]:
        if self._last is not None and np.array_equal(self._last[0], theta):
            return self._last
        V, p = theta.shape
        value, gradient, hessian = np.zeros(V), np.zeros((V, p)), np.zeros((V, p, p))
        counts = None if self.loss.threshold is None else np.zeros((V, CORNERS))
        position = {site: u for u, site in enumerate(self.sites)}
        with np.errstate(over="ignore", invalid="ignore"):
            for batch in self._batches():
                at = np.array([position[site] for site in batch.sites], dtype=np.int64)
                losses, alone = resolve_losses(self.loss, batch), np.zeros(len(at), dtype=bool)
                terms, n = build_terms(batch, losses, np.zeros(p), alone), batch.weight_sums
                value[at] += n * terms.values(theta[at])
                gradient[at] += n[:, None] * terms.gradients(theta[at])
                if counts is None:
                    hessian[at] += n[:, None, None] * terms.hessians(theta[at])
                else:
                    hessian[at] += gram_sums(batch)
                    counts[at] += residual_counts(self.loss, batch, theta[at])
        if counts is not None:
            self.gram, hessian = hessian, hessian * expected_shares(counts)[:, None, None]
        made = expansion(self.loss, theta, value, gradient, hessian, self.n_samples)
        self._last = theta.copy(), value, made
        return self._last

    def expand(self, theta: Array) -> Quadratics:
        return self._evaluated(theta)[2]

    def values(self, theta: Array) -> Array:
        value = self._evaluated(theta)[1]
        return np.asarray(np.where(np.isfinite(value), value, np.inf))

    @cached_property
    def _pooled(self) -> Array:
        theta, value = np.zeros(len(self.names)), np.inf
        for _ in range(POOLED):
            sums, now = self.expand(np.tile(theta, (len(self.sites), 1))), self._last
            value = float(now[1].sum()) if now is not None else np.inf
            G = sums.G.sum(axis=0)
            new = np.linalg.solve(G + 1e-10 * np.trace(G) * np.eye(len(G)), sums.c.sum(axis=0))
            for _ in range(POOLED):
                if self.value(np.tile(new, (len(self.sites), 1))) <= value:
                    break
                new = 0.5 * (new + theta)
            step, theta = np.abs(new - theta).max(), new
            if step <= 1e-3 * (1.0 + np.abs(theta).max()):
                break
        return theta

    def dispersion(self, theta: Array, A: Array, degrees: float) -> float:
        if self.loss.needs_classes:
            return 1.0
        position = {site: u for u, site in enumerate(self.sites)}
        squares = 0.0
        for batch in self.rows.batches():
            at = np.array([position[site] for site in batch.sites], dtype=np.int64)
            squares += score_squares(self.loss, batch, theta[at], A)
        return self._dispersion(squares, theta, A, degrees)


class SumSource:
    """Some sites of another source with a quadratic loss, in that order: sums say all, and rows are not copied."""

    def __init__(self, source: Source, sums: Quadratics, order: Index) -> None:
        self.sites = tuple(source.sites[u] for u in order.tolist())
        self.loss, self.names, self.n_samples = source.loss, source.names, source.n_samples[order]
        self.sums = sums.take(order)

    def first(self) -> Quadratics:
        return self.sums


def score_squares(loss: Loss, federation: Federation, theta: Array, A: Array) -> float:
    """The sum over rows of the squared scores at ``theta (V, p)``, in the units of ``A``."""
    squares = 0.0
    for u, site in enumerate(federation.sites):
        rows = federation[site]
        own = ((loss.scores(theta[u], *rows.arrays) @ A) ** 2).sum(axis=1)
        squares += float(own.sum() if rows.weight is None else rows.weight @ own)
    return squares


def _averages(loss: Loss, rows: Rows, theta: Array, covariance: Array) -> tuple[float, Array, Array]:
    """Value, gradient and Hessian of the rows' loss, averaged over ``N(theta (p,), covariance (p, p))``."""
    rowwise, (X, y, offset) = loss.rowwise, rows.arrays
    assert rowwise is not None
    assert y is not None
    eta = X @ theta + (0.0 if offset is None else offset)
    width = np.sqrt(np.maximum(((X @ covariance) * X).sum(axis=1), 0.0))
    at = (eta + NODES[:, None] * width)[:, :, None]
    weight = SHARE_OF_NODES[:, None] * (1.0 if rows.weight is None else rows.weight)
    slope = (weight * rowwise.slope_at(at, y)[:, :, 0]).sum(axis=0)
    curvature = (weight * rowwise.curvature_at(at, y)[:, :, 0, 0]).sum(axis=0)
    return float((weight * rowwise.value_at(at, y)).sum()), slope @ X, (X * curvature[:, None]).T @ X


def expansion(loss: Loss, at: Array, value: Array, gradient: Array, hessian: Array, n: Index | Array) -> Quadratics:
    """Quadratics with these sums of values ``(V,)``, gradients and Hessians (or multiples of I) at ``at (V, p)``."""
    p = at.shape[1]
    G = hessian[:, None, None] * np.eye(p) if hessian.ndim == 1 else 0.5 * (hessian + np.swapaxes(hessian, 1, 2))
    bend = apply(G, at)
    yy = 2 * (value + ((0.5 * bend - gradient) * at).sum(axis=1))
    rows = n.astype(np.float64) * (p if loss.location else 1)
    return Quadratics(G, bend - gradient, np.maximum(yy, 0.0) if loss.quadratic else yy, rows)


def intercepts_of(names: tuple[str, ...], n_outputs: int) -> Mask:
    """Which parameters are intercepts ``(p,)``: those of a first column called ``(intercept)``."""
    block = len(names) // max(n_outputs, 1)
    first = np.arange(len(names)) % block == 0
    return first if names[0].split(" [class")[0] == INTERCEPT else np.zeros(len(names), dtype=bool)


def canonical_order(sums: Quadratics, sites: tuple[Hashable, ...]) -> Index:
    """An order of the sites that depends on what they say, and on their names only where two say the same."""
    names = np.argsort(np.argsort(np.array([repr(site) for site in sites])))
    # sites that say the same otherwise do not differ beside the diagonal: of many coefficients that takes long
    rest = sums.G.reshape(len(names), -1) if sums.n_params <= FEW else np.einsum("ujj->uj", sums.G)
    keys = [names, *rest.T, sums.yy, *sums.c.T, sums.n]
    return np.lexsort(keys).astype(np.int64)
