"""Time, memory and error of one `find_kin`, for many sites or many coefficients, from rows or from short messages.

    python benchmarks/kin_sizes.py [--sites 50000] [--coefficients 20] [--groups 20] [--rows 50] [--no-graph]
    python benchmarks/kin_sizes.py --sites 60 --groups 4 --coefficients 200 --rows 200 --signal 0.2 --rank 50

Rows of groups with normal parameters; a sparse graph has eight edges a site inside its group and four to anybody. With
``--rank``, kin sees summaries of that rank alone and no graph; rank 0 is the whole message. Prints wall time, processor
time, peak memory (rows included), the error over that of an oracle who is told the groups and sees the rows, and what
was found. Set OMP_NUM_THREADS=1 to measure one thread.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import replace

import numpy as np
from sklearn.metrics import adjusted_rand_score

from fedkin import Federation, Graph, Summaries, find_kin, oracle_fit, summarise
from measure import peak_gigabytes


def sparse_graph(labels: np.ndarray, rng: np.random.Generator) -> Graph:
    V, groups = len(labels), int(labels.max()) + 1
    members = [np.flatnonzero(labels == k) for k in range(groups)]
    edges = [np.column_stack([np.repeat(mine, 4), rng.choice(mine, 4 * len(mine))]) for mine in members]
    edges.append(np.column_stack([np.repeat(np.arange(V), 2), rng.integers(V, size=2 * V)]))
    pairs = np.sort(np.concatenate(edges), axis=1)
    return Graph.from_indices(range(V), np.unique(pairs[pairs[:, 0] < pairs[:, 1]], axis=0))


def messages(rows: Federation, loss: str, rank: int) -> Summaries:
    """Return summaries of a rank, or of everything over all rows: one site after another, sums by fold are large."""
    if rank:
        return summarise(rows, loss, rank=rank)
    parts = []
    for site in rows.sites:
        one = summarise(rows.subset([site]), loss, folds=2)[site]
        sums = {name: getattr(one, name) for name in ("count", "value", "gradient", "hessian")}
        moved = {name: np.stack([np.zeros_like(each[0])] * 2 + [each.sum(axis=0)]) for name, each in sums.items()}
        parts.append(replace(one, **moved))
    return Summaries.stack(parts)


def megabytes(said: Summaries, rank: int) -> float:
    """Return the size of a site's message as a file."""
    message = replace(said[0], site="0").to_plain()
    if not rank:
        message["folds"] = message["folds"][-1:]  # those without rows say nothing
    return len(json.dumps(message)) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"sites": 50_000, "coefficients": 20, "groups": 20, "rows": 50, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--signal", type=float, default=1.0)
    parser.add_argument("--loss", choices=("linear", "logistic"), default="linear")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--no-graph", action="store_true")
    asked = parser.parse_args()
    V, p, K, n, rng = asked.sites, asked.coefficients, asked.groups, asked.rows, np.random.default_rng(asked.seed)
    truth = asked.signal * rng.standard_normal((K, p))[(labels := np.arange(V) * K // V)]
    X = rng.standard_normal((V, n, p))
    eta = np.einsum("vnp,vp->vn", X, truth).ravel()
    y = eta + rng.standard_normal(V * n) if asked.loss == "linear" else rng.random(V * n) < 1 / (1 + np.exp(-eta))
    rows = Federation.from_arrays(X.reshape(V * n, p), y.astype(np.float64), np.repeat(np.arange(V), n))
    graph = None if asked.no_graph or asked.rank is not None else sparse_graph(labels, rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sites with fewer rows than coefficients have no fit of their own
        told = oracle_fit(rows, labels.tolist(), asked.loss)
        said = rows if asked.rank is None else messages(rows, asked.loss, asked.rank)
    print(f"{V} sites, {p} coefficients, {K} groups, {n} rows each, signal {asked.signal:g}, {asked.loss}")
    if isinstance(said, Summaries):
        print(f"message of a site, rank {asked.rank or 'all'}: {megabytes(said, asked.rank):.2f} MB")
    before, wall, processor = peak_gigabytes(), time.perf_counter(), time.process_time()
    kin = find_kin(said, graph, loss=asked.loss)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    memory = f"peak {peak_gigabytes():.2f} GB ({before:.2f} before)"
    ratio = ((kin.theta - truth) ** 2).sum() / ((told - truth) ** 2).sum()
    inside = np.sqrt(np.einsum("ujj->uj", kin.covariance)) * 1.96 > np.abs(kin.theta - truth)
    print(f"wall {wall:.1f} s, processor {processor:.1f} s ({1000 * processor / V:.2f} ms a site), {memory}")
    print(f"error over oracle's {ratio:.3f}, coverage of 95% {inside.mean():.3f}, graph: {kin.graph_use}")
    shown = f"{int(kin.groups.max()) + 1} groups" if kin.resolved else "no groups resolved"
    mean = float(np.arange(len(kin.n_groups)) @ kin.n_groups)
    print(f"{shown}, adjusted Rand index {adjusted_rand_score(labels, kin.groups):.3f}, expected number {mean:.1f}")


if __name__ == "__main__":
    main()
