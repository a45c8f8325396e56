"""Fit the fused estimator: test edges, choose ``lam``, solve with a certificate; also on the result of kin."""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedkin._base import Array, Index, Mask, Say
from fedkin.admm import Availability
from fedkin.admm.algorithm import fed_admm
from fedkin.cluster import running_engine
from fedkin.core import (
    RANK_TOLERANCE,
    Columns,
    Problem,
    Quadratics,
    SiteData,
    Solution,
    alike_groups,
    least_eigenvalue,
    local_fit,
    oracle_fit,
    select_edges,
    wald_tests,
)
from fedkin.data import INTERCEPT, Federation, Schema
from fedkin.errors import ConvergenceWarning, DegenerateSiteWarning, ParameterError, SolverError, argument
from fedkin.fitting.model import FittedModel, FusedFit
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Data, Estimate, Prepared, prepare
from fedkin.graph import Graph
from fedkin.kin import Kin, find_kin
from fedkin.losses import LOGIT_SIZE
from fedkin.solvers import (
    LamChoice,
    ProfiledProblem,
    cross_validate_lam,
    cross_validate_ridge,
    cross_validate_sparsity,
    lam_grid,
    lam_path,
    minimised_out,
    solve,
    solve_debiased,
    solve_fused,
)

Reasons = dict[Hashable, str]  # site: why its parameters needed a ridge

_MOST_PAIRS = 5_000_000  # largest number of pairs that are listed
_COLLINEAR = "collinear features"
_SEPARATED = "separated classes, a class that is missing, or no counts"
#: Candidate ridges; features have a standard deviation of about 1.
RIDGES = (0.0, 1e-3, 1e-2, 0.1, 1.0)
#: Candidate powers of the standard deviation between sites, after kin; 0 leaves columns unscaled.
POWERS = (0.0, 0.5, 1.0)
#: Penalty levels at which a power is scored, down to this share of the level that fuses all, and their gap.
_LEVELS, _SHARE, _ROUGH_GAP = 5, 0.01, 1e-3
#: Standard deviations are at least this share of the largest.
_LEAST_SD = 1e-3
#: Largest number of dropped edges that are stored by name.
MOST_DROPPED = 20_000
#: Largest number of duals for which the path is solved for the report, and of sites whose groups are stored.
_MOST_DUALS, _MOST_SITES = 200_000, 2_000
_PATH_TOL, _PATH_ITER = 1e-5, 2_000
#: Relative gap of solutions without a fold.
_FOLD_GAP = 1e-5


def silent(line: str) -> None:
    """Report no progress."""


def fused_estimate(prepared: Prepared, graph: Graph | None, options: FitOptions, say: Say) -> Estimate:
    """Fit the fused estimator to rows in memory, or to the sums of a quadratic loss."""
    sites = prepared.solvable.sites
    used, selection, notes = used_graph(prepared, graph, options, say)
    problem, reasons = well_posed_problem(prepared, used, options)
    free = prepared.columns.intercepts
    try:
        level, solution, groups = _solved(problem, options, free, say)
    except SolverError:
        if reasons:
            raise
        # holding out a fold can remove the last overlap of two classes; without fused intercepts it is that of a site
        alone = options.fuse_intercept is not True
        reasons = dict.fromkeys(sites, "separated classes or a missing class, perhaps only without the rows of a fold")
        problem = _with_light_ridge(problem, Graph.empty(sites) if alone else used, list(sites))
        level, solution, groups = _solved(problem, options, free, say)
    note_light_ridge(notes, reasons)
    theta = solution.theta
    if options.refit:
        groups = _groups_to_pool(prepared, used, theta, options)
        say(f"refitting {int(groups.max()) + 1} groups without penalty")
        theta = oracle_fit(prepared.solvable, groups.tolist(), prepared.loss, radius=options.radius)
    history = None if level.scores is None else {"choice": _choice_record(level, level.scores, options)}
    fused = FusedFit(options.penalty, level.lam, solution.gap, solution.n_iter, solution.status, selection)
    return Estimate(theta, used, groups, fused=fused, notes=notes, history=history)


def _groups_to_pool(prepared: Prepared, graph: Graph, theta: Array, options: FitOptions) -> Index:
    """Return groups of neighbours that do not differ significantly, joined in order of distance in ``theta (V, p)``."""
    local = local_fit(prepared.solvable, prepared.loss, options.variance, radius=options.radius)
    statistic, _, _ = wald_tests(local, graph.edges)
    i, j = graph.edges.T
    order = np.lexsort((statistic, np.sqrt(((theta[i] - theta[j]) ** 2).sum(axis=1))))
    return alike_groups(local, graph.edges[order], options.level)


def used_graph(
    prepared: Prepared, graph: Graph | None, options: FitOptions, say: Say
) -> tuple[Graph, dict[str, Any] | None, dict[Hashable, tuple[str, ...]]]:
    """Return the graph of the problem, a summary of the edge selection, and its notes on sites."""
    sites = prepared.data.sites
    candidates = Graph.complete(sites) if graph is None else graph.aligned(sites)
    plain = options.select is None and options.penalty == "l1" and options.solver == "exact"
    unlisted = plain and not options.radius and not options.refit
    if graph is None and candidates.n_edges > _MOST_PAIRS and not unlisted:
        raise ParameterError(
            f"{len(sites)} sites have {candidates.n_edges} pairs, too many to list: give a graph, for example "
            "Graph.knn(coordinates, k), or take all pairs untested "
            f"({argument('select', 'none')}, {argument('penalty', 'l1')})"
        )
    if options.select is None:
        return candidates, None, {}
    if candidates.n_edges == 0:
        return candidates, {"method": options.select, "candidates": 0, "kept": 0}, {}
    say(f"testing {candidates.n_edges} candidate edges")
    how: dict[str, Any] = {"method": options.select, "level": options.level, "variance": options.variance}
    chosen = select_edges(prepared.solvable, candidates, loss=prepared.loss, radius=options.radius, **how)
    kept = chosen.graph.n_edges
    say(f"kept {kept} of {candidates.n_edges} edges")
    notes: dict[Hashable, tuple[str, ...]] = {site: (str(line),) for site, line in chosen.notes.items()}
    return chosen.graph, how | {"candidates": candidates.n_edges, "kept": kept}, notes


# --- the level --------------------------------------------------------------------------------------------------


class _Level(NamedTuple):
    """A problem with its ridge, the penalty level, the cross-validation, and whether intercepts are fused."""

    problem: Problem
    lam: float
    scores: LamChoice | None = None
    fuses: bool = True


def _solved(problem: Problem, options: FitOptions, free: Mask, say: Say) -> tuple[_Level, Solution, Index]:
    """Return the level, the solution there with all parameters, and the groups that share fused parameters."""
    level = _chosen_level(problem, options, free, say)
    say(f"solving at lam = {level.lam:.4g}")
    profiled = None if level.fuses else ProfiledProblem.from_problem(level.problem, free)
    solution = _solution((level.problem if profiled is None else profiled).with_lam(level.lam), options)
    groups = solution.clusters(level.problem.graph)
    return level, solution if profiled is None else profiled.lifted(solution), groups


def _solution(problem: Problem, options: FitOptions) -> Solution:
    if options.debias != "none":
        return solve_debiased(problem, options.debias, tol=options.tol)[-1]
    if options.solver == "exact":
        return solve(problem, options.tol, max_iter=options.max_iter, on=running_engine() or "local")
    how: dict[str, Any] = {"fuse": True, "seed": options.seed, **(options.fedadmm or {})}
    tol = options.tol if how.pop("stop", "gap") == "gap" else None
    present, weighting = how.pop("availability", None), how.pop("weighting", "known")
    if present is not None:
        make = Availability.recorded if isinstance(present, str | os.PathLike) else Availability.bernoulli
        how["availability"] = make(present, weighting=weighting)
    return fed_admm(problem, options.rounds, options.batch_size, tol=tol, on=running_engine() or "local", **how)


def _choice_record(level: _Level, scores: LamChoice, options: FitOptions) -> dict[str, Any]:
    """Return the results of a cross-validation as plain values."""
    curves = {name: getattr(scores, name).tolist() for name in ("lams", "mean", "error")}
    choice = {"lam": scores.lam, "rule": scores.rule, **curves}
    if options.fuse_intercept is not True:
        choice["fuse_intercept"] = level.fuses
    if options.ridge == "cv":
        choice["ridge"] = float(np.max(level.problem.ridge))
    if isinstance(options.sparsity, str):
        levels = np.asarray(level.problem.sparsity).max(axis=1).tolist()
        choice["sparsity"] = levels[0] if options.sparsity == "cv" else levels
    return choice


def at_chosen_level(problem: Problem, options: FitOptions, say: Say) -> tuple[Problem, dict[str, Any] | None]:
    """Return the problem at the given level, or at the level that cross-validation chose, with its results."""
    level = _with_intercepts_fused(problem, options, say)
    seen = None if level.scores is None else _choice_record(level, level.scores, options)
    return level.problem.with_lam(level.lam), seen


def _chosen_level(problem: Problem, options: FitOptions, free: Mask, say: Say) -> _Level:
    fuse = options.fuse_intercept
    if not free.any() or problem.graph.n_edges == 0:
        fuse = True  # no intercept to leave unfused
    if fuse is True:
        return _with_intercepts_fused(problem, options, say)
    if fuse is False:
        if isinstance(options.ridge, str) or isinstance(options.sparsity, str):
            problem = _with_intercepts_fused(problem, options, say).problem
        if options.lam != "cv":
            return _Level(problem, float(options.lam), fuses=False)
        return _with_intercepts_apart(problem, options, free, say)
    both = _with_intercepts_fused(problem, options, say, compared=True)
    apart = _with_intercepts_apart(both.problem, options, free, say)
    assert both.scores is not None and apart.scores is not None
    return apart if apart.scores.mean.min() < both.scores.mean.min() else both


def _with_intercepts_apart(problem: Problem, options: FitOptions, free: Mask, say: Say) -> _Level:
    say(f"choosing lam by {options.cv_folds}-fold cross-validation within sites, intercepts not fused")
    lams = None if options.lam == "cv" else [float(options.lam)]
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        choice = cross_validate_lam(problem, lams, free=free, **_cross_validation(options))
    return _Level(problem, choice.lam, choice, fuses=False)


def _cross_validation(options: FitOptions) -> dict[str, Any]:
    return {"folds": options.cv_folds, "rule": options.cv_rule, "seed": options.seed, "n_jobs": options.n_jobs}


def _with_intercepts_fused(problem: Problem, options: FitOptions, say: Say, *, compared: bool = False) -> _Level:
    """Return the given ``lam``, or the one that cross-validation chose; ``compared`` always computes scores."""
    if options.lam != "cv" and not compared:
        return _Level(problem, float(options.lam))
    joined, sparse = np.flatnonzero(problem.graph.degree > 0), isinstance(options.sparsity, str)
    if joined.size == 0 and not sparse:
        return _Level(problem, 0.0)
    say(f"choosing lam{' and sparsity' if sparse else ''} by {options.cv_folds}-fold cross-validation within sites")
    # sites without edges do not depend on lam; with V' of V sites left, V' lam' = V lam. Not where scores are compared,
    # nor where these sites depend on what is chosen
    share = 1.0 if compared or sparse else joined.size / problem.n_sites
    part = problem
    if share < 1:
        sites = [problem.federation.sites[u] for u in joined]
        data, graph = problem.federation.subset(sites), problem.graph.subset(sites)
        part = replace(problem, federation=data, graph=graph, sparsity=np.asarray(problem.sparsity)[joined])
    how = _cross_validation(options)
    # candidates that are hard to solve are far from the best; the chosen one gets its own certificate
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        names = part.federation.feature_names
        slopes = np.tile([name != INTERCEPT for name in names], part.n_params // len(names))
        if options.ridge == "cv":
            # the ridge is 0 for intercepts; one that is there already, lest there be no minimiser, stays
            given = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,))
            candidates = [given + ridge * slopes for ridge in RIDGES]
            part, choice = cross_validate_ridge(part, candidates, **how)
            problem = replace(problem, ridge=part.ridge)
        elif sparse:
            each = options.sparsity == "cv-sites"
            part, choice = cross_validate_sparsity(part, weights=slopes.astype(np.float64), per_site=each, **how)
            problem = replace(problem, sparsity=part.sparsity)
        else:
            choice = cross_validate_lam(part, None if options.lam == "cv" else [float(options.lam)], **how)
    # scale the candidates alike, so that they are levels of the whole problem
    return _Level(problem, choice.lam * share, replace(choice, lam=choice.lam * share, lams=choice.lams * share))


# --- a problem with a minimiser ---------------------------------------------------------------------------------


def extras(
    columns: Columns, graph: Graph, options: FitOptions, choice: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return radius, ridge ``(p,)`` and sparsity ``(V, p)`` of a problem, as given or as in a ``choice``."""
    known = {"ridge": options.least_ridge, "sparsity": options.least_sparsity, **(choice or {})}
    levels = np.broadcast_to(np.asarray(known["sparsity"], dtype=np.float64), (graph.n_sites,))
    sparsity = levels[:, None] * columns.per_parameter(1.0)
    return {"radius": options.radius, "ridge": columns.per_parameter(known["ridge"]), "sparsity": sparsity}


def well_posed_problem(prepared: Prepared, graph: Graph, options: FitOptions) -> tuple[Problem, Reasons]:
    """Return the problem, with a small ridge if it would have no minimiser, and the reasons."""
    how = extras(prepared.columns, graph, options)
    problem = Problem(prepared.solvable, graph, prepared.loss, options.penalty, **how)
    if options.radius is not None:  # a ball holds a minimiser
        return problem, {}
    # edges with a penalty leave only common directions free: a component has a minimiser when its pooled loss has one
    groups = graph if options.lam != 0 else Graph.empty(graph.sites)
    reasons = _without_minimiser(problem.data, prepared.columns, groups.components(), options)
    if not reasons:
        return problem, {}
    # least squares along a collinear direction is only as steep as one site's ridge makes it
    rowwise = prepared.loss.rowwise
    alone = Graph.empty(graph.sites) if rowwise is not None and rowwise.minimiser == "always" else groups
    return _with_light_ridge(problem, alone, list(reasons)), reasons


def _with_light_ridge(problem: Problem, groups: Graph, sites: list[Hashable]) -> Problem:
    """Add a ridge worth 1/25 of a row at all sites, intercept included, as in `LocalFit`."""
    data = problem.data
    rows = np.bincount(groups.components(), weights=data.n)[groups.components()]
    fewest = min(rows[data.index[site]] for site in sites)
    light = np.tile(data.column_scale, problem.n_params // data.n_features) / (LOGIT_SIZE * fewest)
    return replace(problem, ridge=np.asarray(problem.ridge) + light)


def note_light_ridge(notes: dict[Hashable, tuple[str, ...]], reasons: Reasons) -> None:
    """Note why sites have a small ridge, and warn about those whose parameters the data do not determine."""
    sites = [site for site, reason in reasons.items() if reason != _COLLINEAR]
    if sites:
        shown, more = ", ".join(map(repr, sites[:5])), f" and {len(sites) - 5} more" if len(sites) > 5 else ""
        warnings.warn(
            f"the parameters of site {shown}{more} are not determined by the data ({reasons[sites[0]]}): a ridge "
            f"of 1/25 of a row was added. Join such sites to others, or give {argument('ridge')} yourself",
            DegenerateSiteWarning,
            stacklevel=3,
        )
    for site, reason in reasons.items():
        text = f"{reason}; a ridge of 1/25 of a row was added (or give {argument('ridge')})"
        notes[site] = (*notes.get(site, ()), text)


def _without_minimiser(data: SiteData, columns: Columns, labels: Index, options: FitOptions) -> Reasons:
    """Return the sites in groups whose pooled loss has no unique minimiser, and why."""
    loss = data.loss.rowwise
    if loss is None or loss.minimiser == "unknown":
        return {}
    held = options.least_ridge > 0 or options.least_sparsity > 0
    if loss.minimiser == "always":
        # several sites with collinear features; a site alone has its shortest solution
        several = [] if held else np.flatnonzero(np.bincount(labels) > 1).tolist()
        bad: dict[Hashable, str] = {label: _COLLINEAR for label in several if _collinear(data, labels == label)}
    elif data.own is not None:
        # a sum of losses that are bounded below grows in every direction in which one of them does
        poor = np.array([one.ridge.any() for one in data.own])
        lost = [label for label in np.unique(labels).tolist() if poor[labels == label].all()]
        own = np.arange(data.n_sites)
        which = np.flatnonzero(np.isin(labels, lost)).tolist()
        return {data.sites[u]: _COLLINEAR if _collinear(data, own == u) else _SEPARATED for u in which}
    else:
        fed = data.rows
        assert fed is not None and fed.y is not None
        group = labels[fed.site_index]
        if held:
            # only the intercept is free: it diverges when a class, or every count, is missing
            diverges = np.flatnonzero(loss.constant_diverges(fed.y, group)) if columns.intercept else ()
            bad = {int(label): _SEPARATED for label in diverges}
        else:
            fit = local_fit(Federation.from_arrays(fed.X, fed.y, group, offset=fed.offset, weight=fed.weight), loss)
            rescued = [fit.sites[u] for u in np.flatnonzero(fit.rescued)]
            bad = {label: _COLLINEAR if _collinear(data, labels == label) else _SEPARATED for label in rescued}
    return {site: bad[label] for site, label in zip(data.sites, labels.tolist(), strict=True) if label in bad}


def _collinear(data: SiteData, members: Mask) -> bool:
    """Return whether the pooled features of some sites are collinear."""
    return bool(least_eigenvalue(data.gram(members)) <= RANK_TOLERANCE)


# --- what follows from a model --------------------------------------------------------------------------------------


def with_history(
    model: FittedModel, data: Data, graph: Graph | None, options: FitOptions, schema: Schema | None = None
) -> FittedModel:
    """Return a model with the data for its report: standard deviations of columns; for a fused model also the dropped
    edges and the path.
    """
    history = dict(model.history or {})
    if data.in_memory and data.n_features == model.n_features:
        history["deviations"] = np.nanstd(data.X, axis=0).tolist()  # gaps may be filled within the fit
    if model.fused is None:
        return replace(model, history=history)
    if model.fused.selection is not None:
        candidates = Graph.complete(model.sites) if graph is None else graph.aligned(model.sites)
        gone = ~np.isin(candidates.edges @ [model.n_sites, 1], model.graph.edges @ [model.n_sites, 1])
        edges = candidates.edges[gone].tolist() if gone.sum() <= MOST_DROPPED else []
        history["dropped"] = {"candidates": candidates.n_edges, "edges": edges}
    choice = history.get("choice")
    known = data.has_rows or data.loss.quadratic  # required for a path
    if known and choice and model.graph.n_edges * model.coef[0].size <= _MOST_DUALS and model.n_sites <= _MOST_SITES:
        prepared = prepare(data, options, schema)
        options = replace(options, ridge=choice.get("ridge", options.least_ridge), sparsity=options.least_sparsity)
        problem, _ = well_posed_problem(prepared, model.graph, options)
        problem = replace(problem, sparsity=extras(prepared.columns, model.graph, options, choice)["sparsity"])
        if choice.get("fuse_intercept") is False:
            problem = ProfiledProblem.from_problem(problem, prepared.columns.intercepts)
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # for the report only
            path = lam_path(problem, choice["lams"], tol=_PATH_TOL, max_iter=_PATH_ITER)
        labels = [solution.clusters(model.graph).tolist() for solution in path.solutions]
        history["path"] = {"lams": path.lams.tolist(), "labels": labels}
    return replace(model, history=history)


def fused_from_sums(prepared: Prepared, model: FittedModel, options: FitOptions, rest: Quadratics) -> Array:
    """Return parameters ``(V, p)`` from part of the sums, with the edges and levels of ``model``."""
    data, columns = prepared.summaries, prepared.columns
    assert model.fused is not None
    choice = (model.history or {}).get("choice", {})
    how = extras(columns, model.graph, options, choice)
    fused = Problem(data, model.graph, penalty=model.fused.penalty, lam=model.fused.lam, **how).fused
    terms, lift = rest.terms(ridge=how["ridge"]), None
    if not choice.get("fuse_intercept", options.fuse_intercept is not False):
        terms, lift = minimised_out(terms, columns.intercepts)
        box = None if fused.sparsity is None else fused.sparsity[:, ~columns.intercepts]
        fused = replace(fused, sparsity=box)
    theta = solve_fused(replace(fused, terms=terms), _FOLD_GAP, quiet=True).theta
    return theta if lift is None else lift(theta)


# --- after kin --------------------------------------------------------------------------------------------------


def fit_after_kin(
    federation: Federation, options: FitOptions | None = None, progress: Say | None = None
) -> FittedModel:
    """Fit the fused estimator to the result of kin.

    Edges join the sites of a group, or all pairs if there are no groups or some site would have no edge. The penalty
    measures differences of a coefficient in a power of its standard deviation between sites, as estimated by kin.
    """
    options = replace(FitOptions() if options is None else options, method="fused", select="none")
    if options.radius is not None:
        raise ParameterError("after kin, columns are rescaled, so a radius has no meaning: leave it out")
    say = progress or silent
    prepared = prepare(federation, options)
    say("finding kin")
    kin = find_kin(prepared.rows, loss=prepared.loss, seed=options.seed)
    groups = kin.graph("groups")
    graph, power = groups if groups.degree.all() else Graph.complete(kin.sites), 1.0
    if options.lam == "cv" and graph.n_edges:
        say("choosing the power of the standard deviation between sites")
        power = min(POWERS, key=lambda one: _held_out_loss(_stretched(prepared, kin, one), graph, options))
    stretched = _stretched(prepared, kin, power)
    model = stretched.model(fused_estimate(stretched, graph, options, say), options)
    return replace(model, options={**model.options, "sd_power": power})


def _stretched(prepared: Prepared, kin: Kin, power: float) -> Prepared:
    """Return the rows with columns in units of a power of the standard deviation between sites."""
    rows, sd = prepared.rows, np.maximum(kin.sd, _LEAST_SD * kin.sd.max())
    # classes share columns
    size = np.log(sd if sd.any() else np.ones_like(sd)).reshape(-1, rows.n_features).mean(axis=0)
    stretch: Array = np.exp(power * (size - size.mean()))
    columns = replace(prepared.columns, scale=prepared.columns.scale / stretch)
    return replace(prepared, data=rows.replaced(X=rows.X * stretch), columns=columns)


def _held_out_loss(prepared: Prepared, graph: Graph, options: FitOptions) -> float:
    """Return the smallest held-out loss among a few levels."""
    problem, _ = well_posed_problem(prepared, graph, options)
    lams = lam_grid(problem, _LEVELS + 1, _SHARE)[1:]
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        return float(cross_validate_lam(problem, lams, tol=_ROUGH_GAP, **_cross_validation(options)).mean.min())
