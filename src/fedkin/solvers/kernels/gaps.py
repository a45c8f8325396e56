"""What a check of the compiled iteration looks at: value and gap of a pair, and the same with devices fused.

Conventions are those of `fedkin.solvers.kernels.steps`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types

from fedkin.solvers.kernels.grams import factorize
from fedkin.solvers.kernels.jit import FLOAT, INT, PAIR, kernel, readable, writable
from fedkin.solvers.kernels.steps import L1, L2

_I1, _L1 = readable(types.int32, 1), readable(types.int64, 1)
_R1, _R2, _R3 = (readable(FLOAT, k) for k in (1, 2, 3))
_W1, _W2, _W3 = (writable(FLOAT, k) for k in (1, 2, 3))


@njit(nogil=True)
def _join(parent: Any, i: int, j: int, c: int) -> None:
    """Put devices ``i`` and ``j`` into one group of column ``c``, by the smaller number of the two roots."""
    while parent[i, c] != i:
        parent[i, c] = parent[parent[i, c], c]
        i = parent[i, c]
    while parent[j, c] != j:
        parent[j, c] = parent[parent[j, c], c]
        j = parent[j, c]
    # one pass in ascending order then finds every root
    if i < j:
        parent[j, c] = i
    else:
        parent[i, c] = j


@kernel(PAIR, INT, INT, _I1, _I1, _R1, _R2, _R2, INT)
def edge_gap(lo: int, hi: int, head: Any, tail: Any, radius: Any, x: Any, y: Any, kind: int) -> tuple[float, float]:
    """``sum_e r_e phi(d_e)`` and ``sum_e (r_e phi(d_e) - <y_e, d_e>)`` with ``d = D x``."""
    p = x.shape[1]
    penalty, slack = 0.0, 0.0
    for e in range(lo, hi):
        i, j = np.uint32(head[e]), np.uint32(tail[e])
        size, inner = 0.0, 0.0
        if kind == L1:
            for c in range(p):
                d = x[i, c] - x[j, c]
                size += abs(d)
                inner += y[e, c] * d
        elif kind == L2:
            for c in range(p):
                d = x[i, c] - x[j, c]
                size += d * d
                inner += y[e, c] * d
            size = math.sqrt(size)
        else:
            for c in range(p):
                d = x[i, c] - x[j, c]
                size = max(size, abs(d))
                inner += y[e, c] * d
        penalty += radius[e] * size
        slack += radius[e] * size - inner
    return penalty, slack


@kernel(PAIR, INT, INT, _L1, _R3, _R3, _R2, _R1, _R2, _R3)
def node_gap_dense(
    lo: int, hi: int, order: Any, A: Any, inverse: Any, b: Any, c0: Any, x: Any, s: Any
) -> tuple[float, float]:
    """Sums of ``M_u(x_u)`` and of ``r' A^{-1} r / 2`` with ``r = A x - b + s``.

    ``A`` and ``c0`` are in the caller's order of devices, ``order[i]`` is the caller's number of device i. An empty
    ``inverse`` means that the Gram matrices are factorised on the way, which saves the memory for their inverses.
    """
    p = x.shape[1]
    value, gap = 0.0, 0.0
    residual = np.empty(p)
    factor = np.empty((p, p))
    stored = inverse.shape[0] > 0
    for i in range(lo, hi):
        u = order[i]
        for k in range(p):
            applied = 0.0
            for c in range(p):
                applied += A[u, k, c] * x[i, c]
            value += (0.5 * applied - b[i, k]) * x[i, k]
            residual[k] = applied - b[i, k]
        value += c0[u]
        for t in range(s.shape[0]):
            for k in range(p):
                residual[k] += s[t, i, k]
        if stored:
            for k in range(p):
                applied = 0.0
                for c in range(p):
                    applied += inverse[i, k, c] * residual[c]
                gap += 0.5 * residual[k] * applied
        else:
            factorize(A[u], factor)
            for k in range(p):
                left = residual[k]
                for c in range(k):
                    left -= factor[k, c] * residual[c]
                residual[k] = left / factor[k, k]
                gap += 0.5 * residual[k] * residual[k]
    return value, gap


@kernel(PAIR, INT, INT, _L1, _R1, _R2, _R1, _R2, _R3)
def node_gap_isotropic(
    lo: int, hi: int, order: Any, curvature: Any, b: Any, c0: Any, x: Any, s: Any
) -> tuple[float, float]:
    """As `node_gap_dense`, for multiples of the identity; ``curvature`` is in the order of ``x``."""
    value, gap = 0.0, 0.0
    for i in range(lo, hi):
        square = 0.0
        for k in range(x.shape[1]):
            applied = curvature[i] * x[i, k]
            value += (0.5 * applied - b[i, k]) * x[i, k]
            residual = applied - b[i, k]
            for t in range(s.shape[0]):
                residual += s[t, i, k]
            square += residual * residual
        value += c0[order[i]]
        gap += 0.5 * square / curvature[i]
    return value, gap


@kernel(types.void, INT, INT, _I1, _I1, _R1, _R2, FLOAT, INT, _R2, _R2, _R2, _W2)
def fuse(
    lo: int,
    hi: int,
    head: Any,
    tail: Any,
    radius: Any,
    y: Any,
    share: float,
    kind: int,
    z: Any,
    box: Any,
    x: Any,
    out: Any,
) -> None:
    """Means of ``x`` over devices joined by edges whose dual is inside ``share`` of its ball.

    For l1 the columns ``lo .. hi`` on their own, for the others all columns together. A group is zero where the
    sparsity dual of a member is inside its box.
    """
    n, p, sparse = x.shape[0], x.shape[1], box.shape[0] > 0
    groupings = hi - lo if kind == L1 else 1
    parent = np.empty((n, groupings), dtype=np.int32)
    for i in range(n):
        parent[i, :] = i
    for e in range(y.shape[0]):
        i, j, limit = head[e], tail[e], share * radius[e]
        if kind == L1:
            for c in range(groupings):
                if parent[i, c] != parent[j, c] and abs(y[e, lo + c]) < limit:
                    _join(parent, i, j, c)
        elif parent[i, 0] != parent[j, 0]:
            length = 0.0
            for c in range(p):
                length += y[e, c] * y[e, c] if kind == L2 else abs(y[e, c])
            if (math.sqrt(length) if kind == L2 else length) < limit:
                _join(parent, i, j, 0)
    size = np.zeros((n, groupings))
    zero = np.zeros((n if sparse else 0, hi - lo), dtype=np.bool_)
    out[:, lo:hi] = 0.0
    for i in range(n):
        for c in range(groupings):
            parent[i, c] = parent[parent[i, c], c]
            size[parent[i, c], c] += 1.0
        for c in range(lo, hi):
            root = parent[i, c - lo if kind == L1 else 0]
            out[root, c] += x[i, c]
            if sparse and abs(z[i, c]) < share * box[i, c]:
                zero[root, c - lo] = True
    for i in range(n):
        for c in range(lo, hi):
            k = c - lo if kind == L1 else 0
            # a root comes before its members
            if parent[i, k] != i:
                out[i, c] = out[parent[i, k], c]
            elif sparse and zero[i, c - lo]:
                out[i, c] = 0.0
            else:
                out[i, c] /= size[i, k]
