"""The choice of ``lam`` by cross-validation within devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import DataError, ParameterError
from fedkin.problem import Problem, resolve_losses
from fedkin.solvers.backend import Backend, Resolved, resolve_backend
from fedkin.solvers.path import checked_grid, lam_grid, lam_path
from fedkin.terms import build_terms

Array = NDArray[np.float64]
Rule = Literal["min", "1se"]


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
    lams: Array
    scores: Array
    mean: Array
    error: Array
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
        Folds to run at the same time, as in joblib.
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
    if folds < 2:
        raise ParameterError(f"folds must be at least 2, got {folds}")
    _check_rows(problem)
    grid = lam_grid(problem, n_lams, ratio) if lams is None else checked_grid(lams)
    fold_of = problem.federation.folds(folds, seed)
    # a device with one row has none to hold out: it always trains
    fold_of[(problem.federation.n_samples < 2)[problem.federation.device_index]] = -1
    # losses see all rows, so that a class missing from a fold does not change the parameters
    whole = replace(problem, loss=dict(zip(problem.federation.devices, problem.losses, strict=True)))
    # with few rows in all, a fold may be empty
    held_out = [fold for fold in range(folds) if (fold_of == fold).any()]
    # decided here and not by each process for itself: many processes give what one gives, to the bit
    resolved = resolve_backend(backend, problem.fused, len(held_out) * grid.size)
    scores = np.stack(_run([(whole, fold_of != fold, grid, tol, resolved) for fold in held_out], n_jobs))
    mean, error = scores.mean(axis=0), scores.std(axis=0, ddof=1) / np.sqrt(len(held_out))
    best = int(mean.argmin())
    if rule == "1se":
        best = int(np.flatnonzero(mean <= mean[best] + error[best])[0])
    return LamChoice(float(grid[best]), grid, scores, mean, error, rule)


def _run(tasks: list[tuple[Problem, NDArray[np.bool_], Array, float, Resolved]], n_jobs: int | None) -> list[Array]:
    if n_jobs in (None, 1):
        return [_fold_scores(*task) for task in tasks]
    from joblib import Parallel, delayed

    return list(Parallel(n_jobs=n_jobs)(delayed(_fold_scores)(*task) for task in tasks))


def _fold_scores(problem: Problem, train: NDArray[np.bool_], grid: Array, tol: float, backend: Resolved) -> Array:
    """Held-out mean loss of the path that was fitted on the ``train`` rows, ``(m,)``."""
    fitted = lam_path(replace(problem, federation=problem.federation.take(train)), grid, tol=tol, backend=backend)
    held_out = problem.federation.take(~train, allow_empty=True)
    seen = np.flatnonzero(held_out.n_samples > 0)
    held_out = held_out.subset([held_out.devices[u] for u in seen])
    loss = {device: problem.losses[u] for u, device in zip(seen, held_out.devices, strict=True)}
    terms = build_terms(held_out, resolve_losses(loss, held_out), np.zeros(problem.n_params))
    return np.array([terms.values(solution.theta[seen]).mean() for solution in fitted.solutions])


def _check_rows(problem: Problem) -> None:
    if problem.federation.n_samples.max() < 2:
        raise DataError(
            "every device has a single row, so cross-validation within devices has none to hold out; "
            "give lam as a number"
        )
