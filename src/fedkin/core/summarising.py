"""What sites share: summaries of rows, exact or with differential privacy, and sums that grow as rows come."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import ndtri

from fedkin._base import Array, Index, check_positive, check_whole, count
from fedkin.core.local import local_fit
from fedkin.core.quadratics import Quadratics
from fedkin.core.sitedata import RowData, assign_folds, site_data
from fedkin.core.summaries import Summaries
from fedkin.core.summary import OwnEstimate, Privacy, Query, Summary
from fedkin.data import INTERCEPT, Federation, Rows
from fedkin.errors import DataError, ParameterError, missing_dependency
from fedkin.losses import LinearLoss, Loss, by_loss

#: Numbers that the outer products of a chunk of rows may take.
_CHUNK = 2**21
_GRID_BITS = 20  # by which the grid of private sums is finer than their noise


def summarise(
    federation: Federation,
    loss: str | Loss = "linear",
    *,
    folds: int = 5,
    seed: int = 0,
    at: Array | None = None,
    rank: int | None = None,
) -> Summaries:
    """Return the summary of every site of a federation, each from its own rows alone.

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
    data = site_data(federation, loss)
    one, own, scores = data.loss, None, None
    if len(by_loss(data.losses)) > 1:
        raise ParameterError("sites sum up the same loss: name one for all")
    check_whole("folds", folds, least=2)
    check_whole("seed", seed, least=0)
    if not federation.n_samples.all():
        empty = federation.sites[int(np.flatnonzero(federation.n_samples == 0)[0])]
        raise DataError(f"site {empty!r} has no rows to sum up")
    if rank is not None:  # one site after another: whole summaries of many coefficients are large
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
            raise ParameterError("summaries of means are those of variance 1: take MeanLoss()")
        zero = RowData(federation.replaced(y=np.zeros(len(X))), LinearLoss())  # whose Hessian is x x'
        scores = zero.expand(data.zeros, folds, seed).hessian
    sums, squares = np.add.reduceat(weighted, starts, axis=0), np.add.reduceat(weighted * X, starts, axis=0)
    expanded, names = data.expand(at, folds, seed), federation.feature_names
    return Summaries(federation.sites, one, names, seed, expanded, sums, squares, scores=scores, own=own)


def site_summary(
    site: Hashable, rows: Rows, loss: Loss, *, feature_names: Sequence[str], folds: int = 5, seed: int = 0
) -> Summary:
    """Return the summary of one site from its prepared rows (as `summarise`); `Summary.short` makes it short."""
    return summarise(Federation({site: rows}, feature_names), loss, folds=folds, seed=seed)[site]


def site_answer(
    ask: Query, rows: Rows, loss: Loss, *, feature_names: Sequence[str], folds: int = 5, seed: int = 0
) -> Summary:
    """Return the summary of one site at the point that it was asked about, with its Young gap there."""
    federation = Federation({ask.site: rows}, feature_names)
    p = loss.n_params(federation.n_features)
    if ask.theta.size != p:
        raise DataError(
            f"site {ask.site!r} was asked about {ask.theta.size} parameters, but its rows have {p}: the question "
            "belongs to another contract"
        )
    theta, balance = ask.theta[None], ask.balance[None]
    summary = summarise(federation, loss, folds=folds, seed=seed, at=theta)[ask.site]
    gaps = RowData(federation, loss).terms(np.zeros(p)).young_gaps(theta, balance, ask.radius)
    return replace(summary, gap=max(float(gaps[0]), 0.0))


def _own_estimates(federation: Federation, loss: Loss) -> tuple[Array, tuple[OwnEstimate, ...]]:
    """Return each site's estimate from its own rows, and how it was found."""
    theta, own = [], []
    for site in federation.sites:
        fit = local_fit(federation.subset([site]), loss)
        n, dispersion = int(fit.n_samples[0]), float(fit.dispersion[0])
        ridge = fit.prior_precision[0] * dispersion / n
        theta.append(fit.theta[0])
        own.append(OwnEstimate(ridge, dispersion, float(fit.residual_dof[0]), fit.notes.get(site, "")))
    return np.stack(theta), tuple(own)


class RunningSums:
    """Sums of ``w z z'`` with ``z = [1, x, y]`` of each site and fold; a site's rows go to the folds in turn."""

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
        code = self._codes(ids)
        came = np.bincount(code, minlength=self._rows.size)
        by_site = np.argsort(code, kind="stable")
        turn = np.empty_like(code)  # how many rows of the site came before
        turn[by_site] = np.arange(code.size) - np.repeat(np.cumsum(came) - came - self._rows, came)
        self._rows += came
        part = code * self.folds + turn % self.folds
        order = np.argsort(part, kind="stable")
        Z = Z[order]
        self._add_parts(part[order], Z, Z if weight is None else Z * weight[order, None])

    def _codes(self, ids: Sequence[Hashable]) -> Index:
        """Return the numbers of sites, extended by those that are new."""
        for one in dict.fromkeys(ids):
            self.number.setdefault(one, len(self.number))
        have = len(self._rows)
        if len(self.number) > have:
            more = max(len(self.number), 2 * have) - have
            self._gram = np.concatenate([self._gram, np.zeros((more, *self._gram.shape[1:]))])
            self._rows = np.concatenate([self._rows, np.zeros(more, dtype=np.int64)])
        return np.fromiter(map(self.number.__getitem__, ids), np.int64, len(ids))

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
        columns, sizes = (INTERCEPT, *names) if intercept else tuple(names), (total[:, 0, used], total[:, used, used])
        return Summaries(tuple(self.number), LinearLoss(), columns, seed, folded, *sizes)

    def merge(self, ids: Sequence[Hashable], rows: Index, sums: Array) -> None:
        """Add sums ``(n, folds, q + 2, q + 2)`` over ``rows (n,)`` rows of the sites ``ids``, each named once."""
        code = self._codes(ids)
        k = (np.arange(self.folds) - self._rows[code, None]) % self.folds  # a site's next row goes to the next fold
        self._gram[code] += sums[np.arange(len(code))[:, None], k]
        self._rows[code] += rows

    def parts(self) -> tuple[tuple[Hashable, ...], Index, Array]:
        """Return what `merge` takes."""
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
    """Sum up some rows for least squares, wherever they are: a task of any engine. `merge_sums` adds the results.

    Parameters
    ----------
    batch : table
        A pyarrow table or record batch, a pandas or polars table, or a mapping {column: array}.
    site, target, weight : str
        Columns of sites, of targets, and of weights of rows.
    features : sequence of str
        Columns of numbers.
    folds : int
        A site's rows go to so many folds in turn.

    Returns
    -------
    pyarrow.Table
        A line for each site of the batch: ``site``, ``rows``, and ``sums``, a list of ``folds (q + 2)^2`` numbers.

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
            raise DataError(f"column {name!r} has missing or infinite cells: drop these rows, or fill them in")
    ids = batch[site].to_pylist() if hasattr(batch[site], "to_pylist") else np.asarray(batch[site]).tolist()
    sums = RunningSums(len(features), folds)
    X = np.column_stack([np.empty((len(ids), 0)), *(numbers[name] for name in features)])
    sums.add(ids, X, numbers[target], None if weight is None else numbers[weight])
    sites, rows, gram = sums.parts()
    flat = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(gram.ravel()), folds * sums.width**2)
    lists = flat.cast(pyarrow.list_(pyarrow.float64()))
    return pyarrow.table({"site": pyarrow.array(sites), "rows": rows, "sums": lists})


def merge_sums(
    parts: Iterable[Any], *, features: Sequence[str], fit_intercept: bool = True, folds: int = 5, weighted: bool = False
) -> Summaries:
    """Add the results of `partial_sums`; the summaries take the place of rows in `fit`, `find_kin` and `Problem`.

    Parameters
    ----------
    parts : iterable of tables
        What `partial_sums` returned, in any order, also several of them in one table.
    features, folds
        As for `partial_sums`.
    fit_intercept : bool
        Whether to put a column of ones first.
    weighted : bool
        Whether rows had weights.

    Returns
    -------
    Summaries
    """
    total = RunningSums(len(features), folds)
    total.weighted = weighted
    for part in parts:
        for batch in part.to_batches():
            sites, rows = batch["site"].to_pylist(), np.asarray(batch["rows"])
            flat = np.asarray(batch["sums"].flatten())
            if flat.size != len(sites) * folds * total.width**2:
                what = f"{count(len(features), 'feature')} in {count(folds, 'fold')}"
                raise DataError(
                    f"the sums are not those of {what}: name the same features and folds as in partial_sums"
                )
            gram = flat.reshape(-1, folds, total.width, total.width)
            step = len(sites) if len(set(sites)) == len(sites) else 1  # a table may have several lines of a site
            for k in range(0, len(sites), step):
                total.merge(sites[k : k + step], rows[k : k + step], gram[k : k + step])
    if not total.number:
        raise DataError("there are no sums to add")
    return total.summaries(tuple(features), intercept=fit_intercept)


# --- with noise ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """What is to be promised, and within which bounds rows are.

    Replacing a row changes the probability of any message by a factor of at most ``exp(epsilon)``, except with
    probability ``delta``; a delta well below 1 / n is usual. ``limits`` are bounds on the absolute values of the q
    columns (by default 1), from the contract's ranges and never from the rows; larger values are cut. ``target_limit``
    is that of the target (less the offset). ``bound`` is an L2 bound on a row in units of its limits, constant and
    target included; longer rows are shortened. The default ``sqrt(q + 1)`` shortens none; a smaller one means less
    noise, and some bias.
    """

    epsilon: float
    delta: float = 1e-5
    limits: Sequence[float] | None = None
    target_limit: float = 1.0
    bound: float | None = None

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)
        check_positive("target_limit", self.target_limit)
        if not 0 < self.delta < 1:
            raise ParameterError(f"delta must lie between 0 and 1, got {self.delta!r}")
        if self.bound is not None:
            check_positive("bound", self.bound)


def private_summary(
    site: Hashable,
    rows: Rows,
    loss: Loss,
    budget: Budget,
    *,
    feature_names: Sequence[str],
    folds: int = 5,
    seed: int = 0,
    by_fold: bool = True,
    rng: np.random.Generator | None = None,
) -> Summary:
    """Return the summary of one site with noise, so that nobody can tell whether any row was replaced by another."""
    if not loss.quadratic:
        raise ParameterError(
            f"noise is for the sums of the linear and the mean loss; the {loss.name} loss takes several messages, each "
            "of which would need its share of epsilon"
        )
    location, federation = loss.location, Federation({site: rows}, feature_names)
    limits = _limits(budget.limits, federation.n_features, 1.0 if location else budget.target_limit)
    Z, constant = _clipped_entries(federation, limits, location), _constant(federation, location)
    longest = float(np.sqrt(Z.shape[1])) if budget.bound is None else budget.bound
    Z = _shortened(Z, longest, constant)
    sensitivity = np.sqrt(max((longest**4 + longest**2) / 2 - (constant is not None), 1e-12))
    noise = float(noise_multiplier(budget.epsilon, budget.delta) * sensitivity)
    fold_of = assign_folds(federation, folds, seed) if by_fold else np.full(len(Z), -1)
    normals = secure_normals if rng is None else rng.standard_normal
    count, sums = np.zeros(folds + 1, dtype=np.int64), np.zeros((folds + 1, Z.shape[1], Z.shape[1]))
    upper, grid = np.triu_indices(Z.shape[1]), 2.0 ** (np.floor(np.log2(noise)) - _GRID_BITS)
    for fold in np.unique(fold_of):
        own, drawn = Z[fold_of == fold], np.zeros_like(sums[0])
        drawn[upper] = noise * normals(upper[0].size)
        # on a grid: the last bits of a float would tell what the noise was added to
        count[fold], sums[fold] = len(own), np.round((own.T @ own + drawn + np.triu(drawn, 1).T) / grid) * grid
        if constant is not None:
            sums[fold, constant, constant] = len(own)
    sums = 0.5 * (sums + np.swapaxes(sums, 1, 2)) * np.outer(limits, limits)
    # everything else follows from sums of products
    names, last, second = federation.feature_names, sums[:, :-1, -1], sums[:, :-1, :-1]
    whole = second.sum(axis=0)
    if location:
        value, hessian, column_sums = 0.5 * np.einsum("kpp->k", second), count.astype(np.float64), last.sum(axis=0)
    else:
        value, hessian = 0.5 * sums[:, -1, -1], second
        column_sums = whole[0] if names[0] == INTERCEPT else np.zeros(len(names))
    head, folded = (site, loss, names, seed, np.zeros(len(names))), (count, value, -last, hessian)
    scores, squares = second if location else None, np.diagonal(whole).copy()
    privacy = Privacy(budget.epsilon, budget.delta, longest, limits, noise)
    return Summary(*head, *folded, column_sums, squares, scores, privacy=privacy)


def secure_normals(size: int) -> Array:
    """Draw standard normal numbers from the operating system's cryptographic source."""
    bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(11)
    return np.asarray(ndtri((bits.astype(np.float64) + 0.5) * 2.0**-53))


@lru_cache(maxsize=32)
def noise_multiplier(epsilon: float, delta: float) -> float:
    """Standard deviation of the noise in units of the length of a row's part, when rows may be replaced."""
    _accountant()
    import dp_accounting

    return float(dp_accounting.calibrate_dp_mechanism(_accountant, dp_accounting.GaussianDpEvent, epsilon, delta))


def _accountant() -> Any:
    """Return an accountant of messages about rows of which one may be replaced."""
    try:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
    except ImportError:
        raise missing_dependency("dp-accounting", "differential privacy", "privacy") from None
    return PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)


def composed_epsilon(messages: Sequence[tuple[float, float]]) -> float:
    """Return the epsilon of several messages of `private_summary` together, at the largest of their deltas.

    Each has its ``(epsilon, delta)``, for which its noise is calibrated.
    """
    accountant = _accountant()
    import dp_accounting

    for epsilon, delta in messages:
        accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier(epsilon, delta)))
    return float(accountant.get_epsilon(max(delta for _, delta in messages)))


def _limits(limits: Sequence[float] | None, q: int, target: float) -> Array:
    given = np.ones(q) if limits is None else np.asarray(limits, dtype=np.float64)
    if given.shape != (q,) or not (np.isfinite(given) & (given > 0)).all():
        raise ParameterError(f"limits must be {q} positive numbers, one for each column, got {limits!r}")
    return np.append(given, target)


def _clipped_entries(federation: Federation, limits: Array, location: bool) -> Array:
    """Rows ``(n, q + 1)`` in units of their limits, cut to [-1, 1]: columns and target, or columns and a constant."""
    if location:
        last = np.ones(len(federation.X))
    else:
        assert federation.y is not None
        last = federation.y if federation.offset is None else federation.y - federation.offset
    Z = np.column_stack([federation.X, last]) / limits
    if not np.isfinite(Z).all():
        raise DataError("rows have a number that is not finite")
    return np.clip(Z, -1.0, 1.0)


def _constant(federation: Federation, location: bool) -> int | None:
    """Return the column that is 1 in every row, which tells nothing."""
    if location:
        return federation.n_features
    if federation.feature_names[0] != INTERCEPT:
        return None
    if not (federation.X[:, 0] == 1).all():
        raise DataError("the column (intercept) is not 1 in every row")
    return 0


def _shortened(Z: Array, bound: float, constant: int | None) -> Array:
    """Rows of length at most ``bound``; a constant stays 1."""
    free = np.ones(Z.shape[1], dtype=bool)
    room = bound
    if constant is not None:
        free[constant] = False
        room = float(np.sqrt(max(bound**2 - 1.0, 0.0)))
        if not room > 0:
            raise ParameterError(f"bound must be greater than 1, the length of the constant alone, got {bound:g}")
    length = np.sqrt((Z[:, free] ** 2).sum(axis=1))
    out = Z.copy()
    out[:, free] *= np.minimum(1.0, room / np.maximum(length, 1e-300))[:, None]
    return out
