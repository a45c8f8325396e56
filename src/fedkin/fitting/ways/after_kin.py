"""The fused estimator after kin: on the groups that kin found, with coefficients in units of their spread."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from fedkin._base import Array, Say
from fedkin.data import Federation
from fedkin.errors import ConvergenceWarning
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Prepared, prepare, well_posed_problem
from fedkin.fitting.ways.federation import fused_model, silent
from fedkin.graph import Graph
from fedkin.kin import Kin, find_kin
from fedkin.solvers import cross_validate_lam, lam_grid

#: Powers of the spread that cross-validation chooses among: 0 leaves coefficients as they are.
POWERS = (0.0, 0.5, 1.0)
#: Levels by which a power is judged, down to this share of the one that fuses all, and the gap of their solutions.
LEVELS, SHARE, ROUGH_GAP = 5, 0.01, 1e-3
#: No spread counts for less than this share of the largest.
LEAST = 1e-3


def fit_after_kin(
    federation: Federation, options: FitOptions | None = None, progress: Say | None = None
) -> FittedModel:
    """Fit the fused estimator on what kin found.

    Where kin resolves groups, edges join the sites of a group; where it resolves none, all pairs are edges. The penalty
    measures a coefficient's differences in a power of its spread, which kin has learned: coefficients that differ much
    between sites (often the intercept) are pulled together less than those that hardly do.

    Parameters
    ----------
    federation : Federation
        As in `fit_federation`.
    options : FitOptions, optional
        Those of the fused estimator; edges are not tested. With a number as ``lam`` the power is 1, else
        cross-validation chooses it among 0, 1/2 and 1.
    progress : callable, optional
        Called with a line of text before each step.

    Returns
    -------
    FittedModel
        With a certified gap; ``model.options["spread_power"]`` is the power.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
    >>> model = fit_after_kin(design.federation)
    >>> model.n_clusters, model.gap <= 1e-6
    (2, True)
    """
    options = replace(FitOptions() if options is None else options, method="fused", select="none")
    say = progress or silent
    prepared = prepare(federation, options)
    say("finding kin")
    kin = find_kin(prepared.rows, loss=prepared.loss, seed=options.seed)
    graph, power = group_graph(kin), 1.0
    if options.lam == "cv" and graph.n_edges:
        say("choosing the power of the spread")
        power = min(POWERS, key=lambda one: _loss(_stretched(prepared, kin, one), graph, options))
    model = fused_model(_stretched(prepared, kin, power), graph, options, say)
    return replace(model, options={**model.options, "spread_power": power})


def group_graph(kin: Kin) -> Graph:
    """Cliques of the groups; all pairs where none are resolved, or where some site has no kin to hold on to."""
    groups = kin.graph("groups")
    return groups if groups.degree.all() else Graph.complete(kin.sites)


def _stretched(prepared: Prepared, kin: Kin, power: float) -> Prepared:
    """The same rows with columns in units of that power of the spread."""
    rows, spread = prepared.rows, np.maximum(kin.sd, LEAST * kin.sd.max())
    # classes share columns
    size = np.log(spread if spread.any() else np.ones_like(spread)).reshape(-1, rows.n_features).mean(axis=0)
    stretch: Array = np.exp(power * (size - size.mean()))
    return replace(prepared, federation=rows.replaced(X=rows.X * stretch), stretch=stretch)


def _loss(prepared: Prepared, graph: Graph, options: FitOptions) -> float:
    """The smallest held-out loss among a few levels."""
    problem, _ = well_posed_problem(prepared, graph, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        choice = cross_validate_lam(
            problem,
            lam_grid(problem, LEVELS + 1, SHARE)[1:],
            folds=options.cv_folds,
            seed=options.seed,
            tol=ROUGH_GAP,
            n_jobs=options.n_jobs,
        )
    return float(choice.mean.min())
