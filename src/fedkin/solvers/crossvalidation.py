"""The choice of ``lam`` by cross-validation within devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, check_positive, check_whole
from fedkin.errors import DataError, ParameterError
from fedkin.objective import Problem
from fedkin.solvers.backend import Backend, Resolved, resolve_backend
from fedkin.solvers.folds import Batch, assign_folds, cut_folds, in_batches
from fedkin.solvers.grids import checked_grid, lam_grid
from fedkin.solvers.path import path_stretch, path_threads, stretches_of, warn_of_limits
from fedkin.solvers.workload import run_side_by_side

Rule = Literal["min", "1se"]

#: Limit on the iterations of each solution.
MAX_ITER = 20_000


@dataclass(frozen=True, eq=False)
class LamChoice:
    """The penalty level that cross-validation chose, and what it saw.

    Attributes
    ----------
    lam : float
    lams : array (m,)
        Candidates, decreasing.
    scores : array (folds, m)
        Held-out mean loss, each device weighted equally. Folds without rows are left out.
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
    folds: int = 5,
    rule: Rule = "min",
    n_lams: int = 20,
    ratio: float = 1e-3,
    seed: int = 0,
    tol: float = 1e-4,
    n_jobs: int | None = None,
    backend: Backend = "auto",
) -> LamChoice:
    """Choose ``lam`` by K-fold cross-validation; every device gives rows to every fold.

    Parameters
    ----------
    problem : Problem
        Its own ``lam`` does not matter.
    lams : sequence of float, optional
        Candidates; by default a grid of ``n_lams`` from `lam_max` down to ``ratio * lam_max``.
    folds : int
        Number of folds, at least 2.
    rule : "min" or "1se"
        The best candidate, or the largest one within one standard error of it (more fusion for the same evidence).
    n_lams, ratio
        See ``lams``.
    seed : int
        Of the folds.
    tol : float
        Relative gap of the solutions along the path.
    n_jobs : int, optional
        How much to run at the same time. With compiled kernels these are threads, by default as many as there are
        cores; with numpy they are processes, as in joblib, by default one. The result is the same.
    backend : "auto", "numpy" or "numba"
        As in `fedkin.solve`, the same for all folds.

    Returns
    -------
    LamChoice

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_devices=10, n_samples=40, n_features=3, n_clusters=2, seed=0)
    >>> choice = fedkin.cross_validate_lam(fedkin.Problem(design.federation, design.truth), n_lams=8)
    >>> bool(choice.lams.min() <= choice.lam <= choice.lams.max())
    True
    """
    if rule not in ("min", "1se"):
        raise ParameterError(f"rule must be 'min' or '1se', got {rule!r}")
    check_whole("folds", folds, least=2)
    check_whole("seed", seed, least=0)
    check_positive("tol", tol)
    if n_jobs == 0:
        raise ParameterError("n_jobs must not be 0; give a number of jobs, or -1 for as many as there are cores")
    _check_rows(problem)
    grid = lam_grid(problem, n_lams, ratio) if lams is None else checked_grid(lams)
    fold_of = assign_folds(problem.federation, folds, seed)
    # with few rows in all, a fold may be empty
    held_out = [fold for fold in range(folds) if (fold_of == fold).any()]
    # decided here and not by each process for itself: many processes give what one gives, to the bit
    resolved = resolve_backend(backend, problem.fused, len(held_out) * grid.size)
    batches = in_batches(cut_folds(problem, fold_of, held_out), resolved)
    scores = _scores(batches, grid * problem.n_devices, tol, resolved, n_jobs)
    mean, error = mean_and_error(scores)
    return LamChoice(float(grid[best_level(mean, error if rule == "1se" else None)]), grid, scores, mean, error, rule)


def mean_and_error(scores: Array) -> tuple[Array, Array]:
    """Means over folds of ``scores (folds, m)`` and their standard errors, each ``(m,)``."""
    return scores.mean(axis=0), scores.std(axis=0, ddof=1) / np.sqrt(scores.shape[0])


def best_level(mean: Array, error: Array | None = None) -> int:
    """Position of the level with the smallest held-out loss.

    Parameters
    ----------
    mean : array (m,)
        Held-out losses of the levels, the largest level first.
    error : array (m,), optional
        Their standard errors: then the largest level within one of them of the best (the rule "1se").
    """
    best = int(mean.argmin())
    return best if error is None else int(np.flatnonzero(mean <= mean[best] + error[best])[0])


def _scores(batches: list[Batch], strengths: Array, tol: float, backend: Resolved, n_jobs: int | None) -> Array:
    """Held-out mean loss of the path of each fold, ``(folds, m)``."""
    tasks = [
        partial(_stretch_scores, batch, part, strengths, tol, backend)
        for batch in batches
        for part in stretches_of(strengths.size)
    ]
    if backend == "numpy" and n_jobs not in (None, 1):
        from joblib import Parallel, delayed

        done = list(Parallel(n_jobs=n_jobs)(delayed(task)() for task in tasks))
    else:
        usual = path_threads(batches[0].objective, backend)
        done = run_side_by_side(tasks, usual if n_jobs is None or n_jobs < 1 else min(n_jobs, usual))
    messages = [message for _, stopped in done for message in stopped]
    warn_of_limits(messages, sum(scores.size for scores, _ in done), stacklevel=4)
    by_batch = np.split(np.arange(len(done)), len(batches))
    return np.concatenate([np.concatenate([done[k][0] for k in parts], axis=1) for parts in by_batch])


def _stretch_scores(
    batch: Batch, part: NDArray[np.int64], strengths: Array, tol: float, backend: Resolved
) -> tuple[Array, list[str]]:
    """Held-out losses ``(folds, len(part))`` along a stretch, and the messages of solutions at the iteration limit."""
    scores, stopped = np.empty((len(batch.folds), part.size)), []
    # scores do not tell what is fused exactly from what is almost
    stretch = path_stretch(batch.objective, part, strengths, tol, MAX_ITER, backend, fuse_components=False)
    for k, solution in stretch:
        scores[:, k - part[0]] = batch.scores(solution.theta)
        if solution.status == "iteration_limit":
            stopped.append(solution.message)
    return scores, stopped


def _check_rows(problem: Problem) -> None:
    if problem.federation.n_samples.max() < 2:
        raise DataError(
            "no device has two rows to train on, so cross-validation within devices has none to hold out "
            "(rows kept for a comparison do not train); give lam as a number"
        )
