"""Sums over rows, fold by fold: what cross-validation and the summaries of sites are made of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from fedkin._base import Array, Index
from fedkin.core.build import build_terms
from fedkin.core.terms import QuadraticTerms
from fedkin.data import Federation, block_folds, deal_folds
from fedkin.losses import Loss


def assign_folds(federation: Federation, folds: int, seed: int) -> Index:
    """Fold ``(N,)`` of each row, cut within sites; -1 for the row of a site that has a single one: it trains."""
    sizes = zip(federation.sites, federation.n_samples.tolist(), strict=True)

    def dealt(site: Hashable, n: int) -> Index:
        if n < 2:
            return np.full(n, -1, dtype=np.int64)
        return block_folds(n, folds) if federation.ordered else deal_folds(site, n, folds, seed)

    return np.concatenate([dealt(site, n) for site, n in sizes])


@dataclass(frozen=True, eq=False)
class FoldSums:
    """Sums over the rows of V sites in K folds of the loss, its gradient and its Hessian at ``at (V, p)``.

    The last of ``K + 1`` parts are rows that always train (fold -1). ``count (V, K+1)``, sums of weights where rows
    have them; ``value (V, K+1)``; ``gradient (V, K+1, p)``; ``hessian (V, K+1, p, p)``, or ``(V, K+1)`` when all are
    multiples of the identity.
    """

    at: Array
    count: Index
    value: Array
    gradient: Array
    hessian: Array

    @classmethod
    def of_rows(
        cls, federation: Federation, losses: Sequence[Loss], fold_of: Index, folds: int, at: Array | None = None
    ) -> FoldSums:
        """The sums of rows with a fold each; ``at`` is 0 by default."""
        p, v = losses[0].n_params(federation.n_features), federation.n_sites
        zero, at = at is None, np.zeros((v, p)) if at is None else at
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
            n, point = count[seen, k], at[seen]
            if zero and isinstance(terms, QuadraticTerms):
                value[seen, k], gradient[seen, k] = n * terms.c, -n[:, None] * terms.b
            else:
                value[seen, k], gradient[seen, k] = n * terms.values(point), n[:, None] * terms.gradients(point)
            isotropic = isinstance(terms, QuadraticTerms) and terms.isotropic
            own = terms.A if isinstance(terms, QuadraticTerms) else terms.hessians(point)
            if own.ndim == 3:
                own = 0.5 * (own + np.swapaxes(own, 1, 2))  # messages hold one triangle
            if not hessian.size:
                hessian = np.zeros((v, folds + 1) if isotropic else (v, folds + 1, p, p))
            hessian[seen, k] = n.reshape(-1, *[1] * (own.ndim - 1)) * own
        return cls(at, count, value, gradient, hessian)

    @property
    def folds(self) -> int:
        """Number of folds K, without the part that always trains."""
        return int(self.count.shape[1]) - 1

    def take(self, sites: Index) -> FoldSums:
        """The sums of some sites, in that order."""
        return FoldSums(*(getattr(self, item.name)[sites] for item in fields(self)))

    def total(self, without: int | None = None, *, forward: bool = False) -> FoldSums:
        """The sums over all rows (or all but those of one fold and, ``forward``, of later ones), as one part."""
        last = self.folds if without is None or not forward else without
        kept = [k for k in (*range(last), self.folds) if k != without]  # the last part always trains
        parts = (getattr(self, name)[:, kept] for name in ("count", "value", "gradient"))
        hessian = self.hessian[:, kept[:1]]
        for k in kept[1:]:  # one after another: of many coefficients they are large
            hessian += self.hessian[:, k : k + 1]
        count, value, gradient = (part.sum(axis=1, keepdims=True) for part in parts)
        return FoldSums(self.at, count, value, gradient, hessian)

    def terms(self, part: int = 0, ridge: Array | None = None) -> QuadraticTerms:
        """Mean losses of one part as quadratics around ``at``, with ``sum_c ridge_c theta_c^2 / 2`` on each site.

        Every site has rows in that part. For quadratic losses the terms are exact everywhere.
        """
        n, at = self.count[:, part].astype(np.float64), self.at
        A = self.hessian[:, part] / n.reshape(-1, *[1] * (self.hessian.ndim - 2))
        g, value = self.gradient[:, part] / n[:, None], self.value[:, part] / n
        bend = A[:, None] * at if A.ndim == 1 else np.matmul(A, at[:, :, None])[:, :, 0]
        b, c = bend - g, value + ((0.5 * bend - g) * at).sum(axis=1)
        if ridge is not None and ridge.any():
            if A.ndim == 1 and (ridge == ridge[0]).all():
                return QuadraticTerms(A + ridge[0], b, c)
            A = (A[:, None, None] * np.eye(ridge.size) if A.ndim == 1 else A) + np.diag(ridge)
        return QuadraticTerms(A, b, c)
