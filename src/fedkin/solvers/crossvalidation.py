"""Choose ``lam``, and a ridge or the level of the l1 term with it, by cross-validation within sites."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypedDict, Unpack

import numpy as np

from fedkin._base import Array, Index, Mask, check_choice, check_positive, check_whole
from fedkin.core import FusedObjective, Problem, QuadraticTerms, assign_folds, build_terms, summed_terms
from fedkin.data import Federation
from fedkin.errors import DataError, ParameterError
from fedkin.solvers import path
from fedkin.solvers.compiled import Backend, run_side_by_side, threads_for
from fedkin.solvers.exact import solve_fused
from fedkin.solvers.newton import ProfiledProblem, profiled

Rule = Literal["min", "1se"]


class Validation(TypedDict, total=False):
    """Settings of cross-validation; see `cross_validate_lam`."""

    folds: int
    rule: Rule
    seed: int
    n_jobs: int | None
    backend: Backend


#: Limit on the iterations of each solution.
MAX_ITER = 20_000
#: Number of levels for judging a ridge, and the relative gap of their solutions.
FEW_LEVELS, ROUGH_GAP = 6, 1e-3
#: A difference between levels of more than this many standard errors counts as certain.
CLEAR = 2.0
#: Levels of sparsity that are tried, and the least of them as a share of the one at which all parameters are 0.
N_LEVELS, LEAST_SHARE = 10, 1e-3


@dataclass(frozen=True, eq=False)
class LamChoice:
    """Penalty level chosen by cross-validation, with the scores of all candidates.

    Attributes
    ----------
    lam : float
    lams : array (m,)
        Evaluated candidates, decreasing.
    scores : array (folds, m)
        Held-out mean loss, each site weighted equally. Folds without rows are left out.
    mean, error : array (m,)
        Mean over folds and its standard error.
    rule : "min" | "1se"
    """

    lam: float
    lams: Array = field(repr=False)
    scores: Array = field(repr=False)
    mean: Array = field(repr=False)
    error: Array = field(repr=False)
    rule: Rule


def cross_validate_lam(
    problem: Problem,
    lams: Sequence[float] | Array | None = None,
    *,
    free: Mask | None = None,
    folds: int = 5,
    rule: Rule = "min",
    n_lams: int = 20,
    ratio: float = 1e-3,
    seed: int = 0,
    tol: float = 1e-4,
    n_jobs: int | None = None,
    backend: Backend = "auto",
) -> LamChoice:
    """Choose ``lam`` by K-fold cross-validation within sites, so that every site contributes to every fold.

    Parameters
    ----------
    problem : Problem
        Its own ``lam`` does not matter.
    lams, n_lams, ratio
        Candidates; by default a grid of ``n_lams`` from `lam_max` down to ``ratio * lam_max``, tried from the middle
        outwards (from above if a site has no minimiser of its own) until scores become clearly worse.
    free : array (p,) of bool, optional
        Unpenalised parameters, such as intercepts, which are profiled out.
    folds, seed : int
        Number of folds, at least 2, and their seed.
    rule : "min" or "1se"
        The best candidate, or the largest one within one standard error of it (more fusion).
    tol : float
        Relative gap along the path. For losses that are not quadratic, the solver may also stop after a Newton step
        that lowers the objective by a smaller share, without a certificate.
    n_jobs : int, optional
        Number of threads, by default one per core. The result does not depend on it.
    backend : "auto", "numpy" or "numba"
        As in `fedkin.solve`.

    Returns
    -------
    LamChoice

    Notes
    -----
    If the federation is ``ordered`` in time, folds are blocks of time, and each fold trains on earlier blocks only.
    With `fedkin.Summaries`, the folds are those of the sites; losses that are not quadratic are replaced by their
    expansions around the point of the summaries.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=10, n_samples=40, n_features=3, n_clusters=2, seed=0)
    >>> choice = fedkin.cross_validate_lam(fedkin.Problem(design.federation, design.truth), n_lams=8)
    >>> bool(choice.lams.min() <= choice.lam <= choice.lams.max())
    True
    """
    check_choice("rule", rule, ("min", "1se"))
    check_whole("folds", folds, least=2)
    check_whole("seed", seed, least=0)
    check_positive("tol", tol)
    if n_jobs == 0:
        raise ParameterError("n_jobs must not be 0; give a number of jobs, or -1 for one per core")
    problem.data.check_folds(folds, seed)
    if problem.federation.n_samples.max() < 2:
        raise DataError(
            "no site has two training rows, so cross-validation within sites is not possible "
            "(test rows are not used for training: --test-size 0 keeps all for training); give lam as a number"
        )
    rest = problem if free is None else ProfiledProblem.from_problem(problem, free)
    grid = path.lam_grid(rest, n_lams, ratio) if lams is None else path.checked_grid(lams)
    cut = cut_folds(problem, folds, seed)
    if free is not None:
        cut = [fold.profiled(free) for fold in cut]
    scores, tried = _LevelSearch(cut, grid * problem.n_sites, tol, backend, n_jobs).run(abandon=lams is None)
    grid = grid[tried]
    mean, used = scores.mean(axis=0), len(scores)
    error = scores.std(axis=0, ddof=min(used - 1, 1)) / np.sqrt(used)
    return LamChoice(float(grid[best_level(mean, error if rule == "1se" else None)]), grid, scores, mean, error, rule)


def cross_validate_ridge(
    problem: Problem, ridges: Sequence[float | Array], **how: Unpack[Validation]
) -> tuple[Problem, LamChoice]:
    """Choose the ridge together with ``lam``, scoring each ridge at its best level on a coarse grid.

    Parameters
    ----------
    problem : Problem
        Its own ``ridge`` and ``lam`` do not matter.
    ridges : sequence of float or array (p,)
        Candidates, increasing. The search stops once scores become clearly worse.
    folds, rule, seed, n_jobs, backend
        As in `cross_validate_lam`.

    Returns
    -------
    tuple of Problem and LamChoice
        The problem with the chosen ridge, and the choice of its ``lam``.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.solvers import cross_validate_ridge
    >>> design = paper_design(n_sites=10, n_samples=12, n_features=8, n_clusters=2, seed=0)
    >>> problem, choice = cross_validate_ridge(fedkin.Problem(design.federation, design.truth), [0.0, 0.1, 100.0])
    >>> problem.ridge < 100.0
    True
    """
    if not len(ridges):
        raise ParameterError("ridges must name at least one candidate")
    tried = _judged((replace(problem, ridge=ridge) for ridge in ridges), how)
    best, _ = min(tried, key=lambda one: float(one[1].mean()))
    return best, cross_validate_lam(best, **how)


def cross_validate_sparsity(
    problem: Problem,
    levels: Sequence[float] | Array | None = None,
    *,
    weights: Array | None = None,
    per_site: bool = False,
    **how: Unpack[Validation],
) -> tuple[Problem, LamChoice]:
    """Choose the level of the l1 term together with ``lam``, scoring each level at its best ``lam`` on a coarse grid.

    Parameters
    ----------
    problem : Problem
        Its own ``sparsity`` and ``lam`` do not matter.
    levels : sequence of float, optional
        Candidates; by default ten, decreasing from the level at which all parameters are 0, and 0. The search stops at
        a level that is clearly worse over all sites, unless ``per_site`` is set.
    weights : array (p,), optional
        Relative size of the level for each parameter, 0 for intercepts; 1 by default.
    per_site : bool
        Give a site its own level (the paper's ``lambda_i``) where it predicts held-out rows significantly better than
        the common level.
    folds, rule, seed, n_jobs, backend
        As in `cross_validate_lam`.

    Returns
    -------
    tuple of Problem and LamChoice
        The problem with the chosen sparsity ``(V, p)``, and the choice of its ``lam``.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.solvers import cross_validate_sparsity
    >>> design = paper_design(n_sites=10, n_samples=12, n_features=8, n_clusters=2, seed=0)
    >>> problem, choice = cross_validate_sparsity(fedkin.Problem(design.federation, design.truth))
    >>> problem.sparsity.shape
    (10, 8)
    """
    weights = np.ones(problem.n_params) if weights is None else np.asarray(weights, dtype=np.float64)
    if weights.shape != (problem.n_params,) or not (weights >= 0).all() or not weights.any():
        raise ParameterError(f"weights must be {problem.n_params} numbers of at least 0, not all of them 0")
    if levels is None:
        levels = np.append(0.0, sparsity_max(problem, weights) * np.geomspace(LEAST_SHARE, 1.0, N_LEVELS))
    grid = path.checked_grid(levels)
    ones = np.ones((problem.n_sites, 1))
    tried = _judged((replace(problem, sparsity=one * weights * ones) for one in grid), how, abandon=not per_site)
    best = int(np.argmin([scores.mean() for _, scores in tried]))
    chosen = tried[best][0]
    if per_site:
        cuts = [cut_folds(one, how.get("folds", 5), how.get("seed", 0)) for one, _ in tried]
        own = _own_levels(cuts, grid, best)
        chosen = replace(chosen, sparsity=own[:, None] * weights)
    return chosen, cross_validate_lam(chosen, **how)


def _judged(problems: Iterable[Problem], how: Validation, *, abandon: bool = True) -> list[tuple[Problem, Array]]:
    """Return problems at their best of a few levels, with scores ``(folds,)``, until one is clearly worse."""
    tried: list[tuple[Problem, Array]] = []
    for problem in problems:
        few = np.append(path.lam_grid(problem, FEW_LEVELS), 0.0)
        choice = cross_validate_lam(problem, few, tol=ROUGH_GAP, **how)
        best = int(choice.mean.argmin())
        tried.append((problem.with_lam(float(choice.lams[best])), choice.scores[:, best]))
        if abandon and _clearly_worse(np.stack([scores for _, scores in tried], axis=1)):
            break
    return tried


def sparsity_max(problem: Problem, weights: Array) -> float:
    """Return the level at which the l1 term with ``weights (p,)`` sets all sites to 0."""
    free = weights == 0
    theta = np.zeros((1, problem.n_params))
    if free.any():
        pooled = summed_terms(problem.terms, np.zeros(problem.n_sites, dtype=np.int64))
        theta = profiled(pooled, free, ["all sites"])[1](theta[:, ~free])
    gradient = problem.terms.gradients(np.tile(theta, (problem.n_sites, 1)))
    return float((np.abs(gradient[:, ~free]) / weights[~free]).max())


def _own_levels(cuts: list[list[Fold]], levels: Array, best: int) -> Array:
    """Return a level for each site ``(V,)``: the common one, or another that is significantly better."""
    V = cuts[0][0].objective.graph.n_sites
    losses = np.full((len(cuts), len(cuts[0]), V), np.nan)
    for m, cut in enumerate(cuts):
        for k, fold in enumerate(cut):
            theta = solve_fused(fold.objective, ROUGH_GAP, quiet=True).theta
            losses[m, k, fold.seen] = fold.held_out(theta[fold.seen])
    chosen = np.full(V, best)
    for u in range(V):
        known = losses[:, ~np.isnan(losses[0, :, u]), u]
        better = [m for m in range(len(cuts)) if _beyond_doubt(known[best] - known[m])]
        chosen[u] = min(better, key=lambda m: float(known[m].mean()), default=best)
    return np.asarray(levels[chosen])


def best_level(mean: Array, error: Array | None = None) -> int:
    """Return the position of the smallest held-out loss ``mean (m,)``, or with ``error (m,)`` by the rule "1se"."""
    best = int(mean.argmin())
    return best if error is None else int(np.flatnonzero(mean <= mean[best] + error[best])[0])


@dataclass(frozen=True, eq=False)
class _LevelSearch:
    """Held-out mean losses ``(folds, m)`` along the path of each fold, and the positions of their levels."""

    folds: list[Fold]
    strengths: Array
    tol: float
    backend: Backend
    n_jobs: int | None

    def run(self, abandon: bool) -> tuple[Array, slice]:
        """Score all levels, or with ``abandon`` only some, extended on both sides until scores are clearly worse."""
        stretches = path.stretches_of(self.strengths.size)
        first, last = 0, len(stretches) - 1
        if abandon:
            terms = [fold.objective.terms for fold in self.folds]
            # without minimisers of their own, small levels take longest
            regular = all(isinstance(one, QuadraticTerms) and not one.singular.any() for one in terms)
            first = last = len(stretches) // 2 if regular else 0
        scores, messages = self._at(stretches[first : last + 1])
        while True:
            up = first > 0 and not self._done_above(scores)
            down = last + 1 < len(stretches) and not _clearly_worse(scores)
            if not (up or down):
                break
            if up and down:
                mean = scores.mean(axis=0)
                up = bool(mean[0] < mean[-1])
            first, last = (first - 1, last) if up else (first, last + 1)
            more, stopped = self._at([stretches[first if up else last]])
            scores, messages = np.concatenate([more, scores] if up else [scores, more], axis=1), messages + stopped
        path.warn_of_limits(messages, scores.size, stacklevel=4)
        return scores, slice(int(stretches[first][0]), int(stretches[last][-1]) + 1)

    def _done_above(self, scores: Array) -> bool:
        """Return whether larger levels can be skipped: the largest so far and full fusion are clearly worse."""
        if not _clearly_worse(scores[:, ::-1]):
            return False
        fused = [fold.score(path.fused_solution(fold.objective)) for fold in self.folds]
        return _beyond_doubt(np.array(fused) - scores[:, scores.mean(axis=0).argmin()])

    def _at(self, parts: list[Index]) -> tuple[Array, list[str]]:
        """Return scores along stretches of the path, and the messages of solutions at the iteration limit."""
        backend, n_jobs = self.backend, self.n_jobs
        pairs = itertools.product(self.folds, parts)
        tasks = [partial(_stretch_scores, fold, part, self.strengths, self.tol, backend) for fold, part in pairs]
        usual = threads_for(self.folds[0].objective, backend)
        threads = usual if n_jobs is None or n_jobs < 1 else min(n_jobs, usual)
        done = run_side_by_side(tasks, threads, "cross-validation")
        scores = np.concatenate([scores for scores, _ in done]).reshape(len(self.folds), -1)
        return scores, [message for _, stopped in done for message in stopped]


def _clearly_worse(scores: Array) -> bool:
    """Return whether the last levels of ``scores (folds, m)`` rise, and the last is clearly worse than the best."""
    mean = scores.mean(axis=0)
    rises = bool((np.diff(mean[-path.SHORTEST_STRETCH :]) > 0).all())
    return rises and _beyond_doubt(scores[:, -1] - scores[:, mean.argmin()])


def _beyond_doubt(excess: Array) -> bool:
    """Return whether an excess ``(folds,)`` is significant; with one fold it never is."""
    return excess.size > 1 and bool(excess.mean() > CLEAR * excess.std(ddof=1) / np.sqrt(excess.size))


def _stretch_scores(fold: Fold, part: Index, strengths: Array, tol: float, backend: Backend) -> tuple[Array, list[str]]:
    """Return held-out losses ``(len(part),)`` along a stretch, and the messages of solutions at the iteration limit."""
    scores, stopped = np.empty(part.size), []
    # scores do not distinguish exact from approximate fusion
    stretch = path.path_stretch(fold.objective, part, strengths, tol, MAX_ITER, backend, fuse_components=False)
    for k, solution in stretch:
        scores[k - part[0]] = fold.score(solution.theta)
        if solution.status == "iteration_limit":
            stopped.append(solution.message)
    return scores, stopped


def held_out_losses(
    federation: Federation,
    fold_of: Index,
    fits: Callable[[Federation], Iterable[Array]],
    loss: Callable[[Federation, Array], Array],
) -> Array:
    """Return out-of-fold losses ``(candidates, N)`` of every row.

    Rows with a negative fold always train and get a loss of 0. ``fits(rows)`` gives the parameters ``(V, p)`` of each
    candidate, ``loss(rows, theta)`` the loss of each row.
    """
    columns = []
    for fold in range(int(fold_of.max()) + 1):
        held_out = fold_of == fold
        kept, rest = (federation.take(rows, allow_empty=True) for rows in (~held_out, held_out))
        columns.append((held_out, [loss(rest, theta) for theta in fits(kept)]))
    out = np.zeros((len(columns[0][1]), fold_of.size))
    for held_out, losses in columns:
        out[:, held_out] = losses
    return out


# --- folds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fold:
    """Training objective of a fold, and mean losses ``(V,)`` of its held-out rows at sites ``seen``."""

    objective: FusedObjective
    held_out: Callable[[Array], Array]
    seen: Index

    def score(self, theta: Array) -> float:
        """Return the held-out loss at ``theta (V, p)``, averaged over sites."""
        values = self.held_out(theta if self.seen.size == len(theta) else theta[self.seen])
        return float(values.sum()) / values.size

    def profiled(self, free: Mask) -> Fold:
        """Return the fold with its ``free (p,)`` parameters profiled out on the training rows."""
        training, lift = profiled(self.objective.terms, free, self.objective.graph.sites)
        sparsity = None if self.objective.sparsity is None else self.objective.sparsity[:, ~free]
        own, held_out = lift.take(self.seen), self.held_out
        objective = replace(self.objective, terms=training, sparsity=sparsity)
        return Fold(objective, lambda theta: held_out(own(theta)), self.seen)


def cut_folds(problem: Problem, folds: int, seed: int) -> list[Fold]:
    """Return every `Fold` that has rows; it trains on the others, or on the earlier ones of ordered rows."""
    out = []
    if isinstance(problem.terms, QuadraticTerms):
        forward, zeros = problem.data.ordered, np.zeros((problem.n_sites, problem.n_params))
        sums = problem.data.expand(zeros, folds, seed)
        ridge = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,))
        for fold in np.flatnonzero(sums.count[:, :-1].any(axis=0)).tolist()[int(forward) :]:
            seen = np.flatnonzero(sums.count[:, fold])
            training = sums.total(without=fold, forward=forward).terms(ridge=ridge)
            held_sums = sums if seen.size == problem.n_sites else sums.take(seen)
            out.append(Fold(replace(problem.fused, terms=training), held_sums.terms(fold).values, seen))
        return out
    data = problem.rows_for("cross-validation")
    fold_of = assign_folds(data, folds, seed)
    # losses are built from all rows, so a class missing from a fold does not change the parameters
    whole = replace(problem, loss=dict(zip(data.sites, problem.losses, strict=True)))
    for fold in range(int(data.ordered), folds):
        if not (fold_of == fold).any():
            continue
        train = replace(whole, federation=data.take(fold_of < fold if data.ordered else fold_of != fold))
        part = data.take(fold_of == fold, allow_empty=True)
        seen = np.flatnonzero(part.n_samples > 0)
        if seen.size < part.n_sites:
            part = part.subset([part.sites[u] for u in seen])
        held_out = build_terms(part, [problem.losses[u] for u in seen], np.zeros(problem.n_params))
        out.append(Fold(train.fused, held_out.values, seen))
    return out
