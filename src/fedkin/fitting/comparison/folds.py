"""Fedkin beside its two extremes from sums alone: every fold held out in turn."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np

from fedkin._base import Array
from fedkin.data import Schema
from fedkin.errors import ConvergenceWarning
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import prepare
from fedkin.graph import Graph
from fedkin.kin import find_kin
from fedkin.objective import FoldSums, FusedObjective, Problem, QuadraticTerms, Summaries, generalized_inverse
from fedkin.solvers import solve_fused

#: Relative gap of the solutions without a fold.
FOLD_GAP = 1e-5


@dataclass(frozen=True)
class FoldComparison:
    """Mean error over all rows, each predicted without its fold; lower is better.

    Attributes
    ----------
    metric : str
    errors : dict {"Local" | "Global" | "Fedkin": float}
    rows : int
        Rows that were held out once.
    """

    metric: str
    errors: dict[str, float]
    rows: int


def compare_folds(
    summaries: Summaries, model: FittedModel, options: FitOptions, schema: Schema | None = None
) -> FoldComparison | None:
    """Held-out error of a model's method beside Local and Global; None where the sites gave no sums by fold.

    Parameters
    ----------
    summaries : Summaries
        From which the model was fitted: for losses that are not quadratic, the last answers.
    model : FittedModel
        Its edges and its ``lam`` are used in every fold; they were chosen with all rows. Kin is found anew in each.
    options, schema
        Those of the fit.

    Notes
    -----
    For quadratic losses the errors are exact. For others the losses are replaced by their expansions around the point
    of the summaries, in the rows that train as in those held out. Local takes the shortest solution where a site's rows
    do not tell one; Global gives every row the same weight.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_devices=20, n_samples=60, n_features=10, n_clusters=2, seed=0)
    >>> summaries = fedkin.summarise(design.federation.with_intercept())
    >>> model = fedkin.fit_summaries(summaries, design.graph)
    >>> errors = compare_folds(summaries, model, FitOptions()).errors
    >>> errors["Fedkin"] < errors["Local"] < errors["Global"]
    True
    """
    prepared = prepare(summaries, options, schema)
    data, units = prepared.federation, prepared.units
    assert isinstance(data, Summaries)
    shape, sums = (data.n_devices, data.n_params), data.sums
    held_out = np.flatnonzero(sums.count[:, :-1].any(axis=0)).tolist()
    if not held_out:
        return None
    ridge = units.per_feature(options.least_ridge)

    def fedkin(rest: FoldSums, training: QuadraticTerms) -> Array:
        if model.kin is not None:
            return find_kin(replace(data, sums=rest), _hint(model), seed=options.seed).theta
        sparsity = np.broadcast_to(units.per_feature(options.sparsity), shape)
        fused = Problem(data, model.graph, penalty=model.penalty, lam=model.lam, sparsity=sparsity, ridge=ridge).fused
        objective = FusedObjective(training, fused.graph, fused.penalty, fused.strength, fused.sparsity)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return solve_fused(objective, FOLD_GAP, quiet=True).theta

    totals: dict[str, float] = dict.fromkeys(("Local", "Global", "Fedkin"), 0.0)
    for fold in held_out:
        seen = np.flatnonzero(sums.count[:, fold])
        rest = sums.total(without=fold)
        training, test = rest.terms(ridge=ridge), sums.take(seen).terms(fold)
        thetas = {
            "Local": training.minimizers(),
            "Global": np.tile(_pooled_minimizer(training, rest.count[:, 0].astype(np.float64)), (len(training.b), 1)),
            "Fedkin": fedkin(rest, training),
        }
        for name, theta in thetas.items():
            totals[name] += float(sums.count[seen, fold] @ test.values(theta[seen]))
    rows = int(sums.count[:, :-1].sum())
    metric, factor = _METRICS.get(data.loss.name, ("loss, expanded around the fit", 1.0))
    return FoldComparison(metric, {name: factor * total / rows for name, total in totals.items()}, rows)


def _hint(model: FittedModel) -> Graph | None:
    return model.graph if model.graph.n_edges else None


def _pooled_minimizer(terms: QuadraticTerms, weight: Array) -> Array:
    """The common minimiser ``(p,)`` of the sites' quadratics, each as often as it has rows."""
    A, b = np.tensordot(weight, terms.hessians(terms.b), axes=1), weight @ terms.b
    return np.asarray(generalized_inverse(A[None])[0][0] @ b)


_METRICS = {"linear": ("mean squared error", 2.0), "mean": ("mean squared distance", 2.0)}
