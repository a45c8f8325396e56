"""From a view of a run and rows to a computation: what is planned from a site's own rows, the `Plan`, its shards."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from fedkin._base import Array
from fedkin.admm import Plan, Settings, Shard, SiteRows, StepRule, local_curvature, plan_run, site_keys, site_rows
from fedkin.core import Problem, local_fit, make_penalty
from fedkin.data import INTERCEPT, Federation, Rows
from fedkin.errors import DegenerateSiteWarning
from fedkin.federate.contract import Contract
from fedkin.federate.manifest import Manifest
from fedkin.federate.messages import Steps
from fedkin.graph import Graph
from fedkin.losses import Loss, described_loss

#: rho where the contract has none, for features that are scaled to about 1: smaller where noise makes steps short.
AGREED_RHO, AGREED_NOISY_RHO = 1.0, 0.25


def loss_of(manifest: Manifest) -> Loss:
    """The loss of the run."""
    return described_loss(manifest.loss)


# --- what is planned from rows ----------------------------------------------------------------------------------------


def is_noisy(contract: Contract) -> bool:
    """Whether anything is random in a run: batches, or who is there."""
    return contract.rounds.batch_size is not None or contract.rounds.placement != "peer"


def usual_rho(contract: Contract) -> float:
    """The contract's rho, or the one that goes with scaled features."""
    return contract.rounds.rho or (AGREED_NOISY_RHO if is_noisy(contract) else AGREED_RHO)


def per_parameter(contract: Contract, level: float) -> list[float]:
    """A penalty level for each parameter, 0 for the intercept."""
    return [0.0 if name.split(" [")[0] == INTERCEPT else level for name in contract.parameter_names]


def plan_site(contract: Contract, rows: Rows, degree: int, rho: float) -> tuple[Steps, Plan]:
    """What a site plans from its own rows: steps, where it starts, and (in the plan) batch, average and snapshots.

    It starts from its own estimate on all its rows, inside the ball. From 0, the first theta that it sends would be the
    gradient of a few rows; so it is the first theta minus something that nobody else knows.
    """
    loss, n = contract.loss_object(), rows.n_samples
    federation = Federation({0: rows})
    problem = Problem(
        federation, Graph.empty([0]), loss, lam=0.0, ridge=np.array(per_parameter(contract, contract.ridge))
    )
    rounds = contract.rounds
    batch = None if rounds.batch_size is None else min(rounds.batch_size, n)
    settings = Settings(batch, rho, average=rounds.average, gradient=rounds.gradient, seed=contract.seed)
    stacked = site_rows(problem, batch, set())
    absent = rounds.placement != "peer"
    curvature = local_curvature(problem.terms, stacked)
    plan = plan_run(problem, settings, stacked, curvature, noisy=is_noisy(contract), absent=absent)
    theta = own_estimate(contract, rows)
    start, growth = float(plan.steps.start[0]), float(plan.steps.growth[0])
    return Steps(start, growth, rho * degree, tuple(theta.tolist())), plan


def own_estimate(contract: Contract, rows: Rows) -> Array:
    """The estimate of a site on its own ``(p,)``, with a ridge where there would be none, inside the ball."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateSiteWarning)
        theta = local_fit(Federation({0: rows}), contract.loss_object()).theta
    return np.asarray(make_penalty("l2").project(theta, 0.5 * contract.radius)[0])


# --- plans and shards -------------------------------------------------------------------------------------------------


def plan_of(manifest: Manifest, rows: Mapping[int, Rows]) -> Plan:
    """The plan of the sites whose ``rows`` are given, by number."""
    here = np.array(sorted(rows), dtype=np.int64)
    parts = [rows[int(u)] for u in here]
    counts = np.array([part.n_samples for part in parts], dtype=np.int64)
    steps = [manifest.steps[int(u)] for u in here]
    stacked = SiteRows(
        Rows.stack(parts),
        np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        counts,
        site_keys([manifest.member(int(u)).id for u in here]),
        (loss_of(manifest),) * here.size,
        np.minimum(manifest.batch, counts) if manifest.batch else counts,
        np.array(manifest.ridge),
    )
    sparsity = None if manifest.sparsity is None else np.tile(manifest.sparsity, (here.size, 1))
    return Plan(
        stacked,
        manifest.edge_array,
        np.array(manifest.edge_radius),
        make_penalty(manifest.penalty),
        manifest.rho,
        StepRule(*(np.array([getattr(one, name) for one in steps]) for name in ("start", "growth", "damping"))),
        manifest.seed,
        manifest.gradient,
        manifest.snapshot_every,
        manifest.average,
        sparsity,
        manifest.radius,
        here,
    )


def starts_of(manifest: Manifest, numbers: Sequence[int]) -> Array:
    """Where sites start, ``(len(numbers), p)``."""
    return np.array([manifest.steps[u].theta for u in numbers]).reshape(-1, manifest.n_params)


def shard_of(manifest: Manifest, rows: Mapping[int, Rows], without: Sequence[int] = ()) -> Shard:
    """The shard that hosts the sites whose ``rows`` are given; edges of sites in ``without`` are dropped."""
    return plan_of(manifest, rows).shard(theta=starts_of(manifest, sorted(rows)), without=without)


def rowless_shard(manifest: Manifest, numbers: Sequence[int]) -> Shard:
    """A shard that hosts sites without their rows: of a central machine, or a replica of a component."""
    nothing = {u: Rows(np.zeros((1, manifest.n_params))) for u in numbers}
    plan = plan_of(replace(manifest, batch=0), nothing)
    return plan.shard(theta=starts_of(manifest, sorted(numbers)), rowless=True)
