"""Coefficients for sites that were not in the fit, where effects within and between sites may differ."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array
from fedkin.kin.evidence import UNSEEN, some_sites
from fedkin.kin.likelihoods import QuadraticLikelihoods, apply, given_mean


def fit_unseen(sums: QuadraticLikelihoods, noise: Array, variance: Array) -> Array:
    """Return what to add to the population's mean, ``(p,)``, to predict an unseen site best.

    The population's mean is estimated mostly within sites. If sites with larger values of a column also have larger
    intercepts (Mundlak 1978), its effects are not those by which unseen sites differ; those of one model of all rows
    are. The two are averaged with the weight that predicts each site's rows best from all other sites (stacking;
    Breiman 1996), which sums suffice for.
    """
    some = some_sites(sums)
    few, scale = (sums, noise) if some is None else (sums.take(some), noise[some])
    S, c = few.G / scale[:, None, None], few.c / scale[:, None]
    left = given_mean(variance, S)[1]
    A, a = S @ left, apply(np.swapaxes(left, 1, 2), c)

    def without_each(matrices: Array, vectors: Array) -> Array:
        """Return the solution from all sites ``(p,)``, followed by those without each site, ``(V + 1, p)``."""
        total, right = matrices.sum(axis=0), vectors.sum(axis=0)
        light = UNSEEN * np.diag(np.diag(total) + UNSEEN)
        others = np.concatenate([[total + light], total + light - matrices])
        return np.asarray(np.linalg.solve(others, np.concatenate([[right], right - vectors])[:, :, None])[:, :, 0])

    within, pooled = without_each(A, a), without_each(S, c)
    apart = pooled - within
    gains = (apart[1:] * (c - apply(S, within[1:]))).sum(axis=1)
    cost = float((apart[1:] * apply(S, apart[1:])).sum())
    # what chance may have made of the gain is taken off, as the positive part of Stein's estimate does
    gain, square = float(gains.sum()), float(len(gains) * gains.var())
    weight = float(np.clip((gain - square / gain) / max(cost, UNSEEN), 0.0, 1.0)) if gain > 0 else 0.0
    return np.asarray(weight * apart[0])
