"""The fit by kin: `find_kin` on prepared rows or summaries, and a model of what it found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkin._base import Array
from fedkin.core import Query, Summaries
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Prepared
from fedkin.fitting.ways.asks import Asks
from fedkin.graph import Graph
from fedkin.kin import QUICK, Covariates, Kin, Length, covariate_names, find_kin

#: Sites are told that no parameter vector is longer than this many times the longest estimate.
REACH = 10.0


def kin_model(
    prepared: Prepared,
    graph: Graph | None,
    options: FitOptions,
    start: FittedModel | None = None,
    *,
    quick: bool = False,
) -> FittedModel:
    """The model with kin, of rows or summaries in the units of the user's columns or of a schema.

    ``start`` is an earlier model of the same columns, with which to begin; ``quick`` says that predictions are all.
    """
    earlier = None if start is None else _as_prepared(start, prepared)
    length: Length = QUICK if quick else {}
    found = find_kin(prepared.federation, graph, loss=prepared.loss, seed=options.seed, start=earlier, **length)
    return model_of_kin(found, prepared, graph, options)


def _as_prepared(model: FittedModel, prepared: Prepared) -> Kin | None:
    """What an earlier model has found, in the units of prepared columns; None where it had other parameters."""
    names = prepared.units.parameter_names
    if model.kin is None or model.kin.names != names or model.loss.name != prepared.loss.name:
        return None
    A, shift = prepared.units.affine()
    back: Array = np.asarray(np.linalg.inv(A), dtype=np.float64)
    return model.kin.in_units(back, -back @ shift, names)


def model_of_kin(found: Kin, prepared: Prepared, graph: Graph | None, options: FitOptions) -> FittedModel:
    """The model of a result that was found on prepared rows.

    Groups that are resolved are its clusters; where none are, every site is on its own. Nothing is minimised, so there
    is no gap.
    """
    _, first, number = np.unique(found.groups, return_index=True, return_inverse=True)
    labels = np.argsort(np.argsort(first))[number] if found.resolved else np.arange(len(found.sites))
    units = prepared.units
    return units.model(
        found.theta,
        Graph.empty(found.sites) if graph is None else graph.aligned(found.sites),
        np.rint(prepared.original.n_samples).astype(np.int64),
        "none",
        clusters=labels.astype(np.int64),
        gap=float("nan"),
        options=options.plain(),
        kin=found.in_units(*units.affine(), units.parameter_names),
    )


def with_covariates(model: FittedModel, covariates: Covariates | None) -> FittedModel:
    """The model with the names of the covariates that its graph was made of, if it was, among its ``options``."""
    if covariates is None:
        return model
    return replace(model, options={**model.options, "covariates": list(covariate_names(covariates))})


def kin_asks(summaries: Summaries, theta: Array, number: int) -> Asks:
    """Questions about estimates ``theta (V, p)``; no edges pull, so nothing is to be certified."""
    V, p = theta.shape
    pull = -summaries.sums.total().terms().gradients(theta)
    radius = REACH * max(1.0, float(np.sqrt((theta**2).sum(axis=1)).max()))
    return Asks(
        number,
        tuple(Query(site, number, theta[k], pull[k], radius) for k, site in enumerate(summaries.sites)),
        lam=0.0,
        graph=Graph.empty(summaries.sites),
        theta=theta,
        alpha=np.zeros((0, p)),
        ridge=np.zeros(p),
        give=np.zeros(V),
        accuracy=0.0,
    )
