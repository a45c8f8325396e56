"""The rounds of Fed-ADMM as compiled loops (numba), for one shard that hosts every site.

The same batches and the same steps as `fedkin.admm.shard`; sums are taken in another order, so results agree to
rounding and not to the bit. A round has two loops, over sites and over edges; each works on a range and releases the
GIL, so that plain threads share a large round.

Conventions: ``s (T, V, p)`` holds the sums of duals as one share per thread. The site loop of round t reads and
clears them (and adds them to their average on behalf of round t - 1), the edge loop fills them again.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fedkin._base import Array, Mask, available_threads
from fedkin._base.compiling import kernel, load
from fedkin.admm.rounds import LocalShards
from fedkin.admm.sampling import FLOYD_LIMIT, site_roots
from fedkin.admm.shard import TAIL_POWER, averaging_weight
from fedkin.core import make_penalty
from fedkin.losses import COMPILED_LOSSES, Loss, MeanLoss
from fedkin.solvers import Crew

L1, L2, LINF = 0, 1, 2
PENALTIES = {"l1": L1, "l2": L2, "linf": LINF}
MEAN = -1
LOSSES: dict[type[Loss], int] = {MeanLoss: MEAN, **{kind: k for k, kind in enumerate(COMPILED_LOSSES)}}
TAIL, PAPER, LAST = 0, 1, 2
AVERAGES = {"tail": TAIL, "paper": PAPER, "last": LAST}
PLAIN, SAGA, SVRG = 0, 1, 2
GRADIENTS = {"plain": PLAIN, "saga": SAGA, "svrg": SVRG}

#: Multiplications in a round from which on threads share it.
THREADING_PAYS = 3e6
_GOLDEN = 0x9E3779B97F4A7C15


class Rule(NamedTuple):
    """Codes of loss, gradient and average, rounds between snapshots, Huber's delta, radius of the ball or infinity."""

    loss: Any
    gradient: Any
    average: Any
    snapshot_every: Any
    delta: Any
    ball: Any


class Samples(NamedTuple):
    """Rows of all sites ``X (N, p)``, ``y (N,)``, ``offset (N,)``; where each begins, how many it has and draws.

    ``roots (V,)`` are what a site's draws begin with. Arrays that are not needed are empty, here and below.
    """

    X: Any
    y: Any
    offset: Any
    starts: Any
    counts: Any
    batch: Any
    roots: Any


class Steps(NamedTuple):
    """Step sizes ``start, growth, damping (V,)``, ``ridge (p,)`` and ``sparsity (V, p)``."""

    start: Any
    growth: Any
    damping: Any
    ridge: Any
    sparsity: Any


class Edges(NamedTuple):
    """Code of the penalty, rho, ``ends (E, 2)`` and radii ``(E,)`` of the dual balls."""

    penalty: Any
    rho: Any
    ends: Any
    radius: Any


class State(NamedTuple):
    """What rounds change: `fedkin.admm.shard.ShardState` with the sums of duals as shares ``s (T, V, p)``."""

    theta: Any
    alpha: Any
    s: Any
    before: Any
    average: Any
    average_balance: Any
    table: Any
    anchor_gradient: Any
    anchor_theta: Any
    stale: Any
    looked: Any


@kernel
def _mix(word: Any) -> Any:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@kernel
def _draw(state: Any, n: int, size: int, chosen: Any) -> None:
    """The rows that `fedkin.admm.sampling.draw_batches` draws, for at most FLOYD_LIMIT or all of them."""
    if size == n:
        for k in range(size):
            chosen[k] = k
        return
    for k in range(size):
        last = n - size + k
        high = _mix(state + np.uint64(k + 1) * np.uint64(_GOLDEN)) >> np.uint64(32)
        drawn = np.int64((high * np.uint64(last + 1)) >> np.uint64(32))
        taken = False
        for earlier in range(k):
            taken |= chosen[earlier] == drawn
        chosen[k] = last if taken else drawn


def _slopes(first: int = 0) -> Any:
    """Return the compiled slope ``(loss, parameter, eta, y)`` of the losses from that code on."""
    slope = njit(nogil=True, error_model="numpy")(COMPILED_LOSSES[first].slope)
    if first + 1 == len(COMPILED_LOSSES):
        return njit(nogil=True)(lambda loss, parameter, eta, y: slope(eta, y, parameter))
    others = _slopes(first + 1)
    return njit(nogil=True)(
        lambda loss, parameter, eta, y: slope(eta, y, parameter) if loss == first else others(loss, parameter, eta, y)
    )


_slope = _slopes()
#: numba's cache does not see that a slope in another file has changed: loops that call them are compiled for these.
_CODES = [kind.slope.__code__ for kind in COMPILED_LOSSES]
_SLOPES = zlib.crc32(repr([(code.co_code, code.co_consts) for code in _CODES]).encode())


@kernel
def _weight(average: int, t: int) -> float:
    """`fedkin.admm.shard.averaging_weight`."""
    if average == LAST:
        return 1.0
    return 1.0 / t if average == PAPER else (TAIL_POWER + 1.0) / (TAIL_POWER + t)


@kernel
def add_to_average(weight: Any, balance: Any, average_balance: Any) -> None:
    """What `sites_loop` does on behalf of the round before, after the last round of a stretch."""
    for i in range(balance.shape[0]):
        for c in range(balance.shape[1]):
            average_balance[i, c] += weight * (balance[i, c] - average_balance[i, c])


def _sites_loop(slopes: int) -> Any:
    @kernel
    def sites_loop(
        lo: int,
        hi: int,
        t: int,
        last_weight: float,
        available: Any,
        probability: Any,
        rule: Any,
        samples: Any,
        steps: Any,
        state: Any,
    ) -> None:
        """Node steps of the sites ``lo .. hi - 1`` in round t.

        ``last_weight`` is the weight of the present sums of duals in their average.
        """
        X, y, offset, starts, counts, batch, roots = samples
        start, growth, damping, ridge, sparsity = steps
        theta, _, s, before, average, average_balance, table, anchor_gradient, anchor_theta, stale, looked = state
        assert slopes >= 0
        loss, gradient, paper, delta = rule.loss, rule.gradient, rule.average == PAPER, rule.delta
        mean = loss == MEAN
        snapshot = gradient == SVRG and (t - 1) % rule.snapshot_every == 0
        ball, weight = rule.ball, _weight(rule.average, t)
        p, shares = theta.shape[1], s.shape[0]
        g, moved, balance = np.empty(p), np.empty(p), np.empty(p)
        chosen, slope = np.empty(batch.max(), dtype=np.int64), np.empty(batch.max())
        counter = np.uint64(t) * np.uint64(_GOLDEN)
        for i in range(lo, hi):
            here = available.size == 0 or available[i]
            chance = 1.0 if probability.size == 0 else probability[i]
            n, b, first = counts[i], batch[i], starts[i]
            for c in range(p):
                g[c] = 0.0
            if snapshot:
                stale[i] = True
            if here and gradient == SVRG and stale[i]:
                for row in range(first, first + n):
                    if mean:
                        for c in range(p):
                            g[c] += (theta[i, c] - X[row, c]) / n
                        continue
                    eta = offset[row] if offset.size else 0.0
                    for c in range(p):
                        eta += X[row, c] * theta[i, c]
                    change = _slope(loss, delta, eta, y[row]) / n
                    for c in range(p):
                        g[c] += change * X[row, c]
                for c in range(p):
                    anchor_gradient[i, c] = g[c]
                    anchor_theta[i, c] = theta[i, c]
                    g[c] = 0.0
                stale[i] = False
                looked[i] += n
            if here:
                looked[i] += 2 * b if gradient == SVRG else b
                _draw(_mix(roots[i] + counter), n, b, chosen)
                if mean:
                    for k in range(b):
                        row = first + chosen[k]
                        if gradient == SAGA:
                            for c in range(p):
                                score = theta[i, c] - X[row, c]
                                g[c] += (score - table[row, c]) / b
                                table[row, c] = score
                        elif gradient == SVRG:
                            for c in range(p):
                                g[c] += (theta[i, c] - anchor_theta[i, c]) / b
                        else:
                            for c in range(p):
                                g[c] += (theta[i, c] - X[row, c]) / b
                else:
                    # all slopes first: the two passes over the batch are loops that vectorise
                    for k in range(b):
                        row = first + chosen[k]
                        known = offset[row] if offset.size else 0.0
                        eta, old = known, 0.0
                        for c in range(p):
                            eta += X[row, c] * theta[i, c]
                        new = _slope(loss, delta, eta, y[row])
                        if gradient == SAGA:
                            old = table[row, 0]
                            table[row, 0] = new
                        elif gradient == SVRG:
                            for c in range(p):
                                known += X[row, c] * anchor_theta[i, c]
                            old = _slope(loss, delta, known, y[row])
                        slope[k] = (new - old) / b
                    for k in range(b):
                        row, change = first + chosen[k], slope[k]
                        for c in range(p):
                            g[c] += change * X[row, c]
                if gradient == SAGA:
                    for c in range(p):
                        change = g[c]
                        g[c] += anchor_gradient[i, c]
                        anchor_gradient[i, c] += change * b / n
                elif gradient == SVRG:
                    for c in range(p):
                        g[c] += anchor_gradient[i, c]
                for c in range(p):
                    g[c] = (g[c] + ridge[c] * theta[i, c]) / chance
            eta = 1.0 / (start[i] / chance + growth[i] * t + damping[i])
            # one loop per array or two: these vectorise, a single one does not
            for c in range(p):
                balance[c] = s[0, i, c]
                s[0, i, c] = 0.0
            for k in range(1, shares):
                for c in range(p):
                    balance[c] += s[k, i, c]
                    s[k, i, c] = 0.0
            for c in range(p):
                average_balance[i, c] += last_weight * (balance[c] - average_balance[i, c])
            for c in range(p):
                g[c] += 2.0 * balance[c] - before[i, c]
            for c in range(p):
                before[i, c] = balance[c]
            for c in range(p):
                moved[c] = theta[i, c] - eta * g[c]
            if sparsity.size:
                for c in range(p):
                    bound = eta * sparsity[i, c]
                    moved[c] -= min(max(moved[c], -bound), bound)
            if ball < np.inf:
                length = 0.0
                for c in range(p):
                    length += moved[c] * moved[c]
                length = math.sqrt(length)
                if length > ball:
                    for c in range(p):
                        moved[c] *= ball / length
            if paper:
                for c in range(p):
                    average[i, c] += weight * (theta[i, c] - average[i, c])
            else:
                for c in range(p):
                    average[i, c] += weight * (moved[c] - average[i, c])
            for c in range(p):
                theta[i, c] = moved[c]

    return sites_loop


sites_loop = _sites_loop(_SLOPES)


@kernel
def _sort(values: Any) -> None:
    for k in range(1, values.shape[0]):
        value, place = values[k], k
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


@kernel
def edges_loop(lo: int, hi: int, share: int, edges: Any, state: Any) -> None:
    """Edge steps of the edges ``lo .. hi - 1``; their duals are added to a share of s."""
    penalty, ends, radius = edges.penalty, edges.ends, edges.radius
    theta, alpha, s = state.theta, state.alpha, state.s
    p = theta.shape[1]
    half = 0.5 * edges.rho
    moved, ordered = np.empty(p), np.empty(p)
    for e in range(lo, hi):
        i, j, bound = ends[e, 0], ends[e, 1], radius[e]
        if penalty == L1:
            for c in range(p):
                moved[c] = min(max(alpha[e, c] + half * (theta[i, c] - theta[j, c]), -bound), bound)
            for c in range(p):
                alpha[e, c] = moved[c]
            for c in range(p):
                s[share, i, c] += moved[c]
            for c in range(p):
                s[share, j, c] -= moved[c]
            continue
        size = 0.0
        for c in range(p):
            moved[c] = alpha[e, c] + half * (theta[i, c] - theta[j, c])
        if penalty == L2:
            for c in range(p):
                size += moved[c] * moved[c]
            size = math.sqrt(size)
            if size > bound:
                shrink = bound / size
                for c in range(p):
                    moved[c] *= shrink
        else:
            for c in range(p):
                ordered[c] = abs(moved[c])
                size += ordered[c]
            if size > bound:
                _sort(ordered)
                # the threshold of the l1 ball is the largest of (sum of the k largest - bound) / k
                threshold, total = -np.inf, 0.0
                for k in range(p):
                    total += ordered[p - 1 - k]
                    threshold = max(threshold, (total - bound) / (k + 1))
                for c in range(p):
                    left = max(abs(moved[c]) - threshold, 0.0)
                    moved[c] = left if moved[c] >= 0.0 else -left
        for c in range(p):
            alpha[e, c] = moved[c]
        for c in range(p):
            s[share, i, c] += moved[c]
        for c in range(p):
            s[share, j, c] -= moved[c]


def _rounds_loop(slopes: int) -> Any:
    @kernel
    def rounds_loop(
        first: int,
        count: int,
        available: Any,
        probability: Any,
        rule: Any,
        samples: Any,
        steps: Any,
        edges: Any,
        state: Any,
    ) -> None:
        """Rounds ``first .. first + count - 1`` on one thread, with presence ``(count, V)`` or none."""
        assert slopes >= 0
        everybody, certain = np.empty(0, dtype=np.bool_), np.empty(0)
        for k in range(count):
            t = first + k
            last_weight = 0.0 if k == 0 else _weight(rule.average, t - 1)
            here = available[k] if available.shape[0] else everybody
            chance = probability[k] if probability.shape[0] else certain
            sites_loop(0, state.theta.shape[0], t, last_weight, here, chance, rule, samples, steps, state)
            edges_loop(0, state.alpha.shape[0], 0, edges, state)

    return rounds_loop


rounds_loop = _rounds_loop(_SLOPES)


class CompiledRounds:
    """Rounds on compiled kernels; the arrays of the one shard of ``local`` are advanced in place.

    ``threads`` are by default as many as there are cores, where a round is long enough.
    """

    def __init__(self, local: LocalShards, threads: int | None = None) -> None:
        plan, rows, steps = local.plan, local.rows, local.plan.steps
        self.plan, self.shard = plan, local.shards[0]
        work = float(rows.batch.sum() + plan.edges.shape[0]) * rows.ridge.size
        self.threads = threads or (available_threads() if work > THREADING_PAYS else 1)
        loss = rows.losses[0]
        ball = np.inf if plan.radius is None else float(plan.radius)
        codes = LOSSES[type(loss)], GRADIENTS[plan.gradient], AVERAGES[plan.average], plan.snapshot_every
        self._rule = Rule(*codes, loss.parameter, ball)
        none, data = np.empty(0), rows.data
        y, offset = (none if given is None else given for given in (data.y, data.offset))
        samples = (data.X, y, offset, rows.starts, rows.counts, rows.batch, site_roots(rows.keys, plan.seed))
        self._samples = Samples(*map(_readable, samples))
        sparsity = np.empty((0, 0)) if plan.sparsity is None else plan.sparsity
        self._steps = Steps(*map(_readable, (steps.start, steps.growth, steps.damping, rows.ridge, sparsity)))
        ends, radius = _readable(plan.edges.astype(np.int32)), _readable(plan.edge_radius)
        self._edges = Edges(PENALTIES[plan.penalty.name], float(plan.rho), ends, radius)
        self._shares = np.zeros((self.threads, *self.shard.balance.shape))

    def __call__(self, first: int, count: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Do ``count`` rounds from ``first`` on, as `LocalShards.run`."""
        shard, s, kept = self.shard, self._shares, self.shard.gradients
        assert kept is not None
        s[0], s[1:] = shard.balance, 0.0
        here = np.empty((0, 0), dtype=np.bool_) if available is None else np.ascontiguousarray(available)
        chance = np.empty((0, 0)) if probability is None else np.ascontiguousarray(probability)
        of_shard = (shard.theta, shard.alpha, s, shard.balance_before, shard.average, shard.average_balance)
        state = State(*of_shard, kept.table, kept.anchor_gradient, kept.anchor_theta, kept.stale, kept.looked)
        if self.threads == 1:
            given = (first, count, here, chance, self._rule, self._samples, self._steps, self._edges, state)
            load(rounds_loop, *given)
            rounds_loop(*given)
        else:
            self._share_rounds(first, count, here, chance, state)
        np.sum(s, axis=0, out=shard.balance)
        weight = averaging_weight(self.plan.average, first + count - 1)
        # by a kernel, like those of the other rounds: bits must not depend on where stretches of rounds end
        add_to_average(weight, shard.balance, shard.average_balance)

    def _share_rounds(self, first: int, count: int, here: Mask, chance: Array, state: State) -> None:
        rule, samples, steps, edges = self._rule, self._samples, self._steps, self._edges
        everybody, certain = np.empty(0, dtype=np.bool_), np.empty(0)
        crew = Crew(self.threads)
        sites, duals = crew.split(self.shard.sites.size), crew.split(self.shard.alpha.shape[0])

        def node_steps(t: int, weight: float, now: Mask, p: Array) -> None:
            crew.run(lambda _, lo, hi: sites_loop(lo, hi, t, weight, now, p, rule, samples, steps, state), sites)

        try:
            for k in range(count):
                weight = 0.0 if k == 0 else averaging_weight(self.plan.average, first + k - 1)
                now = here[k] if here.size else everybody
                node_steps(first + k, weight, now, chance[k] if chance.size else certain)
                crew.run(lambda n, lo, hi: edges_loop(lo, hi, n, edges, state), duals)
        finally:
            crew.close()


def _readable(array: NDArray[Any]) -> NDArray[Any]:
    """Return a C-ordered, read-only view: one type of argument, whether rows are read-only or not."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def unsupported(local: LocalShards) -> str | None:
    """Return why the compiled rounds cannot do this run, or None when they can."""
    plan, rows = local.plan, local.rows
    loss = rows.losses[0]
    if len(local.shards) > 1:
        return f"it runs one shard, not {len(local.shards)}"
    if local.streams:
        return "it cannot draw from streams"
    if any(other is not loss for other in rows.losses):
        return "it needs the same loss on every site"
    if type(loss) not in LOSSES:
        return f"it has no {loss.name} loss, only {', '.join(kind.name for kind in LOSSES)}"
    if ((rows.batch > FLOYD_LIMIT) & (rows.batch < rows.counts)).any():
        return f"it cannot draw batches of more than {FLOYD_LIMIT} rows"
    if plan.penalty.name not in PENALTIES or type(plan.penalty) is not type(make_penalty(plan.penalty.name)):
        return f"it has no {plan.penalty.name} penalty"
    return None
