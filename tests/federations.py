"""Small federations for tests of sites: plans of a run in memory, or directories as organisers and sites have them."""

from __future__ import annotations

import csv
import dataclasses
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from builders import small_problem
from fedkin.admm import Availability, DirectLink, RunPlan, Shard, StepRule, plan_run, run_rounds, site_keys
from fedkin.admm.algorithm import fed_admm
from fedkin.core import Problem, Solution, make_penalty
from fedkin.data import Rows, write_csv
from fedkin.federate import Contract, Order, Organiser, Site, SitePlan, steps_of, whole_plan
from fedkin.federate.messages import Member
from processes import PATIENCE, free_ports


def plan_of(problem: Problem, rounds: int, batch: int | None = 4, ports: int = 0, **changes: Any) -> SitePlan:
    """The plan of somebody who sees all sites of a run with fixed, sensible steps, and theta that starts from 0."""
    degree, v = problem.graph.degree, problem.n_sites
    start, growth = changes.pop("start", 4.0), changes.pop("growth", 0.2)
    given = plan_run(problem, rounds, batch, rho=0.5, average="tail", seed=3)
    facts: dict[str, Any] = {
        **vars(given),
        "run": secrets.token_hex(8),
        "here": 0,
        "federation_size": v,
        "members": tuple(
            Member(name, name, u, f"tls/127.0.0.1:{ports + u}") for u, name in enumerate(problem.federation.sites)
        ),
        "loss": {"name": "linear"},
        "lam": problem.lam,
        "radius": 1e6,
        "snapshot_every": 7,
        "steps": StepRule(np.full(v, start), np.full(v, growth), 0.5 * degree),
        "n_edges": problem.graph.n_edges,
    }
    if "penalty" in changes:
        changes["penalty"] = make_penalty(changes["penalty"])
    return SitePlan(**{**facts, **changes})


def part_of(plan: SitePlan, u: int) -> SitePlan:
    """What site u sees of that: itself, whom it exchanges messages with, and its own rows."""
    known, stepped, edges = {u, *plan.neighbours(u)}, {u}, {}
    if plan.placement == "central":
        known, edges = {u}, {"edges": plan.edges[:0], "edge_radius": plan.edge_radius[:0]}
    if plan.placement == "replicas":
        known = stepped = _component(plan, u)
    members = tuple(member for member in plan.members if member.number in known)
    rows = {"rows": None if plan.rows is None else plan.rows.take(np.array([u])), "with_rows": np.array([u])}
    return replace(plan.part(np.array(sorted(stepped))), here=u, members=members, **edges, **rows)


def _component(plan: SitePlan, u: int) -> set[int]:
    known, found = set(), {u}
    while found - known:
        known = set(found)
        found |= {v for one in known for v in plan.neighbours(one)}
    return found


def rows_of(problem: Problem) -> dict[int, Rows]:
    """The rows of each site, by number."""
    fed = problem.federation
    return {u: fed[name] for u, name in enumerate(fed.sites)}


def in_process(problem: Problem, plan: SitePlan, availability: Availability | None = None) -> Shard:
    """The same run, in one process and one shard."""
    assert plan.rows is not None and np.array_equal(plan.rows.keys, site_keys(problem.federation.sites))
    shard, rounds = Shard(plan), plan.rounds
    here = () if availability is None else availability.bind(problem.federation.sites, plan.seed).rounds(1, rounds)
    run_rounds(shard, DirectLink(rounds, 0, *here))
    return shard


def side_by_side(shards: list[Shard], first: int, last: int, available=None, probability=None) -> None:
    """Do rounds of shards that host all sites together, and hand thetas from one to the others."""
    for t in range(first, last + 1):
        for shard in shards:
            here, chance = (None if one is None else one[t - first][shard.sites] for one in (available, probability))
            shard.node_step(t, here, chance)
        thetas = {u: theta for shard in shards for u, theta in zip(shard.sites.tolist(), shard.theta, strict=True)}
        for shard in shards:
            shard.take({u: thetas[u] for u in shard.foreign.tolist()})
            shard.edge_step()


def split(plan: RunPlan, hosts: np.ndarray) -> list[Shard]:
    """A shard for every number in ``hosts (V,)``, with its sites."""
    return [Shard(plan.part(np.flatnonzero(hosts == host))) for host in np.unique(hosts)]


def reference(problem: Problem, plan: SitePlan, availability: Availability | None = None) -> np.ndarray:
    """What `fed_admm` makes of the same run: theta ``(V, p)``, from where the sites start."""
    assert plan.rows is not None
    duals = np.zeros((problem.graph.n_edges, problem.n_params))
    warm = Solution(theta=plan.theta, alpha=duals, objective=0.0, gap=0.0, n_iter=0, status="converged", trace={})
    return fed_admm(
        dataclasses.replace(problem, radius=plan.radius, lam=plan.lam),
        plan.rounds,
        plan.rows.batch.tolist(),
        rho=plan.rho,
        gradient=plan.gradient,
        average=plan.average,
        seed=plan.seed,
        availability=availability,
        warm_start=warm,
        backend="numpy",
    ).theta


# --- as directories ---------------------------------------------------------------------------------------------------


def contract_text(problem: Problem, rounds: Mapping[str, Any]) -> str:
    """A contract whose prepared rows are the problem's own: no scale, no intercept."""
    settings = {"lam": float(problem.lam), **rounds}
    lines = ['name = "small"', 'loss = "linear"', "intercept = false"]
    lines += ['method = "fused"', f'penalty = "{problem.penalty.name}"']
    lines += ["[thresholds]", "rows = 2", "rows_per_parameter = 0.0", "[target]", 'name = "y"', "[features]"]
    lines += [f"{name} = {{}}" for name in problem.federation.feature_names]
    lines += ["[rounds]", *(f"{name} = {_toml(value)}" for name, value in settings.items() if value is not None)]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def make_heart(folder: Path, problem: Problem, ports: Sequence[int | str] | None = None, **rounds: Any) -> Organiser:
    """The organiser's directory ``heart`` of a problem's graph, with invites for all."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.toml").write_text(contract_text(problem, rounds))
    problem.graph.write(folder / "edges.csv")
    names, port = problem.federation.sites, free_ports(problem.n_sites + 1)
    ports = [port + k for k in range(len(names))] if ports is None else ports
    lines = [[name, "127.0.0.1" if own else "", own] for name, own in zip(names, ports, strict=True)]
    write_csv(folder / "list.csv", ["site", "host", "port"], lines)
    central = rounds.get("placement") == "central"
    heart = Organiser.create(
        folder / "small.toml",
        folder / "heart",
        graph=folder / "edges.csv",
        sites=folder / "list.csv",
        centre=f"127.0.0.1:{port + len(names)}" if central else None,
    )
    heart.invite()
    return heart


def write_table(problem: Problem, name: Any, path: Path) -> Path:
    """The rows of one site as a table, to the last bit."""
    rows = problem.federation[name]
    lines = [[*map(repr, x), repr(y)] for x, y in zip(rows.X.tolist(), rows.y.tolist(), strict=True)]
    write_csv(path, [*problem.federation.feature_names, "y"], lines)
    return path


def join_site(heart: Organiser, problem: Problem, name: str) -> Path:
    """The directory of a site that has joined and was admitted."""
    folder = heart.directory.parent
    table = write_table(problem, name, folder / f"{name}.csv")
    how = {"steps": steps_of, "below_minima": heart.contract.rounds.batch_size is not None}
    joined, _ = Site.join(heart.directory / "invites" / f"{name}.invite", table, folder / name, **how)
    table.unlink()
    joined.accept(heart.admit(joined.request).path)
    return joined.directory


def make_sites(folder: Path, problem: Problem, **rounds: Any) -> Organiser:
    """Organiser and all sites, side by side in a folder; nothing of it runs."""
    heart = make_heart(folder, problem, **rounds)
    for name in problem.federation.sites:
        join_site(heart, problem, name)
    for name in problem.federation.sites:
        Site.read(folder / name).accept(heart.directory / "keys.json")  # else it comes from a neighbour that runs
    if rounds.get("placement") == "replicas":
        for path, names in heart.order():
            for name in names:
                Site.read(folder / name).accept(path)
    return heart


def small_sites(folder: Path, n_sites: int = 3, **rounds: Any) -> Organiser:
    """The same for a small problem and few rounds."""
    return make_sites(folder, small_problem(n_sites), **{"rounds": 5, "batch_size": 4, **rounds})


def whole_of(heart: Organiser, problem: Problem, order: Order | None = None) -> SitePlan:
    """The view of somebody who has all rows, planned as the sites plan."""
    plan = whole_plan(heart.contract, problem.graph, rows_of(problem), run=heart.charter.run, order=order)
    return replace(plan, members=heart.members)


def write_tables(problem: Problem, folder: Path) -> None:
    """Rows and edges as a user would have them: ``rows.csv`` and ``edges.csv``."""
    fed = problem.federation
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", *fed.feature_names, "y"])
        for name in fed.sites:
            for x, y in zip(fed[name].X.tolist(), fed[name].y.tolist(), strict=True):
                writer.writerow([name, *map(repr, x), repr(y)])
    problem.graph.write(folder / "edges.csv")


def write_job(folder: Path, problem: Problem, **rounds: Any) -> list[str]:
    """A contract, one table and a graph, as arguments of ``fedkin federation simulate``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.toml").write_text(contract_text(problem, rounds))
    write_tables(problem, folder)
    table, graph = str(folder / "rows.csv"), str(folder / "edges.csv")
    return [str(folder / "small.toml"), "--data", table, "--site", "site", "--graph", graph,
            *(["--below-minima"] if rounds.get("batch_size") else [])]  # fmt: skip


def whole_job(problem: Problem, **rounds: Any) -> SitePlan:
    """The view of that run by somebody who sees all."""
    return whole_plan(Contract.from_toml(contract_text(problem, rounds)), problem.graph, rows_of(problem), run="0" * 16)


def in_threads(live: Callable[[int], object], n: int, seconds: float = PATIENCE) -> None:
    """``live(u)`` for every site on a thread of its own; what one raises is raised here, and none may hang."""
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
