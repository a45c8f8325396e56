"""Frames, their checks, and the inbox in which a site waits for them.

A frame is a header of 28 bytes and numbers; it contains nothing executable::

    offset  bytes  field
    0       2      magic  "FK"
    2       1      version of the format, now 1
    3       1      kind (low half) and number format (high half: 0 float64, 1 float32)
    4       8      run id
    12      4      sender, its position in the manifest
    16      4      round
    20      4      how many numbers follow
    24      4      CRC-32 of everything else
    28      ...    the numbers, little endian

A receiver knows what it expects (`Expected`), and `decode` compares the whole header with it before it allocates
memory for the numbers. A message that differs in any field is refused with `MessageError`.
"""

from __future__ import annotations

import math
import struct
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal, NoReturn

import numpy as np

from fedkin._base import Array
from fedkin.admm import Wire
from fedkin.errors import FedkinError, ParameterError
from fedkin.federate.records import Journal

MAGIC = b"FK"
VERSION = 1
_HEAD = struct.Struct("<2sBB8sIII")
_U32 = struct.Struct("<I")
_PARTS = struct.Struct("<16sIII")  # the same bytes as constant part, round, number of values and checksum
HEADER_BYTES = _HEAD.size + _U32.size
RUN_BYTES = 8
_FORMATS: tuple[np.dtype[np.float64] | np.dtype[np.float32], ...] = (np.dtype("<f8"), np.dtype("<f4"))
_WIRES: tuple[Wire, ...] = ("float64", "float32")
#: Size of a vector of n ones, in each norm.
_SPREAD: dict[str, Callable[[int], float]] = {"length": math.sqrt, "max": lambda n: 1.0, "sum": float}


class Kind(IntEnum):
    """Kind of a message: the meaning of its numbers."""

    THETA = 1  #: a site's parameters after its node step
    ALPHA = 2  #: the dual of one edge, for the comparison of its two replicas
    DONE = 3  #: no numbers: the sender has finished its last round
    DOWN = 4  #: from the central machine: theta, pull, probability
    RESULT = 5  #: averaged parameters, for a site that collects its result
    SUMMARY = 6  #: a site's local fit, for edge selection
    VERDICT = 7  #: the p-value of an edge, from the end that decides
    PRESENT = 8  #: from a leader: which sites were present in a round
    REPLICA = 9  #: from a leader: the state of its component
    CHOSEN = 10  #: no numbers: the sender has tested its edges
    HELD_OUT = 11  #: losses of held-out rows, by site and level, as far as the sender knows them


class MessageError(FedkinError, ValueError):
    """A message that differs from what the receiver expects; the text states the difference."""


@dataclass(frozen=True)
class Expected:
    """Expected header of the next message on a key; rounds from ``first`` to ``last`` are accepted.

    ``bound`` is the largest size of the numbers in the norm of ``bound_kind``: Euclidean ("length") for the parameter
    ball; for an edge dual, the dual norm of the penalty.
    """

    run: bytes
    kind: Kind
    sender: int
    length: int
    first: int
    last: int
    wire: Wire = "float64"
    bound: float | None = None
    bound_kind: Literal["length", "max", "sum"] = "length"

    @cached_property
    def start(self) -> bytes:
        """The header up to the round."""
        mixed = self.kind | _WIRES.index(self.wire) << 4
        return _HEAD.pack(MAGIC, VERSION, mixed, self.run, self.sender, 0, 0)[:16]

    @cached_property
    def format(self) -> np.dtype[Any]:
        """Number format of the message."""
        return _FORMATS[_WIRES.index(self.wire)]

    @cached_property
    def size(self) -> int:
        """Size of the whole message in bytes."""
        return HEADER_BYTES + self.length * self.format.itemsize

    @cached_property
    def inside(self) -> float:
        """Limit on single numbers below which any message is within the bound."""
        most = sys.float_info.max if self.bound is None else self.bound
        return min(most, sys.float_info.max) / _SPREAD[self.bound_kind](max(self.length, 1))


def encode(run: bytes, kind: Kind, sender: int, round: int, values: Array, wire: Wire = "float64") -> bytes:
    """Encode a message as bytes; sender and round are from 0 to 2**32 - 1."""
    code = _WIRES.index(wire)
    numbers = values.astype(_FORMATS[code]).tobytes()
    head = _HEAD.pack(MAGIC, VERSION, kind | code << 4, run, sender, round, values.size)
    return head + _U32.pack(zlib.crc32(numbers, zlib.crc32(head))) + numbers


def decode(frame: bytes, expected: Expected, first: int | None = None, last: int | None = None) -> tuple[int, Array]:
    """Return the round and the numbers of an expected message, for a round from ``first`` to ``last``.

    Raises `MessageError`, naming the first thing that differs. Header and checksum are compared before numbers are
    allocated.
    """
    first, last = expected.first if first is None else first, expected.last if last is None else last
    if len(frame) != expected.size:
        _say_what_differs(frame, expected)
    start, round, length, checksum = _PARTS.unpack_from(frame)
    if start != expected.start or length != expected.length:
        _say_what_differs(frame, expected)
    if not first <= round <= last:
        raise OutsideWindow(f"round {round} is outside {first}..{last}", round)
    if zlib.crc32(memoryview(frame)[HEADER_BYTES:], zlib.crc32(frame[: _HEAD.size])) != checksum:
        raise MessageError("the checksum does not match: it was changed on the way")
    values = np.frombuffer(frame, expected.format, length, HEADER_BYTES).astype(np.float64)
    # this one test nearly always suffices; it is False for NaN
    if not np.maximum.reduce(np.absolute(values), initial=0.0) <= expected.inside:
        _check_values(values, expected)
    return round, values


def _say_what_differs(frame: bytes, expected: Expected) -> NoReturn:
    """Raise `MessageError` with the first part of the header that is not as expected."""
    if len(frame) < HEADER_BYTES:
        raise MessageError(f"{len(frame)} bytes are too few for a header of {HEADER_BYTES}")
    magic, version, mixed, run, sender, _, length = _HEAD.unpack_from(frame)
    kind, code, other = mixed & 15, mixed >> 4, f"format version {version}, but this program uses {VERSION}"
    for differs, words in (
        (magic != MAGIC, f"it starts with {magic!r}, not {MAGIC!r}"),
        (version != VERSION, f"{other}; use the same version of Fedkin everywhere"),
        (run != expected.run, f"run {run.hex()}, but this is run {expected.run.hex()}"),
        (kind != expected.kind, f"kind {kind}, expected {expected.kind.name} ({int(expected.kind)})"),
        (code != _WIRES.index(expected.wire), f"number format {code}, expected {expected.wire}"),
        (sender != expected.sender, f"it claims to come from site number {sender}, but {expected.sender} sends here"),
        (length != expected.length, f"{length} numbers, expected {expected.length}"),
    ):
        if differs:
            raise MessageError(words)
    raise MessageError(f"{len(frame)} bytes do not hold a header and {length} numbers")


class OutsideWindow(MessageError):
    """A message of a past round or one too far ahead: a replay, a duplicate, or from a neighbour catching up."""

    def __init__(self, text: str, round: int) -> None:
        super().__init__(text)
        self.round = round


def _check_values(values: Array, expected: Expected) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(values.dot(values))  # finite only if all numbers are
    if not math.isfinite(squares) and not np.isfinite(values).all():
        raise MessageError(f"number {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    if expected.bound is None:
        return
    if expected.bound_kind == "length":
        size = math.sqrt(squares) if math.isfinite(squares) else math.inf
    else:
        size = float(np.abs(values).max(initial=0.0) if expected.bound_kind == "max" else np.abs(values).sum())
    # both ends round differently: a relative slack, far below anything that matters
    if size > expected.bound * (1.0 + 1e-6):
        raise MessageError(f"the numbers have size {size:.6g}, but at most {expected.bound:.6g} is possible")


Slot = tuple[Kind, int]

#: Log lines about the same wait are at most this far apart, in seconds.
LONGEST_SILENCE = 600.0
#: How often a waiting site looks around.
LOOK_SECONDS = 0.2
_LONGEST_LINE = 64
_NEVER = 1 << 30


class PeerError(FedkinError, RuntimeError):
    """A site that cannot continue now; when started again it resumes where it was."""


class Stopped(FedkinError):
    """A request that the site stop; when started again it resumes where it was."""


@dataclass(frozen=True)
class Patience:
    """Waiting times of a site, in seconds; ``linger``, ``gather`` and ``deadline`` may be 0.

    - A missing theta is pulled after ``first_pull``, then repeatedly at growing intervals of up to ``last_pull``.
    - ``complain``: until the first log line about a wait; the interval then doubles, up to ten minutes.
    - ``give_up``: a wait of this length ends the process.
    - ``linger``: longest time that a finished site stays to serve neighbours that have not finished.
    - ``lease``: a link that receives nothing for this long is considered broken.
    - ``gather``, ``deadline``: longest wait of a central machine for sites before its first round, and in a round.
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


class Inbox:
    """Inbox of a site: messages from neighbours, checked and kept until they are used.

    Frames come from the transport's threads; one thread waits for them. A lock-step neighbour is at most one round
    ahead, so two rounds per slot are kept and all others are refused. The queue of unchecked frames is limited, so
    memory is bounded whatever arrives.
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
        """Open a slot and return the function that receives its frames; it returns whether a frame was new."""
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
        """Return a function that queues frames for an open slot, to be checked by the waiting thread.

        Waking threads and competing for the interpreter costs more than checking messages.
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
        """Accept only rounds ``first .. last`` of ``kind`` from now on."""
        with self._lock:
            self._windows[kind] = first, last
            for key in [key for key in self._held if key[0] is kind and not first <= key[2] <= last]:
                del self._held[key]

    def _look(self) -> None:
        """Check the queued frames; the caller holds the lock."""
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
            words = "same round twice with different numbers: the first one counts"
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

    def format_missing(self, missing: Sequence[int], up: Collection[str]) -> str:
        """Return which senders are missing and what to do about each: start it, or check its messages or its
        connection."""
        down, there = "it is down: start it, then this site", "it is up: see its log for the site it is waiting for"
        hints = {v: there if self.names[v] in up else down for v in missing}
        hints |= {v: f"what it sends is refused: {self._refusals[v]}" for v in missing if v in self._refusals}
        return ", ".join(f"{self.names[v]} ({hint})" for v, hint in hints.items())

    def wake(self) -> None:
        """Wake the waiting thread."""
        self._wakes += 1
        self._ring()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it has been rung already
            self._bell.release()

    def _wait(self, ready: Callable[[], bool], enough: Callable[[], int], seconds: float) -> None:
        """Wait until ready, `wake` is called, ``enough`` frames are queued or the time is over."""
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
        """Return the senders whose message has not arrived."""
        if self._line:
            with self._lock:
                self._look()
        return [sender for sender in senders if (kind, sender, round) not in self._held]

    def wait(self, kind: Kind, senders: list[int], round: int, seconds: float) -> list[int]:
        """Wait for all messages, for `wake` or for the time limit; return the missing senders."""
        with self._lock:
            self._look()
            wanted = self._wanted = {(kind, sender, round) for sender in senders} - self._held.keys()
        if not wanted:
            return []
        self._wait(lambda: not wanted, lambda: len(wanted), seconds)
        self._wanted = set()
        return self.missing(kind, senders, round)

    def pause(self, seconds: float) -> None:
        """Wait for `wake` or for the time limit, whatever arrives."""
        self._wait(lambda: False, lambda: _NEVER, seconds)

    def newest(self, kind: Kind, sender: int, seconds: float) -> tuple[int, Array] | None:
        """Wait for any message of a kind, return the one with the highest round, and discard the others."""

        def rounds() -> list[int]:
            return [key[2] for key in self._held if key[:2] == (kind, sender)]

        self._wait(lambda: bool(rounds()), lambda: 1, seconds)
        with self._lock:
            come = rounds()
            found = {t: self._held.pop((kind, sender, t)) for t in come}
        return (max(come), found[max(come)]) if come else None

    def values(self, kind: Kind, sender: int, round: int) -> Array:
        """Return the numbers of a message that has arrived."""
        return self._held[kind, sender, round]
