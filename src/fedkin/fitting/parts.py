"""Other parts of a fitted model: certificates, baseline hazards, boosting; and scores of survival models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from fedkin._base import TINY, Array, Index
from fedkin.data import Federation, Rows, columns_of, raise_findings
from fedkin.errors import DataError, ModelFileError, ParameterError, argument, missing_dependency
from fedkin.fitting.options import class_numbers, is_table, offset_column
from fedkin.kin import QUICK, find_kin
from fedkin.losses import LOSSES, Loss

if TYPE_CHECKING:
    from fedkin.fitting.model import FittedModel


@dataclass(frozen=True, eq=False)
class Baselines:
    """Cumulative baseline hazards of V sites, as step functions, for a row with the features ``at``.

    Attributes
    ----------
    at : array (q,)
        The features of the row, by default the means of all rows.
    times : tuple of V arrays (K_u,)
        Ascending; the last one is the site's last time, of an event or censored.
    hazards : tuple of V arrays (K_u, 2 + q)
        Cumulative hazard up to each time (Breslow's estimate, ties by Efron's method), its variance, and its gradient
        with respect to the coefficients.
    degrees : float
        Degrees of freedom of the variance between sites, for a site without rows; infinite for sites with rows.
    """

    at: Array
    times: tuple[Array, ...]
    hazards: tuple[Array, ...]
    degrees: float = np.inf

    @classmethod
    def from_rows(cls, loss: Loss, theta: Array, rows: Federation, at: Array | None = None) -> Baselines:
        """Estimate the baselines from the rows of V sites, given ``theta (V, q)``."""
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
        """Return the baseline of a new site: at each time, the mean hazard of the sites with rows still at risk.

        Sites have equal weights, as in the mean of their coefficients. The variance is that between sites plus that of
        their mean, both relative to the hazard and averaged up to each time with the hazard as weight. The hazards are
        constant once half of the sites have no rows at risk.
        """
        moments = np.unique(np.concatenate(self.times))
        steps, observed, V = np.zeros(len(moments)), np.zeros(len(moments)), len(self.times)
        for times, hazard in zip(self.times, self.hazards, strict=True):
            steps[np.searchsorted(moments, times)] += np.diff(hazard[:, 0], prepend=0.0)
            observed += moments <= times[-1]
        pooled = np.zeros((len(moments), 2 + len(self.at)))
        pooled[:, 0] = np.cumsum(steps / observed)
        values, own = np.stack([self.cumulative(u, moments)[:, :2] for u in range(V)], axis=2).transpose(1, 0, 2)
        here = moments[:, None] <= np.array([times[-1] for times in self.times])
        mean, own = (np.where(here, one, 0.0).sum(axis=1) / observed for one in (values, own))
        apart = np.where(here, (values - mean[:, None]) ** 2, 0.0).sum(axis=1) / np.maximum(observed - 1, 1)
        weight = np.diff(pooled[:, 0], prepend=0.0)[:, None]
        relative = np.column_stack([apart - own, apart / observed]) / np.where(mean > 0, mean, 1.0)[:, None] ** 2
        relative = np.cumsum(weight * relative, axis=0) / np.maximum(np.cumsum(weight, axis=0), TINY)
        last = np.flatnonzero(observed >= V / 2)[-1]
        relative[last:] = relative[last]
        pooled[:, 1] = pooled[:, 0] ** 2 * np.log1p(np.maximum(relative[:, 0], 0.0) + relative[:, 1])
        return Baselines(self.at, (moments,), (pooled,), max(V - 1.0, 1.0))

    def cumulative(self, u: int, times: Array) -> Array:
        """Return the entries of `hazards` ``(T, 2 + q)`` of site number u, constant after the site's last time."""
        found = [step_values(self.times[u], column, times, 0.0) for column in self.hazards[u].T]
        return np.column_stack(found)

    def survival(
        self, u: int, times: Array, hazard: Array, X: Array, covariance: Array | None = None, level: float = 0.95
    ) -> Array:
        """Return survival ``(n, T)`` of rows at site number u, or with the ends of intervals ``(3, n, T)``.

        ``hazard (n,)`` is the hazard of rows relative to the baseline, and ``X (n, q)`` holds their features relative
        to ``at``. A ``covariance`` of the coefficients adds intervals, normal for the logarithm of the cumulative
        hazard. The hazard of a site without rows is lognormal around its mean.
        """
        steps = self.cumulative(u, times)
        with np.errstate(divide="ignore", invalid="ignore"):
            centre = np.log(np.outer(hazard, steps[:, 0]))
            if covariance is None:
                return np.asarray(np.exp(-np.exp(centre)))
            relative = np.where(steps[:, :1] > 0, steps[:, 1:] / steps[:, :1], 0.0)
            baseline = relative[:, 0] / np.where(steps[:, 0] > 0, steps[:, 0], 1.0)
            away = X[:, None, :] + relative[:, 1:]
            width = baseline + np.einsum("ntq,qr,ntr->nt", away, covariance, away)
            middle = centre - 0.5 * baseline * np.isfinite(self.degrees)
            half = stdtrit(self.degrees, 0.5 + level / 2) * np.sqrt(width)
            return np.asarray(np.exp(-np.exp(np.stack([centre, middle + half, middle - half]))))

    def plain(self) -> dict[str, Any]:
        """Return the baselines as plain values for JSON."""
        sites = [{"time": t, "hazard": h.T} for t, h in zip(self.times, self.hazards, strict=True)]
        return {"at": self.at, "sites": sites}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Baselines:
        """Read what `plain` returned."""
        try:
            times, steps = ([np.array(one[name], float).T for one in plain["sites"]] for name in ("time", "hazard"))
            made = cls(np.array(plain["at"], dtype=np.float64), tuple(times), tuple(steps))
            shapes = [(len(t), 2 + len(made.at)) for t in times]
            good = all(
                t.ndim == 1 and t.size and h.shape == one for t, h, one in zip(times, steps, shapes, strict=True)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"the baseline hazards cannot be read: {error}") from None
        if not good:
            raise ModelFileError("the baseline hazards are inconsistent")
        return made


def step_values(at: Array, values: Array, times: Array, before: float) -> Array:
    """Evaluate at ``times (T,)`` the step function with ``values (K,)`` from the times ``at (K,)`` onwards."""
    return np.append(before, values)[np.searchsorted(at, times, side="right")]


# --- targets ------------------------------------------------------------------------------------------------------


def survival_target(y: ArrayLike) -> Array:
    """Return signed times ``(n,)``: censored times are negative.

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


def labelled_rows(model: FittedModel, site: Any) -> Rows:
    """Return the rows of a new site, with its target in the form that the loss needs."""
    parts: Any
    if isinstance(site, Rows):
        parts = site.X, site.y, site.offset, site.weight
    elif isinstance(site, tuple) and len(site) == 2:
        parts = *site, None, None
    elif is_table(site):
        table = columns_of(site)
        y = table.get(model.target_name or "")
        if y is not None and model.schema is not None and model.schema.event is not None:
            raise_findings(model.schema.check(table))
            y = model.schema.target_of(table)
        parts = table, y, table.get(model.offset_name or ""), None
    else:
        kind = type(site).__name__
        raise DataError(f"a new site must be given as Rows, (X, y), a table, a Summary or nothing, got {kind}")
    X, y, offset, weight = parts
    rows, _ = model.features_of(X)
    if model.loss.target is not None:
        if y is None:
            raise DataError(f"the rows of the new site have no target {model.target_name or 'y'!r}")
        y = np.asarray(y)
        if model.loss.target == "survival" and (y.dtype.names or y.ndim == 2):
            y = survival_target(y)
        y = y.astype(np.float64) if model.classes is None else class_numbers(y, model.classes)
        if len(y) != len(rows):
            raise DataError(f"the new site has {len(rows)} rows, but {len(y)} targets")
    return Rows(rows, y, offset_column(offset, len(rows), needed=model.offset_name is not None), weight)


# --- boosting: a column for nonlinear effects -----------------------------------------------------------------------

# The cross-fitted prediction of a boosting model of all rows is one more column. Each of its five parts is fitted to
# four of five folds. A row gets the prediction, on the scale of the linear predictor, of the part fitted without it;
# new rows get the mean of the five. Kin models how sites differ. Only where trees that know the sites clearly predict
# a fold better than kin with this column do they get random codes of the sites as features.

#: The name of the column.
BOOSTING = "(boosting)"
#: Number of parts, one per fold of the rows.
PARTS = 5
_LEAST_ROWS = 100
#: Trees are added until the mean error of the folds has not fallen for this many trees.
_MOST_TREES, _PATIENCE = 2_000, 20
#: Leaves of a tree that are tried on the first fold: few for curves, more for interactions.
_LEAVES = (7, 31)
#: Random codes of a site, by which trees that know the sites tell them apart; draws for a site that they do not know.
CODES, _DRAWS = 4, 16
#: Standard errors by which they must predict a fold better.
_CLEAR = 2.0
_TREES = {"learning_rate": 0.1, "min_data_in_leaf": 20, "max_bin": 63}
_TREES |= {"num_threads": 1, "deterministic": True, "force_col_wise": True, "verbosity": -1}


#: Entries of a tree for each split and each leaf, which LightGBM's parser reads without checks.
_WHOLE_PER_SPLIT = ("split_feature", "decision_type", "left_child", "right_child", "internal_count")
_PER_SPLIT = (*_WHOLE_PER_SPLIT, "split_gain", "threshold", "internal_value", "internal_weight")
_PER_LEAF = ("leaf_value", "leaf_weight", "leaf_count")
_WHOLE, _NUMBER = r"-?[0-9]{1,9}", r"-?(?:[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[-+]?[0-9]{1,3})?|inf)"
_TREE = re.compile(
    rf"(?:Tree|num_leaves|num_cat|is_linear)=[0-9]{{1,9}}|(?:{'|'.join((*_WHOLE_PER_SPLIT, 'leaf_count'))})="
    rf"(?:{_WHOLE}(?: {_WHOLE})*)?|(?:shrinkage|split_gain|threshold|internal_value|internal_weight|leaf_value|"
    rf"leaf_weight)=(?:{_NUMBER}(?: {_NUMBER})*)?"
)
_HEAD = re.compile(
    r"version=v[0-9]|(?:num_class|num_tree_per_iteration|label_index|max_feature_idx)=[0-9]{1,9}|"
    r"objective=(?:regression|binary sigmoid:1|poisson)|feature_names=Column_[0-9]+(?: Column_[0-9]+)*|"
    rf"feature_infos=(?:none|\[{_NUMBER}:{_NUMBER}\])(?: (?:none|\[{_NUMBER}:{_NUMBER}\]))*|"
    r"tree_sizes=[0-9]{1,9}(?: [0-9]{1,9})*"
)
_END = "end of trees\n"
_MOST_LEAVES = 1_000


def checked_boosting(text: str, n_features: int) -> str:
    """Return the part of a text that predictions need; raise `ValueError` unless it describes valid trees.

    LightGBM's parser may crash or hang on other texts, so every line must be one that Fedkin writes.
    """
    head, _, rest = text.partition("\n\n")
    about = _entries(head.removeprefix("tree\n"), _HEAD)
    if [about.get(key) for key in ("num_class", "num_tree_per_iteration")] != ["1", "1"]:
        raise ValueError("it does not predict a single number")
    names, ranges = (about.get(key, "").split(" ") for key in ("feature_names", "feature_infos"))
    if about.get("max_feature_idx") != str(n_features - 1) or not len(names) == len(ranges) == n_features:
        raise ValueError(f"it does not have {n_features} columns")
    at, sizes = 0, [int(size) for size in about.get("tree_sizes", "").split()]
    for k, size in enumerate(sizes):
        if size <= 0 or not rest.startswith(f"Tree={k}\n", at):
            raise ValueError(f"tree {k} is in the wrong place")
        _check_tree(_entries(rest[at : at + size].rstrip("\n"), _TREE), n_features)
        at += size
    if not sizes or not rest.startswith(_END, at):
        raise ValueError("its trees end in the wrong place")
    return f"{head}\n\n{rest[:at]}{_END}"


def _entries(text: str, form: re.Pattern[str]) -> dict[str, str]:
    """Return the entries of lines ``key=value``, each of which must have the form."""
    lines = text.split("\n")
    entries = dict(line.partition("=")[::2] for line in lines)
    if len(entries) < len(lines) or not all(map(form.fullmatch, lines)):
        raise ValueError("a line is not one of Fedkin's trees")
    return entries


def _check_tree(entries: dict[str, str], n_features: int) -> None:
    leaves = int(entries.get("num_leaves", "0"))
    if not 1 <= leaves <= _MOST_LEAVES or [entries.get(key) for key in ("num_cat", "is_linear")] != ["0", "0"]:
        raise ValueError("a tree has another form than Fedkin's")
    numbers = {key: np.array(entries.get(key, "").split(), dtype=np.float64) for key in (*_PER_SPLIT, *_PER_LEAF)}
    sizes = {key: leaves - 1 if key in _PER_SPLIT else leaves for key in numbers}
    if leaves == 1:
        sizes = {"leaf_value": 1}
    if any(numbers[key].size != size for key, size in sizes.items()):
        raise ValueError("a tree has too few or too many numbers")
    split, left, right = (numbers[key] for key in ("split_feature", "left_child", "right_child"))
    children = np.sort(np.concatenate([left, right]))
    if leaves > 1 and not (
        np.array_equal(children, np.delete(np.arange(-leaves, leaves - 1), leaves))  # every node but the first once
        and np.isin(split, np.arange(n_features)).all()
        and np.isin(numbers["decision_type"], np.arange(0, 16, 2)).all()
        and all((child[child >= 0] > np.flatnonzero(child >= 0)).all() for child in (left, right))
    ):
        raise ValueError("the splits do not form a tree")


@dataclass(frozen=True)
class Boosting:
    """A boosting model in LightGBM's text format, one text per part; LightGBM reads them on first prediction."""

    texts: tuple[str, ...]

    @cached_property
    def _parts(self) -> list[Any]:
        lightgbm = _lightgbm("predicting by this model")
        try:
            return [lightgbm.Booster(model_str=text) for text in self.texts]
        except lightgbm.basic.LightGBMError as error:
            raise ModelFileError(f"LightGBM cannot read the boosting model ({error}); fit it again") from None

    def predict(self, X: Array, codes: Array | None = None) -> Array:
        """Return the mean prediction of the parts ``(n,)``, on the scale of the linear predictor.

        ``codes (n, CODES)`` are those of the rows' sites; NaN at unseen ones, which get the mean over random codes.
        """
        if not len(X):
            return np.zeros(0)
        if codes is None:
            return np.asarray(np.mean([part.predict(X, raw_score=True) for part in self._parts], axis=0))
        known, out = ~np.isnan(codes[:, 0]), np.empty(len(X))
        out[known] = self.predict(np.column_stack([X, codes])[known])
        draws = np.random.default_rng(0).random((_DRAWS, CODES))
        several = [np.column_stack([X[~known], np.tile(draw, (int((~known).sum()), 1))]) for draw in draws]
        out[~known] = np.mean([self.predict(each) for each in several], axis=0)
        return out


def fit_boosting(rows: Federation, loss: Loss, seed: int) -> tuple[Boosting, Array, Array | None]:
    """Fit a boosting model to all rows.

    Return it with the cross-fitted predictions ``(N,)``, and the codes ``(V, CODES)`` of the sites if trees know them.
    """
    if loss.boosting is None:
        served = " or ".join(one.name for one in LOSSES.values() if one.boosting is not None)
        raise ParameterError(f"{argument('boost')} is for the loss {served}, not for {loss.name}: leave it out")
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
    stop = lightgbm.early_stopping(_PATIENCE, verbose=False)

    def tried(leaves: int, some: list[tuple[Index, Index]], X: Array) -> dict[str, Any]:
        data = lightgbm.Dataset(X, y, weight=rows.weight, init_score=start, free_raw_data=False)
        how = {"folds": some, "return_cvbooster": True, "callbacks": [stop]}
        found: dict[str, Any] = lightgbm.cv(about | {"num_leaves": leaves}, data, _MOST_TREES, **how)
        return found

    def cross_fitted(leaves: int, X: Array) -> tuple[Boosting, Array]:
        found = tried(leaves, folds, X)["cvbooster"]
        texts = (part.model_to_string(num_iteration=found.best_iteration) for part in found.boosters)
        made, column = Boosting(tuple(checked_boosting(text, X.shape[1]) for text in texts)), np.empty(len(X))
        for part, (_, out) in zip(made._parts, folds, strict=True):
            column[out] = part.predict(X[out], raw_score=True)
        return made, column

    # the first entry has the mean error after each tree
    leaves = min(_LEAVES, key=lambda number: min(next(iter(tried(number, folds[:1], rows.X).values()))))
    made, column = cross_fitted(leaves, rows.X)
    if rows.n_sites == 1:
        return made, column, None
    codes = np.random.default_rng(seed).random((rows.n_sites, CODES))
    known = np.column_stack([rows.X, codes[rows.site_index]])
    [trees] = tried(max(_LEAVES), folds[:1], known)["cvbooster"].boosters
    names = (*rows.feature_names, BOOSTING)
    whole = rows.replaced(X=np.column_stack([rows.X, column]), y=y, offset=start, feature_names=names)
    out, theirs = _kin_predictors(whole, loss, folds[0][1], seed)
    own = trees.predict(known[out], raw_score=True) + (0.0 if start is None else start[out])
    gain = _errors(loss, y[out], theirs) - _errors(loss, y[out], own)
    if gain.mean() <= _CLEAR * gain.std() / np.sqrt(len(gain)):
        return made, column, None
    return *cross_fitted(max(_LEAVES), known), codes


def _errors(loss: Loss, y: Array, eta: Array) -> Array:
    assert loss.rowwise is not None
    mean = loss.rowwise.response(eta[:, None])
    return loss.row_errors(y, mean if loss.target != "class" else np.column_stack([1.0 - mean, mean]))


def _kin_predictors(rows: Federation, loss: Loss, out: Index, seed: int) -> tuple[Index, Array]:
    """Return the held-out rows whose sites have other rows, and kin's linear predictors of them, fitted to the rest."""
    kept = ~np.isin(np.arange(len(rows.X)), out)
    known = np.bincount(rows.site_index[kept], minlength=rows.n_sites) > 0
    others = rows.take(kept, allow_empty=True).subset([rows.sites[u] for u in np.flatnonzero(known)])
    theta = find_kin(others.with_intercept(), loss=loss, seed=seed, **QUICK).theta
    out = out[known[rows.site_index[out]]]
    own = theta[(np.cumsum(known) - 1)[rows.site_index[out]]]
    eta = own[:, 0] + np.einsum("nq,nq->n", rows.X[out], own[:, 1:])
    return out, eta if rows.offset is None else eta + rows.offset[out]


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
        Relative duality gap: an upper bound on the distance of the objective from its minimum. NaN if not certified.
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
