"""How far rows scatter about a model of all sites, whatever a few of them do: what a corner is measured by."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index
from fedkin.losses.builtin import HuberLoss

#: Corner of the Huber loss in standard deviations of normal noise: there it is 95% as efficient as least squares.
EFFICIENT = 1.345
#: Median of the size of a standard normal number.
_MEDIAN_SIZE = 0.6744897501960817
#: Rounds of reweighted least squares, and the change of the scale that ends them.
_ROUNDS, _STEP = 30, 1e-4


def scaled_huber(
    X: Array, y: Array, site: Index, offset: Array | None = None, weight: Array | None = None
) -> HuberLoss:
    """The Huber loss with its corner at 1.345 robust standard deviations of these rows: its fits know no units.

    Parameters
    ----------
    X : array (n, q)
        Features, without a column of ones.
    y : array (n,)
        Targets.
    site : int array (n,)
        The number of each row's site.
    offset : array (n,), optional
        What targets have beside the model.
    weight : array (n,), optional
        A row of weight w counts as w rows.

    Notes
    -----
    The standard deviation is the median size of residuals over 0.6745, of a Huber fit with common slopes and an
    intercept for every site. Where that is 0 (more than half of the targets are equal, or fitted exactly), columns are
    left out, then the mean size of residuals is taken.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.losses import scaled_huber
    >>> y, site = np.random.default_rng(0).normal(size=600), np.repeat(np.arange(6), 100)
    >>> X = np.zeros((600, 0))
    >>> one, hundred = scaled_huber(X, y, site), scaled_huber(X, 100 * y, site)
    >>> 1.2 < one.delta < 1.5, round(hundred.delta / one.delta, 6)
    (True, 100.0)
    """
    y = np.asarray(y, dtype=np.float64)
    y = y if offset is None else y - offset
    w = np.ones(len(y)) if weight is None else np.asarray(weight, dtype=np.float64)
    several = np.bincount(site)[site] > 1
    used = (several if several.any() else np.ones(len(y), dtype=bool)) & (w > 0)
    numbers = np.unique(site[used], return_inverse=True)[1] if several.any() else np.zeros(int(used.sum()), np.int64)
    for columns in (X[used], X[used][:, :0]):
        found = _residual_scale(columns, y[used], numbers, w[used])
        if found > 0:
            return HuberLoss(EFFICIENT * found)
    size = float(np.average(np.abs(y - np.median(y)), weights=w)) if w.sum() > 0 else 0.0
    return HuberLoss(EFFICIENT * size) if size > 0 else HuberLoss()


def _residual_scale(X: Array, y: Array, site: Index, weight: Array) -> float:
    n, robust, scale = np.bincount(site).astype(np.float64), np.ones(len(y)), 0.0
    left = len(y) - len(n) - X.shape[1]
    if left <= 0:
        return 0.0
    # residuals about a site's own level are too small by what the level and the slopes have taken
    larger = np.sqrt((n / np.maximum(n - 1, 1.0))[site] * (1 + X.shape[1] / left))
    spread = X.std(axis=0)
    X, floor = X / np.where(spread > 0, spread, 1.0), 1e-9 * float(np.abs(y - np.median(y)).mean())
    for _ in range(_ROUNDS):
        w = weight * robust
        total = np.bincount(site, weights=w)
        level = np.bincount(site, weights=w * y) / total
        means = np.stack([np.bincount(site, weights=w * x) / total for x in X.T], axis=1) if X.shape[1] else X[: len(n)]
        inner, rest = X - means[site], y - level[site]
        root = np.sqrt(w)
        slopes = np.linalg.lstsq(root[:, None] * inner, root * rest, rcond=1e-10)[0]
        size = np.abs(rest - inner @ slopes) * larger
        before, scale = scale, _median(size, weight) / _MEDIAN_SIZE
        if scale <= floor:
            return 0.0
        if abs(scale - before) <= _STEP * scale:
            break
        robust = EFFICIENT * scale / np.maximum(size, EFFICIENT * scale)
    return scale


def _median(values: Array, weight: Array) -> float:
    order = np.argsort(values)
    share = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(share, 0.5 * share[-1])])
