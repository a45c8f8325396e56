"""Fedkin beside simpler models, tuned, from sums alone: every fold held out in turn."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.core import FusedObjective, Problem, Quadratics, QuadraticTerms, Summaries
from fedkin.data import Schema
from fedkin.errors import ConvergenceWarning
from fedkin.fitting.comparison.fold_ridges import FoldRidges
from fedkin.fitting.comparison.verdict import FEDKIN, corrected_error, finite, verdict
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import prepare
from fedkin.graph import Graph
from fedkin.kin import QUICK, find_kin
from fedkin.solvers import minimised_out, solve_fused

#: Relative gap of the solutions without a fold.
FOLD_GAP = 1e-5


@dataclass(frozen=True, eq=False)
class FoldComparison:
    """Mean error over all rows, each predicted without its fold; lower is better.

    Attributes
    ----------
    metric : str
    errors : dict {"Local" | "Global" | "Site intercepts" | "Fedkin": float}
    rows : int
        Rows that were held out once.
    fold_errors : dict {name: array (K,)}
        The mean error in each of K folds.

    Notes
    -----
    Folds share the rows that train, so standard errors are corrected as those of a `Comparison`: the variance over
    folds times ``1/K + 1/(K - 1)``.
    """

    metric: str
    errors: dict[str, float]
    rows: int
    fold_errors: Mapping[str, Array]

    def standard_error(self, name: str) -> float:
        """Of the error of a method; NaN with one fold."""
        return self._over_folds(self.fold_errors[name])

    def difference(self, name: str) -> float:
        """How much larger the error of a method is than Fedkin's."""
        return self.errors[name] - self.errors[FEDKIN]

    def difference_error(self, name: str) -> float:
        """Standard error of `difference`: the folds are the same for both."""
        if name == FEDKIN:
            return 0.0
        return self._over_folds(self.fold_errors[name] - self.fold_errors[FEDKIN])

    @property
    def verdict(self) -> str:
        """What to do with it, in one sentence."""
        others = [name for name in self.errors if name != FEDKIN]
        return verdict(
            self.errors[FEDKIN],
            {name: self.difference(name) for name in others},
            {name: self.difference_error(name) for name in others},
        )

    def plain(self) -> dict[str, Any]:
        """The comparison in plain values, as ``--json`` has it."""
        return {
            "metric": self.metric,
            "lower_is_better": True,
            "rows": self.rows,
            "folds": len(self.fold_errors[FEDKIN]),
            "verdict": self.verdict,
            "errors": self.errors,
            "methods": [
                {
                    "name": name,
                    "mean": error,
                    "standard_error": finite(self.standard_error(name)),
                    "difference": self.difference(name),
                    "difference_error": finite(self.difference_error(name)),
                }
                for name, error in self.errors.items()
            ],
        }

    def _over_folds(self, values: Array) -> float:
        return corrected_error(values, 1 / len(values)) if len(values) > 1 else float("nan")


def compare_folds(
    summaries: Summaries, model: FittedModel, options: FitOptions, schema: Schema | None = None
) -> FoldComparison | None:
    """Held-out error of a model's method beside simpler ones, tuned; None where the sites gave no sums by fold.

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
    of the summaries, in the rows that train as in those held out.

    Local is a ridge fit at every site, Global one of all rows, Site intercepts the same with an intercept for every
    site. Ridges are chosen by the folds that train, each held out in turn; at every site its own for Local.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=20, n_samples=60, n_features=10, n_clusters=2, seed=0)
    >>> summaries = fedkin.summarise(design.federation.with_intercept())
    >>> model = fedkin.fit_summaries(summaries, design.graph)
    >>> errors = compare_folds(summaries, model, FitOptions()).errors
    >>> errors["Fedkin"] < errors["Local"] < errors["Global"]
    True
    """
    prepared = prepare(summaries, options, schema)
    data, units = prepared.federation, prepared.units
    assert isinstance(data, Summaries)
    shape, sums = (data.n_sites, data.n_params), data.sums
    held_out = np.flatnonzero(sums.count[:, :-1].any(axis=0)).tolist()
    if not held_out:
        return None
    choice = (model.history or {}).get("choice", {})
    ridge = units.per_feature(choice.get("ridge", options.least_ridge))
    fuses = choice.get("fuse_intercept", options.fuse_intercept is not False)

    def fedkin(rest: Quadratics, training: QuadraticTerms) -> Array:
        if model.kin is not None:
            return find_kin(replace(data, sums=rest), _hint(model), seed=options.seed, **QUICK).theta
        sparsity = np.broadcast_to(units.per_feature(options.sparsity), shape)
        fused = Problem(data, model.graph, penalty=model.penalty, lam=model.lam, sparsity=sparsity, ridge=ridge).fused
        if fuses:
            return _fused(replace(fused, terms=training))
        terms, lift = minimised_out(training, units.intercepts)
        box = None if fused.sparsity is None else fused.sparsity[:, ~units.intercepts]
        return lift(_fused(replace(fused, terms=terms, sparsity=box)))

    simpler = FoldRidges(sums, units.intercepts)
    totals: dict[str, list[float]] = {}
    for fold in held_out:
        seen = np.flatnonzero(sums.count[:, fold])
        rest = sums.total(without=fold)
        training, test = rest.terms(ridge=ridge), sums.take(seen).terms(fold)
        for name, theta in {**simpler.models(fold), FEDKIN: fedkin(rest, training)}.items():
            totals.setdefault(name, []).append(float(sums.count[seen, fold] @ test.values(theta[seen])))
    sizes = sums.count[:, held_out].sum(axis=0)
    rows = int(sums.count[:, :-1].sum())
    metric, factor = "loss, expanded around the fit", 1.0
    if data.loss.quadratic and data.loss.metric is not None:
        metric, factor = data.loss.metric, 2.0  # such a loss is half a square
    return FoldComparison(
        metric,
        {name: factor * sum(each) / rows for name, each in totals.items()},
        rows,
        {name: factor * np.array(each) / sizes for name, each in totals.items()},
    )


def _hint(model: FittedModel) -> Graph | None:
    return model.graph if model.graph.n_edges else None


def _fused(objective: FusedObjective) -> Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return solve_fused(objective, FOLD_GAP, quiet=True).theta
