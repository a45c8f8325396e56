"""A transport that is closed and opened anew while a run goes on: with another certificate, or without who is out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fedkin._base import wait_until
from fedkin.federate.links import OnFrame, OnPresence, OnPull, Transport
from fedkin.federate.waiting import PeerError

#: How long to try to open again, as the port may be free only after a moment.
_AGAIN_SECONDS = 30.0


class ReopeningTransport:
    """Passes everything on to a transport that ``make`` makes, and remembers what it was asked to listen to.

    What is under way while it is closed is lost, as on any network; whoever waits for it pulls it.
    """

    def __init__(self, make: Callable[[], Transport]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._asked: list[Callable[[Transport], None]] = []
        self._inner = make()
        #: Bytes that were published so far.
        self.sent = 0

    def reopen(self) -> None:
        """Close the links and open new ones; who is not granted anything any more gets none."""
        with self._lock:
            self._inner.close()
            failures: list[PeerError] = []

            def is_open() -> bool:
                try:
                    self._inner = self._make()
                except PeerError as error:
                    failures.append(error)
                    return False
                return True

            if not wait_until(is_open, _AGAIN_SECONDS, pause=0.2, sleep=time.sleep):
                raise failures[-1]
            for ask in self._asked:
                ask(self._inner)

    def _ask(self, ask: Callable[[Transport], None]) -> None:
        with self._lock:
            self._asked.append(ask)
            ask(self._inner)

    def publish(self, key: str, frame: bytes) -> None:
        self._inner.publish(key, frame)
        self.sent += len(frame)

    def subscribe(self, key: str, on_frame: OnFrame) -> None:
        self._ask(lambda inner: inner.subscribe(key, on_frame))

    def answer(self, key: str, on_pull: OnPull) -> None:
        self._ask(lambda inner: inner.answer(key, on_pull))

    def pull(self, key: str, round: int, on_frame: OnFrame) -> None:
        self._inner.pull(key, round, on_frame)

    def announce(self, key: str) -> None:
        self._ask(lambda inner: inner.announce(key))

    def watch(self, key: str, on_presence: OnPresence) -> None:
        self._ask(lambda inner: inner.watch(key, on_presence))

    def close(self) -> None:
        with self._lock:
            self._inner.close()
