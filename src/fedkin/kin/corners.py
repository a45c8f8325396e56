"""Curvature of losses that are linear beyond a corner (Huber): what is expected of a row, not what single rows show.

A row beyond the corner has no second derivative, one inside it has all of it. Summed over few rows that is noise, and
nothing at all where a corner is small for the noise: a quadratic with it would move anything anywhere. On average every
row has the share of rows inside the corner (Huber 1973), and with that the sandwich of scores is honest.
"""

from __future__ import annotations

import numpy as np

from fedkin._base import Array
from fedkin.data import Federation
from fedkin.losses import Loss

#: Residuals are counted up to the corner, and up to wider ones: this many, four for every doubling.
CORNERS = 240
#: Share of rows that tells how dense residuals are: a smaller corner is judged by a wider one, since fits of few rows
#: pass through some of them.
LEAST_SHARE = 0.5
#: Rows of the average site that are added to those of a site.
LENT = 4.0


def gram_sums(federation: Federation) -> Array:
    """``X'X (V, q, q)`` of every site."""
    out = np.empty((federation.n_sites, federation.n_features, federation.n_features))
    for u, site in enumerate(federation.sites):
        rows = federation[site]
        out[u] = (rows.X if rows.weight is None else rows.X * rows.weight[:, None]).T @ rows.X
    return out


def residual_counts(loss: Loss, federation: Federation, theta: Array) -> Array:
    """Rows of every site at ``theta (V, p)`` by the first corner that holds them, ``(V, CORNERS)``."""
    assert loss.threshold is not None
    out = np.zeros((len(theta), CORNERS))
    for u, site in enumerate(federation.sites):
        rows = federation[site]
        assert rows.y is not None
        residual = rows.y - rows.X @ theta[u] - (0.0 if rows.offset is None else rows.offset)
        size = np.nan_to_num(np.abs(residual) / loss.threshold, nan=np.inf)
        number = np.ceil(4.0 * np.log2(np.clip(size, 1.0, 2.0 ** (0.25 * (CORNERS - 1))))).astype(np.int64)
        out[u] = np.bincount(np.minimum(number, CORNERS - 1), weights=rows.weight, minlength=CORNERS)
    return out


def expected_shares(counts: Array) -> Array:
    """The expected curvature ``(V,)`` of a site's rows, by their `residual_counts`.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin.corners import expected_shares
    >>> expected_shares(np.array([[80.0, 20.0], [80.0, 20.0]])).tolist()  # inside the corner, and inside the next
    [0.8, 0.8]
    >>> expected_shares(np.array([[10.0, 0.0, 0.0, 0.0, 90.0]])).tolist()  # all are inside twice the corner
    [0.5]
    """
    within, n = counts.cumsum(axis=1), counts.sum(axis=1)
    shares = within.sum(axis=0) / n.sum()
    k = int(np.argmax(shares >= LEAST_SHARE))
    return np.asarray((within[:, k] + LENT * shares[k]) / (n + LENT) / 2.0 ** (0.25 * k))


def estimated_slack(share: float, degrees: float) -> float:
    """By how much scores scatter more than estimates let them, with so many degrees of freedom per row (Huber 1973)."""
    inside = max(share, LEAST_SHARE)
    return (1.0 + degrees * (1.0 - inside) / inside) ** 2
