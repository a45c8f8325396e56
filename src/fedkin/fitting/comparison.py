"""Fedkin beside its two extremes, every device alone and one model for all, on rows that none of them has seen."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedkin.data import Federation
from fedkin.errors import DataError, DegenerateDeviceWarning
from fedkin.fitting.fitting import fit_federation
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions, Progress, silent
from fedkin.fitting.preparation import Prepared, prepare
from fedkin.fitting.well_posed import well_posed_problem
from fedkin.graph import Graph
from fedkin.solvers import solve
from fedkin.stats import global_fit, local_fit

Array = NDArray[np.float64]

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
    """Errors on held-out rows of the same devices.

    Attributes
    ----------
    metric : str
        Mean over all held-out rows of the squared error (linear), absolute error (Huber), deviance (Poisson), log-loss
        (classes), squared distance (mean), or the loss itself.
    higher_is_better : bool
        False for all of these.
    errors : dict {"Local" | "Global" | "Fedkin": float}
    devices : tuple of ids
    per_device : dict {name: array (V,)}
        The same by device, NaN for devices without held-out rows.
    more : dict {metric: dict {name: float}}
        Metrics where more is better: explained variance, accuracy, AUC averaged over the devices with both classes.
    models : dict {name: FittedModel}
    """

    metric: str
    higher_is_better: bool
    errors: dict[str, float]
    devices: tuple[Hashable, ...] = ()
    per_device: dict[str, Array] = field(default_factory=dict)
    more: dict[str, dict[str, float]] = field(default_factory=dict)
    models: dict[str, FittedModel] = field(default_factory=dict)


def compare(
    train: Federation,
    test: Federation,
    graph: Graph | None = None,
    options: FitOptions | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Held-out error of Fedkin beside its two extremes: every device alone, and one model for all.

    Parameters
    ----------
    train, test : Federation
        Rows of the same devices, as `Federation.split` cuts them; devices of the test may lack rows.
    graph, options, progress
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
    model = fit_federation(train, graph, options, progress)
    prepared = prepare(train, options)
    alone = Graph.empty(train.devices)
    (progress or silent)("fitting Local and Global for comparison")
    models = {
        "Local": replace(prepared.model(_local_theta(prepared, options), alone, options), clusters=alone.components()),
        "Global": prepared.model(_global_theta(prepared, options), alone, options),
        "Fedkin": model,
    }
    return _scored(models, test)


# --- the two extremes -----------------------------------------------------------------------------------------


def _local_theta(prepared: Prepared, options: FitOptions) -> Array:
    if options.ridge > 0:
        alone = replace(options, lam=0.0, sparsity=0.0)
        problem, _ = well_posed_problem(prepared, Graph.empty(prepared.federation.devices), alone)
        return solve(problem, options.tol).theta
    return local_fit(prepared.federation, prepared.loss).theta


def _global_theta(prepared: Prepared, options: FitOptions) -> Array:
    fed = prepared.federation
    if options.ridge > 0:
        pooled = Federation.from_arrays(fed.X, fed.y, np.zeros(len(fed.X), dtype=np.int64), offset=fed.offset)
        alone = replace(options, lam=0.0, sparsity=0.0)
        problem, _ = well_posed_problem(replace(prepared, federation=pooled), Graph.empty(pooled.devices), alone)
        theta = solve(problem, options.tol).theta[0]
    else:
        with warnings.catch_warnings():
            # its rescue is as good as Local's, which is silent
            warnings.simplefilter("ignore", DegenerateDeviceWarning)
            theta = global_fit(fed, prepared.loss)
    return np.tile(theta, (fed.n_devices, 1))


# --- scores ---------------------------------------------------------------------------------------------------


def _scored(models: Mapping[str, FittedModel], test: Federation) -> Comparison:
    if len(test.X) == 0:
        raise DataError("there are no held-out rows to compare on")
    some = next(iter(models.values()))
    position = np.array([some.index.get(device, -1) for device in test.devices])
    if (position < 0).any():
        unknown = test.devices[int(position.argmin())]
        raise DataError(
            f"device {unknown!r} of the test is not among the training devices: cut both from one federation"
        )
    ids = [device for device, n in zip(test.devices, test.n_samples.tolist(), strict=True) for _ in range(n)]
    target = _encoded_target(some, test)
    metric = _METRICS.get(some.loss.name, "loss")
    errors, per_device = {}, {}
    more: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        response = model._responses(test.X, ids, test.offset)
        rows = _row_errors(model, test, target, response)
        errors[name] = float(rows.mean())
        sums = np.bincount(test.device_index, weights=rows, minlength=test.n_devices)
        per_device[name] = np.divide(
            sums, test.n_samples, out=np.full(test.n_devices, np.nan), where=test.n_samples > 0
        )
        for extra, value in _more_scores(model, test, target, response).items():
            more.setdefault(extra, {})[name] = value
    return Comparison(metric, False, errors, test.devices, per_device, more, dict(models))


def _encoded_target(model: FittedModel, test: Federation) -> Array | None:
    if test.y is None:
        if model.loss.needs_target:
            raise DataError("the held-out rows have no target to compare with")
        return None
    if model.classes is None:
        return test.y.astype(np.float64)
    code = {label: number for number, label in enumerate(model.classes)}
    unknown = [label for label in np.unique(test.y).tolist() if label not in code]
    if unknown:
        raise DataError(f"class {unknown[0]!r} is in the held-out rows, but not in the training rows")
    return np.array([code[label] for label in test.y.tolist()], dtype=np.float64)


def _row_errors(model: FittedModel, test: Federation, target: Array | None, response: Array) -> Array:
    name = model.loss.name
    if name == "mean":
        return np.asarray(((test.X - response) ** 2).sum(axis=1))
    if target is None or name not in _METRICS:
        return _own_losses(model, test)
    if name == "linear":
        return np.asarray((target - response) ** 2)
    if name == "huber":
        return np.abs(target - response)
    if name == "poisson":
        mu = np.maximum(response, np.finfo(float).tiny)
        ratio = np.where(target > 0, target, mu) / mu
        return np.asarray(2.0 * (target * np.log(ratio) - target + mu))
    chances = np.column_stack([1.0 - response, response]) if response.ndim == 1 else response
    own = chances[np.arange(target.size), target.astype(np.int64)]
    return -np.log(np.maximum(own, 1e-15))


def _own_losses(model: FittedModel, test: Federation) -> Array:
    """Each held-out row's loss by a custom loss."""
    X = np.column_stack([np.ones(len(test.X)), test.X]) if model.fit_intercept else test.X
    out = np.empty(len(X))
    for row, u in enumerate(test.device_index.tolist()):
        one = slice(row, row + 1)
        theta = model._theta(model.index[test.devices[u]])
        y = None if test.y is None else test.y[one]
        out[row] = model.loss.value(theta, X[one], y, None if test.offset is None else test.offset[one])
    return out


def _more_scores(model: FittedModel, test: Federation, target: Array | None, response: Array) -> dict[str, float]:
    if target is None:
        return {}
    if model.classes is not None:
        chances = np.column_stack([1.0 - response, response]) if response.ndim == 1 else response
        scores = {"accuracy": float((chances.argmax(axis=1) == target).mean())}
        if response.ndim == 1:
            areas = [
                auc(target[test.device_index == u], response[test.device_index == u]) for u in range(test.n_devices)
            ]
            if not np.isnan(areas).all():
                scores["AUC per device"] = float(np.nanmean(areas))
        return scores
    if model.loss.name in ("linear", "huber") and np.ptp(target) > 0:
        return {"explained variance": float(1.0 - ((target - response) ** 2).mean() / target.var())}
    return {}


def auc(truth: Array, score: Array) -> float:
    """Area under the ROC curve: the chance that a 1 has a higher score than a 0, ties counting half; NaN without both.

    Examples
    --------
    >>> import numpy as np
    >>> auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8]))
    0.75
    """
    ones, zeros = score[truth == 1], np.sort(score[truth == 0])
    if ones.size == 0 or zeros.size == 0:
        return float("nan")
    below = np.searchsorted(zeros, ones, side="left") + np.searchsorted(zeros, ones, side="right")
    return float(below.mean() / (2 * zeros.size))
