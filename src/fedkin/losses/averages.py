"""Means of responses over normal predictors: what is to be expected where parameters are not known exactly."""

from __future__ import annotations

from functools import cache

import numpy as np

from fedkin._base import Array

#: The logistic function as a mixture of normal ones: shares and scales (Monahan and Stefanski 1992), exact to 3e-9.
_SHARES = np.array([0.003246343272134, 0.051517477033972, 0.195077912673858, 0.315569823632818,
                    0.274149576158423, 0.131076880695470, 0.027912418727972, 0.001449567805354])  # fmt: skip
_SCALES = np.array([1.365340806296348, 1.059523971016916, 0.830791313765644, 0.650732166639391,
                    0.508135425366489, 0.396313345166341, 0.308904252267995, 0.238212616409306])  # fmt: skip


def averaged_logit(eta: Array, variance: Array) -> Array:
    """Log odds of the probability that is the mean of ``expit`` over normal log odds with this mean and variance.

    Examples
    --------
    >>> averaged_logit(np.array([2.0, 2.0, -2.0]), np.array([0.0, 4.0, 4.0])).round(3)
    array([ 2.   ,  1.238, -1.238])
    """
    from scipy.special import ndtr  # not for sites, which predict nothing

    far = np.abs(eta)
    tail = np.zeros_like(far)
    for share, scale in zip(_SHARES, _SCALES, strict=True):
        tail += share * ndtr(-far * scale / np.sqrt(1.0 + variance * scale**2))
    # means are nearer to 1/2 than the response at the mean; far out the mixture ends sooner than the logistic function
    tail = np.minimum(np.maximum(tail, np.exp(-far) / (1.0 + np.exp(-far))), 0.5)
    return np.asarray(np.where(variance > 0, np.sign(eta) * (np.log1p(-tail) - np.log(tail)), eta))


#: Pairs of opposite points over which responses of several predictors are averaged.
PAIRS = 64


def averaged_softmax(eta: Array, covariance: Array) -> Array:
    """Log odds ``(..., k)`` against the first class of its k others, of probabilities that are means over normal odds.

    Means are those over `normal_points`: for four classes within 0.02 of the truth.
    """
    size = np.einsum("...kk->...", covariance)[..., None, None]
    root = np.linalg.cholesky(covariance + (1e-12 * size + 1e-300) * np.eye(eta.shape[-1]))
    logs = np.full((*eta.shape[:-1], eta.shape[-1] + 1), -np.inf)
    for z in normal_points(eta.shape[-1]):
        odds = np.concatenate([np.zeros_like(logs[..., :1]), eta + root @ z], axis=-1)
        odds -= odds.max(axis=-1, keepdims=True)
        logs = np.logaddexp(logs, odds - np.log(np.exp(odds).sum(axis=-1, keepdims=True)))
    return np.asarray(np.where(size[..., 0] > 0, logs[..., 1:] - logs[..., :1], eta))


@cache
def normal_points(k: int) -> Array:
    """Points ``(2 PAIRS, k)`` spread evenly over a standard normal, with its mean and covariance.

    Examples
    --------
    >>> points = normal_points(3)
    >>> bool(abs(points.mean(axis=0)).max() < 1e-12 and abs(points.T @ points / 128 - np.eye(3)).max() < 1e-12)
    True
    """
    from scipy.special import ndtri

    root = 2.0
    for _ in range(50):  # of x ** (k + 1) = x + 1, which spreads them most evenly
        root = (1.0 + root) ** (1.0 / (k + 1))
    number = np.arange(1, max(PAIRS, 4 * k) + 1)
    points = ndtri((0.5 + number[:, None] * root ** -np.arange(1.0, k + 1)) % 1.0)
    points = np.linalg.solve(np.linalg.cholesky(points.T @ points / len(points)), points.T).T
    return np.concatenate([points, -points])
