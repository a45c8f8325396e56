"""Measurements in a process of their own: memory, time per iteration, the first fit. Prints one JSON object."""

from __future__ import annotations

import json
import sys
import time

import fedkin
from fedkin.core import Problem
from fedkin.datasets import paper_design
from fedkin.solvers import load_kernels, solve_fused
from fedkin.solvers.compiled import CompiledIteration
from fedkin.solvers.pdhg import initial_rho
from measure import bandwidth, peak_gigabytes, seconds_of

from .instances import clustered


def large(n: int, p: int, penalty: str, loss: str, edges_per_site: float = 5.0, scrambled: bool = False) -> dict:
    """A certified solve at a size where memory counts, and what one iteration takes against the memory's bandwidth."""
    load_kernels()  # loading them is not part of a solve
    strength = {"l2": 0.1, "l1": 0.06 if p == 1 else 0.04}[penalty]
    how = {"loss": loss, "edges_per_site": edges_per_site, "scrambled": scrambled}
    instance = clustered(n, p, penalty, strength, **how)
    before = peak_gigabytes()
    start, cpu = time.perf_counter(), time.process_time()
    solution = solve_fused(instance.objective, 1e-6, backend="numba")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    row = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "gap": solution.gap,
        "n_iter": solution.n_iter,
        "gigabytes": peak_gigabytes(),
        "data_gigabytes": before,
        "edges": instance.objective.graph.n_edges,
    }
    del solution
    terms = instance.objective.terms
    iteration = CompiledIteration(instance.objective, terms, initial_rho(instance.objective, terms))
    iteration.advance(2)
    best = min(seconds_of(lambda: iteration.advance(1)) for _ in range(5))
    threads = iteration._crew.size
    iteration.close()
    row |= {"iteration_seconds": best, "threads": threads}
    row["iteration_bytes"] = touched_bytes(n, instance.objective.graph.n_edges, p, loss != "mean")
    row["bandwidth"] = bandwidth(threads)
    return row


def touched_bytes(n: int, edges: int, p: int, dense: bool) -> int:
    """Bytes that an iteration must read and write at least, each array once."""
    per_edge = 2 * 8 * p + 8 + 2 * 4  # duals read and written, radius, two ends
    per_site = 8 * p * (2 + 2 + 1 + 2) + 8  # x, s read and written; b; ahead written and read; degree
    return edges * per_edge + n * (per_site + (8 * p * p if dense else 0))


def rows_to_solution(n_rows: int) -> dict:
    """Time from rows to Gram statistics and from these to the solution, for 1000 sites and p = 10."""
    load_kernels()
    design = paper_design(1000, n_rows, 10, 50, varrho=0.005)
    problem = Problem(design.federation, design.graph, penalty="l2", lam=0.1 / 1000)
    formed = seconds_of(lambda: problem.fused)
    seconds = seconds_of(lambda: solve_fused(problem.fused, 1e-6, backend="numba"))
    return {"formed": formed, "seconds": seconds, "gigabytes": peak_gigabytes()}


def first_fit() -> dict:
    """Seconds of the first and the second small fit of a fresh process, with everything left to the library."""
    design = paper_design(50, 50, 10, 5)
    given = (design.federation, design.graph)
    first, second = (seconds_of(lambda: fedkin.solve(fedkin.Problem(*given, lam=1e-4))) for _ in range(2))
    return {"first": first, "second": second}


def compiling() -> dict:
    """Seconds to compile (or load) the kernels."""
    return {"seconds": seconds_of(load_kernels)}


WORK = {"large": large, "rows": rows_to_solution, "first_fit": first_fit, "compiling": compiling}

if __name__ == "__main__":
    print(json.dumps(WORK[sys.argv[1]](**json.loads(sys.argv[2]))))
