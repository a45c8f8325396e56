"""What carries vectors between shards.

In: the thetas of a shard and a round. Out: the neighbours' thetas of that round (`fedkin.admm.Link`).
A `Transport` moves frames and promises nothing; `memory` and `zenoh` are transports, `neighbours.NeighbourLink` makes
lock-step rounds of any of them, `mpi.RankLink` is the link between ranks. Shards in one process need none
(`fedkin.admm.DirectLink`).
Imports: `admm`, the manifest and the messages.
"""

from __future__ import annotations

from fedkin.federate.links.transport import OnFrame, OnPresence, OnPull, Transport

__all__ = ["OnFrame", "OnPresence", "OnPull", "Transport"]
