"""Chains over partitions: scouts from every start, then longer chains from the best, weighted by what they explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from fedkin._base import Array, available_threads
from fedkin.kin.kernels.bundles import unpacked
from fedkin.kin.options import MANY_SITES, TEMPER, WHOLE_GROUPS, Sampling
from fedkin.kin.partitions import log_partitions, most_groups
from fedkin.kin.sampler.record import Record
from fedkin.kin.sampler.sites import Sites
from fedkin.kin.sampler.starts import MERGE_WIDTH, edge_rates, make_starts
from fedkin.kin.sampler.walk import Course, State, Walk

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
        """Covariances ``(V, d, d)`` of the effects, with mean ``b (V, d)``, what differs between chains included."""
        i, j = np.triu_indices(b.shape[1])
        total = np.zeros((len(b), len(i)))
        for weight, record in zip(self.weights, self.records, strict=True):
            apart = record.b / len(record.z) - b
            total += weight * (record.covariance + apart[:, i] * apart[:, j])
        return unpacked(total, b.shape[1])

    def trace(self, part: Callable[[Record], Array]) -> Array:
        """Lines of all chains, ``(C, S, ...)``."""
        return np.stack([part(record) for record in self.records])


@dataclass(frozen=True, eq=False)
class Scouts:
    """Short chains from every start, the best first; ``seeds`` are for those that go on from them."""

    sites: Sites
    scores: Array
    states: tuple[State, ...]
    starts: tuple[str, ...]
    seeds: tuple[np.random.Generator, ...]


def scout(sites: Sites, seed: int, sampling: Sampling) -> Scouts:
    """A short chain from every start."""
    V, p = sites.size
    rng = np.random.default_rng(seed)
    starts = make_starts(sites, rng, sampling.given)
    streams = rng.spawn(len(starts) + sampling.chains)
    course = _course(V)

    def one(number: int) -> tuple[float, State, str]:
        start = starts[number]
        rates, z = edge_rates(start.z, sites.neighbours), np.minimum(start.z, course.most - 1)
        state = State(z, start.share, np.zeros(p), np.full(p, MERGE_WIDTH), MERGE_WIDTH, rates=rates)
        walk = Walk(sites, state, course, streams[number])
        return run_chain(walk, sampling.scout, Record(V, p, 0)), state, start.name

    found = sorted(_in_threads(one, range(len(starts))), key=lambda run: -run[0])
    scores, states, names = zip(*found, strict=True)
    return Scouts(sites, np.array(scores), states, names, tuple(streams[len(starts) :]))


def go_on(scouts: Scouts, sampling: Sampling) -> Chains:
    """Longer chains from the best scouts, which they move."""
    sites = scouts.sites
    course = _course(sites.size[0])

    def one(number: int) -> tuple[float, Record]:
        record = Record(*sites.size, sampling.keep)
        walk = Walk(sites, scouts.states[number], course, scouts.seeds[number])
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
        # one group with a spread inside is a continuum: nobody is kin
        counts = s >= 0 and (walk.state.share == 0 or bool(np.ptp(walk.state.z)))
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


@cache
def _course(V: int) -> Course:
    return Course(log_partitions(V, most_groups(V)), collapsed=V < MANY_SITES, splits=V >= WHOLE_GROUPS)


def _in_threads(work: Callable[[int], _Out], items: Sequence[int]) -> list[_Out]:
    """Results in the order of the items; kernels release the GIL."""
    threads = min(available_threads(), len(items))
    if threads <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
