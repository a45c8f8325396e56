"""Links between machines (`fedkin.admm.Link`), and those between neighbours in lock step.

- `NeighbourLink`: a site waits only for its neighbours. No vector is skipped: one that does not arrive is pulled until
  it does. The two ends of an edge regularly compare their replicas of its dual.
- `ChoosingLink`: a `NeighbourLink` for the rounds that choose ``lam``, which then exchanges held-out losses.

`fedkin.federate.attendance` has the links of runs whose sites come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array
from fedkin.admm import Link, Shard
from fedkin.federate.endpoint import Endpoint
from fedkin.federate.inbox import Expected, Kind, PeerError
from fedkin.federate.plan import ChoicePlan

Arrays = Mapping[str, NDArray[Any]]

#: Differences between the replicas of an edge dual up to this share of its bound are due to rounding.
SAME_DUAL = 1e-9
_BOUND_KIND = {"l1": "max", "l2": "length", "linf": "sum"}  # dual norms of the penalties


class BaseLink(Link):
    """Base class of links between machines, most of which run in rounds.

    ``over`` states whether all partners have finished, too; ``keeps_state`` whether this process writes checkpoints,
    and ``keeps_all`` whether after every round; ``only_up`` whether it finally waits only for partners that are up;
    ``certifies`` whether the shard can compute its share of the certificate; ``partner`` is what the log calls one.

    A link waits for messages in its endpoint, which raises `PeerError` when it has waited too long, and `Stopped` on
    request: the process ends, and goes on from its checkpoint when started again.
    """

    keeps_state = keeps_all = True
    only_up = certifies = False
    partner = "neighbour"

    def __init__(self, end: Endpoint, shard: Shard) -> None:
        super().__init__(end.plan.rounds)
        self.endpoint, self.plan, self.shard, self.over = end, end.plan, shard, False

    def open(self) -> None:
        """Begin to listen."""
        self.endpoint.open(self.expected, self.answer, self.partner)
        names = [self.endpoint.names[v] for v in self.endpoint.partners]
        self.endpoint.journal.write("info", "started", round=self.done, neighbours=names)

    def expected(self, v: int) -> list[Expected]:
        """Return what partner v may send: by default thetas of this round and the next, and that it has finished."""
        end, rounds, t = self.endpoint, self.plan.rounds, self.done + 1
        done = end.expected(Kind.DONE, v, 0, rounds, rounds + 1)
        return [end.expected(Kind.THETA, v, self.plan.n_params, t, t + 1), done]

    def answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        """Return the frame of round t that partner v asks for, None for none."""
        return self.endpoint.answer(kind, v, t)

    def gather(self) -> None:
        """Wait for partners before the first round, if rounds do not wait for them."""
        return

    def result(self) -> Array:
        """Return the averaged parameters: ``(p,)`` for a site, ``(V, p)`` for a central machine."""
        return np.asarray(self.shard.average[self.shard.sites.tolist().index(self.plan.here)])

    def linger(self, save: Callable[[], None]) -> None:
        """Stay until no partner needs this process; ``save()`` records that."""

        def on_over() -> None:
            self.over = True
            save()

        self.endpoint.linger(Kind.DONE, self.done, waits=not self.over, only_up=self.only_up, on_over=on_over)

    def arrays(self) -> Arrays:
        """Return the state that belongs in a checkpoint."""
        return {}

    def restore(self, arrays: Arrays, done: int) -> None:
        """Restore the state of a checkpoint."""
        self.done = done

    def replay(self) -> None:
        """Repeat rounds that were decided after the checkpoint."""
        return

    def saved(self, t: int) -> None:
        """Record that the state after round t is safely on disk."""
        return


class NeighbourLink(BaseLink):
    """Link of one site to its neighbours, which also compares the two replicas of each edge's dual."""

    certifies = True

    def expected(self, v: int) -> list[Expected]:
        plan, t = self.plan, self.done + 1
        if v > plan.here or not plan.compare_every:
            return super().expected(v)
        bound = float(self.shard.edge_radius[self.shard.edges.tolist().index([plan.here, v])])
        how = {"bound": bound, "bound_kind": _BOUND_KIND[plan.penalty.name]}
        return [*super().expected(v), self.endpoint.expected(Kind.ALPHA, v, plan.n_params, t, t + 1, **how)]

    def answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        if kind is not Kind.ALPHA:
            return super().answer(kind, v, t)
        held = self.endpoint.past.get((kind, None), {}).get(t)
        own = np.flatnonzero((self.shard.edges == v).any(axis=1))
        if held is None or not own.size:
            return None
        return self.endpoint.frame(kind, t, held.reshape(-1, self.plan.n_params)[own[0]])

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array]:
        end = self.endpoint
        end.status.round = t
        # first open the window: a quick neighbour answers with its next vector before `send` returns
        end.inbox.advance(Kind.THETA, t, t + 1)
        end.send(Kind.THETA, t, shard.theta[0].copy())
        end.wait_for(Kind.THETA, lambda: end.partners, t)
        return {v: end.inbox.values(Kind.THETA, v, t) for v in end.partners}  # one may have left meanwhile

    def end(self, t: int, shard: Shard) -> None:
        if self.plan.compare_every and t % self.plan.compare_every == 0:
            self.compare_duals(t)
        self.done = t

    def compare_duals(self, t: int) -> None:
        """Compare the replicas and adopt those of the ends with smaller numbers, which are correct by definition."""
        end, shard, here = self.endpoint, self.shard, self.plan.here
        for edge, (i, j) in enumerate(shard.edges.tolist()):
            if j == here:
                frame = end.frame(Kind.ALPHA, t, shard.alpha[edge])
                end.transport.publish(self.plan.key(Kind.ALPHA, here, i), frame)
        end.remember(Kind.ALPHA, t, shard.alpha.flatten())
        end.inbox.advance(Kind.ALPHA, t, t + self.plan.compare_every)
        end.wait_for(Kind.ALPHA, lambda: [v for v in end.partners if v < here], t)
        alpha = shard.alpha.copy()
        for edge, (_, j) in enumerate(shard.edges.tolist()):
            if j == here:
                continue
            theirs = end.inbox.values(Kind.ALPHA, j, t)
            difference = float(np.abs(theirs - alpha[edge]).max(initial=0.0))
            if difference > SAME_DUAL * shard.edge_radius[edge]:
                end.journal.write("warning", "edge dual repaired", peer=end.names[j], round=t, difference=difference)
                end.status.repaired += 1
            alpha[edge] = theirs
        if alpha.tobytes() != shard.alpha.tobytes():
            shard.take_duals(alpha)


class ChoosingLink(NeighbourLink):
    """Link of one site in the rounds that choose ``lam`` (`ChoicePlan`), and in the exchange of losses after them.

    Every stage of the plan starts at the given state of the shard. After the last one, sites pass on the held-out
    losses they know until all sites have all of them. The numbers are passed on unchanged, so every site adds up the
    same table in the same order and finds the same level.
    """

    certifies = False

    def __init__(self, end: Endpoint, shard: Shard) -> None:
        super().__init__(end, shard)
        plan = self._choice
        self._losses = np.zeros(len(plan.training) * plan.levels.size)
        #: Losses by site and level ``(V, M)``, and a column that is 1 for sites whose losses are known.
        self.table = np.zeros((plan.federation_size, plan.levels.size + 1))
        self._hop = 0

    @property
    def _choice(self) -> ChoicePlan:
        assert isinstance(self.plan, ChoicePlan)
        return self.plan

    def begin(self, shard: Shard) -> int | None:
        plan, (stage, rest) = self._choice, divmod(self.done, self._choice.level_rounds)
        if rest == 0:
            if stage:
                self._losses[stage - 1] = plan.held_out_loss(stage - 1, shard.theta[0])
            if stage < self._losses.size:
                shard.restart(plan.stage(stage, shard), sorted(self.endpoint.left))
        return super().begin(shard)

    def result(self) -> Array:
        """Exchange losses until those of all sites are known, or no more can arrive; return the table."""
        end, plan = self.endpoint, self._choice
        own = self._losses.reshape(len(plan.training), -1).sum(axis=0) / max(plan.n_held, 1)
        self.table[plan.here] = [*own, 1.0]
        while not self._knows_all and self._hop < plan.federation_size - 1 and end.partners:
            t = self._hop + 1
            end.inbox.advance(Kind.HELD_OUT, t, t + 1)
            self._send(t)
            end.wait_for(Kind.HELD_OUT, lambda: end.partners, t)
            for v in end.partners:
                self._merge(v, end.inbox.values(Kind.HELD_OUT, v, t).reshape(self.table.shape))
        self._send(self._hop + 1)  # others may know less
        return self.table

    @property
    def _knows_all(self) -> bool:
        return bool(self.table[:, -1].all())

    def _send(self, t: int) -> None:
        self._hop = t
        self.endpoint.send(Kind.HELD_OUT, t, self.table.flatten())

    def _merge(self, v: int, theirs: Array) -> None:
        told = theirs[:, -1] > 0.5
        both = told & (self.table[:, -1] > 0.5)
        if not np.array_equal(theirs[both], self.table[both]):
            name = self.endpoint.names[v]
            raise PeerError(f"{name} sends other held-out losses of a site than were known: sites would disagree")
        self.table[told] = theirs[told]

    def expected(self, v: int) -> list[Expected]:
        return [*super().expected(v), self.endpoint.expected(Kind.HELD_OUT, v, self.table.size, 1, 2)]

    def answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        if kind is not Kind.HELD_OUT:
            return super().answer(kind, v, t)
        # a site that began anew gets what is known now, which has all that was known before
        return self.endpoint.frame(kind, t, self.table.flatten()) if 0 < t <= self._hop or self._knows_all else None

    def arrays(self) -> Arrays:
        return {"losses": self._losses.copy(), "told": self.table.copy()}

    def restore(self, arrays: Arrays, done: int) -> None:
        super().restore(arrays, done)
        self._losses, self.table = arrays["losses"].copy(), arrays["told"].copy()
        plan = self._choice
        self.shard.restart(plan.stage(max(done - 1, 0) // plan.level_rounds, self.shard))
