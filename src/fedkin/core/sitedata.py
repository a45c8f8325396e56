"""Define `SiteData` (site losses from rows or summaries) and the `Columns` map."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core.quadratics import Quadratics, SiteTerms
from fedkin.core.terms import build_terms
from fedkin.data import INTERCEPT, Federation, HasSites, block_folds, deal_folds
from fedkin.errors import DataError, ParameterError, UnknownSiteError, argument
from fedkin.losses import Loss, make_loss

if TYPE_CHECKING:
    from fedkin.core.summary import LowRankCurvature, OwnEstimate

LossLike = str | Loss | Mapping[Hashable, str | Loss]
SiteDataT = TypeVar("SiteDataT", bound="SiteData")


def parameter_names(names: Sequence[str], outputs: int, labels: Sequence[Hashable] | None = None) -> tuple[str, ...]:
    """Return parameter names: the column names, with the output label if there are several outputs."""
    if outputs <= 1:
        return tuple(names)
    labels = [f"class {k + 1}" for k in range(outputs)] if labels is None else labels
    return tuple(f"{name} [{label}]" for label in labels for name in names)


class AffineMap:
    """Map ``theta = A fitted + shift`` between the fitted parameters and the user's."""

    A: Array
    shift: Array

    def theta(self, fitted: Array) -> Array:
        """Return the user's parameters ``(..., p)``."""
        return np.asarray(fitted @ self.A.T + self.shift)

    def to_fitted(self, theta: Array) -> Array:
        """Return fitted parameters for ``theta (..., p)``."""
        return np.asarray((theta - self.shift) @ np.linalg.inv(self.A).T)

    def covariance(self, fitted: Array) -> Array:
        """Return covariances ``(..., p, p)`` of the user's parameters."""
        return np.asarray(self.A @ fitted @ self.A.T)


@dataclass(frozen=True, eq=False)
class Columns(AffineMap):
    """Standardised columns ``(x - mean) / scale`` of q named columns; the first may be ``(intercept)``."""

    names: tuple[str, ...]
    mean: Array  # (q,), 0 for the intercept, which takes up the means of the others; all 0 without one
    scale: Array  # (q,), 1 for the intercept
    outputs: int = 1  # blocks of coefficients in a theta
    location: bool = False  # whether the parameters are a location rather than coefficients
    labels: Sequence[Hashable] | None = None  # names of the outputs

    @property
    def intercept(self) -> bool:
        """Whether the first column is the constant 1."""
        return self.names[:1] == (INTERCEPT,)

    @property
    def n_params(self) -> int:
        return self.outputs * len(self.names)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return parameter_names(self.names, self.outputs, self.labels)

    @property
    def intercepts(self) -> Mask:
        """Mask of the p parameters that are intercepts."""
        return np.tile(np.arange(len(self.names)) == (0 if self.intercept else -1), self.outputs)

    def per_parameter(self, value: float) -> Array:
        """Return a penalty level for each parameter ``(p,)``, 0 for intercepts."""
        return np.where(self.intercepts, 0.0, value)

    @cached_property
    def A(self) -> Array:  # type: ignore[override]
        """Matrix ``(p, p)`` of the map ``theta = A fitted + shift``."""
        one = np.diag(self.scale if self.location else 1.0 / self.scale)
        if self.intercept:
            one[0, 1:] = -self.mean[1:] / self.scale[1:]
        return np.asarray(np.kron(np.eye(self.outputs), one), dtype=np.float64)

    @property
    def shift(self) -> Array:  # type: ignore[override]
        """Vector ``shift (p,)`` of the map ``theta = A fitted + shift``."""
        return self.mean if self.location else np.zeros(self.n_params)


class SiteData(HasSites, ABC):
    """Losses of V sites, from rows in memory (`RowData`), rows in files (`FileRows`) or `Summaries`."""

    has_rows: ClassVar[bool]  # whether the losses can be expanded anywhere
    in_memory: ClassVar[bool]  # whether the rows can be cut and taken
    loss: Loss  # that of the first site, where they differ
    feature_names: tuple[str, ...]
    column_squares: Array  # (V, q), sums over the rows of each site
    rows: Federation | None = None  # those in memory
    ordered: bool = False  # whether rows are in the order of time
    own: tuple[OwnEstimate, ...] | None = None  # estimates that sites have made of their rows
    curvature: tuple[LowRankCurvature | None, ...] | None = None  # second derivatives of sites with short messages

    @property
    @abstractmethod
    def n(self) -> Index | Array:
        """Number of rows of each site, or the sum of their weights, ``(V,)``."""

    @abstractmethod
    def take(self, order: Index) -> SiteData:
        """Return the data of the given sites, in that order."""

    @abstractmethod
    def expand(self, theta: Array, folds: int = 1, seed: int = 0) -> Quadratics:
        """Return sums around ``theta (V, p)``, or around the point of the summaries, over all rows or by fold."""

    @property
    def n_samples(self) -> Index | Array:
        return self.n

    @property
    def column_scale(self) -> Array:
        """Mean square ``(q,)`` of each column over all rows; 1 for a column of zeros."""
        scale = self.column_squares.sum(axis=0) / self.n.sum()
        return np.where(scale > 0, scale, 1.0)

    @property
    def n_features(self) -> int:
        return len(self.feature_names)

    @property
    def n_params(self) -> int:
        return self.loss.n_params(self.n_features)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the p parameters."""
        return parameter_names(self.feature_names, self.n_params // self.n_features)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The loss of each site."""
        return (self.loss,) * self.n_sites

    def batches(self) -> Iterator[RowData]:
        """Yield all rows in batches."""
        raise DataError("this needs rows, and summaries have none")

    def values(self, theta: Array) -> Array:
        """Return the losses ``(V,)`` at ``theta (V, p)``, summed over rows."""
        return self.expand(theta).value[:, 0]

    @cached_property
    def _last_terms(self) -> list[tuple[Array, Mask | None, SiteTerms]]:
        return []

    def shared_terms(self, ridge: Array, alone: Mask | None) -> SiteTerms:
        """Return `terms`, those of the last call if the ridge is the same and no other sites are alone."""
        for known_ridge, known, terms in self._last_terms:
            covered = known is None or (alone is not None and not (alone & ~known).any())
            if covered and np.array_equal(known_ridge, ridge):
                return terms
        self._last_terms[:] = [(ridge, alone, self.terms(ridge, alone))]
        return self._last_terms[0][2]

    def terms(self, ridge: Array, alone: Mask | None = None) -> SiteTerms:
        """Return the mean losses with a ridge, see `build_terms`."""
        needs = f"the rows of the {self.loss.name} loss in memory"
        raise ParameterError(f"the fused estimator needs {needs}: omit its options, or load the whole table")

    def gram(self, members: Mask) -> Array:
        """Return the features' cross-products summed over some sites, up to the scale of each feature."""
        return np.asarray(self.expand(np.zeros((self.n_sites, self.n_params))).hessian[members, 0].sum(axis=0))

    def check_folds(self, folds: int, seed: int) -> None:
        """Raise an error if these folds are not available."""


class RowData(SiteData):
    """Rows of a federation with a loss for each site."""

    has_rows: ClassVar[Literal[True]] = True
    in_memory: ClassVar[Literal[True]] = True
    rows: Federation

    def __init__(self, federation: Federation, loss: LossLike) -> None:
        self.rows, self.given_loss, self._losses = federation, loss, resolve_losses(loss, federation)
        self.loss, self.sites, self.ordered = self._losses[0], federation.sites, federation.ordered
        self.feature_names = federation.feature_names

    @property
    def losses(self) -> tuple[Loss, ...]:
        return self._losses

    @property
    def n(self) -> Index | Array:
        return self.rows.n_samples if self.rows.weight is None else self.rows.weight_sums

    @property
    def n_samples(self) -> Index:
        return self.rows.n_samples

    @property
    def column_scale(self) -> Array:
        scale = np.average(self.rows.X**2, axis=0, weights=self.rows.weight)
        return np.where(scale > 0, scale, 1.0)

    @property
    def zeros(self) -> Array:
        """Zero parameters ``(V, p)``."""
        return np.zeros((self.n_sites, self.n_params))

    def terms(self, ridge: Array, alone: Mask | None = None) -> SiteTerms:
        return build_terms(self.rows, self.losses, ridge, alone)

    @cached_property
    def _terms(self) -> SiteTerms:
        return self.terms(self.zeros[0], np.zeros(self.n_sites, dtype=bool))

    def take(self, order: Index) -> RowData:
        sites, mixed = [self.sites[u] for u in order], len({id(one) for one in self.losses}) > 1
        loss = {self.sites[u]: self.losses[u] for u in order} if mixed else self.loss
        return RowData(self.rows.subset(sites), loss)

    def batches(self) -> Iterator[RowData]:
        yield self

    def values(self, theta: Array) -> Array:
        return self._terms.values(theta) * self.n

    def expand(self, theta: Array, folds: int = 1, seed: int = 0) -> Quadratics:
        if folds == 1:
            return Quadratics.from_terms(self._terms, self.n.astype(np.float64), theta)
        whole = np.full(len(self.rows.X), -1)  # parts of a loss that does not add up tell less than the whole
        return self.expand_folds(theta, assign_folds(self.rows, folds, seed) if self.loss.additive else whole, folds)

    def expand_folds(self, at: Array, fold_of: Index, folds: int) -> Quadratics:
        """Return sums around ``at (V, p)`` of rows with a fold ``(N,)`` each; -1 is the last part."""
        (v, p), rows = at.shape, self.rows
        cell = rows.site_index * (folds + 1) + fold_of % (folds + 1)
        count = np.bincount(cell, rows.weight, v * (folds + 1)).reshape(v, folds + 1)
        value, gradient, hessian = np.zeros((v, folds + 1)), np.zeros((v, folds + 1, p)), np.zeros(0)
        for k in (*range(folds), -1):
            seen = np.flatnonzero(count[:, k])
            if not seen.size:
                continue
            part = rows.take(fold_of == k, allow_empty=True)
            if seen.size < v:
                part = part.subset([rows.sites[u] for u in seen])
            lonely = np.zeros(seen.size, dtype=bool)
            terms = build_terms(part, [self.losses[u] for u in seen.tolist()], np.zeros(p), lonely)
            one = Quadratics.from_terms(terms, count[seen, k], at[seen])
            if not hessian.size:
                hessian = np.zeros((v, folds + 1, *one.hessian.shape[2:]))
            value[seen, k], gradient[seen, k], hessian[seen, k] = one.value[:, 0], one.gradient[:, 0], one.hessian[:, 0]
        return Quadratics(at, count, value, gradient, hessian)

    def gram(self, members: Mask) -> Array:
        X = self.rows.X[members[self.rows.site_index]]
        size = np.sqrt((X**2).mean(axis=0))
        X = X / np.where(size > 0, size, 1.0)
        return np.asarray(X.T @ X)


def site_data(data: Federation | SiteDataT, loss: LossLike) -> RowData | SiteDataT:
    """Return the data with the losses of its sites; files and summaries carry their own."""
    if isinstance(data, SiteData):
        return data
    if not isinstance(data, Federation):
        raise DataError(f"expected a Federation or Summaries, got {type(data).__name__}")
    return RowData(data, loss)


def assign_folds(federation: Federation, folds: int, seed: int) -> Index:
    """Assign rows to folds ``(N,)`` within sites; -1 for the row of a one-row site, which always trains."""
    sizes = zip(federation.sites, federation.n_samples.tolist(), strict=True)

    def dealt(site: Hashable, n: int) -> Index:
        if n < 2:
            return np.full(n, -1, dtype=np.int64)
        return block_folds(n, folds) if federation.ordered else deal_folds(site, n, folds, seed)

    return np.concatenate([dealt(site, n) for site, n in sizes])


def resolve_losses(loss: LossLike, federation: Federation) -> tuple[Loss, ...]:
    """Return one loss per site, in site order, each checked against the site's target."""
    if isinstance(loss, Mapping):
        losses = _losses_by_site(loss, federation)
    else:
        losses = (make_loss(loss, federation.y),) * federation.n_sites
    if federation.weight is not None:
        for one in losses:
            if one.rowwise is None and not one.quadratic:
                raise ParameterError(f"the {one.name} loss does not support row weights: omit {argument('weight')}")
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
