"""What `find_kin` says of itself, on federations with and without groups: does it keep what it promises?

    python benchmarks/kin_calibration.py [SEEDS] [--designs NAME,NAME...] [--rows FILE] [--jobs N]

For each design: the error over that of an oracle (who is told the groups, or the variances where there are none), the
share of fits that declare groups resolved, agreement of shown groups with the truth (adjusted Rand index) where they
do, coverage of 95% intervals, the mean probability of being kin for pairs that are and that are not, and the weight of
the model without groups. Then, over all fits that declare groups resolved, the share of true kin among pairs by stated
probability. ``--rows`` keeps one line of JSON for each fit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from sklearn.metrics import adjusted_rand_score

from fedkin import Federation, Graph, find_kin, oracle_fit
from fedkin.datasets import paper_design

BINS = np.array([0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0 + 1e-9])
Made = tuple[Federation, Graph | None, np.ndarray, np.ndarray | None, str]  # rows, graph, truth, groups or None, loss


def grouped(signal: float, varrho: float | None = None, **more: object) -> Callable[[int], Made]:
    """The paper's design; no graph without ``varrho``."""

    def make(seed: int) -> Made:
        sizes = {"n_sites": 60, "n_samples": 50, "n_features": 20, "n_clusters": 5, **more}
        found = paper_design(varrho=0.1 if varrho is None else varrho, signal=signal, seed=seed, **sizes)
        graph = None if varrho is None else found.graph
        return found.federation, graph, found.theta_star, found.labels, str(more.get("loss", "linear"))

    return make


def other_graph(signal: float, V: int, p: int, groups: int = 5) -> Callable[[int], Made]:
    """A clear graph of groups that have nothing to do with those of the parameters."""

    def make(seed: int) -> Made:
        more = {"n_sites": V, "n_samples": 2 * p + 10, "n_features": p, "n_clusters": groups}
        rows, _, truth, labels, loss = grouped(signal, **more)(seed)
        rng = np.random.default_rng([seed, 1])
        wrong = rng.permutation(V) % groups
        i, j = np.tril_indices(V, -1)
        edge = rng.random(len(i)) < np.where(wrong[i] == wrong[j], 0.8, 0.1) * min(1.0, 60 / V)
        return rows, Graph.from_indices(range(V), np.column_stack([i, j])[edge]), truth, labels, loss

    return make


def continuous(
    spread: float, V: int = 60, n: int = 50, p: int = 20, differ: int | None = None, loss: str = "linear"
) -> Callable[[int], Made]:
    """Sites around one mean, normally; only the first ``differ`` coefficients do where that is given."""

    def make(seed: int) -> Made:
        rng = np.random.default_rng([seed, 7])
        theta = np.tile(0.3 * rng.normal(size=p), (V, 1))
        theta[:, :differ] += spread * rng.normal(size=(V, p if differ is None else differ))
        X = rng.normal(size=(V, n, p))
        eta = np.einsum("unp,up->un", X, theta)
        y = eta + rng.normal(size=(V, n)) if loss == "linear" else (rng.random((V, n)) < 1 / (1 + np.exp(-eta))) * 1.0
        one = np.zeros(V, dtype=np.int64) if spread == 0 else None
        return Federation({u: (X[u], y[u]) for u in range(V)}), None, theta, one, loss

    return make


DESIGNS: dict[str, Callable[[int], Made]] = {
    **{f"groups {v} {s}": grouped(s, v) for v, s in [(0.1, 0.1), (0.1, 0.2), (0.1, 0.3), (0.3, 0.15), (0.3, 0.2)]},
    **{f"groups {v} {s}": grouped(s, v) for v, s in [(0.4, 0.1), (0.4, 0.15), (0.4, 0.2), (0.4, 0.3), (0.4, 0.45)]},
    **{f"groups {v} {s}": grouped(s, v) for v, s in [(0.5, 0.2), (0.5, 0.6), (0.9, 0.2)]},
    **{f"no graph, groups {s}": grouped(s) for s in (0.15, 0.2, 0.3, 0.6)},
    "one group": continuous(0.0),
    "one group, 20 sites": continuous(0.0, V=20, n=30, p=5),
    "continuum 0.1": continuous(0.1),
    "continuum 0.3": continuous(0.3),
    "continuum, 30 sites": continuous(0.5, V=30, n=25, p=4),
    "continuum in 3 of 20": continuous(0.5, differ=3),
    "logistic, groups": grouped(1.0, loss="logistic", n_sites=30, n_samples=200, n_features=5, n_clusters=3),
    "logistic, one group": continuous(0.0, V=30, n=200, p=5, loss="logistic"),
    "logistic, continuum": continuous(0.5, V=30, n=200, p=5, loss="logistic"),
    "other graph, V p = 200": other_graph(0.5, 40, 5),
    "other graph, V p = 1200": other_graph(0.3, 60, 20),
    "other graph, V p = 10,000": other_graph(0.3, 500, 20),
    "other graph, V p = 50,000": other_graph(0.3, 2500, 20),
}


def measure(task: tuple[str, int]) -> dict[str, object]:
    name, seed = task
    rows, graph, truth, labels, loss = DESIGNS[name](seed)
    kin = find_kin(rows, graph, loss=loss)
    low, high = np.moveaxis(kin.confint(0.95), 2, 0)
    error, best = float(((kin.theta - truth) ** 2).sum()), reference(rows, truth, labels, loss)
    found: dict[str, object] = {
        "design": name,
        "seed": seed,
        "error": error,
        "oracle": best,
        "covered": float(((low < truth) & (truth < high)).mean()),
        "resolved": kin.resolved,
        "weight": kin.weight_mixed,
        "use": kin.graph_use,
    }
    if graph is not None and name.startswith("other"):
        bare = find_kin(rows, loss=loss)
        found["oracle"] = float(((bare.theta - truth) ** 2).sum())  # what the graph must not spoil
    i, j = np.tril_indices(min(len(truth), 2000), -1)
    stated = np.asarray(kin.probability[i, j])
    same = np.zeros(len(i), dtype=bool) if labels is None else labels[i] == labels[j]
    found["kin"] = float(stated[same].mean()) if same.any() else None
    found["others"] = float(stated[~same].mean()) if (~same).any() else None
    found["agreement"] = adjusted_rand_score(labels, kin.groups) if labels is not None else None
    place = np.digitize(stated, BINS) - 1
    found["bins"] = [np.bincount(place, w, len(BINS) - 1).tolist() for w in (np.ones(len(i)), stated, same * 1.0)]
    return found


def reference(rows: Federation, truth: np.ndarray, labels: np.ndarray | None, loss: str) -> float:
    """The squared error of an oracle who knows the groups, or for a continuum the spreads and the mean."""
    if labels is not None:
        return float(((oracle_fit(rows, labels.tolist(), loss) - truth) ** 2).sum())
    if loss != "linear":
        return float("nan")
    spread, mean = truth.var(axis=0), truth.mean(axis=0)
    root, error = np.sqrt(spread), 0.0
    for u, site in enumerate(rows.sites):
        X, y = rows[site].X, rows[site].y
        own = np.linalg.solve(np.eye(len(root)) + root[:, None] * (X.T @ X) * root, root * (X.T @ (y - X @ mean)))
        error += float(((mean + root * own - truth[u]) ** 2).sum())
    return error


def show(rows: list[dict]) -> None:
    print("| design | fits | error / oracle (s.e.) | resolved | agreement | coverage | P kin | P others | no groups |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(row["design"] for row in rows):
        mine = [row for row in rows if row["design"] == name]
        ratio = np.array([row["error"] / row["oracle"] for row in mine])
        deviation = ratio.std(ddof=1) / np.sqrt(len(mine)) if len(mine) > 1 else np.nan

        def mean(key: str, some: list[dict]) -> str:
            values = [row[key] for row in some if row[key] is not None]
            return f"{np.mean(values):.2f}" if values else ""

        clear = [row for row in mine if row["resolved"]]
        cells = [f"{ratio.mean():.2f} ({deviation:.2f})", mean("resolved", mine), mean("agreement", clear)]
        cells += [f"{np.mean([row['covered'] for row in mine]):.3f}", mean("kin", mine), mean("others", mine)]
        uses = ", ".join(sorted({row["use"] for row in mine} - {"none"}))
        print(f"| {name} | {len(mine)} | {' | '.join(cells)} | {mean('weight', mine)} {uses} |", flush=True)
    bins = np.sum([row["bins"] for row in rows if row["resolved"]] or [np.zeros((3, len(BINS) - 1))], axis=0)
    print("\nWhere groups are declared resolved: stated probability, share of true kin, pairs")
    for n, stated, true in bins.T:
        if n:
            print(f"    {stated / n:.3f} {true / n:.3f} {int(n)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="?", type=int, default=20)
    parser.add_argument("--designs", default=",".join(DESIGNS), help="names, or beginnings of names")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    names = [name for name in DESIGNS if any(name.startswith(one) for one in given.designs.split(","))]
    tasks = [(name, seed) for name in names for seed in range(given.seeds)]
    with ProcessPoolExecutor(given.jobs) as pool:
        rows = []
        for row in pool.map(measure, tasks):
            rows.append(row)
            if given.rows is not None:
                given.rows.write_text("\n".join(json.dumps(one, default=float) for one in rows) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
