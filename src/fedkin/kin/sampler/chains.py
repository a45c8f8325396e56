"""Chains over partitions: scouts from every start, then longer chains from the best, weighted by what they explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fedkin._base import Array, Index, available_threads
from fedkin.kin.kernels.bundles import triangle, unpacked
from fedkin.kin.options import MANY_SITES, TEMPER, WHOLE_GROUPS, Sampling, are_kin
from fedkin.kin.sampler.record import Record
from fedkin.kin.sampler.sites import Sites, group_sums
from fedkin.kin.sampler.starts import MERGE_WIDTH, WIDE_WIDTH, edge_rates, make_starts
from fedkin.kin.sampler.walk import Course, State, Walk

#: Chains with less than this share of the weight of the best one add nothing.
LEAST_WEIGHT = 0.02
_Out = TypeVar("_Out")


@dataclass(frozen=True, eq=False)
class Chains:
    """What chains have found: weights ``(C,)``, records, and scores, bounds on the log evidence, ``(C,)``."""

    sites: Sites
    records: tuple[Record, ...]
    scores: Array
    starts: tuple[str, ...]

    @property
    def weights(self) -> Array:
        odds = np.exp(np.maximum((self.scores - self.scores.max()) / TEMPER, -50.0))
        return np.asarray(odds / odds.sum())

    def average(self, part: Callable[[Record], Array]) -> Array:
        """A weighted mean over kept sweeps of what records hold as sums."""
        each = (w * part(record) / len(record.z) for w, record in zip(self.weights, self.records, strict=True))
        return np.asarray(sum(each))

    def covariance(self, b: Array) -> Array:
        """Covariances ``(n, d, d)`` of the effects of the first n sites, with mean ``b (n, d)``.

        What differs between chains is included.
        """
        i, j = triangle(b.shape[1])
        total = np.zeros((len(b), len(i)))
        for weight, record in zip(self.weights, self.records, strict=True):
            apart = record.b[: len(b)] / len(record.z) - b
            total += weight * (record.covariance(len(b)) + apart[:, i] * apart[:, j])
        return unpacked(total, b.shape[1])

    def trace(self, part: Callable[[Record], Array]) -> Array:
        """Lines of all chains, ``(C, S, ...)``."""
        return np.stack([part(record) for record in self.records])


@dataclass(frozen=True, eq=False)
class Scouts:
    """Short chains, the best first: scores, where they stand, and where they began; ``rng`` is for those that go on."""

    sites: Sites
    scores: Array
    states: tuple[State, ...]
    starts: tuple[str, ...]
    rng: np.random.Generator

    def walk(self, sweeps: int, chains: int) -> Scouts:
        """The best of them after some more sweeps."""
        streams, course = self.rng.spawn(chains), _course(self.sites.size[0])

        def one(number: int) -> tuple[float, int]:
            walk = Walk(self.sites, self.states[number], course, streams[number])
            return run_chain(walk, sweeps, Record(*self.sites.size, 0)), number

        found = sorted(_in_threads(one, range(min(chains, len(self.states)))), reverse=True)
        scores, order = zip(*found, strict=True)
        states, names = (tuple(part[k] for k in order) for part in (self.states, self.starts))
        return Scouts(self.sites, np.array(scores), states, names, self.rng)

    def in_units(self, sites: Sites) -> Scouts:
        """The same partitions, of sites that say the same in other units; what else chains know has units."""
        states = tuple(_begin(state.z.copy(), state.share, sites) for state in self.states)
        return Scouts(sites, self.scores, states, self.starts, self.rng)

    def leave_behind(self, chains: Chains) -> None:
        """Let those that explain far less than the best go on from where that is."""
        best = int(np.argmax(chains.scores))
        for number in np.flatnonzero(chains.weights < LEAST_WEIGHT * chains.weights[best]).tolist():
            self.states[number].become(self.states[best])


def _begin(z: Index, share: int, sites: Sites) -> State:
    """Where a chain begins that knows a partition: widths are those of its groups' centres."""
    p, rates = sites.size[1], edge_rates(z, sites.neighbours)
    sums = group_sums(sites.sums[share], z, int(z.max()) + 1)
    precision = unpacked(sums[:, :-p], p) + np.eye(p) / WIDE_WIDTH
    centres = np.linalg.solve(precision, sums[:, -p:, None])[:, :, 0]
    width = (MERGE_WIDTH + (centres**2).sum(axis=0)) / (1 + len(centres))
    return State(z, share, np.zeros(p), width, float(np.exp(np.log(width).mean())), rates=rates)


def scout(sites: Sites, seed: int, sampling: Sampling) -> Scouts:
    """A short chain from every start."""
    rng = np.random.default_rng(seed)
    starts = make_starts(sites, rng, sampling.given)
    states = tuple(_begin(start.z, start.share, sites) for start in starts)
    names = tuple(start.name for start in starts)
    return Scouts(sites, np.zeros(len(starts)), states, names, rng).walk(sampling.scout, len(starts))


def go_on(scouts: Scouts, sampling: Sampling) -> Chains:
    """Longer chains from the best scouts, which they move."""
    sites = scouts.sites
    course, streams = _course(sites.size[0]), scouts.rng.spawn(sampling.chains)

    def one(number: int) -> tuple[float, Record]:
        record = Record(*sites.size, sampling.keep)
        walk = Walk(sites, scouts.states[number], course, streams[number])
        return run_chain(walk, sampling.burn, record), record

    scores, records = zip(*_in_threads(one, range(min(sampling.chains, len(scouts.states)))), strict=True)
    return Chains(sites, records, np.array(scores), scouts.starts[: len(records)])


def run_chain(walk: Walk, burn: int, record: Record) -> float:
    """Move over ``burn`` sweeps and one for each line of ``record``; the mean bound on the evidence.

    The bound of a sweep is the log density of data and state, plus the entropies of the conditionals that it was drawn
    from. Its mean leaves out the first half of the sweeps that are not kept.
    """
    best, scores, nothing = -np.inf, [], np.zeros((0, 0))
    for number in range(burn + len(record.z)):
        s = number - burn
        counts = s >= 0 and bool(are_kin(walk.state.share, 1 + int(np.ptp(walk.state.z) > 0)))
        score = walk.sweep(record.same if counts else nothing)
        if walk.density > best:
            best = walk.density
            record.best[:] = walk.state.z
        if s >= 0:
            record.keep(walk, s)
        if walk.course.moves:
            score += walk.move()
        if s >= 0:
            record.trace[s, 0] = score
        if 2 * number >= burn:
            scores.append(score)
    return float(np.mean(scores))


def _course(V: int) -> Course:
    return Course(collapsed=V < MANY_SITES, splits=V >= WHOLE_GROUPS)


def _in_threads(work: Callable[[int], _Out], items: Sequence[int]) -> list[_Out]:
    """Results in the order of the items; kernels release the GIL."""
    threads = min(available_threads(), len(items))
    if threads <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
