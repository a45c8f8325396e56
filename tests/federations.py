"""Small federations for tests of device processes."""

from __future__ import annotations

import csv
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from builders import small_problem
from fedkin.admm import LocalShards, device_keys
from fedkin.data import Rows
from fedkin.federate import Manifest, Member, make_authority, plan_of, write_federation
from fedkin.objective import Problem
from processes import free_ports


def manifest_of(problem: Problem, rounds: int, batch: int | None = 4, ports: int = 0, **changes: Any) -> Manifest:
    """The manifest of a run with fixed, sensible steps."""
    v = problem.n_devices
    degree = problem.graph.degree
    manifest = Manifest(
        run=secrets.token_hex(8),
        members=tuple(
            Member(name, name, f"tls/127.0.0.1:{ports + u}") for u, name in enumerate(problem.federation.devices)
        ),
        edges=problem.graph.edges.tolist(),
        edge_radius=problem.fused.edge_radius.tolist(),
        loss={"name": "linear"},
        penalty=problem.penalty.name,
        lam=problem.lam,
        n_params=problem.n_params,
        ridge=[0.0] * problem.n_params,
        sparsity=None,
        rounds=rounds,
        seed=3,
        gradient="plain",
        snapshot_every=7,
        average="tail",
        rho=0.5,
        start=[4.0] * v,
        growth=[0.2] * v,
        damping=(0.5 * degree).tolist(),
        batch=[int(problem.federation.n_samples[0]) if batch is None else batch] * v,
        noisy=True,
    )
    return replace(manifest, **changes)


def rows_of(problem: Problem) -> dict[int, Rows]:
    """The rows of each device."""
    fed = problem.federation
    return {u: fed[name] for u, name in enumerate(fed.devices)}


def write_small_federation(folder: Path, n_devices: int = 3, rounds: int = 5, **changes: Any) -> Manifest:
    """A federation in ``folder / "fed"``, nothing of which runs."""
    problem = small_problem(n_devices)
    manifest = manifest_of(problem, rounds, ports=free_ports(n_devices + 1), **changes)
    write_federation(folder / "fed", manifest, rows_of(problem), make_authority("tests"), share_result=True)
    return manifest


def in_process(problem: Problem, manifest: Manifest) -> LocalShards:
    """The same run, in one process and one shard."""
    plan = plan_of(manifest, rows_of(problem))
    assert np.array_equal(plan.rows.keys, device_keys(problem.federation.devices))
    local = LocalShards(
        plan, np.zeros(problem.n_devices, dtype=np.int64), np.zeros((problem.n_devices, problem.n_params))
    )
    local.run(1, manifest.rounds)
    return local


def place(directory: Path, name: str) -> Path:
    """A device's directory."""
    return directory / "devices" / name


def write_tables(problem: Problem, folder: Path) -> None:
    """Rows and edges as a user would have them: ``rows.csv`` and ``edges.csv``."""
    fed = problem.federation
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", *fed.feature_names, "y"])
        for name in fed.devices:
            for x, y in zip(fed[name].X.tolist(), fed[name].y.tolist(), strict=True):
                writer.writerow([name, *map(repr, x), repr(y)])
    problem.graph.write(folder / "edges.csv")


def in_threads(live: Callable[[int], object], n: int, seconds: float = 90.0) -> None:
    """``live(u)`` for every device on a thread of its own; what one raises is raised here, and none may hang."""
    failures: list[BaseException] = []

    def one(u: int) -> None:
        try:
            live(u)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(u,)) for u in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)
