"""Reading the signed manifest and plan in a directory, and the rows that must fit them."""

from __future__ import annotations

from pathlib import Path

from fedkin.data import Rows
from fedkin.errors import DataError, FedkinError
from fedkin.federate.contract.computation import loss_of
from fedkin.federate.contract.manifest import Manifest, ManifestError
from fedkin.federate.contract.plans import PLAN, PLAN_SIGNATURE, DevicePlan, PlanError
from fedkin.federate.trust.security import check_private, read_signed

MANIFEST, SIGNATURE, AUTHORITY, ROWS = "manifest.json", "manifest.sig", "ca.crt", "rows.npz"


def load_manifest(directory: Path) -> Manifest:
    """The manifest in a directory, and the plan beside it, after checking the authority's signatures.

    Raises
    ------
    ManifestError, SecurityError
        When it is missing, does not hold together, or was not signed by the authority whose certificate is there.
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
