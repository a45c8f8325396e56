"""One process's end of a run: messages sent and received, waiting for others, and reports to its owner."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fedkin._base import Array, wait_until
from fedkin.admm import Sent
from fedkin.federate.inbox import (
    LONGEST_SILENCE,
    LOOK_SECONDS,
    Expected,
    Inbox,
    Kind,
    Patience,
    PeerError,
    encode,
)
from fedkin.federate.plan import SitePlan
from fedkin.federate.records import HOLDING, Journal, SiteStatus
from fedkin.federate.transports import Transport

_DONE_SECONDS, _MOMENT_SECONDS = 0.4, 0.02
#: Kinds of messages that are written to disk, so that they can be sent again after a crash.
_SAVED = (Kind.THETA, Kind.ALPHA, Kind.PRESENT)
_NOTHING = np.zeros(0)
Action = Callable[[], object]


class Endpoint:
    """One end of a run: partners, an inbox, sent vectors, waiting times, a status.

    ``tick`` is called several times a second while waiting, and may raise `Stopped`; ``idle`` is called in longer
    waits.
    """

    def __init__(
        self,
        plan: SitePlan,
        transport: Transport,
        journal: Journal,
        patience: Patience | None = None,
        tick: Action = lambda: None,
        idle: Action = lambda: None,
    ) -> None:
        self.plan, self.transport, self.journal = plan, transport, journal
        self.patience, self.tick, self.idle = patience or Patience(), tick, idle
        self.here, self.partners = plan.here, plan.partners()
        self.names = {u: plan.name(u) for u in [plan.here, *self.partners]}
        self.status, self.inbox = SiteStatus(state="starting", started=time.time()), Inbox(self.names, journal)
        #: Partners that have left permanently.
        self.left: frozenset[int] = frozenset()
        self.keep = plan.checkpoint_every + 2
        #: Own vectors of the last rounds, to answer requests: by kind and receiver (None for all), then by round.
        self.past: dict[tuple[Kind, int | None], dict[int, Array]] = {}
        self._unsaved: list[Sent] = []
        self._slots: dict[tuple[Kind, int], Callable[[bytes], bool]] = {}
        #: Whether a partner may be ahead of this site, so that it should pull at once.
        self.hint = True

    @property
    def name(self) -> str:
        """The name of this site."""
        return self.names[self.here]

    def open(
        self,
        slots: Callable[[int], Iterable[Expected]],
        answer: Callable[[Kind, int, int], bytes | None] | None = None,
        word: str = "neighbour",
    ) -> None:
        """Start listening: ``slots(v)`` is what partner v may send, ``answer(kind, v, t)`` what it may ask for."""
        plan = self.plan
        for v in self.partners:
            for one in slots(v):
                self._slots[one.kind, v] = self.inbox.expect(one)
                self.transport.subscribe(plan.key(one.kind, v, self.here), self.inbox.line((one.kind, v)))
            self.transport.watch(plan.presence_key(v), partial(self._on_presence, v, word))
            for kind in plan.kinds(self.here, v):
                self.transport.answer(plan.asking_key(kind, self.here, v), partial(answer or self.answer, kind, v))
        self.transport.announce(plan.presence_key(self.here))

    def _on_presence(self, v: int, word: str, here: bool) -> None:
        name = self.names[v]
        (self.status.up.add if here else self.status.up.discard)(name)
        self.journal.sparingly("info", f"{word} {'up' if here else 'down'}", peer=name)
        self.hint = self.hint or here
        self.inbox.wake()

    def drop(self, gone: Iterable[int]) -> frozenset[int]:
        """Continue without partners that have left permanently; return those not dropped before."""
        new = frozenset(gone) & set(self.partners)
        self.left |= new
        self.partners = [v for v in self.partners if v not in new]
        for v in sorted(new):
            self.inbox.forget(v)
        return new

    def expected(self, kind: Kind, v: int, length: int, first: int, last: int, **bounds: object) -> Expected:
        """Return the header expected from partner v: number of values and rounds."""
        if kind is Kind.THETA:
            bounds = {"wire": self.plan.wire, "bound": self.plan.radius, **bounds}
        return Expected(self.plan.run_bytes, kind, v, length, first, last, **bounds)  # type: ignore[arg-type]

    def frame(self, kind: Kind, t: int, values: Array) -> bytes:
        """Return a message of this site."""
        wire = self.plan.wire if kind is Kind.THETA else "float64"  # duals are compared as they are
        return encode(self.plan.run_bytes, kind, self.here, t, values, wire)

    def send(self, kind: Kind, t: int, values: Array, to: int | None = None, *, push: bool = True) -> None:
        """Send a vector to all partners, or to one, and keep it for requests; without ``push`` only keep it."""
        self.remember(kind, t, values, to)
        if push and self.partners:
            key = self.plan.key(kind, self.here, self.here if to is None else to)
            self.transport.publish(key, self.frame(kind, t, values))

    def remember(self, kind: Kind, t: int, values: Array, to: int | None = None) -> None:
        """Keep a vector for requests."""
        # threads of the transport read this dictionary: single operations only
        held = self.past.setdefault((kind, to), {})
        held[t] = values
        while (old := next(iter(held))) <= t - self.keep:  # rounds come in order
            del held[old]
        if kind in _SAVED:
            self._unsaved.append(Sent(kind, t, values))
            del self._unsaved[: -len(_SAVED) * self.keep]

    def answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        """Return the frame of round t, 0 for the newest, that partner v requests; None if there is none."""
        held = self.past.get((kind, None)) or self.past.get((kind, v)) or {}
        t = t or next(reversed(held), 0)
        values = held.get(t)
        if values is None and t < min(list(held), default=0):
            self.journal.sparingly("warning", "asked for a round that is no longer kept", peer=self.names[v])
        return None if values is None else self.frame(kind, t, values)

    def unsaved(self, t: int) -> list[Sent]:
        """Return, once, the messages up to round t that are to be saved."""
        found = [one for one in self._unsaved if one.round <= t]
        self._unsaved = [one for one in self._unsaved if one.round > t]
        return found

    def recall(self, sent: Sequence[Sent], done: int) -> None:
        """Restore the messages up to round ``done``, from before this process started."""
        for one in sent:
            if done - self.keep < one.round <= done:
                self.past.setdefault((Kind(one.kind), None), {})[one.round] = one.values

    def pull(self, kind: Kind, sender: int, t: int) -> None:
        """Ask a partner for the message of a round."""

        def on_frame(frame: bytes) -> None:
            # nothing had been pushed: the sender is ahead of this site, so pull the next message at once, too
            self.hint = self._slots[kind, sender](frame) or self.hint

        self.status.pulled += 1
        self.transport.pull(self.plan.asking_key(kind, sender, self.here), t, on_frame)

    def wait_for(
        self,
        kind: Kind,
        whom: Callable[[], list[int]],
        t: int,
        pull: Callable[[int], object] | None = None,
        until: float = math.inf,
    ) -> None:
        """Wait for the messages of round t from the partners in ``whom()``, and pull those that do not arrive.

        ``whom`` is called again and again, at time ``until`` too: a partner may have left permanently meanwhile.
        ``pull(v)`` asks v again.
        """
        # in nearly every round this suffices
        if not self.inbox.wait(kind, whom(), t, 0.0 if self.hint else _MOMENT_SECONDS):
            return
        self.idle()
        began, pull_pause, silence = time.monotonic(), self.patience.first_pull, self.patience.complain
        next_pull, next_complaint, next_tick = began + pull_pause, began + silence, began + LOOK_SECONDS
        while missing := self.inbox.missing(kind, whom(), t):
            now = time.monotonic()
            waited = now - began
            if now >= next_pull or self.hint:
                self.hint = False
                for v in missing:
                    (pull or partial(self.pull, kind, t=t))(v)
                next_pull, pull_pause = now + pull_pause, min(2.0 * pull_pause, self.patience.last_pull)
            if now >= next_complaint or waited >= self.patience.give_up:
                self._complain(kind, missing, t, waited)
                next_complaint, silence = now + silence, min(2.0 * silence, LONGEST_SILENCE)
            if now >= next_tick:
                next_tick = now + LOOK_SECONDS
                if waited > 1.0:
                    self.status.waiting_for = [self.names[v] for v in missing]
                self.tick()
            due = min(next_pull, next_tick, until if until > now else math.inf)
            self.inbox.wait(kind, missing, t, max(due - now, 0.001))
        self.status.waiting_for = []

    def _complain(self, kind: Kind, missing: list[int], t: int, seconds: float) -> None:
        names = self.status.waiting_for = [self.names[v] for v in missing]
        facts = {"kind": kind.name, "peers": names, "down": self._down(names), "seconds": round(seconds, 1)}
        self.journal.write("warning", "waiting", round=t, **facts)
        if seconds >= self.patience.give_up:
            which = f"{kind.name} of round {t}" if t else kind.name
            whom = self.inbox.format_missing(missing, self.status.up)
            raise PeerError(f"no {which} for {seconds:.0f} s from {whom}")

    def _down(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.status.up]

    def gather(self, seconds: float) -> None:
        """Wait a limited time until all partners are up, so that a slow start does not count as absence."""

        def missing() -> list[str]:
            return self._down([self.names[u] for u in self.partners])

        def look(pause: float) -> None:
            self.inbox.pause(pause)
            self.tick()

        if not wait_until(lambda: not missing(), seconds, longest_pause=LOOK_SECONDS, sleep=look):
            self.journal.write("warning", "starting without", peers=missing())

    def collect(self, t: int, pull: Callable[[int], object] | None = None, least: int = 0) -> dict[int, Array]:
        """Return the thetas of round t from partners that are up or sent them by the deadline, and from at least
        ``least``."""
        deadline = time.monotonic() + min(self.patience.deadline, self.patience.give_up)

        def missing() -> tuple[list[int], list[int]]:
            absent = self.inbox.missing(Kind.THETA, self.partners, t)
            return absent, [u for u in absent if self.names[u] in self.status.up]

        def awaited() -> list[int]:
            absent, up = missing()
            if len(self.partners) - len(absent) < least:
                return up or absent
            return up if time.monotonic() < deadline else []

        self.hint = False  # nobody is ahead of the machine that decides
        self.wait_for(Kind.THETA, awaited, t, pull, deadline)
        absent, up = missing()
        for u in up:
            self.journal.sparingly("warning", "running, but sent no theta before the deadline", peer=self.names[u])
        return {u: self.inbox.values(Kind.THETA, u, t) for u in self.partners if u not in absent}

    def hold(
        self, write: Callable[[], None], path: Path, round: int, event: str = "checkpoint failed, holding"
    ) -> None:
        """Call ``write`` until it succeeds, with log lines at growing intervals.

        Raises `PeerError` if it has not succeeded after ``patience.give_up`` seconds.
        """
        failures: list[OSError] = []

        def is_written() -> bool:
            try:
                write()
            except OSError as error:
                failures.append(error)
                return False
            return True

        if is_written():
            return
        before = self.status.state

        def complain(seconds: float) -> None:
            self.journal.write("error", event, round=round, why=str(failures[-1]), seconds=int(seconds))

        def pause(seconds: float) -> None:
            self.status.state = HOLDING
            time.sleep(seconds)
            self.tick()

        if not wait_until(is_written, self.patience.give_up, complain=complain, silence=1.0, sleep=pause):
            raise PeerError(f"cannot write {path}: {failures[-1]}; free some space and start again") from failures[-1]
        self.status.state = before

    def linger(
        self, kind: Kind, t: int, *, waits: bool = True, only_up: bool = False, on_over: Action | None = None
    ) -> None:
        """Announce that this site has finished, and stay until all partners have, since they may need its last vectors.

        It stays at most as long as `Patience` allows, and waits only for partners that are up (``only_up``), or for no
        partner (``waits=False``). ``on_over`` is called when all have finished.
        """
        began = time.monotonic()
        deadline, silence = began + self.patience.linger, self.patience.complain
        next_word = began + min(silence, 2.0 * _DONE_SECONDS)
        waiting = list(self.partners) if waits else []
        while waiting and time.monotonic() < deadline:
            self.send(kind, t, _NOTHING)
            for v in waiting:
                self.pull(kind, v, t)
            missing = self.inbox.wait(kind, self.partners, t, _DONE_SECONDS)
            waiting = [v for v in missing if not only_up or self.names[v] in self.status.up]
            names = self.status.waiting_for = [self.names[v] for v in waiting]
            if not missing and on_over is not None:
                on_over()
            now = time.monotonic()
            if waiting and now >= next_word:
                facts = {"peers": names, "down": self._down(names), "at_most": round(deadline - now, 1)}
                self.journal.write("info", "finished; staying connected for neighbours that have not", **facts)
                next_word, silence = now + silence, min(2.0 * silence, LONGEST_SILENCE)
            self.tick()
        if waiting:
            self.journal.write("warning", "left before all neighbours had finished", peers=self.status.waiting_for)
        elif self.partners:
            # somebody may have missed that this site has finished, and asks again
            self.send(kind, t, _NOTHING)
            time.sleep(2.5 * _DONE_SECONDS)
