"""Algorithm 2 between processes: a central machine S holds all edge state, sites come and go.

In each round S sends every site its theta, the pull of its edges and its probability of being there (2p + 1 numbers);
a site that is there answers with its theta after the node step (p numbers). S waits for sites that are up, at most
until the deadline of the round; who has not answered counts as absent, gets the penalty's part of its step, and is seen
less often: gradients are divided by the share ``p_i(t) = (1 + rounds seen before t) / t``. A site keeps no state, so
it may die and come back at any time. What S remembers is in its checkpoint, and S goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Mask
from fedkin.admm import Shard, ShardState
from fedkin.data import Rows
from fedkin.federate.frames import Expected, Kind, encode
from fedkin.federate.journal import Journal
from fedkin.federate.kept import KeptState
from fedkin.federate.links import Transport
from fedkin.federate.manifest import Manifest, star_key
from fedkin.federate.messages import CENTRE
from fedkin.federate.post import Post
from fedkin.federate.reading import rowless_shard, shard_of
from fedkin.federate.waiting import LOOK_SECONDS, Patience, PeerError, Tick


class Hub:
    """Thetas and duals of m sites, and no rows: what S knows, or a replica of a component. No network here.

    ``members`` are their numbers, increasing (all by default), ``seen (m,)`` the rounds in which each was there,
    ``presence`` a bool array ``(m,)`` for every round that was finished here.
    """

    def __init__(self, manifest: Manifest, members: Sequence[int] | None = None) -> None:
        self.manifest = manifest
        self.members = list(manifest.numbers if members is None else members)
        self.shard: Shard = rowless_shard(manifest, self.members)
        self.done = 0
        self.seen = np.zeros(len(self.members), dtype=np.int64)
        self.presence: list[Mask] = []

    def questions(self) -> Array:
        """What sites must know for their step in the next round, ``(m, 2p + 1)``: theta, pull, chance to be there."""
        return np.concatenate([self.shard.theta, self.shard.pull(), self._chance()[:, None]], axis=1)

    def _chance(self) -> Array:
        return np.asarray((1.0 + self.seen) / (self.done + 1))

    def finish(self, thetas: Mapping[int, Array]) -> None:
        """End the round, given the thetas ``(p,)`` of the sites that were there."""
        here = np.isin(self.members, list(thetas))
        self.shard.node_step(self.done + 1, here, self._chance())
        if thetas:
            present = np.array(sorted(thetas), dtype=np.int64)
            self.shard.take(present, np.stack([thetas[int(u)] for u in present]))
        self.shard.edge_step()
        self.seen = self.seen + here
        self.presence.append(here)
        self.done += 1

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything that changes, except `done`."""
        presence = np.array(self.presence, dtype=np.bool_)
        return {**vars(self.shard.state()), "seen": self.seen.copy(), "presence": presence}

    def restore(self, state: Mapping[str, NDArray[Any]], done: int) -> None:
        """Go back, or ahead, to a `state`, or to those parts of it that are given."""
        known = vars(self.shard.state())
        self.shard.restore(ShardState(**{name: state.get(name, part) for name, part in known.items()}))
        self.seen, self.done = np.asarray(state["seen"], dtype=np.int64).copy(), done
        self.presence = list(state.get("presence", self.presence))


class NodeWorker:
    """What a site of a central placement does in a round, without any network."""

    def __init__(self, manifest: Manifest, rows: Rows) -> None:
        others = [v for v in manifest.numbers if v != manifest.here]
        self.p = manifest.n_params
        self.shard = shard_of(manifest, {manifest.here: rows}, without=others)

    def answer(self, t: int, question: Array) -> Array:
        """Theta ``(p,)`` after the node step of round t, given a line of `Hub.questions`."""
        theta, pull, chance = question[: self.p], question[self.p : 2 * self.p], question[2 * self.p :]
        # 2 s - s is s, to the bit: this site has no edges of its own, S has told it the sum
        told = replace(self.shard.state(), theta=theta[None], balance=pull[None], balance_before=pull[None])
        self.shard.restore(told)
        with np.errstate(over="ignore", invalid="ignore"):
            self.shard.node_step(t, np.ones(1, dtype=np.bool_), np.clip(chance, 1e-9, 1.0))
        return np.array(self.shard.theta[0])


class Centre(Post):
    """The central machine S; its state is in ``checkpoint``."""

    def __init__(
        self,
        manifest: Manifest,
        transport: Transport,
        journal: Journal,
        *,
        checkpoint: Path | None = None,
        patience: Patience | None = None,
        tick: Tick | None = None,
    ) -> None:
        names = {member.number: member.name for member in manifest.members}
        super().__init__(manifest, transport, journal, names, patience, tick)
        self.position = manifest.n_sites
        self.hub = Hub(manifest)
        self._down: dict[int, bytes] = {}
        self._results: dict[int, bytes] = {}
        self.kept: KeptState | None = None
        if checkpoint is not None:
            self.kept = KeptState(checkpoint, manifest.run, manifest.revision, CENTRE, self.hold)
        self._restore()
        self._open()

    def run(self) -> Array:
        """Do all rounds that are left, and return the averaged parameters ``(V, p)``."""
        if self.done < self.manifest.rounds:
            self.gather(list(self.names), self.done + 1, self.patience.gather)
        self.status.state, self.status.round = "running", self.done
        try:
            while self.done < self.manifest.rounds:
                self._round(self.done + 1)
                self.tick()
            self._save()
        finally:
            if self.kept is not None:
                self.kept.close()
        self.status.state = "finished"
        self.journal.write("info", "finished", round=self.done)
        return self.hub.shard.average

    @property
    def done(self) -> int:
        """Rounds that are over."""
        return self.hub.done

    def _round(self, t: int) -> None:
        self.status.round = t
        before = self.hub.shard.theta.copy()
        self.inbox.advance(Kind.THETA, t, t)
        for u, question in zip(self.hub.members, self.hub.questions(), strict=True):
            self._down[u] = encode(self.manifest.run_bytes, Kind.DOWN, self.position, t, question)
            if self.names[u] in self.status.up:
                self.transport.publish(star_key(self.manifest, "down", self.names[u]), self._down[u])
        come = self.collect(list(self.names), t, partial(self._ask_again, t), least=1)
        self.hub.finish({u: self.inbox.values(Kind.THETA, u, t) for u in come})
        self.status.change = float(np.abs(self.hub.shard.theta - before).max(initial=0.0))
        if t % self.manifest.checkpoint_every == 0:
            self._save()

    def _ask_again(self, t: int, u: int) -> None:
        self.status.pulled += 1
        self.transport.publish(star_key(self.manifest, "down", self.names[u]), self._down[u])
        self.transport.pull(star_key(self.manifest, "theta", self.names[u]), t, self._slots[u])

    def linger(self) -> None:
        """Hand out the results, until all sites have them or the time is over."""
        for u in self.names:
            result = self.hub.shard.average[self.hub.members.index(u)]
            self._results[u] = encode(self.manifest.run_bytes, Kind.RESULT, self.position, self.done, result)
        deadline = time.monotonic() + self.patience.linger
        everybody = list(self.names)
        waiting = everybody
        while waiting and time.monotonic() < deadline:
            for u in waiting:
                self.transport.publish(star_key(self.manifest, "result", self.names[u]), self._results[u])
            waiting = self.inbox.wait(Kind.DONE, everybody, self.done, 2 * LOOK_SECONDS)
            self.status.waiting_for = [self.names[u] for u in waiting]
            self.tick()
        if waiting:
            self.journal.write("warning", "left before all sites had their result", peers=self.status.waiting_for)

    # --- sites ---

    def _open(self) -> None:
        manifest = self.manifest
        self._slots = {}
        for u, name in self.names.items():
            t = self.done + 1
            theta = Expected(manifest.run_bytes, Kind.THETA, u, manifest.n_params, t, t, manifest.wire, manifest.radius)
            self._slots[u] = self.inbox.expect(theta)
            self.transport.subscribe(star_key(manifest, "theta", name), self._slots[u])
            done = Expected(manifest.run_bytes, Kind.DONE, u, 0, manifest.rounds, manifest.rounds)
            self.transport.subscribe(star_key(manifest, "done", name), self.inbox.expect(done))
            self.transport.answer(star_key(manifest, "down", name), _whatever_round(self._down, u))
            self.transport.answer(star_key(manifest, "result", name), _whatever_round(self._results, u))
            self.transport.watch(star_key(manifest, "live", name), self._presence_of(u))
        self.transport.announce(star_key(manifest, "live", CENTRE))
        self.journal.write("info", "started", round=self.done)

    def _presence_of(self, u: int) -> Callable[[bool], None]:
        def on_presence(here: bool) -> None:
            self.note_presence(self.names[u], here)
            self.journal.sparingly("info", "site up" if here else "site down", peer=self.names[u])
            self.inbox.wake()

        return on_presence

    # --- its state ---

    def _save(self) -> None:
        if self.kept is not None:
            self.kept.save(self.done, self.hub.state(), {}, durable=True)

    def _restore(self) -> None:
        found = None if self.kept is None else self.kept.load()
        if found is not None:
            self.hub.restore(found.arrays, found.round)


def _whatever_round(frames: dict[int, bytes], u: int) -> Callable[[int], bytes | None]:
    def on_pull(t: int) -> bytes | None:
        return frames.get(u)

    return on_pull


class Worker(Post):
    """A site of a central placement: answers S until the result comes. It keeps nothing between rounds."""

    def __init__(
        self,
        manifest: Manifest,
        rows: Rows,
        transport: Transport,
        journal: Journal,
        *,
        patience: Patience | None = None,
        tick: Tick | None = None,
    ) -> None:
        centre, p, rounds = manifest.n_sites, manifest.n_params, manifest.rounds
        super().__init__(manifest, transport, journal, {centre: CENTRE}, patience, tick)
        self.name = manifest.name(self.position)
        self.worker = NodeWorker(manifest, rows)
        self._answer: tuple[int, bytes] = (0, b"")
        run = manifest.run_bytes
        self._on_down = self.inbox.expect(Expected(run, Kind.DOWN, centre, 2 * p + 1, 1, rounds))
        self._on_result = self.inbox.expect(Expected(run, Kind.RESULT, centre, p, rounds, rounds))
        transport.subscribe(star_key(manifest, "down", self.name), self._on_down)
        transport.subscribe(star_key(manifest, "result", self.name), self._on_result)
        transport.answer(star_key(manifest, "theta", self.name), self._on_pull)
        transport.watch(star_key(manifest, "live", CENTRE), self._on_centre)
        transport.announce(star_key(manifest, "live", self.name))
        journal.write("info", "started")

    def run(self) -> Array:
        """Answer until the result ``(p,)`` is there."""
        self.status.state = "running"
        heard = time.monotonic()
        centre = self.manifest.n_sites
        next_pull = heard + self.patience.first_pull
        while self.inbox.missing(Kind.RESULT, [centre], self.manifest.rounds):
            message = self.inbox.newest(Kind.DOWN, centre, LOOK_SECONDS)
            now = time.monotonic()
            if message is not None:
                self._step(*message)
                heard, next_pull = now, now + self.patience.last_pull
            elif now >= next_pull:
                self._pull()
                next_pull = now + self.patience.last_pull
            if now - heard > self.patience.give_up:
                raise PeerError(f"nothing from the central machine for {now - heard:.0f} s: start it, then this site")
            self.tick()
        self.status.state, self.status.round = "finished", self.manifest.rounds
        self.transport.publish(
            star_key(self.manifest, "done", self.name),
            encode(self.manifest.run_bytes, Kind.DONE, self.position, self.manifest.rounds, np.zeros(0)),
        )
        return self.inbox.values(Kind.RESULT, centre, self.manifest.rounds)

    def _step(self, t: int, values: Array) -> None:
        """Answer S. A round may come again: S repeats itself, or has gone back to its checkpoint."""
        self.status.round = t
        moved = self.worker.answer(t, values)
        self.status.change = float(np.abs(moved - values[: moved.size]).max(initial=0.0))
        self._answer = t, encode(self.manifest.run_bytes, Kind.THETA, self.position, t, moved, self.manifest.wire)
        self.transport.publish(star_key(self.manifest, "theta", self.name), self._answer[1])

    def _on_pull(self, t: int) -> bytes | None:
        held, frame = self._answer
        return frame if held == t else None

    def _on_centre(self, here: bool) -> None:
        self.note_presence(CENTRE, here)
        self.journal.write("info", "central machine up" if here else "central machine down")
        if here:
            self._pull()

    def _pull(self) -> None:
        self.status.pulled += 1
        self.transport.pull(star_key(self.manifest, "down", self.name), 0, self._on_down)
        self.transport.pull(star_key(self.manifest, "result", self.name), 0, self._on_result)
