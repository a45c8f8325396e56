"""Penalty levels one after the other in one compiled call: on small problems Python between them takes as long."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from fedkin.solvers.kernels.checks import (
    CHECKS,
    DONE,
    FUSED,
    LOOK_AT_RHO,
    N_COUNTERS,
    SETTLED,
    STATUS,
    settle,
)
from fedkin.solvers.kernels.grams import invert
from fedkin.solvers.kernels.jit import FLOAT, INT, kernel, readable, writable
from fedkin.solvers.kernels.steps import edge_step
from fedkin.solvers.pdhg import FIRST_REBALANCE, REBALANCE_AT, REBALANCE_BY, RELAXATION

_I1, _ORDER = readable(types.int32, 1), readable(types.int64, 1)
_R1, _R2, _R3 = (readable(FLOAT, k) for k in (1, 2, 3))
_W1, _W2, _W3 = (writable(FLOAT, k) for k in (1, 2, 3))
_TINY = float(np.finfo(np.float64).tiny)

#: Columns of the table of `settle_levels`.
N_ITER, VALUE, GAP, N_CHECKS = range(4)
N_COLUMNS = 4


@njit(nogil=True)
def _rebalance(moves: Any, rho: Any, n_rho: int) -> bool:
    """As `fedkin.solvers.pdhg.Rebalancing.factor`, which it applies to ``rho (p,)``; whether that has changed."""
    changed = False
    for c in range(rho.shape[0]):
        dual, primal = moves[0, c], moves[1, c]
        if n_rho == 1:
            dual, primal = moves[0].sum(), moves[1].sum()
        dual *= 2.0
        if dual > _TINY or primal > _TINY:
            ratio = np.sqrt(dual / max(primal, _TINY)) / rho[c]
            if ratio > REBALANCE_AT or ratio < 1.0 / REBALANCE_AT:
                rho[c] *= min(max(ratio, 1.0 / REBALANCE_BY), REBALANCE_BY)
                changed = True
    return changed


@njit(nogil=True)
def _predict(level: int, strengths: Any, theta: Any, alpha: Any, x: Any, y: Any) -> None:
    """Where to start, given the last two solutions: on the line through them, which the path often follows."""
    at, last = strengths[level], strengths[level - 1]
    if level > 1 and strengths[level - 2] > last > at:
        step = (last - at) / (strengths[level - 2] - last)
        x[:] = theta[level - 1] + step * (theta[level - 1] - theta[level - 2])
        y[:] = alpha[level - 1] + step * (alpha[level - 1] - alpha[level - 2])
    else:
        # duals grow with the strength
        x[:] = theta[level - 1]
        y[:] = alpha[level - 1] * (at / last)


@njit(nogil=True)
def _all_apart(head: Any, tail: Any, component: Any, theta: Any, distance: float) -> bool:
    """Whether every component that has edges has one whose ends differ by more than ``distance`` in some coordinate."""
    most = component.max() + 1 if component.shape[0] else 0
    linked, apart = np.zeros(most, dtype=np.bool_), np.zeros(most, dtype=np.bool_)
    for e in range(component.shape[0]):
        linked[component[e]] = True
        if not apart[component[e]]:
            i, j = head[e], tail[e]
            for c in range(theta.shape[1]):
                if abs(theta[i, c] - theta[j, c]) > distance:
                    apart[component[e]] = True
                    break
    return bool((linked == apart).all())


@kernel(
    INT,
    _W2,
    _W3,
    _R1,
    INT,
    INT,
    FLOAT,
    FLOAT,
    FLOAT,
    FLOAT,
    INT,
    _ORDER,
    _R3,
    _R3,
    _R3,
    _R1,
    _R2,
    _R1,
    _R1,
    _R1,
    _R1,
    INT,
    _I1,
    _I1,
    _R1,
    _I1,
    FLOAT,
    INT,
    _W3,
    _W3,
    _W2,
    _W2,
)
def settle_levels(
    table: Any,
    checks: Any,
    strengths: Any,
    known: int,
    budget: int,
    tol: float,
    floor: float,
    fusing_helps: float,
    share: float,
    dense: int,
    order: Any,
    A: Any,
    own_inverse: Any,
    resolvent: Any,
    curvature: Any,
    b: Any,
    c0: Any,
    weight: Any,
    linked: Any,
    first_rho: Any,
    n_rho: int,
    head: Any,
    tail: Any,
    edge_weight: Any,
    component: Any,
    least_curvature: float,
    kind: int,
    theta: Any,
    alpha: Any,
    x: Any,
    y: Any,
) -> int:
    """Solve one level after the other until ``budget`` iterations are done; the number of levels that are solved.

    It also stops where a whole ``component (E,)`` may be fused at the optimum: the caller knows how to do that. With
    an empty array it does not.

    ``strengths (m,)`` are those of ``theta (m, V, p)`` and ``alpha (m, E, p)``, whose first ``known`` are given and
    whose others are filled in. Without any, the first starts at ``x (V, p)`` and ``y (E, p)``, which are changed.
    ``resolvent`` belongs to ``first_rho``, with which every level begins. ``table (m, 4)`` gets iterations, value,
    relative gap and number of checks, ``checks (m, k, 3)`` what `settle` says about them.
    """
    (n, p), edges = x.shape, y.shape[0]
    counters = np.zeros(N_COUNTERS, dtype=np.int64)
    s, ahead, moves = np.zeros((1, n, p)), np.zeros((n, p)), np.empty((2, p))
    z, box, nothing = np.empty((0, p)), np.empty((0, p)), np.zeros(p)
    own = np.empty_like(resolvent)
    total = 0
    for level in range(known, strengths.shape[0]):
        radius = strengths[level] * edge_weight
        if level > 0:
            _predict(level, strengths, theta, alpha, x, y)
        # a step of length 0 leaves the duals in their balls, and their sums in the balance
        s[:] = 0.0
        ahead[:] = 0.0
        edge_step(0, edges, head, tail, radius, nothing, ahead, y, s[0], 1.0, kind)
        rho, inverse = first_rho.copy(), resolvent
        half = 0.5 * rho
        look_at = interval = FIRST_REBALANCE
        counters[:] = 0
        while True:
            settle(
                counters,
                checks[level],
                budget - total,
                budget - total,
                look_at,
                tol,
                floor,
                fusing_helps,
                RELAXATION,
                share,
                dense,
                order,
                A,
                own_inverse,
                inverse,
                curvature,
                b,
                c0,
                weight,
                linked,
                rho,
                half,
                x,
                s,
                ahead,
                z,
                box,
                head,
                tail,
                radius,
                y,
                kind,
                moves,
            )
            if counters[STATUS] != LOOK_AT_RHO:
                break
            interval *= 2
            look_at += interval
            if _rebalance(moves, rho, n_rho):
                half = 0.5 * rho
                if dense:
                    invert(0, n, order, A, weight, rho, own)
                    inverse = own
        if counters[STATUS] != SETTLED:
            return level - known
        total += counters[DONE]
        theta[level] = ahead if counters[FUSED] else x
        count = counters[CHECKS]
        value, gap = checks[level, count - 1, 1], checks[level, count - 1, 2]
        # by its curvature, each device is at most so far from its optimum
        reach = np.sqrt(2.0 * gap * max(abs(value), floor) / least_curvature)
        if not _all_apart(head, tail, component, theta[level], 2.0 * reach):
            return int(level - known)
        alpha[level] = y
        table[level, N_ITER], table[level, N_CHECKS] = counters[DONE], count
        table[level, VALUE], table[level, GAP] = value, gap
    return int(strengths.shape[0] - known)
