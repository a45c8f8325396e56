"""Devices for tests of local and pooled fits."""

from __future__ import annotations

import numpy as np

from fedkin.data import Federation


def responses(kind: str, eta: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if kind == "logistic":
        return (rng.random(eta.size) < 1 / (1 + np.exp(-eta))).astype(float)
    if kind == "poisson":
        return rng.poisson(np.exp(eta)).astype(float)
    if kind == "multinomial":
        return rng.integers(0, 3, eta.size).astype(float)
    noise = rng.standard_t(3, eta.size) if kind == "huber" else rng.standard_normal(eta.size)
    return eta + 1.5 * noise


def federation(kind: str, sizes=(80, 120, 120), q: int = 3, seed: int = 0, offset: bool = False) -> Federation:
    rng = np.random.default_rng(seed)
    data = {}
    for u, n in enumerate(sizes):
        X = np.column_stack([np.ones(n), rng.standard_normal((n, q - 1))])
        shift = 0.5 * rng.standard_normal(n) if offset else np.zeros(n)
        y = responses(kind, X @ (0.4 * rng.standard_normal(q)) + shift, rng)
        data[f"site {u}"] = (X, y, shift) if offset else (X, y)
    return Federation(data)


def separated(n: int = 20) -> tuple[np.ndarray, np.ndarray]:
    X = np.column_stack([np.ones(n), np.linspace(-1, 1, n)])
    return X, (X[:, 1] > 0.1).astype(float)
