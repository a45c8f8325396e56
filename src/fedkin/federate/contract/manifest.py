"""What all devices of a federation agree on, in one signed file; and the rows of one device, in another.

The manifest names devices, edges and every number that the rounds need, except those that are for one device only
(`fedkin.federate.contract.plans`). It holds no rows. Each device has a copy, and checks the authority's signature
before it believes it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedkin.admm import Average, DeviceRows, GradientKind, Plan, Shard, StepRule, device_keys
from fedkin.data import Rows
from fedkin.errors import DataError, FedkinError
from fedkin.federate.contract.plans import (
    COLUMNS,
    OWN,
    PLAN,
    PLAN_SIGNATURE,
    STEPS,
    Columns,
    PlanError,
    decode_plan,
    encode_plan,
)
from fedkin.federate.messages import RUN_BYTES, Wire
from fedkin.federate.trust.security import check_private, read_signed
from fedkin.losses import Loss, described_loss
from fedkin.objective import make_penalty

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Placement = Literal["peer", "central", "replicas"]

FORMAT = "fedkin-manifest-2"
MANIFEST, SIGNATURE, AUTHORITY, ROWS = "manifest.json", "manifest.sig", "ca.crt", "rows.npz"
CENTRE = "centre"  #: name of the central machine S; its sender number is the number of devices
DEAL = 60  #: starts of deals are known modulo this: right for 2 to 6, 10, 12, 15, 20, 30 and 60 folds
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")


class ManifestError(FedkinError, ValueError):
    """A manifest that cannot be read or does not hold together."""


@dataclass(frozen=True)
class Member:
    """A device as the others know it.

    Attributes
    ----------
    id : str or int
        Its id in the data.
    name : str
        Its directory, the common name of its certificate, and its part of the keys.
    endpoint : str
        ``tls/host:port`` or ``tcp/host:port``.
    """

    id: str | int
    name: str
    endpoint: str


@dataclass(frozen=True)
class Manifest:
    """A run, as all devices know it. Lists with a number per device are in the order of ``members``.

    What is not in the shared file but in plans (``start``, ``growth``, ``damping``, ``batch``, ``deal``) is None for
    devices of which it is not known here.

    Attributes
    ----------
    run : str
        Run id, 16 hexadecimal digits.
    members : sequence of V Member
    edges : sequence of E pairs
        Positions ``(i, j)``, ``i > j``.
    edge_radius : sequence of E floats
        ``lam * V * w_e``: bounds of the edge duals.
    loss : mapping
        Name and parameters of the loss.
    penalty : str
    lam : float
        On the public scale; for the record, the rounds use ``edge_radius``.
    n_params : int
    ridge : sequence of p floats
    sparsity : sequence of V sequences of p floats, or None
    radius : float or None
        Of the parameter ball.
    rounds, seed : int
    gradient, snapshot_every, average
        See `fedkin.fed_admm`.
    rho : float
    start, growth, damping : sequences of V floats or None
        The step rule.
    batch : sequence of V ints or None
        Rows per round; 0 for all.
    wire : "float64" | "float32"
    checkpoint_every : int
        Rounds between checkpoints.
    compare_every : int
        Rounds between comparisons of the edge duals' replicas; 0 for never.
    placement : "peer" | "central" | "replicas"
        Who holds the state of an edge: its two ends, a central machine, or every device of the component.
    centre : str or None
        Endpoint of the central machine.
    secure : bool
        False for plain TCP.
    feature_names : sequence of str
    classes : sequence of str or float, or None
        Labels of the target's codes 0, 1, ...
    select : mapping or None
        ``level`` and ``variance`` of the edge selection that comes before the rounds.
    weights : sequence of E floats or None
        ``w_e``; None where only ``edge_radius`` is known.
    deal : sequence of V ints or None
        Where the deal of each device's rows to folds begins (`fedkin.Federation.folds`), modulo `DEAL`.
    revision : int
        How often the manifest was changed and signed again. Devices with different revisions do not understand each
        other.
    noisy : bool
        Whether steps become shorter from round to round (``growth`` above 0).
    planned_for : str or None
        Name of the device whose plan was found beside the manifest.
    """

    run: str
    members: Sequence[Member]
    edges: Sequence[Sequence[int]]
    edge_radius: Sequence[float]
    loss: Mapping[str, Any]
    penalty: str
    lam: float
    n_params: int
    ridge: Sequence[float]
    sparsity: Sequence[Sequence[float]] | None
    radius: float | None
    rounds: int
    seed: int
    gradient: GradientKind
    snapshot_every: int
    average: Average
    rho: float
    start: Sequence[float | None] | None = None
    growth: Sequence[float | None] | None = None
    damping: Sequence[float | None] | None = None
    batch: Sequence[int | None] | None = None
    wire: Wire = "float64"
    checkpoint_every: int = 100
    compare_every: int = 200
    placement: Placement = "peer"
    centre: str | None = None
    secure: bool = True
    feature_names: Sequence[str] = ()
    classes: Sequence[str | float] | None = None
    select: Mapping[str, Any] | None = None
    weights: Sequence[float] | None = None
    deal: Sequence[int | None] | None = None
    revision: int = 0
    noisy: bool = False
    planned_for: str | None = None

    @property
    def run_bytes(self) -> bytes:
        """What messages and checkpoints are marked with: the run id, or a digest of it and the revision."""
        if self.revision == 0:
            return bytes.fromhex(self.run)
        return hashlib.blake2b(f"{self.run} {self.revision}".encode(), digest_size=RUN_BYTES).digest()

    @property
    def n_devices(self) -> int:
        return len(self.members)

    @cached_property
    def edge_array(self) -> Index:
        """Edges ``(E, 2)``."""
        return np.asarray(self.edges, dtype=np.int64).reshape(-1, 2)

    def position(self, name: str) -> int:
        """Position of the device of that name."""
        for position, member in enumerate(self.members):
            if member.name == name:
                return position
        raise ManifestError(f"the manifest has no device named {name!r}")

    def neighbours(self, position: int) -> Index:
        """Positions of the neighbours of a device, increasing."""
        touching = self.edge_array[(self.edge_array == position).any(axis=1)]
        return np.unique(touching[touching != position])

    @cached_property
    def _components(self) -> list[list[int]]:
        """The component of each device, by position."""
        of = [[u] for u in range(self.n_devices)]
        for i, j in self.edges:
            if of[i] is not of[j]:
                small, large = sorted((of[i], of[j]), key=len)
                large.extend(small)
                for u in small:
                    of[u] = large
        for one in {id(members): members for members in of}.values():
            one.sort()
        return of

    def component(self, position: int) -> list[int]:
        """Positions of the devices that a device is connected with, itself included, increasing."""
        return list(self._components[position])

    def leader(self, position: int) -> int:
        """The first device of the component of a device."""
        return self._components[position][0]

    def partners(self, position: int) -> list[int]:
        """Positions of the devices that a device exchanges messages with, increasing."""
        if self.placement == "replicas":
            return [u for u in self.component(position) if u != position]
        return [int(v) for v in self.neighbours(position)]

    @property
    def edge_weights(self) -> Array:
        """Weights ``w_e``, shape ``(E,)``."""
        if self.weights is not None:
            return np.array(self.weights, dtype=np.float64)
        strength = self.lam * self.n_devices
        if not strength > 0:
            raise ManifestError("the manifest has lam = 0 and no weights, so the weights of its edges are not known")
        return np.array(self.edge_radius) / strength

    def with_lam(self, lam: float) -> Manifest:
        """The next revision, with another ``lam`` and otherwise the same plan."""
        strength = lam * self.n_devices  # as `Problem.strength`
        return replace(self, lam=lam, edge_radius=(strength * self.edge_weights).tolist(), revision=self.revision + 1)

    # --- as a file ---

    def to_bytes(self) -> bytes:
        """The text that is signed and that all devices get: nothing of it is for one device only."""
        fields = {name: value for name, value in asdict(self).items() if name not in (*COLUMNS, "planned_for")}
        return (json.dumps({"format": FORMAT, **fields}, indent=1, allow_nan=False) + "\n").encode()

    def shared(self) -> Manifest:
        """The manifest as it is without any plan."""
        nothing: dict[str, Any] = dict.fromkeys((*COLUMNS, "planned_for"))
        return replace(self, **nothing)

    def plan_bytes(self, position: int | None) -> bytes:
        """The plan of a device, of the central machine (position V), or with None the plans of all."""
        name: str | None = None
        steps = own = list(range(self.n_devices))
        if position == self.n_devices:
            name, own = CENTRE, []
        elif position is not None:
            name, own = self.members[position].name, [position]
            steps = self.component(position) if self.placement == "replicas" else own
        columns: dict[str, dict[str, float]] = {}
        for column in COLUMNS:
            values = getattr(self, column)
            if values is not None:
                positions = own if column in OWN else steps
                columns[column] = {self.members[u].name: values[u] for u in positions if values[u] is not None}
        return encode_plan(self.run, name, columns)

    def with_plan(self, device: str | None, columns: Columns) -> Manifest:
        """The manifest with what a plan says."""
        positions = {member.name: u for u, member in enumerate(self.members)}
        found: dict[str, Any] = {}
        for column, values in columns.items():
            found[column] = [None] * self.n_devices
            for name, value in values.items():
                if name not in positions:
                    raise PlanError(f"names {name!r}, which is no device of the manifest")
                found[column][positions[name]] = value
        whole = replace(self, planned_for=device, **found)
        whole.check()
        return whole

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """The manifest in ``text``, checked to hold together."""
        try:
            fields = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise ManifestError(f"is not of the format {FORMAT}: use the fedkin version that made it")
            members = tuple(Member(**member) for member in fields.pop("members"))
            manifest = cls(members=members, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError(f"cannot be read: {error!r}") from None
        try:
            manifest.check()
        except ManifestError as error:
            raise ManifestError(f"does not hold together: {error}") from None
        return manifest

    def check(self) -> None:
        """Raise `ManifestError` when something does not fit together."""
        v, e, p = self.n_devices, len(self.edges), self.n_params
        if len(bytes.fromhex(self.run)) != RUN_BYTES:
            raise ManifestError(f"the run id {self.run!r} does not have {2 * RUN_BYTES} hexadecimal digits")
        lengths = {"edge_radius": e, "ridge": p}
        for name, length in lengths.items():
            if len(getattr(self, name)) != length:
                raise ManifestError(f"{name} has {len(getattr(self, name))} entries, expected {length}")
        optional = {"weights": e, **dict.fromkeys(COLUMNS, v)}
        for name, length in optional.items():
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise ManifestError(f"{name} has {len(values)} entries, expected {length}")
        if self.sparsity is not None and np.shape(self.sparsity) != (v, p):
            raise ManifestError(f"sparsity has shape {np.shape(self.sparsity)}, expected {(v, p)}")
        if len({member.name for member in self.members}) < v or CENTRE in {member.name for member in self.members}:
            raise ManifestError("two devices have the same name")
        for member in self.members:
            if not _PLAIN_NAME.fullmatch(member.name):
                raise ManifestError(f"{member.name!r} is not a plain name (letters, digits, and . _ -)")
        for i, j in self.edges:
            if not 0 <= j < i < v:
                raise ManifestError(f"edge ({i}, {j}) does not name two of the {v} devices, larger position first")
        for name in ("rounds", "checkpoint_every", "snapshot_every", "n_params"):
            if getattr(self, name) < 1:
                raise ManifestError(f"{name} must be at least 1, got {getattr(self, name)}")
        planned = [one for name in COLUMNS for one in getattr(self, name) or () if one is not None]
        numbers = [self.rho, *self.edge_radius, *planned]
        if not all(math.isfinite(x) and x >= 0 for x in numbers) or not self.rho > 0:
            raise ManifestError("rho, the steps and the edge bounds must be finite and at least 0")
        if self.placement != "peer" and self.gradient != "plain":
            raise ManifestError(
                f"where devices come and go they keep no state, so gradient must be plain: {self.gradient}"
            )
        if self.placement == "central" and self.centre is None:
            raise ManifestError("placement is central, but the endpoint of the central machine is missing")

    # --- as a computation ---

    def loss_object(self) -> Loss:
        """The loss that the manifest names."""
        return described_loss(self.loss)

    def plan(self, rows: Mapping[int, Rows]) -> Plan:
        """The plan of the devices whose ``rows`` are given."""
        here = np.array(sorted(rows), dtype=np.int64)
        parts = [rows[int(u)] for u in here]
        counts = np.array([part.n_samples for part in parts], dtype=np.int64)
        batch = self._planned("batch", here).astype(np.int64)
        loss = self.loss_object()
        stacked = DeviceRows(
            Rows.stack(parts),
            np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
            counts,
            device_keys([self.members[u].id for u in here]),
            (loss,) * here.size,
            np.where(batch > 0, batch, counts),
            np.array(self.ridge),
        )
        return Plan(
            stacked,
            self.edge_array,
            np.array(self.edge_radius),
            make_penalty(self.penalty),
            self.rho,
            self._steps(here),
            self.seed,
            self.gradient,
            self.snapshot_every,
            self.average,
            None if self.sparsity is None else np.array(self.sparsity)[here],
            self.radius,
            here,
        )

    def _steps(self, here: Index) -> StepRule:
        return StepRule(*(self._planned(name, here) for name in STEPS))

    def _planned(self, column: str, here: Index) -> Array:
        values = getattr(self, column)
        found = [None if values is None else values[u] for u in here.tolist()]
        if None in found:
            name = self.members[int(here[found.index(None)])].name
            raise ManifestError(f"{column} of {name} is not known here: {PLAN} beside the manifest does not have it")
        return np.array(found)

    def shard(self, rows: Mapping[int, Rows], without: Sequence[int] = ()) -> Shard:
        """The shard that hosts the devices whose ``rows`` are given.

        Parameters
        ----------
        rows : mapping {position: Rows}
            Their rows.
        without : sequence of int
            Positions of devices that have left: their edges are dropped.
        """
        return self.plan(rows).shard(without=without)

    def rowless_shard(self, positions: Sequence[int]) -> Shard:
        """A shard that hosts devices without their rows: of a central machine, or a replica of a component."""
        nothing = {u: Rows(np.zeros((1, self.n_params))) for u in positions}
        return replace(self, batch=[0] * self.n_devices).plan(nothing).shard(rowless=True)


def load_rows(place: Path, manifest: Manifest, position: int) -> Rows:
    """The rows in a device's directory; raises `DataError` when they do not fit the run."""
    path = place / ROWS
    check_private(path)
    rows = Rows.load(path)
    n, q = rows.X.shape
    loss = manifest.loss_object()
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
        if not path.exists():
            return manifest
        return manifest.with_plan(*decode_plan(read_signed(directory, PLAN, PLAN_SIGNATURE), manifest.run))
    except (ManifestError, PlanError) as error:
        raise ManifestError(f"{path} {error}") from None


def plain_names(ids: Sequence[Hashable]) -> list[str]:
    """A name for each id that can stand in file names, certificates and keys.

    Examples
    --------
    >>> from fedkin.federate.contract.manifest import plain_names
    >>> plain_names(["north", 7, "a b/c"])
    ['north', '7', 'device-2']
    """
    names = [str(one) if _PLAIN_NAME.fullmatch(str(one)) else f"device-{k}" for k, one in enumerate(ids)]
    taken = {name.lower() for name in names}
    if len(taken) < len(names) or CENTRE in taken:  # also where file systems do not tell cases apart
        names = [f"device-{k}" for k in range(len(ids))]
    return names
