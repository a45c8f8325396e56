"""Parts of a fitted model besides its coefficients: certificates, baseline hazards and boosting; scores of survival."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from fedkin._base import Array, Index
from fedkin.data import Federation
from fedkin.errors import DataError, ModelFileError, ParameterError, argument, missing_dependency
from fedkin.losses import LOSSES, Loss

#: Times at which the Brier score is integrated, and the quantiles of all times of events between which they lie.
_GRID, _FIRST, _LAST = 50, 0.1, 0.9


@dataclass(frozen=True, eq=False)
class Baselines:
    """Cumulative hazards of V sites for a row with the features ``at``: steps at the times of events.

    Attributes
    ----------
    at : array (q,)
        The features of the row, by default the means of all rows.
    times : tuple of V arrays (K_u,)
        Ascending; the last one is the site's last time, of an event or censored.
    hazards : tuple of V arrays (K_u,)
        Cumulative hazard up to each time (Breslow's estimate, ties by Efron's method).
    """

    at: Array
    times: tuple[Array, ...]
    hazards: tuple[Array, ...]

    @classmethod
    def from_rows(cls, loss: Loss, theta: Array, rows: Federation, at: Array | None = None) -> Baselines:
        """Return the baselines that the rows of V sites have, given ``theta (V, q)``."""
        centre = rows.X.mean(axis=0) if at is None else at
        parts = [rows[site] for site in rows.sites]
        found = [
            loss.cumulative_hazard(own, part.X - centre, part.y, part.offset)
            for own, part in zip(theta, parts, strict=True)
        ]
        return cls(centre, tuple(times for times, _ in found), tuple(hazard for _, hazard in found))

    def take(self, sites: Iterable[int]) -> Baselines:
        """Return the baselines of some sites, by number."""
        chosen = list(sites)
        return Baselines(self.at, tuple(self.times[u] for u in chosen), tuple(self.hazards[u] for u in chosen))

    def pooled(self) -> Baselines:
        """Return the baseline of a new site: at every time, the mean hazard of the sites that still observe rows.

        Every site counts alike, as in the mean of their coefficients.
        """
        moments = np.unique(np.concatenate(self.times))
        steps, observed = np.zeros(len(moments)), np.zeros(len(moments))
        for times, hazard in zip(self.times, self.hazards, strict=True):
            steps[np.searchsorted(moments, times)] += np.diff(hazard, prepend=0.0)
            observed += moments <= times[-1]
        return Baselines(self.at, (moments,), (np.cumsum(steps / observed),))

    def cumulative(self, u: int, times: Array) -> Array:
        """Return the cumulative hazard ``(T,)`` of site number u at ``times (T,)``; it stays after the site's last."""
        return step_values(self.times[u], self.hazards[u], times, 0.0)

    def plain(self) -> dict[str, Any]:
        """Return the baselines as JSON can hold them."""
        sites = [{"time": t, "hazard": h} for t, h in zip(self.times, self.hazards, strict=True)]
        return {"at": self.at, "sites": sites}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Baselines:
        """Read what `plain` returned."""
        try:
            arrays = [[np.array(one[name], dtype=np.float64) for one in plain["sites"]] for name in ("time", "hazard")]
            made = cls(np.array(plain["at"], dtype=np.float64), *map(tuple, arrays))
            good = all(len(t) == len(h) > 0 for t, h in zip(made.times, made.hazards, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"the baseline hazards cannot be read: {error}") from None
        if not good:
            raise ModelFileError("the baseline hazards do not hold together")
        return made


def step_values(at: Array, values: Array, times: Array, before: float) -> Array:
    """Return a function that steps to ``values (K,)`` at the times ``at (K,)``, at ``times (T,)``."""
    return np.append(before, values)[np.searchsorted(at, times, side="right")]


# --- targets ------------------------------------------------------------------------------------------------------


def survival_target(y: ArrayLike) -> Array:
    """Return times ``(n,)`` with a minus sign where they are censored.

    Parameters
    ----------
    y : structured array (n,), or array (n, 2)
        As in scikit-survival, with a boolean field of events and a field of times; or columns of events (0 or 1) and
        times.

    Examples
    --------
    >>> survival_target([(True, 2.0), (False, 3.0)]).tolist()
    [2.0, -3.0]
    """
    raw: NDArray[Any] = np.asarray(y)
    if raw.dtype.names is not None:
        kinds = {name: raw.dtype[name].kind for name in raw.dtype.names}
        events, times = ([n for n, k in kinds.items() if (k == "b") == wanted] for wanted in (True, False))
        if raw.ndim != 1 or len(events) != 1 or len(times) != 1 or kinds[times[0]] not in "fiu":
            raise DataError(f"y needs a boolean field of events and a numeric field of times, got {raw.dtype}")
        event, time = raw[events[0]], raw[times[0]].astype(np.float64)
    elif raw.ndim == 2 and raw.shape[1] == 2 and raw.dtype.kind in "biuf":
        event, time = raw[:, 0], raw[:, 1].astype(np.float64)
        if wrong := [one for one in np.unique(event).tolist() if one not in (0, 1)]:
            raise DataError(f"the first column of y is 1 for an event and 0 for a censored time, got {wrong[0]:g}")
    else:
        raise DataError(
            "y must be a structured array with a boolean field of events and a field of times, or an array (n, 2) of "
            f"events and times, got {raw.dtype} of shape {raw.shape}"
        )
    if (bad := ~(np.isfinite(time) & (time > 0))).any():
        row = int(np.argmax(bad))
        raise DataError(f"row {row}: the time is {time[row]:g}, expected a number above 0")
    return np.where(event.astype(bool), time, -time)


# --- scores -------------------------------------------------------------------------------------------------------


class Concordance(NamedTuple):
    """How often, of two rows of a site, the one with the higher risk has the earlier event."""

    each: Array  # (V,), of every site; NaN where no two rows can be compared
    pairs: Array  # (V,), pairs of rows that can be compared

    @property
    def pooled(self) -> float:
        """The share over the pairs of all sites."""
        known = self.pairs > 0
        return float(np.average(self.each[known], weights=self.pairs[known])) if known.any() else float("nan")


def site_concordances(y: Array, risk: Array, starts: Index) -> Concordance:
    """Return Harrell's concordance of rows at each site, from signed times ``y (n,)`` and ``risk (n,)``.

    A row with an event is compared with all rows of later times, and with those censored at the same time. Equal risks
    count as one half.
    """
    each, pairs = np.full(len(starts) - 1, np.nan), np.zeros(len(starts) - 1)
    for u, (first, last) in enumerate(pairwise(starts.tolist())):
        time, event, own = np.abs(y[first:last]), y[first:last] > 0, risk[first:last]
        good = 0.0
        for row in np.flatnonzero(event).tolist():
            others = own[(time > time[row]) | ((time == time[row]) & ~event)]
            good += float((others < own[row]).sum() + 0.5 * (others == own[row]).sum())
            pairs[u] += len(others)
        if pairs[u]:
            each[u] = good / pairs[u]
    return Concordance(each, pairs)


def brier_times(train: Array, test: Array) -> Array:
    """Return times ``(T,)`` between quantiles of the events, within what training and held-out rows observe."""
    events = np.concatenate([train, test])
    events = events[events > 0]
    if not events.size:
        return np.empty(0)
    low, high = np.quantile(events, (_FIRST, _LAST))
    return np.unique(np.linspace(low, min(high, np.abs(train).max(), np.abs(test).max()), _GRID))


def integrated_brier(train: Array, test: Array, survival: Array, times: Array, starts: tuple[Index, Index]) -> float:
    """Return the Brier score of ``survival (n, T)`` at ``times (T,)``, averaged over them.

    Rows count by the inverse probability of being observed (Graf et al. 1999), by the Kaplan-Meier estimate of each
    site's censoring in its training rows; ``starts`` are those of sites in training and test. Rows whose censoring time
    no training row of the site reaches have no weight.
    """
    score, mass = np.zeros(len(times)), np.zeros(len(times))
    for (a, b), (first, last) in zip(*(pairwise(one.tolist()) for one in starts), strict=True):
        if first == last:
            continue
        kept_at, kept = _uncensored(train[a:b])
        y, curves = test[first:last], survival[first:last]
        time, event = np.abs(y), y > 0
        at_own = step_values(kept_at, kept, np.nextafter(time, 0.0), 1.0)[:, None]  # just before
        dead, alive = event[:, None] & (time[:, None] <= times), time[:, None] > times
        chance = np.where(dead, at_own, step_values(kept_at, kept, times, 1.0))
        weight = np.divide(dead | alive, chance, out=np.zeros_like(chance), where=chance > 0)
        score += (weight * (alive - curves) ** 2).sum(axis=0)
        mass += len(y)
    return float(np.trapezoid(score / mass, times) / (times[-1] - times[0]))


def _uncensored(y: Array) -> tuple[Array, Array]:
    """Return times and the Kaplan-Meier estimate of not being censored up to each; events come first at a tie."""
    moments, at = np.unique(np.abs(y), return_inverse=True)
    gone, lost = np.bincount(at), np.bincount(at, weights=y < 0)
    left = len(y) - np.cumsum(gone) + lost  # at risk of being censored: later rows, and those censored now
    return moments, np.cumprod(1.0 - np.divide(lost, left, out=np.zeros(len(left)), where=left > 0))


# --- boosting: a column for what is not linear ----------------------------------------------------------------------

# The cross-fitted prediction of a boosting model of all rows is one more column. The sites are no feature of it. Its
# five parts are fitted to four of five folds each, and every row gets the prediction, on the scale of the linear
# predictor, of the part that has not seen it; new rows get the mean of the five.

#: The name of the column.
BOOSTING = "(boosting)"
#: Parts, and so folds of the rows.
PARTS = 5
_LEAST_ROWS = 100
#: Trees are added until the mean error of the folds has not fallen for so many.
_MOST_TREES, _PATIENCE = 400, 20
_TREES = {"learning_rate": 0.1, "num_leaves": 15, "min_data_in_leaf": 20, "max_bin": 63}
_TREES |= {"num_threads": 1, "deterministic": True, "force_col_wise": True, "verbosity": -1}


#: What a tree has for each split, and for each leaf; LightGBM's parser reads them without looking.
_CHILDREN = ("split_feature", "split_gain", "threshold", "decision_type", "left_child", "right_child")
_PER_SPLIT = (*_CHILDREN, "internal_value", "internal_weight", "internal_count")
_PER_LEAF = ("leaf_value", "leaf_weight", "leaf_count")
_SINGLE = ("Tree", "num_leaves", "num_cat", "is_linear", "shrinkage")
_MOST_LEAVES = 1_000


def check_boosting(text: str, n_features: int) -> None:
    """Raise `ValueError` unless a text is that of trees: LightGBM's parser crashes on others, and may read anywhere."""
    head, _, rest = text.partition("\n\n")
    about = dict(line.partition("=")[::2] for line in head.splitlines()[1:])
    if [about.get(key) for key in ("num_class", "num_tree_per_iteration")] != ["1", "1"]:
        raise ValueError("it is not a model of one number")
    if about.get("max_feature_idx") != str(n_features - 1):
        raise ValueError(f"it is not of {n_features} columns")
    at, sizes = 0, [int(size) for size in about.get("tree_sizes", "").split()]
    for k, size in enumerate(sizes):
        if size <= 0 or not rest.startswith(f"Tree={k}\n", at):
            raise ValueError(f"tree {k} is not where it should be")
        _check_tree(dict(line.partition("=")[::2] for line in rest[at : at + size].split("\n") if line), n_features)
        at += size
    if not sizes or not text.isascii() or not rest.startswith("end of trees\n", at):
        raise ValueError("its trees do not end where they should")


def _check_tree(entries: dict[str, str], n_features: int) -> None:
    if set(entries) - {*_PER_SPLIT, *_PER_LEAF, *_SINGLE}:
        raise ValueError("a tree has unknown entries")
    leaves = int(entries.get("num_leaves", ""))
    if not 1 <= leaves <= _MOST_LEAVES or [entries.get(key) for key in ("num_cat", "is_linear")] != ["0", "0"]:
        raise ValueError("a tree has another form than Fedkin's")
    numbers = {key: np.array(entries.get(key, "").split(), dtype=np.float64) for key in (*_PER_SPLIT, *_PER_LEAF)}
    sizes = {key: leaves - 1 if key in _PER_SPLIT else leaves for key in numbers}
    if leaves == 1:
        sizes = {"leaf_value": 1}
    if any(numbers[key].size != size or np.isnan(numbers[key]).any() for key, size in sizes.items()):
        raise ValueError("a tree has too few or too many numbers")
    split, left, right = (numbers[key] for key in ("split_feature", "left_child", "right_child"))
    children = np.sort(np.concatenate([left, right]))
    if leaves > 1 and not (
        np.array_equal(children, np.delete(np.arange(-leaves, leaves - 1), leaves))  # every node but the first once
        and np.isin(split, np.arange(n_features)).all()
        and np.isin(numbers["decision_type"], np.arange(0, 16, 2)).all()
        and all((child[child >= 0] > np.flatnonzero(child >= 0)).all() for child in (left, right))
    ):
        raise ValueError("the splits of a tree do not make one")


@dataclass(frozen=True)
class Boosting:
    """A boosting model in LightGBM's text format, a text for each part; LightGBM reads them when it is to predict."""

    texts: tuple[str, ...]

    @cached_property
    def _parts(self) -> list[Any]:
        lightgbm = _lightgbm("predicting by this model")
        try:
            return [lightgbm.Booster(model_str=text) for text in self.texts]
        except lightgbm.basic.LightGBMError as error:
            raise ModelFileError(f"LightGBM cannot read the boosting model ({error}); fit it again") from None

    def predict(self, X: Array) -> Array:
        """Return the mean prediction of the parts ``(n,)``, on the scale of the linear predictor."""
        if not len(X):
            return np.zeros(0)
        return np.asarray(np.mean([part.predict(X, raw_score=True) for part in self._parts], axis=0))


def fit_boosting(rows: Federation, loss: Loss, seed: int) -> tuple[Boosting, Array]:
    """Fit a boosting model to all rows, and return it with the prediction for every row ``(N,)`` without that row."""
    if loss.boosting is None:
        known = " or ".join(one.name for one in LOSSES.values() if one.boosting is not None)
        raise ParameterError(f"{argument('boost')} is for the loss {known}, not for {loss.name}: leave it out")
    if len(rows.X) < _LEAST_ROWS:
        raise DataError(f"{argument('boost')} needs {_LEAST_ROWS} rows, got {len(rows.X)}: leave it out")
    lightgbm, fold = _lightgbm(f"{argument('boost')}"), rows.folds(PARTS, seed)
    assert rows.y is not None
    y, start = rows.y.astype(np.float64), rows.offset
    if start is not None and loss.quadratic:
        y, start = y - start, None
    elif start is not None:
        start = start + np.log(max(y.sum(), 0.5) / np.exp(start).sum()) if loss.link == "log" else start
    folds = [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(PARTS) if (fold == k).any()]
    about = {"objective": loss.boosting, "seed": seed, **_TREES}
    data = lightgbm.Dataset(rows.X, y, weight=rows.weight, init_score=start, free_raw_data=False)
    stop = lightgbm.early_stopping(_PATIENCE, verbose=False)
    found = lightgbm.cv(about, data, _MOST_TREES, folds=folds, return_cvbooster=True, callbacks=[stop])["cvbooster"]
    made = Boosting(tuple(part.model_to_string(num_iteration=found.best_iteration) for part in found.boosters))
    column = np.empty(len(rows.X))
    for part, (_, out) in zip(made._parts, folds, strict=True):
        column[out] = part.predict(rows.X[out], raw_score=True)
    return made, column


def _lightgbm(purpose: str) -> Any:
    try:
        import lightgbm
    except ImportError:
        raise missing_dependency("lightgbm", purpose, extra="boost") from None
    return lightgbm


@dataclass(frozen=True)
class FusedFit:
    """How the fused estimator was fitted.

    Attributes
    ----------
    penalty : str
    lam : float
        On the scale of the objective; with ``standardize`` it refers to standardised features.
    gap : float
        Relative duality gap: how far the objective can be from its minimum. NaN where nothing is certified.
    n_iter : int
        Iterations, or rounds.
    status : "converged" | "iteration_limit" | "interrupted"
    selection : mapping or None
        Summary of the edge selection.
    """

    penalty: str
    lam: float
    gap: float = float("nan")
    n_iter: int = 0
    status: str = "converged"
    selection: Mapping[str, Any] | None = None


def site_areas(codes: NDArray[Any], chance: Array, starts: Index) -> Array:
    """Return the area under the ROC curve at each site ``(V,)``, from ranks; NaN at sites with one class."""
    areas = np.full(len(starts) - 1, np.nan)
    for u, (first, last) in enumerate(pairwise(starts.tolist())):
        positive = codes[first:last] == 1
        hits = int(positive.sum())
        if 0 < hits < len(positive):
            above = rankdata(chance[first:last])[positive].sum() - hits * (hits + 1) / 2
            areas[u] = above / (hits * (len(positive) - hits))
    return areas


#: Of the sites' differences, this share on each side counts as the next one: no single site decides the verdict.
EXTREME = 0.05


def winsorised(values: Array) -> Array:
    """Return the values with the share `EXTREME` on each side, at least one of ten, replaced by the next one."""
    k = max(int(EXTREME * values.size), int(values.size >= 10))
    return np.clip(values, *np.sort(values)[[k, -1 - k]]) if k else values


def nan_mean(values: Array) -> Array:
    """Return means over the first axis without NaN; NaN where there is nothing else."""
    n = (~np.isnan(values)).sum(axis=0)
    return np.asarray(np.nansum(values, axis=0) / np.where(n > 0, n, np.nan))
