"""One exchange of vectors with all neighbours, outside the rounds: what edge selection needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from fedkin._base import Array
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.inbox import Inbox
from fedkin.federate.journal import Journal
from fedkin.federate.keys import selection_keys
from fedkin.federate.links import Transport
from fedkin.federate.messages import Expected, Kind, encode
from fedkin.federate.waiting import Patience, PeerError

_LOOK_SECONDS = 0.4


class Exchange:
    """Vectors to and from all neighbours, each kind once, pulled until they are there.

    Parameters
    ----------
    manifest : Manifest
    position : int
    transport : Transport
    journal : Journal
    lengths : mapping {Kind: int}
        Numbers in a message of each kind.
    patience : Patience
    tick : callable, optional
        Called several times a second while waiting; it may raise `fedkin.federate.waiting.Stopped`.
    """

    def __init__(
        self,
        manifest: Manifest,
        position: int,
        transport: Transport,
        journal: Journal,
        lengths: Mapping[Kind, int],
        patience: Patience | None = None,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self.manifest, self.position, self.transport, self.journal = manifest, position, transport, journal
        self.patience, self.tick = patience or Patience(), tick or (lambda: None)
        self.neighbours = [int(v) for v in manifest.neighbours(position)]
        self.names = {v: manifest.members[v].name for v in self.neighbours}
        self.inbox = Inbox(self.names, journal)
        self._frames: dict[str, bytes] = {}
        self._slots: dict[tuple[Kind, int], Callable[[bytes], bool]] = {}
        for v in self.neighbours:
            for kind, key in selection_keys(manifest, v, position).items():
                slot = self.inbox.expect(Expected(manifest.run_bytes, kind, v, lengths.get(kind, 0), 0, 0))
                self._slots[kind, v] = slot
                transport.subscribe(key, slot)
            for key in selection_keys(manifest, position, v).values():
                if key not in self._frames:
                    self._frames[key] = b""
                    transport.answer(key, self._answer(key))

    def _answer(self, key: str) -> Callable[[int], bytes | None]:
        def on_pull(t: int) -> bytes | None:
            return self._frames[key] or None

        return on_pull

    def send(self, kind: Kind, values: Array, receiver: int | None = None) -> None:
        """Tell one neighbour, or all of them."""
        for v in self.neighbours if receiver is None else [receiver]:
            key = selection_keys(self.manifest, self.position, v)[kind]
            frame = encode(self.manifest.run_bytes, kind, self.position, 0, values)
            if self._frames[key] != frame:
                self._frames[key] = frame
                self.transport.publish(key, frame)

    def receive(self, kind: Kind, senders: list[int], seconds: float | None = None) -> dict[int, Array]:
        """Wait for the vectors of these neighbours.

        Raises
        ------
        PeerError
            When one of them is missing after ``seconds`` (``patience.give_up`` by default).
        """
        began = time.monotonic()
        complaint = began + self.patience.complain
        limit = self.patience.give_up if seconds is None else seconds
        missing = self.inbox.missing(kind, senders, 0)
        while missing:
            for v in missing:
                self.transport.pull(selection_keys(self.manifest, v, self.position)[kind], 0, self._slots[kind, v])
            missing = self.inbox.wait(kind, senders, 0, _LOOK_SECONDS)
            self.tick()
            now = time.monotonic()
            names = [self.names[v] for v in missing]
            if missing and now - began > limit:
                raise PeerError(
                    f"no {kind.name} from {', '.join(names)} for {now - began:.0f} s: start them, then this device"
                )
            if missing and now > complaint:
                self.journal.write("warning", "waiting", kind=kind.name, peers=names, seconds=round(now - began, 1))
                complaint = now + max(now - began, self.patience.complain)
        return {v: self.inbox.values(kind, v, 0) for v in senders}

    def finish(self) -> None:
        """Say that this device has all it needs, and stay until all neighbours say so, or the time is over."""
        if not self.neighbours:
            return
        self.send(Kind.DONE, np.zeros(0))
        try:
            self.receive(Kind.DONE, self.neighbours, self.patience.linger)
        except PeerError as error:
            self.journal.write("warning", "left before all neighbours had finished", why=str(error))
            return
        time.sleep(2.5 * _LOOK_SECONDS)  # somebody may ask once more
