"""Scores on held-out rows, and scikit-learn's scorers and folds for models that need the site of each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import get_scorer, roc_auc_score
from sklearn.model_selection import BaseCrossValidator
from sklearn.utils.metadata_routing import MetadataRequest

from fedkin._base import Array
from fedkin.data import Federation, number_of, refuse_dates
from fedkin.errors import DataError
from fedkin.fitting.decision import FEDKIN
from fedkin.fitting.inputs import class_numbers
from fedkin.fitting.model import FittedModel
from fedkin.fitting.survival import brier_times, integrated_brier, site_concordances

_NUMERIC = frozenset({"float64", "float32", "int64", "int32", "int16", "int8", "uint8", "bool", "boolean"})


class SiteScorer:
    """A scikit-learn scorer that passes ``site`` and ``offset`` to ``predict``.

    scikit-learn's own scorers pass metadata to the metric, not to the model, so they cannot score a model of several
    sites. Use this scorer as ``scoring=`` with metadata routing enabled.

    Parameters
    ----------
    scoring : str
        A name for `sklearn.metrics.get_scorer`: "roc_auc", "neg_mean_squared_error", ...
    per_site : bool
        Average the scores of the sites with more than one value of y, instead of scoring all rows together.

    Examples
    --------
    >>> import numpy as np, sklearn
    >>> from sklearn.model_selection import cross_val_score
    >>> from fedkin import SiteScorer, FedADMMRegressor, WithinSiteKFold
    >>> rng = np.random.default_rng(0)
    >>> X, site = rng.normal(size=(90, 2)), np.repeat(["a", "b", "c"], 30)
    >>> y = X[:, 0] + 0.1 * rng.normal(size=90)
    >>> with sklearn.config_context(enable_metadata_routing=True):
    ...     model = FedADMMRegressor(lam=0.01).set_fit_request(site=True)
    ...     scores = cross_val_score(
    ...         model, X, y, scoring=SiteScorer("neg_mean_squared_error"),
    ...         cv=WithinSiteKFold(3), params={"site": site, "groups": site},
    ...     )
    >>> bool((scores > -0.02).all())
    True
    """

    def __init__(self, scoring: str, per_site: bool = False) -> None:
        self.scoring, self.per_site, self._scorer = scoring, per_site, get_scorer(scoring)

    def __call__(
        self, estimator: Any, X: Any, y: ArrayLike, site: ArrayLike | None = None, offset: ArrayLike | None = None
    ) -> float:
        """Score ``estimator`` on rows ``X (n, q)`` with targets ``y (n,)`` of the given sites."""
        if not self.per_site or site is None:
            return float(self._scorer(AtSites(estimator, site, offset), X, y))
        ids, y = np.asarray(site), np.asarray(y)
        scores = []
        for one in np.unique(ids):
            rows = np.flatnonzero(ids == one)
            part = None if offset is None else np.asarray(offset)[rows]
            if np.unique(y[rows]).size > 1:
                scores.append(float(self._scorer(AtSites(estimator, ids[rows], part), _rows(X, rows), y[rows])))
        return float(np.mean(scores)) if scores else float("nan")

    def get_metadata_routing(self) -> MetadataRequest:
        """Return scikit-learn's metadata request of this scorer."""
        request = MetadataRequest(owner=self)
        for name in ("site", "offset"):
            request.score.add_request(param=name, alias=True)
        return request

    def __repr__(self) -> str:
        return f"SiteScorer({self.scoring!r}, per_site={self.per_site})"


class AtSites:
    """A fitted model bound to the sites and offsets of given rows; it refuses a different number of rows."""

    def __init__(self, estimator: Any, site: Any, offset: ArrayLike | None = None) -> None:
        self._estimator, self._site, self._offset = estimator, site, offset

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._estimator, name)
        if name == "score":
            return lambda X, y, sample_weight=None: found(X, y, **self._given(X), sample_weight=sample_weight)
        if name not in ("predict", "predict_proba", "decision_function"):
            return found

        def at_sites(X: Any) -> Any:
            return found(X, **self._given(X))

        at_sites.__name__ = name  # scikit-learn tells methods apart by their names
        return at_sites

    def fit(self, X: Any, y: Any = None) -> Any:
        """Raise an error: the model is already fitted."""
        raise DataError("the model is bound to sites and cannot be fitted: fit the estimator, then call at(site)")

    def _given(self, X: Any) -> dict[str, Any]:
        named = {"site": self._site, "offset": self._offset}
        given = {key: value for key, value in named.items() if value is not None}
        for name, value in given.items():
            each = isinstance(value, Iterable) and not isinstance(value, str | bytes)
            if each and len(value) != _length(X):
                raise DataError(f"the model was bound to {len(value)} rows by {name}=, but got {_length(X)}")
        return given

    def __sklearn_tags__(self) -> Any:
        return self._estimator.__sklearn_tags__()

    def __sklearn_is_fitted__(self) -> bool:
        return True


def request_all(request: MetadataRequest) -> MetadataRequest:
    """Return the request with all parameters of the methods, unless the user set it otherwise."""
    for method in ("fit", "partial_fit", "predict", "predict_proba", "decision_function", "score"):
        one = getattr(request, method)
        for name, alias in dict(one.requests).items():
            if alias is None:
                one.add_request(param=name, alias=True)
    return request


def _length(X: Any) -> int:
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)


def _rows(X: Any, rows: NDArray[np.int64]) -> Any:
    return X.iloc[rows] if hasattr(X, "iloc") else np.asarray(X)[rows]


class WithinSiteKFold(BaseCrossValidator):  # type: ignore[misc]
    """K-fold cross-validation that splits the rows of each site; the sites are the ``groups``.

    Parameters
    ----------
    n_splits : int
        Number of folds.
    seed : int
        Seed of the shuffle within each site.
    site_column : str or int, optional
        Column of X that holds the sites, where no groups are given.

    Notes
    -----
    A site with fewer rows than folds has test rows in some folds only, so it always keeps training rows. A site with
    one row stays in the training part.

    Examples
    --------
    >>> import numpy as np
    >>> site = np.repeat(["a", "b"], 4)
    >>> for train, test in WithinSiteKFold(2).split(np.zeros((8, 1)), groups=site):
    ...     print(site[test])
    ['a' 'a' 'b' 'b']
    ['a' 'a' 'b' 'b']
    """

    def __init__(self, n_splits: int = 5, seed: int = 0, site_column: str | int | None = None) -> None:
        self.n_splits, self.seed, self.site_column = n_splits, seed, site_column

    def get_metadata_routing(self) -> MetadataRequest:
        """Return scikit-learn's metadata request: groups."""
        request: MetadataRequest = super().get_metadata_routing()
        request.split.add_request(param="groups", alias=True)
        return request

    def get_n_splits(self, X: object = None, y: object = None, groups: object = None) -> int:
        """Return the number of folds."""
        return self.n_splits

    def split(
        self, X: Any, y: object = None, groups: ArrayLike | None = None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield row numbers of training and test for every fold; ``groups`` are the sites of the rows."""
        if groups is None and self.site_column is not None:
            groups = split_column(X, self.site_column)[1]
        if groups is None:
            raise DataError("WithinSiteKFold needs the site of each row: pass groups=site, or name site_column=")
        n = _length(X)
        rows = Federation.from_arrays(np.zeros((n, 1)), None, groups)  # type: ignore[arg-type]
        fold = np.empty(n, dtype=np.int64)
        fold[rows.row_order] = np.where(rows.n_samples[rows.site_index] > 1, rows.folds(self.n_splits, self.seed), -1)
        empty = np.setdiff1d(np.arange(self.n_splits), fold)
        if empty.size:
            few = f"fold {empty[0]} of {self.n_splits} has no rows, because the sites have few"
            raise DataError(f"{few}: take fewer folds, or another seed")
        for k in range(self.n_splits):
            yield np.flatnonzero(fold != k), np.flatnonzero(fold == k)


def split_column(X: Any, column: str | int) -> tuple[Any, Any]:
    """Return X without one of its columns, and that column ``(n,)``, or None if X has no such column."""
    if hasattr(X, "columns"):
        names = list(X.columns)
        name = names[column] if isinstance(column, int) and column not in names else column
        if name not in names:
            return X, None
        rest = X.drop(columns=[name]) if hasattr(X, "iloc") else X.drop(name)
        return rest, np.asarray(X[name])
    rows = np.asarray(X)
    if isinstance(column, str):
        unnamed = f"site_column={column!r} is a name, but X is an array without names"
        raise DataError(f"{unnamed}: give its number, or a data frame")
    if rows.ndim != 2 or not -rows.shape[1] <= column < rows.shape[1]:
        return X, None
    ids, rest = rows[:, column], np.delete(rows, column, axis=1)
    if rest.dtype != object:
        return rest, ids
    refuse_text(rest, column)
    return rest.astype(np.float64), ids


def refuse_text(X: Any, site_column: str | int | None) -> None:
    """Raise `DataError` for a column of X that holds dates or text: a category, or the names of the sites."""
    refuse_dates(X)
    if hasattr(X, "dtypes") and hasattr(X, "columns"):
        columns = {name: X[name] for name in X.columns if str(X[name].dtype).lower() not in _NUMERIC}
    elif isinstance(X, np.ndarray) and X.dtype.kind in "OUS" and X.ndim == 2:
        columns = dict(enumerate(X.T))
    else:
        return
    for name, cells in columns.items():
        text = next((cell for cell in np.asarray(cells) if isinstance(cell, str) and number_of(cell) is None), None)
        if text is not None and name != site_column:
            sites = "" if site_column is not None else f"if it names the sites, pass site_column={name!r}; "
            raise DataError(
                f"column {name!r} of X holds text, such as {text!r}: {sites}if it is a category, put a OneHotEncoder "
                "in front, or use fedkin.Federation.from_frame, which takes tables as they are"
            )


# --- scores of a comparison ---------------------------------------------------------------------------------------


class HeldOut(NamedTuple):
    """A split or a fold: errors by method, of all rows and of each site."""

    errors: dict[str, float]
    site_errors: dict[str, Array]
    held_out: float
    row_error: Mapping[frozenset[str], float] = {}
    more: Mapping[str, Mapping[str, float]] = {}
    models: Mapping[str, FittedModel] = {}


def held_out_errors(models: dict[str, FittedModel], train: Federation, test: Federation) -> HeldOut:
    """Return the errors of models on the held-out rows of a split."""
    check_held_out(models[FEDKIN], test)
    model = models[FEDKIN]
    weight = np.ones(len(test.X)) if test.weight is None else test.weight
    if test.y is not None and not model.loss.additive:
        weight = weight * model.loss.score_weights(test.y.astype(np.float64))
        if not weight.any():
            raise DataError("there are no events among the held-out rows to compare on")
    rows, more = dict[str, Array](), dict[str, dict[str, float]]()
    for name, model in models.items():
        response = responses(model, test)
        rows[name] = row_errors(model, test, response)
        found = more_scores(model, test, response, weight) | survival_scores(model, train, test)
        for metric, value in found.items():
            more.setdefault(metric, {})[name] = value
    means = {name: _site_means(test, weight, each) for name, each in rows.items()}
    errors = {name: float(weight @ each / weight.sum()) for name, each in rows.items()}
    pairs = combinations(rows, 2)
    paired = {frozenset(pair): _paired_error(test, weight, rows[pair[0]] - rows[pair[1]]) for pair in pairs}
    return HeldOut(errors, means, len(test.X), paired, more, models)


def _site_means(test: Federation, weight: Array, values: Array) -> Array:
    """Return weighted means ``(V,)`` of values of rows; NaN for sites without weight."""
    mass = np.bincount(test.site_index, weights=weight, minlength=test.n_sites)
    total = np.bincount(test.site_index, weights=weight * values, minlength=test.n_sites)
    return np.asarray(total / np.where(mass > 0, mass, np.nan))


def _paired_error(test: Federation, weight: Array, apart: Array) -> float:
    """Return the standard error of the Winsorised mean of differences ``(n,)`` between rows of sites.

    A site that is brought in brings its rows in: their differences shrink as its mean does, and never grow.
    """
    own = _site_means(test, weight, apart)
    seen, share, shift = ~np.isnan(own), np.ones(test.n_sites), np.zeros(test.n_sites)
    kept = winsorised(own[seen])
    share[seen] = np.clip(np.divide(kept, own[seen], out=np.ones_like(kept), where=own[seen] != 0), 0.0, 1.0)
    shift[seen] = kept - share[seen] * own[seen]
    apart = apart * share[test.site_index] + shift[test.site_index]
    apart = (apart - weight @ apart / weight.sum()) * weight
    return float(np.sqrt((apart**2).sum()) / weight.sum())


def check_held_out(model: FittedModel, test: Federation) -> None:
    """Raise `DataError` unless a model can be scored on these rows."""
    if len(test.X) == 0:
        raise DataError("there are no held-out rows to compare on")
    if test.y is None and model.loss.target is not None:
        raise DataError("the held-out rows have no target to compare with")
    unknown = [site for site in test.sites if site not in model.index]
    if unknown:
        raise DataError(
            f"site {unknown[0]!r} of the test set is not among the training sites: split both from one federation"
        )


def responses(model: FittedModel, test: Federation) -> Array:
    """Return mean responses, or probabilities ``(n, C)`` of the classes."""
    predict = model.predict if model.classes is None else model.predict_proba
    return np.asarray(predict(test.X, [test.sites[u] for u in test.site_index.tolist()], test.offset), dtype=np.float64)


def row_errors(model: FittedModel, test: Federation, response: Array) -> Array:
    """Return the error ``(n,)`` of every row; for a loss without a metric, the mean loss of the row's site."""
    if model.loss.metric is not None:
        target = test.X if test.y is None else test.y
        if model.classes is not None:
            target = class_numbers(target, model.classes)
        y = target.astype(np.float64)
        if model.loss.additive:
            return model.loss.row_errors(y, response)
        ends = pairwise(test.starts.tolist())
        return np.concatenate([model.loss.row_errors(y[first:last], response[first:last]) for first, last in ends])
    out = np.empty(len(test.X))
    for u in np.unique(test.site_index).tolist():
        rows, theta = test[test.sites[u]], model.theta(model.index[test.sites[u]])
        X = np.column_stack([np.ones(len(rows.X)), rows.X]) if model.fit_intercept else rows.X
        out[test.site_index == u] = model.loss.value(theta, X, rows.y, rows.offset)
    return out


def more_scores(model: FittedModel, test: Federation, response: Array, weight: Array) -> dict[str, float]:
    """Return additional scores of all rows; empty for losses that have none."""
    if test.y is None or model.baseline is not None:
        return {}
    if model.classes is None:
        y = test.y.astype(np.float64)
        if model.loss.link != "identity" or np.ptp(y) == 0:
            return {}
        total = weight @ (y - weight @ y / weight.sum()) ** 2
        return {"explained variance": 1.0 - float(weight @ (y - response) ** 2 / total)}
    codes = class_numbers(test.y, model.classes)
    scores = {"accuracy": float(weight @ (response.argmax(axis=1) == codes) / weight.sum())}
    if len(model.classes) == 2:
        sites = [slice(*ends) for ends in pairwise(test.starts.tolist())]
        areas = [roc_auc_score(codes[own], response[own, 1]) for own in sites if np.unique(codes[own]).size > 1]
        if areas:
            scores["AUC per site"] = float(np.mean(areas))
    return scores


def survival_scores(model: FittedModel, train: Federation, test: Federation) -> dict[str, float]:
    """Return concordance within sites, and the integrated Brier score; nothing for models without hazards."""
    if model.baseline is None or test.y is None or train.y is None:
        return {}
    sites = [test.sites[u] for u in test.site_index.tolist()]
    y, risk = test.y.astype(np.float64), model.predict(test.X, sites, test.offset)
    own = site_concordances(y, risk, test.starts)
    scores = {}
    if own.pairs.any():
        scores["concordance"] = own.pooled
        if own.pairs.astype(bool).sum() > 1:
            scores["C per site"] = float(np.nanmean(own.each))
    times = brier_times(train.y.astype(np.float64), y)
    if times.size > 1:
        survival = model.predict_survival(test.X, sites, times, test.offset)
        starts = train.starts, test.starts
        scores["Brier score"] = integrated_brier(train.y.astype(np.float64), y, survival, times, starts)
    return scores


#: Winsorised share of the sites' differences on each side, so that no single site decides the verdict.
EXTREME = 0.05


def winsorised(values: Array) -> Array:
    """Winsorise the values: replace the share `EXTREME` on each side (at least one of ten values) by the next value."""
    k = max(int(EXTREME * values.size), int(values.size >= 10))
    return np.clip(values, *np.sort(values)[[k, -1 - k]]) if k else values


def nan_mean(values: Array) -> Array:
    """Return means over the first axis, ignoring NaN; NaN if all values are NaN."""
    n = (~np.isnan(values)).sum(axis=0)
    return np.asarray(np.nansum(values, axis=0) / np.where(n > 0, n, np.nan))
