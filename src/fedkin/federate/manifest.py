"""One site's view of a run: itself, those whom it exchanges messages with, and the keys under which they write.

A view is made in memory, from what was signed (`fedkin.federate.views`), and is never a file. Sites go by their numbers
in the organiser's list: they order the ends of an edge, edges and members, and stand in messages. So what a site
computes from its own part of the graph has the bits of a run that sees all of it.
"""

from __future__ import annotations

import hashlib
import math
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from fedkin._base import Index
from fedkin.admm import Average, GradientKind, Wire
from fedkin.errors import FedkinError
from fedkin.federate.contract import EdgeTests, Placement
from fedkin.federate.frames import HEADER_BYTES, RUN_BYTES, Kind
from fedkin.federate.messages import CENTRE, Member, Steps

#: Why parameters diverge, and what helps.
TOO_LONG = (
    "its steps are too long for its rows; let the contract have a larger batch_size or some ridge, or a smaller rho"
)


class ManifestError(FedkinError, ValueError):
    """A view of a run that does not hold together."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A run, as one site sees it.

    - ``run``: 16 hexadecimal digits; ``revision``: how often the organiser has ordered something. Sites with different
      revisions do not understand each other.
    - ``here``: the number of the site whose view this is, ``n_sites`` for the central machine; ``members``: the site
      itself and those whom it exchanges messages with, increasing by number; ``n_sites``: of all.
    - ``edges``: E pairs of numbers ``(i, j)``, ``i > j``, increasing; ``edge_radius``: ``lam * V * w_e``, bounds of the
      edge duals.
    - ``ridge``, ``sparsity``: p numbers; ``radius``: of the ball that every theta lies in, which a neighbour's theta is
      held against.
    - ``steps``: by number, of those who are stepped for here; ``batch``: rows per round, 0 for all.
    - ``checkpoint_every``, ``compare_every``: rounds between checkpoints, and between comparisons of the edge duals'
      replicas (0 for never).
    - ``placement``: who holds the state of an edge: its two ends, a central machine (its endpoint is ``centre``), or
      every site of the component.
    - ``select``: the edge selection that comes before the rounds, among ``n_edges`` edges of the whole graph.
    """

    run: str
    here: int
    n_sites: int
    members: tuple[Member, ...]
    edges: list[tuple[int, int]]
    edge_radius: list[float]
    loss: dict[str, Any]
    penalty: str
    lam: float
    n_params: int
    ridge: list[float]
    radius: float
    rounds: int
    rho: float
    steps: dict[int, Steps]
    sparsity: list[float] | None = None
    seed: int = 0
    gradient: GradientKind = "plain"
    snapshot_every: int = 1
    average: Average = "last"
    batch: int = 0
    wire: Wire = "float64"
    checkpoint_every: int = 100
    compare_every: int = 200
    placement: Placement = "peer"
    centre: str | None = None
    select: EdgeTests | None = None
    n_edges: int = 0
    revision: int = 0

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
            m = len(self.members)
            largest = max(largest, (5 * m + len(self.edges)) * p + m)
        return HEADER_BYTES + 8 * largest

    # --- who is who ---

    @cached_property
    def _by_number(self) -> dict[int, Member]:
        return {member.number: member for member in self.members}

    @property
    def numbers(self) -> list[int]:
        """Of the members, increasing."""
        return list(self._by_number)

    def member(self, number: int) -> Member:
        """The site of that number."""
        return self._by_number[number]

    def name(self, number: int) -> str:
        """The name of a site, or of the central machine."""
        return CENTRE if number == self.n_sites else self._by_number[number].name

    def number(self, name: str) -> int:
        """The number of the site of that name."""
        for member in self.members:
            if member.name == name:
                return member.number
        raise ManifestError(f"{self.name(self.here)} knows no site named {name!r}")

    def endpoint(self, number: int) -> str | None:
        """Where a site, or the central machine, listens."""
        return self.centre if number == self.n_sites else self._by_number[number].endpoint

    # --- the graph ---

    @cached_property
    def edge_array(self) -> Index:
        """Edges ``(E, 2)``."""
        return np.asarray(self.edges, dtype=np.int64).reshape(-1, 2)

    def neighbours(self, number: int) -> Index:
        """Numbers of the neighbours of a site, increasing."""
        touching = self.edge_array[(self.edge_array == number).any(axis=1)]
        return np.unique(touching[touching != number])

    def leader(self) -> int:
        """The first site of the component (placement replicas)."""
        return self.numbers[0]

    def partners(self) -> list[int]:
        """Numbers of those whom this site exchanges messages with, increasing."""
        if self.placement == "central":
            return self.numbers if self.here == self.n_sites else [self.n_sites]
        if self.placement == "replicas":
            return [u for u in self.numbers if u != self.here]
        return [int(v) for v in self.neighbours(self.here)]

    def check(self) -> None:
        """Raise `ManifestError` when two fields do not fit together."""
        lengths = {"edge_radius": len(self.edges), "ridge": self.n_params}
        for name, length in lengths.items():
            if len(getattr(self, name)) != length:
                raise ManifestError(f"{name} has {len(getattr(self, name))} entries, expected {length}")
        if len({member.name for member in self.members} | {CENTRE}) <= len(self.members):
            raise ManifestError("two sites have the same name")
        if self.numbers != sorted(self.numbers):
            raise ManifestError("members are not in the order of their numbers")
        for i, j in self.edges:
            if not j < i or not {i, j} <= set(self.numbers):
                raise ManifestError(f"edge ({i}, {j}) does not join two members, larger number first")
        for number, steps in self.steps.items():
            if len(steps.theta) != self.n_params:
                raise ManifestError(
                    f"site {number} starts from {len(steps.theta)} parameters, expected {self.n_params}"
                )
        planned = [one for steps in self.steps.values() for one in (steps.start, steps.growth, *steps.theta)]
        if not all(map(math.isfinite, [self.rho, self.lam, self.radius, *self.edge_radius, *self.ridge, *planned])):
            raise ManifestError("rho, lam, radius, ridge, the steps and the edge bounds must be finite")
        if self.placement == "central" and self.centre is None:
            raise ManifestError("placement is central, but the endpoint of the central machine is missing")


# --- keys -------------------------------------------------------------------------------------------------------------


def keys_of(manifest: Manifest, sender: int, receiver: int) -> dict[Kind, str]:
    """The keys under which ``sender`` writes what ``receiver`` reads."""
    name = manifest.name(sender)
    keys = {Kind.THETA: f"{manifest.run}/theta/{name}", Kind.DONE: f"{manifest.run}/done/{name}"}
    if sender < receiver and manifest.compare_every:
        keys[Kind.ALPHA] = f"{manifest.run}/alpha/{name}/{manifest.name(receiver)}"
    if manifest.placement == "replicas" and sender == manifest.leader():
        keys[Kind.PRESENT], keys[Kind.REPLICA] = f"{manifest.run}/present/{name}", f"{manifest.run}/replica/{name}"
    return keys


def asking_keys(manifest: Manifest, sender: int, receiver: int) -> dict[Kind, str]:
    """The keys under which ``receiver`` asks ``sender`` for what was lost: nobody else may, so the asker is known."""
    names = f"{manifest.name(sender)}/{manifest.name(receiver)}"
    return {kind: f"{manifest.run}/ask/{kind.name.lower()}/{names}" for kind in keys_of(manifest, sender, receiver)}


def presence_key(manifest: Manifest, sender: int) -> str:
    """The key under which a site shows that it is there."""
    return f"{manifest.run}/live/{manifest.name(sender)}"


def selection_keys(manifest: Manifest, sender: int, receiver: int) -> dict[Kind, str]:
    """The keys of edge selection: a site's summary, the verdict on an edge (from its smaller end), "I am done"."""
    name = manifest.name(sender)
    keys = {Kind.SUMMARY: f"{manifest.run}/summary/{name}", Kind.DONE: f"{manifest.run}/chosen/{name}"}
    if sender < receiver:
        keys[Kind.VERDICT] = f"{manifest.run}/verdict/{name}/{manifest.name(receiver)}"
    return keys


def star_keys(manifest: Manifest, sender: int, receiver: int) -> list[str]:
    """The keys under which ``sender`` writes what ``receiver`` reads; one of them is the central machine."""
    if sender == manifest.n_sites:
        name = manifest.name(receiver)
        return [star_key(manifest, "down", name), star_key(manifest, "result", name), presence_key(manifest, sender)]
    name = manifest.name(sender)
    return [star_key(manifest, part, name) for part in ("theta", "done", "live")]


def star_key(manifest: Manifest, part: str, name: str) -> str:
    """A key between the central machine and one site."""
    return f"{manifest.run}/{part}/{name}"


def all_keys(manifest: Manifest, sender: int, receiver: int) -> list[str]:
    """All keys under which ``sender`` writes what ``receiver`` reads."""
    if manifest.placement == "central":
        return star_keys(manifest, sender, receiver)
    keys = [*keys_of(manifest, sender, receiver).values(), *asking_keys(manifest, sender, receiver).values()]
    keys.append(presence_key(manifest, sender))
    return keys if manifest.select is None else [*keys, *selection_keys(manifest, sender, receiver).values()]
