"""A site process whose network loses, doubles and delays 10% of the pushed messages and of the answers to pulls."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

from fedkin.cli.site_run import run
from fedkin.federate import transports


class FaultyTransport(transports.ZenohTransport):
    """Faults on the receiving side."""

    _random = random.Random(7)

    def _spoil(self, on_frame: Any) -> Any:
        def on_spoiled(frame: bytes) -> None:
            if self._random.random() < 0.1:
                return  # lost
            on_frame(frame)
            if self._random.random() < 0.1:
                on_frame(frame)
            if self._random.random() < 0.1:  # once more, after others
                threading.Timer(0.02 * self._random.random(), on_frame, (frame,)).start()

        return on_spoiled

    def subscribe(self, key: str, on_frame: Any) -> None:
        super().subscribe(key, self._spoil(on_frame))

    def pull(self, key: str, round: int, on_frame: Any) -> None:
        super().pull(key, round, self._spoil(on_frame))


transports.ZenohTransport = FaultyTransport  # type: ignore[misc]
if __name__ == "__main__":
    sys.exit(run())
