"""Gram matrices of devices: factors, inverses and minimisers, in compiled loops over ``lo .. hi``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedkin.solvers.kernels.bundles import L1D, R1, R2, R3, W2, W3
from fedkin.solvers.kernels.jit import FLOAT, INT, kernel, part


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


@kernel(FLOAT, INT, INT, L1D, R3, R1, R1, W3)
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


@kernel(FLOAT, INT, INT, L1D, R3, R2, W2)
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
