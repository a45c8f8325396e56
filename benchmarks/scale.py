"""What it costs to go beyond one machine: rows, sites and machines; docs/scaling.md has the results.

    python benchmarks/scale.py rows [MILLIONS OF ROWS]
    python benchmarks/scale.py sites [SITES]

``rows``: one pass over Parquet files to sums by site and fold, beside a bare loop of pyarrow and numpy that only adds
up by site; and the same pass on two Ray workers. ``sites``: the exact solver on a graph of near neighbours, in this
process on one thread, and on one and two Ray workers; then again with a node killed in the middle. Clocks, and
processor time where all work is in this process: ratios on a busy machine say little.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fedkin
from fedkin.cluster import Shards, running_on
from fedkin.core import rows_in_files

FEATURES, PER_FILE = 10, 500_000


def timed(what: str, work: Callable[[], Any]) -> Any:
    clock, processor = time.perf_counter(), time.process_time()
    found = work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"| {what} | {time.perf_counter() - clock:.1f} | {time.process_time() - processor:.1f} | {peak:.0f} |",
        flush=True,
    )
    return found


def header(first: str) -> None:
    print(f"| {first} | seconds | processor seconds of this process | its peak memory so far, MB |\n|---|---|---|---|")


def rows(millions: float) -> None:
    import pyarrow.parquet as pq

    n, sites = int(millions * 1e6), 1000
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        for k, first in enumerate(range(0, n, PER_FILE)):
            write(Path(folder, f"{k:04}.parquet"), rng, min(PER_FILE, n - first), sites)

        def bare() -> np.ndarray:
            sums = np.zeros((sites, FEATURES + 2, FEATURES + 2))
            for file in sorted(Path(folder).iterdir()):
                for batch in pq.ParquetFile(file).iter_batches(262_144):
                    site = batch["site"].to_numpy()
                    Z = np.column_stack([np.ones(len(site)), *(batch[name].to_numpy() for name in names), batch["y"]])
                    order = np.argsort(site, kind="stable")
                    Z, starts = Z[order], np.searchsorted(site[order], np.arange(sites + 1))
                    for u in range(sites):
                        part = Z[starts[u] : starts[u + 1]]
                        sums[u] += part.T @ part
            return sums

        names = [f"x{k}" for k in range(FEATURES)]
        columns: dict[str, Any] = {"site": "site", "target": "y"}
        header(f"{n} rows, {FEATURES} features, {sites} sites")
        timed("bare loop: sums by site", bare)
        streamed = timed(
            "summarise_files: types, sums by site and fold", lambda: fedkin.summarise_files(folder, **columns)
        )
        timed("find_kin from these sums", lambda: fedkin.find_kin(streamed.summaries))
        opened = timed("rows_in_files: types", lambda: rows_in_files(folder, **columns))
        at = np.zeros((sites, FEATURES + 1))
        timed("one more pass, here", lambda: opened.expand(at))
        start_ray()
        with running_on("ray"):
            timed("one more pass, on two Ray workers, first time", lambda: opened.expand(at))
            timed("one more pass, on two Ray workers", lambda: opened.expand(at))


def write(path: Path, rng: np.random.Generator, n: int, sites: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    X = rng.normal(size=(n, FEATURES))
    columns = {"site": rng.integers(sites, size=n), **{f"x{k}": X[:, k] for k in range(FEATURES)}}
    pq.write_table(pa.table({**columns, "y": X @ np.ones(FEATURES) + rng.normal(size=n)}), path)


def start_ray() -> Any:
    """Start a cluster of two nodes with a core each, on this machine."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    import ray
    from ray.cluster_utils import Cluster

    memory = {"num_cpus": 1, "object_store_memory": 2 * 2**30}
    cluster = Cluster(initialize_head=True, head_node_args={**memory, "include_dashboard": False})
    cluster.add_node(**memory)
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster


def sites(count: int) -> None:
    rng = np.random.default_rng(0)
    places = rng.random((count, 2))
    truth = np.where(places[:, :1] < 0.5, 1.0, -1.0) * np.ones(FEATURES)
    X = rng.normal(size=(count, 20, FEATURES))
    y = np.einsum("vnp,vp->vn", X, truth) + rng.normal(size=(count, 20))
    names = np.repeat(np.arange(count), 20)
    federation = fedkin.Federation.from_arrays(X.reshape(-1, FEATURES), y.ravel(), names)
    problem = fedkin.Problem(federation, fedkin.Graph.knn(places, 5), lam=0.05 / count)
    print(f"{count} sites, {problem.graph.n_edges} edges, {FEATURES} parameters, {problem.terms.n_sites} quadratics")
    os.environ["NUMBA_NUM_THREADS"] = "1"
    header("exact solver, relative gap 1e-6")
    found = {"here": timed("here, one thread", lambda: fedkin.solve(problem))}
    cluster = start_ray()
    from fedkin.cluster.ray import RayEngine

    for workers in (1, 2):
        on = RayEngine(workers=workers)
        found[f"{workers}"] = timed(f"{workers} Ray workers", lambda on=on: fedkin.solve(problem, on=on))
    with tempfile.TemporaryDirectory() as storage:
        save, saved = Shards.save, []

        def killing(shards: Shards) -> None:
            save(shards)
            saved.append(shards)
            if len(saved) == 1:
                cluster.remove_node(cluster.list_all_nodes()[1])

        Shards.save = killing  # type: ignore[method-assign]
        on = RayEngine(workers=2, storage=storage, save_every=20)
        found["killed"] = timed("2 Ray workers, a node killed", lambda: fedkin.solve(problem, on=on))
    for name, one in found.items():
        same = np.array_equal(one.theta, found["2"].theta)
        away = np.abs(one.theta - found["here"].theta).max()
        print(f"{name}: {one.n_iter} iterations, gap {one.gap:.1e}, {away:.1e} from here, bits of two workers: {same}")


if __name__ == "__main__":
    what, size = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else None
    rows(size or 10.0) if what == "rows" else sites(int(size or 1e6))
