"""Rounds per second of Fed-ADMM, side by side with a plain vectorised numpy round and with the memory's bandwidth.

    python benchmarks/fedadmm_rounds.py small large            # |V| = 100 and 100,000
    python benchmarks/fedadmm_rounds.py million                # 10^6 sites, 5*10^6 edges, p = 10: does it run, in
    how much memory

Every variant does the same round: batch of 10 without variance reduction, l1 edges. Times are the best of several
repeats, taken in turns, so that a busy machine hurts all of them alike. Results are appended to a CSV file with --out.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy
from scipy import sparse

from fedkin.admm import DirectLink, RunPlan, Shard, StepRule, run_rounds, site_rows
from fedkin.admm.algorithm import fed_admm
from fedkin.admm.round_kernels import CompiledRounds
from fedkin.core import Problem
from fedkin.data import Federation
from fedkin.datasets import paper_design
from fedkin.graph import Graph

BATCH = 10


class LiteralNumpy:
    """Algorithm 1 as printed, vectorised: theta, beta_ij, beta_ji, alpha_ij and alpha_ji are all kept."""

    def __init__(self, problem: Problem, rho: float, kappa: float) -> None:
        fed, graph = problem.federation, problem.graph
        self.V, self.p, self.n = problem.n_sites, problem.n_params, int(fed.n_samples[0])
        self.X, self.y = fed.X.reshape(self.V, self.n, self.p), fed.y.reshape(self.V, self.n)
        self.i, self.j = graph.edges.T
        self.L, self.rho, self.kappa = problem.fused.edge_radius[:, None], rho, kappa
        E = graph.n_edges
        ones = np.ones(E)
        self.at_i = sparse.csr_array((ones, (self.i, np.arange(E))), shape=(self.V, E))
        self.at_j = sparse.csr_array((ones, (self.j, np.arange(E))), shape=(self.V, E))
        self.degree = graph.degree[:, None]
        self.theta = np.zeros((self.V, self.p))
        self.beta = [np.zeros((E, self.p)) for _ in range(2)]
        self.alpha = [np.zeros((E, self.p)) for _ in range(2)]
        self.rng = np.random.default_rng(0)

    def round(self, t: int) -> None:
        rho = self.rho
        rows = self.rng.integers(0, self.n, size=(self.V, BATCH))  # with replacement: the cheapest draw there is
        X = self.X[np.arange(self.V)[:, None], rows]
        residual = np.einsum("vbp,vp->vb", X, self.theta) - np.take_along_axis(self.y, rows, axis=1)
        gradient = np.einsum("vb,vbp->vp", residual, X) / BATCH
        copies = self.at_i @ (self.beta[0] + self.alpha[0] / rho) + self.at_j @ (self.beta[1] + self.alpha[1] / rho)
        e = self.kappa / t
        eta = e / (1 + rho * self.degree * e)
        self.theta = self.theta - eta * (gradient + rho * (self.degree * self.theta - copies))
        ti, tj = self.theta[self.i], self.theta[self.j]
        s, r = ti - self.alpha[0] / rho, tj - self.alpha[1] / rho
        middle, d = (s + r) / 2, s - r
        d = np.sign(d) * np.maximum(np.abs(d) - 2 * self.L / rho, 0.0)
        self.beta = [middle + d / 2, middle - d / 2]
        self.alpha = [self.alpha[0] - rho * (ti - self.beta[0]), self.alpha[1] - rho * (tj - self.beta[1])]


def small() -> Problem:
    design = paper_design(seed=0)
    return Problem(design.federation, design.graph, lam=0.007 / 100)


def large(V: int = 100_000, E: int = 500_000, p: int = 20, n: int = 20) -> Problem:
    """Clusters of 100 sites, 90% of the edges within them."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, V, size=3 * E)
    near, anywhere = first // 100 * 100 + rng.integers(0, 100, 3 * E), rng.integers(0, V, 3 * E)
    second = np.where(rng.random(3 * E) < 0.9, near, anywhere)
    pairs = np.stack([np.maximum(first, second), np.minimum(first, second)], axis=1)
    pairs = np.unique(pairs[pairs[:, 0] > pairs[:, 1]], axis=0)
    pairs = pairs[np.sort(rng.permutation(len(pairs))[:E])]
    centres = rng.normal(size=(V // 100, p))
    X = rng.normal(size=(V * n, p))
    y = np.einsum("np,np->n", X, np.repeat(centres, 100 * n, axis=0)) + rng.normal(size=V * n)
    federation = Federation.from_arrays(X, y, np.repeat(np.arange(V), n))
    return Problem(federation, Graph.from_indices(range(V), pairs), lam=0.04 / V)


def bandwidth() -> float:
    """Bytes per second of ``a = b + c`` on arrays that fit in no cache, one thread."""
    a, b, c = (np.ones(20_000_000) for _ in range(3))
    return 3 * a.nbytes / best([lambda: np.add(b, c, out=a)], 5)[0]


def best(works: list[Callable[[], object]], repeats: int) -> list[float]:
    """Shortest time of each, taken in turns."""
    times = [np.inf] * len(works)
    for _ in range(repeats):
        for k, work in enumerate(works):
            start = time.perf_counter()
            work()
            times[k] = min(times[k], time.perf_counter() - start)
    return times


def shard_for(problem: Problem) -> Shard:
    v, objective = problem.n_sites, problem.fused
    steps = StepRule(np.full(v, 4.0), np.full(v, 0.3), 0.2 * problem.graph.degree)  # they do not matter for the speed
    theta, rows = np.zeros((v, problem.n_params)), site_rows(problem, BATCH)
    edges = (problem.graph.edges, objective.edge_radius)
    return Shard(RunPlan(np.arange(v), theta, *edges, objective.penalty, 0.2, steps, rows))


def compare(name: str, problem: Problem, rounds: int, repeats: int) -> list[dict[str, object]]:
    literal = LiteralNumpy(problem, 0.16, 1.0)
    numpy_rounds = shard_for(problem)
    variants: dict[str, Callable[[int], object]] = {
        "literal numpy": lambda n: [literal.round(t) for t in range(1, n + 1)],
        "numpy backend": lambda n: run_rounds(numpy_rounds, DirectLink(n)),
    }
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        compiled = CompiledRounds(shard_for(problem), threads)
        variants[f"numba, {threads} thread(s)"] = lambda n, compiled=compiled: compiled(1, n)
    shares = {"literal numpy": 20, "numpy backend": 5}
    amount = {k: max(1, rounds // shares.get(k, 1)) for k in variants}
    for work in variants.values():
        work(1)
    times = best([lambda k=k: variants[k](amount[k]) for k in variants], repeats)
    V, E, p = problem.n_sites, problem.graph.n_edges, problem.n_params
    # duals read and written, edge ends and radii, five arrays of the sites read and written, and the batch
    moved = 8 * (2 * E * p + 2 * E + 10 * V * p + V * BATCH * (p + 1))
    limit = bandwidth() / moved
    base = amount["literal numpy"] / times[0]
    print(f"\n{name}: |V|={V}, |E|={E}, p={p}; {moved / 1e6:.1f} MB a round, memory limit {limit:,.1f} rounds/s")
    lines: list[dict[str, object]] = []
    for (variant, count), seconds in zip(amount.items(), times, strict=True):
        speed = count / seconds
        print(
            f"  {variant:20s} {speed:11,.1f} rounds/s {speed / base:6.1f} x literal, {limit / speed:5.1f} x off limit"
        )
        line = {"instance": name, "V": V, "E": E, "p": p, "variant": variant}
        lines.append(
            {**line, "rounds_per_second": speed, "times_literal": speed / base, "times_off_limit": limit / speed}
        )
    return lines


def million() -> list[dict[str, object]]:
    start = time.perf_counter()
    problem = large(1_000_000, 5_000_000, p=10, n=12)
    made = time.perf_counter()
    shown: list[tuple[int, float, float]] = []
    solution = fed_admm(
        problem,
        40,
        BATCH,
        gradient="plain",
        backend="numba",
        record_every=10,
        callbacks=[
            lambda progress: (
                shown.append((progress.n_iter, time.perf_counter() - made, progress.record["objective"])) and None
            )
        ],
    )
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    for n_iter, seconds, value in shown:
        print(f"  round {n_iter}: {seconds:.1f} s, objective {value:.4f}")
    print(
        f"million: made in {made - start:.0f} s, {solution.n_iter} rounds in {done - made:.0f} s, all included, "
        f"gap {solution.gap:.2g}, peak {peak:.1f} GB"
    )
    line = {"instance": "million", "V": 10**6, "E": 5 * 10**6, "p": 10, "variant": "fed_admm, numba"}
    return [{**line, "seconds": done - made, "peak_GB": peak}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instances", nargs="+", choices=["small", "large", "million"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines: list[dict[str, object]] = []
    for name in arguments.instances:
        if name == "million":
            lines += million()
        else:
            lines += compare(name, *((small(), 2000) if name == "small" else (large(), 20)), arguments.repeats)
    if arguments.out is not None:
        about = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "seed": 0,
        }
        measured = ["rounds_per_second", "times_literal", "times_off_limit", "seconds", "peak_GB"]
        names = ["instance", "V", "E", "p", "variant", *measured, *about]
        fresh = not arguments.out.exists()
        with arguments.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, names)
            if fresh:
                writer.writeheader()
            writer.writerows({**line, **about} for line in lines)


if __name__ == "__main__":
    main()
