"""Drives the compiled rounds of `fedkin.admm.kernels` on the state of one shard that hosts every device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import available_threads
from fedkin.admm import kernels
from fedkin.admm.gradients import Gradients
from fedkin.admm.inprocess import LocalShards
from fedkin.admm.sampling import device_roots
from fedkin.admm.shard import averaging_weight

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Multiplications in a round from which on threads share it.
THREADING_PAYS = 3e6


class CompiledRounds:
    """Rounds on compiled kernels; the shard's own arrays are advanced in place.

    Parameters
    ----------
    local : LocalShards
        With one shard, see `unsupported`.
    threads : int, optional
        By default as many as there are cores, where a round is long enough.
    """

    def __init__(self, local: LocalShards, threads: int | None = None) -> None:
        self.plan, self.shard = local.plan, local.shards[0]
        assert self.shard.gradients is not None
        self.gradients: Gradients = self.shard.gradients
        rows, steps = self.plan.rows, self.plan.steps
        work = float(rows.batch.sum() + self.plan.edges.shape[0]) * rows.ridge.size
        self.threads = threads or (available_threads() if work > THREADING_PAYS else 1)
        kernel = rows.losses[0].kernel
        assert kernel is not None, "see `fedkin.admm.backend.unsupported`"
        self._codes = np.array(
            [
                kernels.LOSSES[kernel[0]],
                kernels.GRADIENTS[self.plan.gradient],
                kernels.AVERAGES[self.plan.average],
                self.plan.snapshot_every,
            ],
            dtype=np.int64,
        )
        self._numbers = np.array([kernel[1], np.inf if self.plan.radius is None else self.plan.radius])
        none = np.empty(0)
        self._given = (
            rows.data.X,
            none if rows.data.y is None else rows.data.y,
            none if rows.data.offset is None else rows.data.offset,
            np.ascontiguousarray(rows.starts),
            np.ascontiguousarray(rows.counts),
            rows.batch,
            device_roots(rows.keys, self.plan.seed),
            rows.ridge,
            steps.start,
            steps.growth,
            steps.damping,
            np.empty((0, 0)) if self.plan.sparsity is None else np.ascontiguousarray(self.plan.sparsity),
        )
        self._ends = np.ascontiguousarray(self.plan.edges, dtype=np.int32)
        self._shares = np.zeros((self.threads, *self.shard.balance.shape))

    def __call__(self, first: int, count: int, available: Mask | None, probability: Array | None) -> None:
        """Do ``count`` rounds from ``first`` on, as `LocalShards.run`."""
        shard, s = self.shard, self._shares
        s[0], s[1:] = shard.balance, 0.0
        here = np.empty((0, 0), dtype=np.bool_) if available is None else np.ascontiguousarray(available)
        chance = np.empty((0, 0)) if probability is None else np.ascontiguousarray(probability)
        penalty = kernels.PENALTIES[self.plan.penalty.name]
        edges = (penalty, self.plan.rho, self._ends, self.plan.edge_radius, shard.alpha)
        gradients = self.gradients
        state = (shard.theta, s, shard.balance_before, shard.average, shard.average_balance)
        memory = (gradients.table, gradients.anchor_gradient, gradients.anchor_theta, gradients.stale, gradients.looked)
        data = (self._codes, self._numbers, *self._given, *state, *memory)
        if self.threads == 1:
            kernels.rounds_loop(first, count, here, chance, *edges, *data)
        else:
            self._share_rounds(first, count, here, chance, edges, data)
        np.sum(s, axis=0, out=shard.balance)
        weight = averaging_weight(self.plan.average, first + count - 1)
        # by a kernel, like those of the other rounds: bits must not depend on where stretches of rounds end
        kernels.add_to_average(weight, shard.balance, shard.average_balance)

    def _share_rounds(
        self, first: int, count: int, here: Mask, chance: Array, edges: tuple[Any, ...], data: tuple[Any, ...]
    ) -> None:
        shard = self.shard
        devices, duals = _pieces(shard.devices.size, self.threads), _pieces(shard.alpha.shape[0], self.threads)
        everybody, certain = np.empty(0, dtype=np.bool_), np.empty(0)
        with ThreadPoolExecutor(self.threads - 1) as pool:
            for k in range(count):
                t = first + k
                weight = 0.0 if k == 0 else averaging_weight(self.plan.average, t - 1)
                present = (here[k] if here.size else everybody, chance[k] if chance.size else certain)
                of_devices = [(*piece, t, weight, *present, *data) for piece in devices]
                _together(pool, kernels.devices_loop, of_devices)
                of_edges = [(*piece, n, *edges, shard.theta, self._shares) for n, piece in enumerate(duals)]
                _together(pool, kernels.edges_loop, of_edges)


def _together(pool: ThreadPoolExecutor, kernel: Callable[..., Any], pieces: list[tuple[Any, ...]]) -> None:
    """Run a kernel on all pieces, the first one on this thread; all are done on return."""
    others = [pool.submit(kernel, *piece) for piece in pieces[1:]]
    kernel(*pieces[0])
    for other in others:
        other.result()


def _pieces(n: int, parts: int) -> list[tuple[int, int]]:
    ends = np.linspace(0, n, parts + 1).astype(np.int64).tolist()
    return list(pairwise(ends))
