"""What a site says: its summary, from its rows alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from fedkin._base import Array, Index, check_whole
from fedkin.core.build import build_terms, resolve_losses
from fedkin.core.local import local_fit
from fedkin.core.quadratics import Quadratics, assign_folds
from fedkin.core.summaries import Summaries
from fedkin.core.summary import OwnEstimate, Query, Summary
from fedkin.data import INTERCEPT, Federation, Rows
from fedkin.errors import DataError, ParameterError
from fedkin.losses import Loss, make_loss

#: Numbers that the outer products of a chunk of rows may take.
_CHUNK = 2**21


def summarise(
    federation: Federation,
    loss: str | Loss = "linear",
    *,
    folds: int = 5,
    seed: int = 0,
    at: Array | None = None,
    rank: int | None = None,
) -> Summaries:
    """The summary of every site of a federation, each from its own rows alone.

    Parameters
    ----------
    federation : Federation
        Rows as they are to be fitted: with a column ``(intercept)`` first (`Federation.with_intercept`) where the
        model has one.
    loss : str or Loss
        The same for all sites.
    folds : int
        Number of folds, at least 2, for the choice of ``lam``; they are those of `Federation.folds`.
    seed : int
        Of the folds.
    at : array (V, p), optional
        Where to expand the losses. By default 0 for quadratic losses, else the site's own estimate.
    rank : int, optional
        For many coefficients: a short message (`Summary.short`) with second derivatives as a diagonal plus this rank,
        summed over all rows instead of fold by fold. Exact where the rank is at least the number of rows, or of
        coefficients. By default everything.

    Returns
    -------
    Summaries
        ``summaries[site]`` is the summary of one site, the same that it makes of its rows alone.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=4, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> summaries = summarise(design.federation)
    >>> summaries.n_sites, summaries.sums.hessian.shape
    (4, (4, 6, 3, 3))
    """
    if not isinstance(federation, Federation):
        raise ParameterError(
            f"summarise takes a federation, got {type(federation).__name__}: for one site, federation.subset([site])"
        )
    check_whole("folds", folds, least=2)
    check_whole("seed", seed, least=0)
    if rank is not None:
        return Summaries.stack(_short(federation, loss, folds, seed, at, rank))
    if not federation.n_samples.all():
        empty = federation.sites[int(np.flatnonzero(federation.n_samples == 0)[0])]
        raise DataError(f"site {empty!r} has no rows to sum up")
    one = make_loss(loss, federation.y)
    losses = resolve_losses(one, federation)
    own = None
    if at is None and not one.quadratic:
        at, own = _own_estimates(federation, one)
    starts, weight = federation.starts[:-1], federation.weight
    weighted = federation.X if weight is None else federation.X * weight[:, None]
    sums = Quadratics.from_rows(federation, losses, assign_folds(federation, folds, seed), folds, at)
    return Summaries(
        federation.sites,
        one,
        federation.feature_names,
        seed,
        sums,
        np.add.reduceat(weighted, starts, axis=0),
        np.add.reduceat(weighted * federation.X, starts, axis=0),
        scores=_outer_products(federation, folds, seed) if one.location and one.quadratic else None,
        own=own,
    )


def _short(
    federation: Federation, loss: str | Loss, folds: int, seed: int, at: Array | None, rank: int
) -> Iterator[Summary]:
    """One site after another: whole summaries of many coefficients are large."""
    one = make_loss(loss, federation.y)
    for u, site in enumerate(federation.sites):
        point = None if at is None else at[u : u + 1]
        yield summarise(federation.subset([site]), one, folds=folds, seed=seed, at=point)[site].short(rank)


def site_summary(
    site: Hashable, rows: Rows, loss: Loss, *, feature_names: Sequence[str], folds: int = 5, seed: int = 0
) -> Summary:
    """The summary of one site from its prepared rows (as `summarise`); `Summary.short` makes it short."""
    return summarise(Federation({site: rows}, feature_names), loss, folds=folds, seed=seed)[site]


def site_answer(
    ask: Query, rows: Rows, loss: Loss, *, feature_names: Sequence[str], folds: int = 5, seed: int = 0
) -> Summary:
    """The summary of one site at the point that it was asked about, with its Young gap there.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.data import Rows
    >>> from fedkin.losses import LogisticLoss
    >>> from fedkin.core import Query
    >>> rows = Rows(np.ones((4, 1)), np.array([0.0, 1.0, 1.0, 1.0]))
    >>> best = Query("north", 2, np.log([3.0]), np.zeros(1))
    >>> answer = site_answer(best, rows, LogisticLoss(), feature_names=["(intercept)"], folds=2)
    >>> bool(abs(answer.gap) < 1e-12)  # without a pull, the logit of 3/4 is where the site wants to be
    True
    """
    federation = Federation({ask.site: rows}, feature_names)
    p = loss.n_params(federation.n_features)
    if ask.theta.size != p:
        raise DataError(
            f"site {ask.site!r} was asked about {ask.theta.size} parameters, but its rows have {p}: the question "
            "belongs to another contract"
        )
    theta, balance = ask.theta[None], ask.balance[None]
    summary = summarise(federation, loss, folds=folds, seed=seed, at=theta)[ask.site]
    terms = build_terms(federation, resolve_losses(loss, federation), np.zeros(p))
    return replace(summary, gap=max(float(terms.young_gaps(theta, balance, ask.radius)[0]), 0.0))


def _own_estimates(federation: Federation, loss: Loss) -> tuple[Array, tuple[OwnEstimate, ...]]:
    """Each site's estimate from its own rows, and how it was found."""
    theta, own = [], []
    for site in federation.sites:
        fit = local_fit(federation.subset([site]), loss)
        n, dispersion = int(fit.n_samples[0]), float(fit.dispersion[0])
        ridge = fit.prior_precision[0] * dispersion / n
        theta.append(fit.theta[0])
        own.append(OwnEstimate(ridge, dispersion, float(fit.residual_dof[0]), fit.notes.get(site, "")))
    return np.stack(theta), tuple(own)


def _outer_products(federation: Federation, folds: int, seed: int) -> Array:
    """Sums ``(V, K + 1, q, q)`` of the outer products of rows."""
    fold_of, q = assign_folds(federation, folds, seed), federation.n_features
    out = np.zeros((federation.n_sites, folds + 1, q, q))
    weighted = federation.X if federation.weight is None else federation.X * federation.weight[:, None]
    for u in range(federation.n_sites):
        own = slice(int(federation.starts[u]), int(federation.starts[u + 1]))
        X, fold = federation.X[own], fold_of[own]
        for k in np.unique(fold):
            out[u, k] = weighted[own][fold == k].T @ X[fold == k]
    return out


class RunningSums:
    """Sums of ``w z z'`` with ``z = [1, x, y]`` of each site and fold, for as many sites as come.

    Parameters
    ----------
    n_features : int
        Columns q of x.
    folds : int
        Number of folds; a site's rows go to them in turn, as they come.

    Examples
    --------
    >>> import numpy as np
    >>> sums = RunningSums(1, folds=2)
    >>> sums.add(["a", "a", "b"], np.array([[0.0], [1.0], [2.0]]), np.array([1.0, 3.0, 4.0]))
    >>> sums.add(["b"], np.array([[0.0]]), np.array([0.0]))
    >>> sums.summaries(["x"]).n_samples.tolist()
    [2, 2]
    """

    def __init__(self, n_features: int, folds: int) -> None:
        self.width, self.folds = n_features + 2, folds
        self.number: dict[Hashable, int] = {}
        self.weighted = False
        self._gram = np.zeros((0, folds, self.width, self.width))
        self._rows = np.zeros(0, dtype=np.int64)

    @property
    def sites(self) -> tuple[Hashable, ...]:
        """The sites so far, in the order in which they came."""
        return tuple(self.number)

    @property
    def whole(self) -> Array:
        """The sums ``(q + 2, q + 2)`` over all rows."""
        return np.asarray(self._gram.sum(axis=(0, 1)))

    @property
    def size(self) -> int:
        """Numbers that are kept."""
        return len(self.number) * self.folds * self.width**2

    def add(self, ids: Sequence[Hashable], X: Array, y: Array, weight: Array | None = None) -> None:
        """Add rows ``X (n, q)``, ``y (n,)`` of the sites ``ids``; a row of weight w counts as w rows."""
        if not len(ids):
            return
        self.weighted |= weight is not None
        Z = np.column_stack([np.ones(len(y)), X, y])
        code = np.fromiter((self.number.setdefault(one, len(self.number)) for one in ids), np.int64, len(ids))
        self._grow(len(self.number))
        order = np.argsort(code, kind="stable")
        code, Z = code[order], Z[order]
        weighted = Z if weight is None else Z * weight[order, None]
        first = np.flatnonzero(np.diff(code, prepend=-1))
        place = np.arange(code.size) - np.repeat(first, np.diff(first, append=code.size)) + self._rows[code]
        self._rows += np.bincount(code, minlength=self._rows.size)
        part = code * self.folds + place % self.folds
        order = np.argsort(part, kind="stable")
        self._add_parts(part[order], Z[order], weighted[order])

    def summaries(
        self, names: Sequence[str], keep: Index | None = None, *, intercept: bool = True, seed: int = 0
    ) -> Summaries:
        """What sites would say about these rows: of the features ``keep``, called ``names``, after an intercept."""
        v = len(self.number)
        gram, rows = self._gram[:v], self._rows[:v]
        parts = np.concatenate([gram, np.zeros_like(gram[:, :1])], axis=1)
        single = rows == 1  # a single row is in no fold: it trains
        parts[single, -1], parts[single, :-1] = gram[single].sum(axis=1), 0.0
        kept = np.arange(self.width - 2) if keep is None else keep
        used = np.concatenate([np.arange(0 if intercept else 1, 1), kept + 1])
        total, weights = parts.sum(axis=1), parts[..., 0, 0]
        counts = weights if self.weighted else np.rint(weights).astype(np.int64)
        hessian = parts[..., used[:, None], used]
        folded = Quadratics(np.zeros((v, used.size)), counts, 0.5 * parts[..., -1, -1], -parts[..., used, -1], hessian)
        return Summaries(
            self.sites,
            make_loss("linear", None),
            (*((INTERCEPT,) if intercept else ()), *names),
            seed,
            folded,
            total[:, 0, used],
            total[:, used, used],
        )

    def _add_parts(self, part: Index, Z: Array, weighted: Array) -> None:
        flat = self._gram.reshape(-1, self.width, self.width)
        starts = np.flatnonzero(np.diff(part, prepend=-1))
        if part.size >= 16 * starts.size:
            for a, b in zip(starts.tolist(), [*starts[1:].tolist(), part.size], strict=True):
                flat[part[a]] += weighted[a:b].T @ Z[a:b]
            return
        step = max(1, _CHUNK // self.width**2)
        for a in range(0, part.size, step):  # many parts with few rows
            some = slice(a, a + step)
            np.add.at(flat, part[some], weighted[some, :, None] * Z[some, None, :])

    def _grow(self, needed: int) -> None:
        have = self._gram.shape[0]
        if needed > have:
            more = max(needed, 2 * have) - have
            self._gram = np.concatenate([self._gram, np.zeros((more, *self._gram.shape[1:]))])
            self._rows = np.concatenate([self._rows, np.zeros(more, dtype=np.int64)])
