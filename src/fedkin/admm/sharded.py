"""Rounds in shards on an engine: the same loop and the same bits as in one process, whatever the number of shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.admm.gradients import SiteRows
from fedkin.admm.plan import RunPlan
from fedkin.admm.rounds import DirectLink, Shard, ShardState, run_rounds
from fedkin.cluster import Engine, Peers, Shards, partition


class PeerLink(DirectLink):
    """The link of a shard on an engine: thetas of sites at edges to other shards travel between these.

    ``give`` and ``take`` are the positions of the sites that each neighbour needs, and sends, increasing.
    """

    def __init__(self, peers: Peers, give: Mapping[int, Index], take: Mapping[int, Index], hosted: Index) -> None:
        super().__init__(0)
        self._peers, self._take = peers, {number: sites.tolist() for number, sites in take.items()}
        self._give = {number: np.searchsorted(hosted, sites) for number, sites in give.items()}

    def go_on(self, rounds: int, done: int, available: Mask | None, probability: Array | None) -> None:
        """Begin the rounds after ``done``."""
        DirectLink.__init__(self, rounds, done, available, probability)

    def begin(self, shard: Shard) -> int | None:
        return self.done + 1 if self.done < self.rounds else None

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array]:
        found = self._peers.exchange({number: shard.theta[rows] for number, rows in self._give.items()})
        return {u: theta for number in found for u, theta in zip(self._take[number], found[number], strict=True)}


class RoundShard:
    """One shard: its sites, its link, and the loop."""

    def __init__(
        self, peers: Peers, plan: RunPlan, state: ShardState, give: Mapping[int, Index], take: Mapping[int, Index]
    ) -> None:
        self._shard, self._link = Shard(plan), PeerLink(peers, give, take, plan.sites)
        self._shard.restore(state)

    def run(self, first: int, count: int, available: Mask | None, probability: Array | None) -> None:
        """Do ``count`` rounds from ``first`` on."""
        self._link.go_on(first + count - 1, first - 1, available, probability)
        run_rounds(self._shard, self._link)

    def state(self) -> dict[str, Any]:
        """Return everything that changes."""
        return vars(self._shard.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state`."""
        self._shard.restore(ShardState(**state))


class ShardedRounds:
    """Rounds of all sites of a shard, in shards on an engine; its state is brought up to date after every call."""

    def __init__(self, shard: Shard, engine: Engine) -> None:
        self.shard, self.engine, plan = shard, engine, shard.plan
        self._labels = partition(plan.n_sites, plan.edges, min(engine.workers, plan.n_sites))
        self._numbers = np.unique(self._labels)
        self._hosted = [np.flatnonzero(self._labels == k) for k in self._numbers]
        self._labels = np.searchsorted(self._numbers, self._labels)
        self._touching = [np.flatnonzero((self._labels[plan.edges] == k).any(axis=1)) for k in range(len(self._hosted))]
        self._shards: Shards | None = None

    def __call__(self, first: int, count: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Do ``count`` rounds from ``first`` on; presence and probabilities ``(count, V)`` when sites come and go."""
        if self._shards is None:  # now the state is that to begin with, also after a resume
            self._shards = self.engine.shards(self._make, len(self._hosted))
        for lo in range(0, count, self.engine.save_every):
            some = slice(lo, min(lo + self.engine.save_every, count))
            each = [
                tuple(None if given is None else given[some, hosted] for given in (available, probability))
                for hosted in self._hosted
            ]
            self._shards.call("run", first + some.start, some.stop - some.start, each=each)
            self._shards.save()
        self._collect(self._shards.call("state", changes=False))
        self._shards.renewed()

    def close(self) -> None:
        """End the shards."""
        if self._shards is not None:
            self._shards.close()

    def _make(self, k: int) -> tuple[type[RoundShard], Sequence[object]]:
        plan, hosted, edges, labels = self.shard.plan, self._hosted[k], self._touching[k], self._labels
        ends = plan.edges[edges]
        crossing = ends[labels[ends[:, 0]] != labels[ends[:, 1]]]
        here = labels[crossing] == k
        mine, theirs = crossing[here], crossing[~here]
        give = {int(r): np.unique(mine[labels[theirs] == r]) for r in np.unique(labels[theirs])}
        take = {r: np.unique(theirs[labels[theirs] == r]) for r in give}
        part = replace(
            plan,
            sites=hosted,
            theta=plan.theta[hosted],
            edges=ends,
            edge_radius=plan.edge_radius[edges],
            steps=plan.steps.take(hosted),
            rows=None if plan.rows is None else _compact(plan.rows, hosted),
            sparsity=None if plan.sparsity is None else plan.sparsity[hosted],
            alpha=None if plan.alpha is None else plan.alpha[edges],
            availability=None,
        )
        state = vars(self.shard.state())
        pieces = {name: array[self._places(name, k)] if len(array) else array for name, array in state.items()}
        return RoundShard, (part, ShardState(**pieces), give, take)

    def _places(self, name: str, k: int) -> Index:
        """Return where the lines of a part of the state of shard ``k`` are among all."""
        if name == "alpha":
            return self._touching[k]
        if name != "table":
            return self._hosted[k]
        assert self.shard.gradients is not None
        counts = self.shard.gradients.rows.counts
        return _lines(np.cumsum(counts) - counts, counts, self._hosted[k])

    def _collect(self, states: Sequence[Mapping[str, Any]]) -> None:
        whole = vars(self.shard.state())
        for k, state in enumerate(states):
            for name, array in whole.items():
                if len(array):
                    array[self._places(name, k)] = state[name]
        self.shard.restore(ShardState(**whole))


def _lines(starts: Index, counts: Index, sites: Index) -> Index:
    """Return the numbers of the rows of some sites, one site after the other."""
    n = counts[sites]
    return np.repeat(starts[sites] - (np.cumsum(n) - n), n) + np.arange(n.sum())


def _compact(rows: SiteRows, sites: Index) -> SiteRows:
    """Return the rows of some sites, without those of others."""
    counts = rows.counts[sites]
    data = rows.data.take(_lines(rows.starts, rows.counts, sites))
    return replace(rows.take(sites), data=data, starts=np.cumsum(counts) - counts)
