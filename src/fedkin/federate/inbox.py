"""What neighbours have sent: checked, and kept by kind, sender and round until it is used."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fedkin._base import Array
from fedkin.federate.journal import Journal
from fedkin.federate.messages import Expected, Kind, MessageError, OutsideWindow, decode

Slot = tuple[Kind, int]


class Inbox:
    """Frames come in from the transport's threads; one thread waits for what it needs.

    Parameters
    ----------
    names : sequence of str
        Names of all devices, for messages.
    journal : Journal

    Notes
    -----
    A lock-step neighbour is at most one round ahead, so two rounds per slot are kept and anything else is refused:
    memory is bounded whatever arrives.
    """

    def __init__(self, names: dict[int, str], journal: Journal) -> None:
        self.names, self.journal = names, journal
        self._expected: dict[Slot, Expected] = {}
        self._windows: dict[Kind, tuple[int, int]] = {}
        self._held: dict[tuple[Kind, int, int], Array] = {}
        self._changed = threading.Condition()
        self._wakes = 0
        self._wanted: set[tuple[Kind, int, int]] = set()

    def expect(self, expected: Expected) -> Callable[[bytes], bool]:
        """Open a slot, and get the function that frames for it go to; it says whether a frame brought something new."""
        slot = (expected.kind, expected.sender)
        self._expected[slot] = expected

        def on_frame(frame: bytes) -> bool:
            return self._receive(slot, frame)

        return on_frame

    def forget(self, sender: int) -> None:
        """Close all slots of a sender."""
        with self._changed:
            for slot in [slot for slot in self._expected if slot[1] == sender]:
                del self._expected[slot]
            self._held = {key: values for key, values in self._held.items() if key[1] != sender}

    def advance(self, kind: Kind, first: int, last: int) -> None:
        """From now on only rounds ``first .. last`` of ``kind`` are of use."""
        with self._changed:
            self._windows[kind] = first, last
            stale = [key for key in self._held if key[0] == kind and not first <= key[2] <= last]
            for key in stale:
                del self._held[key]

    def _receive(self, slot: Slot, frame: bytes) -> bool:
        kind, sender = slot
        peer = self.names[sender]
        with self._changed:
            expected = self._expected.get(slot)
            if expected is None:
                return False
            window = self._windows.get(kind, (expected.first, expected.last))
            try:
                message = decode(frame, expected, window)
            except OutsideWindow as refusal:
                # duplicates and late answers are a network's daily life; replays look the same, and neither is used
                event = "old round ignored" if refusal.round < window[0] else "round too far ahead ignored"
                self.journal.sparingly("info", event, peer=peer, kind=kind.name)
                return False
            except MessageError as refusal:
                self.journal.sparingly("warning", "message refused", peer=peer, kind=kind.name, why=str(refusal))
                return False
            key = (kind, sender, message.round)
            known = self._held.get(key)
            if known is None:
                self._held[key] = message.values
                self._wanted.discard(key)
                if not self._wanted:  # waking a thread for every one of many messages costs more than the messages
                    self._changed.notify_all()
                return True
            if known.tobytes() != message.values.tobytes():
                self.journal.sparingly("warning", "same round twice with other numbers: the first counts", peer=peer)
            return False

    def wake(self) -> None:
        """Make a waiting thread look around."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def missing(self, kind: Kind, senders: list[int], round: int) -> list[int]:
        """Senders whose message has not come."""
        return [sender for sender in senders if (kind, sender, round) not in self._held]

    def wait(self, kind: Kind, senders: list[int], round: int, seconds: float) -> list[int]:
        """Wait until all have come, somebody calls `wake`, or the time is over; returns who is missing."""
        with self._changed:
            wakes = self._wakes
            self._wanted = {(kind, sender, round) for sender in self.missing(kind, senders, round)}
            self._changed.wait_for(lambda: self._wakes != wakes or not self._wanted, seconds)
            self._wanted = set()
            return self.missing(kind, senders, round)

    def newest(self, kind: Kind, sender: int, seconds: float) -> tuple[int, Array] | None:
        """Wait for any message of a kind, take the one of the highest round, and forget the others."""

        def rounds() -> list[int]:
            return [key[2] for key in self._held if key[:2] == (kind, sender)]

        with self._changed:
            wakes = self._wakes
            self._changed.wait_for(lambda: self._wakes != wakes or rounds(), seconds)
            come = rounds()
            if not come:
                return None
            values = self._held[kind, sender, max(come)]
            for t in come:
                del self._held[kind, sender, t]
            return max(come), values

    def values(self, kind: Kind, sender: int, round: int) -> Array:
        """The numbers of a message that has come."""
        return self._held[kind, sender, round]
