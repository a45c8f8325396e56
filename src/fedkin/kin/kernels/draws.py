"""Random draws inside kernels."""

from __future__ import annotations

import math

import numpy as np

from fedkin.kin.kernels.bundles import LEAST_RATE
from fedkin.solvers.kernels.jit import part


@part
def add_noise(x, rng):  # type: ignore[no-untyped-def]
    for j in range(x.size):
        x[j] += rng.standard_normal()


@part
def pick(logs, rng):  # type: ignore[no-untyped-def]
    """A position, drawn with probability proportional to ``exp(logs)``, which are overwritten."""
    top, left, at = -np.inf, 0.0, 0
    for t in range(logs.size):
        top = max(top, logs[t])
    for t in range(logs.size):
        logs[t] = math.exp(logs[t] - top)
        left += logs[t]
    left *= rng.random()
    while at < logs.size - 1 and left > logs[at]:
        left -= logs[at]
        at += 1
    return at


@part
def shuffle(order, rng):  # type: ignore[no-untyped-def]
    for t in range(order.size - 1, 0, -1):
        other = int(rng.random() * (t + 1))
        order[t], order[other] = order[other], order[t]


@part
def draw_beta(a, b, rng):  # type: ignore[no-untyped-def]
    """A beta variable, away from 0 and 1 by so much that its odds can be computed with."""
    x = rng.standard_gamma(a)
    return min(max(x / (x + rng.standard_gamma(b)), LEAST_RATE), 1.0 - LEAST_RATE)
