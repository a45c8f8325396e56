"""Drives the compiled rounds of `fedkin.admm.in_process.kernels` on the state of one shard that hosts every site."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Mask, available_threads
from fedkin.admm.gradients import Gradients
from fedkin.admm.in_process import kernels
from fedkin.admm.rounds import LocalShards
from fedkin.admm.sampling import site_roots
from fedkin.admm.shard import averaging_weight
from fedkin.solvers import Crew
from fedkin.solvers.jit import frozen

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
        loss = rows.losses[0]
        gradient, average = kernels.GRADIENTS[self.plan.gradient], kernels.AVERAGES[self.plan.average]
        ball = np.inf if self.plan.radius is None else float(self.plan.radius)
        self._rule = kernels.Rule(
            kernels.LOSSES[type(loss)], gradient, average, self.plan.snapshot_every, loss.parameter, ball
        )
        none, data = np.empty(0), rows.data
        y, offset = (none if given is None else given for given in (data.y, data.offset))
        roots = site_roots(rows.keys, self.plan.seed)
        samples = (data.X, y, offset, rows.starts, rows.counts, rows.batch, roots)
        self._samples = kernels.Samples(*(frozen(array) for array in samples))
        sparsity = np.empty((0, 0)) if self.plan.sparsity is None else self.plan.sparsity
        rule = (steps.start, steps.growth, steps.damping, rows.ridge, sparsity)
        self._steps = kernels.Steps(*(frozen(array) for array in rule))
        self._edges = kernels.Edges(
            kernels.PENALTIES[self.plan.penalty.name],
            float(self.plan.rho),
            frozen(self.plan.edges.astype(np.int32)),
            frozen(self.plan.edge_radius),
        )
        self._shares = np.zeros((self.threads, *self.shard.balance.shape))

    def __call__(self, first: int, count: int, available: Mask | None, probability: Array | None) -> None:
        """Do ``count`` rounds from ``first`` on, as `LocalShards.run`."""
        shard, s = self.shard, self._shares
        s[0], s[1:] = shard.balance, 0.0
        here = np.empty((0, 0), dtype=np.bool_) if available is None else np.ascontiguousarray(available)
        chance = np.empty((0, 0)) if probability is None else np.ascontiguousarray(probability)
        of_shard = (shard.theta, shard.alpha, s, shard.balance_before, shard.average, shard.average_balance)
        kept = self.gradients
        state = kernels.State(*of_shard, kept.table, kept.anchor_gradient, kept.anchor_theta, kept.stale, kept.looked)
        if self.threads == 1:
            kernels.rounds_loop(first, count, here, chance, self._rule, self._samples, self._steps, self._edges, state)
        else:
            self._share_rounds(first, count, here, chance, state)
        np.sum(s, axis=0, out=shard.balance)
        weight = averaging_weight(self.plan.average, first + count - 1)
        # by a kernel, like those of the other rounds: bits must not depend on where stretches of rounds end
        kernels.add_to_average(weight, shard.balance, shard.average_balance)

    def _share_rounds(self, first: int, count: int, here: Mask, chance: Array, state: kernels.State) -> None:
        rule, samples, steps, edges = self._rule, self._samples, self._steps, self._edges
        everybody, certain = np.empty(0, dtype=np.bool_), np.empty(0)
        crew = Crew(self.threads)
        sites, duals = crew.split(self.shard.sites.size), crew.split(self.shard.alpha.shape[0])

        def node_steps(t: int, weight: float, here: Mask, chance: Array) -> None:
            crew.run(
                lambda _, lo, hi: kernels.sites_loop(lo, hi, t, weight, here, chance, rule, samples, steps, state),
                sites,
            )

        try:
            for k in range(count):
                weight = 0.0 if k == 0 else averaging_weight(self.plan.average, first + k - 1)
                now = (here[k] if here.size else everybody, chance[k] if chance.size else certain)
                node_steps(first + k, weight, *now)
                crew.run(lambda n, lo, hi: kernels.edges_loop(lo, hi, n, edges, state), duals)
        finally:
            crew.close()
