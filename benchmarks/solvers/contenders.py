"""Those who solve: Fedkin's backends, and every peer that is installed.

A contender says whether it applies, with a reason if not, and yields attempts from coarse to fine: each is a setting of
the peer's own accuracy, and running it gives parameters and seconds. The harness keeps the first attempt that reaches
the wanted suboptimality. What it takes to tell a peer the problem (cvxpy's compilation, matrices) is not in its time.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from fedkin.core import FusedObjective, QuadraticTerms, RowTerms
from fedkin.solvers import solve_fused
from fedkin.solvers.compiled import Backend
from measure import version

from .instances import Instance

Array = NDArray[np.float64]
#: A Python with prox_tv and pycut-pursuit, which need numpy < 2; this one by default.
PEERS_PYTHON = os.environ.get("FEDKIN_BENCH_PEERS", sys.executable)


@dataclass(frozen=True)
class Attempt:
    """One setting: ``run() -> (theta (V, p), seconds)``."""

    setting: str
    run: Callable[[], tuple[Array, float]]


class Contender(Protocol):
    """Somebody who solves instances."""

    name: str

    def version(self) -> str:
        """Of the package."""

    def skip(self, instance: Instance) -> str | None:
        """Why it does not take part, or None; that it does not apply comes before that it is not installed."""

    def attempts(self, instance: Instance, target: float) -> Iterator[Attempt]:
        """Settings from coarse to fine."""


class Fedkin:
    """The exact solver; its own certificate says when it is done."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.name = backend, f"fedkin ({backend})"

    def version(self) -> str:
        return version("fedkin")

    def skip(self, instance: Instance) -> str | None:
        size = instance.objective.graph.n_edges * instance.objective.terms.n_params
        if self.backend == "numpy" and size > 2_000_000:
            return "too large to be worth it"
        return None

    def attempts(self, instance: Instance, target: float) -> Iterator[Attempt]:
        def run() -> tuple[Array, float]:
            objective = instance.fresh()
            start = time.perf_counter()
            theta = solve_fused(objective, target, backend=self.backend).theta
            return theta, time.perf_counter() - start

        yield Attempt(f"gap {target:.0e}", run)


class Convex:
    """cvxpy with one of its solvers; the time is what the solver itself reports."""

    def __init__(self, solver: str, options: Callable[[float], dict[str, object]], name: str | None = None) -> None:
        self.solver, self.options, self.name = solver, options, name or f"cvxpy + {solver}"

    def version(self) -> str:
        return version(self.solver.lower())

    def skip(self, instance: Instance) -> str | None:
        objective = instance.objective
        size = objective.graph.n_edges * objective.terms.n_params
        quadratic = isinstance(objective.terms, QuadraticTerms)
        if self.solver == "OSQP" and (not quadratic or objective.penalty.name != "l1"):
            return "not a quadratic program"
        limit = {"CLARABEL": 200_000, "OSQP": 100_000, "SCS": 200_000}[self.solver]
        if "indirect" in self.name:
            limit = 600_000
        if size > limit:
            return f"{size:.0e} edge duals: runs out of memory or takes hours"
        if instance.shape is not None:
            return "left to the specialised peers"
        for package in ("cvxpy", self.solver.lower()):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
        return None

    def attempts(self, instance: Instance, target: float) -> Iterator[Attempt]:
        import cvxpy

        problem, x = _cvxpy_problem(instance.objective)
        shape = instance.objective.terms.n_sites, instance.objective.terms.n_params

        def run(eps: float) -> tuple[Array, float]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    # cvxpy starts SCS and OSQP from the last solution unless told not to
                    problem.solve(solver=self.solver, warm_start=False, **self.options(eps))
                except cvxpy.SolverError:
                    return np.full(shape, np.nan), np.nan
            stats = problem.solver_stats
            if x.value is None or stats is None:
                return np.full(shape, np.nan), np.nan
            return x.value.reshape(shape), float(stats.solve_time or 0.0) + float(stats.setup_time or 0.0)

        coarse = np.floor(np.log10(target)) + 2
        for eps in 10.0 ** np.arange(coarse, coarse - 6, -1.0):
            yield Attempt(f"eps {eps:.0e}", lambda eps=eps: run(float(eps)))


def _cvxpy_problem(objective: FusedObjective) -> tuple[object, object]:
    import cvxpy

    terms, graph = objective.terms, objective.graph
    n, p = terms.n_sites, terms.n_params
    x = cvxpy.Variable(n * p)
    if isinstance(terms, QuadraticTerms):
        A = terms.hessians(terms.b)
        # A = R R', so the loss is |R' x - R^{-1} b|^2 / 2 and a constant
        root = np.linalg.cholesky(A)
        right = np.linalg.solve(root, terms.b[:, :, None])[:, :, 0]
        R = sparse.block_diag(list(np.swapaxes(root, 1, 2)), format="csr")
        cost = 0.5 * cvxpy.sum_squares(R @ x - right.ravel())
    else:
        assert isinstance(terms, RowTerms)  # sites with the same number of rows
        blocks, targets = list(terms.X), terms.y.ravel()
        eta = sparse.block_diag(blocks, format="csr") @ x
        cost = cvxpy.sum(cvxpy.logistic(eta) - cvxpy.multiply(targets, eta)) / terms.n_rows
    difference = sparse.kron(graph.incidence(), sparse.eye_array(p)).tocsr() @ x
    if objective.penalty.name == "l1":
        penalty = np.repeat(objective.edge_radius, p) @ cvxpy.abs(difference)
    else:
        lengths = cvxpy.norm(cvxpy.reshape(difference, (graph.n_edges, p), order="C"), 2, axis=1)
        penalty = objective.edge_radius @ lengths
    return cvxpy.Problem(cvxpy.Minimize(cost + penalty)), x


class External:
    """prox_tv or pycut-pursuit, in a Python of their own; only the call itself is timed."""

    def __init__(self, package: str, settings: tuple[str, ...], n_threads: int = 1) -> None:
        self.package, self.settings, self.n_threads = package, settings, n_threads
        self.name = package if n_threads == 1 else f"{package}, {n_threads} threads"
        self._version: str | None = None

    def version(self) -> str:
        if self._version is None:
            code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
            done = subprocess.run([PEERS_PYTHON, "-c", code], capture_output=True, text=True, check=False)
            self._version = done.stdout.strip()
        return self._version

    def skip(self, instance: Instance) -> str | None:
        if instance.objective.terms.n_params > 1 or not isinstance(instance.objective.terms, QuadraticTerms):
            return "p = 1 and mean loss only"
        if self.package == "prox_tv" and instance.shape is None:
            return "grids only"
        if shutil.which(PEERS_PYTHON) is None:
            return f"FEDKIN_BENCH_PEERS={PEERS_PYTHON} is not a program"
        if not self.version():
            return f"{self.package} is not installed for {Path(PEERS_PYTHON).name}; see docs/benchmarks.md"
        return None

    def attempts(self, instance: Instance, target: float) -> Iterator[Attempt]:
        for setting in self.settings:
            yield Attempt(setting, lambda setting=setting: self._run(instance, setting))

    def _run(self, instance: Instance, setting: str) -> tuple[Array, float]:
        objective = instance.objective
        with tempfile.TemporaryDirectory() as folder:
            given, found = Path(folder) / "given.npz", Path(folder) / "found.npz"
            np.savez(
                given,
                b=objective.terms.b[:, 0],  # type: ignore[attr-defined]
                edges=objective.graph.edges,
                radius=objective.edge_radius,
                shape=instance.shape or (),
            )
            worker = Path(__file__).with_name("external_worker.py")
            command = [PEERS_PYTHON, str(worker), self.package, setting, str(self.n_threads), str(given), str(found)]
            subprocess.run(command, check=True, timeout=900)
            result = np.load(found)
            return result["theta"][:, None], float(result["seconds"])


def everyone(n_cores: int) -> list[Contender]:
    """Return all contenders, Fedkin first."""

    def scs(eps: float) -> dict[str, object]:
        return {"eps_abs": eps, "eps_rel": eps, "max_iters": 200_000}

    iterations = tuple(f"dr {n}" for n in (35, 70, 140, 280, 560, 1120))
    return [
        Fedkin("numba"),
        Fedkin("numpy"),
        Convex("CLARABEL", lambda eps: {"tol_gap_abs": eps, "tol_gap_rel": eps, "tol_feas": eps, "max_iter": 500}),
        Convex("SCS", scs),
        Convex("SCS", lambda eps: {**scs(eps), "use_indirect": True}, name="cvxpy + SCS, indirect"),
        Convex("OSQP", lambda eps: {"eps_abs": eps, "eps_rel": eps, "max_iter": 200_000}),
        External("prox_tv", iterations),
        External("prox_tv", iterations, n_cores),
        External("pycut-pursuit", tuple(f"1e-{k}" for k in range(1, 8)), n_cores),
    ]
