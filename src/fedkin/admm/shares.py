"""How far a run is, as sums over sites: what a shard adds to the residuals and to the duality gap.

The gap of a federation is a sum of one term for each site, of its own rows, and one for each edge, of what both its
ends know. So every site can work out its share alone, and whoever has all shares of a round has the certificate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedkin.admm.shard import Shard, edge_update
from fedkin.core import build_terms
from fedkin.data import Federation
from fedkin.solvers import SCALE_FLOOR

#: A share needs a matrix of as many rows and columns as there are parameters: with more of them there are none.
MOST_PARAMS = 300
_PART = 4  # shares are taken four times while the first digit of the round stays the same


def is_shared(t: int) -> bool:
    """Whether sites take their shares after round t: the same at all of them, ever more seldom.

    Examples
    --------
    >>> [t for t in range(1, 60) if is_shared(t)][-8:]
    [44, 46, 48, 50, 52, 54, 56, 58]
    >>> [t for t in range(1000, 2000) if is_shared(t)]
    [1000, 1250, 1500, 1750]
    """
    step = int(10 ** math.floor(math.log10(t))) // _PART
    return t % max(step, 1) == 0


@dataclass(frozen=True)
class Share:
    """What a shard adds after a round; an edge to another shard counts half.

    ``value`` and ``zero`` are the objective at the shard's parameters and at 0, ``gap`` the duality gap (infinite where
    rows do not bound it), ``primal`` and ``dual`` squares of residuals, ``edges`` and ``sites`` how many there are.
    """

    round: int
    value: float
    zero: float
    gap: float
    primal: float
    dual: float
    edges: float
    sites: float


class ShareTaker:
    """Works out the shares of a shard that has rows.

    Parameters
    ----------
    shard : Shard

    Examples
    --------
    Two sites in one shard, which then has the whole certificate:

    >>> import numpy as np
    >>> from fedkin.admm import SiteRows, Gradients, Shard, StepRule, UpdateRule, site_keys
    >>> from fedkin.data import Rows
    >>> from fedkin.losses import MeanLoss
    >>> from fedkin.core import L1
    >>> one, loss, X = np.ones(2, dtype=np.int64), MeanLoss(), np.array([[0.0], [2.0]])
    >>> rows = SiteRows(Rows(X), np.array([0, 1]), one, site_keys("ab"), (loss, loss), one, np.zeros(1))
    >>> rule = UpdateRule(L1(), 1.0, StepRule(np.full(2, 1.0), np.zeros(2), np.full(2, 1.0)), average="last")
    >>> edges, radius = np.array([[1, 0]]), np.array([0.2])
    >>> shard = Shard(np.array([0, 1]), edges, radius, rule, Gradients(rows, 0), np.zeros((2, 1)))
    >>> taker = ShareTaker(shard)
    >>> for t in range(1, 100):
    ...     shard.node_step(t)
    ...     shard.edge_step()
    >>> bool(together([taker.take(99)])["gap"] < 1e-9)
    True
    """

    def __init__(self, shard: Shard) -> None:
        assert shard.gradients is not None
        self.shard, rows = shard, shard.gradients.rows
        parts = zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)
        own = {u: rows.data.take(slice(start, start + n)) for u, (start, n) in enumerate(parts)}
        self._terms = build_terms(Federation(own), rows.losses, rows.ridge)
        self._zero = float(self._terms.values(np.zeros((len(own), rows.ridge.size))).sum())

    def take(self, t: int) -> Share:
        """The share after round t, of the parameters and duals that the shard has now."""
        shard, rule = self.shard, self.shard.rule
        theta, balance, alpha = shard.theta, shard.balance, shard.alpha
        difference = shard.differences()
        whole = np.where(np.isin(shard.edges, shard.sites).all(axis=1), 1.0, 0.5)
        penalties = shard.edge_radius * rule.penalty.value(difference)
        moved = edge_update(alpha, difference, rule.rho, shard.edge_radius, rule.penalty) - alpha
        value, gap = float(whole @ penalties), float(whole @ (penalties - (alpha * difference).sum(axis=1)))
        residual = self._terms.gradients(theta) + balance
        if rule.sparsity is not None:
            zeta = np.clip(-residual, -rule.sparsity, rule.sparsity)
            size = float((rule.sparsity * np.abs(theta)).sum())
            balance, residual = balance + zeta, residual + zeta
            value, gap = value + size, gap + size - float((zeta * theta).sum())
        with np.errstate(over="ignore", invalid="ignore"):
            gaps = self._terms.young_gaps(theta, balance)
            if rule.radius is not None and not np.isfinite(gaps).all():
                gaps = np.minimum(gaps, self._terms.young_gaps(theta, balance, rule.radius))
        return Share(
            t,
            value + float(self._terms.values(theta).sum()),
            self._zero,
            gap + float(gaps.sum()),
            float(whole @ (moved**2).sum(axis=1)) / rule.rho**2,
            float((residual**2).sum()),
            float(whole.sum()),
            float(shard.sites.size),
        )


def together(shares: Sequence[Share]) -> dict[str, float]:
    """Residuals and relative gap of a round, from the shares of all shards (of some: theirs, and no gap to believe in).

    Examples
    --------
    >>> together([Share(3, 1.0, 2.0, 0.1, 0.0, 4.0, 0.5, 1.0), Share(3, 1.0, 2.0, 0.1, 0.0, 0.0, 0.5, 1.0)])["gap"]
    0.1
    """
    total = {name: sum(getattr(share, name) for share in shares) for name in vars(shares[0])}
    floor = SCALE_FLOOR * abs(total["zero"]) + np.finfo(float).tiny
    return {
        "n_iter": float(shares[0].round),
        "primal_residual": math.sqrt(total["primal"] / max(total["edges"], 1.0)),
        "dual_residual": math.sqrt(total["dual"] / max(total["sites"], 1.0)),
        "gap": max(total["gap"], 0.0) / max(abs(total["value"]), floor),
    }
