"""Scores and folds of scikit-learn for models that must be told the site of each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import get_scorer
from sklearn.model_selection import BaseCrossValidator
from sklearn.utils.metadata_routing import MetadataRequest

from fedkin.data import Federation, number_of, refuse_dates
from fedkin.errors import DataError

_NUMERIC = frozenset({"float64", "float32", "int64", "int32", "int16", "int8", "uint8", "bool", "boolean"})


class SiteScorer:
    """One of scikit-learn's scorers, by name, that hands ``site`` and ``offset`` on to ``predict``.

    scikit-learn's own scorers pass such things to the metric, never to the model, so they cannot score a model of
    several sites. This one can be used as ``scoring=`` wherever metadata routing is on.

    Parameters
    ----------
    scoring : str
        A name that `sklearn.metrics.get_scorer` knows: "roc_auc", "neg_mean_squared_error", ...
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
        """Score of ``estimator`` on rows ``X (n, q)`` with targets ``y (n,)`` of the given sites."""
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
        """Return what scikit-learn should hand to this scorer."""
        request = MetadataRequest(owner=self)
        for name in ("site", "offset"):
            request.score.add_request(param=name, alias=True)
        return request

    def __repr__(self) -> str:
        return f"SiteScorer({self.scoring!r}, per_site={self.per_site})"


class AtSites:
    """A fitted model bound to the sites and offsets of the rows that it will see; other numbers of rows are refused."""

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
        """Refused: the model is fitted already."""
        raise DataError("the model is bound to sites and cannot be fitted: fit the estimator, then call at(site)")

    def _given(self, X: Any) -> dict[str, Any]:
        named = {"site": self._site, "offset": self._offset}
        given = {key: value for key, value in named.items() if value is not None}
        for name, value in given.items():
            each = isinstance(value, Iterable) and not isinstance(value, str | bytes)
            if each and len(value) != _length(X):
                raise DataError(f"the model was bound to {len(value)} rows by {name}=, but came to see {_length(X)}")
        return given

    def __sklearn_tags__(self) -> Any:
        return self._estimator.__sklearn_tags__()

    def __sklearn_is_fitted__(self) -> bool:
        return True


def request_all(request: MetadataRequest) -> MetadataRequest:
    """Return the request with all that methods can take asked for, unless somebody decided otherwise."""
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
    """K folds to which every site gives rows: the sites are the ``groups``.

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
    A site with fewer rows than folds gives its rows to some of the folds, one each, so it always keeps training
    rows; a site with one row stays in the training part.

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
        """Return what scikit-learn should pass on: groups."""
        request: MetadataRequest = super().get_metadata_routing()
        request.split.add_request(param="groups", alias=True)
        return request

    def get_n_splits(self, X: object = None, y: object = None, groups: object = None) -> int:
        """Number of folds."""
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
            few = f"fold {empty[0]} of {self.n_splits} has no rows, as the sites have few"
            raise DataError(f"{few}: take fewer folds, or another seed")
        for k in range(self.n_splits):
            yield np.flatnonzero(fold != k), np.flatnonzero(fold == k)


def split_column(X: Any, column: str | int) -> tuple[Any, Any]:
    """X without one of its columns, and that column ``(n,)``; None for it where X has no such column."""
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
            sites = "" if site_column is not None else f"if it names the sites, say site_column={name!r}; "
            raise DataError(
                f"column {name!r} of X holds text, such as {text!r}: {sites}if it is a category, put a OneHotEncoder "
                "in front, or use fedkin.Federation.from_frame, which takes tables as they are"
            )
