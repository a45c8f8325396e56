"""Algorithm 2 without a central machine: every device of a component keeps a replica of the whole component.

A step for an absent device needs the duals around it, hence the thetas of *its* neighbours, which may be no neighbours
of who takes the step, and which an absent device cannot pass on. So devices of a component talk to all others of it,
not only to neighbours: a device that is there sends its theta to all, and all take the penalty's part of the step for
who is absent, each in its own replica. Replicas hold the same bits as long as all know the same devices to be absent.

Presence is what happens. One device of the component, the leader, says who was there in a round: those
whose theta it had got before the deadline. It writes that down, thetas included, before it says so. A device that has
missed a round, or was not there at all, takes over the leader's replica. Nobody decides in the leader's place: two
leaders on the two sides of a broken network would make two histories that no rule could join.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Mask
from fedkin.admm import Shard, ShardState
from fedkin.data import Rows
from fedkin.errors import SolverError
from fedkin.federate.central import NodeWorker
from fedkin.federate.contract.computation import rowless_shard
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.contract.plans import TOO_LONG
from fedkin.federate.journal import Journal
from fedkin.federate.kept import KeptState
from fedkin.federate.links import Transport
from fedkin.federate.links.neighbours import NeighbourLink
from fedkin.federate.messages import HEADER_BYTES, Expected, Kind, MessageError, decode, encode
from fedkin.federate.waiting import Patience, Reminders, hold_until

_LOOK_SECONDS = 0.2
_PARTS = ("theta", "balance", "balance_before", "average", "average_balance", "alpha")


class Component:
    """A replica of a component: thetas and duals of all its devices, and no rows.

    Parameters
    ----------
    manifest : Manifest
    members : sequence of int
        Positions of its devices, increasing.

    Attributes
    ----------
    done : int
        Rounds that are over.
    seen : int array (m,)
        Rounds in which each device was there.
    """

    def __init__(self, manifest: Manifest, members: Sequence[int]) -> None:
        self.members = list(members)
        self.shard: Shard = rowless_shard(manifest, self.members)
        self.done = 0
        self.seen = np.zeros(len(self.members), dtype=np.int64)

    def estimated(self) -> Array:
        """Estimated probabilities ``(m,)`` of being there in the next round."""
        return np.asarray((1.0 + self.seen) / (self.done + 1))

    def question(self, member: int, chance: Array) -> Array:
        """What a device must know for its own step in the next round: theta, pull, probability, ``(2p + 1,)``."""
        k = self.members.index(member)
        return np.concatenate([self.shard.theta[k], self.shard.pull()[k], chance[[k]]])

    def finish(self, thetas: Mapping[int, Array], chance: Array) -> None:
        """End the round, given the thetas ``(p,)`` of the devices that were there."""
        here = np.isin(self.members, list(thetas))
        self.shard.node_step(self.done + 1, np.zeros_like(here), chance)
        if thetas:
            present = np.array(sorted(thetas), dtype=np.int64)
            self.shard.take(present, np.stack([thetas[int(u)] for u in present]))
        self.shard.edge_step()
        self.seen = self.seen + here
        self.done += 1

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything that changes, except `done`."""
        return {**vars(self.shard.state()), "seen": self.seen.copy()}

    def restore(self, state: Mapping[str, NDArray[Any]], done: int) -> None:
        """Go back, or ahead, to a `state`."""
        known = vars(self.shard.state())
        self.shard.restore(ShardState(**{name: state.get(name, part) for name, part in known.items()}))
        self.seen, self.done = np.asarray(state["seen"], dtype=np.int64).copy(), done

    # --- as one vector ---

    def to_vector(self) -> Array:
        """The state as it travels."""
        state = self.state()
        return np.concatenate([*(state[name].ravel() for name in _PARTS), state["seen"].astype(np.float64)])

    @property
    def vector_length(self) -> int:
        m, p = self.shard.theta.shape
        return int((5 * m + self.shard.edges.shape[0]) * p + m)

    def take_vector(self, vector: Array, done: int) -> None:
        """Take over another replica.

        Raises
        ------
        MessageError
            When it cannot be a state after ``done`` rounds: duals outside their balls, or impossible counts.
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
    """A device of a component whose devices come and go; the first of them is the leader.

    Parameters
    ----------
    record : path, optional
        Where a leader writes down what it decided, round after round, until the next checkpoint.
    other parameters
        As of `fedkin.federate.peer.Device`. Only a leader needs a checkpoint.

    Attributes
    ----------
    history : list of bool arrays (m,)
        Of a leader: who was there in each round.
    """

    def __init__(
        self,
        manifest: Manifest,
        position: int,
        rows: Rows,
        transport: Transport,
        journal: Journal,
        *,
        checkpoint: Path | None = None,
        record: Path | None = None,
        patience: Patience | None = None,
        tick: Callable[[Any], None] | None = None,
    ) -> None:
        members = manifest.component(position)
        self.component = Component(manifest, members)
        self.worker = NodeWorker(manifest, position, rows)
        self.leader = manifest.leader(position)
        self.leads = position == self.leader
        self.history: list[Mask] = []
        self.record = record if self.leads else None
        self._lock = threading.Lock()
        others = [u for u in members if u != position]
        own_tick = None if tick is None else partial(tick, self)
        super().__init__(manifest, position, others, transport, journal, patience=patience, tick=own_tick)
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
            self._gather()
        self.status.state, self.status.round = "running", self.done
        while self.done < self.rounds:
            self._round(self.done + 1)
        if not self.over:
            self._save()
        self.journal.write("info", "finished", round=self.done)
        self.status.state = "finished"
        return np.asarray(self.component.shard.average[self.component.members.index(self.position)])

    def linger(self, on_end: Callable[[], None] | None = None) -> None:
        super().linger(on_end or self._save)

    @property
    def theta(self) -> Array:
        """The device's parameters ``(p,)``."""
        return np.asarray(self.component.shard.theta[self.component.members.index(self.position)])

    def _own(self, t: int, chance: Array) -> Array:
        question = self.component.question(self.position, chance)
        theta = self.worker.answer(t, question)
        if self.manifest.wire == "float32":
            theta = theta.astype(np.float32).astype(np.float64)
        if not np.isfinite(theta).all():
            raise SolverError(f"round {t}: the parameters of device {self.names[self.position]!r} diverged: {TOO_LONG}")
        return theta

    def _finish(self, thetas: Mapping[int, Array], chance: Array) -> None:
        before = self.theta.copy()
        self.component.finish(thetas, chance)
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

    def _gather(self) -> None:
        """Wait for the devices, so that a slow start is not taken for absence."""
        deadline = time.monotonic() + (self.patience.gather if self.done == 0 else self.patience.deadline)
        while len(self.status.up) < len(self.neighbours) and time.monotonic() < deadline:
            self.inbox.wait(Kind.THETA, self.neighbours, self.done + 1, _LOOK_SECONDS)
            self.tick()
        missing = [self.names[u] for u in self.neighbours if self.names[u] not in self.status.up]
        if missing:
            self.journal.write("warning", "starting without", peers=missing)

    def _lead(self, t: int) -> None:
        chance = self.component.estimated()
        own = self._own(t, chance)
        self.inbox.advance(Kind.THETA, t, t + 1)
        self.send(Kind.THETA, t, own)
        thetas = {self.position: own}
        thetas |= {u: self.inbox.values(Kind.THETA, u, t) for u in self._collect(t)}
        here = np.isin(self.component.members, list(thetas))
        if self.record is not None:
            self._write_down(self.record, t, here, thetas)
        self._decided(here, thetas, chance)
        self.send(Kind.PRESENT, t, here.astype(np.float64))
        if t % self.manifest.checkpoint_every == 0:
            self._save()
            if self.record is not None:
                self.record.unlink(missing_ok=True)

    def _decided(self, here: Mask, thetas: Mapping[int, Array], chance: Array) -> None:
        with self._lock:
            self._finish(thetas, chance)
        for u in (u for u, now in zip(self.component.members, here, strict=True) if not now):
            self.journal.sparingly("warning", "absent", peer=self.names[u], round=self.done)
        self.history.append(here)

    def _collect(self, t: int) -> list[int]:
        """Who has sent its theta: everybody who is up, or whoever has by the deadline."""
        began = time.monotonic()
        pause = self.patience.first_pull
        deadline, next_pull = began + self.patience.deadline, began + pause
        while True:
            missing = self.inbox.missing(Kind.THETA, self.neighbours, t)
            awaited = [u for u in missing if self.names[u] in self.status.up]
            now = time.monotonic()
            if not awaited or now >= deadline:
                break
            if now >= next_pull:
                for u in awaited:
                    self.pull(Kind.THETA, u, t)
                next_pull, pause = now + pause, min(2.0 * pause, self.patience.last_pull)
            self.status.waiting_for = [self.names[u] for u in awaited] if now - began > 1.0 else []
            self.inbox.wait(Kind.THETA, awaited, t, max(0.001, min(_LOOK_SECONDS, next_pull - now, deadline - now)))
            if now - began > _LOOK_SECONDS:
                self.tick()
        self.status.waiting_for = []
        for u in awaited:
            self.journal.sparingly("warning", "up, but no theta before the deadline", peer=self.names[u])
        return [u for u in self.neighbours if u not in missing]

    def _hear(self, t: int) -> None:
        chance = self.component.estimated()
        own = self._own(t, chance)
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
        with self._lock:
            self._finish(thetas, chance)

    def pull(self, kind: Kind, sender: int, t: int) -> None:
        super().pull(kind, sender, t)
        if not self.leads and kind in (Kind.THETA, Kind.PRESENT):
            # a sender may have died after the leader had its theta, or this device may be far behind
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
            if now - reminders.began > _LOOK_SECONDS:
                self.tick()
            self.inbox.wait(kind, senders, t, max(min(reminders.next_pull - now, _LOOK_SECONDS), 0.001))
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

        event = "record failed, holding"
        hold_until(write, path, t, self.status, self.journal, self.patience, self.tick, event)

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
            self._decided(here, known, self.component.estimated())
            self.remember(Kind.PRESENT, t, here.astype(np.float64))
            self.remember(Kind.THETA, t, known[self.position])

    def _save(self) -> None:
        if self.kept is not None:
            arrays = {**self.component.state(), "history": np.array(self.history, dtype=np.bool_)}
            self.kept.save(self.done, arrays, {"over": self.over}, self.unsaved(), durable=True)
            self.kept.close()
            self.saved()

    def _load(self, kept: KeptState) -> None:
        found = kept.load()
        if found is not None:
            self.done, self.over = found.round, found.header["over"]
            self.recall(kept.sent())
            self.component.restore(found.arrays, self.done)
            self.history = list(found.arrays["history"])
