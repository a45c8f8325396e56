"""A network in memory that can be as bad as a test likes."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from federations import in_threads
from fedkin.federate import Participant, Patience
from fedkin.federate.transports import OnFrame, OnPresence, OnPull
from processes import PATIENCE

#: Waits of sites on threads: short, but for one that only what hangs takes to its end.
QUICK = Patience(first_pull=0.02, last_pull=0.2, complain=0.3, give_up=PATIENCE, linger=5.0)


@dataclass(frozen=True)
class Faults:
    """How bad a network is.

    A frame, a pull or an answer is lost with probability ``loss``, and arrives twice with probability ``duplication``.
    Frames take up to ``delay`` seconds, so they overtake each other.
    """

    loss: float = 0.0
    duplication: float = 0.0
    delay: float = 0.0


class MemoryNetwork:
    """A network inside one process, for tests: `join` gives each site its transport.

    ``seed`` decides what goes wrong.
    """

    def __init__(self, faults: Faults | None = None, seed: int = 0) -> None:
        self.faults = faults or Faults()
        self._random = random.Random(seed)
        self._subscribers: dict[str, list[tuple[MemoryTransport, OnFrame]]] = {}
        self._answers: dict[str, tuple[MemoryTransport, OnPull]] = {}
        self._present: dict[str, MemoryTransport] = {}
        self._watchers: dict[str, list[tuple[MemoryTransport, OnPresence]]] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sent, self._busy = 0, False
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()
        #: Frames that were lost on purpose.
        self.lost = 0

    def join(self) -> MemoryTransport:
        """A new member's transport."""
        return MemoryTransport(self)

    def settle(self) -> None:
        """Wait until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._busy, timeout=10)

    def close(self) -> None:
        """Stop delivering."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def _post(self, deliver: Callable[[], None], *, faulty: bool = True) -> None:
        with self._changed:
            if faulty and self._random.random() < self.faults.loss:
                self.lost += 1
                return
            copies = 1 + (faulty and self._random.random() < self.faults.duplication)
            for _ in range(copies):
                due = time.monotonic() + self._random.random() * self.faults.delay
                self._sent += 1
                heapq.heappush(self._queue, (due, self._sent, deliver))
            self._changed.notify_all()

    def _deliver(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                if not self._queue or self._queue[0][0] > now:
                    self._changed.wait(self._queue[0][0] - now if self._queue else 1.0)
                    continue
                deliver = heapq.heappop(self._queue)[2]
                self._busy = True
            deliver()
            with self._changed:
                self._busy = False
                self._changed.notify_all()


class MemoryTransport:
    """One member's end of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self._open = True

    def publish(self, key: str, frame: bytes) -> None:
        for member, on_frame in self.network._subscribers.get(key, []):
            self.network._post(partial(member._get, on_frame, frame))

    def subscribe(self, key: str, on_frame: OnFrame) -> None:
        self.network._subscribers.setdefault(key, []).append((self, on_frame))

    def answer(self, key: str, on_pull: OnPull) -> None:
        self.network._answers[key] = (self, on_pull)

    def pull(self, key: str, round: int, on_frame: OnFrame) -> None:
        def ask() -> None:
            member, on_pull = self.network._answers.get(key, (self, None))
            frame = on_pull(round) if on_pull is not None and member._open else None
            if frame is not None:
                self.network._post(partial(self._get, on_frame, frame))

        self.network._post(ask)

    def announce(self, key: str) -> None:
        self.network._present[key] = self
        self._tell(key, True)

    def watch(self, key: str, on_presence: OnPresence) -> None:
        self.network._watchers.setdefault(key, []).append((self, on_presence))
        if key in self.network._present:
            self.network._post(partial(on_presence, True), faulty=False)

    def close(self) -> None:
        self._open = False
        for key in [key for key, member in self.network._present.items() if member is self]:
            del self.network._present[key]
            self._tell(key, False)

    def _get(self, on_frame: OnFrame, frame: bytes) -> None:
        if self._open:
            on_frame(frame)

    def _tell(self, key: str, here: bool) -> None:
        for _, on_presence in self.network._watchers.get(key, []):
            self.network._post(partial(on_presence, here), faulty=False)


class Crash(Exception):
    """Stands for SIGKILL: nothing is written on the way out."""


def crash() -> None:
    raise Crash


def crashing(n_sites: int, make: Any, crashes: dict[int, list[int]], pause: float = 0.0) -> dict[int, Participant]:
    """Run sites that die in given rounds, the last first in each list, and start again.

    ``make(site, tick)`` returns the participant and its transport.
    """
    finished: dict[int, Participant] = {}

    def live(u: int) -> None:
        def tick(site: Participant) -> None:
            if crashes.get(u) and site.done >= crashes[u][-1]:
                crashes[u].pop()
                raise Crash

        while u not in finished:
            site, transport = make(u, tick)
            try:
                site.run()
                site.linger()
                finished[u] = site
            except Crash:
                transport.close()
                time.sleep(pause)

    in_threads(live, n_sites)
    assert not any(crashes.values())
    return finished
