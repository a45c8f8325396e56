"""Penalty levels one after the other in one compiled call: on small problems Python between them takes as long."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedkin.solvers.kernels.bundles import DEVICES, EDGES, I1, R1, STATE, STEP, STOPPING, W2, W3
from fedkin.solvers.kernels.checks import CHECKS, DONE, FUSED, N_COUNTERS, SETTLED, begin, settle
from fedkin.solvers.kernels.jit import FLOAT, INT, bundle, kernel, part
from fedkin.solvers.kernels.steps import edge_step
from fedkin.solvers.pdhg import Stopping

#: Columns of the table of `settle_levels`.
N_ITER, VALUE, GAP, N_CHECKS = range(4)
N_COLUMNS = 4


class Levels(NamedTuple):
    """Levels of a path, and what is found at them.

    Attributes
    ----------
    strengths : array (m,)
    theta, alpha : array (m, V, p), array (m, E, p)
        Solutions; the first ones may be known, the others are filled in.
    table : array (m, 4)
        Iterations, value, relative gap and number of checks.
    checks : array (m, k, 3)
        What `settle` says about each check.
    edge_weight : array (E,)
    component : int array (E,)
        Of each edge; empty where fused components do not matter.
    """

    strengths: Any
    theta: Any
    alpha: Any
    table: Any
    checks: Any
    edge_weight: Any
    component: Any


LEVELS = bundle(Levels, R1, W3, W3, W2, W3, R1, I1)


@part
def _predict(level: int, levels: Any, x: Any, y: Any) -> None:
    """Where to start, given the last two solutions: on the line through them, which the path often follows."""
    strengths, theta, alpha = levels.strengths, levels.theta, levels.alpha
    at, last = strengths[level], strengths[level - 1]
    if level > 1 and strengths[level - 2] > last > at:
        step = (last - at) / (strengths[level - 2] - last)
        x[:] = theta[level - 1] + step * (theta[level - 1] - theta[level - 2])
        y[:] = alpha[level - 1] + step * (alpha[level - 1] - alpha[level - 2])
    else:
        # duals grow with the strength
        x[:] = theta[level - 1]
        y[:] = alpha[level - 1] * (at / last)


@part
def _all_apart(edges: Any, component: Any, theta: Any, distance: float) -> bool:
    """Whether every component that has edges has one whose ends differ by more than ``distance`` in some coordinate."""
    head, tail = edges.head, edges.tail
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


@kernel(INT, LEVELS, INT, FLOAT, STOPPING, DEVICES, EDGES, STEP, W3, STATE)
def settle_levels(
    levels: Any,
    known: int,
    least_curvature: float,
    stopping: Any,
    devices: Any,
    edges: Any,
    step: Any,
    own: Any,
    state: Any,
) -> int:
    """Solve the levels after the first ``known`` until ``stopping.limit`` iterations are done in all.

    Returns the number of levels that are solved. It also stops where a whole component may be fused at the optimum:
    the caller knows how to do that. No device's curvature is below ``least_curvature``. Without known levels, the first
    one starts at ``state``, which is changed; every level begins with the rho of ``step``, and `settle` says what
    ``own`` is for.
    """
    counters, moves = np.zeros(N_COUNTERS, dtype=np.int64), np.empty((2, step.rho.shape[0]))
    first_rho, nothing = step.rho.copy(), np.zeros(step.rho.shape[0])
    total = 0
    for level in range(known, levels.strengths.shape[0]):
        edges.radius[:] = levels.strengths[level] * levels.edge_weight
        if level > 0:
            _predict(level, levels, state.x, state.y)
        # a step of length 0 leaves the duals in their balls, and their sums in the balance
        state.s[:] = 0.0
        state.ahead[:] = 0.0
        edge_step(0, state.y.shape[0], edges, nothing, state.ahead, state.y, state.s[0], 1.0)
        step.rho[:] = first_rho
        step.half[:] = 0.5 * first_rho
        begin(counters)
        left = Stopping(stopping.tol, stopping.floor, stopping.limit - total, stopping.fusing_helps)
        settle(counters, levels.checks[level], moves, left.limit, left, devices, edges, step, own, state)
        if counters[SETTLED] == 0:
            return level - known
        total += counters[DONE]
        levels.theta[level] = state.ahead if counters[FUSED] else state.x
        count = counters[CHECKS]
        value, gap = levels.checks[level, count - 1, 1], levels.checks[level, count - 1, 2]
        # by its curvature, each device is at most so far from its optimum
        reach = np.sqrt(2.0 * gap * max(abs(value), stopping.floor) / least_curvature)
        if not _all_apart(edges, levels.component, levels.theta[level], 2.0 * reach):
            return int(level - known)
        levels.alpha[level] = state.y
        levels.table[level, N_ITER], levels.table[level, N_CHECKS] = counters[DONE], count
        levels.table[level, VALUE], levels.table[level, GAP] = value, gap
    return int(levels.strengths.shape[0] - known)
