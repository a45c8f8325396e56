"""Rounds between neighbours, whatever is computed in them: send a vector, wait for the neighbours' vectors, go on.

There is no global barrier: a device waits for its own neighbours only, and a neighbour is never more than one round
ahead. Nothing is ever skipped. A vector that does not arrive is pulled until it does.

What makes crashes harmless: the vector of round t is a function of the state after round t-1, and the kernel has that
state before the vector is sent (`trail`), so that a process that is killed goes on where it was. Now and
then it is also on the disk, as a checkpoint. A device whose machine lost power starts from there and computes the same
numbers again; the neighbours ignore what they know already and hand out their own last vectors, of which everybody
keeps as many as lie between two checkpoints, and two more.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.admm import load_checkpoint, save_checkpoint
from fedkin.errors import DataError, FedkinError, ModelFileError, ParameterError
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.inbox import Inbox
from fedkin.federate.journal import Journal
from fedkin.federate.links.memory import Transport
from fedkin.federate.messages import Expected, Kind, encode
from fedkin.federate.trail import Trail, boot_number

Array = NDArray[np.float64]
Arrays = dict[str, NDArray[np.generic]]

#: State of a device that cannot write what has to be written before it goes on.
HOLDING = "holding: no room for a checkpoint"
_DONE_SECONDS, _TICK_SECONDS, _LONGEST_SILENCE = 0.4, 0.5, 600.0


class PeerError(FedkinError, RuntimeError):
    """A device that cannot go on; starting it again continues where it was."""


class Stopped(FedkinError):
    """The device was asked to stop; starting it again continues where it was."""


@dataclass(frozen=True)
class Patience:
    """How long a device waits for what, in seconds.

    Attributes
    ----------
    first_pull, last_pull : float
        A theta that has not come is pulled after ``first_pull``, then again and again, up to ``last_pull`` apart.
    complain : float
        Time to the first log line about a wait; to the next ones it doubles, up to ten minutes.
    give_up : float
        A wait as long as this ends the process.
    linger : float
        How long a device that has finished stays to serve neighbours that have not.
    gather, deadline : float
        How long a central machine waits for devices before its first round, and for answers in a round.

    Raises
    ------
    ParameterError
        When one of them is not a number, or not above 0 (``linger``, ``gather`` and ``deadline`` may be 0).
    """

    first_pull: float = 0.25
    last_pull: float = 5.0
    complain: float = 5.0
    give_up: float = 3600.0
    linger: float = 600.0
    gather: float = 60.0
    deadline: float = 5.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_zero = name in ("linger", "gather", "deadline")
            if not (value > 0 or (may_be_zero and value == 0)):  # nor for nan
                least = "at least 0" if may_be_zero else "above 0"
                option = f"--{name.replace('_', '-')}"
                raise ParameterError(f"{option} must be a number of seconds {least}, got {value:g}")


@dataclass
class Status:
    """What an owner may want to know about a device while it runs."""

    round: int = 0
    change: float = float("nan")  # of theta in the last round
    waiting_for: list[str] = field(default_factory=list)
    up: set[str] = field(default_factory=set)
    state: str = "starting"
    pulled: int = 0
    repaired: int = 0
    started: float = field(default_factory=time.time)


def keys_of(manifest: Manifest, sender: int, receiver: int) -> dict[Kind, str]:
    """The keys under which ``sender`` writes what ``receiver`` reads."""
    name = manifest.members[sender].name
    keys = {Kind.THETA: f"{manifest.run}/theta/{name}", Kind.DONE: f"{manifest.run}/done/{name}"}
    if sender < receiver and manifest.compare_every:
        keys[Kind.ALPHA] = f"{manifest.run}/alpha/{name}/{manifest.members[receiver].name}"
    if manifest.placement == "replicas" and sender == manifest.leader(sender):
        keys[Kind.PRESENT], keys[Kind.REPLICA] = f"{manifest.run}/present/{name}", f"{manifest.run}/replica/{name}"
    return keys


def presence_key(manifest: Manifest, sender: int) -> str:
    """The key under which a device shows that it is there."""
    return f"{manifest.run}/live/{manifest.members[sender].name}"


def check_owner(checkpoint: Path | None, header: Mapping[str, Any], name: str) -> None:
    """Raise `DataError` when a state with this header was written by another device than ``name``."""
    if checkpoint is not None and header.get("device") != name:
        raise DataError(
            f"{checkpoint}, or {checkpoint.stem}.now beside it, is the state of {header.get('device')}, not of {name}: "
            f"put back that of {name}; docs/peer.md, 'A checkpoint is damaged', says what can be done without"
        )


class Reminders:
    """When to ask again for what is missing, and when to complain about it: ever less often.

    Parameters
    ----------
    patience : Patience
    """

    def __init__(self, patience: Patience) -> None:
        self.began = time.monotonic()
        self._end = self.began + patience.give_up
        self._pause, self._longest_pause, self._silence = patience.first_pull, patience.last_pull, patience.complain
        self.next_pull, self._next_complaint = self.began + self._pause, self.began + self._silence

    def pull_is_due(self, now: float) -> bool:
        """Whether to ask the senders."""
        return now >= self.next_pull

    def pulled(self, now: float) -> None:
        """They were asked."""
        self.next_pull, self._pause = now + self._pause, min(2.0 * self._pause, self._longest_pause)

    def complaint_is_due(self, now: float) -> bool:
        """Whether to tell the user."""
        return now >= min(self._next_complaint, self._end)

    def complained(self, now: float) -> None:
        """The user was told."""
        self._next_complaint, self._silence = now + self._silence, min(2.0 * self._silence, _LONGEST_SILENCE)


def hold_until(
    write: Callable[[], None],
    path: Path | None,
    round: int,
    status: Status,
    journal: Journal,
    patience: Patience,
    tick: Callable[[], None],
    event: str = "checkpoint failed, holding",
) -> None:
    """Call ``write`` until the disk takes it; log lines about failures come ever less often.

    Raises
    ------
    PeerError
        When it has not after ``patience.give_up`` seconds.
    """
    began = next_line = time.monotonic()
    silence, before = 1.0, status.state
    while True:
        try:
            write()
        except OSError as error:
            now = time.monotonic()
            if now >= next_line:
                journal.write("error", event, round=round, why=str(error), seconds=int(now - began))
                next_line, silence = now + silence, min(2.0 * silence, _LONGEST_SILENCE)
            if now - began > patience.give_up:
                raise PeerError(f"cannot write {path}: {error}; make room, then start again") from error
            status.state = HOLDING
            time.sleep(min(1.0, patience.complain, patience.give_up))
            tick()
        else:
            status.state = before
            return


class Lockstep(ABC):
    """A device that does rounds with its neighbours; what a round computes is for subclasses to say.

    A subclass sets up its arithmetic, then calls `load` and `open`.

    Parameters
    ----------
    manifest : Manifest
        Names, keys and files of the run.
    position : int
        Which device this is.
    neighbours : sequence of int
        With whom it exchanges.
    transport : Transport
    journal : Journal
    run : bytes, optional
        What messages and checkpoints are marked with, 8 bytes; the manifest's by default.
    rounds : int, optional
        Rounds to do; the manifest's by default.
    checkpoint : path, optional
        Where its state is kept.
    patience : Patience
    tick : callable, optional
        Called with this object after every round and twice a second while waiting; it may raise `Stopped`.
    """

    #: State shown while it runs.
    activity = "running"

    def __init__(
        self,
        manifest: Manifest,
        position: int,
        neighbours: Sequence[int],
        transport: Transport,
        journal: Journal,
        *,
        run: bytes | None = None,
        rounds: int | None = None,
        checkpoint: Path | None = None,
        patience: Patience | None = None,
        tick: Callable[[Any], None] | None = None,
    ) -> None:
        self.manifest, self.position, self.on_tick = manifest, position, tick
        self.neighbours = list(neighbours)
        self.transport, self.journal, self.checkpoint = transport, journal, checkpoint
        self.run_bytes = manifest.run_bytes if run is None else run
        self.rounds = manifest.rounds if rounds is None else rounds
        self.patience = patience or Patience()
        self.left: frozenset[int] = frozenset()
        self.status = Status()
        self.names = {u: manifest.members[u].name for u in [position, *self.neighbours]}
        self.inbox = Inbox(self.names, journal)
        self.done = 0  # rounds
        self.over = False  # all neighbours have said that they have finished, too
        self.keep = manifest.checkpoint_every + 2
        #: Own vectors of the last rounds, for those who ask.
        self.past: dict[Kind, dict[int, Array]] = {Kind.THETA: {}, Kind.ALPHA: {}, Kind.PRESENT: {}}
        self._trail: Trail | None = None
        self._hint = True  # somebody may be ahead of this device: pull at once
        self._slots: dict[tuple[Kind, int], Callable[[bytes], bool]] = {}

    # --- for subclasses ---

    @abstractmethod
    def step(self, t: int) -> Array:
        """Compute what the neighbours are told in round t."""

    @abstractmethod
    def learn(self, t: int) -> None:
        """End round t; `inbox` has the vectors of all neighbours."""

    @abstractmethod
    def state(self) -> Arrays:
        """Everything that changes."""

    @abstractmethod
    def restore(self, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any]) -> None:
        """Go back to a `state`; `done` is already that of the checkpoint."""

    def expected(self, v: int) -> list[Expected]:
        """What may come from neighbour v."""
        t = self.done + 1
        run, p, radius = self.run_bytes, self.manifest.n_params, self.manifest.radius
        return [
            Expected(run, Kind.THETA, v, p, t, t + 1, self.manifest.wire, radius),
            Expected(run, Kind.DONE, v, 0, self.rounds, self.rounds + 1),
        ]

    def header(self) -> dict[str, Any]:
        """What a checkpoint says beside its arrays."""
        return {"device": self.names[self.position], "left": sorted(self.left)}

    def tick(self) -> None:
        """Called after every round and twice a second while waiting; may raise `Stopped`."""
        if self.on_tick is not None:
            self.on_tick(self)

    # --- the rounds ---

    def run_rounds(self) -> None:
        """Do all rounds that are left."""
        self.status.state, self.status.round = self.activity, self.done
        while self.done < self.rounds:
            self._round(self.done + 1)
        if not self.over:
            self._save(final=True)
        self.journal.write("info", "finished", round=self.done)
        self.status.state = "finished"

    def _round(self, t: int) -> None:
        self.status.round = t
        values = self.step(t)
        # first open the window: a quick neighbour answers with its next vector before `_send` returns
        self.inbox.advance(Kind.THETA, t, t + 1)
        self._send(Kind.THETA, t, values)
        self._await(Kind.THETA, self.neighbours, t)
        self.learn(t)
        self.done = t
        self._settle(t)

    def _settle(self, t: int) -> None:
        """Keep the state after a round."""
        if t % self.manifest.checkpoint_every == 0:
            self._save()
        elif self._trail is not None:
            self._mark(self._trail)
        self.tick()

    def _remind(self, reminders: Reminders, kind: Kind, missing: list[int], t: int, now: float) -> None:
        """Ask for what is missing, and complain about it, where that is due."""
        if reminders.pull_is_due(now) or self._hint:
            self._hint = False
            for sender in missing:
                self._pull(kind, sender, t)
            reminders.pulled(now)
        if reminders.complaint_is_due(now):
            self._complain(kind, missing, t, now - reminders.began)
            reminders.complained(now)

    def _await(self, kind: Kind, senders: list[int], t: int) -> None:
        reminders = Reminders(self.patience)
        next_tick = reminders.began + _TICK_SECONDS
        missing = self.inbox.missing(kind, senders, t)
        while missing:
            now = time.monotonic()
            self._remind(reminders, kind, missing, t, now)
            if now >= next_tick:
                next_tick = now + _TICK_SECONDS
                self.tick()
                # a neighbour may have left for good meanwhile
                senders = [sender for sender in senders if sender not in self.left]
            missing = self.inbox.wait(kind, senders, t, max(min(reminders.next_pull, next_tick) - now, 0.001))
        self.status.waiting_for = []

    def _pull(self, kind: Kind, sender: int, t: int) -> None:
        def on_frame(frame: bytes) -> None:
            # nothing had been pushed: the sender is ahead of this device, so pull the next message at once, too
            self._hint = self._slots[kind, sender](frame) or self._hint

        self.status.pulled += 1
        self.transport.pull(keys_of(self.manifest, sender, self.position)[kind], t, on_frame)

    def _complain(self, kind: Kind, missing: list[int], t: int, seconds: float) -> None:
        names = [self.names[v] for v in missing]
        self.status.waiting_for = names
        down = [name for name in names if name not in self.status.up]
        self.journal.write(
            "warning", "waiting", round=t, kind=kind.name, peers=names, down=down, seconds=round(seconds, 1)
        )
        if seconds >= self.patience.give_up:
            raise PeerError(
                f"no {kind.name} of round {t} from {', '.join(names)} for {seconds:.0f} s: start them, then this device"
            )

    # --- the neighbours ---

    def open(self) -> None:
        """Begin to listen."""
        manifest, here = self.manifest, self.position
        for v in self.neighbours:
            keys = keys_of(manifest, v, here)
            for expected in self.expected(v):
                kind = expected.kind
                self._slots[kind, v] = self.inbox.expect(expected)
                self.transport.subscribe(keys[kind], self._slots[kind, v])
            self.transport.watch(presence_key(manifest, v), self._presence_of(v))
        outgoing = {key: (kind, v) for v in self.neighbours for kind, key in keys_of(manifest, here, v).items()}
        for key, (kind, v) in outgoing.items():
            self.transport.answer(key, self._answer(kind, v))
        self.transport.announce(presence_key(manifest, here))
        self.journal.write("info", "started", round=self.done, neighbours=[self.names[v] for v in self.neighbours])

    def _presence_of(self, v: int) -> Callable[[bool], None]:
        def on_presence(here: bool) -> None:
            name = self.names[v]
            (self.status.up.add if here else self.status.up.discard)(name)
            self.journal.write("info", "neighbour up" if here else "neighbour down", peer=name)
            if here:
                self._hint = True
                self.inbox.wake()

        return on_presence

    def _answer(self, kind: Kind, v: int) -> Callable[[int], bytes | None]:
        def on_pull(t: int) -> bytes | None:
            if kind is Kind.DONE:
                return self._frame(kind, t, np.zeros(0)) if self.done >= self.rounds == t else None
            held = self.past[kind]
            values = held.get(t)
            if values is None:
                if t < min(list(held), default=0):
                    self.journal.sparingly("warning", "asked for a round that is no longer kept", peer=self.names[v])
                return None
            return self._answer_with(kind, v, t, values)

        return on_pull

    def _answer_with(self, kind: Kind, v: int, t: int, values: Array) -> bytes | None:
        """The frame for neighbour v out of what is kept of round t."""
        return self._frame(kind, t, values)

    def _send(self, kind: Kind, t: int, values: Array) -> None:
        self._remember(kind, t, values)
        if self.neighbours:
            self.transport.publish(
                keys_of(self.manifest, self.position, self.position)[kind], self._frame(kind, t, values)
            )

    def _frame(self, kind: Kind, t: int, values: Array) -> bytes:
        wire = self.manifest.wire if kind is Kind.THETA else "float64"
        return encode(self.run_bytes, kind, self.position, t, values, wire)

    def _remember(self, kind: Kind, t: int, values: Array) -> None:
        # threads of the transport read this dictionary: single operations only
        held = self.past[kind]
        held[t] = values
        while (old := next(iter(held))) <= t - self.keep:  # rounds come in order
            del held[old]
        trail = self._trail
        if trail is not None:
            self._hold_until(lambda: trail.remember(kind, t, values))

    # --- the end ---

    def linger(self) -> None:
        """Stay until all neighbours have finished, since they may need the last vectors; not longer than `Patience`."""
        done = keys_of(self.manifest, self.position, self.position)[Kind.DONE]
        frame = self._frame(Kind.DONE, self.done, np.zeros(0))
        began = time.monotonic()
        deadline, silence = began + self.patience.linger, self.patience.complain
        next_word = began + min(silence, 2.0 * _DONE_SECONDS)
        waiting = [] if self.over else list(self.neighbours)
        while waiting and time.monotonic() < deadline:
            self.transport.publish(done, frame)
            for v in waiting:
                self._pull(Kind.DONE, v, self.done)
            missing = self.inbox.wait(Kind.DONE, self.neighbours, self.done, _DONE_SECONDS)
            waiting = self.awaited_at_the_end(missing)
            self.status.waiting_for = [self.names[v] for v in waiting]
            if not missing:
                self._note_the_end()
            now = time.monotonic()
            if waiting and now >= next_word:
                self._say_who_has_not_finished(deadline - now)
                next_word, silence = now + silence, min(2.0 * silence, _LONGEST_SILENCE)
            self.tick()
        if waiting:
            self.journal.write("warning", "left before all neighbours had finished", peers=self.status.waiting_for)
        elif self.neighbours:
            # somebody may have missed that this device has finished, and asks again
            self.transport.publish(done, frame)
            time.sleep(2.5 * _DONE_SECONDS)

    def _note_the_end(self) -> None:
        """Keep that nobody needs this device any more, for when it is started again."""
        self.over = True
        self._save(final=True)

    def _say_who_has_not_finished(self, seconds: float) -> None:
        names = self.status.waiting_for
        down = [name for name in names if name not in self.status.up]
        self.journal.write(
            "info", "finished, staying for neighbours that have not", peers=names, down=down, at_most=round(seconds, 1)
        )

    def awaited_at_the_end(self, waiting: list[int]) -> list[int]:
        """Whose end this device waits for, of those that have not said that they have finished."""
        return waiting

    # --- checkpoints ---

    def _save(self, *, final: bool = False) -> None:
        """Write the state after a round; hold the device where it is until that has succeeded."""
        if self.checkpoint is None:
            return
        arrays = self.state()
        for kind, held in self.past.items():
            # the vectors of a run may have different lengths
            parts = [held[t] for t in sorted(held)]
            arrays[f"past_{kind.name}_rounds"] = np.array(sorted(held), dtype=np.int64)
            arrays[f"past_{kind.name}_lengths"] = np.array([part.size for part in parts], dtype=np.int64)
            arrays[f"past_{kind.name}"] = np.concatenate([np.zeros(0), *parts])
        header = {"round": self.done, "final": final, "over": self.over, **self.header()}
        place = self.checkpoint
        self._hold_until(lambda: save_checkpoint(place, self.run_bytes.hex(), arrays, header))
        if self._trail is not None:
            self._trail.forget()

    def _mark(self, trail: Trail) -> None:
        arrays, header = self.state(), self.header()
        self._hold_until(lambda: trail.mark(self.done, arrays, header))

    def _hold_until(self, write: Callable[[], None]) -> None:
        hold_until(write, self.checkpoint, self.done, self.status, self.journal, self.patience, self.tick)

    def load(self) -> None:
        """Go back to where the device was: to its checkpoint, if there is one, and on along its trail."""
        if self.checkpoint is None:
            return
        if self.checkpoint.exists():
            self._load_checkpoint(self.checkpoint)
        boot = boot_number()
        if boot is not None:
            self._trail = Trail(self.checkpoint, self.run_bytes, boot)
            self._follow(self._trail)

    def _follow(self, trail: Trail) -> None:
        found, sent = trail.last(), trail.sent()
        # whoever removes a checkpoint wants to start from round 0
        most = self.done + self.manifest.checkpoint_every
        if found is None or not self.done < found[1]["round"] < most:
            trail.forget()
            return
        arrays, header = found
        self._check_owner(header)
        self.done = int(header["round"])
        for kind, t, values in sent:
            if t <= self.done:
                self.past[Kind(kind)][t] = values
        self.restore(arrays, header)

    def _check_owner(self, header: Mapping[str, Any]) -> None:
        check_owner(self.checkpoint, header, self.names[self.position])

    def _load_checkpoint(self, place: Path) -> None:
        try:
            arrays, header = load_checkpoint(place, self.run_bytes.hex())
        except ModelFileError as error:
            raise ModelFileError(f"{error}; docs/peer.md, 'A checkpoint is damaged', says what can be done") from None
        self._check_owner(header)
        self.done, self.over = int(header["round"]), bool(header.get("over", False))
        for kind in self.past:
            ends = np.cumsum(arrays[f"past_{kind.name}_lengths"])
            parts = np.split(arrays[f"past_{kind.name}"], ends)[:-1]
            self.past[kind] = dict(zip(arrays[f"past_{kind.name}_rounds"].tolist(), parts, strict=True))
        self.restore(arrays, header)
