"""Iterations with their checks in one compiled call: what `fedkin.solvers.compiled` does one by one, without Python.

On small problems the calls between kernels take as long as the kernels. Here a solve comes back to Python only to
change rho, and several solves run side by side on threads.
"""

from __future__ import annotations

import math
from typing import Any

from numba import njit, types

from fedkin.solvers.kernels.gaps import edge_gap, fuse, node_gap_dense, node_gap_isotropic
from fedkin.solvers.kernels.jit import FLOAT, INT, PAIR, kernel, readable, writable
from fedkin.solvers.kernels.steps import edge_moves, edge_step, node_step_dense, node_step_isotropic
from fedkin.solvers.pdhg import LEAST_STRETCH

_COUNTERS = writable(INT, 1)
_I1, _ORDER = readable(types.int32, 1), readable(types.int64, 1)
_R1, _R2, _R3 = (readable(FLOAT, k) for k in (1, 2, 3))
_W2, _W3 = (writable(FLOAT, k) for k in (2, 3))


@kernel(PAIR, INT, _ORDER, _R3, _R3, _R1, _R2, _R1, _R2, _R3, _I1, _I1, _R1, _R2, INT)
def certificate(
    dense: int,
    order: Any,
    A: Any,
    own_inverse: Any,
    curvature: Any,
    b: Any,
    c0: Any,
    x: Any,
    s: Any,
    head: Any,
    tail: Any,
    radius: Any,
    y: Any,
    kind: int,
) -> tuple[float, float]:
    """Value and duality gap, without sparsity."""
    if dense:
        value, gap = node_gap_dense(0, x.shape[0], order, A, own_inverse, b, c0, x, s)
    else:
        value, gap = node_gap_isotropic(0, x.shape[0], order, curvature, b, c0, x, s)
    penalty, slack = edge_gap(0, y.shape[0], head, tail, radius, x, y, kind)
    return value + penalty, gap + slack


@njit(nogil=True)
def _until_check(done: int, rows: Any, tol: float) -> int:
    """As `fedkin.solvers.pdhg.check_after`."""
    usual = max(5, done // 10)
    m = rows.shape[0]
    if m < 2 or not 0.0 < rows[m - 1, 2] < rows[m - 2, 2] < math.inf:
        return usual
    rate = math.log(rows[m - 2, 2] / rows[m - 1, 2]) / (rows[m - 1, 0] - rows[m - 2, 0])
    return int(min(max(math.ceil(math.log(rows[m - 1, 2] / tol) / rate), LEAST_STRETCH), 2 * usual))


#: Places in the counters of `settle`.
DONE, CHECK_AT, FUSING_HELPED, FUSED, CHECKS, STATUS = range(6)
N_COUNTERS = 6
#: Why `settle` returned: it may go on, a look at rho is due, the gap is small enough.
GOES_ON, LOOK_AT_RHO, SETTLED = range(3)


@kernel(
    types.void,
    _COUNTERS,
    _W2,
    INT,
    INT,
    INT,
    FLOAT,
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
    _R1,
    _W2,
    _W3,
    _W2,
    _W2,
    _R2,
    _I1,
    _I1,
    _R1,
    _W2,
    INT,
    _W2,
)
def settle(
    counters: Any,
    rows: Any,
    pause: int,
    limit: int,
    look_at: int,
    tol: float,
    floor: float,
    fusing_helps: float,
    relaxation: float,
    share: float,
    dense: int,
    order: Any,
    A: Any,
    own_inverse: Any,
    inverse: Any,
    curvature: Any,
    b: Any,
    c0: Any,
    weight: Any,
    linked: Any,
    rho: Any,
    half: Any,
    x: Any,
    s: Any,
    ahead: Any,
    z: Any,
    box: Any,
    head: Any,
    tail: Any,
    radius: Any,
    y: Any,
    kind: int,
    moves: Any,
) -> None:
    """Iterations and checks until the gap is small, rho needs a look, or ``pause`` iterations are done.

    ``counters`` (the places above) holds the iterations done, the iteration of the next check, whether fusing helped,
    whether the last check is about fused parameters (left in ``ahead``), the number of rows, and why it returned.
    ``rows (m, 3)`` gets iteration, value and relative gap of each check, ``moves (2, p)`` the squared moves of duals
    and parameters in iteration ``look_at``. At ``limit`` iterations it stops altogether.
    """
    n, p = x.shape
    done = counters[DONE]
    while done < min(pause, limit):
        if counters[CHECK_AT] <= done:
            counters[CHECK_AT] = min(done + _until_check(done, rows[: counters[CHECKS]], tol), limit)
        while done < counters[CHECK_AT]:
            # the last step before a check is not relaxed: it leaves a feasible pair
            relax = 1.0 if done + 1 == counters[CHECK_AT] else relaxation
            if dense:
                node_step_dense(0, n, inverse, b, weight, rho, x, s, ahead, relax, z, box)
            else:
                node_step_isotropic(0, n, curvature, b, weight, rho, x, s, ahead, relax, z, box)
            looking = done + 1 == look_at
            if looking:
                moves[:] = 0.0
                edge_moves(0, y.shape[0], head, tail, radius, half, ahead, y, kind, moves[0])
                for i in range(n):
                    for c in range(p):
                        # ahead = x + 2 dx and the new x = x + relax dx
                        dx = (ahead[i, c] - x[i, c]) / (2.0 - relax)
                        moves[1, c] += linked[i] * dx * dx
            edge_step(0, y.shape[0], head, tail, radius, half, ahead, y, s[0], relax, kind)
            done += 1
            if looking and done < counters[CHECK_AT]:
                counters[DONE], counters[STATUS] = done, LOOK_AT_RHO
                return
        counters[DONE], counters[FUSED] = done, 0
        value, gap = 0.0, math.inf
        if counters[FUSING_HELPED] == 0:
            value, gap = certificate(dense, order, A, own_inverse, curvature, b, c0, x, s, head, tail, radius, y, kind)
        # with fused devices better last time, it takes only one of the two to be good enough
        near = gap <= fusing_helps * tol * max(abs(value), floor) or done >= limit
        if counters[FUSING_HELPED] == 1 or near:
            fuse(0, p, head, tail, radius, y, share, kind, z, box, x, ahead)
            fused, slack = certificate(
                dense, order, A, own_inverse, curvature, b, c0, ahead, s, head, tail, radius, y, kind
            )
            if counters[FUSING_HELPED] == 0:
                counters[FUSING_HELPED] = 1 if slack < gap else 0
            if slack <= max(gap, tol * max(abs(fused), floor)):
                value, gap, counters[FUSED] = fused, slack, 1
        relative = max(gap, 0.0) / max(abs(value), floor)
        row = counters[CHECKS]
        rows[row, 0], rows[row, 1], rows[row, 2] = done, value, relative
        counters[CHECKS] += 1
        if relative <= tol:
            counters[STATUS] = SETTLED
            return
        if done == look_at:
            counters[STATUS] = LOOK_AT_RHO
            return
        if counters[CHECKS] == rows.shape[0]:
            break
    counters[STATUS] = GOES_ON
