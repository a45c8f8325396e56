"""From files to a computation: the signed manifest and plan of a directory, the rows that must fit, their `Plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from fedkin._base import Array, Index
from fedkin.admm import DeviceRows, Plan, Shard, StepRule, device_keys
from fedkin.data import Rows
from fedkin.errors import DataError, FedkinError
from fedkin.federate.contract.manifest import Manifest, ManifestError
from fedkin.federate.contract.plans import PLAN, PLAN_SIGNATURE, STEPS, DevicePlan, PlanError
from fedkin.federate.trust.security import check_private, read_signed
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


MANIFEST, SIGNATURE, AUTHORITY, ROWS = "manifest.json", "manifest.sig", "ca.crt", "rows.npz"


def load_manifest(directory: Path) -> Manifest:
    """The manifest in a directory, and the plan beside it.

    Raises `ManifestError` when it is missing or does not hold together, `SecurityError` when it was not signed by the
    authority whose certificate is there.
    """
    known = (MANIFEST, SIGNATURE, AUTHORITY, PLAN, ROWS)
    if not any((directory / name).exists() for name in known):
        raise ManifestError(f"{directory} is not the directory of a federation or device: it has no {MANIFEST}")
    path = directory / MANIFEST
    try:
        manifest = Manifest.from_bytes(read_signed(directory, MANIFEST, SIGNATURE))
        path = directory / PLAN
        if path.exists():
            manifest = manifest.with_plan(DevicePlan.from_bytes(read_signed(directory, PLAN, PLAN_SIGNATURE)))
            manifest.check()
    except (ManifestError, PlanError) as error:
        raise ManifestError(f"{path} {error}") from None
    return manifest


def load_rows(place: Path, manifest: Manifest, position: int) -> Rows:
    """The rows in a device's directory; raises `DataError` when they do not fit the run."""
    path = place / ROWS
    check_private(path)
    rows = Rows.load(path)
    n, q = rows.X.shape
    loss = loss_of(manifest)
    columns = manifest.n_params // loss.n_params(1)
    least = max((manifest.batch[position] if manifest.batch is not None else None) or 1, 1)
    wrong = None
    if q != columns:
        names = f" ({', '.join(manifest.feature_names)})" if manifest.feature_names else ""
        wrong = f"{q} columns in X, but the manifest expects {columns}{names}"
    elif n < least:
        wrong = f"{n} rows, but the plan asks for at least {least}"
    else:
        try:
            loss.check_target(rows.y, manifest.members[position].id)
        except FedkinError as error:
            wrong = f"a target y that does not fit: {error}"
    if wrong is not None:
        raise DataError(f"{path} has {wrong}; put rows there that fit, or run fedkin peer init again on the new rows")
    return rows
