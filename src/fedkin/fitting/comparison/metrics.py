"""Errors and scores of a model on held-out rows, as scikit-learn defines them, for all rows and for each site.

The arithmetic is here because importing `sklearn.metrics` takes longer than most fits; tests compare every number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index
from fedkin.data import Federation
from fedkin.errors import DataError
from fedkin.fitting.model import FittedModel, class_numbers


def metric_name(model: FittedModel) -> str:
    """What `row_errors` measures for this model."""
    return model.loss.metric or "loss"


def check_held_out(model: FittedModel, test: Federation) -> None:
    """Raise `DataError` where rows cannot be held-out rows of a model."""
    if len(test.X) == 0:
        raise DataError("there are no held-out rows to compare on")
    if test.y is None and model.loss.needs_target:
        raise DataError("the held-out rows have no target to compare with")
    unknown = [site for site in test.sites if site not in model.index]
    if unknown:
        raise DataError(
            f"site {unknown[0]!r} of the test is not among the training sites: cut both from one federation"
        )


def responses(model: FittedModel, test: Federation) -> Array:
    """Mean responses, or probabilities ``(n, C)`` of the classes."""
    ids = [test.sites[u] for u in test.site_index.tolist()]
    predict = model.predict if model.classes is None else model.predict_proba
    return np.asarray(predict(test.X, ids, test.offset), dtype=np.float64)


def row_errors(model: FittedModel, test: Federation, response: Array) -> Array:
    """The error ``(n,)`` of every row; of a custom loss, the mean loss of the row's site."""
    if model.loss.metric is None:
        return _custom_loss(model, test)
    target = test.X if test.y is None else test.y
    if model.classes is not None:
        target = class_numbers(target, model.classes)
    return model.loss.row_errors(target.astype(np.float64), response)


def _custom_loss(model: FittedModel, test: Federation) -> Array:
    out = np.empty(len(test.X))
    for site, n in zip(test.sites, test.n_samples.tolist(), strict=True):
        if n:
            rows = test[site]
            X = np.column_stack([np.ones(n), rows.X]) if model.fit_intercept else rows.X
            own = test.site_index == test.index[site]
            out[own] = model.loss.value(model._theta(model.index[site]), X, rows.y, rows.offset)
    return out


def more_scores(model: FittedModel, test: Federation, response: Array, weight: Array) -> dict[str, float]:
    """Scores of all rows where higher is better; none for losses that have none."""
    if test.y is None:
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
        areas = site_areas(codes, response[:, 1], test.site_index, test.n_sites)
        if not np.isnan(areas).all():
            scores["AUC per site"] = float(np.nanmean(areas))
    return scores


def site_areas(codes: NDArray[Any], chance: Array, site: Index, n_sites: int) -> Array:
    """Area under the ROC curve at each site ``(V,)``, from ranks; NaN at sites with one class."""
    order = np.lexsort((chance, site))
    value, own, positive = chance[order], site[order], codes[order] == 1
    new = np.ones(len(value), dtype=bool)
    new[1:] = (value[1:] != value[:-1]) | (own[1:] != own[:-1])
    tie = np.cumsum(new) - 1
    place = np.bincount(tie, weights=np.arange(len(value))) / np.bincount(tie)  # ties share their mean place
    rows = np.bincount(own, minlength=n_sites)
    begin = np.concatenate([[0], np.cumsum(rows)[:-1]])
    rank = place[tie] - begin[own] + 1
    hits = np.bincount(own, weights=positive, minlength=n_sites)
    above = np.bincount(own, weights=rank * positive, minlength=n_sites) - hits * (hits + 1) / 2
    pairs = hits * (rows - hits)
    return np.asarray(np.divide(above, pairs, out=np.full(n_sites, np.nan), where=pairs > 0))
