"""The tasks of section 5: the error of several estimators on a generated design, and what the edge test finds.

Oracle is the paper's: the penalised estimator along the true graph G0, with lam by cross-validation as for the others.
"pooled" and "attainable" are two references without any tuning: one fit per true cluster, and one per connected part of
the true edges of G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import process_time
from typing import Any, get_args

import numpy as np

from fedkin._base import Array
from fedkin.core import (
    FAMILY_WISE,
    EdgeSelection,
    LocalFit,
    Method,
    Problem,
    Variance,
    global_fit,
    local_fit,
    oracle_fit,
    select_edges,
)
from fedkin.datasets import Design
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.solvers import cross_validate_lam, lam_grid, solve
from fedkin.studies.tasks.designs import DESIGN_OPTIONS, Replication, make_design, settle_backend

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
class Tuning:
    """How the penalised estimators are tuned; entries of a study's ``[options]``."""

    loss: str = "linear"
    penalty: str = "l1"
    folds: int = 5  # of the cross-validation within sites
    n_lams: int = 15  # candidates, geometric from (an upper bound of) lam_max down to ``ratio`` times it
    ratio: float = 1e-3
    path_tol: float = 1e-4  # relative duality gaps: on the paths of the folds, and of the final fit
    tol: float = 1e-4
    level: float = 0.05  # of the edge test; its variance "bartlett" is the paper's
    variance: Any = "bartlett"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Tuning:
        """The settings among a study's options."""
        return cls(**{name: options[name] for name in cls.__dataclass_fields__ if name in options})


#: Options of every task that tunes penalised estimators.
TUNING_OPTIONS: Mapping[str, Sequence[str]] = dict.fromkeys(Tuning.__dataclass_fields__, ())


@dataclass(frozen=True)
class Estimate:
    """What an estimator found on a design: ``theta (V, p)``, and lam and the graph that it was penalised along."""

    theta: Array
    lam: float | None = None
    graph: Graph | None = None


@dataclass(frozen=True, eq=False)
class Workbench:
    """One design with what several estimators need of it, computed once."""

    design: Design
    settings: Tuning
    seed: int

    @cached_property
    def local(self) -> LocalFit:
        """The sites' own fits."""
        return local_fit(self.design.federation, self.settings.loss, self.settings.variance)

    def estimate(self, name: str) -> Estimate:
        """Run the estimator of that name."""
        if name not in _ESTIMATORS:
            raise ParameterError(f"unknown estimator {name!r}; choose from {', '.join(_ESTIMATORS)}")
        return _ESTIMATORS[name](self)

    def penalised(self, graph: Graph) -> Estimate:
        """The exact minimiser along a graph, with lam by cross-validation within sites."""
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
    "local": lambda bench: Estimate(bench.local.theta),
    "global": _global,
    "oracle": lambda bench: bench.penalised(bench.design.truth),
    "fedadmm": lambda bench: bench.penalised(bench.design.graph),
    "es": lambda bench: bench.selected(bench.design.graph),
    "local-es": lambda bench: bench.selected(None),
    "pooled": _pooled,
    "attainable": _attainable,
}


OPTIONS = {
    "estimation": {**DESIGN_OPTIONS, **TUNING_OPTIONS, "estimators": tuple(LABELS)},
    "selection": {**DESIGN_OPTIONS, "level": (), "variances": get_args(Variance)},
    "error-rates": {**DESIGN_OPTIONS, "levels": (), "variance": (), "methods": get_args(Method)},
}


def estimation(replication: Replication) -> Iterator[dict[str, Any]]:
    """A row per estimator: error ``||Theta - Theta*||_F^2 / |V|``, lam, edges and parts of its graph, CPU seconds."""
    backend = settle_backend()
    options = replication.options
    design = make_design(replication)
    bench = Workbench(design, Tuning.of(options), replication.seed % 2**31)
    rate = theorem_rate(design)
    for name in options.get("estimators", list(LABELS)):
        started = process_time()
        estimate = bench.estimate(name)
        graph = estimate.graph
        yield {
            "estimator": name,
            "error": design.error(estimate.theta),
            "rate": rate,
            "lam": estimate.lam,
            "edges": None if graph is None else graph.n_edges,
            "edges_across": None if graph is None else int((np.diff(design.labels[graph.edges]) != 0).sum()),
            "components": None if graph is None else graph.n_components,
            "cpu_seconds": process_time() - started,
            "backend": backend,
        }


def theorem_rate(design: Design) -> float:
    """``p (K(E) + |E minus E0|) / (n |V|)`` of Theorem 2; K(E) is the number of connected parts of the graph."""
    graph, (n_sites, p) = design.graph, design.theta_star.shape
    wrong = int((np.diff(design.labels[graph.edges]) != 0).sum())
    n = int(design.federation.n_samples.min())
    return float(p * (graph.n_components + wrong) / (n * n_sites))


def edge_selection(replication: Replication) -> Iterator[dict[str, Any]]:
    """A row per variance estimate: whether exactly the true edges are kept, errors of both kinds, the signal.

    ``signal_ratio`` is the left side of the theorem's condition (con:min_signal) over its right side: with standard
    normal features the distance between two sites is ``||theta_i - theta_j||^2 / 2``.
    """
    options = replication.options
    level = replication.params.get("level", options.get("level", 0.05))
    design = make_design(replication)
    federation, graph = design.federation, design.graph
    true = design.labels[graph.edges[:, 0]] == design.labels[graph.edges[:, 1]]
    ratio = _signal_ratio(design, true, level)
    for variance in options.get("variances", ["bartlett"]):
        local = local_fit(federation, "linear", variance)
        chosen: EdgeSelection = select_edges(federation, graph, "linear", level, local=local)
        dropped, kept = int((true & ~chosen.kept).sum()), int((~true & chosen.kept).sum())
        yield {
            "variance": variance,
            "exact": float(dropped == 0 and kept == 0),
            "no_true_edge_dropped": float(dropped == 0),
            "true_dropped": dropped,
            "false_kept": kept,
            "edges": graph.n_edges,
            "signal_ratio": ratio,
        }


def error_rates(replication: Replication) -> Iterator[dict[str, Any]]:
    """A row per correction and level of the edge test among all pairs, whose tests share sites.

    ``observed`` is the error that the correction promises to bound: for "bonferroni" and "holm" whether any true edge
    is dropped, for "bh" and "by" the share of true edges among the dropped. ``power`` is the share of false edges that
    are dropped.
    """
    options = replication.options
    design = make_design(replication)
    local = local_fit(design.federation, "linear", options.get("variance", "bartlett"))
    for level in options.get("levels", [0.05]):
        for method in options.get("methods", list(get_args(Method))):
            chosen = select_edges(design.federation, None, "linear", level, method, local=local)
            true = np.diff(design.labels[chosen.candidates.edges])[:, 0] == 0
            dropped = ~chosen.kept
            wrong = int((true & dropped).sum())
            share = wrong / max(int(dropped.sum()), 1)
            yield {
                "level": level,
                "method": method,
                "observed": float(wrong > 0) if method in FAMILY_WISE else share,
                "any_true_dropped": float(wrong > 0),
                "share_of_true_among_dropped": share,
                "power": None if true.all() else float(dropped[~true].mean()),
            }


def _signal_ratio(design: Design, true: np.ndarray[Any, np.dtype[np.bool_]], level: float) -> float:
    from scipy.special import chdtri

    i, j = design.graph.edges[~true].T
    if i.size == 0:
        return float("inf")
    n = np.minimum(design.federation.n_samples[i], design.federation.n_samples[j])
    distance = ((design.theta_star[i] - design.theta_star[j]) ** 2).sum(axis=1) / 2
    p = design.theta_star.shape[1]
    return float((n * distance).min() / (4 * chdtri(p, level / design.graph.n_edges)))
