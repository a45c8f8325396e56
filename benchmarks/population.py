"""Coverage and bias of population effects: `python benchmarks/population.py [replications]`.

Sites with normal effects around a common mean, over numbers of sites, ratios of the mean to the standard deviation
between sites, and losses. Prints a line for each setting: how often 95% intervals cover, the bias in standard errors,
and stated over true standard errors, averaged over three coefficients.
"""

from __future__ import annotations

import sys
from itertools import product

import numpy as np

from fedkin import Federation, find_kin

SITES = {8: 30, 20: 30, 50: 20, 200: 20}  # and rows of each
RATIOS = (0.2, 0.6, 2.0)
SD = np.array([0.8, 0.4, 0.4])


def sites(loss: str, V: int, mean: np.ndarray, rng: np.random.Generator) -> Federation:
    """Draw V sites with an intercept and two columns."""
    X = rng.normal(size=(V, SITES[V], 3))
    X[:, :, 0] = 1.0
    eta = np.einsum("unp,up->un", X, mean + SD * rng.normal(size=(V, 3)))
    draws = {
        "linear": lambda: eta + rng.normal(size=eta.shape),
        "logistic": lambda: (rng.logistic(size=eta.shape) < eta).astype(float),
        "poisson": lambda: rng.poisson(np.exp(eta)).astype(float),
    }
    y = draws[loss]()
    return Federation({u: (X[u], y[u]) for u in range(V)}, ["(intercept)", "x1", "x2"])


def measure(loss: str, V: int, ratio: float, times: int) -> tuple[float, float, float]:
    """Return coverage, bias over standard error (the largest), and stated over true standard errors."""
    rng, mean = np.random.default_rng(V), ratio * SD
    fits = [find_kin(sites(loss, V, mean, rng), loss=loss, sweeps=4, chains=2) for _ in range(times)]
    ends = np.array([kin.population() for kin in fits])
    true = ends[:, :, 0].std(axis=0, ddof=1)
    stated = np.mean([np.sqrt(np.diag(kin.mean_covariance)) for kin in fits], axis=0)
    inside = (ends[:, :, 1] < mean) & (mean < ends[:, :, 2])
    bias = (ends[:, :, 0].mean(axis=0) - mean) / true
    return float(inside.mean()), float(bias[np.abs(bias).argmax()]), float((stated / true).mean())


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print("loss      sites  mean/sd  covers  bias/se  se stated/true")
    for loss, V, ratio in product(("linear", "logistic", "poisson"), SITES, RATIOS):
        covers, bias, error = measure(loss, V, ratio, times)
        print(f"{loss:<9} {V:>5} {ratio:>8.1f} {covers:>7.3f} {bias:>8.2f} {error:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
