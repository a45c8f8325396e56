"""What all devices of a federation agree on, in one signed file, and the keys under which they write to each other.

The manifest names devices, edges and every number that the rounds need, except those that are for one device only
(`fedkin.federate.contract.plans`). It holds no rows. Each device has a copy, and checks the authority's signature
before it believes it. Access lists are made of the same keys.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from fedkin._base import Array, Index
from fedkin.admm import Average, GradientKind
from fedkin.errors import FedkinError
from fedkin.federate.contract.contract import Count, Nonnegative, Placement, Positive, Whole
from fedkin.federate.contract.plans import COLUMNS, OWN, DevicePlan, PlanError, in_words, to_text
from fedkin.federate.messages import HEADER_BYTES, RUN_BYTES, Kind, Wire

FORMAT = "fedkin-manifest-3"
RADIUS = 1e6  #: of the parameter ball, unless the run has a smaller one
CENTRE = "centre"  #: name of the central machine S; its sender number is the number of devices
DEAL = 60  #: starts of deals are known modulo this: right for 2 to 6, 10, 12, 15, 20, 30 and 60 folds
PLAIN_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z"


class ManifestError(FedkinError, ValueError):
    """A manifest that cannot be read or does not hold together."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device as the others know it: its id in the data, and its endpoint, ``tls/host:port`` or ``tcp/host:port``.

    ``name`` is its directory, the common name of its certificate, and its part of the keys.
    """

    id: str | int
    name: Annotated[str, Meta(pattern=PLAIN_NAME)]
    endpoint: str


class Selection(TypedDict):
    """How edges are selected before the rounds."""

    level: Annotated[float, Meta(gt=0, lt=1)]
    variance: Literal["model", "sandwich", "bartlett"]


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True, tag_field="format", tag=FORMAT
):
    """A run, as all devices know it. Lists with a number per device are in the order of ``members``.

    What is not in the shared file but in plans (``start``, ``growth``, ``damping``, ``batch``, ``deal``) is None for
    devices of which it is not known here. What the names do not say:

    - ``run``: 16 hexadecimal digits; ``revision``: how often the manifest was changed and signed again. Devices with
      different revisions do not understand each other.
    - ``edges``: E pairs of positions ``[i, j]``, ``i > j``; ``weights``: ``w_e``, None where only ``edge_radius`` is
      known; ``edge_radius``: ``lam * V * w_e``, bounds of the edge duals. ``lam`` is for the record.
    - ``ridge``: p numbers; ``sparsity``: V lists of p; ``radius``: of the ball that every theta lies in, which a
      neighbour's theta is held against.
    - ``start``, ``growth``, ``damping``: the step rule; ``noisy``: whether steps become shorter (``growth`` above 0).
    - ``batch``: rows per round, 0 for all; ``deal``: where the deal of each device's rows to folds begins
      (`fedkin.Federation.folds`), modulo `DEAL`; ``planned_for``: the device whose plan was found beside the manifest.
    - ``checkpoint_every``, ``compare_every``: rounds between checkpoints, and between comparisons of the edge duals'
      replicas (0 for never).
    - ``placement``: who holds the state of an edge: its two ends, a central machine (its endpoint is ``centre``), or
      every device of the component. ``secure`` is False for plain TCP.
    - ``classes``: labels of the target's codes 0, 1, ...; ``select``: the edge selection that comes before the rounds.
    """

    run: Annotated[str, Meta(pattern=rf"^[0-9a-fA-F]{{{2 * RUN_BYTES}}}\Z")]
    members: tuple[Member, ...]
    edges: list[Annotated[list[Whole], Meta(min_length=2, max_length=2)]]
    edge_radius: list[Nonnegative]
    loss: dict[str, Any]
    penalty: str
    lam: Nonnegative
    n_params: Count
    ridge: list[Nonnegative]
    sparsity: list[list[Nonnegative]] | None
    radius: Positive = RADIUS
    rounds: Count
    seed: Whole
    gradient: GradientKind
    snapshot_every: Count
    average: Average
    rho: Positive
    start: list[Nonnegative | None] | None = None
    growth: list[Nonnegative | None] | None = None
    damping: list[Nonnegative | None] | None = None
    batch: list[Whole | None] | None = None
    wire: Wire = "float64"
    checkpoint_every: Count = 100
    compare_every: Whole = 200
    placement: Placement = "peer"
    centre: str | None = None
    secure: bool = True
    feature_names: list[str] = []
    classes: list[bool | int | float | str] | None = None
    select: Selection | None = None
    weights: list[Nonnegative] | None = None
    deal: list[Whole | None] | None = None
    revision: Whole = 0
    noisy: bool = False
    planned_for: str | None = None

    @property
    def run_bytes(self) -> bytes:
        """What messages and checkpoints are marked with: the run id, or a digest of it and the revision."""
        if self.revision == 0:
            return bytes.fromhex(self.run)
        return hashlib.blake2b(f"{self.run} {self.revision}".encode(), digest_size=RUN_BYTES).digest()

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest message of this run."""
        p, largest = self.n_params, 2 * self.n_params + 1
        if self.select is not None:
            largest = max(largest, p * p + 2 * p + 5)
        if self.placement == "replicas":
            largest = max(largest, (5 * self.n_devices + len(self.edges)) * p + self.n_devices)
        return HEADER_BYTES + 8 * largest

    @property
    def n_devices(self) -> int:
        return len(self.members)

    # --- the graph ---

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

    # --- another lam ---

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
        fields = msgspec.to_builtins(self)
        return to_text({name: fields[name] for name in fields if name not in (*COLUMNS, "planned_for")})

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """The manifest in ``text``, checked to hold together."""
        try:
            manifest = msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ManifestError(in_words(error)) from None
        try:
            manifest.check()
        except ManifestError as error:
            raise ManifestError(f"does not hold together: {error}") from None
        return manifest

    def shared(self) -> Manifest:
        """The manifest as it is without any plan."""
        return replace(self, **dict.fromkeys((*COLUMNS, "planned_for")))

    def plan_bytes(self, position: int | None) -> bytes:
        """The plan of a device, of the central machine (position V), or with None the plans of all."""
        name: str | None = None
        steps = own = list(range(self.n_devices))
        if position == self.n_devices:
            name, own = CENTRE, []
        elif position is not None:
            name, own = self.members[position].name, [position]
            steps = self.component(position) if self.placement == "replicas" else own
        columns: dict[str, Any] = {}
        for column in COLUMNS:
            values = getattr(self, column)
            if values is not None:
                positions = own if column in OWN else steps
                columns[column] = {self.members[u].name: values[u] for u in positions if values[u] is not None}
        return DevicePlan(run=self.run, device=name, **columns).to_bytes()

    def with_plan(self, plan: DevicePlan) -> Manifest:
        """The manifest with what a plan says."""
        if plan.run != self.run:
            raise PlanError(f"is of run {plan.run}, but the manifest is of run {self.run}")
        positions = {member.name: u for u, member in enumerate(self.members)}
        found: dict[str, Any] = {}
        for column, values in plan.columns().items():
            found[column] = [None] * self.n_devices
            for name, value in values.items():
                if name not in positions:
                    raise PlanError(f"names {name!r}, which is no device of the manifest")
                found[column][positions[name]] = value
        return replace(self, planned_for=plan.device, **found)

    def check(self) -> None:
        """Raise `ManifestError` when a field is not what it must be, or two do not fit together."""
        try:
            msgspec.convert(msgspec.to_builtins(self), type(self))
        except (msgspec.ValidationError, TypeError) as error:
            raise ManifestError(in_words(error)) from None
        v, e, p = self.n_devices, len(self.edges), self.n_params
        lengths = {"edge_radius": e, "ridge": p, "weights": e, **dict.fromkeys(COLUMNS, v)}
        for name, length in lengths.items():
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise ManifestError(f"{name} has {len(values)} entries, expected {length}")
        if self.sparsity is not None and np.shape(self.sparsity) != (v, p):
            raise ManifestError(f"sparsity has shape {np.shape(self.sparsity)}, expected {(v, p)}")
        if len({member.name for member in self.members} | {CENTRE}) <= v:
            raise ManifestError("two devices have the same name")
        for i, j in self.edges:
            if not j < i < v:
                raise ManifestError(f"edge ({i}, {j}) does not name two of the {v} devices, larger position first")
        planned = [one for name in COLUMNS for one in getattr(self, name) or () if one is not None]
        if not all(map(math.isfinite, [self.rho, self.lam, self.radius, *self.edge_radius, *self.ridge, *planned])):
            raise ManifestError("rho, lam, radius, ridge, the steps and the edge bounds must be finite")
        if self.placement != "peer" and self.gradient != "plain":
            raise ManifestError(
                f"where devices come and go they keep no state, so gradient must be plain: {self.gradient}"
            )
        if self.placement == "central" and self.centre is None:
            raise ManifestError("placement is central, but the endpoint of the central machine is missing")


def plain_names(ids: Sequence[Hashable]) -> list[str]:
    """A name for each id that can stand in file names, certificates and keys.

    Examples
    --------
    >>> from fedkin.federate.contract.manifest import plain_names
    >>> plain_names(["north", 7, "a b/c"])
    ['north', '7', 'device-2']
    """
    names = [str(one) if re.match(PLAIN_NAME, str(one)) else f"device-{k}" for k, one in enumerate(ids)]
    taken = {name.lower() for name in names}
    if len(taken) < len(names) or CENTRE in taken:  # also where file systems do not tell cases apart
        names = [f"device-{k}" for k in range(len(ids))]
    return names


def keys_of(manifest: Manifest, sender: int, receiver: int) -> dict[Kind, str]:
    """The keys under which ``sender`` writes what ``receiver`` reads."""
    name = manifest.members[sender].name
    keys = {Kind.THETA: f"{manifest.run}/theta/{name}", Kind.DONE: f"{manifest.run}/done/{name}"}
    if sender < receiver and manifest.compare_every:
        keys[Kind.ALPHA] = f"{manifest.run}/alpha/{name}/{manifest.members[receiver].name}"
    if manifest.placement == "replicas" and sender == manifest.leader(sender):
        keys[Kind.PRESENT], keys[Kind.REPLICA] = f"{manifest.run}/present/{name}", f"{manifest.run}/replica/{name}"
    return keys


def asking_keys(manifest: Manifest, sender: int, receiver: int) -> dict[Kind, str]:
    """The keys under which ``receiver`` asks ``sender`` for what was lost: nobody else may, so the asker is known."""
    names = f"{manifest.members[sender].name}/{manifest.members[receiver].name}"
    return {kind: f"{manifest.run}/ask/{kind.name.lower()}/{names}" for kind in keys_of(manifest, sender, receiver)}


def presence_key(manifest: Manifest, sender: int) -> str:
    """The key under which a device shows that it is there."""
    return f"{manifest.run}/live/{manifest.members[sender].name}"


def selection_keys(manifest: Manifest, sender: int, receiver: int) -> dict[Kind, str]:
    """The keys of edge selection: a device's summary, the verdict on an edge (from its smaller end), "I am done"."""
    name = manifest.members[sender].name
    keys = {Kind.SUMMARY: f"{manifest.run}/summary/{name}", Kind.DONE: f"{manifest.run}/chosen/{name}"}
    if sender < receiver:
        keys[Kind.VERDICT] = f"{manifest.run}/verdict/{name}/{manifest.members[receiver].name}"
    return keys
