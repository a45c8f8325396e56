"""Algorithm 2 without a central machine: every site of a component keeps a replica of the whole component.

A step for an absent site needs the duals around it, hence the thetas of *its* neighbours, which may be no neighbours
of who takes the step, and which an absent site cannot pass on. So sites of a component talk to all others of it,
not only to neighbours: a site that is there sends its theta to all, and all take the penalty's part of the step for
who is absent, each in its own replica. Replicas hold the same bits as long as all know the same sites to be absent.

Presence is what happens. One site of the component, the leader, says who was there in a round: those
whose theta it had got before the deadline. It writes that down, thetas included, before it says so. A site that has
missed a round, or was not there at all, takes over the leader's replica. Nobody decides in the leader's place: two
leaders on the two sides of a broken network would make two histories that no rule could join.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Mask
from fedkin.data import Rows
from fedkin.errors import SolverError
from fedkin.federate.central import Hub, NodeWorker
from fedkin.federate.frames import HEADER_BYTES, Expected, Kind, MessageError, decode, encode
from fedkin.federate.journal import Journal
from fedkin.federate.kept import KeptState
from fedkin.federate.links import Transport
from fedkin.federate.links.neighbours import NeighbourLink
from fedkin.federate.manifest import TOO_LONG, Manifest
from fedkin.federate.waiting import LOOK_SECONDS, Patience, Reminders

_PARTS = ("theta", "balance", "balance_before", "average", "average_balance", "alpha")


class Component(Hub):
    """A replica of a component, which travels as one vector."""

    def to_vector(self) -> Array:
        """The state as it travels."""
        state = vars(self.shard.state())
        return np.concatenate([*(state[name].ravel() for name in _PARTS), self.seen.astype(np.float64)])

    @property
    def vector_length(self) -> int:
        m, p = self.shard.theta.shape
        return int((5 * m + self.shard.edges.shape[0]) * p + m)

    def take_vector(self, vector: Array, done: int) -> None:
        """Take over another replica.

        Raises `MessageError` when it cannot be a state after ``done`` rounds: duals outside their balls, or impossible
        counts.
        """
        m, p = self.shard.theta.shape
        ends = np.cumsum([m * p] * 5 + [self.shard.edges.shape[0] * p])
        *parts, seen = np.split(vector, ends)
        state: dict[str, NDArray[Any]] = {name: part.reshape(-1, p) for name, part in zip(_PARTS, parts, strict=True)}
        if (self.shard.rule.penalty.dual_norm(state["alpha"]) > self.shard.edge_radius * (1.0 + 1e-6)).any():
            raise MessageError("a replica with duals outside their balls")
        if (seen != np.round(seen)).any() or (seen < 0).any() or (seen > done).any():
            raise MessageError(f"a replica with impossible counts of presence after {done} rounds")
        self.restore({**state, "seen": seen}, done)


class _Behind(Exception):
    """The leader is ahead, and this is its replica."""

    def __init__(self, round: int, vector: Array) -> None:
        super().__init__(f"round {round}")
        self.round, self.vector = round, vector


class Replica(NeighbourLink):
    """A site of a component whose sites come and go; the first of them is the leader.

    Only a leader needs a checkpoint. In ``record`` a leader writes down what it decided, round after round, until the
    next checkpoint. The other parameters are as of `fedkin.federate.peer.Peer`.
    """

    def __init__(
        self,
        manifest: Manifest,
        rows: Rows,
        transport: Transport,
        journal: Journal,
        *,
        checkpoint: Path | None = None,
        record: Path | None = None,
        patience: Patience | None = None,
        tick: Callable[[Any], None] | None = None,
    ) -> None:
        members = manifest.numbers
        self.component = Component(manifest, members)
        self.worker = NodeWorker(manifest, rows)
        self.leader = manifest.leader()
        self.leads = manifest.here == self.leader
        self.record = record if self.leads else None
        self._lock = threading.Lock()
        others = [u for u in members if u != manifest.here]
        own_tick = None if tick is None else partial(tick, self)
        super().__init__(manifest, others, transport, journal, patience=patience, tick=own_tick)
        self.kept: KeptState | None = None
        if checkpoint is not None and self.leads:
            self.kept = KeptState(checkpoint, manifest.run, manifest.revision, self.name, self.hold, keep=self.keep)
            self._load(self.kept)
        if self.record is not None:
            self._replay(self.record)
        self.open()

    def run(self) -> Array:
        """Do all rounds that are left, and return the averaged parameters ``(p,)``."""
        if self.leads and self.done < self.rounds:
            seconds = self.patience.gather if self.done == 0 else self.patience.deadline
            self.gather(self.neighbours, self.done + 1, seconds)
        self.status.state, self.status.round = "running", self.done
        while self.done < self.rounds:
            self._round(self.done + 1)
        if not self.over:
            self._save()
        if np.sqrt(self.theta.dot(self.theta)) > (1.0 - 1e-9) * self.manifest.radius:
            raise SolverError(f"the parameters of site {self.name!r} diverged to the border of their ball: {TOO_LONG}")
        self.journal.write("info", "finished", round=self.done)
        self.status.state = "finished"
        return np.asarray(self.component.shard.average[self.component.members.index(self.position)])

    def linger(self, on_end: Callable[[], None] | None = None) -> None:
        super().linger(on_end or self._save)

    @property
    def theta(self) -> Array:
        """The site's parameters ``(p,)``."""
        return np.asarray(self.component.shard.theta[self.component.members.index(self.position)])

    def _own(self, t: int) -> Array:
        theta = self.worker.answer(t, self.component.questions()[self.component.members.index(self.position)])
        if self.manifest.wire == "float32":
            theta = theta.astype(np.float32).astype(np.float64)
        if not np.isfinite(theta).all():
            raise SolverError(f"round {t}: the parameters of site {self.names[self.position]!r} diverged: {TOO_LONG}")
        return theta

    def _finish(self, thetas: Mapping[int, Array]) -> None:
        before = self.theta.copy()
        with self._lock:
            self.component.finish(thetas)
            self.done = self.component.done
        self.status.change = float(np.abs(self.theta - before).max(initial=0.0))

    # --- rounds ---

    def _round(self, t: int) -> None:
        self.status.round = t
        try:
            if self.leads:
                self._lead(t)
            else:
                self._hear(t)
        except _Behind as behind:
            self._take_over(behind)
        self.tick()

    def _lead(self, t: int) -> None:
        own = self._own(t)
        self.inbox.advance(Kind.THETA, t, t + 1)
        self.send(Kind.THETA, t, own)
        thetas = {self.position: own}
        come = self.collect(self.neighbours, t, lambda u: self.pull(Kind.THETA, u, t))
        thetas |= {u: self.inbox.values(Kind.THETA, u, t) for u in come}
        here = np.isin(self.component.members, list(thetas))
        if self.record is not None:
            self._write_down(self.record, t, here, thetas)
        self._decided(here, thetas)
        self.send(Kind.PRESENT, t, here.astype(np.float64))
        if t % self.manifest.checkpoint_every == 0:
            self._save()
            if self.record is not None:
                self.record.unlink(missing_ok=True)

    def _decided(self, here: Mask, thetas: Mapping[int, Array]) -> None:
        self._finish(thetas)
        for u in (u for u, now in zip(self.component.members, here, strict=True) if not now):
            self.journal.sparingly("warning", "absent", peer=self.names[u], round=self.done)

    def _hear(self, t: int) -> None:
        own = self._own(t)
        self.inbox.advance(Kind.THETA, t, t + 1)
        self.inbox.advance(Kind.PRESENT, t, t + 1)
        self.inbox.advance(Kind.REPLICA, t, self.rounds)
        self.send(Kind.THETA, t, own)
        self.wait_for(Kind.PRESENT, [self.leader], t)
        told = self.inbox.values(Kind.PRESENT, self.leader, t)
        here = [u for u, now in zip(self.component.members, told, strict=True) if now > 0.5]
        others = [u for u in here if u != self.position]
        self.wait_for(Kind.THETA, others, t)
        thetas = {u: self.inbox.values(Kind.THETA, u, t) for u in others}
        if self.position in here:
            thetas[self.position] = own
        else:
            self.journal.sparingly("warning", "counted as absent", peer=self.names[self.leader], round=t)
        self._finish(thetas)

    def pull(self, kind: Kind, sender: int, t: int) -> None:
        super().pull(kind, sender, t)
        if not self.leads and kind in (Kind.THETA, Kind.PRESENT):
            # a sender may have died after the leader had its theta, or this site may be far behind
            super().pull(Kind.REPLICA, self.leader, t)

    def wait_for(self, kind: Kind, senders: list[int], t: int) -> None:
        if self.leads:
            super().wait_for(kind, senders, t)
            return
        reminders = Reminders(self.patience)
        while missing := self.inbox.missing(kind, senders, t):
            ahead = self.inbox.newest(Kind.REPLICA, self.leader, 0.0)
            if ahead is not None:
                raise _Behind(*ahead)
            now = time.monotonic()
            self.remind(reminders, kind, missing, t, now)
            if now - reminders.began > LOOK_SECONDS:
                self.tick()
            self.inbox.wait(kind, senders, t, max(min(reminders.next_pull - now, LOOK_SECONDS), 0.001))
        self.status.waiting_for = []

    def _take_over(self, behind: _Behind) -> None:
        with self._lock:
            try:
                self.component.take_vector(behind.vector, behind.round)
            except MessageError as error:
                peer = self.names[self.leader]
                self.journal.sparingly("warning", "message refused", peer=peer, kind="REPLICA", why=str(error))
                return
            was, self.done = self.done, self.component.done
        self.journal.write("info", "took over the leader's replica", round=self.done, was=was)
        self.look_around()

    # --- messages ---

    def expected(self, v: int) -> list[Expected]:
        usual = super().expected(v)
        if v != self.leader:
            return usual
        t, members = self.done + 1, len(self.component.members)
        return [
            *usual,
            Expected(self.run_bytes, Kind.PRESENT, v, members, t, t + 1, bound=1.0, bound_kind="max"),
            Expected(self.run_bytes, Kind.REPLICA, v, self.component.vector_length, t, self.rounds),
        ]

    def answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        if kind is not Kind.REPLICA:
            return super().answer(kind, v, t)
        with self._lock:
            if self.component.done < t:
                return None
            return self.frame(kind, self.component.done, self.component.to_vector())

    def awaited_at_the_end(self, waiting: list[int]) -> list[int]:
        return [u for u in waiting if self.names[u] in self.status.up]

    # --- what a leader writes down ---

    def _write_down(self, path: Path, t: int, here: Mask, thetas: Mapping[int, Array]) -> None:
        absent = np.zeros(self.manifest.n_params)
        parts = [thetas.get(u, absent) for u in self.component.members]
        frame = encode(self.run_bytes, Kind.PRESENT, self.position, t, np.concatenate([here.astype(float), *parts]))

        def write() -> None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # where the record of a round goes is known: half a record is written over
                first = (t - 1) % self.manifest.checkpoint_every
                os.pwrite(descriptor, frame, first * len(frame))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        self.hold(write, path, t, "record failed, holding")

    def _replay(self, path: Path) -> None:
        """Do the rounds again that were decided after the last checkpoint."""
        members, p = self.component.members, self.manifest.n_params
        size = HEADER_BYTES + 8 * len(members) * (1 + p)
        text = path.read_bytes() if path.exists() else b""
        for k in range(0, len(text), size):
            t = self.done + 1
            expected = Expected(self.run_bytes, Kind.PRESENT, self.position, len(members) * (1 + p), t, t)
            try:
                values = decode(text[k : k + size], expected).values
            except MessageError:
                continue  # older than the checkpoint, or half a record: that round was never announced
            here, thetas = values[: len(members)] > 0.5, values[len(members) :].reshape(-1, p)
            known = {u: theta for u, theta, now in zip(members, thetas, here, strict=True) if now}
            self._decided(here, known)
            self.remember(Kind.PRESENT, t, here.astype(np.float64))
            self.remember(Kind.THETA, t, known[self.position])

    def _save(self) -> None:
        if self.kept is not None:
            sent = self.unsaved(self.done)
            self.kept.save(self.done, self.component.state(), {"over": self.over}, sent, durable=True)
            self.kept.close()
            self.saved(self.done)

    def _load(self, kept: KeptState) -> None:
        found = kept.load()
        if found is not None:
            self.done, self.over = found.round, found.header["over"]
            self.recall(kept.sent())
            self.component.restore(found.arrays, self.done)
