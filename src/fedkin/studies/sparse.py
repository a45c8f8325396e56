"""The l1 extension of the paper's discussion: sparse parameters, more of them than rows, and who is alike unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.core import Problem
from fedkin.datasets import Design
from fedkin.graph import Graph
from fedkin.solvers import cross_validate_sparsity, lam_grid, lam_path, solve
from fedkin.studies.designs import Replication, Task, make_design
from fedkin.studies.summary import Check, Row, bound_check, paired_ratios, summarize
from fedkin.studies.tasks import settings_from

CELL = ["n_features", "n_samples"]


@dataclass(frozen=True)
class Levels:
    """How levels are chosen, and those that "told-levels" tries; entries of a study's ``[options]``."""

    sparsities: Sequence[float] = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3)
    n_lams: int = 20
    ratio: float = 1e-3
    folds: int = 5
    path_tol: float = 1e-3
    tol: float = 1e-4


def sparse(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per estimator: error, levels, and how the support that it finds compares with the true one."""
    design, levels = make_design(replication), settings_from(Levels, replication.options)
    for name in replication.options.get("estimators", list(ESTIMATORS)):
        started = process_time()
        theta, sparsity, lam = ESTIMATORS[name](design, levels, replication.seed % 2**31)
        yield {
            "estimator": name,
            "error": design.error(theta),
            "sparsity": sparsity,
            "lam": lam,
            **support(theta, design.theta_star),
            "cpu_seconds": process_time() - started,
        }


def support(theta: Array, truth: Array) -> dict[str, float]:
    """Return the share of true entries that are found, the share of found ones that are false, and both being right."""
    found, true = theta != 0, truth != 0
    return {
        "found": float(found[true].mean()),
        "false": float((found & ~true).sum() / max(found.sum(), 1)),
        "exact_sites": float((found == true).all(axis=1).mean()),
    }


#: Parameters, and the sparsity (its mean over sites) and lam that they belong to.
Found = tuple[Array, float, float]


def _validated(design: Design, graph: Graph, settings: Levels, seed: int, **how: Any) -> Found:
    """Return the minimiser at the sparsity and lam that cross-validation chooses together."""
    problem, choice = cross_validate_sparsity(
        Problem(design.federation, graph), folds=settings.folds, seed=seed, n_jobs=1, **how
    )
    theta = solve(problem.with_lam(choice.lam), tol=settings.tol).theta
    return theta, float(np.mean(np.asarray(problem.sparsity))), choice.lam


def _told(design: Design, levels: Levels, seed: int) -> Found:
    """Return the minimiser along the given graph at the levels with the least true error."""
    best: tuple[float, Found] | None = None
    for sparsity in levels.sparsities:
        problem = Problem(design.federation, design.graph, sparsity=sparsity)
        grid = lam_grid(problem, levels.n_lams, levels.ratio, tol=1.0)
        for lam, solution in zip(grid, lam_path(problem, grid, tol=levels.path_tol).solutions, strict=True):
            if best is None or design.error(solution.theta) < best[0]:
                best = design.error(solution.theta), (solution.theta, sparsity, float(lam))
    assert best is not None
    return best[1]


ESTIMATORS: Mapping[str, Callable[[Design, Levels, int], Found]] = {
    "local-lasso": lambda design, levels, seed: _validated(design, Graph.empty(design.federation.sites), levels, seed),
    "fused": lambda design, levels, seed: _validated(design, design.graph, levels, seed, levels=[0.0]),
    "sparse-fused": lambda design, levels, seed: _validated(design, design.graph, levels, seed),
    "sparse-sites": lambda design, levels, seed: _validated(design, design.graph, levels, seed, per_site=True),
    "sparse-oracle": lambda design, levels, seed: _validated(design, design.truth, levels, seed),
    "told-levels": _told,
}

#: The task of this module with its options, as in `fedkin.studies.tasks`.
TASKS: Mapping[str, tuple[Task, Mapping[str, Sequence[str]]]] = {
    "sparse": (
        sparse,
        {**dict.fromkeys(["generator", "design", *Levels.__dataclass_fields__], ()), "estimators": tuple(ESTIMATORS)},
    )
}


def checks(rows: Sequence[Row]) -> list[Check]:
    """Check sparsity by cross-validation against none, against no graph, and against the best levels."""

    def over(other: str) -> Any:
        return paired_ratios(rows, CELL, "estimator", ("sparse-fused", other), "error")

    out = bound_check("Discussion: the l1 term helps where p > n, in every cell", over("fused"), CELL, 1.0)
    out += bound_check("The graph helps: below the lasso of every site on its own", over("local-lasso"), CELL, 1.0)
    claim = "Levels by cross-validation: error at most 1.1 times that at the best levels, in every cell"
    why = "cross-validation looks at predictions of a fifth of few rows"
    out += bound_check(claim, over("told-levels"), CELL, 1.1, reason=why)
    mine = [row for row in rows if row["estimator"] == "sparse-fused"]
    claim = "Support: 95% of the true entries are found, in every cell"
    out += bound_check(claim, summarize(mine, CELL, "found"), CELL, low=0.95)
    claim = "Support: fewer than half of the entries that are found are false, in every cell"
    why = "cross-validation chooses levels for prediction, which keep too many entries, as for every lasso"
    return out + bound_check(claim, summarize(mine, CELL, "false"), CELL, 0.5, reason=why)
