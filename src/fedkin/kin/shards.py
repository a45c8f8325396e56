"""One shard of sites, in several chains over their partitions; `fedkin.kin.sharded` tells what they are for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedkin._base import Array, Index, Mask, frozen
from fedkin.cluster import Host
from fedkin.kin.kernels import draw_groups, join_halves
from fedkin.kin.partitions import SHARES, group_sums, n_coefficients
from fedkin.kin.sampler import Record, as_likelihoods

#: A method of `SiteShard` and its arguments, and what it returns: arrays by part.
Request = tuple[str, tuple[Any, ...]]
Reply = tuple[Any, ...]


class Kept(NamedTuple):
    """Quantities that shards need to add a sweep's effects to their records."""

    line: int
    mean: Array  # (K, p) of the groups' centres
    covariance: Array | None  # (K, p, p), where covariances are kept
    share: int


class _Joining(NamedTuple):
    """Sites that may join the halves of a proposal, stage by stage, where stages end, and who joins the second half."""

    who: Index
    ends: Index
    second: Mask


class _Places:
    """One chain over the sites of a shard: groups, doubts, and sums over kept sweeps; ``open`` are its proposals."""

    def __init__(self, z: Index, p: int, keep: int) -> None:
        self.z, self.doubt = z.copy(), np.zeros(len(z))
        self.record = Record(len(z), p, keep, pairs=False)
        self.open: dict[int, _Joining] = {}

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

    def __init__(self, peers: Host, sums: Array, first: int, ends: Index, number: int) -> None:
        self.sums, self.first, self.p = frozen(sums.view()), first, n_coefficients(sums.shape[-1])
        self.parts = [slice(start, end) for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]
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
        doubt, leader = nobody((len(self.parts), groups))
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
        (doubt, first), entropy, odds = nobody((P, K)), np.zeros(P), np.zeros(K)
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

    def keep(self, chain: _Places, number: Index, kept: Kept | None) -> Reply:
        """Renumber groups, and add effects given the partition to the records."""
        chain.z[:] = number[chain.z]
        if kept is not None:
            line, mean, covariance, share = kept
            chain.record.z[line] = chain.z
            chain.record.add(line, self.sums[share], chain.z, mean, covariance, float(SHARES[share]))
        return ()

    # --- groups that split and merge ----------------------------------------------------------------------------------

    def divide(
        self,
        chain: _Places,
        key: int,
        pair: tuple[int, int],
        seeds: tuple[int, int],
        stages: tuple[Array, int],
        share: int,
        halves: tuple[Array, Array, Array],
        prior: Array,
        draws: bool,
    ) -> Reply:
        """Assign the sites of a stage, out of two groups, to the first or the second half, at random or as they are.

        In the given stage are the sites whose random number is in that interval; the seeds, which start the halves, are
        in none. The halves have sums ``(2, T + p)``, sizes and log marginals. Return sums and sizes of the assigned
        sites, and the log probability of the assignment, by part.
        """
        (turns, stage), (sums, sizes, logs) = stages, halves
        if not stage:
            chain.open[key] = self._joining(chain, key, pair, seeds, turns)
        who, ends, second = chain.open[key]
        now = slice(ends[stage - 1] if stage else 0, ends[stage])
        parts, part = np.unique(np.searchsorted(self.ends, who[now], side="right"), return_inverse=True)
        P, chance = len(parts), _uniform(key, 2 * (who[now] + self.first) + 1)
        joining, n, path = np.zeros((P, *sums.shape)), np.zeros((P, 2), dtype=np.int64), np.zeros(P)
        odds, work = math.log(sizes[1] / sizes[0]), np.zeros((2, self.p, self.p + 1))
        given = who[now], part, second[now], chance, sums, logs, odds, prior, work, draws
        join_halves(self.sums[share], *given, joining, n, path)
        return joining, n, path

    def _joining(
        self, chain: _Places, key: int, pair: tuple[int, int], seeds: tuple[int, int], turns: Array
    ) -> _Joining:
        who = np.flatnonzero((chain.z == pair[0]) | (chain.z == pair[1]))
        who = who[(who + self.first != seeds[0]) & (who + self.first != seeds[1])]
        stage = np.searchsorted(turns, _uniform(key, 2 * (who + self.first)), side="right").astype(np.int8) - 1
        who = who[np.argsort(stage, kind="stable")]
        return _Joining(who, np.cumsum(np.bincount(stage, minlength=len(turns) - 1)), chain.z[who] == pair[1])

    def accept(
        self,
        chain: _Places,
        key: int,
        pair: tuple[int, int],
        seeds: tuple[int, int],
        together: bool,
        groups: int,
        wanted: Index,
    ) -> Reply:
        """Merge two groups, or split them as assigned; return the leader of each group, and the wanted groups."""
        if together:
            chain.z[chain.z == pair[1]] = pair[0]
        else:
            who, _, second = chain.open[key]
            chain.z[who[second]] = pair[1]
            if 0 <= seeds[1] - self.first < len(chain.z):
                chain.z[seeds[1] - self.first] = pair[1]
        return *self._leads(chain, groups), self._groups_of(chain, wanted)


def _uniform(key: int, numbers: Index) -> Array:
    """Return random numbers of the generator SplitMix64 that belong to a key and to these ``numbers (n,)``."""
    x = np.uint64(key) + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)


def nobody(shape: tuple[int, ...]) -> tuple[Array, Index]:
    """Return doubt and position of the leads of groups without members."""
    return np.full(shape, np.inf), np.full(shape, np.iinfo(np.int64).max)
