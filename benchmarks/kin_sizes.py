"""Time, memory and error of one `find_kin`, for many sites or many coefficients.

    python benchmarks/kin_sizes.py [--sites 50000] [--coefficients 20] [--groups 20] [--rows 50] [--signal 1]
        [--no-graph] [--seed 0]

Rows of groups with normal parameters; a sparse graph has eight edges a site inside its group and four to anybody.
Prints wall time, processor time, peak memory (rows included), the error over that of an oracle who is told the groups,
and what was found. Set OMP_NUM_THREADS=1 to measure one thread.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
from sklearn.metrics import adjusted_rand_score

from fedkin import Federation, Graph, find_kin


def sparse_graph(labels: np.ndarray, rng: np.random.Generator) -> Graph:
    V, groups = len(labels), int(labels.max()) + 1
    members = [np.flatnonzero(labels == k) for k in range(groups)]
    edges = [np.column_stack([np.repeat(mine, 4), rng.choice(mine, 4 * len(mine))]) for mine in members]
    edges.append(np.column_stack([np.repeat(np.arange(V), 2), rng.integers(V, size=2 * V)]))
    pairs = np.sort(np.concatenate(edges), axis=1)
    return Graph.from_indices(range(V), np.unique(pairs[pairs[:, 0] < pairs[:, 1]], axis=0))


def sized(doc: str | None, signal: float, **usual: int) -> argparse.ArgumentParser:
    """A command's parser, with the sizes of a federation and these defaults."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name, value in usual.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--signal", type=float, default=signal)
    return parser


def drawn(asked: argparse.Namespace) -> tuple[np.random.Generator, np.ndarray, np.ndarray, np.ndarray]:
    """The stream, the sites' groups ``(V,)``, the groups' centres ``(K, p)`` and all rows ``(V n, p)``."""
    V, p, K, n = asked.sites, asked.coefficients, asked.groups, asked.rows
    rng = np.random.default_rng(asked.seed)
    centres = asked.signal * rng.standard_normal((K, p))
    return rng, np.arange(V) * K // V, centres, rng.standard_normal((V * n, p))


def main() -> None:
    parser = sized(__doc__, signal=1.0, sites=50_000, coefficients=20, groups=20, rows=50, seed=0)
    parser.add_argument("--no-graph", action="store_true")
    asked = parser.parse_args()
    V, K, n = asked.sites, asked.groups, asked.rows
    rng, labels, centres, X = drawn(asked)
    p = centres.shape[1]
    site = np.repeat(np.arange(V), n)
    y = rng.standard_normal(V * n)
    for u in range(V):
        y[u * n : (u + 1) * n] += X[u * n : (u + 1) * n] @ centres[labels[u]]
    told = np.empty_like(centres)
    for k in range(K):
        mine = np.repeat(labels == k, n)
        told[k] = np.linalg.lstsq(X[mine], y[mine], rcond=None)[0]
    rows = Federation.from_arrays(X, y, site)
    graph = None if asked.no_graph else sparse_graph(labels, rng)
    wall, processor = time.perf_counter(), time.process_time()
    kin = find_kin(rows, graph)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    error, least = ((kin.theta - centres[labels]) ** 2).sum(), ((told - centres)[labels] ** 2).sum()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    inside = np.sqrt(np.einsum("ujj->uj", kin.covariance)) * 1.96 > np.abs(kin.theta - centres[labels])
    print(f"{V} sites, {p} coefficients, {K} groups, {n} rows each, signal {asked.signal:g}, graph: {kin.graph_use}")
    print(f"wall {wall:.1f} s, processor {processor:.1f} s ({1000 * processor / V:.2f} ms a site), peak {peak:.2f} GB")
    print(f"error over oracle's {error / least:.3f}, coverage of 95% {inside.mean():.3f}")
    shown = f"{int(kin.groups.max()) + 1} groups" if kin.resolved else "no groups resolved"
    mean = float(np.arange(len(kin.n_groups)) @ kin.n_groups)
    print(f"{shown}, adjusted Rand index {adjusted_rand_score(labels, kin.groups):.3f}, expected number {mean:.1f}")


if __name__ == "__main__":
    main()
