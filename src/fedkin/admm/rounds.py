"""The loop of rounds, written once: node step, exchange of thetas, edge step, save.

`run_rounds` is given three things and knows nothing else:

- a **shard** does the arithmetic: `fedkin.admm.Shard`;
- a **link** carries thetas: ``exchange(t, shard)`` tells others this shard's thetas of round t and returns theirs.
  `DirectLink` does so inside one process; `fedkin.federate.links` has those between machines;
- a **store** keeps the state after a round: ``save(t, shard, durable)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from fedkin._base import Array, Mask
from fedkin.admm.shard import Shard, edge_update
from fedkin.core import SCALE_FLOOR, build_terms
from fedkin.data import Federation
from fedkin.errors import ParameterError, SolverError

Wire = Literal["float64", "float32"]


class Link(Protocol):
    """What carries thetas between shards, and knows which round comes next and who is there."""

    def begin(self, shard: Shard) -> int | None:
        """Return the next round, None after the last; it may wait for it, and set where the shard stands."""

    def presence(self, t: int) -> tuple[Mask | None, Array | None]:
        """Return which hosted sites are there in round t, and with which probability; None for all, and for 1."""

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array] | None:
        """Tell others the shard's thetas of round t, and return theirs by position: who answered is there.

        None when the shard was set to the state of another round meanwhile.
        """

    def end(self, t: int, shard: Shard) -> None:
        """Round t is over; ends of an edge may compare its dual now."""


class RoundStore(Protocol):
    """What keeps the state of a shard."""

    def save(self, t: int, shard: Shard, durable: bool) -> None:
        """Keep the state after round t; a durable one survives a loss of power."""


class DirectLink:
    """The link of a shard that hosts all sites: nothing leaves the process.

    ``available`` and ``probability (R, V)`` are of the rounds after ``done``, where sites come and go.
    """

    def __init__(
        self, rounds: int, done: int = 0, available: Mask | None = None, probability: Array | None = None
    ) -> None:
        self.rounds, self.done, self._first = rounds, done, done + 1
        self._available, self._probability = available, probability

    def begin(self, shard: Shard) -> int | None:
        if shard.foreign.size:
            raise ParameterError("DirectLink is for shards that host all neighbours of their sites")
        return self.done + 1 if self.done < self.rounds else None

    def presence(self, t: int) -> tuple[Mask | None, Array | None]:
        k = t - self._first
        available, probability = self._available, self._probability
        return None if available is None else available[k], None if probability is None else probability[k]

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array]:
        return {}

    def end(self, t: int, shard: Shard) -> None:
        self.done = t


@dataclass(frozen=True)
class RoundConfig:
    """What `run_rounds` needs to know, apart from shard, link and store.

    - ``wire``: how thetas travel. Both ends of an edge must compute with the same numbers, so the shard's own are
      rounded.
    - ``names``: of the hosted sites that have their rows here; with them, parameters that diverge are an error in
      every round, told with a ``hint``.
    - ``constrained``: whether the parameter ball is a constraint of the problem. Where it only limits what counts,
      parameters that end at its border have diverged.
    - ``save_every``: rounds between durable saves; the ``last`` one is always saved, those between only with
      ``save_all``.
    - ``after``: called with the round and the largest change of a theta in it, after it is saved.
    """

    last: int
    wire: Wire = "float64"
    names: Sequence[str] | None = None
    hint: str = "the steps are too long"
    constrained: bool = False
    save_every: int | None = None
    save_all: bool = False
    after: Callable[[int, float], None] | None = None


def run_rounds(shard: Shard, link: Link, config: RoundConfig | None = None, store: RoundStore | None = None) -> None:
    """Do all rounds that the link begins; raises `SolverError` when parameters diverge."""
    after = None if config is None else config.after
    with np.errstate(over="ignore", invalid="ignore"):  # what diverges is told in words
        while (t := link.begin(shard)) is not None:
            shard.node_step(t, *link.presence(t))
            if config is not None:
                if config.wire == "float32":
                    shard.round_thetas()
                if config.names is not None:
                    _check(shard, t, config, config.names)
            thetas = link.exchange(t, shard)
            if thetas is None:
                continue
            if thetas:
                shard.take(thetas)
            shard.edge_step()
            link.end(t, shard)
            if config is not None and store is not None:
                durable = t == config.last or (config.save_every is not None and t % config.save_every == 0)
                if durable or config.save_all:
                    store.save(t, shard, durable)
            if after is not None:
                after(t, float(np.abs(shard.theta - shard.left).max(initial=0.0)))


def _check(shard: Shard, t: int, config: RoundConfig, names: Sequence[str]) -> None:
    """Raise `SolverError` when parameters are not finite, or end at the border of a ball that is no constraint."""
    theta, radius = shard.theta[shard.own], shard.plan.radius
    if not math.isfinite(np.add.reduce(theta, axis=None)) and not (finite := np.isfinite(theta)).all():
        name = names[int(np.argmin(finite.all(axis=1)))]
        raise SolverError(f"round {t}: the parameters of site {name!r} diverged: {config.hint}")
    if t == config.last and radius is not None and not config.constrained:
        size = np.sqrt((theta * theta).sum(axis=1))
        if (size > (1.0 - 1e-9) * radius).any():
            raise SolverError(
                f"the parameters of site {names[int(size.argmax())]!r} diverged to the border of their ball (radius "
                f"{radius:g}): {config.hint}; or state a larger radius"
            )


# --- shares of the certificate ----------------------------------------------------------------------------------------

# The gap of a federation is a sum of one term for each site, of its own rows, and one for each edge, of what both its
# ends know. So every site can work out its share alone, and all shares of a round make the certificate.

#: A share needs a matrix of as many rows and columns as there are parameters: with more of them there are none.
MOST_PARAMS = 300
_PART = 4  # shares are taken four times while the first digit of the round stays the same


def is_shared(t: int) -> bool:
    """Return whether sites take their shares after round t: the same at all of them, ever more seldom.

    Examples
    --------
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
    """Works out the shares of a shard that has the rows of its sites."""

    def __init__(self, shard: Shard) -> None:
        assert shard.gradients is not None
        rows = shard.gradients.rows
        self.shard, own = shard, {u: rows.of(u) for u in range(rows.starts.size)}
        self._terms = build_terms(Federation(own), rows.losses, rows.ridge)
        self._zero = float(self._terms.values(np.zeros((len(own), rows.ridge.size))).sum())

    def take(self, t: int) -> Share:
        """Return the share after round t, of the parameters and duals that the shard has now."""
        shard, plan = self.shard, self.shard.plan
        theta, balance, alpha, sparsity = shard.theta, shard.balance, shard.alpha, shard.sparsity
        difference = shard.differences()
        whole = np.where(np.isin(shard.edges, shard.sites).all(axis=1), 1.0, 0.5)
        penalties = shard.edge_radius * plan.penalty.value(difference)
        moved = edge_update(alpha, difference, plan.rho, shard.edge_radius, plan.penalty) - alpha
        value, gap = float(whole @ penalties), float(whole @ (penalties - (alpha * difference).sum(axis=1)))
        residual = self._terms.gradients(theta) + balance
        if sparsity is not None:
            zeta = np.clip(-residual, -sparsity, sparsity)
            size = float((sparsity * np.abs(theta)).sum())
            balance, residual = balance + zeta, residual + zeta
            value, gap = value + size, gap + size - float((zeta * theta).sum())
        with np.errstate(over="ignore", invalid="ignore"):
            ball = plan.radius
            gaps = self._terms.young_gaps(theta, balance)
            gaps = gaps if ball is None else np.minimum(gaps, self._terms.gaps_in_ball(theta, balance, ball))
        return Share(
            t,
            value + float(self._terms.values(theta).sum()),
            self._zero,
            gap + float(gaps.sum()),
            float(whole @ (moved**2).sum(axis=1)) / plan.rho**2,
            float((residual**2).sum()),
            float(whole.sum()),
            float(shard.sites.size),
        )


def together(shares: Sequence[Share]) -> dict[str, float]:
    """Return residuals and relative gap of a round, from the shares of all shards.

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
