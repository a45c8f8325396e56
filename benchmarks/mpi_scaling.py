"""Rounds of Fed-ADMM on K ranks against what one rank's costs predict: the check of docs/scaling.md.

    python benchmarks/mpi_scaling.py                       # runs itself under mpiexec with 1 and 2 ranks
    python benchmarks/mpi_scaling.py --sites 20000 --ranks 1 2

Each rank makes the rows of its own sites. The prediction for K ranks is one rank's time over K, plus the time that
the thetas at the cut take at the bandwidth and latency that the ranks measure between them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from solvers.instances import SEED, block_graph


def rank_main(n: int, p: int, rounds: int) -> None:
    from mpi4py import MPI

    from fedkin.admm import Course, run_rounds
    from fedkin.data import Rows
    from fedkin.federate.links.mpi import RankLink
    from fedkin.federate.manifest import Manifest, Member, Steps
    from fedkin.federate.mpi import small_cut
    from fedkin.federate.reading import shard_of

    world = MPI.COMM_WORLD
    rng = np.random.default_rng(SEED)
    edges = block_graph(n, rng)
    degree = np.bincount(edges.ravel(), minlength=n)
    hosts = small_cut(n, edges, world.size)
    own = np.flatnonzero(hosts == world.rank).tolist()
    manifest = Manifest(
        run="0" * 16,
        here=0,
        n_sites=n,
        members=tuple(Member(u, f"d{u}", u) for u in range(n)),
        edges=[(i, j) for i, j in edges.tolist()],
        edge_radius=np.full(len(edges), 0.04).tolist(),
        loss={"name": "linear"},
        penalty="l1",
        lam=0.04 / n,
        n_params=p,
        ridge=[0.0] * p,
        radius=1e6,
        rounds=rounds,
        seed=SEED,
        average="tail",
        rho=0.5,
        steps={u: Steps(4.0, 0.2, 0.5 * float(degree[u]), (0.0,) * p) for u in own},
        batch=10,
    )
    rows = {}
    for u in own:
        random = np.random.default_rng([SEED, u])
        X = random.normal(size=(20, p))
        rows[u] = Rows(X, X.sum(axis=1) + random.normal(size=20), None)
    shard, link = shard_of(manifest, rows), RankLink(world, hosts, edges, p)
    run_rounds(shard, link, None, Course(3))
    world.Barrier()
    start = time.perf_counter()
    run_rounds(shard, link, None, Course(3 + rounds), 3)
    world.Barrier()
    seconds = (time.perf_counter() - start) / rounds
    cut = int((hosts[edges[:, 0]] != hosts[edges[:, 1]]).sum())
    sent = sum(positions.size for positions in link.send.values())
    result = {"ranks": world.size, "round_seconds": seconds, "cut_edges": cut, "sent_vectors": sent}
    if world.size > 1:
        result |= _wire(world)
    if world.rank == 0:
        print(json.dumps(result | {"sites": n, "edges": len(edges), "p": p}))


def _wire(world) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Latency and bandwidth between ranks 0 and 1."""
    times = {}
    for size in (8, 8_000_000):
        buffer = np.zeros(size, dtype=np.uint8)
        best = np.inf
        for _ in range(20):
            world.Barrier()
            start = time.perf_counter()
            if world.rank == 0:
                world.Send(buffer, dest=1)
                world.Recv(buffer, source=1)
            elif world.rank == 1:
                world.Recv(buffer, source=0)
                world.Send(buffer, dest=0)
            best = min(best, (time.perf_counter() - start) / 2)
        times[size] = best
    return {"latency": times[8], "bytes_per_second": 8_000_000 / max(times[8_000_000] - times[8], 1e-9)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=20_000)
    parser.add_argument("--p", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.sites, options.p, options.rounds)
        return
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if mpiexec is None:
        sys.exit("mpiexec is not installed: pip install 'fedkin[mpi]'")
    one: dict[str, float] = {}
    for ranks in options.ranks:
        command = [mpiexec, "--oversubscribe", "--allow-run-as-root", "-n", str(ranks), sys.executable, __file__]
        command += ["--rank", *(f"--{name}={getattr(options, name)}" for name in ("sites", "p", "rounds"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        one = one or found
        predicted = one["round_seconds"] / ranks
        if ranks > 1:
            travel = found["sent_vectors"] * options.p * 8
            predicted += found["latency"] + travel / found["bytes_per_second"]
        told = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in found.items()}
        print(f"{told}\n  measured {1e3 * found['round_seconds']:.1f} ms a round, predicted {1e3 * predicted:.1f} ms")


if __name__ == "__main__":
    main()
