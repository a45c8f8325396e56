"""One site in the field: a shard of one, a link to its neighbours, and its state on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from fedkin._base import Array
from fedkin.admm import MOST_PARAMS, Course, Shard, ShardState, ShareTaker, is_shared, run_rounds
from fedkin.data import Rows
from fedkin.errors import DataError, ModelFileError
from fedkin.federate.frames import Expected, Kind
from fedkin.federate.journal import Journal
from fedkin.federate.kept import KeptState
from fedkin.federate.links import Transport
from fedkin.federate.links.neighbours import NeighbourLink
from fedkin.federate.manifest import TOO_LONG, Manifest, keys_of
from fedkin.federate.reading import shard_of
from fedkin.federate.waiting import Patience, Status, Stopped

#: Differences between the replicas of an edge dual up to this share of its bound are rounding of different processors.
SAME_DUAL = 1e-9
_BOUND_KIND = {"l1": "max", "l2": "length", "linf": "sum"}  # dual norms of the penalties


class DualLink(NeighbourLink):
    """A link whose ends also compare the two replicas of each edge's dual; the smaller end is right by definition.

    ``shard``, that of this site, must be set before `open`.
    """

    shard: Shard

    def expected(self, v: int) -> list[Expected]:
        if v > self.position or not self.manifest.compare_every:
            return super().expected(v)
        t, edge = self.done + 1, self.shard.edges.tolist().index([self.position, v])
        # duals are compared as they are; only thetas are rounded on the way
        dual = Expected(
            self.run_bytes,
            Kind.ALPHA,
            v,
            self.manifest.n_params,
            t,
            t + 1,
            bound=float(self.shard.edge_radius[edge]),
            bound_kind=_BOUND_KIND[self.manifest.penalty],  # type: ignore[arg-type]
        )
        return [*super().expected(v), dual]

    def answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        held = self.past[Kind.ALPHA].get(t)
        if kind is not Kind.ALPHA or held is None:
            return super().answer(kind, v, t)
        own = np.flatnonzero((self.shard.edges == v).any(axis=1))
        return self.frame(kind, t, held.reshape(-1, self.manifest.n_params)[own[0]]) if own.size else None

    def compare_duals(self, t: int) -> None:
        """Compare the replicas, and take over those of the smaller ends."""
        shard = self.shard
        for edge, (i, j) in enumerate(shard.edges.tolist()):
            if j == self.position:
                key = keys_of(self.manifest, j, i)[Kind.ALPHA]
                self.transport.publish(key, self.frame(Kind.ALPHA, t, shard.alpha[edge]))
        self.remember(Kind.ALPHA, t, shard.alpha.flatten())
        self.inbox.advance(Kind.ALPHA, t, t + self.manifest.compare_every)
        self.wait_for(Kind.ALPHA, [v for v in self.neighbours if v < self.position], t)
        alpha = shard.alpha.copy()
        for edge, (_, j) in enumerate(shard.edges.tolist()):
            if j == self.position:
                continue
            theirs = self.inbox.values(Kind.ALPHA, j, t)
            difference = float(np.abs(theirs - alpha[edge]).max(initial=0.0))
            if difference > SAME_DUAL * shard.edge_radius[edge]:
                self.journal.write("warning", "edge dual repaired", peer=self.names[j], round=t, difference=difference)
                self.status.repaired += 1
            alpha[edge] = theirs
        if alpha.tobytes() != shard.alpha.tobytes():
            shard.take_duals(alpha)


class Peer:
    """A site process without the process: `run` does all rounds. ``left`` are neighbours that have left for good.

    ``tick`` is called after every round and twice a second while waiting; it may raise `Stopped`.
    """

    def __init__(
        self,
        manifest: Manifest,
        rows: Rows,
        transport: Transport,
        journal: Journal,
        *,
        checkpoint: Path | None = None,
        patience: Patience | None = None,
        left: frozenset[int] = frozenset(),
        tick: Callable[[Peer], None] | None = None,
    ) -> None:
        self.manifest, self.position, self.journal, self.on_tick = manifest, manifest.here, journal, tick
        self.shard = shard_of(manifest, {manifest.here: rows})
        self._taker = ShareTaker(self.shard) if manifest.n_params <= MOST_PARAMS else None
        neighbours = self.shard.foreign.tolist()
        hooks = {"tick": self.tick, "idle": self.settle}
        self.link = DualLink(manifest, neighbours, transport, journal, patience=patience, **hooks)
        self.link.shard = self.shard
        self.kept: KeptState | None = None
        if checkpoint is not None:
            link = self.link
            self.kept = KeptState(checkpoint, manifest.run, manifest.revision, link.name, link.hold, keep=link.keep)
            self._load(self.kept)
        self.drop(left)
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

    def settle(self) -> None:
        """Write the state after the last round, if that has not been done."""
        if self.kept is not None:
            self.kept.settle()

    def run(self) -> Array:
        """Do all rounds that are left, and return the averaged parameters ``(p,)``."""
        manifest, status = self.manifest, self.status
        status.state, status.round = "running", self.done
        course = Course(
            manifest.rounds,
            manifest.wire,
            names=[self.link.name],
            cure=TOO_LONG,
            radius=manifest.radius,
            save_every=manifest.checkpoint_every,
            save_all=True,
            settle=self._settle,
            after=self._after,
        )
        try:
            run_rounds(self.shard, self.link, self, course, self.done)
        except Stopped:
            self.settle()
            raise
        finally:
            self._close()
        self.journal.write("info", "finished", round=self.done)
        status.state = "finished"
        return np.asarray(self.shard.average[0])

    def _settle(self, t: int) -> None:
        if self.manifest.compare_every and t % self.manifest.compare_every == 0:
            self.link.compare_duals(t)
        self.link.done = t

    def _after(self, t: int, change: float) -> None:
        self.status.round, self.status.change = t, change
        if self._taker is not None and (is_shared(t) or t == self.manifest.rounds):
            self.status.shares.append(self._taker.take(t))
        self.tick()

    def linger(self) -> None:
        """Stay until all neighbours have finished, since they may need the last vectors."""
        self.link.linger(self._note_the_end)

    def _note_the_end(self) -> None:
        self.save(self.done, self.shard.state(), durable=True)
        self._close()

    def drop(self, gone: frozenset[int]) -> None:
        """Go on without neighbours that have left for good: their edges leave the objective, with duals set to 0.

        Only the site's own part changes, so neighbours of the same leaver need not agree on the round.
        """
        if gone := self.link.drop(gone):
            self.shard.drop(gone)
            self.status.shares.clear()  # of another objective

    # --- its state ---

    def save(self, t: int, state: ShardState, durable: bool) -> None:
        """Keep the state after round t."""
        if self.kept is not None:
            write = partial(self._write, self.kept, t, state, self.link.left, durable)
            if durable:
                write()
            else:
                self.kept.note(write)

    def _write(self, kept: KeptState, t: int, state: ShardState, left: frozenset[int], durable: bool) -> None:
        header = {"left": sorted(left), "over": self.link.over}
        if kept.save(t, vars(state), header, self.link.unsaved(t), durable=durable):
            self.link.saved(t)

    def _load(self, kept: KeptState) -> None:
        found = kept.load()
        if found is None:
            return
        self.link.done, self.link.over = found.round, found.header["over"]
        self.link.recall(kept.sent())
        self.drop(frozenset(found.header["left"]))
        try:
            self.shard.restore(ShardState(**found.arrays))
        except DataError:
            raise ModelFileError(
                f"{kept.path} was written with another number of rows: join again with the rows of before, or remove "
                "it, on all sites, to start from round 0"
            ) from None

    def _close(self) -> None:
        if self.kept is not None:
            self.kept.close()
