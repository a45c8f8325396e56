"""Link sites within one program: all in one shard, or in shards on an engine, with bit-identical results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.admm.rounds import Link, Shard, State, run_rounds
from fedkin.admm.run_plan import RunPlan
from fedkin.cluster import Cut, Engine, Host, Shards, cut_graph
from fedkin.errors import ParameterError


class DirectLink(Link):
    """Link of a shard that hosts all sites, so nothing leaves the process.

    ``available`` and ``probability (R, V)`` cover the rounds after ``done``, for intermittent sites.
    """

    def __init__(
        self, rounds: int, done: int = 0, available: Mask | None = None, probability: Array | None = None
    ) -> None:
        super().__init__(rounds, done)
        self._first = done + 1
        self._available, self._probability = available, probability

    def begin(self, shard: Shard) -> int | None:
        if shard.foreign.size:
            raise ParameterError("DirectLink needs a shard that hosts all neighbours of its sites")
        return super().begin(shard)

    def presence(self, t: int) -> tuple[Mask | None, Array | None]:
        k = t - self._first
        available, probability = self._available, self._probability
        return None if available is None else available[k], None if probability is None else probability[k]

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array]:
        return {}


class PeerLink(DirectLink):
    """Link of a shard on an engine, which sends the thetas of sites with edges to other shards."""

    def __init__(self, peers: Host, cut: Cut, *rounds: Any) -> None:
        super().__init__(*rounds)
        self._peers, self._give = peers, cut.give
        self._take = {number: cut.sites[places].tolist() for number, places in cut.take.items()}

    def begin(self, shard: Shard) -> int | None:
        return Link.begin(self, shard)

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array]:
        found = self._peers.exchange({number: shard.theta[rows] for number, rows in self._give.items()})
        return {u: theta for number in found for u, theta in zip(self._take[number], found[number], strict=True)}


class RoundShard(Shard):
    """One shard with its sites and the loop of rounds."""

    def __init__(self, peers: Host, plan: RunPlan, state: State, cut: Cut) -> None:
        super().__init__(plan)
        self._peers, self._cut = peers, cut
        self.restore(state)

    def run(self, first: int, count: int, available: Mask | None, probability: Array | None) -> None:
        """Run ``count`` rounds starting at ``first``."""
        run_rounds(self, PeerLink(self._peers, self._cut, first + count - 1, first - 1, available, probability))


class ShardedRounds:
    """Rounds run in shards on an engine; the state of the full shard is updated after every call."""

    def __init__(self, shard: Shard, engine: Engine) -> None:
        self.shard, self.engine = shard, engine
        self._cuts = cut_graph(shard.plan.n_sites, shard.plan.edges, engine.workers)
        self._hosted = [cut.sites[: cut.hosted] for cut in self._cuts]
        self._shards: Shards | None = None

    def __call__(self, first: int, count: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Run ``count`` rounds from ``first``; presence and probabilities ``(count, V)`` for intermittent sites."""
        if self._shards is None:  # the state is now the initial one, also after a resume
            self._shards = self.engine.shards(self._make, len(self._hosted))
        for lo in range(0, count, self.engine.save_every):
            some = slice(lo, min(lo + self.engine.save_every, count))
            each = [
                tuple(None if given is None else given[some, hosted] for given in (available, probability))
                for hosted in self._hosted
            ]
            self._shards.call("run", first + some.start, some.stop - some.start, each=each)
            self._shards.save()
        whole = self.shard.state()
        for k, state in enumerate(self._shards.call("state", changes=False)):
            for name, array in whole.items():
                if len(array):
                    array[self._places(name, k)] = state[name]
        self.shard.restore(whole)
        self._shards.renewed()

    def close(self) -> None:
        """Stop the shards."""
        if self._shards is not None:
            self._shards.close()

    def _make(self, k: int) -> tuple[type[RoundShard], Sequence[object]]:
        part = replace(self.shard.plan.part(self._hosted[k]), availability=None)
        if (rows := part.rows) is not None:  # only these rows travel
            data = rows.data.take(rows.numbers(np.arange(rows.counts.size)))
            part = replace(part, rows=replace(rows, data=data, starts=np.cumsum(rows.counts) - rows.counts))
        state = self.shard.state()
        pieces = {name: array[self._places(name, k)] if len(array) else array for name, array in state.items()}
        return RoundShard, (part, pieces, self._cuts[k])

    def _places(self, name: str, k: int) -> Index:
        """Return where the lines of a part of the state of shard ``k`` are among all."""
        if name == "alpha":
            return np.sort(self._cuts[k].edges)  # sums of duals have one order
        if name != "table":
            return self._hosted[k]
        assert self.shard.gradients is not None
        rows = self.shard.gradients.rows
        return replace(rows, starts=np.cumsum(rows.counts) - rows.counts).numbers(self._hosted[k])
