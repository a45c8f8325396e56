"""What a check of the compiled iteration looks at: value and gap of a pair, and the same with devices fused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from fedkin.solvers.kernels.bundles import DEVICES, EDGES, R2, R3, W2
from fedkin.solvers.kernels.grams import factorize
from fedkin.solvers.kernels.jit import FLOAT, INT, PAIR, kernel, part
from fedkin.solvers.kernels.steps import L1, L2


@part
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


@kernel(PAIR, INT, INT, EDGES, R2, R2)
def edge_gap(lo: int, hi: int, edges: Any, x: Any, y: Any) -> tuple[float, float]:
    """``sum_e r_e phi(d_e)`` and ``sum_e (r_e phi(d_e) - <y_e, d_e>)`` with ``d = D x``."""
    head, tail, radius, kind = edges.head, edges.tail, edges.radius, edges.kind
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


@part
def _dense_gap(lo: int, hi: int, devices: Any, x: Any, s: Any) -> tuple[float, float]:
    order, A, inverse, b, c0 = devices.order, devices.A, devices.own_inverse, devices.b, devices.c
    p = x.shape[1]
    value, gap = 0.0, 0.0
    residual = np.empty(p)
    factor = np.empty((p, p))
    stored = inverse.shape[0] > 0  # otherwise Gram matrices are factorised on the way
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


@part
def _isotropic_gap(lo: int, hi: int, devices: Any, x: Any, s: Any) -> tuple[float, float]:
    order, curvature, b, c0 = devices.order, devices.curvature, devices.b, devices.c
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


@kernel(PAIR, INT, INT, DEVICES, R2, R3)
def node_gap(lo: int, hi: int, devices: Any, x: Any, s: Any) -> tuple[float, float]:
    """Sums of ``M_u(x_u)`` and of ``r' A^{-1} r / 2`` with ``r = A x - b + s``."""
    if devices.curvature.shape[0] > 0:
        value, gap = _isotropic_gap(lo, hi, devices, x, s)
    else:
        value, gap = _dense_gap(lo, hi, devices, x, s)
    return value, gap


@kernel(types.void, INT, INT, EDGES, R2, FLOAT, R2, R2, R2, W2)
def fuse(lo: int, hi: int, edges: Any, y: Any, share: float, z: Any, box: Any, x: Any, out: Any) -> None:
    """Means of ``x`` over devices joined by edges whose dual is inside ``share`` of its ball.

    For l1 the columns ``lo .. hi`` on their own, for the others all columns together. A group is zero where the
    sparsity dual of a member is inside its box.
    """
    head, tail, radius, kind = edges.head, edges.tail, edges.radius, edges.kind
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
