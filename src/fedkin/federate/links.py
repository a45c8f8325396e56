"""Links between machines (`fedkin.admm.Link`): how thetas are exchanged, and which machine steps for absent sites.

- `NeighbourLink`: a site waits only for its neighbours, in lock step. No vector is skipped: one that does not arrive
  is pulled until it does. The two ends of an edge regularly compare their replicas of its dual.
- `ChoosingLink`: a `NeighbourLink` for the rounds that choose ``lam``, which then exchanges held-out losses.
- `CentralLink` and `WorkerLink`: Algorithm 2. A central machine S holds all edge state; in each round it sends every
site theta, pull and the probability of being present, and a site that is present answers with its theta.
- `ReplicatedLink`: Algorithm 2 without a central machine; every site keeps a replica of its component.

Presence is observed: a site that has not answered by the deadline of a round counts as absent and takes only the
penalty part of its step; gradients are divided by ``p_i(t) = (1 + rounds seen before t) / t``.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Mask
from fedkin.admm import ROUND_ARRAYS, Link, Shard
from fedkin.federate.endpoint import Endpoint
from fedkin.federate.inbox import HEADER_BYTES, LOOK_SECONDS, Expected, Kind, MessageError, PeerError, decode, encode
from fedkin.federate.plan import ChoicePlan

Arrays = Mapping[str, NDArray[Any]]

#: Differences between the replicas of an edge dual up to this share of its bound are due to rounding.
SAME_DUAL = 1e-9
_BOUND_KIND = {"l1": "max", "l2": "length", "linf": "sum"}  # dual norms of the penalties


class BaseLink(Link, ABC):
    """Base of links between machines, most of which run round after round.

    ``over`` states whether all partners have finished, too; ``keeps_state`` whether this process writes checkpoints,
    and ``keeps_all`` whether after every round; ``only_up`` whether it finally waits only for partners that are up;
    ``certifies`` whether the shard can compute its share of the certificate.
    """

    keeps_state = keeps_all = True
    only_up = certifies = False

    def __init__(self, end: Endpoint, shard: Shard) -> None:
        super().__init__(end.plan.rounds)
        self.endpoint, self.plan, self.shard, self.over = end, end.plan, shard, False

    @abstractmethod
    def open(self) -> None:
        """Begin to listen."""

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

    def _usual(self, v: int) -> list[Expected]:
        """Return what any partner may send: thetas of this round and the next, and that it has finished."""
        end, rounds, t = self.endpoint, self.plan.rounds, self.done + 1
        done = end.expected(Kind.DONE, v, 0, rounds, rounds + 1)
        return [end.expected(Kind.THETA, v, self.plan.n_params, t, t + 1), done]

    def _started(self) -> None:
        names = [self.endpoint.names[v] for v in self.endpoint.partners]
        self.endpoint.journal.write("info", "started", round=self.done, neighbours=names)


class NeighbourLink(BaseLink):
    """Link of one site to its neighbours, which also compares the two replicas of each edge's dual."""

    certifies = True

    def open(self) -> None:
        self.endpoint.open(self._expected, self._answer)
        self._started()

    def _expected(self, v: int) -> list[Expected]:
        end, plan, t = self.endpoint, self.plan, self.done + 1
        if v > plan.here or not plan.compare_every:
            return self._usual(v)
        bound = float(self.shard.edge_radius[self.shard.edges.tolist().index([plan.here, v])])
        kind = _BOUND_KIND[plan.penalty.name]
        dual = end.expected(Kind.ALPHA, v, plan.n_params, t, t + 1, bound=bound, bound_kind=kind)
        return [*self._usual(v), dual]

    def _answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        if kind is not Kind.ALPHA:
            return self.endpoint.answer(kind, v, t)
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
        self._losses = np.zeros(len(plan.parts) * plan.levels.size)
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
                self._losses[stage - 1] = plan.held_out(stage - 1, shard.theta[0])
            if stage < self._losses.size:
                shard.restart(plan.stage(stage, shard), sorted(self.endpoint.left))
        return super().begin(shard)

    def result(self) -> Array:
        """Exchange losses until those of all sites are known, or no more can arrive; return the table."""
        end, plan = self.endpoint, self._choice
        own = self._losses.reshape(len(plan.parts), -1).sum(axis=0) / max(plan.n_held, 1)
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

    def _expected(self, v: int) -> list[Expected]:
        return [*super()._expected(v), self.endpoint.expected(Kind.HELD_OUT, v, self.table.size, 1, 2)]

    def _answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        if kind is not Kind.HELD_OUT:
            return super()._answer(kind, v, t)
        # a site that began anew gets what is known now, which has all that was known before
        return self.endpoint.frame(kind, t, self.table.flatten()) if 0 < t <= self._hop or self._knows_all else None

    def arrays(self) -> Arrays:
        return {"losses": self._losses.copy(), "told": self.table.copy()}

    def restore(self, arrays: Arrays, done: int) -> None:
        super().restore(arrays, done)
        self._losses, self.table = arrays["losses"].copy(), arrays["told"].copy()
        plan = self._choice
        self.shard.restart(plan.stage(max(done - 1, 0) // plan.level_rounds, self.shard))


class _Attended(BaseLink):
    """Base of links that count presence: ``seen (m,)``, and ``attended``, a bool array ``(m,)`` per round."""

    keeps_all = False

    def __init__(self, end: Endpoint, shard: Shard) -> None:
        super().__init__(end, shard)
        self.members = shard.sites.tolist()
        self.seen, self.attended = np.zeros(len(self.members), dtype=np.int64), list[Mask]()

    def presence(self, t: int) -> tuple[Mask | None, Array | None]:
        return None, np.asarray((1.0 + self.seen) / t)

    def note(self, t: int, here: Mask) -> None:
        """Record that round t is over and which sites were present."""
        self.seen = self.seen + here
        self.attended.append(here)
        self.done = t

    def arrays(self) -> Arrays:
        return {"seen": self.seen.copy(), "presence": np.array(self.attended, dtype=np.bool_)}

    def restore(self, arrays: Arrays, done: int) -> None:
        self.seen, self.done = np.asarray(arrays["seen"], dtype=np.int64).copy(), done
        self.attended = list(arrays.get("presence", self.attended))


class CentralLink(_Attended):
    """Link of the central machine S, whose shard hosts all sites without their rows."""

    _here: Mask

    def open(self) -> None:
        self.endpoint.open(self._expected, word="site")
        self.endpoint.journal.write("info", "started", round=self.done)

    def _expected(self, u: int) -> list[Expected]:
        end, plan, t = self.endpoint, self.plan, self.done + 1
        done = end.expected(Kind.DONE, u, 0, plan.rounds, plan.rounds)
        return [end.expected(Kind.THETA, u, plan.n_params, t, t), done]

    def gather(self) -> None:
        if self.done < self.plan.rounds:
            self.endpoint.gather(self.done + 1, self.endpoint.patience.gather)

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array]:
        end = self.endpoint
        end.status.round = t
        end.inbox.advance(Kind.THETA, t, t)
        _, chance = self.presence(t)
        assert chance is not None
        questions = np.concatenate([shard.left, shard.pull(), chance[:, None]], axis=1)
        for u, question in zip(self.members, questions, strict=True):
            end.send(Kind.DOWN, t, question, u, push=end.names[u] in end.status.up)

        def ask_again(u: int) -> None:
            end.send(Kind.DOWN, t, questions[self.members.index(u)], u)
            end.pull(Kind.THETA, u, t)

        thetas = end.collect(t, ask_again, least=1)
        self._here = np.isin(self.members, list(thetas))
        return thetas

    def end(self, t: int, shard: Shard) -> None:
        self.note(t, self._here)

    def result(self) -> Array:
        return self.shard.average

    def linger(self, save: Callable[[], None]) -> None:
        """Hand out the results until all sites have them or the time is up."""
        end = self.endpoint
        deadline, waiting = time.monotonic() + end.patience.linger, end.partners
        while waiting and time.monotonic() < deadline:
            for u in waiting:
                end.send(Kind.RESULT, self.done, self.shard.average[self.members.index(u)], u)
            waiting = end.inbox.wait(Kind.DONE, end.partners, self.done, 2 * LOOK_SECONDS)
            end.status.waiting_for = [end.names[u] for u in waiting]
            end.tick()
        if waiting:
            end.journal.write("warning", "left before all sites had their result", peers=end.status.waiting_for)


class WorkerLink(BaseLink):
    """Link of a site in a central placement: it answers S until the result comes, and keeps no state between rounds."""

    keeps_state = False
    _chance: Array

    def open(self) -> None:
        end, plan = self.endpoint, self.plan
        self.centre = plan.federation_size
        down = end.expected(Kind.DOWN, self.centre, 2 * plan.n_params + 1, 1, plan.rounds)
        result = end.expected(Kind.RESULT, self.centre, plan.n_params, plan.rounds, plan.rounds)
        end.open(lambda _: [down, result], word="central machine")
        end.journal.write("info", "started")

    def begin(self, shard: Shard) -> int | None:
        """Wait for S. A round may be repeated, by S itself or after S has restored its checkpoint."""
        end, plan, patience = self.endpoint, self.plan, self.endpoint.patience
        heard = time.monotonic()
        next_pull = heard + patience.first_pull
        while end.inbox.missing(Kind.RESULT, [self.centre], plan.rounds):
            message, now = end.inbox.newest(Kind.DOWN, self.centre, LOOK_SECONDS), time.monotonic()
            if message is not None:
                t, values = message
                theta, pull, self._chance = np.split(values, [plan.n_params, 2 * plan.n_params])
                shard.take_pull(theta[None], pull[None])
                end.status.round = t
                return t
            if now >= next_pull or end.hint:
                end.hint = False
                end.pull(Kind.DOWN, self.centre, 0)
                end.pull(Kind.RESULT, self.centre, 0)
                next_pull = now + patience.last_pull
            if now - heard > patience.give_up:
                raise PeerError(f"nothing from the central machine for {now - heard:.0f} s: start it, then this site")
            end.tick()
        return None

    def presence(self, t: int) -> tuple[Mask | None, Array | None]:
        return None, np.clip(self._chance, 1e-9, 1.0)

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array]:
        self.endpoint.send(Kind.THETA, t, shard.theta[0].copy())
        return {}

    def result(self) -> Array:
        self.endpoint.status.round = self.plan.rounds
        self.endpoint.send(Kind.DONE, self.plan.rounds, np.zeros(0))
        return self.endpoint.inbox.values(Kind.RESULT, self.centre, self.plan.rounds)

    def linger(self, save: Callable[[], None]) -> None:
        return


class ReplicatedLink(_Attended):
    """Link of a site in a component whose sites come and go; each keeps a replica of the whole component.

    A step for an absent site needs the duals around it, hence the thetas of *its* neighbours, which an absent site
    cannot pass on. So each present site sends its theta to all other sites of the component, and all of them take the
    penalty part of the step for absent sites, each in its own replica. Replicas are bitwise equal as long as all sites
    agree on which are absent.

    One site of the component, the leader, decides which sites were present in a round: those whose theta it received
    before the deadline. It writes them to ``record``, with the thetas, before it announces them. A site that missed a
    round, or was absent, adopts the leader's replica. No other site replaces the leader: with two leaders, the parts of
    a split network would have two histories that no rule could merge.
    """

    only_up = True

    def __init__(self, end: Endpoint, shard: Shard, record: Path | None = None) -> None:
        super().__init__(end, shard)
        self.leads = self.plan.here == self.plan.leader
        self.keeps_state = self.leads
        self.record = record if self.leads else None
        self._own = self.members.index(self.plan.here)
        self._thetas: dict[int, Array] = {}
        self._replica = 0, shard.state(), self.seen

    def open(self) -> None:
        self._replica = self.done, self.shard.state(), self.seen
        self.endpoint.open(self._expected, self._answer)
        self._started()

    def _expected(self, v: int) -> list[Expected]:
        end, plan, t, m = self.endpoint, self.plan, self.done + 1, len(self.members)
        if v != plan.leader:
            return self._usual(v)
        length = (5 * m + self.shard.edges.shape[0]) * plan.n_params + m
        present = end.expected(Kind.PRESENT, v, m, t, t + 1, bound=1.0, bound_kind="max")
        return [*self._usual(v), present, end.expected(Kind.REPLICA, v, length, t, plan.rounds)]

    def _answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        if kind is not Kind.REPLICA:
            return self.endpoint.answer(kind, v, t)
        done, state, seen = self._replica  # of a round that is over, also while the next one is computed
        return None if done < t else self.endpoint.frame(kind, done, replica_vector(state, seen))

    def gather(self) -> None:
        if self.leads and self.done < self.plan.rounds:
            patience = self.endpoint.patience
            self.endpoint.gather(self.done + 1, patience.gather if self.done == 0 else patience.deadline)

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array] | None:
        end, here = self.endpoint, self.plan.here
        end.status.round = t
        own = shard.theta[self._own].copy()
        end.inbox.advance(Kind.THETA, t, t + 1)
        if self.leads:
            end.send(Kind.THETA, t, own)
            thetas = end.collect(t)
            self._thetas = {here: own, **thetas}
            if self.record is not None:
                self._write_down(self.record, t)
            return thetas
        end.inbox.advance(Kind.PRESENT, t, t + 1)
        end.inbox.advance(Kind.REPLICA, t, self.plan.rounds)
        end.send(Kind.THETA, t, own)
        if not self._wait(Kind.PRESENT, [self.plan.leader], t):
            return None
        told = end.inbox.values(Kind.PRESENT, self.plan.leader, t)
        present = [u for u, now in zip(self.members, told, strict=True) if now > 0.5]
        others = [u for u in present if u != here]
        if not self._wait(Kind.THETA, others, t):
            return None
        thetas = {u: end.inbox.values(Kind.THETA, u, t) for u in others}
        self._thetas = {**thetas, here: own} if here in present else dict(thetas)
        if here not in present:
            end.journal.sparingly("warning", "counted as absent", peer=end.names[self.plan.leader], round=t)
            thetas[here] = shard.penalty_step(t, self.presence(t)[1])[self._own]
        return thetas

    def end(self, t: int, shard: Shard, push: bool = True) -> None:
        here = np.isin(self.members, list(self._thetas))
        self.note(t, here)
        self._replica = t, shard.state(), self.seen
        if self.leads:
            for u in np.array(self.members)[~here].tolist():
                self.endpoint.journal.sparingly("warning", "absent", peer=self.endpoint.names[u], round=t)
            self.endpoint.send(Kind.PRESENT, t, here.astype(np.float64), push=push)

    def _wait(self, kind: Kind, senders: list[int], t: int) -> bool:
        """Wait as other links do; return False if the leader was ahead and its replica was adopted."""
        end, leader = self.endpoint, self.plan.leader
        ahead: list[tuple[int, Array]] = []

        def pull(sender: int) -> None:
            end.pull(kind, sender, t)
            # a sender may have died after the leader had its theta, or this site may be far behind
            end.pull(Kind.REPLICA, leader, t)

        def whom() -> list[int]:
            ahead.extend(one for one in [end.inbox.newest(Kind.REPLICA, leader, 0.0)] if one is not None)
            return [] if ahead else senders

        while True:
            end.wait_for(kind, whom, t, pull)
            if not ahead:
                return True
            was, (done, vector) = self.done, ahead.pop()
            try:
                self.take_vector(vector, done)
            except MessageError as error:
                facts = {"peer": end.names[leader], "kind": "REPLICA", "why": str(error)}
                end.journal.sparingly("warning", "message refused", **facts)
                continue
            end.journal.write("info", "took over the leader's replica", round=done, was=was)
            end.hint = True
            return False

    def take_vector(self, vector: Array, done: int) -> None:
        """Adopt another replica; raise `MessageError` if it cannot be a state after ``done`` rounds."""
        shard = self.shard
        m, p = shard.theta.shape
        *parts, seen = np.split(vector, np.cumsum([m * p] * 5 + [shard.edges.shape[0] * p]))
        state = {name: part.reshape(-1, p) for name, part in zip(ROUND_ARRAYS, parts, strict=True)}
        if (self.plan.penalty.dual_norm(state["alpha"]) > shard.edge_radius * (1.0 + 1e-6)).any():
            raise MessageError("a replica with duals outside their balls")
        if (seen != np.round(seen)).any() or (seen < 0).any() or (seen > done).any():
            raise MessageError(f"a replica with impossible counts of presence after {done} rounds")
        shard.restore({**shard.state(), **state})
        self.restore({"seen": seen}, done)
        self._replica = done, shard.state(), self.seen

    def _write_down(self, path: Path, t: int) -> None:
        absent = np.zeros(self.plan.n_params)
        here = np.isin(self.members, list(self._thetas)).astype(float)
        values = np.concatenate([here, *(self._thetas.get(u, absent) for u in self.members)])
        frame = encode(self.plan.run_bytes, Kind.PRESENT, self.plan.here, t, values)

        def write() -> None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # where the record of a round goes is known: half a record is written over
                os.pwrite(descriptor, frame, (t - 1) % self.plan.checkpoint_every * len(frame))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        self.endpoint.hold(write, path, t, "record failed, holding")

    def replay(self) -> None:
        text = b"" if self.record is None or not self.record.exists() else self.record.read_bytes()
        m, p, plan, shard = len(self.members), self.plan.n_params, self.plan, self.shard
        size = HEADER_BYTES + 8 * m * (1 + p)
        for k in range(0, len(text), size):
            t = self.done + 1
            try:
                expected = Expected(plan.run_bytes, Kind.PRESENT, plan.here, m * (1 + p), t, t)
                _, values = decode(text[k : k + size], expected)
            except MessageError:
                continue  # older than the checkpoint, or half a record: that round was never announced
            thetas = dict(zip(self.members, values[m:].reshape(-1, p), strict=True))
            self._thetas = {u: theta for (u, theta), now in zip(thetas.items(), values[:m], strict=True) if now > 0.5}
            shard.node_step(t, *self.presence(t))
            shard.take(self._thetas)
            shard.edge_step()
            self.end(t, shard, push=False)
            self.endpoint.remember(Kind.THETA, t, self._thetas[plan.here])

    def saved(self, t: int) -> None:
        if self.record is not None:
            self.record.unlink(missing_ok=True)


def replica_vector(state: Arrays, seen: NDArray[np.int64]) -> Array:
    """Encode a replica as a message."""
    return np.concatenate([*(state[name].ravel() for name in ROUND_ARRAYS), seen.astype(np.float64)])


def make_link(end: Endpoint, shard: Shard, record: Path | None = None) -> BaseLink:
    """Return the link for the placement of the run."""
    plan = end.plan
    if plan.placement == "replicas":
        return ReplicatedLink(end, shard, record)
    if plan.placement == "central":
        return CentralLink(end, shard) if plan.is_centre else WorkerLink(end, shard)
    if isinstance(plan, ChoicePlan):
        return ChoosingLink(end, shard)
    return NeighbourLink(end, shard)
