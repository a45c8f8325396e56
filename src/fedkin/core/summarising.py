"""Summarise sites' rows exactly, at once or in batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedkin._base import AnyArray, Array, Index, check_whole, count
from fedkin.core.local import local_fit
from fedkin.core.quadratics import Quadratics
from fedkin.core.sitedata import RowData, site_data
from fedkin.core.summaries import Summaries
from fedkin.core.summary import OwnEstimate, Query, Summary
from fedkin.data import INTERCEPT, Federation, Rows, grouped, stable_order
from fedkin.errors import DataError, ParameterError, missing_dependency
from fedkin.losses import LinearLoss, Loss, by_loss

#: Numbers that the outer products of a chunk of rows may take.
_CHUNK = 2**21
#: A gap is told where Newton's step moves no predictor by more than a half, to few digits.
_CLOSE, _GAP_DIGITS = 0.25, 3


def summarise(
    federation: Federation,
    loss: str | Loss = "linear",
    *,
    folds: int = 5,
    seed: int = 0,
    at: Array | None = None,
    rank: int | None = None,
) -> Summaries:
    """Summarise each site of a federation from its own rows.

    Parameters
    ----------
    federation : Federation
        Rows as they will be fitted, with a first column ``(intercept)`` (`Federation.with_intercept`) if the model has
        an intercept.
    loss : str or Loss
        The same for all sites.
    folds : int
        Number of folds for choosing ``lam``, at least 2; the same folds as in `Federation.folds`.
    seed : int
        Of the folds.
    at : array (V, p), optional
        Point at which to expand the losses; by default 0 for quadratic losses, otherwise the site's own estimate.
    rank : int, optional
        For models with many coefficients: send short summaries (`Summary.short`) of this rank.

    Returns
    -------
    Summaries
        ``summaries[site]`` is the summary of one site, identical to the one computed from its rows alone.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=4, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> summaries = summarise(design.federation)
    >>> summaries.n_sites, summaries.sums.hessian.shape
    (4, (4, 6, 3, 3))
    """
    data = site_data(federation, loss)
    one, own, scores = data.loss, None, None
    if len(by_loss(data.losses)) > 1:
        raise ParameterError("all sites need the same loss: give one loss for all")
    check_whole("folds", folds, least=2)
    check_whole("seed", seed, least=0)
    if not federation.n_samples.all():
        empty = federation.sites[int(np.flatnonzero(federation.n_samples == 0)[0])]
        raise DataError(f"site {empty!r} has no rows to summarise")
    if rank is not None:  # one site at a time: full summaries of many coefficients are large
        each = ((site, None if at is None else at[u : u + 1]) for u, site in enumerate(federation.sites))
        alone = ((summarise(federation.subset([u]), one, folds=folds, seed=seed, at=point), u) for u, point in each)
        return Summaries.stack(whole[site].short(rank) for whole, site in alone)
    if at is None:
        at = data.zeros
        if not one.quadratic:
            at, own = _own_estimates(federation, one)
    starts, weight, X = federation.starts[:-1], federation.weight, federation.X
    weighted = X if weight is None else X * weight[:, None]
    if one.location and one.quadratic:
        if one.parameter != 1:
            raise ParameterError("summaries of the mean loss need variance 1: use MeanLoss()")
        zero = RowData(federation.replaced(y=np.zeros(len(X))), LinearLoss())  # whose Hessian is x x'
        scores = zero.expand(data.zeros, folds, seed).hessian
    sums, squares = np.add.reduceat(weighted, starts, axis=0), np.add.reduceat(weighted * X, starts, axis=0)
    expanded, names = data.expand(at, folds, seed), federation.feature_names
    return Summaries(federation.sites, one, names, seed, expanded, sums, squares, scores=scores, own=own)


def site_summary(
    site: Hashable, rows: Rows, loss: Loss, *, feature_names: Sequence[str], folds: int = 5, seed: int = 0
) -> Summary:
    """Summarise one site from its prepared rows, as `summarise` does; `Summary.short` shortens the result."""
    return summarise(Federation({site: rows}, feature_names), loss, folds=folds, seed=seed)[site]


def site_answer(
    ask: Query, rows: Rows, loss: Loss, *, feature_names: Sequence[str], folds: int = 5, seed: int = 0
) -> Summary:
    """Return the summary of one site at the point of a query, with its Young gap at this point."""
    federation = Federation({ask.site: rows}, feature_names)
    p = loss.n_params(federation.n_features)
    if ask.theta.size != p:
        raise DataError(
            f"site {ask.site!r} was queried about {ask.theta.size} parameters, but its rows have {p}: the query "
            "belongs to another contract"
        )
    theta, balance = ask.theta[None], ask.balance[None]
    summary = summarise(federation, loss, folds=folds, seed=seed, at=theta)[ask.site]
    gap = float(RowData(federation, loss).terms(np.zeros(p)).young_gaps(theta, balance, ask.radius)[0])
    if not loss.quadratic and not _step_size(summary, balance[0], rows.X) <= _CLOSE:
        gap = np.inf
    # upwards, so that it stays a bound
    digits = 10.0 ** (_GAP_DIGITS - 1 - np.floor(np.log10(gap))) if 0.0 < gap < np.inf else 1.0
    return replace(summary, gap=max(float(np.ceil(gap * digits) / digits), 0.0))


def _step_size(summary: Summary, balance: Array, X: Array) -> float:
    """Return the sum of squared moves of the rows' predictors in Newton's step towards balance with a force."""
    # where a single row moves far, whether a gap is finite depends on it, in a direction that the force chooses
    gradient, hessian = (each.sum(axis=0) / summary.n_samples for each in (summary.gradient, summary.hessian))
    step = np.linalg.lstsq(hessian, gradient + balance, rcond=1e-12)[0]
    return float(((X @ step.reshape(-1, X.shape[1]).T) ** 2).sum())


def _own_estimates(federation: Federation, loss: Loss) -> tuple[Array, tuple[OwnEstimate, ...]]:
    theta, own = [], []
    for site in federation.sites:
        fit = local_fit(federation.subset([site]), loss)
        n, dispersion = int(fit.n_samples[0]), float(fit.dispersion[0])
        ridge = fit.prior_precision[0] * dispersion / n
        theta.append(fit.theta[0])
        own.append(OwnEstimate(ridge, dispersion, float(fit.residual_dof[0]), fit.notes.get(site, "")))
    return np.stack(theta), tuple(own)


class RunningSums:
    """Sums of ``w z z'`` with ``z = [1, x, y]`` by site and fold; each site's rows are assigned to folds in turn."""

    def __init__(self, n_features: int, folds: int) -> None:
        self.width, self.folds = n_features + 2, folds
        self.number: dict[Hashable, int] = {}
        self._gram = np.zeros((0, folds, self.width, self.width))
        self._rows = np.zeros(0, dtype=np.int64)

    @property
    def sites(self) -> tuple[Hashable, ...]:
        """Sites seen so far, in order of appearance."""
        return tuple(self.number)

    @property
    def whole(self) -> Array:
        """Sums ``(q + 2, q + 2)`` over all rows."""
        return np.asarray(self._gram.sum(axis=(0, 1)))

    @property
    def size(self) -> int:
        """Number of stored values."""
        return len(self.number) * self.folds * self.width**2

    def add(self, ids: Sequence[Hashable] | AnyArray, X: Array, y: Array, weight: Array | None = None) -> None:
        """Add rows ``X (n, q)``, ``y (n,)`` of the sites ``ids``; a row with weight w counts as w rows."""
        if not len(ids):
            return
        code = self._codes(ids)
        came = np.bincount(code, minlength=self._rows.size)
        by_site = stable_order(code, self._rows.size)
        turn = np.empty_like(code)  # number of earlier rows of the site
        turn[by_site] = np.arange(code.size) - np.repeat(np.cumsum(came) - came - self._rows, came)
        self._rows += came
        part = code * self.folds + turn % self.folds
        order = stable_order(part, self._rows.size * self.folds)
        Z = np.empty((len(y), self.width))
        Z[:, 0], Z[:, 1:-1], Z[:, -1] = 1.0, X, y
        Z = Z.take(order, axis=0)
        self._add_parts(part[order], Z, Z if weight is None else Z * weight[order, None])

    def _codes(self, ids: Sequence[Hashable] | AnyArray) -> Index:
        """Return the numbers of sites, extended by those that are new."""
        sites, code = grouped(ids)
        numbers = np.array([self.number.setdefault(one, len(self.number)) for one in sites], dtype=np.int64)
        have = len(self._rows)
        if len(self.number) > have:
            more = max(len(self.number), 2 * have) - have
            self._gram = np.concatenate([self._gram, np.zeros((more, *self._gram.shape[1:]))])
            self._rows = np.concatenate([self._rows, np.zeros(more, dtype=np.int64)])
        return np.asarray(numbers[code])

    def summaries(
        self, names: Sequence[str], keep: Index | None = None, *, intercept: bool = True, seed: int = 0
    ) -> Summaries:
        """Return the summaries of the features ``keep``, named ``names``, with an intercept first."""
        v = len(self.number)
        gram, rows = self._gram[:v], self._rows[:v]
        parts = np.concatenate([gram, np.zeros_like(gram[:, :1])], axis=1)
        single = rows == 1  # a single row is in no fold: it trains
        parts[single, -1], parts[single, :-1] = gram[single].sum(axis=1), 0.0
        kept = np.arange(self.width - 2) if keep is None else keep
        used = np.concatenate([np.arange(0 if intercept else 1, 1), kept + 1])
        total, weights = parts.sum(axis=1), parts[..., 0, 0]
        whole = np.rint(weights)
        counts = whole.astype(np.int64) if np.array_equal(whole, weights) else weights
        hessian = parts[..., used[:, None], used]
        folded = Quadratics(np.zeros((v, used.size)), counts, 0.5 * parts[..., -1, -1], -parts[..., used, -1], hessian)
        columns, sizes = (INTERCEPT, *names) if intercept else tuple(names), (total[:, 0, used], total[:, used, used])
        return Summaries(tuple(self.number), LinearLoss(), columns, seed, folded, *sizes)

    def merge(self, ids: Sequence[Hashable], rows: Index, sums: Array) -> None:
        """Add sums ``(n, folds, q + 2, q + 2)`` over ``rows (n,)`` rows of the sites ``ids``, each named once."""
        code = self._codes(ids)
        k = (np.arange(self.folds) - self._rows[code, None]) % self.folds  # a site's next row goes to the next fold
        self._gram[code] += sums[np.arange(len(code))[:, None], k]
        self._rows[code] += rows

    def parts(self) -> tuple[tuple[Hashable, ...], Index, Array]:
        """Return the sums in the form that `merge` accepts."""
        v = len(self.number)
        return self.sites, self._rows[:v], self._gram[:v]

    def _add_parts(self, part: Index, Z: Array, weighted: Array) -> None:
        flat = self._gram.reshape(-1, self.width, self.width)
        starts = np.flatnonzero(np.diff(part, prepend=-1))
        if part.size >= 8 * starts.size:
            for a, b in zip(starts.tolist(), [*starts[1:].tolist(), part.size], strict=True):
                flat[part[a]] += weighted[a:b].T @ Z[a:b]
            return
        step = max(1, _CHUNK // self.width**2)
        for a in range(0, part.size, step):  # many parts with few rows
            some = slice(a, a + step)
            np.add.at(flat, part[some], weighted[some, :, None] * Z[some, None, :])


def partial_sums(
    batch: Any,
    *,
    site: str,
    target: str,
    features: Sequence[str],
    weight: str | None = None,
    folds: int = 5,
) -> Any:
    """Sum a batch of rows for least squares, in any data engine; `merge_sums` combines the results.

    Parameters
    ----------
    batch : table
        A pyarrow table or record batch, a pandas or polars table, or a mapping {column: array}.
    site, target, weight : str
        Columns with sites, targets and row weights.
    features : sequence of str
        Numeric columns.
    folds : int
        Number of folds; each site's rows are assigned to them in turn.

    Returns
    -------
    pyarrow.Table
        One row per site of the batch: ``site``, ``rows``, and ``sums``, a list of ``folds (q + 2)^2`` numbers.

    Examples
    --------
    >>> import pyarrow
    >>> import fedkin
    >>> table = pyarrow.table({"clinic": ["a", "b", "a"], "age": [1.0, 2.0, 3.0], "days": [2.0, 4.0, 5.0]})
    >>> columns = {"site": "clinic", "target": "days", "features": ["age"]}
    >>> parts = [fedkin.partial_sums(batch, **columns) for batch in table.to_batches(max_chunksize=2)]
    >>> summaries = fedkin.merge_sums(parts, features=["age"])
    >>> summaries.sites, summaries.n_samples.tolist()
    (('a', 'b'), [2, 1])
    """
    try:
        import pyarrow
    except ImportError:
        raise missing_dependency("pyarrow", "sums of batches", extra="parquet") from None
    named = [*features, target, *([] if weight is None else [weight])]
    numbers = {name: np.asarray(batch[name], dtype=np.float64) for name in named}
    for name, values in numbers.items():
        if not np.isfinite(values).all():
            raise DataError(f"column {name!r} has missing or infinite values: drop these rows or impute them")
    ids = batch[site].to_pylist() if hasattr(batch[site], "to_pylist") else np.asarray(batch[site]).tolist()
    sums = RunningSums(len(features), folds)
    X = np.column_stack([np.empty((len(ids), 0)), *(numbers[name] for name in features)])
    sums.add(ids, X, numbers[target], None if weight is None else numbers[weight])
    sites, rows, gram = sums.parts()
    flat = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(gram.ravel()), folds * sums.width**2)
    lists = flat.cast(pyarrow.list_(pyarrow.float64()))
    return pyarrow.table({"site": pyarrow.array(sites), "rows": rows, "sums": lists})


def merge_sums(
    parts: Iterable[Any], *, features: Sequence[str], fit_intercept: bool = True, folds: int = 5
) -> Summaries:
    """Combine results of `partial_sums`, in any order and possibly concatenated, into summaries for `fit` and others.

    ``features`` and ``folds`` are those of `partial_sums`; ``fit_intercept`` puts a column of ones first.
    """
    total = RunningSums(len(features), folds)
    for part in parts:
        for batch in part.to_batches():
            sites, rows = batch["site"].to_pylist(), np.asarray(batch["rows"])
            flat = np.asarray(batch["sums"].flatten())
            if flat.size != len(sites) * folds * total.width**2:
                what = f"{count(len(features), 'feature')} in {count(folds, 'fold')}"
                raise DataError(f"the sums do not match {what}: name the same features and folds as in partial_sums")
            gram = flat.reshape(-1, folds, total.width, total.width)
            step = len(sites) if len(set(sites)) == len(sites) else 1  # a table may have several rows per site
            for k in range(0, len(sites), step):
                total.merge(sites[k : k + step], rows[k : k + step], gram[k : k + step])
    if not total.number:
        raise DataError("there are no sums to add")
    return total.summaries(tuple(features), intercept=fit_intercept)
