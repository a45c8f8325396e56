"""The tasks of the convergence and availability studies: Fed-ADMM and its rivals, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import process_time
from typing import Any

from fedkin._base import Array
from fedkin.admm import Availability, Progress, fed_admm, subgradient_descent
from fedkin.core import Problem, Solution
from fedkin.datasets import Design
from fedkin.errors import ParameterError
from fedkin.solvers import solve
from fedkin.studies.tasks.designs import DESIGN_OPTIONS, Replication, make_design, settle_backend
from fedkin.studies.tasks.estimation import TUNING_OPTIONS, Tuning, Workbench

#: How p_i is known, and who takes the steps of absent sites.
VARIANTS = ("known-central", "estimated-central", "known-replicas", "estimated-replicas")


def convergence(replication: Replication) -> Iterator[dict[str, Any]]:
    """Rows per method and recorded round: error against the truth and distance to the exact minimiser."""
    options = replication.options
    backend = settle_backend()
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
        solution = method(
            problem, rounds, None if all_samples else batch, seed=replication.seed % 2**31, callbacks=[note]
        )
        curve.setdefault(rounds, _errors(design, exact, solution.theta))
        seconds = process_time() - started
        for number, row in curve.items():
            head = {"method": name, "lam": problem.lam, "round": number}
            yield {**head, **row, "cpu_seconds": seconds, "backend": backend}


def availability(replication: Replication) -> Iterator[dict[str, Any]]:
    """A row per way of weighting and placing: error and distance to the exact minimiser after the last round."""
    options, p = replication.options, float(replication.params["availability"])
    backend = settle_backend()
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
            "backend": backend,
        }


def _errors(design: Design, exact: Solution, theta: Array) -> dict[str, float]:
    return {
        "error": design.error(theta),
        "distance": float(((theta - exact.theta) ** 2).sum() / theta.shape[0]),
        "error_of_minimiser": design.error(exact.theta),
    }


def _setting(replication: Replication) -> tuple[Design, Problem, Solution]:
    """The design, the problem at the lam that cross-validation chooses, and its exact minimiser."""
    design = make_design(replication)
    settings = Tuning.of(replication.options)
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

_RUN_OPTIONS = {**DESIGN_OPTIONS, **TUNING_OPTIONS, "rounds": (), "batch_size": ()}
OPTIONS = {
    "convergence": {**_RUN_OPTIONS, "methods": tuple(METHODS)},
    "availability": {**_RUN_OPTIONS, "variants": VARIANTS},
}
