"""Fedkin beside its two extremes, every device alone and one model for all, on rows that none of them has seen."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array
from fedkin.data import Federation, Schema
from fedkin.errors import DataError, DegenerateDeviceWarning
from fedkin.fitting.fitting import Progress, fit_federation
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Prepared, class_numbers, prepare, well_posed_problem
from fedkin.graph import Graph
from fedkin.solvers import solve
from fedkin.stats import global_fit, local_fit

_METRICS = {
    "linear": "mean squared error",
    "huber": "mean absolute error",
    "poisson": "mean Poisson deviance",
    "logistic": "log-loss",
    "multinomial": "log-loss",
    "mean": "mean squared distance",
}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Errors on held-out rows of the same devices; lower is better.

    Attributes
    ----------
    metric : str
        Mean over all held-out rows of the squared error (linear), absolute error (Huber), deviance (Poisson), log-loss
        (classes), squared distance (mean), or the loss itself.
    errors : dict {"Local" | "Global" | "Fedkin": float}
    models : dict {name: FittedModel}
    test : Federation
        The held-out rows.
    more : dict {metric: dict {name: float}}
        Metrics where higher is better: explained variance, accuracy, AUC averaged over the devices with both classes.
    """

    metric: str
    errors: dict[str, float]
    models: dict[str, FittedModel]
    test: Federation
    more: dict[str, dict[str, float]] = field(default_factory=dict)

    def per_device(self, name: str) -> Array:
        """The errors ``(V,)`` of one of the models on each device of the test; NaN without held-out rows."""
        errors = np.full(self.test.n_devices, np.nan)
        for u in np.flatnonzero(self.test.n_samples):
            errors[u] = _error(self.models[name], self.test.subset([self.test.devices[u]]))
        return errors


def compare(
    train: Federation,
    test: Federation,
    graph: Graph | None = None,
    options: FitOptions | None = None,
    progress: Progress | None = None,
    schema: Schema | None = None,
) -> Comparison:
    """Held-out error of Fedkin beside its two extremes: every device alone, and one model for all.

    Parameters
    ----------
    train, test : Federation
        Rows of the same devices, as `Federation.split` cuts them; devices of the test may lack rows.
    graph, options, progress, schema
        As in `fit_federation`.

    Returns
    -------
    Comparison

    Notes
    -----
    Local and Global have the same intercept, standardisation and ridge. Devices without a local estimate of their own
    get one by the rule of `fedkin.local_fit`. Global gives every row the same weight.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_devices=20, n_samples=60, n_features=10, n_clusters=2, seed=0)
    >>> errors = compare(*design.federation.split(seed=0), design.graph, FitOptions(select="holm")).errors
    >>> errors["Fedkin"] < errors["Local"] < errors["Global"]
    True
    """
    options = FitOptions() if options is None else options
    model = fit_federation(train, graph, options, progress, schema)
    prepared = prepare(train, options, schema)
    alone, one_group = Graph.empty(train.devices), np.zeros(train.n_devices, dtype=np.int64)
    if progress is not None:
        progress("fitting Local and Global for comparison")
    models = {
        "Local": prepared.model(_local_theta(prepared, options), alone, options),
        "Global": prepared.model(_global_theta(prepared, options), alone, options, clusters=one_group),
        "Fedkin": model,
    }
    return _scored(models, test)


# --- the two extremes -----------------------------------------------------------------------------------------


def _local_theta(prepared: Prepared, options: FitOptions) -> Array:
    if options.ridge > 0:
        return _ridge_theta(prepared, options)
    return local_fit(prepared.federation, prepared.loss).theta


def _global_theta(prepared: Prepared, options: FitOptions) -> Array:
    fed = prepared.rows
    if options.ridge > 0:
        pooled = Federation.from_arrays(fed.X, fed.y, np.zeros(len(fed.X), dtype=np.int64), offset=fed.offset)
        theta = _ridge_theta(replace(prepared, federation=pooled), options)[0]
    else:
        with warnings.catch_warnings():
            # its rescue is as good as Local's, which is silent
            warnings.simplefilter("ignore", DegenerateDeviceWarning)
            theta = global_fit(fed, prepared.loss)
    return np.tile(theta, (fed.n_devices, 1))


def _ridge_theta(prepared: Prepared, options: FitOptions) -> Array:
    alone = replace(options, lam=0.0, sparsity=0.0)
    problem, _ = well_posed_problem(prepared, Graph.empty(prepared.federation.devices), alone)
    return solve(problem, options.tol, max_iter=options.max_iter).theta


# --- scores ---------------------------------------------------------------------------------------------------


def _scored(models: Mapping[str, FittedModel], test: Federation) -> Comparison:
    some = next(iter(models.values()))
    if len(test.X) == 0:
        raise DataError("there are no held-out rows to compare on")
    if test.y is None and some.loss.needs_target:
        raise DataError("the held-out rows have no target to compare with")
    unknown = [device for device in test.devices if device not in some.index]
    if unknown:
        raise DataError(
            f"device {unknown[0]!r} of the test is not among the training devices: cut both from one federation"
        )
    more: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        for metric, value in _more_scores(model, test).items():
            more.setdefault(metric, {})[name] = value
    errors = {name: _error(model, test) for name, model in models.items()}
    return Comparison(_METRICS.get(some.loss.name, "loss"), errors, dict(models), test, more)


def _error(model: FittedModel, test: Federation) -> float:
    name = model.loss.name
    if name not in _METRICS:
        return _custom_loss(model, test)
    response = _response(model, test)
    if test.y is None:
        return float(((test.X - response) ** 2).sum(axis=1).mean())
    if model.classes is None and name != "poisson":
        # importing scikit-learn takes longer than most fits
        missed = test.y.astype(np.float64) - response
        return float(np.abs(missed).mean() if name == "huber" else (missed**2).mean())
    from sklearn import metrics

    if model.classes is not None:
        numbers = list(range(len(model.classes)))
        return float(metrics.log_loss(class_numbers(test.y, model.classes), response, labels=numbers))
    return float(metrics.mean_poisson_deviance(test.y.astype(np.float64), response.clip(np.finfo(float).tiny)))


def _more_scores(model: FittedModel, test: Federation) -> dict[str, float]:
    if test.y is None:
        return {}
    response = _response(model, test)
    if model.classes is None:
        explains = model.loss.name in ("linear", "huber") and np.ptp(test.y) > 0
        return {"explained variance": 1.0 - float(((test.y - response) ** 2).mean() / test.y.var())} if explains else {}
    from sklearn import metrics

    target = class_numbers(test.y, model.classes)
    scores = {"accuracy": float(metrics.accuracy_score(target, response.argmax(axis=1)))}
    if len(model.classes) == 2:
        parts = [test.device_index == u for u in range(test.n_devices)]
        both = [own for own in parts if np.unique(target[own]).size == 2]
        areas = [metrics.roc_auc_score(target[own], response[own, 1]) for own in both]
        if areas:
            scores["AUC per device"] = float(np.mean(areas))
    return scores


def _response(model: FittedModel, test: Federation) -> NDArray[Any]:
    """Mean responses, or probabilities ``(n, C)`` of the classes."""
    ids = [test.devices[u] for u in test.device_index.tolist()]
    predict = model.predict if model.classes is None else model.predict_proba
    return predict(test.X, ids, test.offset)


def _custom_loss(model: FittedModel, test: Federation) -> float:
    """The mean over all rows of a custom loss, which itself is the mean over the rows of a device."""
    total = 0.0
    for device, n in zip(test.devices, test.n_samples.tolist(), strict=True):
        if n:
            rows = test[device]
            X = np.column_stack([np.ones(n), rows.X]) if model.fit_intercept else rows.X
            total += n * model.loss.value(model._theta(model.index[device]), X, rows.y, rows.offset)
    return total / len(test.X)
