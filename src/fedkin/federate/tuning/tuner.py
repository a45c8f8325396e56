"""The choice of ``lam`` between devices: cross-validation in which rows stay where they are.

Each device cuts its own rows into folds. For every fold and every level of the grid the fleet runs Fed-ADMM on the
training rows, all of them side by side in one run: a device hosts a copy of itself for each (level, fold), copies of
neighbours for the same (level, fold) are joined by an edge, and a message holds the thetas of all copies. The
arithmetic is that of the rounds, `fedkin.admm.shard.Shard`, with all training rows in every round. In the end a
device computes its own held-out losses.

Without a given grid, two short stages come before. First all devices agree on one theta (Fed-ADMM on all rows with
duals that nothing bounds): the duals that hold them together are an electrical flow, and the largest of them, over
``w_e |V|``, is at least ``lam_max``. Then that largest number is passed on from neighbour to neighbour until all know
it. The grid begins at the next level of a lattice that is the same everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from fedkin._base import Array, Index
from fedkin.admm import (
    Course,
    DeviceRows,
    Plan,
    Shard,
    ShardState,
    StepRule,
    device_keys,
    local_curvature,
    run_rounds,
)
from fedkin.data import Federation, Rows
from fedkin.errors import DataError, ParameterError
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.contract.reading import loss_of
from fedkin.federate.journal import Journal
from fedkin.federate.kept import KeptState
from fedkin.federate.links import Transport
from fedkin.federate.links.neighbours import NeighbourLink
from fedkin.federate.messages import RUN_BYTES
from fedkin.federate.waiting import Patience, Status
from fedkin.objective import build_terms, make_penalty
from fedkin.solvers import deal_folds, lattice

#: Bound of duals that nothing shall bound.
UNBOUNDED = 1e300
#: rho of a run without noise over that of a run with noise, as `fedkin.admm.plan` plans them.
STILL_OVER_NOISY = 4.0
#: Rounds between two checkpoints: what is kept for neighbours holds all copies.
CHECKPOINT_EVERY = 20


@dataclass(frozen=True)
class TuneSettings:
    """What all devices must be told alike.

    ``lams`` decrease; None lets the devices find ``n_lams`` of them, the smallest ``ratio`` of the largest. Steps are
    ``caution`` times shorter than usual.
    """

    lams: tuple[float, ...] | None = None
    n_lams: int = 10
    ratio: float = 1e-3
    folds: int = 5
    rounds: int = 300
    seed: int = 0
    caution: float = 1.0

    def __post_init__(self) -> None:
        if self.lams is not None:
            good = all(isinstance(lam, float) and 0 < lam < np.inf for lam in self.lams)
            if not self.lams or not good or list(self.lams) != sorted(set(self.lams), reverse=True):
                raise ParameterError(f"lams must be different positive numbers, the largest first, got {self.lams!r}")
        if self.n_lams < 2:
            raise ParameterError(f"n_lams must be at least 2, got {self.n_lams}")
        if not 0 < self.ratio < 1:
            raise ParameterError(f"ratio must lie between 0 and 1, got {self.ratio!r}")
        for name, least in (("folds", 2), ("rounds", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ParameterError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.caution < np.inf:
            raise ParameterError(f"caution must be a positive number, got {self.caution!r}")

    @property
    def n_levels(self) -> int:
        """Levels of the grid."""
        return self.n_lams if self.lams is None else len(self.lams)

    def run_bytes(self, manifest: Manifest) -> bytes:
        """What messages are marked with: devices that were told something else do not understand them."""
        text = json.dumps([manifest.run, manifest.revision, asdict(self)])
        return hashlib.blake2b(text.encode(), digest_size=RUN_BYTES).digest()


def own_folds(manifest: Manifest, position: int, n: int, settings: TuneSettings) -> Index:
    """Fold ``(n,)`` of each row of a device, as `Federation.folds` deals them; -1 for a single row, which trains."""
    first = None if manifest.deal is None else manifest.deal[position]
    return deal_folds(manifest.members[position].id, n, settings.folds, settings.seed, first or 0)


def flood_rounds(manifest: Manifest, position: int) -> int:
    """Rounds after which a number has gone from any device of a component to any other.

    That is at most twice the distance from its first device to the farthest one.
    """
    around: dict[int, set[int]] = {}
    for i, j in manifest.edges:
        around.setdefault(i, set()).add(j)
        around.setdefault(j, set()).add(i)

    def distances(first: int) -> tuple[set[int], int]:
        reached, border, rounds = {first}, {first}, 0
        while border := set().union(*(around.get(u, set()) for u in border)) - reached:
            reached |= border
            rounds += 1
        return reached, rounds

    return 2 * distances(min(distances(position)[0]))[1]


class Copies:
    """K copies of one device, each with rows, steps and edge bounds of its own, in one shard.

    Copy k of device u has the number ``k * V + u``. It trains on ``parts[part_of[k]]`` at level ``lams[k]``, infinite
    for duals that nothing bounds. Edges to neighbours in ``without`` are left out.
    """

    def __init__(
        self,
        manifest: Manifest,
        position: int,
        parts: Sequence[Rows],
        part_of: Index,
        lams: Array,
        without: frozenset[int],
        caution: float,
    ) -> None:
        v, copies = manifest.n_devices, part_of.size
        kept = (manifest.edge_array == position).any(axis=1) & ~np.isin(manifest.edge_array, list(without)).any(axis=1)
        edges, weights = manifest.edge_array[kept], manifest.edge_weights[kept]
        shift = v * np.arange(copies, dtype=np.int64)
        rows = _stacked(manifest, position, parts)
        federation = Federation(dict(enumerate(parts)))
        curvature = local_curvature(build_terms(federation, rows.losses, rows.ridge), rows)
        start = caution * curvature.of_batches(rows)
        hosted = rows.take(part_of)
        rho = manifest.rho * (STILL_OVER_NOISY if manifest.noisy else 1.0)
        # the paper's |N_i| is that of the graph as planned, also where edges were dropped
        degree = float((manifest.edge_array == position).sum())
        steps = StepRule(start[part_of], np.zeros(copies), np.full(copies, rho * degree))
        strength = lams * v
        radius = np.minimum(strength[:, None] * weights, UNBOUNDED)
        sparsity = None if manifest.sparsity is None else np.tile(np.array(manifest.sparsity)[position], (copies, 1))
        plan = Plan(
            hosted,
            (edges + shift[:, None, None]).reshape(-1, 2),
            radius.reshape(-1),
            make_penalty(manifest.penalty),
            rho,
            steps,
            manifest.seed,
            "plain",
            1,
            "last",
            sparsity,
            manifest.radius,
            position + shift,
        )
        self.shard = plan.shard()
        self.weights = np.tile(weights, copies)

    def largest_dual(self) -> float:
        """Largest dual norm of an edge's dual over its weight."""
        sizes = self.shard.rule.penalty.dual_norm(self.shard.alpha)
        return float((sizes / self.weights).max(initial=0.0))


def _stacked(manifest: Manifest, position: int, parts: Sequence[Rows]) -> DeviceRows:
    """The parts as devices of their own, all rows in every batch."""
    counts = np.array([part.n_samples for part in parts], dtype=np.int64)
    loss = loss_of(manifest)
    return DeviceRows(
        Rows.stack(parts),
        np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        counts,
        np.tile(device_keys([manifest.members[position].id]), counts.size),
        (loss,) * counts.size,
        counts,
        np.array(manifest.ridge),
    )


def held_out_losses(manifest: Manifest, parts: Mapping[int, Rows], theta: Array) -> Array:
    """Mean loss of each part at ``theta (m, len(parts), p)``, shape ``(len(parts), m)``, without ridge."""
    federation = Federation(parts)
    losses = (loss_of(manifest),) * len(parts)
    terms = build_terms(federation, losses, np.zeros(manifest.n_params))
    return np.stack([terms.values(level) for level in theta], axis=1)


class CopiesLink(NeighbourLink):
    """A link that carries all copies of a device (its ``shard``), also where the edges of all copies were dropped."""

    shard: Shard

    def exchange(self, t: int, positions: Index, thetas: Array) -> tuple[Index, Array]:
        return super().exchange(t, self.shard.devices, self.shard.theta)


class Tuner:
    """A device's part in the choice of ``lam``: `run` gives its held-out losses.

    ``without`` are neighbours whose edges were dropped by edge selection; ``tick`` is called with this object after
    every round and twice a second while waiting.
    """

    def __init__(
        self,
        manifest: Manifest,
        position: int,
        rows: Rows,
        settings: TuneSettings,
        transport: Transport,
        journal: Journal,
        *,
        checkpoint: Path | None = None,
        patience: Patience | None = None,
        without: frozenset[int] = frozenset(),
        tick: Callable[[Any], None] | None = None,
    ) -> None:
        if manifest.placement != "peer":
            raise ParameterError("lam is chosen between devices that talk to each other, not with --placement central")
        if rows.X.shape[0] < 1:
            raise DataError("the device has no rows")
        self.manifest, self.position, self.rows, self.settings, self.without = (
            manifest,
            position,
            rows,
            settings,
            without,
        )
        self.journal, self.on_tick = journal, tick
        found = settings.lams is None
        #: Rounds of agreement, and of agreement and flood.
        self.agreed = settings.rounds if found else 0
        self.known = self.agreed + (flood_rounds(manifest, position) if found else 0)
        self.rounds = self.known + settings.rounds
        self.lams: Array | None = None if found else np.array(settings.lams)
        self.top = 0.0
        self.fold_of = own_folds(manifest, position, rows.X.shape[0], settings)
        self.link = CopiesLink(
            structs.replace(manifest, wire="float64", compare_every=0, checkpoint_every=CHECKPOINT_EVERY),
            position,
            [int(v) for v in manifest.neighbours(position)],
            transport,
            journal,
            run=settings.run_bytes(manifest),
            rounds=self.rounds,
            length=self.length,
            patience=patience,
            tick=self.tick,
        )
        self._copies: Copies | None = None
        self.kept: KeptState | None = None
        if checkpoint is not None:
            run, link = settings.run_bytes(manifest).hex(), self.link
            self.kept = KeptState(
                checkpoint, run, manifest.revision, link.name, link.hold, keep=link.keep, refuse=False
            )
            self._load(self.kept)
        self.link.open()

    @property
    def done(self) -> int:
        """Rounds that are over."""
        return self.link.done

    @property
    def status(self) -> Status:
        """What the owner may want to know."""
        return self.link.status

    def tick(self) -> None:
        """Called after every round and twice a second while waiting."""
        if self.on_tick is not None:
            self.on_tick(self)

    def run(self) -> tuple[Array, Array]:
        """Do all rounds; returns the grid ``(m,)`` and the held-out losses ``(folds, m)``, nan where there are none.

        A device alone has nothing to say about ``lam``: its grid is empty.
        """
        if not self.link.neighbours and self.settings.lams is None:
            return np.zeros(0), np.zeros((self.settings.folds, 0))
        self.status.state, self.status.round = "tuning", self.done
        try:
            self._agree()
            self._flood()
            self._cross_validate()
        finally:
            if self.kept is not None:
                self.kept.close()
        self.journal.write("info", "finished", round=self.done)
        self.status.state = "finished"
        grid, folds = self._grid(), self.settings.folds
        theta = self._stage(self.rounds).shard.theta.reshape(grid.size, folds, -1)
        curves = np.full((folds, grid.size), np.nan)
        held = [fold for fold in range(folds) if (self.fold_of == fold).any()]
        if held:
            parts = {fold: self.rows.take(self.fold_of == fold) for fold in held}
            curves[held] = held_out_losses(self.manifest, parts, theta[:, held])
        return grid, curves

    def linger(self) -> None:
        """Stay until all neighbours have finished, since they may need the last vectors."""
        self.link.linger()

    # --- the three stages ---

    def _agree(self) -> None:
        if self.done < self.agreed:
            self._run_rounds(self.agreed, 0)
        if self.done == self.agreed:
            self._copies = None

    def _flood(self) -> None:
        for t in range(max(self.done, self.agreed) + 1, self.known + 1):
            theirs = self.link.share(t, np.array([self.top]))
            self.top = max([self.top, *(float(one[0]) for one in theirs.values())])
            self._settle(t)
            self.save(t, None, durable=t % CHECKPOINT_EVERY == 0)
            self._after(t, 0.0)

    def _cross_validate(self) -> None:
        if self.done < self.rounds:
            self._run_rounds(self.rounds, self.known)

    def _run_rounds(self, last: int, offset: int) -> None:
        course = Course(
            last,
            offset=offset,
            names=[self.link.name] * self._stage(last).shard.devices.size,
            cure="use --caution 4",
            save_every=CHECKPOINT_EVERY,
            save_all=True,
            settle=self._settle,
            after=self._after,
        )
        self.link.shard = self._stage(last).shard
        run_rounds(self.link.shard, self.link, self, course, self.done)

    def _settle(self, t: int) -> None:
        if t == self.agreed:
            self.top = self._stage(t).largest_dual() / self.manifest.n_devices
        self.link.done = t

    def _after(self, t: int, change: float) -> None:
        self.status.round, self.status.change = t, change
        self.tick()

    def _stage(self, t: int) -> Copies:
        """The copies that round t moves."""
        if self._copies is None:
            first = t <= self.agreed
            self._copies = self._agreement() if first else self._cross_validation()
        return self._copies

    def _agreement(self) -> Copies:
        one, unbounded = np.zeros(1, dtype=np.int64), np.full(1, np.inf)
        return Copies(self.manifest, self.position, [self.rows], one, unbounded, self.without, self.settings.caution)

    def _cross_validation(self) -> Copies:
        grid, folds = self._grid(), self.settings.folds
        parts = [self.rows.take(self.fold_of != fold) for fold in range(folds)]
        part_of = np.tile(np.arange(folds, dtype=np.int64), grid.size)
        lams = np.repeat(grid, folds)
        return Copies(self.manifest, self.position, parts, part_of, lams, self.without, self.settings.caution)

    def _grid(self) -> Array:
        if self.lams is None:
            if not self.top > 0:
                raise ParameterError("the devices agree without any penalty: there is no lam to choose, give --lams")
            self.lams = lattice(self.top, self.settings.n_lams, self.settings.ratio)
        return self.lams

    def length(self, t: int) -> int:
        """Numbers in a message of round t."""
        p = self.manifest.n_params
        if t <= self.known:
            return p if t <= self.agreed else 1
        return p * self.settings.folds * self.settings.n_levels

    # --- its state ---

    def save(self, t: int, state: ShardState | None, durable: bool) -> None:
        """Keep the state after round t."""
        if self.kept is not None:
            arrays = {"top": np.array([self.top])} | ({} if state is None else vars(state))
            if self.kept.save(t, arrays, {}, self.link.unsaved(), durable=durable):
                self.link.saved()

    def _load(self, kept: KeptState) -> None:
        found = kept.load()
        if found is None:
            return
        self.link.done = found.round
        self.link.recall(kept.sent())
        self.top = float(found.arrays.pop("top")[0])
        if found.arrays and found.round != self.agreed:
            self._stage(found.round).shard.restore(ShardState(**found.arrays))
