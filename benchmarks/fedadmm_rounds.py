"""Rounds per second of Fed-ADMM, side by side with a plain vectorised numpy round and with the memory's bandwidth.

    python benchmarks/fedadmm_rounds.py small large            # |V| = 100 and 100,000

Every variant does the same round: batch of 10 without variance reduction, l1 edges. Times are the best of several
repeats, taken in turns, so that a busy machine hurts all of them alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from scipy import sparse

from fedkin._base import available_cores
from fedkin.admm import DirectLink, RunPlan, Shard, StepRule, run_rounds, site_rows
from fedkin.admm.round_kernels import CompiledRounds
from fedkin.core import Problem
from fedkin.data import Federation
from fedkin.datasets import paper_design
from fedkin.graph import Graph
from measure import bandwidth, in_turns
from solvers.instances import block_graph

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
    pairs, centres, X = block_graph(V, rng, E / V), rng.normal(size=(V // 100, p)), rng.normal(size=(V * n, p))
    y = np.einsum("np,np->n", X, np.repeat(centres, 100 * n, axis=0)) + rng.normal(size=V * n)
    federation = Federation.from_arrays(X, y, np.repeat(np.arange(V), n))
    return Problem(federation, Graph.from_indices(range(V), pairs), lam=0.04 / V)


def shard_for(problem: Problem) -> Shard:
    v, objective = problem.n_sites, problem.fused
    steps = StepRule(np.full(v, 4.0), np.full(v, 0.3), 0.2 * problem.graph.degree)  # they do not matter for the speed
    theta, rows = np.zeros((v, problem.n_params)), site_rows(problem, BATCH)
    edges = (problem.graph.edges, objective.edge_radius)
    return Shard(RunPlan(np.arange(v), theta, *edges, objective.penalty, 0.2, steps, rows))


def compare(name: str, problem: Problem, rounds: int, repeats: int) -> None:
    literal, numpy_rounds = LiteralNumpy(problem, 0.16, 1.0), shard_for(problem)
    variants: dict[str, tuple[Callable[[int], object], int]] = {
        "literal numpy": (lambda n: [literal.round(t) for t in range(1, n + 1)], max(1, rounds // 20)),
        "numpy backend": (lambda n: run_rounds(numpy_rounds, DirectLink(n)), max(1, rounds // 5)),
    }
    for threads in sorted({1, available_cores()}):
        compiled = CompiledRounds(shard_for(problem), threads)
        variants[f"numba, {threads} thread(s)"] = (lambda n, compiled=compiled: compiled(1, n), rounds)
    for work, _ in variants.values():
        work(1)
    times = in_turns({name: lambda work=work, n=n: work(n) for name, (work, n) in variants.items()}, repeats)
    speeds = {name: n / min(times[name]) for name, (_, n) in variants.items()}
    V, E, p = problem.n_sites, problem.graph.n_edges, problem.n_params
    # duals read and written, edge ends and radii, five arrays of the sites read and written, and the batch
    moved = 8 * (2 * E * p + 2 * E + 10 * V * p + V * BATCH * (p + 1))
    limit, base = bandwidth() / moved, speeds["literal numpy"]
    print(f"\n{name}: |V|={V}, |E|={E}, p={p}; {moved / 1e6:.1f} MB a round, memory limit {limit:,.1f} rounds/s")
    for name, speed in speeds.items():
        print(f"  {name:20s} {speed:11,.1f} rounds/s {speed / base:6.1f} x literal, {limit / speed:5.1f} x off limit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instances", nargs="+", choices=["small", "large"])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    for name in arguments.instances:
        compare(name, *((small(), 2000) if name == "small" else (large(), 20)), arguments.repeats)


if __name__ == "__main__":
    main()
