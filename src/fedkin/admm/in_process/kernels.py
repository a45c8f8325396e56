"""The rounds of Fed-ADMM as compiled loops (numba), for one shard that hosts every site.

The same batches and the same steps as `fedkin.admm.shard`; sums are taken in another order, so results agree to
rounding and not to the bit. Importing the module compiles it, or loads it from numba's cache. A round has two loops,
over sites and over edges; each works on a range and releases the GIL, so that plain threads share a large round.

Conventions: ``s (T, V, p)`` holds the sums of duals as one share per thread. The site loop of round t reads and
clears them (and adds them to their average on behalf of round t - 1), the edge loop fills them again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from fedkin.admm.shard import TAIL_POWER
from fedkin.losses import COMPILED_LOSSES, Loss, MeanLoss
from fedkin.solvers.jit import FLOAT, INT, bundle, kernel, part, readable, writable

L1, L2, LINF = 0, 1, 2
PENALTIES = {"l1": L1, "l2": L2, "linf": LINF}
MEAN = -1
LOSSES: dict[type[Loss], int] = {MeanLoss: MEAN, **{kind: k for k, kind in enumerate(COMPILED_LOSSES)}}
TAIL, PAPER, LAST = 0, 1, 2
AVERAGES = {"tail": TAIL, "paper": PAPER, "last": LAST}
PLAIN, SAGA, SVRG = 0, 1, 2
GRADIENTS = {"plain": PLAIN, "saga": SAGA, "svrg": SVRG}

_GOLDEN = 0x9E3779B97F4A7C15

_MASK, _WORDS = readable(types.boolean, 1), readable(types.uint64, 1)
_I1, _R1, _R2 = readable(INT, 1), readable(FLOAT, 1), readable(FLOAT, 2)
_W2, _W3 = writable(FLOAT, 2), writable(FLOAT, 3)


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


RULE = bundle(Rule, INT, INT, INT, INT, FLOAT, FLOAT)
SAMPLES = bundle(Samples, _R2, _R1, _R1, _I1, _I1, _I1, _WORDS)
STEPS = bundle(Steps, _R1, _R1, _R1, _R1, _R2)
EDGES = bundle(Edges, INT, FLOAT, readable(types.int32, 2), _R1)
STATE = bundle(State, _W2, _W2, _W3, _W2, _W2, _W2, _W2, _W2, _W2, writable(types.boolean, 1), writable(INT, 1))


@part
def _mix(word: Any) -> Any:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@part
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
    slope = part(COMPILED_LOSSES[first].slope)
    if first + 1 == len(COMPILED_LOSSES):
        return part(lambda loss, parameter, eta, y: slope(eta, y, parameter))
    others = _slopes(first + 1)

    @part
    def chosen(loss: int, parameter: float, eta: float, y: float) -> Any:
        return slope(eta, y, parameter) if loss == first else others(loss, parameter, eta, y)

    return chosen


_slope = _slopes()


@part
def _weight(average: int, t: int) -> float:
    """`fedkin.admm.shard.averaging_weight`."""
    if average == LAST:
        return 1.0
    return 1.0 / t if average == PAPER else (TAIL_POWER + 1.0) / (TAIL_POWER + t)


@kernel(types.void, FLOAT, _R2, _W2)
def add_to_average(weight: Any, balance: Any, average_balance: Any) -> None:
    """What `sites_loop` does on behalf of the round before, after the last round of a stretch."""
    for i in range(balance.shape[0]):
        for c in range(balance.shape[1]):
            average_balance[i, c] += weight * (balance[i, c] - average_balance[i, c])


@kernel(types.void, INT, INT, INT, FLOAT, _MASK, _R1, RULE, SAMPLES, STEPS, STATE)
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


@part
def _clip(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


@part
def _sort(values: Any) -> None:
    for k in range(1, values.shape[0]):
        value, place = values[k], k
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


@kernel(types.void, INT, INT, INT, EDGES, STATE)
def edges_loop(lo: int, hi: int, share: int, edges: Any, state: Any) -> None:
    """Edge steps of the edges ``lo .. hi - 1``; their duals are added to a share of s."""
    penalty, ends, radius = edges.penalty, edges.ends, edges.radius
    theta, alpha, s = state.theta, state.alpha, state.s
    p = theta.shape[1]
    half = 0.5 * edges.rho
    moved, ordered = np.empty(p), np.empty(p)
    blocks = p // 4 * 4 if penalty == L1 else 0
    for e in range(lo, hi):
        i, j, bound = ends[e, 0], ends[e, 1], radius[e]
        # four coordinates at a time, read before anything is written: these become vector instructions
        for c in range(0, blocks, 4):
            a0 = _clip(alpha[e, c] + half * (theta[i, c] - theta[j, c]), bound)
            a1 = _clip(alpha[e, c + 1] + half * (theta[i, c + 1] - theta[j, c + 1]), bound)
            a2 = _clip(alpha[e, c + 2] + half * (theta[i, c + 2] - theta[j, c + 2]), bound)
            a3 = _clip(alpha[e, c + 3] + half * (theta[i, c + 3] - theta[j, c + 3]), bound)
            i0, i1, i2, i3 = s[share, i, c], s[share, i, c + 1], s[share, i, c + 2], s[share, i, c + 3]
            j0, j1, j2, j3 = s[share, j, c], s[share, j, c + 1], s[share, j, c + 2], s[share, j, c + 3]
            alpha[e, c], alpha[e, c + 1], alpha[e, c + 2], alpha[e, c + 3] = a0, a1, a2, a3
            s[share, i, c], s[share, i, c + 1] = i0 + a0, i1 + a1
            s[share, i, c + 2], s[share, i, c + 3] = i2 + a2, i3 + a3
            s[share, j, c], s[share, j, c + 1] = j0 - a0, j1 - a1
            s[share, j, c + 2], s[share, j, c + 3] = j2 - a2, j3 - a3
        if penalty == L1:
            for c in range(blocks, p):
                dual = _clip(alpha[e, c] + half * (theta[i, c] - theta[j, c]), bound)
                alpha[e, c] = dual
                s[share, i, c] += dual
                s[share, j, c] -= dual
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


@kernel(types.void, INT, INT, readable(types.boolean, 2), _R2, RULE, SAMPLES, STEPS, EDGES, STATE)
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
    everybody, certain = np.empty(0, dtype=np.bool_), np.empty(0)
    for k in range(count):
        t = first + k
        last_weight = 0.0 if k == 0 else _weight(rule.average, t - 1)
        here = available[k] if available.shape[0] else everybody
        chance = probability[k] if probability.shape[0] else certain
        sites_loop(0, state.theta.shape[0], t, last_weight, here, chance, rule, samples, steps, state)
        edges_loop(0, state.alpha.shape[0], 0, edges, state)
