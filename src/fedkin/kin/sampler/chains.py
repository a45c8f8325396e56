"""Chains over partitions: scouts from every start, then longer chains from the best, weighted by what they explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fedkin._base import Array, available_threads
from fedkin.kin.kernels.bundles import Course, Record, Sites, State, packed
from fedkin.kin.kernels.sweeps import run_chain
from fedkin.kin.options import MANY_SITES, MOST_PAIRS, SHARES, TEMPER, WHOLE_GROUPS, Sampling
from fedkin.kin.partitions import log_partitions, most_groups
from fedkin.kin.quadratics import apply
from fedkin.kin.sampler.neighbours import Neighbours
from fedkin.kin.sampler.starts import MERGE_WIDTH, edge_rates, make_starts
from fedkin.solvers.kernels.jit import frozen

#: Effects that are traced for diagnostics.
TRACED = 20_000
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

    def trace(self, part: Callable[[Record], Array]) -> Array:
        """Lines of all chains, ``(C, S, ...)``."""
        return np.stack([part(record) for record in self.records])


def integrate_effects(W: Array, c: Array, neighbours: Neighbours) -> Sites:
    """What sites say about groups, ``W (V, p, p)`` and ``c (V, p)``, for every share of the spread inside groups."""
    values, vectors = np.linalg.eigh(W)
    values = np.maximum(values, 0.0)
    turned = apply(np.swapaxes(vectors, 1, 2), c)
    V, p = c.shape
    H = np.empty((len(SHARES), V, p * (p + 1) // 2))
    C, k = np.empty((len(SHARES), V, p)), np.empty((len(SHARES), V))
    for r, share in enumerate(SHARES):
        kept = 1.0 / (1.0 + share * values)
        H[r] = packed((vectors * (values * kept)[:, None, :]) @ np.swapaxes(vectors, 1, 2))
        C[r] = apply(vectors, kept * turned)
        k[r] = 0.5 * (share * kept * turned**2).sum(axis=1) - 0.5 * np.log1p(share * values).sum(axis=1)
    return Sites(*(frozen(part) for part in (H, C, k, SHARES, *neighbours)))


def with_neighbours(sites: Sites, neighbours: Neighbours) -> Sites:
    """What the same sites say, with another graph."""
    parts = (frozen(part) for part in neighbours)
    return sites._replace(**dict(zip(Neighbours._fields, parts, strict=True)))


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
    V, p = sites.c.shape[1:]
    rng = np.random.default_rng(seed)
    starts = make_starts(sites, rng)
    streams = rng.spawn(len(starts) + sampling.chains)
    course = _course(sites, sampling.scout)

    def one(number: int) -> tuple[float, State, str]:
        start = starts[number]
        rates = edge_rates(start.z, sites)
        state = State(
            np.minimum(start.z, course.most - 1),
            np.array([start.share]),
            np.zeros(p),
            np.full(p, MERGE_WIDTH),
            np.array([MERGE_WIDTH, 2.0, *rates]),
        )
        return run_chain(sites, state, empty_record(V, p, 0), course, streams[number]), state, start.name

    found = sorted(_in_threads(one, range(len(starts))), key=lambda run: -run[0])
    scores, states, names = zip(*found, strict=True)
    return Scouts(sites, np.array(scores), states, names, tuple(streams[len(starts) :]))


def go_on(scouts: Scouts, sampling: Sampling) -> Chains:
    """Longer chains from the best scouts, which they move."""
    sites = scouts.sites
    V, p = sites.c.shape[1:]
    course = _course(sites, sampling.burn)

    def one(number: int) -> tuple[float, Record]:
        record = empty_record(V, p, sampling.keep)
        return run_chain(sites, scouts.states[number], record, course, scouts.seeds[number]), record

    scores, records = zip(*_in_threads(one, range(min(sampling.chains, len(scouts.states)))), strict=True)
    return Chains(sites, records, np.array(scores), scouts.starts[: len(records)])


def _course(sites: Sites, burn: int) -> Course:
    V = sites.c.shape[1]
    most, edges = most_groups(V), int(sites.neighbour.size > 0)
    prior = frozen(log_partitions(V, most))
    return Course(burn, most, edges, int(V < MANY_SITES), 1, int(V >= WHOLE_GROUPS), prior)


def empty_record(V: int, p: int, keep: int) -> Record:
    """Room for what a chain keeps; without kept sweeps hardly any."""
    full = V if keep else 0
    traced = min(full, max(TRACED // p, 1))
    pairs = full if V <= MOST_PAIRS else 0
    return Record(
        np.zeros((full, p)),
        np.zeros((full, p * (p + 1) // 2)),
        np.zeros((pairs, pairs)),
        np.zeros((keep, 5)),
        np.zeros((keep, traced, p)),
        np.zeros((keep, V), dtype=np.int64),
        np.zeros((keep, p)),
        np.zeros((keep, p)),
        np.zeros(V, dtype=np.int64),
    )


def _in_threads(work: Callable[[int], _Out], items: Sequence[int]) -> list[_Out]:
    """Results in the order of the items; kernels release the GIL."""
    threads = min(available_threads(), len(items))
    if threads <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
