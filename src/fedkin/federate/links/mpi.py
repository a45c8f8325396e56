"""The link between MPI ranks: each sends the thetas at the cut, and waits for those of the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkin._base import Array, Index


class RankLink:
    """The link of one rank to those that host neighbours of its sites (`fedkin.admm.Link`).

    ``hosts (V,)`` are the ranks of the sites, ``edges (E, 2)`` those of the whole federation.
    """

    def __init__(self, communicator: Any, hosts: Index, edges: Index, n_params: int) -> None:
        self._communicator = communicator
        there = hosts[edges]
        here = there == int(communicator.rank)
        send: dict[int, Index] = {}
        receive: dict[int, Index] = {}
        for side in (0, 1):
            crossing = here[:, side] & ~here[:, 1 - side]
            for other in np.unique(there[crossing, 1 - side]).tolist():
                along = crossing & (there[:, 1 - side] == other)
                send[other] = np.union1d(send.get(other, []), edges[along, side]).astype(np.int64)
                receive[other] = np.union1d(receive.get(other, []), edges[along, 1 - side]).astype(np.int64)
        self.send = send
        self._in = {other: np.empty((positions.size, n_params)) for other, positions in receive.items()}
        self._positions = np.concatenate([np.empty(0, dtype=np.int64), *receive.values()])

    def exchange(self, t: int, positions: Index, thetas: Array) -> tuple[Index, Array]:
        from mpi4py import MPI

        requests = [self._communicator.Irecv(buffer, source=other) for other, buffer in self._in.items()]
        going = {other: thetas[np.searchsorted(positions, wanted)] for other, wanted in self.send.items()}
        requests += [self._communicator.Isend(buffer, dest=other) for other, buffer in going.items()]
        MPI.Request.Waitall(requests)
        return self._positions, np.concatenate([np.empty((0, thetas.shape[1])), *self._in.values()])
