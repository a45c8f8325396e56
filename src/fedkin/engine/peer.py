"""One device in the field: a shard of one, a transport, and a checkpoint.

A round is: node step, tell the neighbours theta, wait for theirs, edge step. There is no global barrier: a device waits
for its own neighbours only, and a neighbour is never more than one round ahead. Nothing is ever skipped. A theta that
does not arrive is pulled until it does.

What makes crashes harmless: theta of round t is a function of the state after round t-1. A device that starts again
from its checkpoint computes the same numbers again; the neighbours ignore what they know already and hand out their own
last thetas, of which everybody keeps as many as lie between two checkpoints, and two more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkin.engine.checkpoint import load_checkpoint, save_checkpoint
from fedkin.engine.inbox import Inbox
from fedkin.engine.journal import Journal
from fedkin.engine.manifest import Manifest, Rows
from fedkin.engine.messages import Expected, Kind, encode
from fedkin.engine.transport import Transport
from fedkin.errors import FedkinError, ModelFileError, SolverError

Array = NDArray[np.float64]

#: Differences between the replicas of an edge dual up to this share of its bound are rounding of different processors.
SAME_DUAL = 1e-9
_DONE_SECONDS, _TICK_SECONDS, _LONGEST_SILENCE = 0.4, 0.5, 600.0
_BOUND_KIND = {"l1": "max", "l2": "length", "linf": "sum"}  # dual norms of the penalties


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
    """

    first_pull: float = 0.25
    last_pull: float = 5.0
    complain: float = 5.0
    give_up: float = 3600.0
    linger: float = 600.0
    gather: float = 60.0
    deadline: float = 5.0


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
    return keys


def presence_key(manifest: Manifest, sender: int) -> str:
    """The key under which a device shows that it is there."""
    return f"{manifest.run}/live/{manifest.members[sender].name}"


class Device:
    """A device process without the process: `run` does all rounds.

    Parameters
    ----------
    manifest : Manifest
    position : int
        Which device this is.
    rows : Rows
        Its rows.
    transport : Transport
    journal : Journal
    checkpoint : path, optional
        Where its state is kept.
    patience : Patience
    left : set of int
        Positions of neighbours that have left for good.
    tick : callable, optional
        Called after every round and twice a second while waiting; it may raise `Stopped`.
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
        patience: Patience | None = None,
        left: frozenset[int] = frozenset(),
        tick: Callable[[Device], None] | None = None,
    ) -> None:
        self.manifest, self.position, self.rows = manifest, position, rows
        self.transport, self.journal, self.checkpoint = transport, journal, checkpoint
        self.patience, self.tick = patience or Patience(), tick
        self.left: frozenset[int] = frozenset()
        self.status = Status()
        self.shard = manifest.shard({position: rows})
        assert self.shard.gradients is not None
        self.gradients = self.shard.gradients
        self.neighbours = [int(v) for v in self.shard.foreign]
        names = {u: manifest.members[u].name for u in [position, *self.neighbours]}
        self.inbox = Inbox(names, journal)
        self.names = names
        self.done = 0  # rounds
        self.keep = manifest.checkpoint_every + 2
        #: Own thetas and duals of the last rounds, for those who ask.
        self.past: dict[Kind, dict[int, Array]] = {Kind.THETA: {}, Kind.ALPHA: {}}
        self._hint = True  # somebody may be ahead of this device: pull at once
        self._restore()
        if left:
            self.drop(left)
        self._open()

    # --- the rounds ---

    def run(self) -> Array:
        """Do all rounds that are left, and return the averaged parameters ``(p,)``."""
        self.status.state = "running"
        while self.done < self.manifest.rounds:
            self._round(self.done + 1)
        self._save(final=True)
        self.journal.write("info", "finished", round=self.done)
        self.status.state = "finished"
        return np.asarray(self.shard.average[0])

    def _round(self, t: int) -> None:
        self.status.round = t
        before = self.shard.theta[0].copy()
        with np.errstate(over="ignore", invalid="ignore"):
            self.shard.node_step(t)
        if self.manifest.wire == "float32":
            # both ends of an edge must compute with the same numbers: what is sent is what is used
            rounded = self.shard.theta.astype(np.float32).astype(np.float64)
            self.shard.take(self.shard.devices, rounded)
        theta = self.shard.theta[0].copy()
        if not np.isfinite(theta).all():
            raise SolverError(
                f"round {t}: the parameters of device {self.names[self.position]!r} diverged; use smaller steps"
            )
        self.status.change = float(np.abs(theta - before).max(initial=0.0))
        # first open the window: a quick neighbour answers with its next theta before `_send` returns
        self.inbox.advance(Kind.THETA, t, t + 1)
        self._send(Kind.THETA, t, theta)
        self._await(Kind.THETA, self.neighbours, t)
        if self.neighbours:
            thetas = np.stack([self.inbox.values(Kind.THETA, v, t) for v in self.neighbours])
            self.shard.take(self.shard.foreign, thetas)
        self.shard.edge_step()
        if self.manifest.compare_every and t % self.manifest.compare_every == 0:
            self._compare_duals(t)
        self.done = t
        if t % self.manifest.checkpoint_every == 0:
            self._save()
        if self.tick is not None:
            self.tick(self)

    def _await(self, kind: Kind, senders: list[int], t: int) -> None:
        began = time.monotonic()
        pause, silence = self.patience.first_pull, self.patience.complain
        next_pull, next_tick, next_complaint = began + pause, began + _TICK_SECONDS, began + silence
        missing = self.inbox.missing(kind, senders, t)
        while missing:
            now = time.monotonic()
            if now >= next_pull or self._hint:
                self._hint = False
                for sender in missing:
                    self._pull(kind, sender, t)
                next_pull, pause = now + pause, min(2.0 * pause, self.patience.last_pull)
            if now >= next_complaint:
                self._complain(kind, missing, t, now - began)
                next_complaint, silence = now + silence, min(2.0 * silence, _LONGEST_SILENCE)
            if now >= next_tick:
                next_tick = now + _TICK_SECONDS
                if self.tick is not None:
                    self.tick(self)
                # a neighbour may have left for good meanwhile
                senders = [sender for sender in senders if sender not in self.left]
            missing = self.inbox.wait(kind, senders, t, max(min(next_pull, next_tick) - now, 0.001))
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

    # --- edge duals ---

    def _compare_duals(self, t: int) -> None:
        """Compare the replicas of each edge dual; the end with the smaller position is right by definition."""
        for edge, (i, j) in enumerate(self.shard.edges.tolist()):
            if j == self.position:
                key = keys_of(self.manifest, j, i)[Kind.ALPHA]
                self.transport.publish(key, self._frame(Kind.ALPHA, t, self.shard.alpha[edge]))
        self._remember(Kind.ALPHA, t, self.shard.alpha.copy())
        lower = [v for v in self.neighbours if v < self.position]
        self.inbox.advance(Kind.ALPHA, t, t + self.manifest.compare_every)
        self._await(Kind.ALPHA, lower, t)
        alpha = self.shard.alpha.copy()
        for edge, (_, j) in enumerate(self.shard.edges.tolist()):
            if j == self.position:
                continue
            theirs = self.inbox.values(Kind.ALPHA, j, t)
            difference = float(np.abs(theirs - alpha[edge]).max(initial=0.0))
            if difference > SAME_DUAL * self.shard.edge_radius[edge]:
                self.journal.write("warning", "edge dual repaired", peer=self.names[j], round=t, difference=difference)
                self.status.repaired += 1
            alpha[edge] = theirs
        if alpha.tobytes() != self.shard.alpha.tobytes():
            sign = np.where(self.shard.edges[:, 0] == self.position, 1.0, -1.0)
            state = self.shard.state() | {"alpha": alpha, "balance": (sign[:, None] * alpha).sum(axis=0)[None]}
            self.shard.restore(state, self._foreign_theta())

    def drop(self, gone: frozenset[int]) -> None:
        """Go on without neighbours that have left for good: their edges leave the objective, with duals set to 0.

        Only the device's own part changes, so neighbours of the same leaver need not agree on the round.
        """
        gone = (gone & set(self.neighbours)) - self.left
        if not gone:
            return
        self.left = self.left | gone
        state, kept = self.shard.state(), ~np.isin(self.shard.edges, list(gone)).any(axis=1)
        held = {int(v): theta for v, theta in zip(self.shard.foreign, self._foreign_theta(), strict=True)}
        weight, before = self.shard._weight, self.shard._left
        shard = self.manifest.shard({self.position: self.rows}, without=sorted(self.left))
        shard.gradients = self.gradients
        sign = np.where(shard.edges[:, 0] == self.position, 1.0, -1.0)
        state["alpha"] = state["alpha"][kept]
        state["balance"] = (sign[:, None] * state["alpha"]).sum(axis=0)[None]
        state["balance_before"] = state["balance"].copy()
        foreign = np.array([held[int(v)] for v in shard.foreign]).reshape(shard.foreign.size, self.manifest.n_params)
        shard.restore(state, foreign)
        shard._weight, shard._left = weight, before
        self.shard = shard
        self.neighbours = [v for v in self.neighbours if v not in gone]
        for v in sorted(gone):
            self.inbox.forget(v)
            self.journal.write("warning", "edge dropped", peer=self.names[v], round=self.done)

    def _foreign_theta(self) -> Array:
        return self.shard._all_theta[1:].copy()

    # --- the neighbours ---

    def _open(self) -> None:
        manifest, here = self.manifest, self.position
        kinds = {Kind.THETA: "length", Kind.ALPHA: _BOUND_KIND[manifest.penalty], Kind.DONE: "length"}
        radius = {
            tuple(edge): float(r) for edge, r in zip(self.shard.edges.tolist(), self.shard.edge_radius, strict=True)
        }
        self._slots: dict[tuple[Kind, int], Callable[[bytes], bool]] = {}
        for v in self.neighbours:
            for kind, key in keys_of(manifest, v, here).items():
                t = manifest.rounds if kind is Kind.DONE else self.done + 1
                bound = {Kind.THETA: manifest.radius, Kind.ALPHA: radius[max(here, v), min(here, v)]}.get(kind)
                expected = Expected(
                    manifest.run_bytes,
                    kind,
                    v,
                    0 if kind is Kind.DONE else manifest.n_params,
                    t,
                    t + 1,
                    # duals are compared as they are; only thetas are rounded on the way
                    manifest.wire if kind is Kind.THETA else "float64",
                    bound,
                    kinds[kind],  # type: ignore[arg-type]
                )
                self._slots[kind, v] = self.inbox.expect(expected)
                self.transport.subscribe(key, self._slots[kind, v])
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
                return self._frame(kind, t, np.zeros(0)) if self.done >= self.manifest.rounds == t else None
            held = self.past[kind]
            values = held.get(t)
            if values is None:
                if t < min(list(held), default=0):
                    self.journal.sparingly("warning", "asked for a round that is no longer kept", peer=self.names[v])
                return None
            if kind is Kind.ALPHA:
                own = np.flatnonzero((self.shard.edges == v).any(axis=1))
                return self._frame(kind, t, values[own[0]]) if own.size else None
            return self._frame(kind, t, values)

        return on_pull

    def _send(self, kind: Kind, t: int, values: Array) -> None:
        self._remember(kind, t, values)
        if self.neighbours:
            self.transport.publish(
                keys_of(self.manifest, self.position, self.position)[kind], self._frame(kind, t, values)
            )

    def _frame(self, kind: Kind, t: int, values: Array) -> bytes:
        wire = self.manifest.wire if kind is Kind.THETA else "float64"
        return encode(self.manifest.run_bytes, kind, self.position, t, values, wire)

    def _remember(self, kind: Kind, t: int, values: Array) -> None:
        # threads of the transport read this dictionary: single operations only
        held = self.past[kind]
        held[t] = values
        for old in [r for r in held if r <= t - self.keep]:
            del held[old]

    # --- the end ---

    def linger(self) -> None:
        """Stay until all neighbours have finished, since they may need the last thetas."""
        done = keys_of(self.manifest, self.position, self.position)[Kind.DONE]
        frame = self._frame(Kind.DONE, self.done, np.zeros(0))
        deadline = time.monotonic() + self.patience.linger
        waiting = list(self.neighbours)
        while waiting and time.monotonic() < deadline:
            self.transport.publish(done, frame)
            for v in waiting:
                self._pull(Kind.DONE, v, self.done)
            waiting = self.inbox.wait(Kind.DONE, self.neighbours, self.done, _DONE_SECONDS)
            self.status.waiting_for = [self.names[v] for v in waiting]
            if self.tick is not None:
                self.tick(self)
        if waiting:
            self.journal.write("warning", "left before all neighbours had finished", peers=self.status.waiting_for)
        elif self.neighbours:
            # somebody may have missed that this device has finished, and asks again
            self.transport.publish(done, frame)
            time.sleep(2.5 * _DONE_SECONDS)

    # --- checkpoints ---

    def _save(self, *, final: bool = False) -> None:
        """Write the state after a round; hold the device where it is until that has succeeded."""
        if self.checkpoint is None:
            return
        arrays: dict[str, NDArray[np.generic]] = {f"shard_{name}": part for name, part in self.shard.state().items()}
        for name in ("table", "anchor_gradient", "anchor_theta", "stale", "looked"):
            arrays[f"gradients_{name}"] = getattr(self.gradients, name)
        for kind, held in self.past.items():
            arrays[f"past_{kind.name}_rounds"] = np.array(sorted(held), dtype=np.int64)
            arrays[f"past_{kind.name}"] = np.array([held[t] for t in sorted(held)])
        header = {"round": self.done, "left": sorted(self.left), "final": final}
        began = time.monotonic()
        while True:
            try:
                save_checkpoint(self.checkpoint, self.manifest.run, arrays, header)
                return
            except OSError as error:
                self.journal.write("error", "checkpoint failed, holding", round=self.done, why=str(error))
                if time.monotonic() - began > self.patience.give_up:
                    raise PeerError(f"cannot write {self.checkpoint}: {error}; make room, then start again") from error
                self.status.state = "holding: no room for a checkpoint"
                time.sleep(min(1.0, self.patience.complain))
                if self.tick is not None:
                    self.tick(self)

    def _restore(self) -> None:
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        try:
            arrays, header = load_checkpoint(self.checkpoint, self.manifest.run)
        except ModelFileError as error:
            raise PeerError(f"{error}; remove the file to start from round 0, if the neighbours do so, too") from None
        if header["left"]:
            self.drop(frozenset(header["left"]))
        state = {name.removeprefix("shard_"): part for name, part in arrays.items() if name.startswith("shard_")}
        self.shard.restore(state, self._foreign_theta())
        for name in ("table", "anchor_gradient", "anchor_theta", "stale", "looked"):
            getattr(self.gradients, name)[...] = arrays[f"gradients_{name}"]
        for kind in self.past:
            rounds = arrays[f"past_{kind.name}_rounds"].tolist()
            self.past[kind] = dict(zip(rounds, arrays[f"past_{kind.name}"], strict=True))
        self.done = int(header["round"])
