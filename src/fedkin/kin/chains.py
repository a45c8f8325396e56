"""Chains over partitions: starts, pilot chains from each of them, and longer chains from the best."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

import numpy as np
from scipy.cluster.vq import kmeans2, vq
from scipy.sparse import csr_array
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from fedkin._base import Array, Index, available_threads
from fedkin.kin.kernels import log_marginals
from fedkin.kin.likelihoods import Matrices, shrunk
from fedkin.kin.partitions import (
    SHARES,
    Neighbours,
    SiteLikelihoods,
    by_size,
    edge_rates,
    group_sums,
    pack_prior,
    triangle,
    unpacked,
)
from fedkin.kin.sampler import LOG_SHARES, MANY_SITES, Chain, Record, State

#: Chains' scores are bounds on the evidence, not evidences: differences count a quarter.
TEMPER = 4.0
#: Chains with less than this share of the weight of the best one add nothing.
LEAST_WEIGHT = 0.02
#: Sites times squares of directions times sweeps that chains which disagree may take, and the most sweeps they keep.
MOST_WORK, MOST_SWEEPS = 2e6, 300
#: Up to this many sites merging starts from single sites, beyond it from k-means.
MERGE_ALL = 400
#: Most groups that merging starts from beyond that, and most sites that k-means moves its centres by.
MOST_SEEDS, MOST_POINTS = 400, 5000
#: Groups that have merged are cleared away when this share is left.
FULL = 0.75
#: Variances of group centres that merging assumes, in units of that between sites: usual ones, and of a few far off.
MERGE_WIDTH, WIDE_WIDTH = 0.8, 10.0
#: Eigenvectors of the modularity matrix at either end of its spectrum, principal directions of the sites' effects.
GRAPH_DIRECTIONS, DIRECTIONS = 6, 5
#: R-hat up to which chains agree, and up to which they nearly do.
AGREE, NEARLY = 1.05, 1.2
#: Up to this many sites all eigenvectors are computed.
ALL_VECTORS = 1500


class Length(TypedDict, total=False):
    """How long `find_kin` samples."""

    sweeps: int
    chains: int


#: What `find_kin` takes where only predictions are wanted.
QUICK: Length = {"sweeps": 24, "chains": 2}


class Given(NamedTuple):
    """Groups ``z (V,)`` that the user suggests; of fine ones those that are alike are to be merged."""

    z: Index
    fine: bool


@dataclass(frozen=True)
class Sampling:
    """How long to sample."""

    pilot: int = 16  # sweeps of the chain from each start, and of those that ask whether variances are alike
    burn: int = 20  # sweeps of the chains that run from the best pilots, before the first that is kept
    keep: int = 70
    chains: int = 3
    given: Given | None = None  # groups to start a chain from, in addition to those that are found
    longer: bool = False  # whether they run for longer where they disagree

    @classmethod
    def for_sites(cls, V: int, sweeps: int | None, chains: int) -> Sampling:
        """Return the lengths for V sites: many of them leave little open, so that fewer sweeps do."""
        usual = cls() if V < MANY_SITES else cls(pilot=8, burn=10, keep=30)
        if sweeps is None:
            return replace(usual, chains=chains, longer=chains > 1)
        # short chains have short burn-ins
        return cls(min(usual.pilot, max(6, sweeps // 3)), min(usual.burn, max(6, sweeps // 3)), sweeps, chains)

    def brief(self) -> Sampling:
        """Return lengths for estimates from which a fit goes on."""
        return replace(Sampling.for_sites(0, min(self.keep, QUICK["sweeps"]), self.chains), given=self.given)

    def again(self, V: int, d: int) -> Sampling | None:
        """Return twice the length without a burn-in, for chains that disagree; None where it is enough."""
        work = self.keep * 2 * V * d**2
        if not self.longer or work > MOST_WORK or 2 * self.keep > MOST_SWEEPS:
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
    """Records of chains, with their scores ``(C,)``, bounds on the log evidence, and weights ``(C,)``."""

    sites: SiteLikelihoods
    records: tuple[Record, ...]
    scores: Array
    starts: tuple[str, ...]

    @property
    def weights(self) -> Array:
        odds = np.exp(np.maximum((self.scores - self.scores.max()) / TEMPER, -50.0))
        return np.asarray(odds / odds.sum())

    def average(self, part: Callable[[Record], Array]) -> Array:
        """Return a weighted mean over kept sweeps of what records hold as sums."""
        each = (w * part(record) / len(record.z) for w, record in zip(self.weights, self.records, strict=True))
        return np.asarray(sum(each))

    def covariance(self, b: Array) -> Array:
        """Return covariances ``(n, d, d)`` of the first n sites' effects, whose mean is ``b (n, d)``."""
        i, j = triangle(b.shape[1])
        total = np.zeros((len(b), len(i)))
        for weight, record in zip(self.weights, self.records, strict=True):
            apart = record.b[: len(b)] / len(record.z) - b
            total += weight * (record.covariance(len(b)) + apart[:, i] * apart[:, j])
        return unpacked(total, b.shape[1])

    def states(self, most: int) -> States:
        """Return some states of all chains, at most so many of each."""
        kept = []
        for weight, record in zip(self.weights, self.records, strict=True):
            lines = np.unique(np.linspace(0, len(record.z) - 1, most).astype(int))
            each, share = np.full(len(lines), weight / len(lines)), record.trace[lines, 2].astype(np.int64)
            kept.append((each, share, record.z[lines].astype(np.int64), record.m[lines], record.w[lines]))
        return States(*(np.concatenate(part) for part in zip(*kept, strict=True)))

    def trace(self, part: Callable[[Record], Array]) -> Array:
        """Return lines of all chains, ``(C, S, ...)``."""
        return np.stack([part(record) for record in self.records])


@dataclass(frozen=True, eq=False)
class PilotChains:
    """Short chains, the best first: scores, states and names of starts; ``rng`` is for chains that run from them."""

    sites: SiteLikelihoods
    scores: Array
    states: tuple[State, ...]
    starts: tuple[str, ...]
    rng: np.random.Generator

    @classmethod
    def from_starts(cls, sites: SiteLikelihoods, seed: int, sampling: Sampling) -> PilotChains:
        """Run a short chain from every start."""
        rng = np.random.default_rng(seed)
        starts = make_starts(sites, rng, sampling.given)
        states = tuple(_state_at(z, share, sites) for _, z, share in starts)
        made = cls(sites, np.zeros(len(starts)), states, tuple(name for name, _, _ in starts), rng)
        return made.run(sampling.pilot, len(starts))

    def run(self, sweeps: int, chains: int) -> PilotChains:
        """Return the best of them after some more sweeps."""
        found = sorted(((score, k) for k, (score, _) in enumerate(self._run(chains, sweeps, 0))), reverse=True)
        scores, states, names = zip(*((score, self.states[k], self.starts[k]) for score, k in found), strict=True)
        return PilotChains(self.sites, np.array(scores), states, names, self.rng)

    def _run(self, chains: int, burn: int, keep: int) -> list[tuple[float, Record]]:
        """Run chains from the first states, which they move; return their scores and records."""
        streams = self.rng.spawn(chains)

        def one(number: int) -> tuple[float, Record]:
            record = Record(*self.sites.size, keep)
            return Chain(self.sites, self.states[number], streams[number]).run(burn, record), record

        numbers = range(min(chains, len(self.states)))
        with ThreadPoolExecutor(min(available_threads(), len(numbers))) as pool:  # kernels release the GIL
            return list(pool.map(one, numbers))

    def in_units(self, sites: SiteLikelihoods) -> PilotChains:
        """Return the same partitions for likelihoods in other units; everything else in a state has units."""
        states = tuple(_state_at(state.z.copy(), state.share, sites) for state in self.states)
        return PilotChains(sites, self.scores, states, self.starts, self.rng)

    def run_chains(self, sampling: Sampling) -> Chains:
        """Run longer chains from the best, whose states they move."""
        scores, records = zip(*self._run(sampling.chains, sampling.burn, sampling.keep), strict=True)
        return Chains(self.sites, records, np.array(scores), self.starts[: len(records)])

    def restart_stuck(self, chains: Chains) -> None:
        """Move chains that explain far less than the best to where that is."""
        best = int(np.argmax(chains.scores))
        for number in np.flatnonzero(chains.weights < LEAST_WEIGHT * chains.weights[best]).tolist():
            self.states[number].copy_from(self.states[best])


def _state_at(z: Index, share: int, sites: SiteLikelihoods) -> State:
    """Return a state with this partition, and widths of its groups' centres."""
    p, rates = sites.size[1], edge_rates(z, sites.neighbours)
    sums = group_sums(sites.sums[share], z, int(z.max()) + 1)
    precision = unpacked(sums[:, :-p], p) + np.eye(p) / WIDE_WIDTH
    centres = np.linalg.solve(precision, sums[:, -p:, None])[:, :, 0]
    width = (MERGE_WIDTH + (centres**2).sum(axis=0)) / (1 + len(centres))
    return State(z, share, np.zeros(p), width, float(np.exp(np.log(width).mean())), rates=rates)


def make_starts(
    sites: SiteLikelihoods, rng: np.random.Generator, given: Given | None = None
) -> list[tuple[str, Index, int]]:
    """Return partitions to start from: name, groups ``(V,)`` by falling size, and number of the share inside."""
    V, p = sites.size
    many = min(V, max(12, int(np.sqrt(V)) * (2 if V <= MERGE_ALL else 6)), MOST_SEEDS)
    effects = sites.c[-1]  # the mixed model's, in units of their standard deviation
    _, _, directions = np.linalg.svd(effects, full_matrices=False)
    seen = effects @ directions[:DIRECTIONS].T

    def merged(z: Index, rates: tuple[float, float] = (0.5, 0.5), share: int = 0, width: float = MERGE_WIDTH) -> Index:
        return by_size(merge(sites.sums[share], width * np.ones(p), sites.neighbours, rates, by_size(z)))

    def fine() -> Index:
        return np.arange(V) if V <= MERGE_ALL else kmeans(effects, many, rng)

    plain = merged(fine())
    starts = [
        ("one group", np.zeros(V, dtype=np.int64), len(sites.sums) - 1),
        ("merged", plain, 0),
        ("merged in principal directions", merged(kmeans(seen, many, rng)), 0),
        ("merged with variance inside", merged(fine(), share=3), 3),
    ]
    if V < MANY_SITES:
        starts.append(("merged far off", merged(fine(), share=1, width=WIDE_WIDTH), 1))
    if 0 < sites.neighbours.neighbour.size < V * (V - 1):
        top, bottom = modularity_directions(sites.neighbours)
        both = np.column_stack([seen / max(seen.std(), 1e-300), top / max(top.std(), 1e-300)])
        for name, places in (("graph", top), ("graph, inverted", bottom), ("graph and sites", both)):
            rates = edge_rates(kmeans(places, min(6, V), rng), sites.neighbours)
            starts.append((name, merged(kmeans(places, many, rng), rates), 0))
        starts.append(("merged with the graph", merged(fine(), edge_rates(plain, sites.neighbours)), 0))
    if given is not None:
        starts.append(("given", merged(given.z) if given.fine else by_size(given.z), 0))
    return starts


def modularity_directions(neighbours: Neighbours) -> tuple[Array, Array]:
    """Return sites as points ``(V, k)`` by the largest and by the smallest eigenvalues of ``A - d d' / sum d``."""
    first, neighbour, weight = neighbours
    V = len(first) - 1
    k = min(GRAPH_DIRECTIONS, V // 2)
    A = csr_array((weight, neighbour, first), shape=(V, V))
    degree: Array = np.asarray(A.sum(axis=1), dtype=np.float64)
    if V <= ALL_VECTORS:
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
    """Return labels ``(V,)`` of at most k groups; many points only follow the centres of some."""
    step = max(1, -(-len(points) // MOST_POINTS))
    some = points[::step]
    k = min(k, len(np.unique(some, axis=0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a group that is left without sites
        centres, labels = kmeans2(some, k, iter=15, minit="++", seed=rng)
    return np.asarray(labels if step == 1 else vq(points, centres)[0], dtype=np.int64)


def merge(sums: Array, width: Array, neighbours: Neighbours, rates: tuple[float, float], z: Index) -> Index:
    """Merge groups ``z (V,)`` (numbered 0..K-1), the best pair first, while the evidence rises.

    ``sums (V, T + p)`` are site likelihoods, ``width (p,)`` variances of the groups' centres around 0, ``rates`` those
    of edges inside and between groups.
    """
    K = int(z.max()) + 1
    label = np.arange(K)  # where each of the first groups is now
    totals, size = group_sums(sums, z, K), np.bincount(z, minlength=K).astype(np.float64)
    edges = neighbours.between(z, K)
    edge, gap = np.log(rates[0] / rates[1]), np.log((1 - rates[0]) / (1 - rates[1]))
    prior = pack_prior(np.zeros(len(width)), width)
    work, log = np.zeros((len(width), len(width) + 1)), np.empty(K)

    def gains(a: int, others: int) -> Array:
        """Return what the evidence gains where group ``a`` merges with each of the first ``others``."""
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
        if len(left) <= FULL * len(size):
            totals, size, log = totals[left], size[left], log[left]
            edges, gain = edges[np.ix_(left, left)], gain[np.ix_(left, left)]
            place = np.zeros(int(left[-1]) + 1, dtype=np.int64)
            place[left] = np.arange(len(left))
            label, into = place[label], int(place[into])
        row = np.where(size > 0, gains(into, len(size)), -np.inf)
        row[into] = -np.inf
        gain[into] = gain[:, into] = row


# --- how well chains have mixed --------------------------------------------------------------------------------------


def split_rhat(draws: Array, variance: Array | None = None) -> Array:
    """Return the potential scale reduction of chains cut in half; near 1 when they agree.

    ``draws (chains, draws, ...)``, at least four of each chain. Where they are expectations given a part of the state,
    ``variance (...)`` is that of what they are expectations of. 1 where nothing varies.
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

    Arguments are those of `split_rhat`. The mean of expectations is known better than from as many draws: with a
    variance the size is at most the number of draws, which it is where nothing varies.
    """
    halves = _split(draws)
    m, n = halves.shape[:2]
    chains = halves.reshape(m, n, -1)
    total = float(m * n)
    centred = chains - chains.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * n, axis=1)
    power = (spectrum.real**2 + spectrum.imag**2).mean(axis=0)
    covariance = np.fft.irfft(power, 2 * n, axis=0)[:n] / n
    plus = covariance[0] + (chains.mean(axis=1).var(axis=0, ddof=1) if m > 1 else 0.0)
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


# --- many coefficients: groups are looked for in some directions, and pool in all of them ---------------------------

#: Sweeps of each chain by whose partitions effects in all directions are averaged, and how many of these at most.
SWEEPS, PARTITIONS = 20, 6
#: Chances below this are nothing, and so is what log evidences that are lower by this leave.
LEAST, FAR = 1e-3, 8.0
#: Noise may be smaller or larger by these factors than before groups were found.
FACTORS = np.geomspace(0.1, 1e5, 41)
#: How far around a factor a better one is looked for, and where noise is less if sites differ inside groups.
NEAR, FEWER = np.geomspace(0.75, 1.35, 25), np.array([1.0, 0.87, 0.75])


@dataclass(frozen=True, eq=False)
class FullEffects:
    """Effects in all directions: site likelihoods, ``W`` of V matrices ``(d, d)`` and ``c (V, d)``.

    ``turn (d, k)`` are the directions that are sampled; ``mixed`` are ``W (I + W)^-1``, and ``log |I + W|``. Effects
    are sampled over the root of ``stretch``: noise is larger in directions chosen for how much sites differ there.
    """

    W: Matrices
    c: Array
    turn: Array
    mixed: tuple[Matrices, Array]
    stretch: float = 1.0

    @classmethod
    def from_likelihoods(cls, W: Matrices, c: Array, most: int) -> FullEffects:
        """Return the directions, at most so many, in which effects of the mixed model differ most."""
        mixed: tuple[Matrices, Array] = W.resolved()
        H = mixed[0]
        turn = signed(np.linalg.svd(c - H.apply(c), full_matrices=False)[2][:most].T)
        return cls(W, c, turn, mixed, _stretch(H.sum() / len(c), len(c), turn.shape[1]))

    def sampled(self) -> tuple[Array, Array]:
        """Return site likelihoods of effects in the sampled directions: ``(V, k, k)`` and ``(V, k)``."""
        # effects in the other directions are integrated out as the mixed model has them
        H, k = self.mixed[0], self.turn.shape[1]
        effects = (self.c - H.apply(self.c)) @ self.turn
        seen = np.stack([self.turn.T @ H.times(u, self.turn) for u in range(len(self.c))])
        inside = np.asarray(np.linalg.inv(np.eye(k) - seen), dtype=np.float64)
        score = np.matmul(inside, effects[:, :, None])[:, :, 0]
        return inside - np.eye(k), np.asarray(score / np.sqrt(self.stretch))

    def effects(self, chains: Chains, weight: float, scales: Array) -> tuple[Array, Array, States]:
        """Return means ``(V, d)``, covariances ``(V, d, d)`` and the partitions they were averaged by."""
        # groups have the mixed model's variance in all directions: sampled widths are of directions that the data have
        # chosen, and around the few that tell groups apart, centres look nearer to each other than they are
        parts = self._partitions(chains, weight) if weight < 1 - LEAST else []
        odds = self._shares(parts)
        (V, d), kept = self.c.shape, []
        chances, means, total = [], [], np.zeros((V, d, d))
        for r, share in enumerate(SHARES):
            none = weight * float(scales[r])
            if none < LEAST and not any(part.chance * odds[k, r] > LEAST for k, part in enumerate(parts)):
                continue
            inside = self._within(float(share))
            if none > LEAST:
                chances.append(none)
                means.append(share * inside.c)
                for u in range(V) if share else ():
                    total[u] += none * share * (np.eye(d) - share * inside.H.of(u))
            for part, chance in zip(parts, odds, strict=True):
                if (each := part.chance * float(chance[r])) > LEAST:
                    chances.append(each)
                    means.append(part.add_effects(inside, each, total))
                    kept.append((each, r, part.z))
        chance = np.array(chances) / sum(chances)
        middle = np.tensordot(chance, np.array(means), 1)
        total /= sum(chances)
        for one, mean in zip(chance, means, strict=True):
            apart = mean - middle
            for u in range(V) if one < 1 else ():
                total[u] += one * np.outer(apart[u], apart[u])
        return np.asarray(middle), total, self._kept(kept)

    def noise(self, chains: Chains, n: float, misfit: float) -> float:
        """Return the factor on the noise by which the likeliest partition explains ``n`` numbers best."""
        # ``misfit`` is what is left where effects are 0. The share inside groups explains much of the same: ask both,
        # the share from none on, as long as more is better
        part = self._partitions(chains, 0.0)[0]
        plain = part.sums(self._within(0.0))

        def log_noisy(factor: float, r: int) -> float:
            free = -0.5 * float(n * np.log(factor) + misfit / factor) + float(LOG_SHARES[r])
            if not r:  # without a share, sums of groups are only scaled
                return free + part.log_centres([(Q / factor, e / factor) for Q, e in plain])
            V, d = self.c.shape
            less = replace(self, W=self.W.scaled(np.ones(d), np.full(V, 1.0 / factor)), c=self.c / factor)
            return free + part.log_evidence(less._within(float(SHARES[r])))

        def asked(factors: Array, r: int) -> tuple[float, float]:
            return max((log_noisy(float(one), r), float(one)) for one in factors)

        best, found = asked(asked(FACTORS, 0)[1] * NEAR, 0)  # without a share it costs little to be exact
        for r in range(1, len(SHARES) - 1):
            log, factor = asked(found * FEWER, r)
            if log < best:
                break
            best, found = log, factor
        return found

    def _kept(self, kept: list[tuple[float, int, Index]]) -> States:
        V, d = self.c.shape
        weight, share = np.array([one[0] for one in kept]), np.array([one[1] for one in kept], dtype=np.int64)
        z = np.array([one[2] for one in kept], dtype=np.int64).reshape(len(kept), V)
        return States(weight / weight.sum(), share, z, np.zeros((len(kept), d)), np.ones((len(kept), d)))

    def _partitions(self, chains: Chains, weight: float) -> list[_Part]:
        """Return the likeliest partitions of the chains; one that was drawn again counts once more."""
        found: dict[bytes, float] = {}
        states = chains.states(SWEEPS)
        for each, drawn in zip((1 - weight) * states.weight, states.z, strict=True):
            _, first, number = np.unique(drawn, return_index=True, return_inverse=True)
            z = np.argsort(np.argsort(first))[number].astype(np.int64)  # by first member
            found[z.tobytes()] = found.get(z.tobytes(), 0.0) + float(each)
        likeliest = sorted(found.items(), key=lambda item: -item[1])[:PARTITIONS]
        return [_Part(chance, np.frombuffer(z_bytes, np.int64)) for z_bytes, chance in likeliest]

    def _shares(self, parts: list[_Part]) -> Array:
        """Return probabilities ``(P, R)`` of the shares of the variance inside groups, learned anew."""
        # asked from none on, until the evidence of all partitions is far behind
        logs = np.full((len(parts), len(SHARES)), -np.inf)
        for r, share in enumerate(SHARES) if parts else ():
            inside = self._within(float(share))
            logs[:, r] = [part.log_evidence(inside) for part in parts]
            if r and (logs[:, r] < logs.max(axis=1) - FAR).all():
                break
        odds = np.exp(logs + LOG_SHARES - (logs + LOG_SHARES).max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))

    def _within(self, share: float) -> _Inside:
        if share == 0:
            return _Inside(share, self.W, self.c, 0.0)
        V, d = self.c.shape
        one = np.ones(d)
        H, logs = self.mixed if share == 1 else self.W.scaled(one, np.full(V, share)).resolved()
        c = self.c - H.apply(self.c)
        log = 0.5 * (share * float((c * self.c).sum()) - float(logs.sum()))
        return _Inside(share, H.scaled(one, np.full(V, 1.0 / share)), c, log)


class _Inside(NamedTuple):
    """With effects inside groups integrated out: ``H = W (I + share W)^-1``, ``c``, and the log evidence."""

    share: float
    H: Matrices
    c: Array
    log: float


class _Part(NamedTuple):
    """A partition ``z (V,)`` with its chance. Centres of groups have mean 0 and variance 1 in every direction."""

    chance: float
    z: Index

    def members(self) -> list[Index]:
        """Return the members of each group."""
        return [np.flatnonzero(self.z == group) for group in range(int(self.z.max()) + 1)]

    def sums(self, inside: _Inside) -> list[tuple[Array, Array]]:
        """Return what the members of each group say about its centre: precision ``(d, d)`` and pull ``(d,)``."""
        return [(inside.H.sum(mine), inside.c[mine].sum(axis=0)) for mine in self.members()]

    def log_centres(self, sums: list[tuple[Array, Array]]) -> float:
        """Return the log evidence of what groups say about their centres, but for a constant of the partition."""
        log = 0.0
        for Q, e in sums:
            root = np.linalg.cholesky(0.5 * (Q + Q.T) + np.eye(len(e)))
            log += 0.5 * float((np.linalg.solve(root, e) ** 2).sum()) - float(np.log(np.diag(root)).sum())
        return log

    def log_evidence(self, inside: _Inside) -> float:
        """Return the log evidence, but for a constant of the partition."""
        return inside.log + self.log_centres(self.sums(inside))

    def add_effects(self, inside: _Inside, chance: float, total: Array) -> Array:
        """Return means ``(V, d)`` of effects; add ``chance`` times their covariances to ``total (V, d, d)``."""
        share, H, mean = inside.share, inside.H, inside.share * inside.c
        for mine, (Q, e) in zip(self.members(), self.sums(inside), strict=True):
            C = np.asarray(np.linalg.inv(Q + np.eye(len(e))))
            C = 0.5 * (C + C.T)
            centre = C @ e
            for u in mine.tolist():
                mean[u] += centre - share * H.times(u, centre[:, None])[:, 0]
                own = share * (np.eye(len(C)) - share * H.of(u)) + shrunk(H, u, C, share) if share else C
                total[u] += chance * own
        return np.asarray(mean)


def signed(vectors: Array) -> Array:
    """Return columns with fixed signs, which LAPACK leaves to rounding: rows and summaries are then sampled alike."""
    return np.asarray(vectors * np.where(1.0 / np.sqrt(np.arange(2.0, len(vectors) + 2)) @ vectors < 0, -1.0, 1.0))


def _stretch(known: Array, V: int, k: int) -> float:
    """Return how much larger noise is in the k directions in which V sites differ most than in others."""
    # by simulation of sites that differ at random, with effects that vary by ``known (d, d)``
    sizes = np.maximum(np.linalg.eigvalsh(known), 0.0)
    drawn = np.random.default_rng(0).standard_normal((V, len(sizes))) * np.sqrt(sizes)
    _, found, directions = np.linalg.svd(drawn, full_matrices=False)
    return float((found[:k] ** 2).sum() / (V * (directions[:k] ** 2 @ sizes).sum()))
