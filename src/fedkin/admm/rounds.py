"""The loop of rounds, written once: node step, exchange of thetas, edge step, save.

`run_rounds` is given three things and knows nothing else:

- a **shard** (`Hosted`) does the arithmetic: ``node_step`` moves the hosted thetas, ``give`` names those that others
  need, ``take`` learns those of others, ``edge_step`` moves the duals. `fedkin.admm.Shard` is one shard,
  `LocalShards` are several in one process;
- a **link** carries thetas: ``exchange(t, positions, thetas)`` tells the neighbours this shard's thetas of round t and
  returns positions and thetas of theirs. `DirectLink` does so inside one process; `fedkin.federate.links` has the
  neighbours' link, over a network in memory or zenoh;
- a **store** keeps the state after a round: ``save(t, state, durable)``.

What they agree on beside that stands in a `Course`: the last round, how numbers travel, when to save and to compare the
two replicas of an edge's dual, and whom to tell about progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask, check_whole
from fedkin.admm.gradients import Gradients, SampleStream
from fedkin.admm.plan import Plan
from fedkin.admm.shard import Shard, ShardState
from fedkin.errors import ParameterError, SolverError

Wire = Literal["float64", "float32"]
Thetas = tuple[Index, Array]


class Hosted(Protocol):
    """The sites of a run that are here."""

    sites: Index

    @property
    def theta(self) -> Array:
        """Their parameters ``(B, p)``."""
        ...

    def node_step(self, t: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Move their thetas."""
        ...

    def round_thetas(self) -> None:
        """Round them to what travels."""
        ...

    def give(self) -> Thetas:
        """Positions and thetas that others need."""
        ...

    def take(self, positions: Index, theta: Array) -> None:
        """Learn the thetas of others."""
        ...

    def edge_step(self) -> None:
        """Move the duals of their edges."""
        ...

    def state(self) -> ShardState:
        """Everything that changes."""
        ...


class Link(Protocol):
    """What carries thetas between shards."""

    def exchange(self, t: int, positions: Index, thetas: Array) -> Thetas:
        """Tell the neighbours ``thetas`` of round t, and wait for theirs of the same round."""
        ...


class RoundStore(Protocol):
    """What keeps the state of a shard."""

    def save(self, t: int, state: ShardState, durable: bool) -> None:
        """Keep the state after round t; a durable one survives a loss of power."""
        ...


class DirectLink:
    """Shards in one process: what one gives the others take."""

    def exchange(self, t: int, positions: Index, thetas: Array) -> Thetas:
        return positions, thetas


@dataclass(frozen=True, eq=False)
class Attendance:
    """Who is there in the rounds from ``first`` on: ``available (R, V)``, and with which ``probability (R, V)``."""

    first: int
    available: Mask
    probability: Array

    def of(self, t: int, sites: Index) -> tuple[Mask, Array]:
        """Those of some sites in round t."""
        return self.available[t - self.first, sites], self.probability[t - self.first, sites]


@dataclass(frozen=True)
class Course:
    """What `run_rounds` is told beside shard, link and store.

    - ``rounds``: the last one; ``offset``: rounds of the run that came before the first one of this shard.
    - ``wire``: how thetas travel. Both ends of an edge must compute with the same numbers, so the shard's own are
      rounded.
    - ``names``: of the hosted sites; with them, parameters that diverge are noticed in every round, and told with a
      ``cure``.
    - ``radius``: of the parameter ball; parameters that end at its border are an error, like those that diverge.
    - ``save_every``: rounds between durable saves; the last round is always saved, those between only with
      ``save_all``.
    - ``settle``: called with the round before it is saved, where replicas are compared.
    - ``after``: called with the round and the largest change of a theta in it, after it is saved.
    """

    rounds: int
    wire: Wire = "float64"
    offset: int = 0
    names: Sequence[str] | None = None
    cure: str = "the steps are too long"
    radius: float | None = None
    save_every: int | None = None
    save_all: bool = False
    settle: Callable[[int], None] | None = None
    after: Callable[[int, float], None] | None = None


def run_rounds(
    shard: Hosted,
    link: Link,
    store: RoundStore | None,
    course: Course,
    done: int = 0,
    attendance: Attendance | None = None,
) -> None:
    """Do the rounds ``done + 1, ..., course.rounds``; sites come and go by ``attendance``, or all are there.

    Raises `SolverError` when parameters diverge.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what diverges is told in words
        for t in range(done + 1, course.rounds + 1):
            change = _node_step(shard, course, t, attendance)
            positions, thetas = link.exchange(t, *shard.give())
            if positions.size:
                shard.take(positions, thetas)
            shard.edge_step()
            if course.settle is not None:
                course.settle(t)
            if store is not None:
                durable = t == course.rounds or (course.save_every is not None and t % course.save_every == 0)
                if durable or course.save_all:
                    store.save(t, shard.state(), durable)
            if course.after is not None:
                course.after(t, change)


def _node_step(shard: Hosted, course: Course, t: int, attendance: Attendance | None) -> float:
    """Move the thetas, check them, and return the largest change; the loop may learn later of neighbours that left."""
    before = shard.theta.copy() if course.after is not None else None
    if attendance is None:
        shard.node_step(t - course.offset)
    else:
        shard.node_step(t - course.offset, *attendance.of(t, shard.sites))
    if course.wire == "float32":
        shard.round_thetas()
    change = 0.0
    if before is not None:
        change = float(np.maximum.reduce(np.absolute(shard.theta - before), axis=None, initial=0.0))
    if course.names is not None:
        # thetas were finite before, so they are as long as their change is
        if before is None or not math.isfinite(change):
            _check_finite(shard, course.names, t, course.cure)
        if t == course.rounds and course.radius is not None:
            _check_inside(shard, course.names, course.radius, course.cure)
    return change


def _check_finite(shard: Hosted, names: Sequence[str], t: int, cure: str) -> None:
    finite = np.isfinite(shard.theta)
    if not finite.all():
        name = names[int(np.argmin(finite.all(axis=1)))]
        raise SolverError(f"round {t}: the parameters of site {name!r} diverged: {cure}")


def _check_inside(shard: Hosted, names: Sequence[str], radius: float, cure: str) -> None:
    size = np.sqrt((shard.theta * shard.theta).sum(axis=1))
    if (size > (1.0 - 1e-9) * radius).any():
        name = names[int(size.argmax())]
        raise SolverError(
            f"the parameters of site {name!r} diverged to the border of their ball (radius {radius:g}): {cure}; or "
            "the ball is too small"
        )


class LocalShards:
    """Shards side by side in one process; together they behave like one (`Hosted`).

    They are the reference for every engine that puts shards elsewhere.

    ``hosts (V,)`` are the numbers of the sites' shards; ``theta (V, p)`` and ``alpha (E, p)`` are where they start;
    ``streams`` are by site number.
    """

    def __init__(
        self,
        plan: Plan,
        hosts: Index,
        theta: Array,
        alpha: Array | None = None,
        streams: Mapping[int, SampleStream] | None = None,
    ) -> None:
        self.plan, self.hosts, self.streams = plan, hosts, dict(streams or {})
        self.sites = np.arange(plan.n_sites)
        shape = (plan.rows.data.n_samples, plan.rows.table_width()) if plan.gradient == "saga" else (0, 1)
        #: SAGA's memory, shared by the shards like the rows are.
        self.table = np.zeros(shape)
        self.shards: list[Shard] = []
        for host in np.unique(hosts):
            members = np.flatnonzero(hosts == host)
            self.shards.append(
                plan.shard(members, theta=theta[members], alpha=alpha, table=self.table, streams=self.streams)
            )
        self._edge_numbers = [np.flatnonzero(np.isin(plan.edges, one.sites).any(axis=1)) for one in self.shards]

    def run(self, first: int, count: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Do ``count`` rounds from ``first`` on; presence and probabilities ``(count, V)`` when sites come and go."""
        attendance = None
        if available is not None and probability is not None:
            attendance = Attendance(first, available, probability)
        hosted: Shard | LocalShards = self.shards[0] if len(self.shards) == 1 else self
        run_rounds(hosted, DirectLink(), None, Course(first + count - 1), first - 1, attendance)

    # --- as one shard ---

    @property
    def theta(self) -> Array:
        """Parameters ``(V, p)`` of all sites."""
        return self.gather("theta")

    def node_step(self, t: int, available: Mask | None = None, probability: Array | None = None) -> None:
        for shard in self.shards:
            here = None if available is None else available[shard.sites]
            shard.node_step(t, here, None if probability is None else probability[shard.sites])

    def round_thetas(self) -> None:
        for shard in self.shards:
            shard.round_thetas()

    def give(self) -> tuple[Index, Array]:
        given = [shard.give() for shard in self.shards]
        return np.concatenate([positions for positions, _ in given]), np.concatenate([theta for _, theta in given])

    def take(self, positions: Index, theta: Array) -> None:
        post = np.empty((self.plan.n_sites, theta.shape[1]))
        post[positions] = theta
        for shard in self.shards:
            shard.take(shard.foreign, post[shard.foreign])

    def edge_step(self) -> None:
        for shard in self.shards:
            shard.edge_step()

    # --- the whole picture ---

    def gather(self, name: str) -> Array:
        """A part of the shards' state (see `ShardState`) for all sites ``(V, p)``, or all edges ``(E, p)``."""
        if name == "alpha":
            parts, numbers = [shard.alpha for shard in self.shards], self._edge_numbers
            return _gathered(parts, numbers, self.plan.edges.shape[0])
        return _gathered([getattr(one, name) for one in self.shards], self._members(), self.plan.n_sites)

    @property
    def looked(self) -> Index:
        """Rows that each site has looked at, ``(V,)``."""
        return _gathered([_gradients(one).looked for one in self.shards], self._members(), self.plan.n_sites)

    def _members(self) -> list[Index]:
        return [shard.sites for shard in self.shards]

    def _lines(self) -> dict[str, tuple[list[Index], int]]:
        """Where the lines of each part of a shard's state belong in that of all, and how many there are."""
        members, kind, rows = self._members(), self.plan.gradient, self.plan.rows
        sites, none = (members, self.plan.n_sites), ([np.empty(0, dtype=np.int64)] * len(members), 0)
        own = [np.concatenate([np.arange(rows.starts[u], rows.starts[u] + rows.counts[u]) for u in m]) for m in members]
        return dict.fromkeys(ShardState.__dataclass_fields__, sites) | {
            "alpha": (self._edge_numbers, self.plan.edges.shape[0]),
            "table": (own, rows.data.n_samples) if kind == "saga" else none,
            "anchor_gradient": none if kind == "plain" else sites,
            "anchor_theta": sites if kind == "svrg" else none,
        }

    def state(self) -> ShardState:
        """Everything that changes, in the federation's order; how sites are spread over shards does not show."""
        states = [vars(shard.state()) for shard in self.shards]
        parts = {name: [state[name] for state in states] for name in states[0]}
        return ShardState(**{name: _gathered(parts[name], *where) for name, where in self._lines().items()})

    def restore(self, state: ShardState) -> None:
        """Go back to a `state`, of this or another number of shards."""
        lines = self._lines()
        for k, shard in enumerate(self.shards):
            shard.restore(ShardState(**{name: part[lines[name][0][k]] for name, part in vars(state).items()}))


def _gathered(parts: Sequence[NDArray[Any]], lines: Sequence[Index], count: int) -> NDArray[Any]:
    """Parts put together, where part k has the given ``lines`` of ``count``."""
    whole = np.empty((count, *parts[0].shape[1:]), dtype=parts[0].dtype)
    for part, where in zip(parts, lines, strict=True):
        whole[where] = part
    return whole


def _gradients(shard: Shard) -> Gradients:
    assert shard.gradients is not None
    return shard.gradients


def split_evenly(n_sites: int, shards: int) -> Index:
    """Hosts ``(V,)``: contiguous pieces of as equal size as possible."""
    return np.arange(n_sites) * shards // n_sites


def hosts_of(shards: int | Sequence[int], n_sites: int) -> Index:
    """The shard of each site, ``(V,)``."""
    if np.ndim(shards) == 0:
        check_whole("shards", shards, least=1)
        return split_evenly(n_sites, min(int(np.asarray(shards)), n_sites))
    hosts = np.asarray(shards)
    if hosts.shape != (n_sites,) or hosts.dtype.kind not in "iu":
        raise ParameterError(
            f"shards must be a whole number or one for each of the {n_sites} sites, got {shards!r}"
        )
    return hosts.astype(np.int64)
