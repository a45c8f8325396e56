"""Noisy sums made usable: as much ridge as keeps noise from making losses unbounded below (as AdaSSP does)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkin._base import Array
from fedkin.core.privacy import Privacy
from fedkin.core.summaries import Summaries


def repaired_sums(summaries: Summaries) -> Summaries:
    """Sums in which every site's products of columns are positive definite by a margin that noise explains.

    The margin is ``noise * sqrt(draws * p)``, half of what noise alone may have taken away; it holds for all rows and
    without any one fold. Sums that have it are left as they are. What is missing is added to the diagonal in units of
    the columns' limits: a ridge. Values are raised where noise left residuals that are below 0.
    """
    sums, scores = summaries.sums, summaries.scores
    matrices = (sums.hessian if scores is None else scores).copy()
    value = sums.value.copy()
    for u, privacy in enumerate(summaries.privacy or ()):
        if privacy is not None:
            count = sums.count[u].astype(np.float64)
            matrices[u] = _with_margin(matrices[u], count, privacy)
            if scores is None:
                value[u] = _raised(value[u], matrices[u], sums.gradient[u], count, privacy)
    if scores is None:
        return replace(summaries, sums=replace(sums, hessian=matrices, value=value))
    value = 0.5 * np.einsum("vkpp->vk", matrices)
    return replace(summaries, sums=replace(sums, value=value), scores=matrices)


def _with_margin(parts: Array, count: Array, privacy: Privacy) -> Array:
    limits = privacy.limits[:-1]
    scaled = parts / np.outer(limits, limits)
    share, draws = count / count.sum(), int((count > 0).sum())
    margin = privacy.noise * np.sqrt(draws * len(limits))
    whole = scaled.sum(axis=0)
    lacking = [margin - np.linalg.eigvalsh(whole)[0]]
    for k in np.flatnonzero(count).tolist() if draws > 1 else ():
        left = 1.0 - share[k]
        lacking.append((left * margin - np.linalg.eigvalsh(whole - scaled[k])[0]) / left)
    ridge = max(*lacking, 0.0) if len(lacking) > 1 else max(lacking[0], 0.0)
    return np.asarray(parts + ridge * share[:, None, None] * np.diag(limits**2))


def _raised(value: Array, matrices: Array, gradient: Array, count: Array, privacy: Privacy) -> Array:
    """Values with which the least residual sum of squares is at least the standard deviation of its noise."""
    b = gradient.sum(axis=0)
    draws = int((count > 0).sum())
    least = 0.5 * float(b @ np.linalg.solve(matrices.sum(axis=0), b))
    least += 0.5 * np.sqrt(draws) * privacy.noise * privacy.limits[-1] ** 2
    missing = max(least - float(value.sum()), 0.0)
    return np.asarray(value + missing * count / count.sum())
