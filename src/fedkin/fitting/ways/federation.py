"""The fit itself: by kin, or fused: edges selected, ``lam`` chosen, the problem solved."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

from fedkin._base import Say
from fedkin.core import Method, oracle_fit, select_edges
from fedkin.data import Federation, Schema
from fedkin.errors import ParameterError, SolverError
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Prepared, note_light_ridge, prepare_fit, well_posed_problem, with_light_ridge
from fedkin.fitting.ways.kin import kin_model, with_covariates
from fedkin.fitting.ways.levels import solved_level
from fedkin.graph import Graph
from fedkin.kin import Covariates, hint_of

_MOST_PAIRS = 5_000_000  # beyond this many, pairs are not listed


def fit_federation(
    federation: Federation,
    graph: Graph | None = None,
    options: FitOptions | None = None,
    progress: Say | None = None,
    schema: Schema | None = None,
    start: FittedModel | None = None,
    *,
    covariates: Covariates | None = None,
    quick: bool = False,
) -> FittedModel:
    """Fit a model for every site.

    Parameters
    ----------
    federation : Federation
        For "logistic" and "multinomial" the targets are class labels of any kind.
    graph : Graph, optional
        Over the sites of the federation, in any order. Kin takes it for a hint at who is alike, which may be wrong.
        For the fused estimator it has the edges; without it all pairs of sites are edges (candidates for edges, if
        ``options.select`` is on).
    options : FitOptions, optional
        How to fit.
    progress : callable, optional
        Called with a line of text before each step.
    schema : Schema, optional
        Of a federation that `Schema.federation` made: rows are then centred and scaled as it says, whatever
        ``options.standardize``, and the model keeps it.
    start : FittedModel, optional
        An earlier model of the same columns: kin begins where it ended, which saves time.
    covariates : mapping {site: value, row or {name: value}}, array (V, q) or pandas table, optional
        What is known about the sites beside their rows, instead of a graph: `fedkin.kin.covariate_graph` makes one of
        it. The model keeps the names in ``options["covariates"]``, and its kin what was made of them.
    quick : bool
        Whether only predictions are wanted: kin samples a third as long, which is enough for them, and not for
        diagnostics and probabilities.

    Returns
    -------
    FittedModel

    Notes
    -----
    *Method.* See `FitOptions`. The rest of these notes is about the fused estimator.

    *Groups.* With edge selection the groups are the connected components of the kept edges; without it they are the
    sites that came out exactly fused along edges.

    *No minimiser.* Where the likelihood of a whole connected component has no maximum (classes separated, a class
    missing, no counts), or its features are collinear, a ridge of a 25th of one row's worth is added for all sites.
    The sites concerned have a note in the model; in the first case a `DegenerateSiteWarning` is given.

    *One site, or no edges.* There is nothing to choose: ``lam`` is 0 unless it is given as a number.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=20, n_samples=60, n_features=10, n_clusters=2, seed=0)
    >>> fit_federation(design.federation, design.graph)
    FittedModel(linear, kin, 20 sites, in 2 groups)
    >>> fit_federation(design.federation, design.graph, FitOptions(method="fused")).n_clusters
    2
    """
    options = FitOptions() if options is None else options
    hint = hint_of(graph, covariates, federation.sites)
    prepared = prepare_fit(federation, options, schema)
    model = fit_prepared(prepared, hint, options, progress or silent, start, quick=quick)
    return with_covariates(model, covariates)


def fit_prepared(
    prepared: Prepared,
    graph: Graph | None,
    options: FitOptions,
    say: Say,
    start: FittedModel | None = None,
    *,
    quick: bool = False,
) -> FittedModel:
    """The model of rows, or of sums for least squares, that were prepared as ``options`` want them."""
    if options.chosen == "fused":
        return fused_model(prepared, graph, options, say)
    say("finding kin")
    return kin_model(prepared, graph, options, start, quick=quick)


def fused_model(prepared: Prepared, graph: Graph | None, options: FitOptions, say: Say) -> FittedModel:
    """The fused estimator, from what was prepared on."""
    sites = prepared.federation.sites
    used, selection, notes = used_graph(prepared, graph, options, say)
    problem, reasons = well_posed_problem(prepared, used, options)
    free = prepared.units.intercepts
    try:
        solved = solved_level(problem, options, free, say)
    except SolverError:
        if reasons:
            raise
        # rows held out by a fold can take away the last overlap of two classes; where edges do not pull at intercepts,
        # it is that of a site
        alone = options.fuse_intercept is not True
        reasons = dict.fromkeys(sites, "separated classes or a missing one, perhaps only without the rows of a fold")
        problem = with_light_ridge(problem, Graph.empty(sites) if alone else used, list(sites))
        solved = solved_level(problem, options, free, say)
    note_light_ridge(notes, reasons, stacklevel=4)
    solution = solved.solution
    clusters = used.components() if options.select is not None else solved.clusters
    theta = solution.theta
    if options.refit:
        say(f"refitting {int(clusters.max()) + 1} groups without penalty")
        theta = oracle_fit(prepared.federation, clusters.tolist(), prepared.loss)
    return prepared.model(
        theta,
        used,
        options,
        clusters=clusters,
        lam=solved.lam,
        gap=solution.gap,
        n_iter=solution.n_iter,
        status=solution.status,
        selection=selection,
        notes=notes,
        history=None if solved.choice is None else {"choice": solved.choice},
    )


def silent(line: str) -> None:
    """The progress that nobody asked for."""


def used_graph(
    prepared: Prepared, graph: Graph | None, options: FitOptions, say: Say
) -> tuple[Graph, dict[str, Any] | None, dict[Hashable, tuple[str, ...]]]:
    """The graph of the problem, a summary of the edge selection, and what it noted about sites."""
    sites = prepared.federation.sites
    candidates = Graph.complete(sites) if graph is None else graph.aligned(sites)
    unlisted = options.select is None and options.penalty == "l1" and options.solver == "exact"
    if graph is None and candidates.n_edges > _MOST_PAIRS and not unlisted:
        raise ParameterError(
            f"{len(sites)} sites have {candidates.n_edges} pairs, too many to list: give a graph, for example "
            "Graph.knn(coordinates, k), or take all pairs untested (select='none', penalty='l1')"
        )
    if options.select is None:
        return candidates, None, {}
    if candidates.n_edges == 0:
        return candidates, {"method": options.select, "candidates": 0, "kept": 0}, {}
    say(f"testing {candidates.n_edges} candidate edges")
    chosen = select_edges(
        prepared.federation,
        candidates,
        loss=prepared.loss,
        level=options.level,
        method=cast(Method, options.select),
        variance=options.variance,
    )
    summary = {
        "method": options.select,
        "level": options.level,
        "variance": options.variance,
        "candidates": candidates.n_edges,
        "kept": chosen.graph.n_edges,
    }
    say(f"kept {chosen.graph.n_edges} of {candidates.n_edges} edges")
    return chosen.graph, summary, {site: (str(line),) for site, line in chosen.notes.items()}
