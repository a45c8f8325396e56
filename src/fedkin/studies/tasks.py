"""Replications of the studies of the paper: designs with a known truth, estimators, and Fed-ADMM round by round.

A task is a function that takes a `Replication` and yields rows, dictionaries whose entries become columns. A generator
of designs, by name or as "module:function", is called by name with the grid point's parameters that it knows, the
entries of ``design`` among the options, and ``seed``.

Penalised estimators are exact minimisers of the paper's objective, with lam by cross-validation; Oracle is the one
along the true graph G0. Names with "-printed" are the output of Algorithm 1 as printed, at the same lam. "pooled" and
"attainable" are two references without any tuning: one fit per true cluster, and one per connected part of the true
edges of G. Those with an l1 term (the extension of the discussion) choose its level together with lam; "told-levels"
has the two levels with the least true error.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
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
from fedkin.core.theory import Sizes, kappa, theorem2_rate
from fedkin.data import Federation
from fedkin.datasets import Design, paper_design
from fedkin.errors import ParameterError, SolverError
from fedkin.graph import Graph
from fedkin.solvers import cross_validate_lam, cross_validate_sparsity, lam_grid, lam_path, solve

# --- replications and designs -----------------------------------------------------------------------------------------


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


def sparse_design(
    n_sites: int = 20,
    n_samples: int = 30,
    n_features: int = 60,
    n_clusters: int = 4,
    *,
    nonzero: int = 6,
    varrho: float = 0.1,
    seed: int = 0,
) -> Design:
    """Draw equal clusters whose parameters have a few entries between 0.5 and 1.5 in size, and a corrupted graph."""
    if not 1 <= nonzero <= n_features:
        raise ParameterError(f"nonzero must lie between 1 and the {n_features} features, got {nonzero}")
    rng = np.random.default_rng(seed)
    labels = np.arange(n_sites) * n_clusters // n_sites
    centres = np.zeros((n_clusters, n_features))
    for centre in centres:
        support = rng.choice(n_features, nonzero, replace=False)
        centre[support] = rng.choice([-1.0, 1.0], nonzero) * rng.uniform(0.5, 1.5, nonzero)
    data = {}
    for u, theta in enumerate(centres[labels]):
        X = rng.normal(size=(n_samples, n_features))
        data[u] = X, X @ theta + rng.normal(size=n_samples)
    truth = Graph.clusters(labels.tolist())
    return Design(Federation(data), truth.corrupt(varrho, seed=rng), truth, centres[labels], labels)


#: Generators by their short names.
GENERATORS: Mapping[str, str] = {
    "paper": "fedkin.datasets:paper_design",
    "false_edges": "fedkin.studies.tasks:false_edge_design",
    "differing": "fedkin.studies.kin:differing_design",
    "sparse": "fedkin.studies.tasks:sparse_design",
}


def generator_arguments(
    signature: inspect.Signature, design: Mapping[str, Any], point: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a generator is called with: ``design``, and what it takes of the grid point."""
    # a grid may also vary what the task does (level, availability, ...)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    return {**design, **{name: value for name, value in point.items() if takes_any or name in signature.parameters}}


def make_design(replication: Replication) -> Design:
    """Call the generator of a replication with its parameters and its seed."""
    name = replication.options.get("generator", "paper")
    generator = find_function(GENERATORS.get(name, name), f"generator {name!r}", replication.folder)
    given = replication.options.get("design", {})
    design = generator(
        **generator_arguments(inspect.signature(generator), given, replication.params), seed=replication.seed
    )
    if not isinstance(design, Design):
        raise ParameterError(f"generator {name!r} gave a {type(design).__name__}; a fedkin.datasets.Design is expected")
    return design


# --- estimators -------------------------------------------------------------------------------------------------------


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
    rounds: int = 1000  # T and the rows of a batch, of algorithms that go round by round
    batch_size: int = 10
    sparsities: Sequence[float] = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3)  # that "told-levels" tries


Settings = TypeVar("Settings")


def settings_from(kind: type[Settings], options: Mapping[str, Any]) -> Settings:
    """Return the dataclass with its fields among a study's options."""
    return kind(**{one.name: options[one.name] for one in fields(kind) if one.name in options})  # type: ignore[arg-type]


@dataclass(frozen=True)
class StudyEstimate:
    """What an estimator found on a design: ``theta (V, p)``, lam, graph, and the mean level of the l1 term."""

    theta: Array
    lam: float | None = None
    graph: Graph | None = None
    sparsity: float | None = None


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
        # a factor of two is enough: the grid only has to begin where everything is fused
        grid = lam_grid(problem, settings.n_lams, settings.ratio, tol=1.0)
        # one job: the replications of a study run side by side
        how: Any = {"folds": settings.folds, "seed": self.seed, "tol": settings.path_tol, "n_jobs": 1}
        lam = cross_validate_lam(problem, grid, **how).lam
        return StudyEstimate(solve(problem.with_lam(lam), tol=settings.tol).theta, lam, graph)

    @cached_property
    def given(self) -> StudyEstimate:
        """The exact minimiser along the given graph."""
        return self.penalised(self.design.graph)

    @cached_property
    def kept(self) -> StudyEstimate:
        """The exact minimiser along the edges of the given graph that the test keeps."""
        return self.selected(self.design.graph)

    def problem(self, exact: StudyEstimate, factor: float = 1.0) -> Problem:
        """Return the problem of an exact minimiser, with lam times ``factor``."""
        settings = self.settings
        assert exact.graph is not None and exact.lam is not None
        lam = factor * exact.lam
        return Problem(self.design.federation, exact.graph, settings.loss, settings.penalty, lam=lam)

    def in_rounds(self, exact: StudyEstimate, algorithm: Callable[..., Solution]) -> StudyEstimate:
        """Return what an algorithm finds in T rounds where the minimiser is ``exact``."""
        settings = self.settings
        found = algorithm(self.problem(exact), settings.rounds, settings.batch_size, seed=self.seed)
        return StudyEstimate(found.theta, exact.lam, exact.graph)

    def selected(self, candidates: Graph | None) -> StudyEstimate:
        """Return the same along the edges that the test keeps; all pairs are candidates when None."""
        federation, settings = self.design.federation, self.settings
        chosen = select_edges(federation, candidates, settings.loss, settings.level, local=self.local)
        return self.penalised(chosen.graph)

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
        found, graph, settings = [], self.design.graph, self.settings
        for sparsity in settings.sparsities:
            problem = Problem(self.design.federation, graph, sparsity=sparsity)
            grid = lam_grid(problem, settings.n_lams, settings.ratio, tol=1.0)
            path = lam_path(problem, grid, tol=settings.path_tol)
            found += [StudyEstimate(solution.theta, lam, graph, sparsity) for lam, solution in path]
        return min(found, key=lambda one: self.design.error(one.theta))

    def attainable(self) -> StudyEstimate:
        """Pool each connected part that E and E0 have in common: the best that a choice among the edges of G can do."""
        true = self.design.graph.keep(~_across(self.design, self.design.graph))
        return self.pooled(true.components(), true)


def _across(design: Design, graph: Graph) -> Mask:
    """Return which edges join sites of different clusters."""
    return np.asarray(np.diff(design.labels[graph.edges])[:, 0] != 0)


def _global(bench: Workbench) -> StudyEstimate:
    one = global_fit(bench.design.federation, bench.settings.loss)
    return StudyEstimate(np.broadcast_to(one, bench.design.theta_star.shape))


#: Estimators of a study that names none.
USUAL = ("local", "global", "oracle", "fedadmm", "es", "local-es", "pooled", "attainable")
ESTIMATORS: Mapping[str, Callable[[Workbench], StudyEstimate]] = {
    "local": lambda bench: StudyEstimate(bench.local.theta),
    "global": _global,
    "oracle": lambda bench: bench.penalised(bench.design.truth),
    "fedadmm": lambda bench: bench.given,
    "es": lambda bench: bench.kept,
    "local-es": lambda bench: bench.selected(None),
    "pooled": lambda bench: bench.pooled(bench.design.labels),
    "attainable": lambda bench: bench.attainable(),
    "fedadmm-printed": lambda bench: bench.in_rounds(bench.given, printed_algorithm),
    "es-printed": lambda bench: bench.in_rounds(bench.kept, printed_algorithm),
    "fedadmm-variant": lambda bench: bench.in_rounds(bench.given, fed_admm),
    # one factor |V| too many in lam: objective and algorithm of the paper differ by it
    "fedadmm-scaled": lambda bench: StudyEstimate(
        solve(bench.problem(bench.given, bench.design.federation.n_sites), tol=bench.settings.tol).theta
    ),
    "local-lasso": lambda bench: bench.sparse(Graph.empty(bench.design.federation.sites)),
    "fused": lambda bench: bench.sparse(bench.design.graph, levels=[0.0]),
    "sparse-fused": lambda bench: bench.sparse(bench.design.graph),
    "sparse-sites": lambda bench: bench.sparse(bench.design.graph, per_site=True),
    "sparse-oracle": lambda bench: bench.sparse(bench.design.truth),
    "told-levels": lambda bench: bench.told_levels(),
}
SPARSE = ("local-lasso", "fused", "sparse-fused", "sparse-sites", "sparse-oracle", "told-levels")


def estimation(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per estimator: error ``||Theta - Theta*||_F^2 / |V|``, lam, edges and parts of its graph, seconds."""
    for design, estimate, row in _estimated(replication, USUAL):
        graph, sizes = estimate.graph, Sizes.of(design.federation, design.graph, design.theta_star)
        yield {
            **row,
            "rate": theorem2_rate(sizes),
            "edges": None if graph is None else graph.n_edges,
            "edges_across": None if graph is None else int(_across(design, graph).sum()),
            "components": None if graph is None else graph.n_components,
        }


def sparse(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per estimator: error, levels, and how the support that it finds compares with the true one."""
    for design, estimate, row in _estimated(replication, SPARSE):
        yield {**row, "sparsity": estimate.sparsity, **support(estimate.theta, design.theta_star)}


def _estimated(
    replication: Replication, usual: Sequence[str]
) -> Iterator[tuple[Design, StudyEstimate, dict[str, Any]]]:
    """Yield the design, what each estimator found on it, and what every row has."""
    design, options = make_design(replication), replication.options
    bench = Workbench(design, settings_from(Tuning, options), replication.seed % 2**31)
    for name in options.get("estimators", usual):
        started = process_time()
        estimate = bench.estimate(name)
        row = {"estimator": name, "error": design.error(estimate.theta), "lam": estimate.lam}
        yield design, estimate, {**row, "cpu_seconds": process_time() - started}


def support(theta: Array, truth: Array) -> dict[str, float]:
    """Return the share of true entries that are found, the share of found ones that are false, and both being right."""
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

    The paper names neither rho nor the parameter space. Here rho is the automatic one, and the space is a ball with
    twice the longest local estimate as its radius, onto which iterates are projected, as the paper suggests before
    Theorem 4; ``project=False`` leaves them alone.
    """
    federation, loss = problem.rows_for("Algorithm 1"), problem.loss
    local = local_fit(federation, loss).theta
    if project:
        problem = replace(problem, radius=2.0 * float(np.linalg.norm(local, axis=1).max()))
    step: Any = {"step": "literal", "kappa": kappa(federation, local, loss), "average": "paper"}
    return fed_admm(problem, rounds, batch_size, **step, **more)


def convergence(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield rows per method and recorded round: error against the truth and distance to the exact minimiser.

    ``diverged`` is 1 in the rows of a run that overflows, or ends farther from the truth than where it began.
    """
    design, problem, exact, settings = _setting(replication)
    for name in replication.options.get("methods", list(METHODS)):
        curve: dict[int, dict[str, float]] = {}

        def note(progress: Progress, curve: dict[int, dict[str, float]] = curve) -> None:
            curve.setdefault(progress.n_iter, _errors(design, exact, progress.theta))

        method, all_samples = METHODS[name]
        started, start = process_time(), design.error(np.zeros_like(exact.theta))
        size = None if all_samples else settings.batch_size
        try:
            solution = method(problem, settings.rounds, size, seed=replication.seed % 2**31, callbacks=[note])
            curve.setdefault(settings.rounds, _errors(design, exact, solution.theta))
            diverged = not design.error(solution.theta) <= start
        except SolverError:
            diverged = True
        about = {"lam": problem.lam, "diverged": float(diverged), "cpu_seconds": process_time() - started}
        for number, row in curve.items():
            yield {"method": name, "round": number, **row, **about}


def availability(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield a row per way of weighting and placing: error and distance to the exact minimiser after the last round."""
    p = float(replication.params["availability"])
    design, problem, exact, settings = _setting(replication)
    for name in replication.options.get("variants", VARIANTS):
        weighting, _, placement = name.partition("-")
        started = process_time()
        solution = fed_admm(
            problem,
            settings.rounds,
            settings.batch_size,
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


def _setting(replication: Replication) -> tuple[Design, Problem, Solution, Tuning]:
    """Return the design, the problem at the lam that cross-validation chooses, its exact minimiser, and settings."""
    design = make_design(replication)
    settings = settings_from(Tuning, replication.options)
    bench = Workbench(design, settings, replication.seed % 2**31)
    problem = bench.problem(bench.given)
    return design, problem, solve(problem, 1e-10), settings


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
TASKS: Mapping[str, tuple[Task, Mapping[str, Sequence[str]]]] = {
    "estimation": (estimation, {**TUNED_OPTIONS, "estimators": tuple(ESTIMATORS)}),
    "selection": (edge_selection, {**_DESIGN, "level": (), "variances": get_args(Variance)}),
    "error-rates": (error_rates, {**_DESIGN, "levels": (), "variance": (), "methods": get_args(Correction)}),
    "convergence": (convergence, {**TUNED_OPTIONS, "methods": tuple(METHODS)}),
    "availability": (availability, {**TUNED_OPTIONS, "variants": VARIANTS}),
    "sparse": (sparse, {**TUNED_OPTIONS, "estimators": SPARSE}),
}
