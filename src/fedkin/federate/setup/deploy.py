"""From a `Problem` to the manifest of a federation of device processes: the same plan that `fed_admm` would follow."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedkin._base import check_whole
from fedkin.admm import Settings, device_rows, local_curvature, plan_run
from fedkin.data import Rows
from fedkin.errors import DataError, ParameterError
from fedkin.federate.contract.manifest import DEAL, Manifest, ManifestError, Member, plain_names
from fedkin.federate.messages import RUN_BYTES
from fedkin.losses import describe_loss
from fedkin.objective import Problem

#: Bytes of own thetas that a device keeps in memory for neighbours that go back to their checkpoints.
_KEPT_BYTES = 2_500_000


def usual_checkpoint_every(n_params: int) -> int:
    """Rounds between checkpoints: 100, and fewer where that many thetas would take too much memory.

    Examples
    --------
    >>> from fedkin.federate.setup.deploy import usual_checkpoint_every
    >>> usual_checkpoint_every(20), usual_checkpoint_every(10_000)
    (100, 31)
    """
    return max(min(100, _KEPT_BYTES // (8 * n_params)), 10)


def make_manifest(
    problem: Problem,
    rounds: int,
    settings: Settings,
    endpoints: Sequence[str],
    *,
    run: str | None = None,
    absent: bool = False,
    **options: Any,
) -> Manifest:
    """The manifest of a run of Fed-ADMM.

    Parameters
    ----------
    problem : Problem
        With a built-in loss, the same on all devices; ids are text or whole numbers.
    rounds : int
        Rounds to do.
    settings : Settings
        Batch size, rho, steps, average, kind of gradient and seed.
    endpoints : sequence of V str
        Where each device listens, ``tls/host:port``.
    run : str, optional
        Run id, 16 hexadecimal digits; random by default.
    absent : bool
        Whether devices come and go (central placement).
    **options
        Other fields of `Manifest`: ``wire``, ``checkpoint_every``, ``compare_every``, ``placement``, ``centre``,
        ``secure``, ``classes``.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.objective import Problem
    >>> from fedkin.federate.setup.deploy import make_manifest
    >>> from fedkin.admm import Settings
    >>> design = paper_design(n_devices=4, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> problem = Problem(design.federation, design.graph, lam=0.01)
    >>> make_manifest(problem, 100, Settings(batch_size=5), [f"tls/127.0.0.1:{7000 + u}" for u in range(4)]).n_devices
    4
    """
    check_whole("rounds", rounds, least=1)
    if options.get("checkpoint_every") is None:
        options["checkpoint_every"] = usual_checkpoint_every(problem.n_params)
    federation = problem.federation
    if len(endpoints) != federation.n_devices:
        raise ParameterError(f"{len(endpoints)} endpoints for {federation.n_devices} devices; give one for each")
    if len({id(loss) for loss in problem.losses}) > 1:
        raise ParameterError("devices with different losses cannot be deployed yet; give one loss")
    loss = describe_loss(problem.losses[0])
    if loss.get("own"):
        raise ManifestError(f"devices cannot be told about the custom loss {loss['name']!r}, as code is never sent")
    for device in federation.devices:
        if isinstance(device, bool) or not isinstance(device, str | int):
            raise DataError(f"device ids must be text or whole numbers to be deployed, got {device!r}")
    rows = device_rows(problem, settings.batch_size, set())
    noisy = absent or bool((rows.batch < rows.counts).any())
    plan = plan_run(problem, settings, rows, local_curvature(problem.terms, rows), noisy=noisy, absent=absent)
    names = plain_names(federation.devices)
    parts = zip(federation.devices, names, endpoints, strict=True)
    manifest = Manifest(
        run=run or secrets.token_hex(RUN_BYTES),
        members=tuple(Member(device, name, endpoint) for device, name, endpoint in parts),  # type: ignore[arg-type]
        edges=plan.edges.tolist(),
        edge_radius=plan.edge_radius.tolist(),
        loss=loss,
        penalty=plan.penalty.name,
        lam=float(problem.lam),
        n_params=problem.n_params,
        ridge=rows.ridge.tolist(),
        sparsity=None if plan.sparsity is None else plan.sparsity.tolist(),
        radius=plan.radius,
        rounds=int(rounds),
        seed=int(settings.seed),
        gradient=plan.gradient,
        snapshot_every=plan.snapshot_every if plan.gradient == "svrg" else 1,
        average=plan.average,
        rho=plan.rho,
        start=plan.steps.start.tolist(),
        growth=plan.steps.growth.tolist(),
        damping=plan.steps.damping.tolist(),
        batch=[0] * rows.batch.size if settings.batch_size is None else rows.batch.tolist(),
        feature_names=list(federation.feature_names),
        weights=problem.graph.weights.tolist(),
        deal=(federation.starts[:-1] % DEAL).tolist(),
        noisy=bool(plan.steps.growth.any()),
        **options,
    )
    manifest.check()
    return manifest


def device_parts(problem: Problem) -> dict[int, Rows]:
    """The rows of each device, by position."""
    federation = problem.federation
    parts = enumerate(federation[device] for device in federation.devices)
    return {position: rows.map(lambda part: np.asarray(part, dtype=np.float64)) for position, rows in parts}
