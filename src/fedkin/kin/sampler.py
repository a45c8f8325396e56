"""One chain over partitions: compiled sweeps over the sites, with numpy for everything drawn between them.

The model, in units where the variance between sites is 1 for every coefficient: ``b_u = nu_z(u) + sqrt(rho) e_u``,
group centres ``nu_k ~ N(m, diag w)``, partitions ``z`` (`fedkin.kin.partitions`), edges with probability ``r_in``
inside groups and ``r_out`` between them. Effects ``e`` and, for up to a few hundred sites, centres are integrated out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import betaln, expit, gammaln, logit

from fedkin._base import Array, Index
from fedkin._compiling import compiling
from fedkin.kin.kernels import centres, log_marginals, share_out, sweep
from fedkin.kin.likelihoods import apply
from fedkin.kin.partitions import (
    CHUNK,
    EVENNESS,
    SHARES,
    Neighbours,
    SiteLikelihoods,
    are_kin,
    capacity,
    group_sums,
    log_partitions,
    log_sizes,
    pack_prior,
    packed,
    triangle,
    unpacked,
)

#: From this many sites on, centres are drawn once per sweep instead of being integrated out.
MANY_SITES = 300
#: From this many sites on, groups also split and merge as a whole; moves of single sites do for small ones.
WHOLE_GROUPS = 100
#: Up to this many sites the probabilities of all pairs are kept.
MOST_PAIRS = 3000
#: Prior precision of the groups' common mean, in units of the variance between sites.
MEAN_PRECISION = 4.0
#: Where the typical width of groups may lie (log-uniform), and shapes of the widths' inverse gamma prior (uniform).
TYPICAL_WIDTH = np.exp(np.linspace(np.log(0.03), np.log(30.0), 48))
SHAPES = np.array([0.5, 1.0, 2.0, 5.0, 20.0])
#: With many sites: sweeps from one draw of the share inside groups to the next.
SHARE_EVERY = 3
#: Pairs of sites per sweep that may split or merge groups, and log odds of a split: few, since that takes longest, and
#: merging is what chains from fine starts need.
TRIES, SPLIT_ODDS = 8, logit(0.05)
_SCALES = np.outer(SHAPES, TYPICAL_WIDTH).ravel()
_WIDTH_PRIOR = np.repeat(SHAPES, len(TYPICAL_WIDTH)) * np.log(_SCALES) - gammaln(SHAPES).repeat(len(TYPICAL_WIDTH))
#: Sweeps from one whose covariances given the partition are kept to the next.
_THIN = 5
#: Half of the mass on groups without any variance inside.
LOG_SHARES = np.log([0.5, *[0.5 / (len(SHARES) - 1)] * (len(SHARES) - 1)])


@dataclass
class State:
    """State of a chain: groups ``z (V,)``, index of the share inside groups, mean ``m (p,)`` and variance ``w (p,)`` of
    centres."""

    z: Index
    share: int
    m: Array
    w: Array
    typical: float
    shape: float = 2.0
    rates: tuple[float, float] = (0.5, 0.5)  # of edges inside and between groups
    even: int = 0  # number of the evenness of the groups' sizes


class Chain:
    """A chain that updates its ``state``.

    ``collapsed``: centres are integrated out; ``moves``: hyper-parameters are drawn, too; ``splits``: groups also split
    and merge as a whole. The default depends on the number of sites. ``mean`` and ``drawn (K, p)`` are means and draws
    of the centres of groups with members.
    """

    mean: Array
    drawn: Array

    def __init__(
        self,
        sites: SiteLikelihoods,
        state: State,
        rng: np.random.Generator,
        *,
        collapsed: bool | None = None,
        moves: bool = True,
        splits: bool | None = None,
    ) -> None:
        V, p = sites.size
        self.sites, self.state, self.rng, self.moves = sites, state, rng, moves
        self.collapsed = V < MANY_SITES if collapsed is None else collapsed
        self.splits = V >= WHOLE_GROUPS if splits is None else splits
        self.edges = float(sites.neighbours.weight.sum()) / 2
        density = (self.edges + 1.0) / (0.5 * V * (V - 1) + 2.0)
        self.beta = 2.0 * density, 2.0 - 2.0 * density  # prior of the rates
        self.log_beta = 2.0 * float(betaln(*self.beta))
        self.work, self.alone, self.totals = np.zeros((2, p, p + 1)), np.zeros(V), sites.k.sum(axis=1)
        self.doubt = np.zeros(V)  # entropies of the sites' choices so far
        self.most = self.sweeps = 0
        self.prior = pack_prior(state.m, state.w)
        self.collect()

    def collect(self) -> None:
        """Sum over the members of all groups, in arrays that are allocated for more groups."""
        z, V = self.state.z, len(self.alone)
        self.likelihoods = self.sites.sums[self.state.share]
        K = int(z.max()) + 1
        if (most := capacity(V, K)) > self.most:
            self.most, self.partitions = most, log_partitions(V, most)
            self.sums, self.n = np.zeros((most, self.likelihoods.shape[1])), np.zeros(most, dtype=np.int64)
            self.log, self.new, self.linked = np.zeros(most), np.zeros(most), np.zeros(most)
            self.odds, self.odds_of = np.zeros(4 + self.partitions.shape[1]), np.zeros(most + 1)
            self.used, self.lead, self.live = (np.zeros(n, dtype=np.int64) for n in (1, most, most))
            self.phi = np.zeros((0, 0) if self.collapsed else self.sums.shape)
        self.sums[K : int(self.used[0])] = 0.0
        self.sums[:K] = group_sums(self.likelihoods, z, K)
        self.n[:] = np.bincount(z, minlength=self.most)
        self.used[0] = K

    def set_prior(self) -> None:
        """Derive the arrays that kernels need from the state."""
        state = self.state
        even = EVENNESS[state.even]
        self.odds[0], self.odds[3] = math.lgamma(even + 1.0), even
        self.odds[4:] = self.partitions[state.even]
        if self.edges:
            r_in, r_out = state.rates
            self.odds[1:3] = math.log(r_in / r_out), math.log((1 - r_in) / (1 - r_out))

    def log_marginals(self, sums: Array) -> Array:
        """Return log marginal likelihoods ``(n,)`` of groups with these sums ``(n, T + p)``."""
        made = np.empty(len(sums))
        log_marginals(sums, sums[0], 0.0, self.prior, len(self.state.m), self.work, made)
        return made

    def set_logs(self) -> None:
        """Compute the log marginals of the current groups."""
        used = int(self.used[0])
        self.log[:used] = self.log_marginals(self.sums[:used])

    def _order(self) -> Index:
        """Return an order in which sites move; with many of them, runs of neighbours in memory stay together."""
        V = len(self.alone)
        if V < MANY_SITES:
            return self.rng.permutation(V)
        run = 32
        order = (self.rng.permutation(-(-V // run))[:, None] * run + np.arange(run)).ravel()
        return order[order < V]

    def sweep(self, same: Array) -> float:
        """Draw every site's group, adding to ``same (V, V)`` unless it is empty; return the bound without
        hyper-parameters."""
        state, V = self.state, len(self.alone)
        if 2 * int(self.used[0]) > self.most < V:
            self.collect()
        if self.sweeps == 0 or self.moves:
            self.set_prior()
            self.alone = self.log_marginals(self.likelihoods)
        if self.splits:
            split_and_merge(self)
        order, graph = self._order(), self.sites.neighbours
        chance, rank, p = self.rng.random(V), np.empty(V, dtype=np.int64), len(state.m)
        rank[np.argsort(self.doubt, kind="stable")] = np.arange(V)
        if self.collapsed:
            self.set_logs()
            noise = np.zeros((V, 0))
        else:
            self.describe()
            self.phi[self.members] = as_likelihoods(self.drawn)
            noise = self.rng.standard_normal((V, p))
        entropy = sweep(
            self.likelihoods, self.alone, chance, order, state.z, *graph, self.sums, self.n, self.used, self.log,
            self.new, self.prior, p, self.work, self.odds, self.odds_of, self.linked, rank, self.lead, self.doubt,
            self.live, self.phi, noise, same,
        )  # fmt: skip
        self.sweeps += 1
        if self.sweeps % 10 == 0:  # sums are made anew: rounding errors add up
            self.collect()
        return self.score(self.describe(), entropy)

    def score(self, log: float, entropy: float) -> float:
        """Return the bound without hyper-parameters, from the groups' log marginals and an entropy."""
        state, V, n = self.state, len(self.alone), self.n[self.members]
        self.n_groups, pairs = len(n), 0.5 * float((n * (n - 1.0)).sum())
        inside = self.sites.neighbours.inside(state.z) if self.edges else 0.0
        self.counts = inside, pairs, self.edges - inside, 0.5 * V * (V - 1) - pairs
        self.evens = self.partitions[:, self.n_groups] + log_sizes(n)
        top = float(self.evens.max())
        sizes = top + math.log(float(np.exp(self.evens - top).sum()))
        score = float(self.totals[state.share]) + log + sizes - math.log(len(self.evens))
        if self.edges:
            inside_beta, between_beta = self._rates_beta()
            score += float(betaln(*inside_beta) + betaln(*between_beta))
            score -= self.log_beta
        return float(score + entropy + LOG_SHARES[state.share])

    def describe(self) -> float:
        """Set means and draws of the groups' centres; return the sum of their log marginals."""
        self.members = live = np.flatnonzero(self.n[: int(self.used[0])])
        p = len(self.state.m)
        self.mean, self.drawn = np.empty((len(live), p)), self.rng.standard_normal((len(live), p))
        logs = np.empty(len(live))
        centres(self.sums[live], self.prior, self.work, self.mean, self.drawn, logs)
        return float(logs.sum())

    @property
    def labels(self) -> Index:
        """Index of each site's group among the groups with members, ``(V,)``."""
        number = np.zeros(int(self.used[0]), dtype=np.int64)
        number[self.members] = np.arange(len(self.members))
        return number[self.state.z]

    def sums_by_share(self) -> Array:
        """Return sums over the groups with members for all shares, ``(R, K, T + p)``."""
        return group_sums(self.sites.sums, self.labels, len(self.members))

    def _rates_beta(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return parameters of the beta posteriors of the rates inside and between groups."""
        inside, pairs, between, others = self.counts
        yes, no = self.beta
        return (inside + yes, pairs - inside + no), (between + yes, others - between + no)

    def move(self) -> float:
        """Draw all but the partition; return the contribution to the bound on the evidence."""
        state, rng = self.state, self.rng
        gain = self._move_widths()
        if self.collapsed or self.sweeps % SHARE_EVERY == 1:
            self._move_share()
        state.even = pick(self.evens, rng)
        r_in, r_out = (min(max(rng.beta(*each), 1e-6), 1 - 1e-6) for each in self._rates_beta())
        state.rates = r_in, r_out
        return gain

    def _move_widths(self) -> float:
        """Draw ``m``, ``w`` and their prior; return the sum of log prior minus log conditional of ``m`` and ``w``."""
        state, rng, K = self.state, self.rng, self.n_groups
        p = len(state.m)
        precision = K / state.w + MEAN_PRECISION
        mean = self.drawn.sum(axis=0) / (state.w * precision) + rng.standard_normal(p) / np.sqrt(precision)
        squares = 0.5 * ((self.drawn - mean) ** 2).sum(axis=0)
        # the widths' prior is drawn with the widths integrated out: given those it would hardly move
        after, each = SHAPES + 0.5 * K, len(TYPICAL_WIDTH)
        odds = p * (_WIDTH_PRIOR + gammaln(after).repeat(each))
        odds -= after.repeat(each) * np.log(squares[:, None] + _SCALES).sum(axis=0)
        i, j = divmod(pick(odds, rng), each)
        state.shape, state.typical = shape, typical = float(SHAPES[i]), float(TYPICAL_WIDTH[j])
        a, b = shape + 0.5 * K, shape * typical + squares
        width = np.clip(b / rng.standard_gamma(a, p), 1e-6, 1e6)
        logs, inverses = np.log(width), 1.0 / width
        gain = 0.5 * float((np.log(MEAN_PRECISION / precision) - MEAN_PRECISION * mean**2 + 1.0).sum())
        gain += p * (shape * math.log(shape * typical) - math.lgamma(shape) + math.lgamma(a)) - a * np.log(b).sum()
        gain += (a - shape) * logs.sum() + ((b - shape * typical) * inverses).sum()
        state.m, state.w, self.prior = mean, width, pack_prior(mean, width)
        return float(gain)

    def _move_share(self) -> None:
        """Draw the share of the variance that is inside groups from its exact conditional."""
        state, K = self.state, self.n_groups
        sums = self.sums_by_share().reshape(-1, self.sums.shape[1])
        odds = self.log_marginals(sums).reshape(-1, K).sum(axis=1) + self.totals + LOG_SHARES
        share = pick(odds, self.rng)
        if share != state.share:
            state.share = share
            self.collect()

    def run(self, burn: int, record: Record, tell: Callable[[], object] = lambda: None) -> float:
        """Sweep ``burn`` times and once for each entry of ``record``; return the mean bound on the evidence.

        ``tell`` is called after each sweep.
        """
        # of a sweep: the log density of data and state, plus the entropies of the conditionals that it was drawn from
        scores, nothing = [], np.zeros((0, 0))
        for number in range(burn + len(record.z)):
            s = number - burn
            counts = s >= 0 and bool(are_kin(self.state.share, 1 + int(np.ptp(self.state.z) > 0)))
            score = self.sweep(record.same if counts else nothing)
            if s >= 0:
                record.keep(self, s)
            if self.moves:
                score += self.move()
            if s >= 0:
                record.trace[s, 0] = score
            if 2 * number >= burn:
                scores.append(score)
            tell()
        return float(np.mean(scores))


class Record:
    """Sums over kept sweeps, with an entry for each of them.

    ``b (V, p)`` and ``moments (V, T)`` are means of effects given the partition, and of their squares (upper
    triangles); covariances given a partition are computed in every fifth sweep. ``same (V, V)`` holds probabilities of
    sharing a group, or is empty for many sites. ``trace (S, 5)`` holds the bound on the evidence, the number of groups,
    the index of the share, and the two rates; ``means (S, T, p)`` is ``b`` of the first T sites; ``z (S, V)``, ``m (S,
    p)`` and ``w (S, p)`` are the states.
    """

    def __init__(self, V: int, p: int, keep: int, *, pairs: bool = True) -> None:
        full = V if keep else 0
        together = full if pairs and V <= MOST_PAIRS else 0
        self.b = np.zeros((full, p))
        self.moments, self.same = np.zeros((full, p * (p + 1) // 2)), np.zeros((together, together))
        self.trace, self.means = np.zeros((keep, 5)), np.zeros((keep, min(full, max(5_000 // p, 1)), p))
        self.z: Index = np.zeros((keep, V), dtype=np.int32)
        self.m, self.w = np.zeros((keep, p)), np.zeros((keep, p))

    def covariance(self, some: int) -> Array:
        """Return covariances ``(some, T)`` of the first sites' effects (upper triangles) in this chain."""
        n, (i, j) = len(self.z), triangle(self.b.shape[1])
        middle = self.b[:some] / n
        return np.asarray(self.moments[:some] / n - middle[:, i] * middle[:, j])

    def keep(self, chain: Chain, s: int) -> None:
        """Add a sweep as entry ``s``."""
        covariance = self.note(chain, s)
        self.z[s] = chain.state.z
        self.add(s, chain.likelihoods, chain.labels, chain.mean, covariance, float(SHARES[chain.state.share]))

    def note(self, chain: Chain, s: int) -> Array | None:
        """Set the parts of entry ``s`` that are not sums over sites; return covariances of the groups' centres, for
        some entries."""
        state, p = chain.state, len(chain.state.m)
        self.m[s], self.w[s] = state.m, state.w
        self.trace[s, 1:] = chain.n_groups, state.share, *state.rates
        if s % _THIN:
            return None
        return np.asarray(np.linalg.inv(unpacked(chain.sums[chain.members, :-p], p) + np.diag(1.0 / state.w)))

    def add(
        self, s: int, likelihoods: Array, labels: Index, mean: Array, covariance: Array | None, share: float
    ) -> None:
        """Add effects given the partition as entry ``s``: the groups' means plus the sites' deviations."""
        (V, p), n = self.b.shape, len(self.z)
        (i, j), stands_for = triangle(p), n / len(range(0, n, _THIN))
        for start in range(0, V, CHUNK):
            part = slice(start, start + CHUNK)
            z, rows = labels[part], likelihoods[part]
            b = mean[z]
            if share > 0:  # what sites leave of a group's centre
                B = np.eye(p) - share * unpacked(rows[:, :-p], p)
                b = apply(B, b) + share * rows[:, -p:]
            self.b[part] += b
            self.moments[part] += b[:, i] * b[:, j]
            if covariance is not None:
                own = packed(share * B + B @ covariance[z] @ B) if share > 0 else packed(covariance)[z]
                self.moments[part] += stands_for * own
            self.means[s, part] = b[: max(self.means.shape[1] - start, 0)]


def as_likelihoods(centres: Array) -> Array:
    """Return rows ``(K, T + p)`` whose products with a site's sums are its log likelihoods at the centres."""
    i, j = triangle(centres.shape[1])
    return np.concatenate([np.where(i == j, -0.5, -1.0) * centres[:, i] * centres[:, j], centres], axis=1)


def split_and_merge(chain: Chain) -> None:
    """Split or merge whole groups by Metropolis steps around pairs of sites drawn at random (Dahl 2003)."""
    # moves of single sites would take for ever to do that
    V, rng = len(chain.alone), chain.rng
    splits = rng.random(TRIES) < expit(SPLIT_ODDS)
    one, other = rng.integers(V, size=TRIES), rng.integers(V - 1, size=TRIES)
    other += other >= one
    limits = np.log(1.0 - rng.random(TRIES))
    left = np.arange(TRIES)
    while left.size:
        chain.set_logs()
        z = chain.state.z
        a, b = z[one], z[other]
        left = left[(a == b)[left] == splits[left]]
        merges = left[~splits[left]]
        gains = np.full(TRIES, -np.inf)
        if merges.size:
            into, gone = a[merges], b[merges]
            together = chain.log_marginals(chain.sums[into] + chain.sums[gone])
            edges = chain.sites.neighbours.between(z, int(chain.used[0]))[into, gone] if chain.edges else 0.0
            apart = chain.log[into] + chain.log[gone] - together
            gains[merges] = gain_apart(chain, apart, chain.n[into], chain.n[gone], edges, 0)
        left = left[splits[left] | (limits[left] <= SPLIT_ODDS - gains[left])]  # whatever the way back is
        moved = False
        while left.size and not moved:
            t, left = left[0], left[1:]
            moved = _try_pair(chain, int(one[t]), int(other[t]), float(gains[t]), float(limits[t]))


def gain_apart(
    chain: Chain, explained: Array, n: Array | Index, m: Array | Index, edges: Array | float, more: int
) -> Array:
    """Return the log density with groups of ``n`` and ``m`` sites separate, minus that with them merged.

    ``explained`` is the gain in log likelihood from separating them, ``edges`` are between them; separated, there are
    ``more`` groups than now.
    """
    (edge, gap, even), t = chain.odds[1:4], 4 + int(np.count_nonzero(chain.n)) + more
    prior = chain.odds[t] - chain.odds[t - 1] + gammaln(n + even) + gammaln(m + even) - gammaln(n + m + even)
    return np.asarray(explained + prior - (edges * edge + (n * m - edges) * gap))


def _try_pair(chain: Chain, one: int, other: int, gain: float, limit: float) -> bool:
    """Split the group of two sites, or merge their groups, if the Metropolis step accepts."""
    z = chain.state.z
    a, b = int(z[one]), int(z[other])
    splits = a == b
    if splits:
        empty = np.flatnonzero(chain.n == 0)
        if not empty.size:
            return False
        b = int(empty[0])
    members = np.flatnonzero((z == a) | (z == b))
    members = chain.rng.permutation(members[(members != one) & (members != other)])
    side = np.full(len(z), -1)
    side[members] = 2 if splits else np.where(z[members] == a, 3, 4)
    both = np.concatenate([[one, other], members])
    n, log, sums = np.zeros(2, dtype=np.int64), np.zeros(2), np.zeros((2, chain.likelihoods.shape[1]))
    # a merge must also have been possible as a split, which few are: most are found out soon
    least = -np.inf if splits else limit - SPLIT_ODDS + gain
    path = share_out(
        chain.likelihoods, chain.rng.random(len(z)), *chain.sites.neighbours, both, side, sums, n, log, chain.prior,
        len(chain.state.m), chain.work, chain.odds, least,
    )  # fmt: skip
    if splits:
        edges = float(chain.sites.neighbours.between(side + 1, 3)[1, 2]) if chain.edges else 0.0
        gain = float(gain_apart(chain, log.sum() - chain.log[a], n[0], n[1], edges, 1))
        if limit > gain - path - SPLIT_ODDS:
            return False
    elif limit > SPLIT_ODDS + path - gain:
        return False
    z[side == 1] = b if splits else a
    chain.collect()
    return True


@cache
def load_kernels(collapsed: bool, splits: bool) -> None:
    """Load or compile the kernels that chains need, with a chain over five sites."""
    sites = SiteLikelihoods.from_effects(np.ones((5, 1, 1)), np.arange(5.0)[:, None], Neighbours.none(5))
    state, rng = State(np.arange(5) % 2, 0, np.zeros(1), np.ones(1), 1.0), np.random.default_rng(0)
    with compiling():
        chain = Chain(sites, state, rng, collapsed=collapsed, splits=splits)
        chain.run(1, Record(5, 1, 1))
        if splits:
            chain.set_logs()
            _try_pair(chain, 0, 1, 0.0, 0.0)


def pick(logs: Array, rng: np.random.Generator) -> int:
    """Draw a position with probability proportional to ``exp(logs)``."""
    chance = np.exp(logs - logs.max()).cumsum()
    return int(chance.searchsorted(rng.random() * chance[-1]))
