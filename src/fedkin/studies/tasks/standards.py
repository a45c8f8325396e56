"""How the predictors of the election are standardised: from training rows alone, for all rows."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Mask
from fedkin.data import Federation
from fedkin.errors import ParameterError

#: Columns with a larger skewness than this are the ones that logarithms are for.
SKEWED = 2.0


def skewed(X: Array) -> Mask:
    """Columns of training rows ``(N, q)`` that are never negative and have a skewness above `SKEWED`."""
    centred = X - X.mean(axis=0)
    spread = np.maximum(centred.std(axis=0), np.finfo(float).tiny)
    return np.asarray((X.min(axis=0) >= 0) & ((centred**3).mean(axis=0) > SKEWED * spread**3))


def logged(rows: Federation, columns: Mask) -> Federation:
    X = rows.X.copy()
    # a test row may lie below all training rows
    X[:, columns] = np.log1p(np.maximum(X[:, columns], 0.0))
    return _with(rows, X)


def _with(rows: Federation, X: Array) -> Federation:
    """The same rows with other features."""
    site = [rows.sites[u] for u in rows.site_index]
    return Federation.from_arrays(X, rows.y, site, feature_names=rows.feature_names)


def standards(train: Federation, how: str) -> tuple[Array, Array]:
    """Means and scales ``(V, q)`` of the training rows."""
    shape = (train.n_sites, train.n_features)
    if how == "none":
        return np.zeros(shape), np.ones(shape)
    if how in ("pooled", "logs"):
        _, mean, scale = train.standardized()
        return np.broadcast_to(mean, shape), np.broadcast_to(scale, shape)
    if how != "state":
        raise ParameterError(f'standardize must be "pooled", "logs", "state" or "none", got {how!r}')
    mean = np.stack([train[state].X.mean(axis=0) for state in train.sites])
    scale = np.stack([train[state].X.std(axis=0) for state in train.sites])
    return mean, np.where(scale > 0, scale, 1.0)


def applied(rows: Federation, mean: Array, scale: Array, intercept: bool) -> Federation:
    of = rows.site_index
    federation = _with(rows, (rows.X - mean[of]) / scale[of])
    return federation.with_intercept() if intercept else federation
