"""Estimate the scale of residuals robustly, for losses whose threshold is in units of the target."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index

#: Threshold in standard deviations, at which the Huber loss has 95% efficiency for normal noise.
EFFICIENT = 1.345
#: Median of the size of a standard normal number.
_MEDIAN_SIZE = 0.6744897501960817
#: Steps of reweighted least squares, and the change of the scale that ends them.
_STEPS, _CHANGE = 30, 1e-4


def robust_scale(X: Array, y: Array, site: Index, weight: Array) -> float:
    """Estimate the standard deviation of residuals, robustly, with common slopes and site intercepts.

    Sites ``site (n,)`` are numbered from 0, each with rows. The result is 0 if no estimate is possible.
    """
    n, robust, scale = np.bincount(site, weights=weight), np.ones(len(y)), 0.0
    left = float(n.sum()) - len(n) - X.shape[1]
    if left <= 0:
        return 0.0
    # correct residuals for the degrees of freedom of site intercepts and slopes
    larger = np.sqrt((n / np.maximum(n - 1, 1.0))[site] * (1 + X.shape[1] / left))
    share = weight / weight.sum()
    sd = np.sqrt(share @ (X - share @ X) ** 2)
    X, smallest = X / np.where(sd > 0, sd, 1.0), 1e-9 * float(share @ np.abs(y - weighted_median(y, weight)))
    for _ in range(_STEPS):
        w = weight * robust
        total = np.bincount(site, weights=w)
        level = np.bincount(site, weights=w * y) / total
        means = np.stack([np.bincount(site, weights=w * x) / total for x in X.T], axis=1) if X.shape[1] else X[: len(n)]
        inner, rest = X - means[site], y - level[site]
        root = np.sqrt(w)
        slopes = np.linalg.lstsq(root[:, None] * inner, root * rest, rcond=1e-10)[0]
        size = np.abs(rest - inner @ slopes) * larger
        before, scale = scale, weighted_median(size, weight) / _MEDIAN_SIZE
        if scale <= smallest:
            return 0.0
        if abs(scale - before) <= _CHANGE * scale:
            break
        robust = EFFICIENT * scale / np.maximum(size, EFFICIENT * scale)
    return scale


def weighted_median(values: Array, weight: Array) -> float:
    """Return the median of values ``(n,)``, each of which counts ``weight`` times."""
    return float(np.quantile(values, 0.5, weights=weight, method="inverted_cdf"))
