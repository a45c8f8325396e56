"""The fused estimator: edges tested, ``lam`` chosen, the problem solved with a certificate; also after kin."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask, Say
from fedkin.admm import fed_admm
from fedkin.core import (
    RANK_TOLERANCE,
    FileRows,
    Problem,
    Solution,
    Summaries,
    least_eigenvalue,
    local_fit,
    oracle_fit,
    select_edges,
)
from fedkin.data import INTERCEPT, Federation
from fedkin.errors import ConvergenceWarning, DegenerateSiteWarning, ParameterError, SolverError, argument
from fedkin.fitting.model import FittedModel, FusedFit
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Estimate, Prepared, prepare
from fedkin.graph import Graph
from fedkin.kin import Kin, find_kin
from fedkin.losses import LOGIT_SIZE
from fedkin.solvers import (
    LamChoice,
    ProfiledProblem,
    cross_validate_lam,
    cross_validate_ridge,
    lam_grid,
    solve,
    solve_debiased,
)

Reasons = dict[Hashable, str]  # site: why its parameters had to be held back

_MOST_PAIRS = 5_000_000  # beyond this many, pairs are not listed
_COLLINEAR = "collinear features"
_SEPARATED = "separated classes, a class that is missing, or no counts"
#: Candidates for a ridge that is to be chosen; features have a standard deviation of about 1.
RIDGES = (0.0, 1e-3, 1e-2, 0.1, 1.0)
#: Powers of the standard deviation between sites that cross-validation chooses among after kin; 0 changes nothing.
POWERS = (0.0, 0.5, 1.0)
#: Levels by which a power is judged, down to this share of the one that fuses all, and the gap of their solutions.
_LEVELS, _SHARE, _ROUGH_GAP = 5, 0.01, 1e-3
#: No standard deviation counts for less than this share of the largest.
_LEAST_SD = 1e-3


def silent(line: str) -> None:
    """Report no progress."""


def fused_estimate(prepared: Prepared, graph: Graph | None, options: FitOptions, say: Say) -> Estimate:
    """Fit the fused estimator to rows in memory, or to the sums of a quadratic loss."""
    if isinstance(prepared.data, FileRows):
        needs = f"the rows of the {prepared.loss.name} loss in memory"
        raise ParameterError(f"the fused estimator needs {needs}: leave its options out, or read the table as a whole")
    sites = prepared.data.sites
    used, selection, notes = used_graph(prepared, graph, options, say)
    problem, reasons = well_posed_problem(prepared, used, options)
    free = prepared.columns.intercepts
    try:
        level = _chosen_level(problem, options, free, say)
        solution, groups = _solved(level, options, free, say)
    except SolverError:
        if reasons:
            raise
        # rows held out by a fold can take away the last overlap of two classes; where edges do not pull at intercepts,
        # it is that of a site
        alone = options.fuse_intercept is not True
        reasons = dict.fromkeys(sites, "separated classes or a missing one, perhaps only without the rows of a fold")
        problem = _with_light_ridge(problem, Graph.empty(sites) if alone else used, list(sites))
        level = _chosen_level(problem, options, free, say)
        solution, groups = _solved(level, options, free, say)
    note_light_ridge(notes, reasons)
    theta = solution.theta
    if options.select is not None:
        groups = used.components()
    if options.refit:
        say(f"refitting {int(groups.max()) + 1} groups without penalty")
        theta = oracle_fit(prepared.data, groups.tolist(), prepared.loss)
    history = None if level.scores is None else {"choice": _choice_record(level, level.scores, options)}
    fused = FusedFit(options.penalty, level.lam, solution.gap, solution.n_iter, solution.status, selection)
    return Estimate(theta, used, groups, fused=fused, notes=notes, history=history)


def used_graph(
    prepared: Prepared, graph: Graph | None, options: FitOptions, say: Say
) -> tuple[Graph, dict[str, Any] | None, dict[Hashable, tuple[str, ...]]]:
    """Return the graph of the problem, a summary of the edge selection, and its notes on sites."""
    sites = prepared.data.sites
    candidates = Graph.complete(sites) if graph is None else graph.aligned(sites)
    unlisted = options.select is None and options.penalty == "l1" and options.solver == "exact"
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
    assert not isinstance(prepared.data, FileRows)
    how: dict[str, Any] = {"method": options.select, "level": options.level, "variance": options.variance}
    chosen = select_edges(prepared.data, candidates, loss=prepared.loss, **how)
    kept = chosen.graph.n_edges
    say(f"kept {kept} of {candidates.n_edges} edges")
    notes: dict[Hashable, tuple[str, ...]] = {site: (str(line),) for site, line in chosen.notes.items()}
    return chosen.graph, how | {"candidates": candidates.n_edges, "kept": kept}, notes


# --- the level --------------------------------------------------------------------------------------------------


class _Level(NamedTuple):
    """A problem with its ridge, the level, what cross-validation saw, and whether edges pull at intercepts."""

    problem: Problem
    lam: float
    scores: LamChoice | None = None
    fuses: bool = True


def _solved(level: _Level, options: FitOptions, free: Mask, say: Say) -> tuple[Solution, Index]:
    """Return the solution with all parameters, and the groups that share what edges pull at."""
    say(f"solving at lam = {level.lam:.4g}")
    profiled = None if level.fuses else ProfiledProblem(level.problem, free)
    solution = _solution((level.problem if profiled is None else profiled.rest).with_lam(level.lam), options)
    groups = solution.clusters(level.problem.graph)
    return solution if profiled is None else profiled.lifted(solution), groups


def _solution(problem: Problem, options: FitOptions) -> Solution:
    if options.debias != "none":
        return solve_debiased(problem, options.debias, tol=options.tol)[-1]
    if options.solver == "exact":
        return solve(problem, options.tol, max_iter=options.max_iter)
    gradient = "plain" if options.batch_size is None else "saga"
    how: dict[str, Any] = {"gradient": gradient, "seed": options.seed, "tol": options.tol, "fuse": True}
    return fed_admm(problem, options.rounds, options.batch_size, **how)


def _choice_record(level: _Level, scores: LamChoice, options: FitOptions) -> dict[str, Any]:
    """Return what a cross-validation saw, in plain values."""
    curves = {name: getattr(scores, name).tolist() for name in ("lams", "mean", "error")}
    choice = {"lam": scores.lam, "rule": scores.rule, **curves}
    if options.fuse_intercept is not True:
        choice["fuse_intercept"] = level.fuses
    if options.ridge == "cv":
        choice["ridge"] = float(np.max(level.problem.ridge))
    return choice


def chosen_lam(problem: Problem, options: FitOptions, say: Say) -> float:
    """Return the given ``lam``, or that of cross-validation."""
    return _with_intercepts_fused(problem, options, say).lam


def _chosen_level(problem: Problem, options: FitOptions, free: Mask, say: Say) -> _Level:
    fuse = options.fuse_intercept
    if not free.any() or problem.graph.n_edges == 0:
        fuse = True  # nothing to leave alone
    if fuse is True:
        return _with_intercepts_fused(problem, options, say)
    if fuse is False:
        if options.ridge == "cv":
            problem = _with_intercepts_fused(problem, options, say).problem
        if options.lam != "cv":
            return _Level(problem, float(options.lam), fuses=False)
        return _with_intercepts_apart(problem, options, free, say)
    both = _with_intercepts_fused(problem, options, say, compared=True)
    apart = _with_intercepts_apart(both.problem, options, free, say)
    assert both.scores is not None and apart.scores is not None
    return apart if apart.scores.mean.min() < both.scores.mean.min() else both


def _with_intercepts_apart(problem: Problem, options: FitOptions, free: Mask, say: Say) -> _Level:
    say(f"choosing lam by {options.cv_folds}-fold cross-validation within sites, intercepts left alone")
    lams = None if options.lam == "cv" else [float(options.lam)]
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        choice = ProfiledProblem(problem, free).choose(lams, **_cross_validation(options))
    return _Level(problem, choice.lam, choice, fuses=False)


def _cross_validation(options: FitOptions) -> dict[str, Any]:
    return {"folds": options.cv_folds, "rule": options.cv_rule, "seed": options.seed, "n_jobs": options.n_jobs}


def _with_intercepts_fused(problem: Problem, options: FitOptions, say: Say, *, compared: bool = False) -> _Level:
    """Return the given ``lam``, or that of cross-validation; ``compared`` asks for scores in any case."""
    if options.lam != "cv" and not compared:
        return _Level(problem, float(options.lam))
    joined = np.flatnonzero(problem.graph.degree > 0)
    if joined.size == 0:
        return _Level(problem, 0.0)
    say(f"choosing lam by {options.cv_folds}-fold cross-validation within sites")
    # sites without edges do not depend on lam; with V' of V sites left, V' lam' = V lam. Not where scores are compared
    share = 1.0 if compared else joined.size / problem.n_sites
    part = problem
    if share < 1:
        sites = [problem.federation.sites[u] for u in joined]
        data, graph = problem.federation.subset(sites), problem.graph.subset(sites)
        part = replace(problem, federation=data, graph=graph, sparsity=np.asarray(problem.sparsity)[joined])
    how = _cross_validation(options)
    # candidates that are hard to solve are far from the best, whose solution gets a certificate of its own
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        if options.ridge == "cv":
            # the ridge is 0 for intercepts; one that is there already, lest there be no minimiser, stays
            given = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,))
            names = part.federation.feature_names
            slopes = np.tile([name != INTERCEPT for name in names], part.n_params // len(names))
            candidates = [given + ridge * slopes for ridge in RIDGES]
            part, choice = cross_validate_ridge(part, candidates, **how)
            problem = replace(problem, ridge=part.ridge)
        else:
            choice = cross_validate_lam(part, None if options.lam == "cv" else [float(options.lam)], **how)
    # the same scale for the candidates: they are levels of the whole problem then
    return _Level(problem, choice.lam * share, replace(choice, lam=choice.lam * share, lams=choice.lams * share))


# --- a problem with a minimiser ---------------------------------------------------------------------------------


def well_posed_problem(prepared: Prepared, graph: Graph, options: FitOptions) -> tuple[Problem, Reasons]:
    """Return the problem, with a light ridge where it would have no minimiser, and the reasons for that."""
    assert not isinstance(prepared.data, FileRows)
    columns = prepared.columns
    sparsity = np.broadcast_to(columns.per_parameter(options.sparsity), (graph.n_sites, columns.n_params))
    how: dict[str, Any] = {"sparsity": sparsity, "ridge": columns.per_parameter(options.least_ridge)}
    problem = Problem(prepared.data, graph, prepared.loss, options.penalty, **how)
    # edges with a penalty leave only common directions free: a component has a minimiser when its pooled loss has one
    groups = graph if options.lam != 0 else Graph.empty(graph.sites)
    reasons = _without_minimiser(prepared, groups.components(), options)
    if not reasons:
        return problem, {}
    # least squares along a collinear direction is only as steep as one site's ridge makes it
    rowwise = prepared.loss.rowwise
    alone = Graph.empty(graph.sites) if rowwise is not None and rowwise.minimiser == "always" else groups
    return _with_light_ridge(problem, alone, list(reasons)), reasons


def _with_light_ridge(problem: Problem, groups: Graph, sites: list[Hashable]) -> Problem:
    """Add a 25th of one row's worth of ridge for all sites, intercept included; the rule of `LocalFit`."""
    fed = problem.federation
    if isinstance(fed, Summaries):
        own, scale = fed.n_samples.astype(np.float64), fed.column_scale
    else:
        own, scale = fed.weight_sums, np.average(fed.X**2, axis=0, weights=fed.weight)
        scale[scale == 0] = 1.0
    rows = np.bincount(groups.components(), weights=own)[groups.components()]
    fewest = min(rows[fed.index[site]] for site in sites)
    light = np.tile(scale, problem.n_params // fed.n_features) / (LOGIT_SIZE * fewest)
    return replace(problem, ridge=np.asarray(problem.ridge) + light)


def note_light_ridge(notes: dict[Hashable, tuple[str, ...]], reasons: Reasons) -> None:
    """Note why sites have a light ridge, and warn of those whose parameters the data do not determine."""
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


def _without_minimiser(prepared: Prepared, labels: Index, options: FitOptions) -> Reasons:
    """Return the sites in groups whose pooled loss has no unique minimiser, and why."""
    data, loss = prepared.data, prepared.loss.rowwise
    if loss is None or loss.minimiser == "unknown":
        return {}
    held = options.least_ridge > 0 or options.sparsity > 0
    if loss.minimiser == "always":
        # several sites with collinear features; a site alone has its shortest solution
        several = [] if held else np.flatnonzero(np.bincount(labels) > 1).tolist()
        bad: dict[Hashable, str] = {label: _COLLINEAR for label in several if _collinear(data, labels == label)}
    elif isinstance(data, Summaries):
        # a sum of losses that are bounded below grows in every direction in which one of them does
        assert data.own is not None
        poor = np.array([one.ridge.any() for one in data.own])
        lost = [label for label in np.unique(labels).tolist() if poor[labels == label].all()]
        own = np.arange(data.n_sites)
        which = np.flatnonzero(np.isin(labels, lost)).tolist()
        return {data.sites[u]: _COLLINEAR if _collinear(data, own == u) else _SEPARATED for u in which}
    else:
        fed = prepared.rows
        assert fed.y is not None
        group = labels[fed.site_index]
        if held:
            # only the intercept is free: it has nowhere to stop when a class, or every count, is missing
            diverges = np.flatnonzero(loss.constant_diverges(fed.y, group)) if prepared.columns.intercept else ()
            bad = {int(label): _SEPARATED for label in diverges}
        else:
            fit = local_fit(Federation.from_arrays(fed.X, fed.y, group, offset=fed.offset, weight=fed.weight), loss)
            rescued = [fit.sites[u] for u in np.flatnonzero(fit.rescued)]
            bad = {label: _COLLINEAR if _collinear(fed, labels == label) else _SEPARATED for label in rescued}
    return {site: bad[label] for site, label in zip(data.sites, labels.tolist(), strict=True) if label in bad}


def _collinear(data: Any, members: NDArray[np.bool_]) -> bool:
    """Return whether the pooled features of some sites are collinear."""
    if isinstance(data, Summaries):
        gram = data.sums.total().hessian[members, 0].sum(axis=0)
    else:
        rows = data.X[members[data.site_index]]
        size = np.sqrt((rows**2).mean(axis=0))
        rows = rows / np.where(size > 0, size, 1.0)
        gram = rows.T @ rows
    return bool(least_eigenvalue(np.asarray(gram)) <= RANK_TOLERANCE)


# --- after kin --------------------------------------------------------------------------------------------------


def fit_after_kin(
    federation: Federation, options: FitOptions | None = None, progress: Say | None = None
) -> FittedModel:
    """Fit the fused estimator on what kin found.

    Edges join the sites of a group; without groups, and where some site would have no edge, all pairs. The penalty
    measures a coefficient's differences in a power of its standard deviation between sites, which kin has learned.
    """
    options = replace(FitOptions() if options is None else options, method="fused", select="none")
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
    """Return the same rows with columns in units of that power of the standard deviation between sites."""
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
