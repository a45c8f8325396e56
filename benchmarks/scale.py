"""What it costs to go beyond one machine: rows, sites and machines; docs/benchmarks.md has the results.

    python benchmarks/scale.py rows [MILLIONS OF ROWS]
    python benchmarks/scale.py sites [SITES]
    python benchmarks/scale.py kin [SITES]
    python benchmarks/scale.py quick

``rows``: Parquet files and a CSV file to sums by site and fold, beside bare loops: pyarrow and numpy that only add up
by site, and pyarrow that only reads the CSV file; then ``fedkin fit`` with its comparison. Each runs in a process of
its own. From 20 million rows on there is no CSV file. ``sites``: the exact solver on a graph of near neighbours, in
this process on one thread, and on one and two Ray workers; then again with a node killed midway. ``kin``: the
same of kin, sites with three rows each. ``quick``: all of them, small. Clocks, and processor time: ratios on a busy
machine say little.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import fedkin
from fedkin.cluster import Shards, running_on

FEATURES, PER_FILE, SITES, NEAREST = 10, 500_000, 1000, 9


def timed(what: str, work: Callable[[], Any]) -> Any:
    clock, processor = time.perf_counter(), time.process_time()
    found = work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    show(what, time.perf_counter() - clock, time.process_time() - processor, peak)
    return found


def show(what: str, clock: float, processor: float, peak: float) -> None:
    print(f"| {what} | {clock:.1f} | {processor:.1f} | {peak:.0f} |", flush=True)


def header(first: str) -> None:
    print(f"| {first} | seconds | processor seconds of the process | its peak memory, MB |\n|---|---|---|---|")


# --- rows -------------------------------------------------------------------------------------------------------------

COLUMNS: dict[str, Any] = {"site": "site", "target": "y"}
NAMES = [f"x{k}" for k in range(FEATURES)]


def rows(millions: float) -> None:
    n, csv = int(millions * 1e6), millions < 20
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "rows"), n, csv)
        header(f"{n} rows, {FEATURES} features, {SITES} sites")
        fit = [sys.executable, "-m", "fedkin", "fit", "FILE", "--site", "site", "--target", "y", "--out", f"{folder}/m"]
        for suffix in ("", ".csv") if csv else ("",):
            for way in (f"bare{suffix}", f"sums{suffix}", "fedkin fit", *(["ray"] if not suffix else [])):
                command = fit if way == "fedkin fit" else [sys.executable, __file__, way, "FILE"]
                started = time.perf_counter()
                made = [one.replace("FILE", f"{folder}/rows{suffix}") for one in command]
                child = subprocess.Popen(made, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                _, status, used = os.wait4(child.pid, 0)
                assert status == 0, way
                took, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
                show(f"{way}, {suffix or 'Parquet'}", time.perf_counter() - started, took, peak)


def write(folder: Path, n: int, csv: bool) -> None:
    """Write rows of sites of two kinds to Parquet files, and to one CSV file."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    folder.mkdir()
    with ExitStack() as stack:
        writer: Any = None
        for k, first in enumerate(range(0, n, PER_FILE)):
            rng, m = np.random.default_rng([0, k]), min(PER_FILE, n - first)
            X, site = rng.normal(size=(m, FEATURES)), rng.integers(SITES, size=m)
            y = X.sum(axis=1) * np.where(site % 2, 1.0, -1.0) + rng.normal(size=m)
            table = pa.table({"site": site, **{name: X[:, j] for j, name in enumerate(NAMES)}, "y": y})
            pq.write_table(table, folder / f"{k:04}.parquet")
            if csv:
                writer = writer or stack.enter_context(pyarrow.csv.CSVWriter(f"{folder}.csv", table.schema))
                writer.write_table(table)


def bare(path: str) -> np.ndarray:
    import pyarrow.parquet as pq

    sums = np.zeros((SITES, FEATURES + 2, FEATURES + 2))
    for file in sorted(Path(path).iterdir()):
        for batch in pq.ParquetFile(file).iter_batches(262_144):
            site = batch["site"].to_numpy()
            Z = np.column_stack([np.ones(len(site)), *(batch[name].to_numpy() for name in NAMES), batch["y"]])
            order = np.argsort(site, kind="stable")
            Z, starts = Z[order], np.searchsorted(site[order], np.arange(SITES + 1))
            for u in range(SITES):
                part = Z[starts[u] : starts[u + 1]]
                sums[u] += part.T @ part
    return sums


def bare_csv(path: str) -> int:
    import pyarrow.csv

    return sum(batch.num_rows for batch in pyarrow.csv.open_csv(path))


def sums_on_ray(path: str) -> None:
    cluster = start_ray()
    from fedkin.cluster.ray import RayEngine

    with running_on(RayEngine(workers=2)):
        fedkin.summarise_files(path, **COLUMNS)
    stop_ray(cluster)


def sums(path: str) -> None:
    fedkin.summarise_files(path, **COLUMNS)


WAYS: dict[str, Callable[[str], object]] = {
    "bare": bare, "bare.csv": bare_csv, "sums": sums, "sums.csv": sums, "ray": sums_on_ray
}  # fmt: skip


# --- clusters ---------------------------------------------------------------------------------------------------------


def start_ray() -> Any:
    """Start a cluster of two nodes with a core each, on this machine."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    import ray
    from ray.cluster_utils import Cluster

    memory = {"num_cpus": 1, "object_store_memory": 2**32}
    cluster = Cluster(initialize_head=True, head_node_args={**memory, "include_dashboard": False})
    cluster.add_node(**memory)
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster


def stop_ray(cluster: Any) -> None:
    """Stop the cluster of `start_ray`."""
    import ray

    ray.shutdown()
    cluster.shutdown()


@contextmanager
def killed_node(cluster: Any) -> Iterator[None]:
    """Kill the second node when shards have saved their state for the first time."""
    save, saved = Shards.save, list[Shards]()

    def killing(shards: Shards) -> None:
        save(shards)
        saved.append(shards)
        if len(saved) == 1:
            cluster.remove_node(cluster.list_all_nodes()[1])

    Shards.save = killing  # type: ignore[method-assign]
    try:
        yield
    finally:
        Shards.save = save  # type: ignore[method-assign]


def on_clusters(work: Callable[..., Any], save_every: int, show: Callable[[Any, Any], str], **more: Any) -> None:
    """Time ``work(on=engine)`` here, on one and two Ray workers, and with a node killed midway."""
    found = {"here": timed("here", work)}
    found |= {name: timed(f"here, {name}", lambda how=how: work(**how)) for name, how in more.items()}
    cluster = start_ray()
    from fedkin.cluster.ray import RayEngine

    for workers in (1, 2):
        on = RayEngine(workers=workers)
        found[f"{workers}"] = timed(f"{workers} Ray workers", lambda on=on: work(on=on))
    with tempfile.TemporaryDirectory() as storage, killed_node(cluster):
        on = RayEngine(workers=2, storage=storage, save_every=save_every)
        found["killed"] = timed("2 Ray workers, a node killed", lambda: work(on=on))
    stop_ray(cluster)
    for name, one in found.items():
        same = np.array_equal(one.theta, found["2"].theta)
        print(f"{name}: {show(one, found['here'])}, bits of two workers: {same}")


def sites(count: int) -> None:
    rng = np.random.default_rng(0)
    places = rng.random((count, 2))
    truth = np.where(places[:, :1] < 0.5, 1.0, -1.0) * np.ones(FEATURES)
    X = rng.normal(size=(count, 20, FEATURES))
    y = np.einsum("vnp,vp->vn", X, truth) + rng.normal(size=(count, 20))
    names = np.repeat(np.arange(count), 20)
    federation = fedkin.Federation.from_arrays(X.reshape(-1, FEATURES), y.ravel(), names)
    problem = fedkin.Problem(federation, fedkin.Graph.knn(places, NEAREST), lam=0.05 / count)
    print(f"{count} sites, {problem.graph.n_edges} edges, {FEATURES} parameters, {problem.terms.n_sites} quadratics")
    os.environ["NUMBA_NUM_THREADS"] = "1"
    header("exact solver, relative gap 1e-6")

    def about(one: Any, here: Any) -> str:
        away = np.abs(one.theta - here.theta).max()
        return f"{one.n_iter} iterations, gap {one.gap:.1e}, {away:.1e} from here"

    on_clusters(lambda **how: fedkin.solve(problem, **how), 20, about)


def kin(count: int) -> None:
    rng = np.random.default_rng(0)
    centres = 1.5 * rng.normal(size=(5, 3))
    truth = centres[rng.integers(5, size=count)]
    X, site = rng.normal(size=(3 * count, 3)), np.repeat(np.arange(count), 3)
    y = (X * truth[site]).sum(axis=1) + rng.normal(size=3 * count)
    data = fedkin.Federation.from_arrays(X, y, site).with_intercept()
    header(f"kin, {count} sites with 3 rows")

    def about(one: Any, here: Any) -> str:
        sd = np.sqrt(np.einsum("ujj->uj", here.covariance))
        apart = np.sqrt((((one.theta - here.theta) / sd) ** 2).mean())
        error = np.sqrt(((one.theta[:, 1:] - truth) ** 2).mean())
        return f"error {error:.4f}, {apart:.3f} posterior sd from here"

    on_clusters(lambda **how: fedkin.find_kin(data, **how), 10, about, seed_1={"seed": 1})


if __name__ == "__main__":
    what = sys.argv[1]
    if what in WAYS:
        WAYS[what](sys.argv[2])
        sys.exit()
    size = float(sys.argv[2]) if len(sys.argv) > 2 else None
    if what in ("rows", "quick"):
        rows(size or (0.5 if what == "quick" else 10.0))
    if what in ("sites", "quick"):
        sites(int(size or (5e3 if what == "quick" else 1e6)))
    if what in ("kin", "quick"):
        kin(int(size or (5e3 if what == "quick" else 1e5)))
