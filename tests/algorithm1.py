"""The paper's Algorithm 1 to the letter: theta, beta_ij, beta_ji, alpha_ij, alpha_ji on every edge, six vectors that
travel.

Nothing here is shared with the library. It runs on floats (numpy) or, for the l1 penalty, on exact fractions.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np


def prox_l1(d, scale):
    return np.sign(d) * np.maximum(np.abs(d) - scale, 0)


def prox_l2(d, scale):
    length = np.sqrt(sum(x * x for x in d))
    return d * max(1 - scale / length, 0) if length > 0 else d


def prox_linf(d, scale):
    size = np.abs(d)
    if size.sum() <= scale:
        return np.zeros_like(d)
    # what the l1 ball leaves over: the threshold is the largest of (sum of the k largest - scale) / k
    largest = sorted(size, reverse=True)
    threshold = max((sum(largest[: k + 1]) - scale) / (k + 1) for k in range(len(d)))
    return np.clip(d, -threshold, threshold)


def prox_l1_exact(d, scale):
    return np.array([max(abs(x) - scale, Fraction(0)) * (1 if x > 0 else -1) for x in d], dtype=object)


PROX = {"l1": prox_l1, "l2": prox_l2, "linf": prox_linf}


class Algorithm1:
    """Sites and edges as dictionaries, one vector at a time.

    ``L`` is the strength lam * |V| times the edge weights; ``gradient(i, theta_i, t)`` is the batch gradient of
    site i.
    """

    def __init__(self, theta, edges, L, rho, eta: Callable, gradient: Callable, prox: Callable) -> None:
        self.theta = {i: row for i, row in enumerate(theta)}
        self.edges, self.L, self.rho, self.eta, self.gradient, self.prox = edges, L, rho, eta, gradient, prox
        self.neighbours = {i: [] for i in self.theta}
        self.beta, self.alpha = {}, {}
        for i, j in edges:
            for a, b in ((i, j), (j, i)):
                self.neighbours[a].append(b)
                self.beta[a, b] = self.theta[a]
                self.alpha[a, b] = self.theta[a] * 0
        self.vectors = 0

    def round(self, t: int) -> None:
        theta, beta, alpha, rho = self.theta, self.beta, self.alpha, self.rho
        new = {}
        for i in theta:
            pull = sum((theta[i] - beta[i, j] - alpha[i, j] / rho for j in self.neighbours[i]), theta[i] * 0)
            new[i] = theta[i] - self.eta(i, t) * (self.gradient(i, theta[i], t) + rho * pull)
        self.theta = theta = new
        for e, (i, j) in enumerate(self.edges):
            s, r = theta[i] - alpha[i, j] / rho, theta[j] - alpha[j, i] / rho
            middle, d = (s + r) / 2, self.prox(s - r, 2 * self.L[e] / rho)
            beta[i, j], beta[j, i] = middle + d / 2, middle - d / 2
            alpha[i, j] = alpha[i, j] - rho * (theta[i] - beta[i, j])
            alpha[j, i] = alpha[j, i] - rho * (theta[j] - beta[j, i])
            self.vectors += 6  # both thetas, both betas, both alphas

    def stacked(self):
        return np.array([self.theta[i] for i in sorted(self.theta)])
