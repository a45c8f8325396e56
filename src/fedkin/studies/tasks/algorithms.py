"""The tasks of the convergence and availability studies: Fed-ADMM and its rivals, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import process_time
from typing import Any

from fedkin._base import Array
from fedkin.admm import Availability, Callback, Progress, fed_admm, subgradient_descent
from fedkin.datasets import Design
from fedkin.errors import ParameterError
from fedkin.objective import Problem, Solution
from fedkin.solvers import solve
from fedkin.studies.tasks.designs import DESIGN_OPTIONS, make_design
from fedkin.studies.tasks.estimators import TUNING_OPTIONS, Settings, Workbench
from fedkin.studies.tasks.replication import Replication, settle_backend

#: Combinations of how p_i is known and who takes the steps of absent devices.
VARIANTS: Mapping[str, tuple[Any, Any]] = {
    "known-central": ("known", "central"),
    "estimated-central": ("estimated", "central"),
    "known-replicas": ("known", "replicas"),
    "estimated-replicas": ("estimated", "replicas"),
}


def convergence(replication: Replication) -> Iterator[dict[str, Any]]:
    """Rows per method and recorded round: error against the truth and distance to the exact minimiser."""
    options = replication.options
    backend = settle_backend()
    design, problem, exact = _setting(replication)
    rounds, batch = int(options.get("rounds", 1000)), int(options.get("batch_size", 10))
    for name in options.get("methods", list(METHODS)):
        if name not in METHODS:
            raise ParameterError(f"unknown method {name!r}; choose from {', '.join(METHODS)}")
        curve = _Curve(design, exact)
        started = process_time()
        solution = METHODS[name](problem, rounds, batch, replication.seed % 2**31, curve.note)
        curve.add(rounds, solution.theta)
        seconds = process_time() - started
        for row in curve.rows:
            yield {"method": name, "lam": problem.lam, **row, "cpu_seconds": seconds, "backend": backend}


def availability(replication: Replication) -> Iterator[dict[str, Any]]:
    """A row per way of weighting and placing: error and distance to the exact minimiser after the last round."""
    options, p = replication.options, float(replication.params["availability"])
    backend = settle_backend()
    design, problem, exact = _setting(replication)
    for name in options.get("variants", list(VARIANTS)):
        weighting, placement = VARIANTS[name]
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
            "error": design.error(solution.theta),
            "distance": float(((solution.theta - exact.theta) ** 2).sum() / problem.n_devices),
            "error_of_minimiser": design.error(exact.theta),
            "cpu_seconds": process_time() - started,
            "backend": backend,
        }


class _Curve:
    """Errors at the recorded rounds of a run."""

    def __init__(self, design: Design, exact: Solution) -> None:
        self._design, self._exact = design, exact
        self.rows: list[dict[str, float]] = []

    def note(self, progress: Progress) -> None:
        self.add(progress.n_iter, progress.theta)

    def add(self, n_iter: int, theta: Array) -> None:
        exact = self._exact.theta
        if self.rows and self.rows[-1]["round"] == n_iter:
            return
        self.rows.append(
            {
                "round": n_iter,
                "error": self._design.error(theta),
                "distance": float(((theta - exact) ** 2).sum() / theta.shape[0]),
                "error_of_minimiser": self._design.error(exact),
            }
        )


def _setting(replication: Replication) -> tuple[Design, Problem, Solution]:
    """The design, the problem at the lam that cross-validation chooses, and its exact minimiser."""
    design = make_design(replication)
    settings = Settings.of(replication.options)
    chosen = Workbench(design, settings, replication.seed % 2**31).penalised(design.graph)
    assert chosen.lam is not None
    problem = Problem(design.federation, design.graph, settings.loss, settings.penalty, lam=chosen.lam)
    return design, problem, solve(problem, 1e-10)


def _fed_admm(problem: Problem, rounds: int, batch: int | None, seed: int, note: Callback) -> Solution:
    return fed_admm(problem, rounds, batch, seed=seed, callbacks=[note])


def _subgradient(problem: Problem, rounds: int, batch: int | None, seed: int, note: Callback) -> Solution:
    return subgradient_descent(problem, rounds, batch, seed=seed, callbacks=[note])


METHODS: Mapping[str, Callable[[Problem, int, int, int, Callback], Solution]] = {
    "fedadmm-full": lambda problem, rounds, batch, seed, note: _fed_admm(problem, rounds, None, seed, note),
    "fedadmm-batch": _fed_admm,
    "gd": lambda problem, rounds, batch, seed, note: _subgradient(problem, rounds, None, seed, note),
    "sgd": _subgradient,
}

_RUN_OPTIONS = {**DESIGN_OPTIONS, **TUNING_OPTIONS, "rounds": (), "batch_size": ()}
OPTIONS = {
    "convergence": {**_RUN_OPTIONS, "methods": tuple(METHODS)},
    "availability": {**_RUN_OPTIONS, "variants": tuple(VARIANTS)},
}
