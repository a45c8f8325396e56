"""The loop of rounds, written once: node step, exchange of thetas, edge step, save.

`run_rounds` is given three things and knows nothing else:

- a **shard** does the arithmetic: `fedkin.admm.Shard` is one, `LocalShards` are several in one process;
- a **link** carries thetas: ``exchange(t, shard)`` tells others this shard's thetas of round t and returns theirs.
  `DirectLink` does so inside one process; `fedkin.federate.links` has those between machines;
- a **store** keeps the state after a round: ``save(t, shard, durable)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask, check_whole
from fedkin.admm.plan import RunPlan
from fedkin.admm.shard import Shard, ShardState
from fedkin.admm.streams import SampleStream
from fedkin.errors import ParameterError, SolverError

Wire = Literal["float64", "float32"]
S = TypeVar("S", bound="Shard | LocalShards", contravariant=True)


class Link(Protocol[S]):
    """What carries thetas between shards, and knows which round comes next and who is there."""

    def begin(self, shard: S) -> int | None:
        """Return the next round, None after the last; it may wait for it, and set where the shard stands."""

    def presence(self, t: int) -> tuple[Mask | None, Array | None]:
        """Return which hosted sites are there in round t, and with which probability; None for all, and for 1."""

    def exchange(self, t: int, shard: S) -> Mapping[int, Array] | None:
        """Tell others the shard's thetas of round t, and return theirs by position: who answered is there.

        None when the shard was set to the state of another round meanwhile.
        """

    def end(self, t: int, shard: S) -> None:
        """Round t is over; ends of an edge may compare its dual now."""


class RoundStore(Protocol[S]):
    """What keeps the state of a shard."""

    def save(self, t: int, shard: S, durable: bool) -> None:
        """Keep the state after round t; a durable one survives a loss of power."""


class DirectLink:
    """The link of a shard that hosts all sites, or of `LocalShards`: nothing leaves the process.

    ``available`` and ``probability (R, V)`` are of the rounds after ``done``, where sites come and go.
    """

    def __init__(
        self, rounds: int, done: int = 0, available: Mask | None = None, probability: Array | None = None
    ) -> None:
        self.rounds, self.done, self._first = rounds, done, done + 1
        self._available, self._probability = available, probability

    def begin(self, shard: Shard | LocalShards) -> int | None:
        if isinstance(shard, Shard) and shard.foreign.size:
            raise ParameterError("DirectLink is for shards that host all neighbours of their sites")
        return self.done + 1 if self.done < self.rounds else None

    def presence(self, t: int) -> tuple[Mask | None, Array | None]:
        k = t - self._first
        available, probability = self._available, self._probability
        return None if available is None else available[k], None if probability is None else probability[k]

    def exchange(self, t: int, shard: Shard | LocalShards) -> Mapping[int, Array]:
        return shard.give()

    def end(self, t: int, shard: Shard | LocalShards) -> None:
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


def run_rounds(shard: S, link: Link[S], config: RoundConfig | None = None, store: RoundStore[S] | None = None) -> None:
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


def _check(shard: Shard | LocalShards, t: int, config: RoundConfig, names: Sequence[str]) -> None:
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


class LocalShards:
    """Shards side by side in one process; together they behave like one.

    They are the reference for every link that puts shards elsewhere. ``hosts (V,)`` are the numbers of the sites'
    shards, one shard by default; ``streams`` are by site number.
    """

    def __init__(
        self, plan: RunPlan, hosts: Index | None = None, streams: Mapping[int, SampleStream] | None = None
    ) -> None:
        assert plan.rows is not None
        self.plan, self.rows, self.streams, self.sites = plan, plan.rows, dict(streams or {}), plan.sites
        hosts = np.zeros(plan.n_sites, dtype=np.int64) if hosts is None else hosts
        self.shards = [Shard(plan, np.flatnonzero(hosts == host), streams=self.streams) for host in np.unique(hosts)]
        self._members = [shard.sites for shard in self.shards]
        self._edge_numbers = [np.flatnonzero(np.isin(plan.edges, one.sites).any(axis=1)) for one in self.shards]

    def run(self, first: int, count: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Do ``count`` rounds from ``first`` on; presence and probabilities ``(count, V)`` when sites come and go."""
        link = DirectLink(first + count - 1, first - 1, available, probability)
        if len(self.shards) == 1:
            run_rounds(self.shards[0], link)
        else:
            run_rounds(self, link)

    own: slice | Index = slice(None)

    @property
    def theta(self) -> Array:
        """Parameters ``(V, p)`` of all sites."""
        return self.gather("theta")

    @property
    def left(self) -> Array:
        """Parameters ``(V, p)`` before the last node step."""
        return self.gather("left")

    def node_step(self, t: int, available: Mask | None = None, probability: Array | None = None) -> None:
        for shard in self.shards:
            here = None if available is None else available[shard.sites]
            shard.node_step(t, here, None if probability is None else probability[shard.sites])

    def round_thetas(self) -> None:
        for shard in self.shards:
            shard.round_thetas()

    def give(self) -> dict[int, Array]:
        return {u: theta for shard in self.shards for u, theta in shard.give().items()}

    def take(self, thetas: Mapping[int, Array]) -> None:
        for shard in self.shards:
            shard.take({u: thetas[u] for u in shard.foreign.tolist()})

    def edge_step(self) -> None:
        for shard in self.shards:
            shard.edge_step()

    def gather(self, name: str) -> Array:
        """Return a part of the shards' state (see `ShardState`) for all sites ``(V, p)``, or all edges ``(E, p)``."""
        if name == "alpha":
            return _gathered([one.alpha for one in self.shards], self._edge_numbers, self.plan.edges.shape[0])
        return _gathered([getattr(one, name) for one in self.shards], self._members, self.plan.n_sites)

    @property
    def looked(self) -> Index:
        """Rows that each site has looked at, ``(V,)``."""
        parts = [one.gradients.looked for one in self.shards if one.gradients is not None]
        return _gathered(parts, self._members, self.plan.n_sites)

    def _lines(self) -> dict[str, tuple[list[Index], int]]:
        """Return where the lines of each part of a shard's state belong in that of all, and how many there are."""
        members, kind, rows = self._members, self.plan.gradient, self.rows
        sites, none = (members, self.plan.n_sites), ([np.empty(0, dtype=np.int64)] * len(members), 0)
        own = [np.concatenate([np.arange(rows.starts[u], rows.starts[u] + rows.counts[u]) for u in m]) for m in members]
        return dict.fromkeys(ShardState.__dataclass_fields__, sites) | {
            "alpha": (self._edge_numbers, self.plan.edges.shape[0]),
            "table": (own, rows.data.n_samples) if kind == "saga" else none,
            "anchor_gradient": none if kind == "plain" else sites,
            "anchor_theta": sites if kind == "svrg" else none,
        }

    def state(self) -> ShardState:
        """Return everything that changes, in the federation's order, whatever the number of shards."""
        states = [vars(shard.state()) for shard in self.shards]
        parts = {name: [state[name] for state in states] for name in states[0]}
        return ShardState(**{name: _gathered(parts[name], *where) for name, where in self._lines().items()})

    def restore(self, state: ShardState) -> None:
        """Go back to a `state`, of this or another number of shards."""
        lines = self._lines()
        for k, shard in enumerate(self.shards):
            shard.restore(ShardState(**{name: part[lines[name][0][k]] for name, part in vars(state).items()}))


def _gathered(parts: Sequence[NDArray[Any]], lines: Sequence[Index], count: int) -> NDArray[Any]:
    """Put parts together, where part k has the given ``lines`` of ``count``."""
    whole = np.empty((count, *parts[0].shape[1:]), dtype=parts[0].dtype)
    for part, where in zip(parts, lines, strict=True):
        whole[where] = part
    return whole


def shard_of_sites(shards: int | Sequence[int], n_sites: int) -> Index:
    """Return the shard of each site, ``(V,)``: contiguous pieces of as equal size as possible, or those given."""
    if np.ndim(shards) == 0:
        check_whole("shards", shards, least=1)
        return np.arange(n_sites) * min(int(np.asarray(shards)), n_sites) // n_sites
    hosts = np.asarray(shards)
    if hosts.shape != (n_sites,) or hosts.dtype.kind not in "iu":
        raise ParameterError(f"shards must be a whole number or one for each of the {n_sites} sites, got {shards!r}")
    return hosts.astype(np.int64)
