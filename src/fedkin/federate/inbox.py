"""What a site waits for and how long, and what it tells its owner meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fedkin._base import Array
from fedkin.admm import Share
from fedkin.errors import FedkinError, ParameterError
from fedkin.federate.frames import Expected, Kind, MessageError, OutsideWindow, decode
from fedkin.federate.journal import Journal

Slot = tuple[Kind, int]

#: State of a site that cannot write what has to be written before it goes on.
HOLDING = "holding: no room for a checkpoint"
#: Log lines about the same wait are at most this far apart, in seconds.
LONGEST_SILENCE = 600.0
#: Shares of the certificate that a site tells its owner, the newest.
MOST_SHARES = 40
#: How often a waiting site looks around.
LOOK_SECONDS = 0.2
_LONGEST_LINE = 64
_NEVER = 1 << 30


class PeerError(FedkinError, RuntimeError):
    """A site that cannot go on; starting it again continues where it was."""


class Stopped(FedkinError):
    """The site was asked to stop; starting it again continues where it was."""


@dataclass(frozen=True)
class Patience:
    """How long a site waits for what, in seconds; ``linger``, ``gather`` and ``deadline`` may be 0.

    - A theta that has not come is pulled after ``first_pull``, then again and again, up to ``last_pull`` apart.
    - ``complain``: to the first log line about a wait; to the next ones it doubles, up to ten minutes.
    - ``give_up``: a wait as long as this ends the process.
    - ``linger``: a site that has finished stays so long to serve neighbours that have not.
    - ``lease``: a link on which nothing came for so long is taken for broken.
    - ``gather``, ``deadline``: how long a central machine waits for sites before its first round, and in a round.
    """

    first_pull: float = 0.25
    last_pull: float = 5.0
    complain: float = 5.0
    give_up: float = 3600.0
    linger: float = 600.0
    gather: float = 60.0
    deadline: float = 5.0
    lease: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_zero = name in ("linger", "gather", "deadline")
            if not (value > 0 or (may_be_zero and value == 0)):  # nor for nan
                least = "at least 0" if may_be_zero else "above 0"
                option = f"--{name.replace('_', '-')}"
                raise ParameterError(f"{option} must be a number of seconds {least}, got {value:g}")


@dataclass
class Status:
    """What an owner may want to know about a site while it runs."""

    round: int = 0
    change: float = float("nan")  # of theta in the last round
    waiting_for: list[str] = field(default_factory=list)
    up: set[str] = field(default_factory=set)
    state: str = "starting"
    pulled: int = 0
    repaired: int = 0
    started: float = field(default_factory=time.time)
    shares: deque[Share] = field(default_factory=lambda: deque(maxlen=MOST_SHARES))


class Reminders:
    """When to ask again for what is missing, and when to complain about it: ever less often."""

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
        self._next_complaint, self._silence = now + self._silence, min(2.0 * self._silence, LONGEST_SILENCE)


class Inbox:
    """What neighbours have sent, checked and kept until it is used.

    Frames come from the transport's threads; one thread waits for what it needs. A lock-step neighbour is at most one
    round ahead, so two rounds per slot are kept and anything else is refused; of frames that nobody has looked at yet
    only some wait in line: memory is bounded whatever arrives.
    """

    def __init__(self, names: Mapping[int, str], journal: Journal) -> None:
        self.names, self.journal = names, journal
        self._expected: dict[Slot, Expected] = {}
        self._windows: dict[Kind, tuple[int, int]] = {}
        self._held: dict[tuple[Kind, int, int], Array] = {}
        self._line: deque[tuple[Slot, bytes]] = deque()
        self._lock = threading.Lock()
        self._bell = threading.Lock()  # released to wake the thread that waits
        self._bell.acquire()
        self._enough = _NEVER  # frames in line that are worth waking it
        self._wakes = 0
        self._refusals: dict[int, str] = {}
        self._wanted: set[tuple[Kind, int, int]] = set()

    def expect(self, expected: Expected) -> Callable[[bytes], bool]:
        """Open a slot, and get the function that frames for it go to; it says whether a frame brought something new."""
        slot = (expected.kind, expected.sender)
        self._expected[slot] = expected

        def on_frame(frame: bytes) -> bool:
            with self._lock:
                self._look()
                new = self._check(slot, frame)
                if new and not self._wanted and self._enough < _NEVER:
                    self._ring()
                return new

        return on_frame

    def line(self, slot: Slot) -> Callable[[bytes], object]:
        """The function that frames for an open slot may go to, too: they are looked at by the thread that waits.

        Waking threads, and taking the interpreter from each other, costs more than looking at messages.
        """
        line, at_once = self._line, self.expect(self._expected[slot])

        def on_frame(frame: bytes) -> None:
            if len(line) >= _LONGEST_LINE:
                at_once(frame)
                return
            line.append((slot, frame))
            if len(line) >= self._enough:
                self._ring()

        return on_frame

    def forget(self, sender: int) -> None:
        """Close all slots of a sender."""
        with self._lock:
            for slot in [slot for slot in self._expected if slot[1] == sender]:
                del self._expected[slot]
            self._held = {key: values for key, values in self._held.items() if key[1] != sender}

    def advance(self, kind: Kind, first: int, last: int) -> None:
        """From now on only rounds ``first .. last`` of ``kind`` are of use."""
        with self._lock:
            self._windows[kind] = first, last
            for key in [key for key in self._held if key[0] is kind and not first <= key[2] <= last]:
                del self._held[key]

    def _look(self) -> None:
        """Check the frames in line; the lock is held."""
        line = self._line
        while line:
            self._check(*line.popleft())

    def _check(self, slot: Slot, frame: bytes) -> bool:
        expected = self._expected.get(slot)
        if expected is None:
            return False
        kind, sender = slot
        first, last = self._windows.get(kind) or (expected.first, expected.last)
        try:
            round, values = decode(frame, expected, first, last)
        except MessageError as refusal:
            self._refuse(expected, first, refusal)
            return False
        key = (kind, sender, round)
        known = self._held.setdefault(key, values)
        if known is values:
            self._wanted.discard(key)
            if self._refusals:
                self._refusals.pop(sender, None)
            return True
        if known.tobytes() != values.tobytes():
            words = "same round twice with other numbers: the first counts"
            self.journal.sparingly("warning", words, peer=self.names[sender])
        return False

    def _refuse(self, expected: Expected, first: int, refusal: MessageError) -> None:
        about = {"peer": self.names[expected.sender], "kind": expected.kind.name}
        if isinstance(refusal, OutsideWindow):
            # duplicates and late answers are a network's daily life; replays look the same, and neither is used
            event = "old round ignored" if refusal.round < first else "round too far ahead ignored"
            self.journal.sparingly("info", event, **about)
        else:
            self.journal.sparingly("warning", "message refused", **about, why=str(refusal))
            self._refusals[expected.sender] = str(refusal)

    def in_words(self, missing: Sequence[int], up: Collection[str]) -> str:
        """Who is missing and what to do about each: start it, look at what it sends, or at the link to it."""
        down, there = "it is down: start it, then this site", "it is up: see in its log whom it waits for itself"
        cures = {v: there if self.names[v] in up else down for v in missing}
        cures |= {v: f"what it sends is refused: {self._refusals[v]}" for v in missing if v in self._refusals}
        return ", ".join(f"{self.names[v]} ({cure})" for v, cure in cures.items())

    def wake(self) -> None:
        """Make a waiting thread look around."""
        self._wakes += 1
        self._ring()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it has been rung already
            self._bell.release()

    def _wait(self, ready: Callable[[], bool], enough: Callable[[], int], seconds: float) -> None:
        """Wait until it is ready, somebody calls `wake`, or the time is over; ``enough`` frames are worth a look."""
        wakes, end = self._wakes, time.monotonic() + seconds
        while True:
            with self._lock:
                self._look()
                if ready() or self._wakes != wakes:
                    return
                self._enough = enough()
            # frames that came before `_enough` was set did not ring
            left = end - time.monotonic()
            if left > 0 and len(self._line) < self._enough:
                self._bell.acquire(timeout=left)
            self._enough = _NEVER
            if left <= 0:
                return

    def missing(self, kind: Kind, senders: list[int], round: int) -> list[int]:
        """Senders whose message has not come."""
        if self._line:
            with self._lock:
                self._look()
        return [sender for sender in senders if (kind, sender, round) not in self._held]

    def wait(self, kind: Kind, senders: list[int], round: int, seconds: float) -> list[int]:
        """Wait until all have come, somebody calls `wake`, or the time is over; returns who is missing."""
        with self._lock:
            self._look()
            wanted = self._wanted = {(kind, sender, round) for sender in senders} - self._held.keys()
        if not wanted:
            return []
        self._wait(lambda: not wanted, lambda: len(wanted), seconds)
        self._wanted = set()
        return self.missing(kind, senders, round)

    def newest(self, kind: Kind, sender: int, seconds: float) -> tuple[int, Array] | None:
        """Wait for any message of a kind, take the one of the highest round, and forget the others."""

        def rounds() -> list[int]:
            return [key[2] for key in self._held if key[:2] == (kind, sender)]

        self._wait(lambda: bool(rounds()), lambda: 1, seconds)
        with self._lock:
            come = rounds()
            found = {t: self._held.pop((kind, sender, t)) for t in come}
        return (max(come), found[max(come)]) if come else None

    def values(self, kind: Kind, sender: int, round: int) -> Array:
        """The numbers of a message that has come."""
        return self._held[kind, sender, round]
