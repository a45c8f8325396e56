"""Chains over partitions of many sites in shards: centres are sent to the shards, and sums over groups are returned.

Given the number of components, their shares and their centres, sites draw their groups independently. So a sweep is one
call to all shards, and results have the size of the groups. Numbers of components, shares and centres are drawn between
sweeps, from these sums (the prior is that of Miller and Harrison 2018). Groups also split and merge as a whole, by
proposals that are sums over sites; all proposals of a sweep grow in the same few calls. Sites are in parts of a fixed
size, and sums are added in the order of the parts. So the number of shards does not change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, gammaln, logit

from fedkin._base import Array, Index, Mask, frozen, report_progress
from fedkin.cluster import Engine, Host, running_engine
from fedkin.kin.kernels import draw_groups, join_halves
from fedkin.kin.partitions import (
    EVENNESS,
    SHARES,
    SiteLikelihoods,
    capacity,
    group_sums,
    log_partitions,
    n_coefficients,
)
from fedkin.kin.sampler import MOST_PAIRS, SHARE_EVERY, Chain, Record, State, as_likelihoods, gain_apart, pick

#: Sites of a part; there are at most 256 parts, which bounds what comes back from the shards of a sweep.
PART = 2048
#: Pairs of sites per sweep that may split or merge groups, and log odds of a split: more pairs than in one process,
#: where single sites move one after another and do some of that, too.
TRIES, SPLIT_ODDS = 32, logit(0.0125)

#: A method of `SiteShard` and its arguments, and what it returns: arrays by part.
Request = tuple[str, tuple[Any, ...]]
Reply = tuple[Any, ...]


class _Tries(NamedTuple):
    """Pairs of sites that are to split or merge groups."""

    limits: Array  # (n,) of the log acceptance ratio
    splits: Mask  # (n,)
    sites: Index  # (2 n,), those of the first half with those of the second


@dataclass
class _Proposal:
    """Two groups that may merge, or one that may split, into halves that are drawn around two sites.

    At a stage, sites join whose random numbers are in that interval of ``turns``: a few at first, so that those who
    come later know where.
    """

    number: int
    pair: tuple[int, int]
    seeds: tuple[int, int]
    splits: bool
    limit: float  # of the log acceptance ratio
    least: float  # of the log probability of the way back
    key: int
    turns: Array
    sums: Array  # (2, T + p) of the halves, which have these sizes and log marginals
    sizes: Index
    logs: Array
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
        n, m = self.sizes
        apart = float(gain_apart(chain, self.logs.sum() - chain.log[self.pair[0]], n, m, 0.0, 1))
        return bool(self.limit <= apart - self.path - SPLIT_ODDS)


# --- the sites of a shard ---------------------------------------------------------------------------------------------


class _Places:
    """One chain over the sites of a shard: groups, doubts, and sums over kept sweeps.

    ``open`` has the sites that may join the halves of each proposal, by stage, where stages end, and who joins the
    second half.
    """

    def __init__(self, z: Index, p: int, keep: int) -> None:
        self.z, self.doubt = z.copy(), np.zeros(len(z))
        self.record = Record(len(z), p, keep, pairs=False)
        self.open: dict[int, tuple[Index, Index, Mask]] = {}

    def arrays(self) -> dict[str, Any]:
        """Return the mutable state."""
        record = self.record
        mine: dict[str, Any] = {"groups": self.z, "doubt": self.doubt, "b": record.b, "moments": record.moments}
        return {**mine, "means": record.means, "z": record.z}


class SiteShard:
    """Some sites, in parts, with their groups in several chains.

    ``sums (R, n, T + p)`` are those of `SiteLikelihoods`; ``first`` is the position of the first site among all sites;
    parts end at ``ends (P,)`` and are numbered from ``number``.
    """

    def __init__(self, host: Host, sums: Array, first: int, ends: Index, number: int) -> None:
        self.sums, self.first, self.p = frozen(sums.view()), first, n_coefficients(sums.shape[-1])
        self.parts = [slice(start, end) for start, end in pairwise([0, *ends.tolist()])]
        self.ends, self.number = ends, number
        self.chains: list[_Places] = []

    def state(self) -> dict[str, Array]:
        return {f"{k}.{name}": each for k, one in enumerate(self.chains) for name, each in one.arrays().items()}

    def restore(self, state: Mapping[str, Array]) -> None:
        groups = [each.astype(np.int64) for name, each in state.items() if name.endswith(".groups")]
        self.chains = [_Places(z, self.p, len(state[f"{k}.z"])) for k, z in enumerate(groups)]
        for k, one in enumerate(self.chains):
            for name, each in one.arrays().items():
                each[...] = state[f"{k}.{name}"]

    def begin(self, keep: int, zs: Sequence[Index]) -> None:
        """Start chains from these groups of the sites."""
        self.chains = [_Places(z, self.p, keep) for z in zs]

    def answer(self, requests: Sequence[tuple[int, Sequence[Request]]]) -> list[list[Reply]]:
        """Run the requests of each chain in turn."""
        return [[getattr(self, method)(self.chains[k], *given) for method, given in some] for k, some in requests]

    def results(self) -> list[dict[str, Array]]:
        """Return groups and records."""
        return [one.arrays() for one in self.chains]

    def group_sums(self, chain: _Places, groups: int) -> Reply:
        """Return sums over groups for all shares, sizes, and the leader of each group."""
        sums = [group_sums(self.sums[:, part], chain.z[part], groups) for part in self.parts]
        sizes = [np.bincount(chain.z[part], minlength=groups) for part in self.parts]
        return np.array(sums), np.array(sizes), *self._leads(chain, groups)

    def _leads(self, chain: _Places, groups: int) -> tuple[Array, Index]:
        """Return doubt and position ``(P, K)`` of the surest member of each group."""
        doubt, leader = _nobody((len(self.parts), groups))
        place = np.repeat(np.arange(len(self.parts)), np.diff(self.ends, prepend=0)), chain.z
        np.minimum.at(doubt, place, chain.doubt)
        least = np.flatnonzero(chain.doubt == doubt[place])
        np.minimum.at(leader, (place[0][least], place[1][least]), self.first + least)
        return doubt, leader

    def draw(
        self,
        chain: _Places,
        share: int,
        centres: Array,
        logs: Array,
        sizes: Index,
        lead: Array,
        leader: Index,
        key: int,
        every: bool,
        wanted: Index,
    ) -> Reply:
        """Draw each site's group.

        Return sums over groups (for all shares if ``every``), sizes, a bound on the entropy, the leader of each group,
        and the groups of the ``wanted`` sites, -1 for those of other shards.
        """
        chain.open.clear()
        phi, K, P = as_likelihoods(centres), len(logs), len(self.parts)
        sums, n = np.zeros((P, K, phi.shape[1])), np.zeros((P, K), dtype=np.int64)
        (doubt, first), entropy, odds = _nobody((P, K)), np.zeros(P), np.zeros(K)
        for k, part in enumerate(self.parts):
            chance = np.random.default_rng((key, self.number + k)).random(part.stop - part.start)
            entropy[k] = draw_groups(
                self.sums[share, part], phi, logs, chance, self.first + part.start, sizes, lead, leader,
                chain.z[part], chain.doubt[part], odds, sums[k], n[k], doubt[k], first[k],
            )  # fmt: skip
        if every:
            sums = np.array([group_sums(self.sums[:, part], chain.z[part], K) for part in self.parts])
        return sums, n, entropy, doubt, first, self._groups_of(chain, wanted)

    def _groups_of(self, chain: _Places, wanted: Index) -> Array:
        here = (wanted >= self.first) & (wanted < self.first + len(chain.z))
        found = np.full(len(wanted), -1)
        found[here] = chain.z[wanted[here] - self.first]
        return found[None]

    def keep(
        self, chain: _Places, number: Index, line: int, mean: Array, covariance: Array | None, share: int
    ) -> Reply:
        """Renumber groups, and add effects given the partition to a line of the records, unless it is negative."""
        chain.z[:] = number[chain.z]
        if line >= 0:
            chain.record.z[line] = chain.z
            chain.record.add(line, self.sums[share], chain.z, mean, covariance, float(SHARES[share]))
        return ()

    def divide(self, chain: _Places, one: _Proposal, share: int, prior: Array) -> Reply:
        """Assign the sites of a stage, out of two groups, to the first or the second half, at random or as they are.

        Return sums and sizes of the assigned sites, and the log probability of the assignment, by part.
        """
        if not one.stage:
            who = np.flatnonzero((chain.z == one.pair[0]) | (chain.z == one.pair[1]))
            who = who[~np.isin(who + self.first, one.seeds)]
            chance = _uniform(one.key, 2 * (who + self.first))
            turn = np.searchsorted(one.turns, chance, side="right").astype(np.int8) - 1
            who = who[np.argsort(turn, kind="stable")]
            ends = np.cumsum(np.bincount(turn, minlength=len(one.turns) - 1))
            chain.open[one.key] = who, ends, chain.z[who] == one.pair[1]
        who, ends, second = chain.open[one.key]
        now = slice(ends[one.stage - 1] if one.stage else 0, ends[one.stage])
        parts, part = np.unique(np.searchsorted(self.ends, who[now], side="right"), return_inverse=True)
        P, chance = len(parts), _uniform(one.key, 2 * (who[now] + self.first) + 1)
        joining, n, path = np.zeros((P, *one.sums.shape)), np.zeros((P, 2), dtype=np.int64), np.zeros(P)
        odds, work = math.log(one.sizes[1] / one.sizes[0]), np.zeros((2, self.p, self.p + 1))
        given = who[now], part, second[now], chance, one.sums, one.logs, odds, prior, work, one.splits
        join_halves(self.sums[share], *given, joining, n, path)
        return joining, n, path

    def accept(self, chain: _Places, one: _Proposal, groups: int, wanted: Index) -> Reply:
        """Merge two groups, or split them as assigned; return the leader of each group, and the wanted groups."""
        if one.splits:
            who, _, second = chain.open[one.key]
            chain.z[who[second]] = one.pair[1]
            if 0 <= one.seeds[1] - self.first < len(chain.z):
                chain.z[one.seeds[1] - self.first] = one.pair[1]
        else:
            chain.z[chain.z == one.pair[1]] = one.pair[0]
        return *self._leads(chain, groups), self._groups_of(chain, wanted)


def _uniform(key: int, numbers: Index) -> Array:
    """Return random numbers of the generator SplitMix64 that belong to a key and to these ``numbers (n,)``."""
    x = np.uint64(key) + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)


def _nobody(shape: tuple[int, ...]) -> tuple[Array, Index]:
    """Return doubt and position of the leads of groups without members."""
    return np.full(shape, np.inf), np.full(shape, np.iinfo(np.int64).max)


# --- chains over all shards -------------------------------------------------------------------------------------------


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
            covariance = record.note(self, s) if s >= 0 else None
            self._later.append(("keep", (number, s, self.mean, covariance, self.state.share)))
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
        limits, splits = np.log(1.0 - self.rng.random(TRIES)), self.rng.random(TRIES) < expit(SPLIT_ODDS)
        return _Tries(limits, splits, np.concatenate([one, other + (other >= one)]))

    def _kinds(self) -> tuple[Array, Array, Index, Array, Index]:
        """Draw centres and shares of all kinds, groups without members included: centres, log shares, sizes, leads."""
        self.describe()
        state, V, live, p = self.state, self.sites.size[0], self.members, len(self.state.m)
        t, even = len(live), EVENNESS[state.even]
        kinds = np.arange(t, min(V, t + 512) + 1.0)
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
        lead, leader = _nobody(sizes.shape)
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
                asked: list[Request] = [("divide", (replace(one), self.state.share, self.prior)) for one in growing]
                for one, (sums, n, path) in zip(growing, (yield from self._ask(*asked)), strict=True):
                    one.sums, one.sizes = one.sums + sums.sum(axis=0), one.sizes + n.sum(axis=0)
                    one.logs, one.path, one.stage = (
                        self.log_marginals(one.sums),
                        one.path + float(path.sum()),
                        one.stage + 1,
                    )
            taken = next((one for one in proposed if one.taken(self)), None)
            if taken is None:
                return
            number, (a, b), K = taken.number + 1, taken.pair, int(self.used[0]) + taken.splits
            ((doubt, leader, found),) = yield from self._ask(("accept", (taken, K, pairs.sites)))
            labels = found.max(axis=0)
            new, sizes = self.sums[:K].copy(), self.n[:K].copy()
            if taken.splits:
                new[[a, b]], sizes[[a, b]] = taken.sums, taken.sizes
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
        # with four times as many sites at every stage
        turns = np.concatenate([[0.0], 4.0 ** np.arange(-int(math.log(many, 4.0)), 1.0)])
        sums = np.ascontiguousarray(self.sites.sums[self.state.share, list(seeds)])
        halves = sums, np.ones(2, dtype=np.int64), self.log_marginals(sums)
        return _Proposal(t, (a, b), seeds, splits, limit, least, self._key(), turns, *halves)


class ShardedSites:
    """Shards of sites on an engine, for chains over all sites."""

    def __init__(self, engine: Engine, sites: SiteLikelihoods) -> None:
        V = sites.size[0]
        self.sites, self.engine, self._sweeps = sites, engine, 0
        P = min(256, -(-V // PART))
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
            for name in ("b", "moments", "means", "z"):
                into = getattr(record, name)
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
