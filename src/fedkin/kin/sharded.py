"""Chains over partitions of many sites in shards: centres are sent to the shards, and sums over groups are returned.

Given the number of components, their shares and their centres, sites draw their groups independently. So a sweep is one
call to all shards, and results have the size of the groups. Numbers of components, shares and centres are drawn between
sweeps, from these sums (the prior is that of Miller and Harrison 2018). Groups also split and merge as a whole, by
proposals that are sums over sites; all proposals of a sweep grow in the same few calls. Sites are in parts of a fixed
size, and sums are added in the order of the parts. So the number of shards does not change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln

from fedkin._base import Array, Index, Mask, report_progress
from fedkin.cluster import Engine, running_engine
from fedkin.kin.partitions import (
    EVENNESS,
    SHARES,
    SiteLikelihoods,
    capacity,
    log_partitions,
)
from fedkin.kin.sampler import (
    MOST_PAIRS,
    SHARE_EVERY,
    Chain,
    Record,
    State,
    gain_apart,
    pick,
)
from fedkin.kin.shards import Kept, Reply, Request, SiteShard, nobody

#: Sites of a part, and the most parts, which bound what comes back from the shards of a sweep.
PART, MOST_PARTS = 2048, 256
#: Pairs of sites per sweep that may split or merge groups, and how many may split: more of them than in one process,
#: where single sites move one after another and do some of that, too.
TRIES, SPLITS = 32, 0.0125
SPLIT_ODDS = math.log(SPLITS / (1.0 - SPLITS))
#: Factor by which the number of sites that join the halves of a proposal grows from call to call.
GROWTH = 4.0
#: Numbers of kinds beyond that of the groups that are considered.
MORE_KINDS = 512


class _Tries(NamedTuple):
    """Pairs of sites that are to split or merge groups."""

    limits: Array  # (n,) of the log acceptance ratio
    splits: Mask  # (n,)
    sites: Index  # (2 n,), those of the first half with those of the second


@dataclass
class _Proposal:
    """Two groups that may merge, or one that may split, into halves that are drawn around two sites."""

    number: int
    pair: tuple[int, int]
    seeds: tuple[int, int]
    splits: bool
    limit: float  # of the log acceptance ratio
    least: float  # of the log probability of the way back
    key: int
    turns: Array  # intervals of random numbers: a few sites first, so that those who come later know where
    halves: tuple[Array, Index, Array]
    path: float = 0.0
    stage: int = 0

    @property
    def grows(self) -> bool:
        """Return whether sites have yet to join the halves, and may be accepted there."""
        return self.stage < len(self.turns) - 1 and self.path >= self.least

    def taken(self, chain: _ShardedChain) -> bool:
        """Return whether the Metropolis step accepts."""
        if not self.splits:
            return self.path >= self.least
        _, n, logs = self.halves
        apart = float(gain_apart(chain, logs.sum() - chain.log[self.pair[0]], n[0], n[1], 0.0, 1))
        return self.limit <= apart - self.path - SPLIT_ODDS


class _ShardedChain(Chain):
    """A chain whose sites are in shards: `steps` asks for what it needs of them."""

    def __init__(self, sites: SiteLikelihoods, state: State, rng: np.random.Generator, *, moves: bool) -> None:
        self.every = np.zeros((len(SHARES), 0, sites.sums.shape[-1]))  # sums over groups, for all shares
        self._later: list[Request] = []
        super().__init__(sites, state, rng, collapsed=False, moves=moves)

    def collect(self) -> None:
        """Set the sums to those of the drawn share."""
        if K := self.every.shape[1]:
            self._take(self.every[self.state.share], self.n[:K])

    def sums_by_share(self) -> Array:
        return self.every

    def _take(self, sums: Array, n: Index) -> None:
        """Take up sums and sizes of groups, in arrays that have space for one more."""
        V, K = self.sites.size[0], len(n)
        if (most := capacity(V, K + 1)) > self.most:
            self.most, self.partitions = most, log_partitions(V, most)
            self.odds = np.zeros(4 + self.partitions.shape[1])
        self.sums, self.n = np.concatenate([sums, np.zeros((1, sums.shape[1]))]), np.append(n, 0)
        self.used, self.log = np.array([K]), np.zeros(K + 1)

    def _lead(self, doubt: Array, leader: Index) -> None:
        """Take up the leader of each group, from arrays by part ``(P, K)``."""
        self.lead = doubt.min(axis=0)
        self.leader = np.where(doubt == self.lead, leader, np.iinfo(np.int64).max).min(axis=0)

    def _ask(self, *requests: Request) -> Generator[list[Request], list[Reply], list[Reply]]:
        """Make requests, after those that could wait for others; return the replies."""
        before, self._later = self._later, []
        return (yield [*before, *requests])[len(before) :]

    def steps(self, burn: int, record: Record) -> Generator[list[Request], list[Reply], float]:
        """Sweep ``burn`` times and once for each entry of ``record``; return the mean bound on the evidence."""
        scores: list[float] = []
        ((every, n, *leads),) = yield from self._ask(("group_sums", (int(self.state.z.max()) + 1,)))
        self.every, sizes = every.sum(axis=0), n.sum(axis=0)
        self._take(self.every[self.state.share], sizes)
        self._lead(*leads)
        labels, pairs = None, self._pairs()
        for turn in range(burn + len(record.z)):
            s = turn - burn
            self.set_prior()
            if labels is not None:
                yield from self._split_and_merge(pairs, labels)
            pairs, all_shares = self._pairs(), self.sweeps % SHARE_EVERY == 0
            more = self._key(), all_shares, pairs.sites
            (reply,) = yield from self._ask(("draw", (self.state.share, *self._kinds(), *more)))
            sums, n, entropy, doubt, leader, wanted = reply
            labels, sizes, sums = wanted.max(axis=0), n.sum(axis=0), sums.sum(axis=0)
            self._take(sums[self.state.share] if all_shares else sums, sizes)
            self._lead(doubt, leader)
            self.sweeps += 1
            log = self.describe()
            # groups without members are left out from here on
            live, number = self.members, np.full(len(sizes), -1)
            number[live] = np.arange(len(live))
            labels = number[labels]
            self.every = sums[:, live] if all_shares else self.every[:, :0]
            self._take(self.sums[live], sizes[live])
            self.members, self.lead, self.leader = np.arange(len(live)), self.lead[live], self.leader[live]
            score = self.score(log, float(entropy.sum()))
            kept = Kept(s, self.mean, record.note(self, s), self.state.share) if s >= 0 else None
            self._later.append(("keep", (number, kept)))
            if self.moves:
                score += self.move()
            if s >= 0:
                record.trace[s, 0] = score
            if 2 * turn >= burn:
                scores.append(score)
        yield from self._ask()
        return float(np.mean(scores))

    def _key(self) -> int:
        return int(self.rng.integers(2**63))

    def _pairs(self) -> _Tries:
        """Draw pairs of sites that are to split or merge groups."""
        one, other = self.rng.integers(self.sites.size[0] - np.array([[0], [1]]), size=(2, TRIES))
        limits, splits = np.log(1.0 - self.rng.random(TRIES)), self.rng.random(TRIES) < SPLITS
        return _Tries(limits, splits, np.concatenate([one, other + (other >= one)]))

    def _kinds(self) -> tuple[Array, Array, Index, Array, Index]:
        """Draw centres and shares of all kinds, groups without members included: centres, log shares, sizes, leads."""
        self.describe()
        state, V, live, p = self.state, self.sites.size[0], self.members, len(self.state.m)
        t, even = len(live), EVENNESS[state.even]
        kinds = np.arange(t, min(V, t + MORE_KINDS) + 1.0)
        logs = gammaln(kinds + 2) - gammaln(kinds + 7) + gammaln(kinds + 1) - gammaln(kinds - t + 1)
        logs += gammaln(even * kinds) - gammaln(even * kinds + V)
        new = pick(logs, self.rng)
        centres = np.concatenate([self.drawn, state.m + np.sqrt(state.w) * self.rng.standard_normal((new, p))])
        sizes = np.zeros(max(int(self.used[0]), t) + new, dtype=np.int64)
        place = np.append(live, int(self.used[0]) + np.arange(new))
        sizes[live] = self.n[live]
        shares = self.rng.standard_gamma(sizes[place] + even)
        all_centres, log_shares = np.zeros((len(sizes), p)), np.full(len(sizes), -np.inf)
        all_centres[place], log_shares[place] = centres, np.log(np.maximum(shares / shares.sum(), 1e-300))
        lead, leader = nobody(sizes.shape)
        lead[live], leader[live] = self.lead[live], self.leader[live]
        return all_centres, log_shares, sizes, lead, leader

    def _split_and_merge(self, pairs: _Tries, labels: Index) -> Generator[list[Request], list[Reply], None]:
        """Split or merge whole groups by Metropolis steps, one after another.

        Only a step that is taken changes anything, so those after it are proposed again, and all others at once.
        """
        number = 0
        while number < TRIES:
            self.set_logs()
            proposed = [one for t in range(number, TRIES) if (one := self._proposed(pairs, labels, t)) is not None]
            while growing := [one for one in proposed if one.grows]:
                replies = yield from self._ask(*(self._division(one) for one in growing))
                for one, (sums, n, path) in zip(growing, replies, strict=True):
                    joined = one.halves[0] + sums.sum(axis=0)
                    one.halves = joined, one.halves[1] + n.sum(axis=0), self.log_marginals(joined)
                    one.path, one.stage = one.path + float(path.sum()), one.stage + 1
            taken = next((one for one in proposed if one.taken(self)), None)
            if taken is None:
                return
            number, (a, b), K = taken.number + 1, taken.pair, int(self.used[0]) + taken.splits
            request = "accept", (taken.key, (a, b), taken.seeds, not taken.splits, K, pairs.sites)
            ((doubt, leader, found),) = yield from self._ask(request)
            labels = found.max(axis=0)
            new, sizes = self.sums[:K].copy(), self.n[:K].copy()
            if taken.splits:
                new[[a, b]], sizes[[a, b]] = taken.halves[:2]
            else:
                new[a], new[b], sizes[a], sizes[b] = new[a] + new[b], 0.0, sizes[a] + sizes[b], 0
            self._take(new, sizes)
            self._lead(doubt, leader)

    def _proposed(self, pairs: _Tries, labels: Index, t: int) -> _Proposal | None:
        """Return a proposal, unless it is rejected at once."""
        splits, limit, sites = bool(pairs.splits[t]), float(pairs.limits[t]), pairs.sites
        seeds, a, b = (int(sites[t]), int(sites[TRIES + t])), int(labels[t]), int(labels[TRIES + t])
        if (a == b) != splits:
            return None
        least, many = -np.inf, int(self.n[a])
        if splits:
            b = int(self.used[0])
        else:
            together = float(self.log_marginals(self.sums[[a]] + self.sums[[b]])[0])
            apart = float(gain_apart(self, self.log[a] + self.log[b] - together, self.n[a], self.n[b], 0.0, 0))
            least, many = limit - SPLIT_ODDS + apart, many + int(self.n[b])
            if least > 0.0:  # whatever the way back is
                return None
        turns = np.concatenate([[0.0], GROWTH ** np.arange(-int(math.log(many, GROWTH)), 1.0)])
        return _Proposal(t, (a, b), seeds, splits, limit, least, self._key(), turns, self._seeded(seeds))

    def _division(self, one: _Proposal) -> Request:
        how = (one.turns, one.stage), self.state.share, one.halves, self.prior, one.splits
        return "divide", (one.key, one.pair, one.seeds, *how)

    def _seeded(self, seeds: tuple[int, int]) -> tuple[Array, Index, Array]:
        """Return sums, sizes and log marginals of two groups of one site each."""
        sums = np.ascontiguousarray(self.sites.sums[self.state.share, list(seeds)])
        return sums, np.ones(2, dtype=np.int64), self.log_marginals(sums)


class ShardedSites:
    """Shards of sites on an engine, for chains over all sites."""

    def __init__(self, engine: Engine, sites: SiteLikelihoods) -> None:
        V = sites.size[0]
        self.sites, self.engine, self._sweeps = sites, engine, 0
        P = min(MOST_PARTS, -(-V // PART))
        ends = np.linspace(0, V, P + 1).astype(np.int64)
        cuts = np.linspace(0, P, min(engine.workers, P) + 1).astype(np.int64).tolist()
        self.spans = [slice(int(ends[a]), int(ends[b])) for a, b in pairwise(cuts)]

        def make(k: int) -> tuple[Any, tuple[Any, ...]]:
            span, (a, b) = self.spans[k], cuts[k : k + 2]
            return SiteShard, (sites.sums[:, span], span.start, ends[a + 1 : b + 1] - span.start, a)

        self.shards = engine.shards(make, len(self.spans))

    def run(
        self,
        states: Sequence[State],
        streams: Sequence[np.random.Generator],
        burn: int,
        keep: int,
        *,
        moves: bool = True,
    ) -> list[tuple[float, Record]]:
        """Run chains from these states, which are updated; return their scores and records."""
        self.shards.renewed()
        each = [[[state.z[span] for state in states]] for span in self.spans]
        self.shards.call("begin", keep, each=each)
        made = [_ShardedChain(self.sites, state, rng, moves=moves) for state, rng in zip(states, streams, strict=True)]
        records = [Record(*self.sites.size, keep) for _ in made]
        steps = [chain.steps(burn, record) for chain, record in zip(made, records, strict=True)]
        asked = {k: next(one) for k, one in enumerate(steps)}
        scores = np.zeros(len(steps))
        while asked:
            # chains draw together; in between no state is complete
            behind = {k: some for k, some in asked.items() if not some or some[-1][0] != "draw"}
            now = behind or dict(asked)
            for k, reply in zip(list(now), self._answers(list(now.items()), save=not behind), strict=True):
                try:
                    asked[k] = steps[k].send(reply)
                except StopIteration as end:
                    scores[k] = end.value
                    del asked[k]
            report_progress("sampling groups", min(chain.sweeps for chain in made), burn + keep)
        found = self.shards.call("results", changes=False)
        for k, (state, record) in enumerate(zip(states, records, strict=True)):
            parts: list[tuple[str, Any]]
            parts = [("b", record.b), ("moments", record.moments), ("means", record.means), ("z", record.z)]
            for name, into in parts:
                whole = np.concatenate([one[k][name] for one in found], axis=int(name in ("means", "z")))
                into[...] = whole[:, : into.shape[1]]
            state.z = np.concatenate([one[k]["groups"] for one in found])
        return [(float(score), record) for score, record in zip(scores, records, strict=True)]

    def _answers(self, requests: list[tuple[int, list[Request]]], save: bool) -> list[list[Reply]]:
        """Return the answers of all parts, in their order."""
        found = self.shards.call("answer", requests)
        self._sweeps += save
        if save and self._sweeps % self.engine.save_every == 0:
            self.shards.save()
        each = (zip(*chain, strict=True) for chain in zip(*found, strict=True))
        return [[tuple(map(np.concatenate, zip(*one, strict=True))) for one in chain] for chain in each]


@contextmanager
def sharded(sites: SiteLikelihoods) -> Iterator[ShardedSites | None]:
    """Put many sites into shards of the running engine, if any; sites with a graph are not sharded."""
    engine = running_engine()
    if engine is None or sites.size[0] <= MOST_PAIRS or sites.neighbours.neighbour.size:
        yield None
        return
    made = ShardedSites(engine, sites)
    try:
        yield made
    finally:
        made.shards.close()
