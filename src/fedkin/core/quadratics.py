"""`Quadratics`: sums of a loss and its derivatives by site and fold, and `SiteData`, which gives them at any point."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask
from fedkin.core.columns import parameter_names
from fedkin.core.rows import LossLike, build_terms, resolve_losses
from fedkin.core.terms import QuadraticTerms, SiteTerms
from fedkin.data import Federation, HasSites, block_folds, deal_folds
from fedkin.losses import Loss

_SUMS = ("count", "value", "gradient", "hessian")


class SiteData(Protocol):
    """The losses of V sites: rows in memory (`RowData`), rows in files (`FileRows`) or `Summaries`."""

    @property
    def sites(self) -> tuple[Hashable, ...]: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def names(self) -> tuple[str, ...]:
        """Names of the p parameters."""
    @property
    def n(self) -> Index | Array:
        """Rows of each site, or the sums of their weights, ``(V,)``."""
    @property
    def movable(self) -> bool:
        """Whether there are rows, so that the losses can be expanded anywhere."""
    def take(self, order: Index) -> SiteData:
        """Some sites, in that order."""
    def batches(self) -> Iterable[RowData]:
        """All rows, some at a time; raises `DataError` where there are none."""
    def expand(self, theta: Array, folds: int = 1) -> Quadratics:
        """Sums around ``theta (V, p)``, or around the point of the summaries; of all rows, or by fold."""


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Sums over rows of V sites in K parts of the loss, its gradient and its Hessian at ``at (V, p)``.

    Cut into folds, the last part has the rows that always train (fold -1). For quadratic losses the sums tell the loss
    everywhere; for others they are its expansion.

    >>> import fedkin
    >>> data = RowData(fedkin.Federation({"a": ([[1.0], [2.0]], [1.0, 3.0])}), "linear")
    >>> sums = data.expand(data.zeros)
    >>> sums.gradient.tolist(), sums.hessian.tolist()
    ([[[-7.0]]], [[[[5.0]]]])
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

    @classmethod
    def from_rows(
        cls, federation: Federation, losses: Sequence[Loss], fold_of: Index, folds: int, at: Array | None = None
    ) -> Quadratics:
        """Sums of rows with a fold each; ``at`` is 0 by default."""
        p, v = losses[0].n_params(federation.n_features), federation.n_sites
        at = np.zeros((v, p)) if at is None else at
        # fold -1 is the last part
        cell = federation.site_index * (folds + 1) + fold_of % (folds + 1)
        count = np.bincount(cell, federation.weight, v * (folds + 1)).reshape(v, folds + 1)
        value, gradient, hessian = np.zeros((v, folds + 1)), np.zeros((v, folds + 1, p)), np.zeros(0)
        for k in (*range(folds), -1):
            seen = np.flatnonzero(count[:, k])
            if not seen.size:
                continue
            part = federation.take(fold_of == k, allow_empty=True)
            if seen.size < v:
                part = part.subset([federation.sites[u] for u in seen])
            lonely = np.zeros(seen.size, dtype=bool)
            terms = build_terms(part, [losses[u] for u in seen.tolist()], np.zeros(p), lonely)
            one = cls.from_terms(terms, count[seen, k], at[seen])
            if not hessian.size:
                hessian = np.zeros((v, folds + 1, *one.hessian.shape[2:]))
            value[seen, k], gradient[seen, k], hessian[seen, k] = one.value[:, 0], one.gradient[:, 0], one.hessian[:, 0]
        return cls(at, count, value, gradient, hessian)

    @property
    def folds(self) -> int:
        """Number of folds, without the part that always trains."""
        return int(self.count.shape[1]) - 1

    def take(self, sites: Index) -> Quadratics:
        """The sums of some sites, in that order."""
        return Quadratics(*(getattr(self, item.name)[sites] for item in fields(self)))

    def add(self, sites: Index, more: Quadratics) -> None:
        """Add the sums of more rows of some sites, in place."""
        for name in _SUMS:
            getattr(self, name)[sites] += getattr(more, name)

    def single_rows_train(self, single: NDArray[np.bool_]) -> None:
        """Move the rows of ``single`` sites ``(V,)`` to the part that always trains, in place."""
        for name in _SUMS:
            each = getattr(self, name)
            each[single, -1], each[single, :-1] = each[single].sum(axis=1), 0.0

    def pooled(self) -> Quadratics:
        """Sums over all sites, as one; every ``at`` is 0."""
        return Quadratics(self.at[:1], *(getattr(self, name).sum(axis=0, keepdims=True) for name in _SUMS))

    def total(self, without: int | None = None, *, forward: bool = False) -> Quadratics:
        """The sums over all rows (or all but those of one fold and, ``forward``, of later ones), as one part."""
        last = self.folds if without is None or not forward else without
        kept = [k for k in (*range(last), self.folds) if k != without]  # the last part always trains
        parts = (getattr(self, name)[:, kept] for name in ("count", "value", "gradient"))
        hessian = self.hessian[:, kept[:1]]
        for k in kept[1:]:  # one after another: of many coefficients they are large
            hessian += self.hessian[:, k : k + 1]
        count, value, gradient = (part.sum(axis=1, keepdims=True) for part in parts)
        return Quadratics(self.at, count, value, gradient, hessian)

    def map(self, A: Array, shift: Array | float = 0.0) -> Quadratics:
        """The sums as functions of ``phi``, where ``theta = A phi + shift``."""
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


class RowData(HasSites):
    """The rows of a federation with a loss for each site, as `SiteData`."""

    movable = True

    def __init__(self, federation: Federation, loss: LossLike) -> None:
        self.rows, self.losses = federation, resolve_losses(loss, federation)
        self.sites = federation.sites

    @property
    def loss(self) -> Loss:
        return self.losses[0]

    @property
    def names(self) -> tuple[str, ...]:
        return parameter_names(self.rows.feature_names, self.zeros.shape[1] // self.rows.n_features)

    @property
    def n(self) -> Index | Array:
        return self.rows.n_samples if self.rows.weight is None else self.rows.weight_sums

    @property
    def n_features(self) -> int:
        return self.rows.n_features

    @property
    def zeros(self) -> Array:
        """The parameters ``(V, p)`` that are all 0."""
        return np.zeros((self.n_sites, self.loss.n_params(self.rows.n_features)))

    def terms(self, ridge: Array, alone: Mask | None = None) -> SiteTerms:
        """The mean losses with a ridge, see `build_terms`."""
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
        """The losses ``(V,)`` at ``theta (V, p)``, sums over rows."""
        return self._terms.values(theta) * self.n

    def expand(self, theta: Array, folds: int = 1, seed: int = 0) -> Quadratics:
        if folds == 1:
            return Quadratics.from_terms(self._terms, self.n.astype(np.float64), theta)
        fold_of = assign_folds(self.rows, folds, seed)
        return Quadratics.from_rows(self.rows, self.losses, fold_of, folds, theta)


def assign_folds(federation: Federation, folds: int, seed: int) -> Index:
    """Fold ``(N,)`` of each row, cut within sites; -1 for the row of a site that has a single one: it trains."""
    sizes = zip(federation.sites, federation.n_samples.tolist(), strict=True)

    def dealt(site: Hashable, n: int) -> Index:
        if n < 2:
            return np.full(n, -1, dtype=np.int64)
        return block_folds(n, folds) if federation.ordered else deal_folds(site, n, folds, seed)

    return np.concatenate([dealt(site, n) for site, n in sizes])
