"""Replications of the studies of the paper: designs with a known truth, estimators, and Fed-ADMM round by round.

A task is a function that takes a `Replication` (grid point, options, seed) and yields rows, dictionaries whose entries
become columns. A generator, by name or as "module:function", is called by name with the grid point's parameters that it
knows, the entries of ``design`` among the options, and ``seed``; it returns a `fedkin.datasets.Design`.

Oracle is the paper's: the penalised estimator along the true graph G0, with lam by cross-validation as for the others.
"pooled" and "attainable" are two references without any tuning: one fit per true cluster, and one per connected part of
the true edges of G.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any, TypeVar, get_args

import numpy as np
from scipy.special import chdtri

from fedkin._base import Array, Index, Mask
from fedkin.admm import Availability, Progress, fed_admm, subgradient_descent
from fedkin.core import (
    FAMILY_WISE,
    Correction,
    LocalFit,
    Problem,
    Solution,
    Variance,
    global_fit,
    local_fit,
    oracle_fit,
    select_edges,
)
from fedkin.data import Federation
from fedkin.datasets import Design, paper_design
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.solvers import cross_validate_lam, lam_grid, solve


def find_function(name: str, where: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import the function called "module:function".

    ``where`` is the entry that names it, for messages; ``folder`` is where the study's own modules may lie.
    """
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module, _, function = name.partition(":")
    try:
        home = import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            words = f"there is no module {module!r}; put {module}.py next to the TOML file or install it"
            raise ParameterError(f"{where}: {words}") from None
        raise ParameterError(f"{where}: importing {module!r} failed: {_last_line(error)}; fix the module") from error
    file = getattr(home, "__file__", None)
    if file is None:
        words = "name a function in a .py file next to the TOML file"
        raise ParameterError(f"{where}: the module {module!r} has no file; {words}")
    if not hasattr(home, function):
        raise ParameterError(f"{where}: {file} has no function {function!r}; define it there or fix the name")
    found: Callable[..., Any] = getattr(home, function)
    if not callable(found):
        raise ParameterError(f"{where}: {function!r} of {file} is a {type(found).__name__}, not a function")
    return found


def code_digest(function: Callable[..., Any]) -> str:
    """Return the digest of the file that defines a function, so that edited code is not mistaken for what was run."""
    return hashlib.sha256(Path(str(sys.modules[function.__module__].__file__)).read_bytes()).hexdigest()


def _last_line(error: Exception) -> str:
    """Return file, line and words of an error in one line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}: {type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True)
class Replication:
    """One repetition at one grid point: what a task is given."""

    params: Mapping[str, Any]  # the grid point
    options: Mapping[str, Any]  # the study's [options]
    number: int  # 0, 1, ...
    seed: int  # for everything random in it
    data: Path | None = None  # the directory given as --data
    folder: Path | None = None  # where the study's own modules lie


Task = Callable[[Replication], Iterable[dict[str, Any]]]


def false_edge_design(
    n_sites: int = 100,
    n_samples: int = 100,
    n_features: int = 20,
    n_clusters: int = 5,
    *,
    false_edges: int = 0,
    signal: float = 1.0,
    noise: float = 1.0,
    seed: int = 0,
) -> Design:
    """Draw the paper's design with all true edges and exactly ``false_edges`` wrong ones, the |S| of Theorem 2."""
    sizes = (n_sites, n_samples, n_features, n_clusters)
    design = paper_design(*sizes, varrho=0.0, signal=signal, noise=noise, seed=seed)
    first, second = np.tril_indices(n_sites, -1)
    across = np.flatnonzero(design.labels[first] != design.labels[second])
    if not 0 <= false_edges <= across.size:
        raise ParameterError(
            f"false_edges must lie between 0 and the {across.size} pairs in different clusters, got {false_edges}"
        )
    chosen = np.random.default_rng([seed, 1]).choice(across, size=false_edges, replace=False)
    wrong = np.column_stack([first[chosen], second[chosen]])
    graph = Graph.from_indices(design.federation.sites, np.concatenate([design.truth.edges, wrong]))
    return replace(design, graph=graph)


def differing_design(
    n_sites: int = 30,
    n_samples: int = 50,
    n_features: int = 8,
    *,
    truth: str = "groups",
    loss: str = "linear",
    signal: float = 1.0,
    seed: int = 0,
) -> Design:
    """Draw sites that differ in one of three ways, ``truth``: in three groups, not at all, or continuously.

    Parameters of "continuous" sites are ``N(centre, signal^2 / (4 sqrt(p)))``, and edges between them are drawn by lot;
    otherwise it is the paper's design with a fifth of the edges flipped.
    """
    if truth not in ("groups", "none", "continuous"):
        raise ParameterError(f'truth must be "groups", "none" or "continuous", got {truth!r}')
    if truth != "continuous":
        sizes = (n_sites, n_samples, n_features, 3 if truth == "groups" else 1)
        return paper_design(*sizes, varrho=0.2, loss=loss, signal=signal, seed=seed)
    rng = np.random.default_rng(seed)
    scale = signal * n_features**-0.25
    theta = scale * (rng.normal(size=n_features) + 0.5 * rng.normal(size=(n_sites, n_features)))
    graph = Graph.empty(range(n_sites)).corrupt(0.3, seed=rng)
    data = {}
    for u in range(n_sites):
        X = rng.normal(size=(n_samples, n_features))
        mean, noise = X @ theta[u], rng.normal(size=n_samples)
        data[u] = X, mean + noise if loss == "linear" else (mean + rng.logistic(size=n_samples) > 0).astype(np.float64)
    return Design(Federation(data), graph, Graph.empty(range(n_sites)), theta, np.arange(n_sites))


GENERATORS: Mapping[str, Callable[..., Design]] = {
    "paper": paper_design,
    "false_edges": false_edge_design,
    "differing": differing_design,
}


def make_design(replication: Replication) -> Design:
    """Call the generator of a replication with its parameters and its seed."""
    name = replication.options.get("generator", "paper")
    generator = GENERATORS.get(name) or find_function(name, f"generator {name!r}", replication.folder)
    arguments = dict(replication.options.get("design", {}))
    signature = inspect.signature(generator)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    # a grid may also vary what the task does (level, availability, ...): the generator gets what it can take
    arguments |= {key: value for key, value in replication.params.items() if takes_any or key in signature.parameters}
    design = generator(**arguments, seed=replication.seed)
    if not isinstance(design, Design):
        raise ParameterError(f"generator {name!r} gave a {type(design).__name__}; a fedkin.datasets.Design is expected")
    return design


# --- estimators -----------------------------------------------------------------------------------------------------


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


Settings = TypeVar("Settings")


def settings_from(kind: type[Settings], options: Mapping[str, Any]) -> Settings:
    """Return the dataclass with its fields among a study's options."""
    return kind(**{one.name: options[one.name] for one in fields(kind) if one.name in options})  # type: ignore[arg-type]


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
        if name not in ESTIMATORS:
            raise ParameterError(f"unknown estimator {name!r}; choose from {', '.join(ESTIMATORS)}")
        return ESTIMATORS[name](self)

    def penalised(self, graph: Graph) -> Estimate:
        """Return the exact minimiser along a graph, with lam by cross-validation within sites."""
        settings, federation = self.settings, self.design.federation
        if graph.n_edges == 0:
            return Estimate(self.local.theta, 0.0, graph)
        problem = Problem(federation, graph, loss=settings.loss, penalty=settings.penalty)
        # a factor of two is enough: the grid only has to begin where everything is fused
        grid = lam_grid(problem, settings.n_lams, settings.ratio, tol=1.0)
        # one job: the replications of a study run side by side
        how: Any = {"folds": settings.folds, "seed": self.seed, "tol": settings.path_tol, "n_jobs": 1}
        lam = cross_validate_lam(problem, grid, **how).lam
        return Estimate(solve(problem.with_lam(lam), tol=settings.tol).theta, lam, graph)

    def selected(self, candidates: Graph | None) -> Estimate:
        """Return the same along the edges that the test keeps; all pairs are candidates when None."""
        federation, settings = self.design.federation, self.settings
        chosen = select_edges(federation, candidates, settings.loss, settings.level, local=self.local)
        return self.penalised(chosen.graph)

    def pooled(self, labels: Index, graph: Graph | None = None) -> Estimate:
        """Return one fit per label."""
        return Estimate(oracle_fit(self.design.federation, labels.tolist(), self.settings.loss), graph=graph)

    def attainable(self) -> Estimate:
        """Pool each connected part that E and E0 have in common: the best that a choice among the edges of G can do."""
        true = self.design.graph.keep(~_across(self.design, self.design.graph))
        return self.pooled(true.components(), true)


def _across(design: Design, graph: Graph) -> Mask:
    """Return which edges join sites of different clusters."""
    return np.asarray(np.diff(design.labels[graph.edges])[:, 0] != 0)


def _global(bench: Workbench) -> Estimate:
    one = global_fit(bench.design.federation, bench.settings.loss)
    return Estimate(np.broadcast_to(one, bench.design.theta_star.shape))


ESTIMATORS: Mapping[str, Callable[[Workbench], Estimate]] = {
    "local": lambda bench: Estimate(bench.local.theta),
    "global": _global,
    "oracle": lambda bench: bench.penalised(bench.design.truth),
    "fedadmm": lambda bench: bench.penalised(bench.design.graph),
    "es": lambda bench: bench.selected(bench.design.graph),
    "local-es": lambda bench: bench.selected(None),
    "pooled": lambda bench: bench.pooled(bench.design.labels),
    "attainable": lambda bench: bench.attainable(),
}


def estimation(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per estimator: error ``||Theta - Theta*||_F^2 / |V|``, lam, edges and parts of its graph, seconds."""
    options = replication.options
    design = make_design(replication)
    bench = Workbench(design, settings_from(Tuning, options), replication.seed % 2**31)
    rate = theorem_rate(design)
    for name in options.get("estimators", list(ESTIMATORS)):
        started = process_time()
        estimate = bench.estimate(name)
        graph = estimate.graph
        yield {
            "estimator": name,
            "error": design.error(estimate.theta),
            "rate": rate,
            "lam": estimate.lam,
            "edges": None if graph is None else graph.n_edges,
            "edges_across": None if graph is None else int(_across(design, graph).sum()),
            "components": None if graph is None else graph.n_components,
            "cpu_seconds": process_time() - started,
        }


def theorem_rate(design: Design) -> float:
    """Return ``p (K(E) + |E minus E0|) / (n |V|)`` of Theorem 2; K(E) is the number of connected parts of the graph."""
    graph, (n_sites, p) = design.graph, design.theta_star.shape
    wrong, n = int(_across(design, graph).sum()), int(design.federation.n_samples.min())
    return float(p * (graph.n_components + wrong) / (n * n_sites))


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


# --- Fed-ADMM and gradient descent, round by round ------------------------------------------------------------------

#: How p_i is known, and who takes the steps of absent sites.
VARIANTS = ("known-central", "estimated-central", "known-replicas", "estimated-replicas")


def convergence(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield rows per method and recorded round: error against the truth and distance to the exact minimiser."""
    options = replication.options
    design, problem, exact = _setting(replication)
    rounds, batch = int(options.get("rounds", 1000)), int(options.get("batch_size", 10))
    for name in options.get("methods", list(METHODS)):
        if name not in METHODS:
            raise ParameterError(f"unknown method {name!r}; choose from {', '.join(METHODS)}")
        curve: dict[int, dict[str, float]] = {}

        def note(progress: Progress, curve: dict[int, dict[str, float]] = curve) -> None:
            curve.setdefault(progress.n_iter, _errors(design, exact, progress.theta))

        method, all_samples = METHODS[name]
        started = process_time()
        size = None if all_samples else batch
        solution = method(problem, rounds, size, seed=replication.seed % 2**31, callbacks=[note])
        curve.setdefault(rounds, _errors(design, exact, solution.theta))
        seconds = process_time() - started
        for number, row in curve.items():
            yield {"method": name, "lam": problem.lam, "round": number, **row, "cpu_seconds": seconds}


def availability(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per way of weighting and placing: error and distance to the exact minimiser after the last round."""
    options, p = replication.options, float(replication.params["availability"])
    design, problem, exact = _setting(replication)
    for name in options.get("variants", VARIANTS):
        weighting, _, placement = name.partition("-")
        started = process_time()
        solution = fed_admm(
            problem,
            int(options.get("rounds", 2000)),
            int(options.get("batch_size", 10)),
            availability=Availability.bernoulli(p, weighting=weighting, placement=placement),
            seed=replication.seed % 2**31,
        )
        yield {
            "variant": name,
            "weighting": weighting,
            "placement": placement,
            "lam": problem.lam,
            **_errors(design, exact, solution.theta),
            "cpu_seconds": process_time() - started,
        }


def _errors(design: Design, exact: Solution, theta: Array) -> dict[str, float]:
    return {
        "error": design.error(theta),
        "distance": float(((theta - exact.theta) ** 2).sum() / theta.shape[0]),
        "error_of_minimiser": design.error(exact.theta),
    }


def _setting(replication: Replication) -> tuple[Design, Problem, Solution]:
    """Return the design, the problem at the lam that cross-validation chooses, and its exact minimiser."""
    design = make_design(replication)
    settings = settings_from(Tuning, replication.options)
    chosen = Workbench(design, settings, replication.seed % 2**31).penalised(design.graph)
    assert chosen.lam is not None
    problem = Problem(design.federation, design.graph, settings.loss, settings.penalty, lam=chosen.lam)
    return design, problem, solve(problem, 1e-10)


#: Algorithms, and whether a round takes all samples or a batch.
METHODS: Mapping[str, tuple[Callable[..., Solution], bool]] = {
    "fedadmm-full": (fed_admm, True),
    "fedadmm-batch": (fed_admm, False),
    "gd": (subgradient_descent, True),
    "sgd": (subgradient_descent, False),
}

_DESIGN: Mapping[str, Sequence[str]] = {"generator": (), "design": ()}
TUNED_OPTIONS: Mapping[str, Sequence[str]] = {**_DESIGN, **dict.fromkeys(Tuning.__dataclass_fields__, ())}
_RUN: Mapping[str, Sequence[str]] = {**TUNED_OPTIONS, "rounds": (), "batch_size": ()}
#: The tasks of this module: the function, its options, and for lists of names among them the names to choose from.
TASKS: Mapping[str, tuple[Task, Mapping[str, Sequence[str]]]] = {
    "estimation": (estimation, {**TUNED_OPTIONS, "estimators": tuple(ESTIMATORS)}),
    "selection": (edge_selection, {**_DESIGN, "level": (), "variances": get_args(Variance)}),
    "error-rates": (error_rates, {**_DESIGN, "levels": (), "variance": (), "methods": get_args(Correction)}),
    "convergence": (convergence, {**_RUN, "methods": tuple(METHODS)}),
    "availability": (availability, {**_RUN, "variants": VARIANTS}),
}
