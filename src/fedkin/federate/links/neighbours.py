"""Lock-step rounds between neighbours over any transport: send a vector, wait for the neighbours' vectors.

There is no global barrier: a site waits for its own neighbours only, and a neighbour is never more than one round
ahead. Nothing is ever skipped. A vector that does not arrive is pulled until it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from fedkin._base import Array, Index
from fedkin.admm import Sent
from fedkin.federate.frames import Expected, Kind, encode
from fedkin.federate.journal import Journal
from fedkin.federate.links import Transport
from fedkin.federate.manifest import Manifest, asking_keys, keys_of, presence_key
from fedkin.federate.post import Post
from fedkin.federate.waiting import LONGEST_SILENCE, Patience, PeerError, Reminders

_DONE_SECONDS, _TICK_SECONDS, _MOMENT_SECONDS = 0.4, 0.5, 0.02


class NeighbourLink(Post):
    """The link of one site to its neighbours (`fedkin.admm.Link`).

    ``tick`` is called twice a second while waiting; ``idle`` when a wait gets longer.

    ``over`` says whether all neighbours have finished, too; ``past`` holds own vectors of the last rounds for who asks.
    """

    def __init__(
        self,
        manifest: Manifest,
        neighbours: Sequence[int],
        transport: Transport,
        journal: Journal,
        *,
        patience: Patience | None = None,
        tick: Callable[[], None] | None = None,
        idle: Callable[[], None] | None = None,
    ) -> None:
        names = {u: manifest.name(u) for u in [manifest.here, *neighbours]}
        super().__init__(manifest, transport, journal, names, patience, tick)
        self.neighbours = list(neighbours)
        self.run_bytes = manifest.run_bytes
        self.rounds = manifest.rounds
        self.idle: Callable[[], None] = idle or (lambda: None)
        self.left: frozenset[int] = frozenset()
        self.done, self.over = 0, False
        self.keep = manifest.checkpoint_every + 2
        self.past: dict[Kind, dict[int, Array]] = {Kind.THETA: {}, Kind.ALPHA: {}, Kind.PRESENT: {}}
        self._unsaved: list[Sent] = []
        self._own_keys = keys_of(manifest, self.position, self.position)
        self._positions: Index = np.zeros(0, dtype=np.int64)
        self._hint = True  # somebody may be ahead of this site: pull at once
        self._slots: dict[tuple[Kind, int], Callable[[bytes], bool]] = {}

    @property
    def name(self) -> str:
        """The name of this site."""
        return self.names[self.position]

    # --- the rounds ---

    def exchange(self, t: int, positions: Index, thetas: Array) -> tuple[Index, Array]:
        """Send theta ``(1, p)`` of this site, and wait for those of the neighbours of round t."""
        self.status.round = t
        # first open the window: a quick neighbour answers with its next vector before `send` returns
        self.inbox.advance(Kind.THETA, t, t + 1)
        self.send(Kind.THETA, t, thetas.reshape(-1))
        self.wait_for(Kind.THETA, self.neighbours, t)
        # a neighbour may have left for good meanwhile
        if len(self._positions) != len(self.neighbours):
            self._positions = np.array(self.neighbours, dtype=np.int64)
        values = [self.inbox.values(Kind.THETA, v, t) for v in self.neighbours]
        return self._positions, np.array(values).reshape(-1, thetas.shape[1])

    def send(self, kind: Kind, t: int, values: Array) -> None:
        """Send a vector to all neighbours, and keep it for those who ask."""
        self.remember(kind, t, values)
        if self.neighbours:
            self.transport.publish(self._own_keys[kind], self.frame(kind, t, values))

    def remember(self, kind: Kind, t: int, values: Array) -> None:
        """Keep a vector for those who ask."""
        # threads of the transport read this dictionary: single operations only
        held = self.past[kind]
        held[t] = values
        while (old := next(iter(held))) <= t - self.keep:  # rounds come in order
            del held[old]
        self._unsaved.append(Sent(kind, t, values))
        del self._unsaved[: -len(self.past) * self.keep]

    def unsaved(self, t: int) -> list[Sent]:
        """What was sent up to round t and not yet `saved`."""
        return [one for one in self._unsaved if one.round <= t]

    def saved(self, t: int) -> None:
        """What was sent up to round t is on the disk."""
        self._unsaved = [one for one in self._unsaved if one.round > t]

    def recall(self, sent: Sequence[Sent]) -> None:
        """Take back what was sent before this process began."""
        for one in sent:
            if self.done - self.keep < one.round <= self.done:
                self.past[Kind(one.kind)][one.round] = one.values

    def wait_for(self, kind: Kind, senders: list[int], t: int) -> None:
        """Wait for the messages of round t, and pull them where they do not come."""
        # in nearly every round that is all
        missing = self.inbox.wait(kind, senders, t, 0.0 if self._hint else _MOMENT_SECONDS)
        if missing:
            self.idle()
            self._wait_longer(kind, senders, t, missing)
        self.status.waiting_for = []

    def _wait_longer(self, kind: Kind, senders: list[int], t: int, missing: list[int]) -> None:
        reminders = Reminders(self.patience)
        next_tick = reminders.began + _TICK_SECONDS
        while missing:
            now = time.monotonic()
            self.remind(reminders, kind, missing, t, now)
            if now >= next_tick:
                next_tick = now + _TICK_SECONDS
                self.tick()
                # a neighbour may have left for good meanwhile
                senders = [sender for sender in senders if sender not in self.left]
            missing = self.inbox.wait(kind, senders, t, max(min(reminders.next_pull, next_tick) - now, 0.001))

    def remind(self, reminders: Reminders, kind: Kind, missing: list[int], t: int, now: float) -> None:
        """Ask for what is missing, and complain about it, where that is due."""
        if reminders.pull_is_due(now) or self._hint:
            self._hint = False
            for sender in missing:
                self.pull(kind, sender, t)
            reminders.pulled(now)
        if reminders.complaint_is_due(now):
            self._complain(kind, missing, t, now - reminders.began)
            reminders.complained(now)

    def pull(self, kind: Kind, sender: int, t: int) -> None:
        """Ask a neighbour for the message of a round."""

        def on_frame(frame: bytes) -> None:
            # nothing had been pushed: the sender is ahead of this site, so pull the next message at once, too
            self._hint = self._slots[kind, sender](frame) or self._hint

        self.status.pulled += 1
        self.transport.pull(asking_keys(self.manifest, sender, self.position)[kind], t, on_frame)

    def look_around(self) -> None:
        """Pull at once in the next wait: somebody may be ahead."""
        self._hint = True

    def _complain(self, kind: Kind, missing: list[int], t: int, seconds: float) -> None:
        names = [self.names[v] for v in missing]
        self.status.waiting_for = names
        down = [name for name in names if name not in self.status.up]
        self.journal.write(
            "warning", "waiting", round=t, kind=kind.name, peers=names, down=down, seconds=round(seconds, 1)
        )
        if seconds >= self.patience.give_up:
            whom = self.inbox.in_words(missing, self.status.up)
            which = f"{kind.name} of round {t}" if t else kind.name
            raise PeerError(f"no {which} for {seconds:.0f} s from {whom}")

    # --- the neighbours ---

    def open(self) -> None:
        """Begin to listen."""
        manifest, here = self.manifest, self.position
        for v in self.neighbours:
            keys = keys_of(manifest, v, here)
            for expected in self.expected(v):
                kind = expected.kind
                self._slots[kind, v] = self.inbox.expect(expected)
                self.transport.subscribe(keys[kind], self.inbox.line((kind, v)))
            self.transport.watch(presence_key(manifest, v), partial(self._on_presence, v))
            for kind, key in asking_keys(manifest, here, v).items():
                self.transport.answer(key, partial(self.answer, kind, v))
        self.transport.announce(presence_key(manifest, here))
        self.journal.write("info", "started", round=self.done, neighbours=[self.names[v] for v in self.neighbours])

    def expected(self, v: int) -> list[Expected]:
        """What may come from neighbour v."""
        run, manifest, t = self.run_bytes, self.manifest, self.done + 1
        return [
            Expected(run, Kind.THETA, v, manifest.n_params, t, t + 1, manifest.wire, manifest.radius),
            Expected(run, Kind.DONE, v, 0, self.rounds, self.rounds + 1),
        ]

    def _on_presence(self, v: int, here: bool) -> None:
        name = self.names[v]
        self.note_presence(name, here)
        self.journal.sparingly("info", "neighbour up" if here else "neighbour down", peer=name)
        if here:
            self._hint = True
            self.inbox.wake()

    def answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        """The frame that neighbour v asks for; None when there is none."""
        if kind is Kind.DONE:
            return self.frame(kind, t, np.zeros(0)) if self.done >= self.rounds == t else None
        held = self.past[kind]
        values = held.get(t)
        if values is None:
            if t < min(list(held), default=0):
                self.journal.sparingly("warning", "asked for a round that is no longer kept", peer=self.names[v])
            return None
        return self.frame(kind, t, values)

    def frame(self, kind: Kind, t: int, values: Array) -> bytes:
        """A message of this site."""
        wire = self.manifest.wire if kind is Kind.THETA else "float64"
        return encode(self.run_bytes, kind, self.position, t, values, wire)

    def drop(self, gone: frozenset[int]) -> frozenset[int]:
        """Go on without neighbours that have left for good; returns those that had not been dropped before."""
        gone = (gone & set(self.neighbours)) - self.left
        self.left = self.left | gone
        self.neighbours = [v for v in self.neighbours if v not in gone]
        for v in sorted(gone):
            self.inbox.forget(v)
            self.journal.write("warning", "edge dropped", peer=self.names[v], round=self.done)
        return gone

    # --- the end ---

    def linger(self, on_end: Callable[[], None] | None = None) -> None:
        """Stay until all neighbours have finished, since they may need the last vectors; not longer than `Patience`.

        ``on_end`` is called when nobody needs this site any more, to keep that for when it is started again.
        """
        done = self._own_keys[Kind.DONE]
        frame = self.frame(Kind.DONE, self.done, np.zeros(0))
        began = time.monotonic()
        deadline, silence = began + self.patience.linger, self.patience.complain
        next_word = began + min(silence, 2.0 * _DONE_SECONDS)
        waiting = [] if self.over else list(self.neighbours)
        while waiting and time.monotonic() < deadline:
            self.transport.publish(done, frame)
            for v in waiting:
                self.pull(Kind.DONE, v, self.done)
            missing = self.inbox.wait(Kind.DONE, self.neighbours, self.done, _DONE_SECONDS)
            waiting = self.awaited_at_the_end(missing)
            self.status.waiting_for = [self.names[v] for v in waiting]
            if not missing:
                self.over = True
                if on_end is not None:
                    on_end()
            now = time.monotonic()
            if waiting and now >= next_word:
                self._say_who_has_not_finished(deadline - now)
                next_word, silence = now + silence, min(2.0 * silence, LONGEST_SILENCE)
            self.tick()
        if waiting:
            self.journal.write("warning", "left before all neighbours had finished", peers=self.status.waiting_for)
        elif self.neighbours:
            # somebody may have missed that this site has finished, and asks again
            self.transport.publish(done, frame)
            time.sleep(2.5 * _DONE_SECONDS)

    def awaited_at_the_end(self, waiting: list[int]) -> list[int]:
        """Whose end this site waits for, of those that have not said that they have finished."""
        return waiting

    def _say_who_has_not_finished(self, seconds: float) -> None:
        names = self.status.waiting_for
        down = [name for name in names if name not in self.status.up]
        self.journal.write(
            "info", "finished, staying for neighbours that have not", peers=names, down=down, at_most=round(seconds, 1)
        )
