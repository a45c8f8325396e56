"""Run replications of the paper's studies: estimators on designs with a known truth, and Fed-ADMM by round.

A task is a function that takes a `Replication` and yields rows, dictionaries whose entries become columns. A generator
of designs is given by name or as "module:function". It is called with the grid point's parameters that it accepts, the
entries of ``design`` among the options, and ``seed``.

Penalised estimators are exact minimisers of the paper's objective, with lam by cross-validation; Oracle is the one
along the true graph G0. Names with "-printed" are the output of Algorithm 1 as printed, at the same lam. "pooled" and
"attainable" are two references without any tuning: one fit per true cluster, and one per connected part of the true
edges of G. Those with an l1 term (the extension of the discussion) choose its level together with lam; "told-levels"
has the two levels with the least true error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from time import process_time
from typing import Any, TypeVar, get_args

import numpy as np
from scipy.special import chdtri

from fedkin._base import Array, Index, Mask
from fedkin.admm import Availability
from fedkin.admm.algorithm import fed_admm
from fedkin.admm.trace import Progress, subgradient_descent
from fedkin.core import (
    FAMILY_WISE,
    Correction,
    LocalFit,
    Problem,
    Solution,
    Variance,
    local_fit,
    oracle_fit,
    select_edges,
)
from fedkin.core.theory import Sizes, kappa, theorem2_rate
from fedkin.datasets import Design
from fedkin.errors import ParameterError, SolverError
from fedkin.graph import Graph
from fedkin.solvers import cross_validate_lam, cross_validate_sparsity, lam_grid, lam_path, solve
from fedkin.studies.replications import Replication, StudyTask, make_design

# --- estimators -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """Tuning settings of the penalised estimators; entries of a study's ``[options]``."""

    loss: str = "linear"
    penalty: str = "l1"
    folds: int = 5  # of the cross-validation within sites
    n_lams: int = 15  # candidates, geometric from (an upper bound of) lam_max down to ``ratio`` times it
    ratio: float = 1e-3
    path_tol: float = 1e-4  # relative duality gaps: on the paths of the folds, and of the final fit
    tol: float = 1e-4
    level: float = 0.05  # of the edge test; its variance "bartlett" is the paper's
    variance: Any = "bartlett"
    rounds: int = 1000  # T and the rows of a batch, of algorithms that go round by round
    batch_size: int = 10
    sparsities: Sequence[float] = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3)  # that "told-levels" tries


Settings = TypeVar("Settings")


def settings_from(kind: type[Settings], options: Mapping[str, Any]) -> Settings:
    """Return the dataclass with its fields taken from a study's options."""
    return kind(**{one.name: options[one.name] for one in fields(kind) if one.name in options})  # type: ignore[arg-type]


@dataclass(frozen=True)
class StudyEstimate:
    """Result of an estimator on a design: ``theta (V, p)``, lam, graph, and the mean level of the l1 term."""

    theta: Array
    lam: float | None = None
    graph: Graph | None = None
    sparsity: float | None = None


@dataclass(frozen=True, eq=False)
class Workbench:
    """Design with intermediate results shared by several estimators."""

    design: Design
    settings: Tuning
    seed: int

    @classmethod
    def from_replication(cls, replication: Replication) -> Workbench:
        """Draw the design of a replication; tuning settings are entries of its grid point or options."""
        settings = settings_from(Tuning, {**replication.options, **replication.params})
        return cls(make_design(replication), settings, replication.seed % 2**31)

    @cached_property
    def local(self) -> LocalFit:
        """The sites' own fits."""
        return local_fit(self.design.federation, self.settings.loss, self.settings.variance)

    @cached_property
    def given(self) -> StudyEstimate:
        """Exact minimiser along the given graph."""
        return self.penalised(self.design.graph)

    @cached_property
    def kept(self) -> StudyEstimate:
        """Exact minimiser along the edges of the given graph that the test keeps."""
        return self.selected(self.design.graph)

    def estimate(self, name: str) -> StudyEstimate:
        """Run the estimator of that name."""
        if name not in ESTIMATORS:
            raise ParameterError(f"unknown estimator {name!r}; choose from {', '.join(ESTIMATORS)}")
        return ESTIMATORS[name](self)

    def penalised(self, graph: Graph) -> StudyEstimate:
        """Return the exact minimiser along a graph, with lam by cross-validation within sites."""
        settings, federation = self.settings, self.design.federation
        if graph.n_edges == 0:
            return StudyEstimate(self.local.theta, 0.0, graph)
        problem = Problem(federation, graph, loss=settings.loss, penalty=settings.penalty)
        # one job: the replications of a study run side by side
        how: Any = {"folds": settings.folds, "seed": self.seed, "tol": settings.path_tol, "n_jobs": 1}
        lam = cross_validate_lam(problem, self.levels(problem), **how).lam
        return StudyEstimate(solve(problem.with_lam(lam), tol=settings.tol).theta, lam, graph)

    def levels(self, problem: Problem) -> Array:
        """Return candidates for lam."""
        # a factor of two is enough: the grid only has to begin where everything is fused
        return lam_grid(problem, self.settings.n_lams, self.settings.ratio, tol=1.0)

    def selected(self, candidates: Graph | None) -> StudyEstimate:
        """Return the exact minimiser along the edges that the test keeps; None means all pairs are candidates."""
        federation, settings = self.design.federation, self.settings
        return self.penalised(
            select_edges(federation, candidates, settings.loss, settings.level, local=self.local).graph
        )

    def problem(self, exact: StudyEstimate, factor: float = 1.0) -> Problem:
        """Return the problem of an exact minimiser, with lam times ``factor``."""
        settings = self.settings
        assert exact.graph is not None and exact.lam is not None
        lam = factor * exact.lam
        return Problem(self.design.federation, exact.graph, settings.loss, settings.penalty, lam=lam)

    def in_rounds(self, exact: StudyEstimate, algorithm: Callable[..., Solution]) -> StudyEstimate:
        """Return the result of an algorithm after T rounds, given the ``exact`` minimiser."""
        settings = self.settings
        found = algorithm(self.problem(exact), settings.rounds, settings.batch_size, seed=self.seed)
        return StudyEstimate(found.theta, exact.lam, exact.graph)

    def pooled(self, labels: Index, graph: Graph | None = None) -> StudyEstimate:
        """Return one fit per label."""
        return StudyEstimate(oracle_fit(self.design.federation, labels.tolist(), self.settings.loss), graph=graph)

    def sparse(self, graph: Graph, **how: Any) -> StudyEstimate:
        """Return the exact minimiser along a graph, with sparsity and lam by cross-validation together."""
        given, folds = Problem(self.design.federation, graph), self.settings.folds
        problem, choice = cross_validate_sparsity(given, folds=folds, seed=self.seed, n_jobs=1, **how)
        theta = solve(problem.with_lam(choice.lam), tol=self.settings.tol).theta
        return StudyEstimate(theta, choice.lam, graph, float(np.mean(np.asarray(problem.sparsity))))

    def told_levels(self) -> StudyEstimate:
        """Return the minimiser along the given graph at the sparsity and lam with the least true error."""
        found, graph = [], self.design.graph
        for sparsity in self.settings.sparsities:
            problem = Problem(self.design.federation, graph, sparsity=sparsity)
            path = lam_path(problem, self.levels(problem), tol=self.settings.path_tol)
            found += [StudyEstimate(solution.theta, lam, graph, sparsity) for lam, solution in path]
        return min(found, key=lambda one: self.design.error(one.theta))

    def attainable(self) -> StudyEstimate:
        """Pool each connected part that E and E0 have in common: the best possible choice among the edges of G."""
        true = self.design.graph.keep(~_across(self.design, self.design.graph))
        return self.pooled(true.components(), true)


def _across(design: Design, graph: Graph) -> Mask:
    """Return which edges join sites of different clusters."""
    return np.asarray(np.diff(design.labels[graph.edges])[:, 0] != 0)


#: Estimators of a study that names none.
USUAL = ("local", "global", "oracle", "fedadmm", "es", "local-es", "pooled", "attainable")
ESTIMATORS: Mapping[str, Callable[[Workbench], StudyEstimate]] = {
    "local": lambda bench: StudyEstimate(bench.local.theta),
    "global": lambda bench: bench.pooled(np.zeros(bench.design.federation.n_sites, dtype=np.int64)),
    "oracle": lambda bench: bench.penalised(bench.design.truth),
    "fedadmm": lambda bench: bench.given,
    "es": lambda bench: bench.kept,
    "local-es": lambda bench: bench.selected(None),
    "pooled": lambda bench: bench.pooled(bench.design.labels),
    "attainable": Workbench.attainable,
    "fedadmm-printed": lambda bench: bench.in_rounds(bench.given, printed_algorithm),
    "es-printed": lambda bench: bench.in_rounds(bench.kept, printed_algorithm),
    "fedadmm-variant": lambda bench: bench.in_rounds(bench.given, fed_admm),
    # one factor |V| too many in lam: objective and algorithm of the paper differ by it
    "fedadmm-scaled": lambda bench: StudyEstimate(
        solve(bench.problem(bench.given, bench.design.federation.n_sites), tol=bench.settings.tol).theta
    ),
    "clusterpath": lambda bench: bench.penalised(Graph.complete(bench.design.federation.sites)),
    "local-lasso": lambda bench: bench.sparse(Graph.empty(bench.design.federation.sites)),
    "fused": lambda bench: bench.sparse(bench.design.graph, levels=[0.0]),
    "sparse-fused": lambda bench: bench.sparse(bench.design.graph),
    "sparse-sites": lambda bench: bench.sparse(bench.design.graph, per_site=True),
    "sparse-oracle": lambda bench: bench.sparse(bench.design.truth),
    "told-levels": Workbench.told_levels,
}
SPARSE = ("local-lasso", "fused", "sparse-fused", "sparse-sites", "sparse-oracle", "told-levels")


def estimation(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per estimator: error ``||Theta - Theta*||_F^2 / |V|``, lam, edges and parts of its graph, seconds."""
    bench = Workbench.from_replication(replication)
    design = bench.design
    rate = theorem2_rate(Sizes.from_truth(design.federation, design.graph, design.theta_star))
    for estimate, row in _estimated(bench, replication.options.get("estimators", USUAL)):
        graph = estimate.graph
        yield {
            **row,
            "rate": rate,
            "edges": None if graph is None else graph.n_edges,
            "edges_across": None if graph is None else int(_across(design, graph).sum()),
            "components": None if graph is None else graph.n_components,
        }


def sparse(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per estimator: error, levels, and how its support compares with the true one."""
    bench = Workbench.from_replication(replication)
    for estimate, row in _estimated(bench, replication.options.get("estimators", SPARSE)):
        yield {**row, "sparsity": estimate.sparsity, **support(estimate.theta, bench.design.theta_star)}


def _estimated(bench: Workbench, names: Sequence[str]) -> Iterator[tuple[StudyEstimate, dict[str, Any]]]:
    """Yield the result of each estimator, and the common entries of its rows."""
    for name in names:
        started = process_time()
        estimate = bench.estimate(name)
        row = {"estimator": name, "error": bench.design.error(estimate.theta), "lam": estimate.lam}
        yield estimate, {**row, "cpu_seconds": process_time() - started}


def support(theta: Array, truth: Array) -> dict[str, float]:
    """Compare supports: shares of true entries found, of false ones among those found, and of exactly right sites."""
    found, true = theta != 0, truth != 0
    return {
        "found": float(found[true].mean()),
        "false": float((found & ~true).sum() / max(found.sum(), 1)),
        "exact_sites": float((found == true).all(axis=1).mean()),
    }


def edge_selection(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per variance estimate: whether exactly the true edges are kept, errors of both kinds, the signal.

    ``signal_ratio`` is the left side of the theorem's condition (con:min_signal) over its right side: with standard
    normal features the distance between two sites is ``||theta_i - theta_j||^2 / 2``.
    """
    options = replication.options
    level = replication.params.get("level", options.get("level", 0.05))
    design = make_design(replication)
    federation, graph = design.federation, design.graph
    true = ~_across(design, graph)
    ratio = _signal_ratio(design, true, level)
    for variance in options.get("variances", ["bartlett"]):
        local = local_fit(federation, "linear", variance)
        chosen = select_edges(federation, graph, "linear", level, local=local)
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
    """Yield a row per correction and level of the edge test among all pairs, whose tests share sites.

    ``observed`` is the error that the correction promises to bound: for "bonferroni" and "holm" whether any true edge
    is dropped, for "bh" and "by" the share of true edges among the dropped. ``power`` is the share of false edges that
    are dropped.
    """
    options = replication.options
    design = make_design(replication)
    local = local_fit(design.federation, "linear", options.get("variance", "bartlett"))
    for level in options.get("levels", [0.05]):
        for method in options.get("methods", list(get_args(Correction))):
            chosen = select_edges(design.federation, None, "linear", level, method, local=local)
            true, dropped = ~_across(design, chosen.candidates), ~chosen.kept
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


def _signal_ratio(design: Design, true: Mask, level: float) -> float:
    i, j = design.graph.edges[~true].T
    if i.size == 0:
        return float("inf")
    n = np.minimum(design.federation.n_samples[i], design.federation.n_samples[j])
    distance = ((design.theta_star[i] - design.theta_star[j]) ** 2).sum(axis=1) / 2
    return float((n * distance).min() / (4 * chdtri(design.theta_star.shape[1], level / design.graph.n_edges)))


# --- Fed-ADMM and gradient descent, round by round --------------------------------------------------------------------

#: How p_i is known, and who takes the steps of absent sites.
VARIANTS = ("known-central", "estimated-central", "known-replicas", "estimated-replicas")


def printed_algorithm(
    problem: Problem, rounds: int, batch_size: int | None = None, *, project: bool = True, **more: Any
) -> Solution:
    """Run Algorithm 1 as printed: steps ``kappa / t`` with the kappa of Theorem 4, and the plain average of T rounds.

    The paper names neither rho nor the parameter space. Here rho is automatic, and the space is a ball with twice the
    longest local estimate as its radius. Iterates are projected onto it, as the paper suggests before Theorem 4, unless
    ``project=False``.
    """
    federation, loss = problem.rows_for("Algorithm 1"), problem.loss
    local = local_fit(federation, loss).theta
    if project:
        problem = replace(problem, radius=2.0 * float(np.linalg.norm(local, axis=1).max()))
    step: Any = {"step": "literal", "kappa": kappa(federation, local, loss), "average": "paper"}
    return fed_admm(problem, rounds, batch_size, **step, **more)


def convergence(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield rows per method and recorded round: error against the truth and distance to the exact minimiser.

    ``diverged`` is 1 in the rows of a run that overflows, or ends farther from the truth than it started.
    """
    bench, problem, exact = _setting(replication)
    start = bench.design.error(np.zeros_like(exact.theta))
    for name in replication.options.get("methods", list(METHODS)):
        curve: dict[int, dict[str, float]] = {}

        def note(progress: Progress, curve: dict[int, dict[str, float]] = curve) -> None:
            curve.setdefault(progress.n_iter, _errors(bench, exact, progress.theta))

        method, all_samples = METHODS[name]
        started, size = process_time(), None if all_samples else bench.settings.batch_size
        try:
            solution = method(problem, bench.settings.rounds, size, seed=bench.seed, callbacks=[note])
            curve.setdefault(bench.settings.rounds, _errors(bench, exact, solution.theta))
            diverged = not bench.design.error(solution.theta) <= start
        except SolverError:
            diverged = True
        about = {"lam": problem.lam, "diverged": float(diverged), "cpu_seconds": process_time() - started}
        for number, row in curve.items():
            yield {"method": name, "round": number, **row, **about}


def availability(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per variant: error and distance to the exact minimiser after the last round."""
    p = replication.params.get("availability")
    if not isinstance(p, int | float):
        raise ParameterError(f"the task availability needs availability = [...] under [[grid]], got {p!r}")
    bench, problem, exact = _setting(replication)
    for name in replication.options.get("variants", VARIANTS):
        weighting, _, placement = name.partition("-")
        started, settings = process_time(), bench.settings
        present = Availability.bernoulli(p, weighting=weighting, placement=placement)
        found = fed_admm(problem, settings.rounds, settings.batch_size, availability=present, seed=bench.seed)
        about = {"variant": name, "weighting": weighting, "placement": placement, "lam": problem.lam}
        yield {**about, **_errors(bench, exact, found.theta), "cpu_seconds": process_time() - started}


def _errors(bench: Workbench, exact: Solution, theta: Array) -> dict[str, float]:
    return {
        "error": bench.design.error(theta),
        "distance": float(((theta - exact.theta) ** 2).sum() / theta.shape[0]),
        "error_of_minimiser": bench.design.error(exact.theta),
    }


def _setting(replication: Replication) -> tuple[Workbench, Problem, Solution]:
    """Return the problem at the lam that cross-validation chooses, with its exact minimiser."""
    bench = Workbench.from_replication(replication)
    problem = bench.problem(bench.given)
    return bench, problem, solve(problem, 1e-10)


#: Algorithms, and whether a round takes all samples or a batch.
METHODS: Mapping[str, tuple[Callable[..., Solution], bool]] = {
    "fedadmm-full": (fed_admm, True),
    "fedadmm-batch": (fed_admm, False),
    "gd": (subgradient_descent, True),
    "sgd": (subgradient_descent, False),
    "printed-full": (printed_algorithm, True),
    "printed-batch": (printed_algorithm, False),
    "unprojected-batch": (partial(printed_algorithm, project=False), False),
}

_DESIGN: Mapping[str, Sequence[str]] = {"generator": (), "design": ()}
TUNED_OPTIONS: Mapping[str, Sequence[str]] = {**_DESIGN, **dict.fromkeys(Tuning.__dataclass_fields__, ())}
#: The tasks of this module: the function, its options, and for lists of names among them the names to choose from.
TASKS: Mapping[str, tuple[StudyTask, Mapping[str, Sequence[str]]]] = {
    "estimation": (estimation, {**TUNED_OPTIONS, "estimators": tuple(ESTIMATORS)}),
    "selection": (edge_selection, {**_DESIGN, "level": (), "variances": get_args(Variance)}),
    "error-rates": (error_rates, {**_DESIGN, "levels": (), "variance": (), "methods": get_args(Correction)}),
    "convergence": (convergence, {**TUNED_OPTIONS, "methods": tuple(METHODS)}),
    "availability": (availability, {**TUNED_OPTIONS, "variants": VARIANTS}),
    "sparse": (sparse, {**TUNED_OPTIONS, "estimators": SPARSE}),
}
