"""One chain over partitions: compiled sweeps, and in numpy what is drawn between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.kernels.bundles import LANES, Groups, Moving, Prior, in_lanes, make_groups, make_room, unpacked
from fedkin.kin.kernels.marginals import alone, centres, join
from fedkin.kin.kernels.sweeps import sweep
from fedkin.kin.options import MANY_SITES, SHARES
from fedkin.kin.partitions import EVENNESS, log_sizes, partition_table, room_for
from fedkin.kin.sampler.sites import Sites, group_sums
from fedkin.kin.special import log_beta, log_gamma

#: Prior precision of the groups' common mean, in units of the spread between sites.
MEAN_PRECISION = 4.0
#: Where the typical width of groups may lie (log-uniform), and shapes of the widths' inverse gamma prior (uniform).
TYPICAL_WIDTH = np.exp(np.linspace(np.log(0.03), np.log(30.0), 48))
SHAPES = np.array([0.5, 1.0, 2.0, 5.0, 20.0])
#: Widths and rates keep away from what cannot be computed with.
LEAST, LEAST_RATE = 1e-6, 1e-6
#: Sweeps from one draw of the within-group share to the next where there are many sites, and after which sums are made
#: anew.
SHARE_EVERY, ANEW = 3, 10
#: Sites that move one after another where there are many.
RUN = 32
_SCALES = (SHAPES[:, None] * TYPICAL_WIDTH).ravel()
_WIDTH_PRIOR = np.repeat(SHAPES, len(TYPICAL_WIDTH)) * np.log(_SCALES) - log_gamma(SHAPES).repeat(len(TYPICAL_WIDTH))
#: Half of the mass on groups without any spread inside.
LOG_SHARES = np.log([0.5, *[0.5 / (len(SHARES) - 1)] * (len(SHARES) - 1)])


@dataclass
class State:
    """Where a chain stands: groups ``z (V,)``, number of the share, groups' ``m (p,)`` and ``w (p,)``, and scalars."""

    z: Index
    share: int
    m: Array
    w: Array
    typical: float
    shape: float = 2.0
    rates: tuple[float, float] = (0.5, 0.5)  # of edges inside and between groups
    even: int = 0  # number of the evenness of the groups' sizes

    def become(self, other: State) -> None:
        """Go where another chain is."""
        self.z[:], self.share, self.m, self.w = other.z, other.share, other.m.copy(), other.w.copy()
        self.typical, self.shape, self.rates = other.typical, other.shape, other.rates
        self.even = other.even


@dataclass(frozen=True)
class Course:
    """Whether groups are integrated out, hyper-parameters move, and groups split and merge as a whole."""

    collapsed: bool = True
    moves: bool = True
    splits: bool = False


@dataclass
class Walk:
    """A chain on its way, which moves its ``state``."""

    sites: Sites
    state: State
    course: Course
    rng: np.random.Generator
    sweeps: int = 0
    mean: Array = field(init=False)  # of the centres of groups that have members (K, p)
    drawn: Array = field(init=False)  # one draw of them
    labels: Index = field(init=False)  # of each site among these groups (V,)

    def __post_init__(self) -> None:
        sites, V, p = self.sites, *self.sites.size
        neighbours = sites.neighbours
        self.edges = float(neighbours.weight.sum()) / 2
        density = (self.edges + 1.0) / (0.5 * V * (V - 1) + 2.0)
        self.beta = yes, no = 2.0 * density, 2.0 - 2.0 * density  # prior of the rates
        self.log_beta = 2.0 * float(log_beta(yes, no))
        self.room = make_room(p)
        self.alone, self.totals = np.zeros(V), sites.k.sum(axis=1)
        self.most = 0
        self.lefts: dict[int, Array] = {}
        self.collect()

    def _grow(self, groups: int) -> None:
        """Make room for more groups than there are."""
        V = len(self.alone)
        if (most := room_for(V, groups)) <= self.most:
            return
        self.most, self.partitions = most, partition_table(V, most)
        self.groups = make_groups(most, self.sites.sums.shape[2])
        self.weight, self.odds = np.zeros(2 * self.groups.n.size + 2), np.zeros(4 + self.partitions.shape[1])
        self.phi = np.zeros(self.groups.sums.shape) if not self.course.collapsed else None

    def collect(self) -> None:
        """Sum over the members of all groups."""
        z = self.state.z
        self.sums = self.sites.sums[self.state.share]
        K = int(z.max()) + 1
        self._grow(K)
        groups = self.groups
        blocks = -(-max(K, int(groups.used[0])) // LANES)
        groups.sums[:blocks] = in_lanes(group_sums(self.sums, z, K), blocks)
        groups.n[:] = np.bincount(z, minlength=len(groups.n))
        groups.used[0] = K

    def _prior(self) -> None:
        """What follows from hyper-parameters."""
        state, V = self.state, len(self.alone)
        precision = 1.0 / state.w
        self.prior = Prior(precision, precision * state.m)
        self.base = 0.5 * float(state.m @ self.prior.pull)  # every group's log marginal is less by it
        even = EVENNESS[state.even]
        self.odds[0], self.odds[3] = math.lgamma(even + 1.0) - self.base, even
        self.odds[4:] = self.partitions[state.even]
        if self.edges:
            r_in, r_out = state.rates
            self.odds[1:3] = math.log(r_in / r_out), math.log((1 - r_in) / (1 - r_out))
        assert alone(self.sums, self.prior, self.room, self.alone) == V

    def logs(self) -> None:
        """Log marginals of the groups as they are."""
        self.room.take[:] = 0.0
        join(self.groups, self.sums[0], self.prior, self.room)
        self.groups.log[:] = self.groups.new

    def moving(self, order: Index) -> Moving:
        """What kernels take of the sites, with fresh uniform draws."""
        first, neighbour, weight = self.sites.neighbours
        chance = self.rng.random(len(self.alone))
        return Moving(self.sums, self.alone, chance, weight, self.state.z, order, first, neighbour)

    def _order(self) -> Index:
        """An order in which sites move; runs of neighbours in memory stay together where there are many sites."""
        V = len(self.alone)
        if V < MANY_SITES:
            return self.rng.permutation(V)
        order = (self.rng.permutation(-(-V // RUN))[:, None] * RUN + np.arange(RUN)).ravel()
        return order[order < V]

    def sweep(self, same: Array) -> float:
        """Draw every site's group; the bound on the evidence, without what hyper-parameters add to it."""
        state, V = self.state, len(self.alone)
        if int(self.groups.used[0]) * 2 > self.most < V:
            self.collect()
        if self.sweeps == 0 or self.course.moves:
            self._prior()
        if self.course.splits:
            from fedkin.kin.sampler.splits import split_and_merge

            split_and_merge(self)
        moving = self.moving(self._order())
        parts = (moving, self.groups, self.prior, self.room, self.odds, self.weight, same, self.most)
        if self.phi is None:
            self.logs()
            entropy = sweep(*parts)
        else:
            from fedkin.kin.kernels.drawn import sweep_drawn

            self.describe()
            self._set_phi(self.drawn)
            entropy = sweep_drawn(*parts, self.phi, self.rng.standard_normal((V, len(state.m))))
        self.sweeps += 1
        if self.sweeps % ANEW == 0:
            self.collect()
        log = self.describe()
        n = np.bincount(self.labels)
        self.n_groups = len(n)
        self.counts = self._count_edges(n)
        self.evens = self.partitions[:, self.n_groups] + log_sizes(n)
        score = float(self.totals[state.share]) + log + log_sum(self.evens) - math.log(len(self.evens))
        if self.edges:
            inside, pairs, between, others = self.counts
            yes, no = self.beta
            score += float(log_beta([inside + yes, between + yes], [pairs - inside + no, others - between + no]).sum())
            score -= self.log_beta
        self.density = score
        return float(score + entropy + LOG_SHARES[state.share])

    def describe(self) -> float:
        """Means and draws of the groups' centres; the sum of their log marginals."""
        live = np.flatnonzero(self.groups.n[: self.groups.used[0]])
        number = np.zeros(self.groups.used[0], dtype=np.int64)
        number[live] = np.arange(len(live))
        self.live, self.labels = live, number[self.state.z]
        shape = (-(-len(number) // LANES), len(self.state.m), LANES)
        mean, draw = np.empty(shape), self.rng.standard_normal(shape)
        centres(self.groups, self.sums[0], self.prior, self.room, mean, draw)
        block, lane = live // LANES, live % LANES
        self.mean, self.drawn = mean[block, :, lane], draw[block, :, lane]
        return float(self.groups.new[live].sum()) - len(live) * self.base

    def log_marginals(self, sums: Array) -> Array:
        """Log marginals ``(n,)`` of groups with these sums ``(n, T + p)``."""
        blocks = -(-len(sums) // LANES)
        made = np.zeros(blocks * LANES)
        groups = Groups(in_lanes(sums, blocks), self.groups.n, np.array([len(sums)]), self.groups.log, made)
        self.room.take[:] = 0.0
        join(groups, self.sums[0], self.prior, self.room)
        return np.asarray(made[: len(sums)] - self.base)

    def spread(self) -> Array:
        """Covariances ``(K, p, p)`` of the groups' centres."""
        p = len(self.state.m)
        precision = unpacked(self.groups.sums[self.live // LANES, :-p, self.live % LANES], p)
        return np.asarray(np.linalg.inv(precision + np.diag(self.prior.precision)))

    def left(self, part: slice) -> Array:
        """``I - rho H_u (n, p, p)``: what some sites leave of a group's centre at the share rho of the spread inside.

        Few sites have them kept from one sweep to the next.
        """
        number, p = self.state.share, len(self.state.m)
        if number in self.lefts:
            return self.lefts[number]
        made = np.asarray(np.eye(p) - SHARES[number] * unpacked(self.sums[part, :-p], p))
        if len(self.alone) < MANY_SITES:
            self.lefts[number] = made
        return made

    def _set_phi(self, centres: Array) -> None:
        """What makes a site's sums its log likelihood at the groups' centres."""
        assert self.phi is not None
        p = centres.shape[1]
        i, j = np.triu_indices(p)
        squares = np.where(i == j, -0.5, -1.0) * centres[:, i] * centres[:, j]
        self.phi[self.live // LANES, :, self.live % LANES] = np.concatenate([squares, centres], axis=1)

    def _count_edges(self, n: Index) -> tuple[float, float, float, float]:
        """Edges inside groups, pairs inside groups, edges between, pairs between."""
        V = len(self.alone)
        inside = self.sites.neighbours.inside(self.state.z) if self.edges else 0.0
        pairs = 0.5 * float((n * (n - 1.0)).sum())
        return inside, pairs, self.edges - inside, 0.5 * V * (V - 1) - pairs

    def move(self) -> float:
        """Draw all but the partition; what they add to the bound on the evidence."""
        state, rng = self.state, self.rng
        gain = self._move_widths()
        if self.course.collapsed or self.sweeps % SHARE_EVERY == 1:
            self._move_share()
        state.even = pick(self.evens, rng)
        inside, pairs, between, others = self.counts
        yes, no = self.beta
        r_in, r_out = rng.beta(inside + yes, pairs - inside + no), rng.beta(between + yes, others - between + no)
        state.rates = _within(r_in, LEAST_RATE, 1 - LEAST_RATE), _within(r_out, LEAST_RATE, 1 - LEAST_RATE)
        return gain

    def _move_widths(self) -> float:
        """Draw ``m``, ``w`` and what they come from; the sum of log prior minus log conditional of ``m`` and ``w``."""
        state, rng, K = self.state, self.rng, self.n_groups
        p = len(state.m)
        precision = K / state.w + MEAN_PRECISION
        mean = self.drawn.sum(axis=0) / (state.w * precision) + rng.standard_normal(p) / np.sqrt(precision)
        squares = 0.5 * ((self.drawn - mean) ** 2).sum(axis=0)
        # what widths come from is drawn with the widths integrated out: given those it would hardly move
        after, each = SHAPES + 0.5 * K, len(TYPICAL_WIDTH)
        odds = p * (_WIDTH_PRIOR + log_gamma(after).repeat(each))
        odds -= after.repeat(each) * np.log(squares[:, None] + _SCALES).sum(axis=0)
        i, j = divmod(pick(odds, rng), each)
        state.shape, state.typical = shape, typical = float(SHAPES[i]), float(TYPICAL_WIDTH[j])
        a, b = shape + 0.5 * K, shape * typical + squares
        width = np.minimum(np.maximum(b / rng.standard_gamma(a, p), LEAST), 1.0 / LEAST)
        logs, inverses = np.log(width), 1.0 / width
        gain = 0.5 * float((np.log(MEAN_PRECISION / precision) - MEAN_PRECISION * mean**2 + 1.0).sum())
        gain += p * (shape * math.log(shape * typical) - math.lgamma(shape) + math.lgamma(a)) - a * np.log(b).sum()
        gain += (a - shape) * logs.sum() + ((b - shape * typical) * inverses).sum()
        state.m, state.w = mean, width
        return float(gain)

    def _move_share(self) -> None:
        """Draw the share of the spread that is inside groups from its exact conditional."""
        state, K = self.state, self.n_groups
        precision = 1.0 / state.w
        self.prior = Prior(precision, precision * state.m)
        self.base = 0.5 * float(state.m @ self.prior.pull)
        sums = group_sums(self.sites.sums, self.labels, K).reshape(-1, self.sums.shape[1])
        odds = self.log_marginals(sums).reshape(-1, K).sum(axis=1) + self.totals + LOG_SHARES
        share = pick(odds, self.rng)
        if share != state.share:
            state.share = share
            self.collect()


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def log_sum(logs: Array) -> float:
    """The logarithm of the sum of ``exp(logs)``, some of them finite; scipy's takes longer than a small sweep."""
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


def pick(logs: Array, rng: np.random.Generator) -> int:
    """A position, drawn with probability proportional to ``exp(logs)``."""
    chance = np.exp(logs - logs.max()).cumsum()
    return int(chance.searchsorted(rng.random() * chance[-1]))
