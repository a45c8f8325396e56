"""The fused estimator at its level: ``lam`` given or chosen, with ridge and intercepts chosen beside it, and solved."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedkin._base import Index, Mask, Say
from fedkin.core import Problem, Solution
from fedkin.data import INTERCEPT
from fedkin.errors import ConvergenceWarning
from fedkin.fitting.options import FitOptions
from fedkin.solvers import (
    LamChoice,
    ProfiledProblem,
    cross_validate_lam,
    cross_validate_ridge,
    solve,
    solve_debiased,
)

#: Candidates for a ridge that is to be chosen; features have a standard deviation of about 1.
RIDGES = (0.0, 1e-3, 1e-2, 0.1, 1.0)


@dataclass(frozen=True, eq=False)
class Solved:
    """A solution with all parameters, the groups that share what edges pull at, and how the level was chosen."""

    solution: Solution
    clusters: Index
    lam: float
    choice: dict[str, Any] | None


@dataclass(frozen=True, eq=False)
class _Level:
    """A problem with its ridge, the level, what cross-validation saw, and whether edges pull at intercepts."""

    problem: Problem
    lam: float
    scores: LamChoice | None = None
    fuses: bool = True


def solved_level(problem: Problem, options: FitOptions, free: Mask, say: Say) -> Solved:
    """The solution of a problem whose intercepts are the ``free (p,)`` parameters."""
    level = _chosen(problem, options, free, say)
    say(f"solving at lam = {level.lam:.4g}")
    if level.fuses:
        solution = whole = _solution(level.problem.with_lam(level.lam), options)
    else:
        profiled = ProfiledProblem(level.problem, free)
        solution = _solution(profiled.rest.with_lam(level.lam), options)
        whole = profiled.lifted(solution)
    choice = None if level.scores is None else choice_record(level.scores)
    if choice is not None and options.fuse_intercept is not True:
        choice["fuse_intercept"] = level.fuses
    if choice is not None and options.ridge == "cv":
        choice["ridge"] = float(np.max(level.problem.ridge))
    return Solved(whole, solution.clusters(problem.graph), level.lam, choice)


def choice_record(choice: LamChoice) -> dict[str, Any]:
    """What a cross-validation saw."""
    return {
        "lam": choice.lam,
        "rule": choice.rule,
        "lams": choice.lams.tolist(),
        "mean": choice.mean.tolist(),
        "error": choice.error.tolist(),
    }


def _solution(problem: Problem, options: FitOptions) -> Solution:
    if options.debias != "none":
        return solve_debiased(problem, options.debias, tol=options.tol)[-1]
    if options.solver == "exact":
        return solve(problem, options.tol, max_iter=options.max_iter)
    from fedkin.admm import fed_admm

    return fed_admm(
        problem,
        options.rounds,
        options.batch_size,
        gradient="plain" if options.batch_size is None else "saga",
        seed=options.seed,
        tol=options.tol,
        fuse=True,
    )


def chosen_lam(problem: Problem, options: FitOptions, say: Say) -> float:
    """The given ``lam``, or that of cross-validation."""
    return _with_intercepts_fused(problem, options, say).lam


def _chosen(problem: Problem, options: FitOptions, free: Mask, say: Say) -> _Level:
    fuse = options.fuse_intercept
    if not free.any() or problem.graph.n_edges == 0:
        fuse = True  # nothing to leave alone
    if fuse is True or (fuse is False and options.ridge == "cv"):
        level = _with_intercepts_fused(problem, options, say)
        if fuse is True:
            return level
        problem = level.problem
    if fuse is False:
        lam = None if options.lam == "cv" else float(options.lam)
        return _with_intercepts_apart(problem, options, free, say, lam)
    both = _with_intercepts_fused(problem, options, say, compared=True)
    apart = _with_intercepts_apart(both.problem, options, free, say, None, compared=True)
    assert both.scores is not None and apart.scores is not None
    return apart if apart.scores.mean.min() < both.scores.mean.min() else both


def _with_intercepts_apart(
    problem: Problem, options: FitOptions, free: Mask, say: Say, lam: float | None, *, compared: bool = False
) -> _Level:
    profiled = ProfiledProblem(problem, free)
    if lam is not None:
        return _Level(problem, lam, fuses=False)
    say(f"choosing lam by {options.cv_folds}-fold cross-validation within sites, intercepts left alone")
    lams = [float(options.lam)] if compared and options.lam != "cv" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        choice = profiled.choose(
            lams, folds=options.cv_folds, rule=options.cv_rule, seed=options.seed, n_jobs=options.n_jobs
        )
    return _Level(problem, choice.lam, choice, fuses=False)


def _with_intercepts_fused(problem: Problem, options: FitOptions, say: Say, *, compared: bool = False) -> _Level:
    """The given ``lam``, or that of cross-validation with what it saw; ``compared`` asks for scores in any case."""
    if options.lam != "cv" and not compared:
        return _Level(problem, float(options.lam))
    joined = np.flatnonzero(problem.graph.degree > 0)
    if joined.size == 0:
        return _Level(problem, 0.0)
    say(f"choosing lam by {options.cv_folds}-fold cross-validation within sites")
    # sites without edges do not depend on lam; with V' of V sites left, V' lam' = V lam. Not where scores are compared
    share = 1.0 if compared else joined.size / problem.n_sites
    part = problem if share == 1 else _restricted(problem, joined)
    lams = [float(options.lam)] if options.lam != "cv" else None
    how: dict[str, Any] = {"folds": options.cv_folds, "rule": options.cv_rule, "seed": options.seed}
    with warnings.catch_warnings():
        # candidates that are hard to solve are far from the best, whose solution gets a certificate of its own
        warnings.simplefilter("ignore", ConvergenceWarning)
        if options.ridge == "cv":
            # the ridge is 0 for intercepts; one that is there already, lest there be no minimiser, stays
            shrunk = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,))
            candidates = [shrunk + ridge * _slopes(part) for ridge in RIDGES]
            part, choice = cross_validate_ridge(part, candidates, **how, n_jobs=options.n_jobs)
            problem = replace(problem, ridge=part.ridge)
        else:
            choice = cross_validate_lam(part, lams, **how, n_jobs=options.n_jobs)
    # the same scale for the candidates: they are levels of the whole problem then
    return _Level(problem, choice.lam * share, replace(choice, lam=choice.lam * share, lams=choice.lams * share))


def _slopes(problem: Problem) -> Mask:
    """Which parameters are no intercepts."""
    first = problem.federation.feature_names[0] == INTERCEPT
    names = problem.federation.n_features
    return np.asarray((np.arange(problem.n_params) % names > 0) | (not first))


def _restricted(problem: Problem, members: Index) -> Problem:
    """The problem of some sites that no edge joins to the others."""
    sites = [problem.federation.sites[u] for u in members]
    return replace(
        problem,
        federation=problem.federation.subset(sites),
        graph=problem.graph.subset(sites),
        sparsity=np.asarray(problem.sparsity)[members],
    )
