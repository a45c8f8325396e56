"""The estimators of section 5 on a generated design.

Oracle is the paper's: the penalised estimator along the true graph G0, with lam by cross-validation as for the others.
"pooled" and "attainable" are two references without any tuning: one fit per true cluster, and one per connected part of
the true edges of G.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.datasets import Design
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.objective import Problem
from fedkin.solvers import cross_validate_lam, lam_grid, solve
from fedkin.stats import LocalFit, global_fit, local_fit, oracle_fit, select_edges

#: Estimators by their names in study files, with the names that figures and tables show.
LABELS: Mapping[str, str] = {
    "local": "Local",
    "global": "Global",
    "oracle": "Oracle",
    "fedadmm": "Fed-ADMM",
    "es": "Fed-ADMM-ES",
    "local-es": "Fed-ADMM-Local-ES",
    "pooled": "Pooled by true cluster",
    "attainable": "Pooled along the true edges of G",
}


@dataclass(frozen=True)
class Settings:
    """How the penalised estimators are tuned; entries of a study's ``[options]``.

    Attributes
    ----------
    loss, penalty : str
    folds : int
        Of the cross-validation within devices.
    n_lams, ratio
        The candidates: ``n_lams`` values, geometric from (an upper bound of) lam_max down to ``ratio`` times it.
    path_tol, tol : float
        Relative duality gaps on the paths of the folds, and of the final fit.
    level, variance
        Of the edge test. "bartlett" is the paper's.
    """

    loss: str = "linear"
    penalty: str = "l1"
    folds: int = 5
    n_lams: int = 15
    ratio: float = 1e-3
    path_tol: float = 1e-4
    tol: float = 1e-4
    level: float = 0.05
    variance: Any = "bartlett"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """The settings among a study's options."""
        return cls(**{name: options[name] for name in cls.__dataclass_fields__ if name in options})


#: Options of every task that tunes penalised estimators.
TUNING_OPTIONS: Mapping[str, Sequence[str]] = dict.fromkeys(Settings.__dataclass_fields__, ())


@dataclass(frozen=True)
class Estimate:
    """What an estimator found on a design.

    Attributes
    ----------
    theta : array (V, p)
    lam : float or None
    graph : Graph or None
        The graph that it was penalised along.
    """

    theta: Array
    lam: float | None = None
    graph: Graph | None = None


@dataclass(frozen=True, eq=False)
class Workbench:
    """One design with what several estimators need of it, computed once."""

    design: Design
    settings: Settings
    seed: int

    @cached_property
    def local(self) -> LocalFit:
        """The devices' own fits."""
        return local_fit(self.design.federation, self.settings.loss, self.settings.variance)

    def estimate(self, name: str) -> Estimate:
        """Run the estimator of that name."""
        if name not in _ESTIMATORS:
            raise ParameterError(f"unknown estimator {name!r}; choose from {', '.join(_ESTIMATORS)}")
        return _ESTIMATORS[name](self)

    def penalised(self, graph: Graph) -> Estimate:
        """The exact minimiser along a graph, with lam by cross-validation within devices."""
        settings, federation = self.settings, self.design.federation
        if graph.n_edges == 0:
            return Estimate(self.local.theta, 0.0, graph)
        problem = Problem(federation, graph, loss=settings.loss, penalty=settings.penalty)
        # a factor of two is enough: the grid only has to begin where everything is fused
        grid = lam_grid(problem, settings.n_lams, settings.ratio, tol=1.0)
        # one job: the replications of a study run side by side
        lam = cross_validate_lam(
            problem, grid, folds=settings.folds, seed=self.seed, tol=settings.path_tol, n_jobs=1
        ).lam
        return Estimate(solve(problem.with_lam(lam), tol=settings.tol).theta, lam, graph)

    def selected(self, candidates: Graph | None) -> Estimate:
        """The same along the edges that the test keeps; all pairs are candidates when None."""
        federation, settings = self.design.federation, self.settings
        chosen = select_edges(federation, candidates, settings.loss, settings.level, local=self.local)
        return self.penalised(chosen.graph)


def _local(bench: Workbench) -> Estimate:
    return Estimate(bench.local.theta)


def _global(bench: Workbench) -> Estimate:
    one = global_fit(bench.design.federation, bench.settings.loss)
    return Estimate(np.broadcast_to(one, bench.design.theta_star.shape))


def _pooled(bench: Workbench) -> Estimate:
    return Estimate(oracle_fit(bench.design.federation, bench.design.labels.tolist(), bench.settings.loss))


def _attainable(bench: Workbench) -> Estimate:
    """The best that a choice among the edges of G can do: each connected part of E and E0 in common pooled."""
    design = bench.design
    true = design.graph.keep(np.diff(design.labels[design.graph.edges])[:, 0] == 0)
    return Estimate(oracle_fit(design.federation, true.components().tolist(), bench.settings.loss), graph=true)


_ESTIMATORS: Mapping[str, Callable[[Workbench], Estimate]] = {
    "local": _local,
    "global": _global,
    "oracle": lambda bench: bench.penalised(bench.design.truth),
    "fedadmm": lambda bench: bench.penalised(bench.design.graph),
    "es": lambda bench: bench.selected(bench.design.graph),
    "local-es": lambda bench: bench.selected(None),
    "pooled": _pooled,
    "attainable": _attainable,
}
