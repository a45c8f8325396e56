"""What carries vectors between shards.

In: the thetas of a shard and a round. Out: the neighbours' thetas of that round (`fedkin.admm.Link`).
A `Transport` moves frames and promises nothing; `memory` and `zenoh` are transports, `neighbours.NeighbourLink` makes
lock-step rounds of any of them. Shards in one process need none (`fedkin.admm.DirectLink`).
To add a transport between machines (there is one, `zenoh`, and nothing chooses it), files in this order:
1. ``pyproject.toml`` and ``requirements-dev.lock``: its library in the extra ``peer``, and a line for mypy if it is
   untyped. `federate/links`: a module beside `zenoh` that imports it as `zenoh` does (`missing_dependency`), with the
   methods of `Transport`; a failure that may pass is a `PeerError`.
2. `federate/links/access`: who may read and write what, in its terms, and its settings.
3. `federate/contract/contract`: a key that chooses it (contracts signed before have no such key and are refused: raise
   `FORMAT`); `federate/manifest`: a field with a default, which `federate/views` fills; docs/contract.md, its
   table and its example.
4. `federate/programs/program`: a branch in `Program.linked`, which opens the transport and tells it whom to call when a
   link opens or closes (`on_link`) and when a payload is above ``most_bytes`` (`on_refused`).
5. Addresses other than ``tls/host:port``: `federate/addresses` and the same `program`.
Rounds and edge tests need no change: `federate/links/neighbours` makes them of any transport.
Imports: `admm`, the manifest, and of the modules of `federate` `frames`, `post`, `waiting`, `journal` and `trust`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["OnFrame", "OnPresence", "OnPull", "Transport"]

OnFrame = Callable[[bytes], object]
OnPull = Callable[[int], bytes | None]
OnPresence = Callable[[bool], None]


class Transport(Protocol):
    """Frames that are pushed under a key, frames that are pulled by key and round, and who is there.

    Nothing is promised about a pushed frame: it may be lost, arrive twice or late. Callbacks run in the transport's
    threads; those for frames hold up what comes next, so they take note of a frame and return.
    """

    def publish(self, key: str, frame: bytes) -> None:
        """Push a frame to all who subscribe to ``key``."""
        ...

    def subscribe(self, key: str, on_frame: OnFrame) -> None:
        """Call ``on_frame`` for every frame pushed under ``key``."""
        ...

    def answer(self, key: str, on_pull: OnPull) -> None:
        """Serve pulls of ``key``: ``on_pull(round)`` gives the frame, or None."""
        ...

    def pull(self, key: str, round: int, on_frame: OnFrame) -> None:
        """Ask whoever serves ``key`` for the frame of a round; returns at once."""
        ...

    def announce(self, key: str) -> None:
        """Be seen under ``key`` until `close`."""
        ...

    def watch(self, key: str, on_presence: OnPresence) -> None:
        """Call ``on_presence(True)`` when somebody announces ``key``, ``on_presence(False)`` when it is gone."""
        ...

    def close(self) -> None:
        """Leave."""
        ...
