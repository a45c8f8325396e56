"""Random devices, targets and graphs for tests of the objective and its solvers."""

from __future__ import annotations

import numpy as np

from fedkin.data import Federation
from fedkin.graph import Graph
from fedkin.losses import UserLoss

LOSS_NAMES = ("mean", "linear", "logistic", "poisson", "huber", "multinomial")
PENALTY_NAMES = ("l1", "l2", "linf")


def federation(
    loss: str, sizes: tuple[int, ...], q: int = 2, seed: int = 0, offset: bool = False, groups: int | None = None
) -> Federation:
    """Random devices with a target that fits the loss; devices share the parameters of their group."""
    rng = np.random.default_rng(seed)
    data = {}
    centres = rng.normal(size=(groups or len(sizes), q))
    for u, n in enumerate(sizes):
        X = rng.normal(size=(n, q))
        shift = rng.normal(size=n) if offset else np.zeros(n)
        eta = X @ centres[u % len(centres)]
        y = {
            "mean": eta,
            "linear": eta + shift + rng.normal(size=n),
            "logistic": (rng.random(n) < 1 / (1 + np.exp(-0.5 * eta))).astype(float),
            "poisson": rng.poisson(np.exp(np.clip(0.5 * eta + shift, -3, 3))).astype(float),
            "huber": eta + shift + rng.standard_t(1.5, size=n),
            "multinomial": rng.integers(0, 3, size=n).astype(float),
        }[loss]
        data[u] = (X, y, shift) if offset and loss != "mean" else (X, y)
    return Federation(data)


def random_graph(n_devices: int, share: float, seed: int = 0, weighted: bool = False) -> Graph:
    """Each pair is an edge with that probability."""
    rng = np.random.default_rng(seed)
    pairs = np.column_stack(np.triu_indices(n_devices, 1))
    pairs = pairs[rng.random(len(pairs)) < share]
    return Graph.from_indices(range(n_devices), pairs, rng.uniform(0.3, 3.0, len(pairs)) if weighted else None)


def log_cosh(hessian: bool = True) -> UserLoss:
    """Mean of ``log 2 cosh`` of the residuals: smooth, convex, not in the library."""

    def value(theta, X, y, offset):
        return float(np.mean(np.logaddexp(y - X @ theta, X @ theta - y)))

    def gradient(theta, X, y, offset):
        return X.T @ np.tanh(X @ theta - y) / len(y)

    def second(theta, X, y, offset):
        return (X.T * (1 - np.tanh(X @ theta - y) ** 2)) @ X / len(y)

    return UserLoss(value, gradient, second if hessian else None, name="log cosh")
