"""The noise of sites with few rows each."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array
from fedkin.kin.special import digamma, tetragamma, trigamma

#: Excess variance of log noise between sites below which one noise serves all.
COMMON_NOISE = 1e-3


def steadied(variance: Array, degrees: Array) -> Array:
    """Variances ``(V,)`` with few degrees of freedom, pulled to what most sites have (limma; Smyth 2004).

    Log variances scatter by more than their degrees of freedom explain by as much as the true ones do. Where that is
    nothing, all get the pooled variance.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin.noise import steadied
    >>> steadied(np.array([1.0, 1.1, 0.9, 1.0]), np.full(4, 5.0)).round(6).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    use = (degrees > 0.5) & (variance > 0)
    if not use.any():
        return np.ones_like(variance)
    s, half = variance[use], 0.5 * degrees[use]
    pooled = float((s * half).sum() / half.sum())
    if use.sum() < 3:
        return np.full(len(variance), pooled)
    logs = np.log(s) - digamma(half) + np.log(half)
    chance = trigamma(half)
    weight = (1 / chance) / (1 / chance).sum()
    middle = float(weight @ logs)
    excess = float(weight @ (logs - middle) ** 2 - weight @ chance)
    if excess <= COMMON_NOISE:
        return np.full(len(variance), pooled)
    prior = _inverse_trigamma(excess)
    typical = np.exp(middle + digamma(prior) - np.log(prior))
    own = np.where(use, 0.5 * degrees, 0.0)
    return np.asarray((prior * typical + own * np.where(use, variance, 0.0)) / (prior + own))


def _inverse_trigamma(value: float) -> float:
    x = 0.5 + 1 / value  # Newton's method on 1 / trigamma, which is nearly linear
    for _ in range(50):
        now = float(trigamma(x))
        step = now * (1 - now / value) / float(tetragamma(x))
        x += step
        if abs(step) < 1e-15 * x:
            break
    return x
