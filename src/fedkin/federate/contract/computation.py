"""How a manifest becomes a computation: with the rows of some devices it is a `Plan`, which makes their shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from fedkin._base import Array, Index
from fedkin.admm import DeviceRows, Plan, Shard, StepRule, device_keys
from fedkin.data import Rows
from fedkin.federate.contract.manifest import Manifest, ManifestError
from fedkin.federate.contract.plans import PLAN, STEPS
from fedkin.losses import Loss, described_loss
from fedkin.objective import make_penalty


def loss_of(manifest: Manifest) -> Loss:
    """The loss that the manifest names."""
    return described_loss(manifest.loss)


def plan_of(manifest: Manifest, rows: Mapping[int, Rows]) -> Plan:
    """The plan of the devices whose ``rows`` are given, by position."""
    here = np.array(sorted(rows), dtype=np.int64)
    parts = [rows[int(u)] for u in here]
    counts = np.array([part.n_samples for part in parts], dtype=np.int64)
    batch = _planned(manifest, "batch", here).astype(np.int64)
    stacked = DeviceRows(
        Rows.stack(parts),
        np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        counts,
        device_keys([manifest.members[u].id for u in here]),
        (loss_of(manifest),) * here.size,
        np.where(batch > 0, batch, counts),
        np.array(manifest.ridge),
    )
    return Plan(
        stacked,
        manifest.edge_array,
        np.array(manifest.edge_radius),
        make_penalty(manifest.penalty),
        manifest.rho,
        StepRule(*(_planned(manifest, name, here) for name in STEPS)),
        manifest.seed,
        manifest.gradient,
        manifest.snapshot_every,
        manifest.average,
        None if manifest.sparsity is None else np.array(manifest.sparsity)[here],
        manifest.radius,
        here,
    )


def shard_of(manifest: Manifest, rows: Mapping[int, Rows], without: Sequence[int] = ()) -> Shard:
    """The shard that hosts the devices whose ``rows`` are given; edges of devices in ``without`` are dropped."""
    return plan_of(manifest, rows).shard(without=without)


def rowless_shard(manifest: Manifest, positions: Sequence[int]) -> Shard:
    """A shard that hosts devices without their rows: of a central machine, or a replica of a component."""
    nothing = {u: Rows(np.zeros((1, manifest.n_params))) for u in positions}
    return plan_of(replace(manifest, batch=[0] * manifest.n_devices), nothing).shard(rowless=True)


def _planned(manifest: Manifest, column: str, here: Index) -> Array:
    values = getattr(manifest, column)
    found = [None if values is None else values[u] for u in here.tolist()]
    if None in found:
        name = manifest.members[int(here[found.index(None)])].name
        raise ManifestError(f"{column} of {name} is not known here: {PLAN} beside the manifest does not have it")
    return np.array(found)
