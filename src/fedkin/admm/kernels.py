"""The rounds of Fed-ADMM as compiled loops (numba), for one shard that hosts every device.

The same batches and the same steps as `fedkin.admm.shard`; sums are taken in another order, so results agree to
rounding and not to the bit. Importing the module compiles it, or loads it from numba's cache. A round has two loops,
over devices and over edges; each works on a range and releases the GIL, so that plain threads share a large round.

Conventions: ``s (T, V, p)`` holds the sums of duals as one share per thread. The device loop of round t reads and
clears them (and adds them to their average on behalf of round t - 1), the edge loop fills them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, njit, types

from fedkin.admm.shard import TAIL_POWER

L1, L2, LINF = 0, 1, 2
PENALTIES = {"l1": L1, "l2": L2, "linf": LINF}
LINEAR, LOGISTIC, POISSON, HUBER, MEAN = 0, 1, 2, 3, 4
LOSSES = {"linear": LINEAR, "logistic": LOGISTIC, "poisson": POISSON, "huber": HUBER, "mean": MEAN}
TAIL, PAPER, LAST = 0, 1, 2
AVERAGES = {"tail": TAIL, "paper": PAPER, "last": LAST}
PLAIN, SAGA, SVRG = 0, 1, 2
GRADIENTS = {"plain": PLAIN, "saga": SAGA, "svrg": SVRG}

_GOLDEN = 0x9E3779B97F4A7C15
_NUMERICS = {"contract", "reassoc", "nsz", "arcp"}

_int, _float, _word = types.int64, types.float64, types.uint64


def _given(dtype: Any, ndim: int) -> Any:
    return types.Array(dtype, ndim, "C", readonly=True)


def _state(dtype: Any, ndim: int) -> Any:
    return types.Array(dtype, ndim, "C")


def _compile(*signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile now for these types, or later, as a part of others, without a signature."""
    options: dict[str, Any] = {"nogil": True, "fastmath": _NUMERICS, "error_model": "numpy"}
    if not signature:
        return njit(**options)  # type: ignore[no-any-return]

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        # numba leaves this pass off; blocks of four neighbouring coordinates need it to become vector instructions
        settings: Any = config
        before = settings.SLP_VECTORIZE
        settings.SLP_VECTORIZE = 1
        try:
            return njit(types.void(*signature), cache=True, **options)(function)  # type: ignore[no-any-return]
        finally:
            settings.SLP_VECTORIZE = before

    return compiled


@_compile()
def _mix(word: Any) -> Any:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@_compile()
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


@_compile()
def _slope(loss: int, delta: float, eta: float, y: float) -> float:
    if loss == LINEAR:
        return eta - y
    if loss == LOGISTIC:
        small = math.exp(-abs(eta))
        return (1.0 if eta >= 0.0 else small) / (1.0 + small) - y
    if loss == POISSON:
        return math.exp(eta) - y
    return min(max(eta - y, -delta), delta)


@_compile()
def _weight(average: int, t: int) -> float:
    """`fedkin.admm.shard.averaging_weight`."""
    if average == LAST:
        return 1.0
    return 1.0 / t if average == PAPER else (TAIL_POWER + 1.0) / (TAIL_POWER + t)


_DATA = (
    _given(_int, 1), _given(_float, 1),  # codes, numbers
    _given(_float, 2), _given(_float, 1), _given(_float, 1),  # X, y, offset
    _given(_int, 1), _given(_int, 1), _given(_int, 1), _given(_word, 1),  # starts, counts, batch, roots
    _given(_float, 1),  # ridge
    _given(_float, 1), _given(_float, 1), _given(_float, 1), _given(_float, 2),  # start, growth, damping, sparsity
    _state(_float, 2), _state(_float, 3), _state(_float, 2),  # theta, s, before
    _state(_float, 2), _state(_float, 2),  # average, average_balance
    _state(_float, 2), _state(_float, 2), _state(_float, 2),  # table, anchor_gradient, anchor_theta
    _state(types.boolean, 1), _state(_int, 1),  # stale, looked
)  # fmt: skip


@_compile(_float, _given(_float, 2), _state(_float, 2))
def add_to_average(weight: Any, balance: Any, average_balance: Any) -> None:
    """What `devices_loop` does on behalf of the round before, after the last round of a stretch."""
    for i in range(balance.shape[0]):
        for c in range(balance.shape[1]):
            average_balance[i, c] += weight * (balance[i, c] - average_balance[i, c])


@_compile(_int, _int, _int, _float, _given(types.boolean, 1), _given(_float, 1), *_DATA)
def devices_loop(
    lo: Any, hi: Any, t: Any, last_weight: Any, available: Any, probability: Any, codes: Any, numbers: Any, X: Any,
    y: Any, offset: Any, starts: Any, counts: Any, batch: Any, roots: Any, ridge: Any, start: Any, growth: Any,
    damping: Any, sparsity: Any, theta: Any, s: Any, before: Any, average: Any, average_balance: Any, table: Any,
    anchor_gradient: Any, anchor_theta: Any, stale: Any, looked: Any,
) -> None:  # fmt: skip
    """Node steps of the devices ``lo .. hi - 1`` in round t.

    ``codes``: loss, gradient, average, rounds between snapshots. ``numbers``: Huber's delta, radius of the ball
    (infinite for none). ``last_weight`` is the weight of the present sums of duals in their average. Arrays that are
    not needed are empty.
    """
    loss, gradient, paper, delta = codes[0], codes[1], codes[2] == PAPER, numbers[0]
    mean = loss == MEAN
    snapshot = gradient == SVRG and (t - 1) % codes[3] == 0
    ball, weight = numbers[1], _weight(codes[2], t)
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


@_compile()
def _clip(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


@_compile()
def _sort(values: Any) -> None:
    for k in range(1, values.shape[0]):
        value, place = values[k], k
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


_EDGES = (_int, _float, _given(types.int32, 2), _given(_float, 1), _state(_float, 2))


@_compile(_int, _int, _int, *_EDGES, _given(_float, 2), _state(_float, 3))
def edges_loop(
    lo: int, hi: int, share: int, penalty: int, rho: float, ends: Any, radius: Any, alpha: Any, theta: Any, s: Any
) -> None:
    """Edge steps of the edges ``lo .. hi - 1``; their duals are added to a share of s."""
    p = theta.shape[1]
    half = 0.5 * rho
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


@_compile(_int, _int, _given(types.boolean, 2), _given(_float, 2), *_EDGES, *_DATA)
def rounds_loop(
    first: Any, count: Any, available: Any, probability: Any, penalty: Any, rho: Any, ends: Any, radius: Any,
    alpha: Any, codes: Any, numbers: Any, X: Any, y: Any, offset: Any, starts: Any, counts: Any, batch: Any,
    roots: Any, ridge: Any, start: Any, growth: Any, damping: Any, sparsity: Any, theta: Any, s: Any, before: Any,
    average: Any, average_balance: Any, table: Any, anchor_gradient: Any, anchor_theta: Any, stale: Any, looked: Any,
) -> None:  # fmt: skip
    """Rounds ``first .. first + count - 1`` on one thread, with presence ``(count, V)`` or none."""
    everybody, certain = np.empty(0, dtype=np.bool_), np.empty(0)
    for k in range(count):
        t = first + k
        last_weight = 0.0 if k == 0 else _weight(codes[2], t - 1)
        devices_loop(
            0, theta.shape[0], t, last_weight,
            available[k] if available.shape[0] else everybody, probability[k] if probability.shape[0] else certain,
            codes, numbers, X, y, offset, starts, counts, batch, roots, ridge, start, growth, damping, sparsity,
            theta, s, before, average, average_balance, table, anchor_gradient, anchor_theta, stale, looked,
        )  # fmt: skip
        edges_loop(0, alpha.shape[0], 0, penalty, rho, ends, radius, alpha, theta, s)
