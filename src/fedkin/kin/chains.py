"""Chains over partitions: starting points, a pilot chain from each, and longer chains from the best."""

from __future__ import annotations

import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypedDict

import numpy as np
from scipy.cluster.vq import kmeans2, vq
from scipy.sparse import csr_array
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from fedkin._base import Array, Index, available_threads, report_progress
from fedkin.kin.kernels import log_marginals
from fedkin.kin.partitions import (
    Neighbours,
    SiteLikelihoods,
    by_size,
    edge_rates,
    group_sums,
    pack_prior,
    triangle,
    unpacked,
)
from fedkin.kin.sampler import MANY_SITES, Chain, Record, State
from fedkin.kin.sharded import ShardedSites

#: Up to this many sites merging starts from single sites, beyond it from at most so many groups by k-means.
MERGE_ALL = 400
#: Variance of group centres that merging assumes for a few far off, in units of that between sites; 1 for others.
WIDE_WIDTH = 10.0
#: Eigenvectors of the modularity matrix at either end of its spectrum, and principal directions of the sites' effects.
DIRECTIONS = 6
#: R-hat up to which chains agree, and up to which they nearly do.
AGREE, NEARLY = 1.05, 1.2
#: States of each chain that are kept.
DRAWS = 20


class Length(TypedDict, total=False):
    """Sampling settings of `find_kin`."""

    sweeps: int
    chains: int


#: Settings of `find_kin` if only predictions are needed.
QUICK: Length = {"sweeps": 24, "chains": 2}


class Given(NamedTuple):
    """Starting groups ``z (V,)`` from the user; ``fine`` groups may be merged."""

    z: Index
    fine: bool


@dataclass(frozen=True)
class Sampling:
    """Lengths of chains."""

    pilot: int = 16  # sweeps of the chain from each start
    burn: int = 20  # sweeps of the chains that run from the best pilots, before the first that is kept
    keep: int = 70
    chains: int = 3
    given: Given | None = None  # groups to start a chain from, in addition to those that are found
    longer: bool = False  # whether they run for longer where they disagree

    @classmethod
    def for_sites(cls, V: int, sweeps: int | None, chains: int) -> Sampling:
        """Return the chain lengths for V sites; with many sites estimates are more certain, so fewer sweeps suffice."""
        usual = cls() if V < MANY_SITES else cls(pilot=8, burn=10, keep=30)
        if sweeps is None:
            return replace(usual, chains=chains, longer=chains > 1)
        # short chains have short burn-ins
        return cls(min(usual.pilot, max(6, sweeps // 3)), min(usual.burn, max(6, sweeps // 3)), sweeps, chains)

    def brief(self) -> Sampling:
        """Return the chain lengths for intermediate estimates."""
        return replace(Sampling.for_sites(0, min(self.keep, QUICK["sweeps"]), self.chains), given=self.given)

    def again(self, V: int, d: int) -> Sampling | None:
        """Return twice the length without burn-in, for chains that disagree; None beyond 300 sweeps, or if they would
        take long."""
        if not self.longer or 2 * self.keep * V * d**2 > 2e6 or 2 * self.keep > 300:
            return None
        return replace(self, burn=0, keep=2 * self.keep)


@dataclass(frozen=True, eq=False)
class States:
    """Some states of the chains, evenly spaced."""

    weight: Array  # (S,) of each state among partitions; they sum to 1
    share: Index  # (S,) number of the share of the variance that is inside groups
    z: Index  # (S, V) group of each site
    m: Array  # (S, d) means and
    w: Array  # (S, d) variances of the groups' centres


@dataclass(frozen=True, eq=False)
class Chains:
    """Records of chains, with scores ``(C,)``, bounds on the log evidence, and weights ``(C,)``."""

    sites: SiteLikelihoods
    records: tuple[Record, ...]
    scores: Array
    starts: tuple[str, ...]

    @property
    def weights(self) -> Array:
        # scores are bounds on the evidence, not evidences: differences count a quarter
        odds = np.exp(np.maximum((self.scores - self.scores.max()) / 4.0, -50.0))
        return np.asarray(odds / odds.sum())

    def average(self, name: str) -> Array:
        """Return a weighted mean over the kept sweeps of a sum in the records."""
        each = zip(self.weights, self.records, strict=True)
        return np.asarray(sum(w * getattr(record, name) / len(record.z) for w, record in each))

    def covariance(self, b: Array) -> Array:
        """Return covariances ``(n, d, d)`` of the first n sites' effects, whose mean is ``b (n, d)``."""
        i, j = triangle(b.shape[1])
        total = np.zeros((len(b), len(i)))
        for weight, record in zip(self.weights, self.records, strict=True):
            apart = record.b[: len(b)] / len(record.z) - b
            total += weight * (record.covariance(len(b)) + apart[:, i] * apart[:, j])
        return unpacked(total, b.shape[1])

    def states(self, most: int) -> States:
        """Return at most this many states of each chain."""
        kept = []
        for weight, record in zip(self.weights, self.records, strict=True):
            lines = np.unique(np.linspace(0, len(record.z) - 1, most).astype(int))
            each, share = np.full(len(lines), weight / len(lines)), record.trace[lines, 2].astype(np.int64)
            kept.append((each, share, record.z[lines].astype(np.int64), record.m[lines], record.w[lines]))
        return States(*(np.concatenate(part) for part in zip(*kept, strict=True)))

    def trace(self, name: str) -> Array:
        """Return the entries of all chains, ``(C, S, ...)``."""
        return np.stack([getattr(record, name) for record in self.records])


class PilotChains:
    """Pilot chains from all starts, the best first. They run in threads, or on the shards that hold the sites."""

    def __init__(self, sites: SiteLikelihoods, seed: int, sampling: Sampling, shards: ShardedSites | None = None):
        self.sites, self.shards, self.rng = sites, shards, np.random.default_rng(seed)
        starts = make_starts(sites, self.rng, sampling.given)
        self.states = [_state_at(z, share, sites) for _, z, share in starts]
        scores = [score for score, _ in self._run(len(starts), sampling.pilot, 0)]
        order = np.argsort(scores)[::-1].tolist()
        self.states, self.starts = [self.states[k] for k in order], tuple(starts[k][0] for k in order)

    def _run(self, chains: int, burn: int, keep: int) -> list[tuple[float, Record]]:
        """Run chains from the first states, which they move; return their scores and records."""
        chains = min(chains, len(self.states))
        streams = self.rng.spawn(chains)
        if self.shards is not None:
            return self.shards.run(self.states[:chains], streams, burn, keep)

        done, lock, context = itertools.count(1), threading.Lock(), copy_context()

        def tell() -> None:
            with lock:
                context.run(report_progress, "sampling groups", next(done), chains * (burn + keep))

        def one(number: int) -> tuple[float, Record]:
            record = Record(*self.sites.size, keep)
            return Chain(self.sites, self.states[number], streams[number]).run(burn, record, tell), record

        with ThreadPoolExecutor(min(available_threads(), chains)) as pool:  # kernels release the GIL
            return list(pool.map(one, range(chains)))

    def run_chains(self, sampling: Sampling) -> Chains:
        """Run longer chains from the best pilots; this changes their states."""
        scores, records = zip(*self._run(sampling.chains, sampling.burn, sampling.keep), strict=True)
        return Chains(self.sites, records, np.array(scores), self.starts[: len(records)])


def _state_at(z: Index, share: int, sites: SiteLikelihoods) -> State:
    """Return a state with this partition and the widths of its groups' centres."""
    p, rates = sites.size[1], edge_rates(z, sites.neighbours)
    sums = group_sums(sites.sums[share], z, int(z.max()) + 1)
    precision = unpacked(sums[:, :-p], p) + np.eye(p) / WIDE_WIDTH
    centres = np.linalg.solve(precision, sums[:, -p:, None])[:, :, 0]
    width = (1.0 + (centres**2).sum(axis=0)) / (1 + len(centres))
    return State(z, share, np.zeros(p), width, float(np.exp(np.log(width).mean())), rates=rates)


def make_starts(
    sites: SiteLikelihoods, rng: np.random.Generator, given: Given | None = None
) -> list[tuple[str, Index, int]]:
    """Return starting partitions: name, groups ``(V,)`` by decreasing size, and index of the share inside groups."""
    V, p = sites.size
    many = min(V, max(12, int(np.sqrt(V)) * (2 if V <= MERGE_ALL else 6)), MERGE_ALL)
    effects = sites.c[-1]  # the mixed model's, in units of their standard deviation

    def merged(z: Index, rates: tuple[float, float] = (0.5, 0.5), share: int = 0, width: float = 1.0) -> Index:
        return by_size(merge(sites.sums[share], width * np.ones(p), sites.neighbours, rates, by_size(z)))

    def fine() -> Index:
        return np.arange(V) if V <= MERGE_ALL else kmeans(effects, many, rng)

    plain = merged(fine())
    starts = [
        ("one group", np.zeros(V, dtype=np.int64), len(sites.sums) - 1),
        ("merged", plain, 0),
        ("merged with variance inside", merged(fine(), share=3), 3),
    ]
    if V < MANY_SITES:
        starts.append(("merged far off", merged(fine(), share=1, width=WIDE_WIDTH), 1))
    if 0 < sites.neighbours.neighbour.size < V * (V - 1):
        top, bottom = modularity_directions(sites.neighbours)
        seen = effects @ np.linalg.svd(effects, full_matrices=False)[2][:DIRECTIONS].T
        both = np.column_stack([seen / max(seen.std(), 1e-300), top / max(top.std(), 1e-300)])
        for name, places in (("graph", top), ("graph, inverted", bottom), ("graph and sites", both)):
            rates = edge_rates(kmeans(places, min(6, V), rng), sites.neighbours)
            starts.append((name, merged(kmeans(places, many, rng), rates), 0))
        starts.append(("merged with the graph", merged(fine(), edge_rates(plain, sites.neighbours)), 0))
    if given is not None:
        starts.append(("given", merged(given.z) if given.fine else by_size(given.z), 0))
    return starts


def modularity_directions(neighbours: Neighbours) -> tuple[Array, Array]:
    """Return points ``(V, k)`` for the sites along the extreme eigenvectors of ``A - d d' / sum d``."""
    first, neighbour, weight = neighbours
    V = len(first) - 1
    k = min(DIRECTIONS, V // 2)
    A = csr_array((weight, neighbour, first), shape=(V, V))
    degree: Array = np.asarray(A.sum(axis=1), dtype=np.float64)
    if V <= 1500:
        values, vectors = np.linalg.eigh(A.toarray() - np.outer(degree, degree) / degree.sum())
    else:
        operator = LinearOperator(
            (V, V), matvec=lambda x: A @ x - degree * (degree @ x) / degree.sum(), dtype=np.float64
        )
        # rough directions will do, and ones would be a bad start: they are in the null space
        begin = np.random.default_rng(0).normal(size=V)
        try:
            values, vectors = eigsh(operator, k=2 * k, which="BE", v0=begin, ncv=6 * k, tol=1e-2, maxiter=30)
        except ArpackNoConvergence as some:
            values, vectors = some.eigenvalues, some.eigenvectors
        k = min(k, len(values))
    points = vectors * np.sqrt(np.abs(values))
    order = np.argsort(values)
    return points[:, order[-k:]], points[:, order[:k]]


def kmeans(points: Array, k: int, rng: np.random.Generator) -> Index:
    """Return labels ``(V,)`` of at most k groups; centres are learned from at most 5,000 points."""
    step = max(1, -(-len(points) // 5_000))
    some = points[::step]
    k = min(k, len(np.unique(some, axis=0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a group that is left without sites
        centres, labels = kmeans2(some, k, iter=15, minit="++", seed=rng)
    return np.asarray(labels if step == 1 else vq(points, centres)[0], dtype=np.int64)


def merge(sums: Array, width: Array, neighbours: Neighbours, rates: tuple[float, float], z: Index) -> Index:
    """Merge groups ``z (V,)`` (numbered 0..K-1), the best pair first, while the evidence increases.

    ``sums (V, T + p)`` are site likelihoods, ``width (p,)`` the variances of the groups' centres around 0, ``rates``
    the rates of edges inside and between groups.
    """
    K = int(z.max()) + 1
    label = np.arange(K)  # where each of the first groups is now
    totals, size = group_sums(sums, z, K), np.bincount(z, minlength=K).astype(np.float64)
    edges = neighbours.between(z, K)
    edge, gap = np.log(rates[0] / rates[1]), np.log((1 - rates[0]) / (1 - rates[1]))
    prior = pack_prior(np.zeros(len(width)), width)
    work, log = np.zeros((2, len(width), len(width) + 1)), np.empty(K)

    def gains(a: int, others: int) -> Array:
        """Return the gain in evidence from merging group ``a`` with each of the first ``others``."""
        new, linked = np.empty(others), edges[a, :others]
        log_marginals(totals, totals[a], 1.0, prior, len(width), work, new)
        apart = size[a] * size[:others] - linked
        return np.asarray(new - log[a] - log[:others] + linked * edge + apart * gap)

    log_marginals(totals, totals[0], 0.0, prior, len(width), work, log)
    gain = np.full((K, K), -np.inf)
    for a in range(1, K):
        gain[a, :a] = gain[:a, a] = gains(a, a)
    while True:
        into, gone = sorted(int(k) for k in np.unravel_index(gain.argmax(), gain.shape))
        if not gain[into, gone] > 0:
            return label[z]
        apart = size[into] * size[gone] - edges[into, gone]
        log[into] += log[gone] + gain[into, gone] - edges[into, gone] * edge - apart * gap
        totals[into] += totals[gone]
        size[into] += size[gone]
        size[gone] = 0.0
        edges[into] += edges[gone]
        edges[:, into] = edges[into]
        label[label == gone] = into
        gain[gone] = gain[:, gone] = -np.inf
        left = np.flatnonzero(size)
        if 2 * len(left) <= len(size):  # groups that have merged are cleared away
            totals, size, log = totals[left], size[left], log[left]
            edges, gain = edges[np.ix_(left, left)], gain[np.ix_(left, left)]
            place = np.zeros(int(left[-1]) + 1, dtype=np.int64)
            place[left] = np.arange(len(left))
            label, into = place[label], int(place[into])
        row = np.where(size > 0, gains(into, len(size)), -np.inf)
        row[into] = -np.inf
        gain[into] = gain[:, into] = row


# --- how well chains have mixed --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """Convergence diagnostics of the sampler's chains.

    Attributes
    ----------
    weights : array (C,)
        Weights of the chains in every average.
    starts : tuple of C str
        Starting points of the chains.
    draws : int
        Number of sweeps kept from each chain.
    rhat, size : dict
        Split R-hat and effective sample size over all chains, for the number of groups, the bound on the evidence and
        the sites' parameters (the worst and the median). Parameters are the reported ones, averaged with the model
        without groups; disagreement between chains is measured relative to their reported variance.
    """

    weights: Array
    starts: tuple[str, ...]
    draws: int
    rhat: dict[str, float]
    size: dict[str, float]

    @property
    def verdict(self) -> Literal["agree", "nearly", "disagree"]:
        """Agreement of the chains (all sites, most sites or none), by R-hat of the sites' parameters."""
        worst, typical = self.rhat["parameters, worst"], self.rhat["parameters, median"]
        if worst <= AGREE:
            return "agree"
        return "nearly" if typical <= AGREE or worst <= NEARLY else "disagree"


def split_rhat(draws: Array, variance: Array | None = None) -> Array:
    """Return the potential scale reduction of chains split in half; it is near 1 when they agree.

    ``draws (chains, draws, ...)`` must have at least four draws per chain. If the draws are conditional expectations,
    ``variance (...)`` is the full variance of the quantity. The result is 1 if nothing varies.
    """
    halves = _split(draws)
    n, rounding = halves.shape[1], 1e-12 * (1e-300 + np.abs(halves).max(axis=(0, 1)) ** 2)
    within = halves.var(axis=1, ddof=1).mean(axis=0) if variance is None else variance
    between = n * halves.mean(axis=1).var(axis=0, ddof=1)
    moving = within > rounding
    ratio = np.divide(between, within, out=np.zeros_like(within), where=moving)
    still = np.where(between > rounding, np.inf, 1.0)
    return np.asarray(np.where(moving, np.sqrt((n - 1 + ratio) / n), still))


def effective_size(draws: Array, variance: Array | None = None) -> Array:
    """Return the effective sample size of all chains together, by Geyer's initial monotone sequence on split chains.

    Arguments are those of `split_rhat`. The mean of expectations is more precise than that of as many draws, so with a
    variance the size is at most the number of draws, and equals it if nothing varies.
    """
    halves = _split(draws)
    m, n = halves.shape[:2]
    chains = halves.reshape(m, n, -1)
    total = float(m * n)
    centred = chains - chains.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * n, axis=1)
    power = (spectrum.real**2 + spectrum.imag**2).mean(axis=0)
    covariance = np.fft.irfft(power, 2 * n, axis=0)[:n] / n
    plus = covariance[0] + chains.mean(axis=1).var(axis=0, ddof=1)
    still = np.ptp(chains, axis=(0, 1)) <= 1e-12 * (1e-300 + np.abs(chains).max(axis=(0, 1)))
    correlation = 1.0 - (covariance[0] * n / (n - 1) - covariance) / np.where(still, 1.0, plus)
    correlation[0] = 1.0
    # sums of neighbours are positive in theory, and fall: the rest is noise
    pairs = correlation[: 2 * (n // 2)].reshape(n // 2, 2, -1).sum(axis=1)[: max((n - 3) // 2, 1)]
    kept = np.logical_and.accumulate(pairs > 0, axis=0)
    last = np.minimum(2 * kept.sum(axis=0), n - 1)
    time = -1.0 + 2.0 * (np.minimum.accumulate(pairs, axis=0) * kept).sum(axis=0)
    time = time + np.maximum(correlation[last, np.arange(len(last))], 0.0)
    sizes = total / np.maximum(time, 1.0 / np.log10(total))
    if variance is not None:
        total_variance = np.where(still, 1.0, covariance[0] * n / (n - 1) + chains.mean(axis=1).var(axis=0))
        sizes = np.minimum(sizes * np.maximum(variance.ravel() / total_variance, 1.0), total)
    return np.asarray(np.where(still, total, sizes).reshape(halves.shape[2:]))


def _split(draws: Array) -> Array:
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, draws.shape[1] - half :]])
