"""Gram matrices of sites, and what a check looks at: value and gap of a pair, and the same with sites fused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from fedkin.solvers.kernels.bundles import EDGES, L1D, R1, R2, R3, SITES, W2, W3
from fedkin.solvers.kernels.jit import FLOAT, INT, PAIR, outlined, part
from fedkin.solvers.kernels.steps import L1, L2


@part
def factorize(matrix: Any, factor: Any) -> float:
    """Lower Cholesky factor; the smallest pivot relative to its diagonal entry, -1 where there is none."""
    p = matrix.shape[0]
    worst = 1.0
    for k in range(p):
        for m in range(k, p):
            total = matrix[m, k]
            for c in range(k):
                total -= factor[m, c] * factor[k, c]
            if m == k:
                if not total > 0.0:
                    return -1.0
                worst = min(worst, total / matrix[k, k])
                factor[k, k] = math.sqrt(total)
            else:
                factor[m, k] = total / factor[k, k]
    return worst


@outlined(FLOAT, INT, INT, L1D, R3, R1, R1, W3)
def invert(lo: int, hi: int, order: Any, A: Any, weight: Any, rho: Any, inverse: Any) -> float:
    """``inverse[i] = (A[order[i]] + weight[i] diag(rho))^{-1}``; returns the worst relative pivot, -1 for a bad one."""
    p = rho.shape[0]
    worst = 1.0
    row, column, diagonal = np.empty(p), np.empty(p), np.empty(p)
    for i in range(lo, hi):
        u = order[i]
        for k in range(p):
            for c in range(p):
                inverse[i, k, c] = A[u, k, c]
            inverse[i, k, k] += weight[i] * rho[k]
            diagonal[k] = inverse[i, k, k]
        # Gauss-Jordan in place; positive definite matrices need no pivoting
        for k in range(p):
            pivot = inverse[i, k, k]
            if not pivot > 0.0:
                return -1.0
            worst = min(worst, pivot / diagonal[k])
            scale = 1.0 / pivot
            for m in range(p):
                column[m] = inverse[i, m, k]
                inverse[i, m, k] = 0.0
            column[k] = 0.0
            inverse[i, k, k] = 1.0
            for c in range(p):
                row[c] = scale * inverse[i, k, c]
                inverse[i, k, c] = row[c]
            # two rows at a time make the vector loops worth their overhead
            m = 0
            while m + 2 <= p:
                f, g = column[m], column[m + 1]
                for c in range(p):
                    first = inverse[i, m, c] - f * row[c]
                    second = inverse[i, m + 1, c] - g * row[c]
                    inverse[i, m, c] = first
                    inverse[i, m + 1, c] = second
                m += 2
            if m < p:
                for c in range(p):
                    inverse[i, m, c] -= column[m] * row[c]
    return worst


@outlined(FLOAT, INT, INT, L1D, R3, R2, W2)
def local_minimizers(lo: int, hi: int, order: Any, A: Any, b: Any, out: Any) -> float:
    """``out[i] = A[order[i]]^{-1} b[i]``; the worst relative pivot, -1 when one is not positive."""
    p = b.shape[1]
    worst = 1.0
    factor = np.zeros((p, p))
    for i in range(lo, hi):
        pivot = factorize(A[order[i]], factor)
        worst = min(worst, pivot)
        if pivot <= 0.0:
            return -1.0
        for k in range(p):
            left = b[i, k]
            for c in range(k):
                left -= factor[k, c] * out[i, c]
            out[i, k] = left / factor[k, k]
        for k in range(p - 1, -1, -1):
            left = out[i, k]
            for c in range(k + 1, p):
                left -= factor[c, k] * out[i, c]
            out[i, k] = left / factor[k, k]
    return worst


@part
def _join(parent: Any, i: int, j: int, c: int) -> None:
    """Put sites ``i`` and ``j`` into one group of column ``c``, by the smaller number of the two roots."""
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


@outlined(PAIR, INT, INT, EDGES, R2, R2)
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


@outlined(PAIR, INT, INT, SITES, R2, R3)
def dense_gap(lo: int, hi: int, sites: Any, x: Any, s: Any) -> tuple[float, float]:
    """Sums of ``M_u(x_u)`` and of ``r' A^{-1} r / 2`` with ``r = A x - b + s``."""
    order, A, inverse, b, c0 = sites.order, sites.A, sites.own_inverse, sites.b, sites.c
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


@outlined(PAIR, INT, INT, SITES, R2, R3)
def isotropic_gap(lo: int, hi: int, sites: Any, x: Any, s: Any) -> tuple[float, float]:
    """As `dense_gap`, where every Gram matrix is ``curvature[i]`` times the identity."""
    order, curvature, b, c0 = sites.order, sites.curvature, sites.b, sites.c
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


@part
def _length(kind: int, dual: Any) -> Any:
    """The dual norm of ``dual (p,)``."""
    length = 0.0
    for c in range(dual.shape[0]):
        if kind == L1:
            length = max(length, abs(dual[c]))
        else:
            length += dual[c] * dual[c] if kind == L2 else abs(dual[c])
    return math.sqrt(length) if kind == L2 else length


@outlined(types.void, SITES, EDGES, R2, R3, W2, W3, quickly=True, inner=True)
def reroute(sites: Any, edges: Any, old_y: Any, old_s: Any, y: Any, s: Any) -> None:
    """As `fedkin.core.rerouting.Rerouting`, on one thread: ``y (E, p)`` and ``s (1, V, p)`` from the old ones."""
    head, tail, radius, kind, singular = edges.head, edges.tail, edges.radius, edges.kind, sites.singular
    n, p = s.shape[1], s.shape[2]
    pull, total = np.zeros((n, p)), np.empty((n, p))
    for e in range(y.shape[0]):
        for c in range(p):
            y[e, c] = old_y[e, c]
    for i in range(n):
        for c in range(p):
            s[0, i, c] = old_s[0, i, c]
    for turn in range(2):
        shrinking = turn == 1
        for i in range(n):
            for k in range(p):
                pull[i, k] = total[i, k] = 0.0
                if singular[i]:
                    for c in range(p):
                        pull[i, k] += sites.unseen[i, k, c] * s[0, i, c]
        most = 0.0
        for moving in range(2):
            for e in range(y.shape[0]):
                i, j = head[e], tail[e]
                if singular[i] == singular[j]:
                    continue
                here, sign = (i, -1.0) if singular[i] else (j, 1.0)
                room = radius[e] if shrinking or kind == L1 else max(radius[e] - _length(kind, y[e]), 0.0)
                for c in range(p):
                    change = sign * pull[here, c]
                    if kind == L1 and not shrinking:
                        room = max(radius[e] - (y[e, c] if change > 0.0 else -y[e, c]), 0.0)
                    if moving == 0:
                        total[here, c] += room
                    elif total[here, c] > 0.0:
                        change *= room / total[here, c]
                        y[e, c] += change
                        s[0, i, c] += change
                        s[0, j, c] -= change
            for u in range(n):
                if not singular[u]:
                    continue
                for c in range(p):
                    size = abs(pull[u, c]) if kind == L1 else _length(kind, pull[u])
                    if not shrinking:
                        total[u, c] = max(total[u, c], size)
                    elif total[u, c] > 0.0:
                        most = max(most, size / total[u, c])
        if shrinking:
            for e in range(y.shape[0]):
                for c in range(p):
                    y[e, c] /= 1.0 + most
            for i in range(n):
                for c in range(p):
                    s[0, i, c] /= 1.0 + most


@outlined(types.void, INT, INT, EDGES, R2, FLOAT, R2, R2, R2, W2)
def fuse(lo: int, hi: int, edges: Any, y: Any, share: float, z: Any, box: Any, x: Any, out: Any) -> None:
    """Means of ``x`` over sites joined by edges whose dual is inside ``share`` of its ball.

    For l1 the columns ``lo .. hi`` on their own, for the others all columns together. A group is zero where the
    sparsity dual of a member is inside its box.
    """
    head, tail, radius, kind = edges.head, edges.tail, edges.radius, edges.kind
    n, p, sparse = x.shape[0], x.shape[1], box.shape[0] > 0
    groupings = hi - lo if kind == L1 else 1
    parent = np.empty((n, groupings), dtype=np.int32)
    for i in range(n):
        for c in range(groupings):
            parent[i, c] = i
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
    for i in range(n):
        for c in range(lo, hi):
            out[i, c] = 0.0
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
