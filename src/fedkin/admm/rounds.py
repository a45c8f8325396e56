"""The loop of rounds, written once: node step, exchange of thetas, edge step, save.

`run_rounds` is given three things and knows nothing else:

- a **shard** (`Hosted`) does the arithmetic: ``node_step`` moves the hosted thetas, ``give`` names those that others
  need, ``take`` learns those of others, ``edge_step`` moves the duals. `fedkin.admm.Shard` is one shard,
  `fedkin.admm.inprocess.LocalShards` are several in one process;
- a **link** carries thetas: ``exchange(t, positions, thetas)`` tells the neighbours this shard's thetas of round t and
  returns positions and thetas of theirs. `DirectLink` does so inside one process; `fedkin.federate.links` has the
  neighbours' link, over a network in memory or zenoh, and the link between MPI ranks;
- a **store** keeps the state after a round: ``save(t, state, durable)``.

What they agree on beside that stands in a `Course`: the last round, how numbers travel, when to save and to compare the
two replicas of an edge's dual, and whom to tell about progress.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.admm.shard import ShardState
from fedkin.errors import SolverError

Wire = Literal["float64", "float32"]
Thetas = tuple[Index, Array]


class Hosted(Protocol):
    """The devices of a run that are here."""

    devices: Index

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


@dataclass(frozen=True)
class Course:
    """What `run_rounds` is told beside shard, link and store.

    Attributes
    ----------
    rounds : int
        The last round.
    wire : "float64" | "float32"
        How thetas travel. Both ends of an edge must compute with the same numbers, so the shard's own are rounded, too.
    offset : int
        Rounds of the run that came before the first one of this shard.
    names : sequence of str, optional
        Of the hosted devices; with them, parameters that diverge are noticed in every round.
    cure : str
        What to do about parameters that diverge.
    save_every : int, optional
        Rounds between durable saves; the last round is always saved.
    save_all : bool
        Whether the rounds between are saved, too.
    settle : callable, optional
        Called with the round before it is saved: where replicas are compared.
    after : callable, optional
        Called with the round and the largest change of a theta in it, after it is saved.
    """

    rounds: int
    wire: Wire = "float64"
    offset: int = 0
    names: Sequence[str] | None = None
    cure: str = "the steps are too long"
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
    """Do the rounds ``done + 1, ..., course.rounds``.

    Parameters
    ----------
    shard : Hosted
        What is moved.
    link : Link
        To the shards that host its neighbours.
    store : RoundStore or None
        Where its state is kept.
    course : Course
        How.
    done : int
        Rounds that are over.
    attendance : Attendance, optional
        Devices that come and go; all are there by default.

    Raises
    ------
    SolverError
        When parameters diverge.
    """
    for t in range(done + 1, course.rounds + 1):
        before = shard.theta.copy() if course.after is not None else None
        with np.errstate(over="ignore", invalid="ignore"):
            shard.node_step(t - course.offset, *_present(attendance, t, shard.devices))
        if course.wire == "float32":
            shard.round_thetas()
        if course.names is not None:
            _check_finite(shard, course.names, t, course.cure)
        # the loop may learn of neighbours that have left while it waits: measured before
        change = 0.0 if before is None else float(np.abs(shard.theta - before).max(initial=0.0))
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


def _present(attendance: Attendance | None, t: int, devices: Index) -> tuple[Mask | None, Array | None]:
    if attendance is None:
        return None, None
    k = t - attendance.first
    return attendance.available[k, devices], attendance.probability[k, devices]


def _check_finite(shard: Hosted, names: Sequence[str], t: int, cure: str) -> None:
    finite = np.isfinite(shard.theta)
    if not finite.all():
        name = names[int(np.argmin(finite.all(axis=1)))]
        raise SolverError(f"round {t}: the parameters of device {name!r} diverged: {cure}")
