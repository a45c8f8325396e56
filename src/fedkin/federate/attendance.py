"""Links of runs whose sites come and go (Algorithm 2), and which machine steps for absent sites.

- `CentralLink` and `WorkerLink`: a central machine S holds all edge state; in each round it sends every site theta,
  pull and the probability of being present, and a site that is present answers with its theta.
- `ReplicatedLink`: no central machine; every site keeps a replica of its component.

Presence is observed: a site that has not answered by the deadline of a round counts as absent and takes only the
penalty part of its step; gradients are divided by ``p_i(t) = (1 + rounds seen before t) / t``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Mask
from fedkin.admm import ROUND_ARRAYS, Shard
from fedkin.federate.endpoint import Endpoint
from fedkin.federate.inbox import HEADER_BYTES, LOOK_SECONDS, Expected, Kind, MessageError, PeerError, decode, encode
from fedkin.federate.links import Arrays, BaseLink


class AttendedLink(BaseLink):
    """Base class of links that count presence: ``seen (m,)``, and ``attended``, a bool array ``(m,)`` per round.

    ``decides`` states whether this machine decides who was present.
    """

    keeps_all = False
    decides = True

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


class CentralLink(AttendedLink):
    """Link of the central machine S, whose shard hosts all sites without their rows."""

    partner = "site"
    _here: Mask

    def gather(self) -> None:
        if self.done < self.plan.rounds:
            self.endpoint.gather(self.endpoint.patience.gather)

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
    partner = "central machine"
    _chance: Array

    def expected(self, v: int) -> list[Expected]:
        end, p, rounds = self.endpoint, self.plan.n_params, self.plan.rounds
        down = end.expected(Kind.DOWN, v, 2 * p + 1, 1, rounds)
        return [down, end.expected(Kind.RESULT, v, p, rounds, rounds)]

    def begin(self, shard: Shard) -> int | None:
        """Wait for S. A round may be repeated, by S itself or after S has restored its checkpoint."""
        end, plan, patience = self.endpoint, self.plan, self.endpoint.patience
        heard = time.monotonic()
        next_pull = heard + patience.first_pull
        while end.inbox.missing(Kind.RESULT, [self.plan.federation_size], plan.rounds):
            message, now = end.inbox.newest(Kind.DOWN, self.plan.federation_size, LOOK_SECONDS), time.monotonic()
            if message is not None:
                t, values = message
                theta, pull, self._chance = np.split(values, [plan.n_params, 2 * plan.n_params])
                shard.take_pull(theta[None], pull[None])
                end.status.round = t
                return t
            if now >= next_pull or end.hint:
                end.hint = False
                end.pull(Kind.DOWN, self.plan.federation_size, 0)
                end.pull(Kind.RESULT, self.plan.federation_size, 0)
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
        return self.endpoint.inbox.values(Kind.RESULT, self.plan.federation_size, self.plan.rounds)

    def linger(self, save: Callable[[], None]) -> None:
        return


class ReplicatedLink(AttendedLink):
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
        self.decides = self.plan.here == self.plan.leader
        self.keeps_state = self.decides
        self.record = record if self.decides else None
        self._own = self.members.index(self.plan.here)
        self._thetas: dict[int, Array] = {}
        self._replica = 0, shard.state(), self.seen

    def open(self) -> None:
        self._replica = self.done, self.shard.state(), self.seen
        super().open()

    def expected(self, v: int) -> list[Expected]:
        end, plan, t, m = self.endpoint, self.plan, self.done + 1, len(self.members)
        if v != plan.leader:
            return super().expected(v)
        length = (5 * m + self.shard.edges.shape[0]) * plan.n_params + m
        present = end.expected(Kind.PRESENT, v, m, t, t + 1, bound=1.0, bound_kind="max")
        return [*super().expected(v), present, end.expected(Kind.REPLICA, v, length, t, plan.rounds)]

    def answer(self, kind: Kind, v: int, t: int) -> bytes | None:
        if kind is not Kind.REPLICA:
            return super().answer(kind, v, t)
        done, state, seen = self._replica  # of a round that is over, also while the next one is computed
        return None if done < t else self.endpoint.frame(kind, done, replica_vector(state, seen))

    def gather(self) -> None:
        if self.decides and self.done < self.plan.rounds:
            patience = self.endpoint.patience
            self.endpoint.gather(patience.gather if self.done == 0 else patience.deadline)

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array] | None:
        end, here = self.endpoint, self.plan.here
        end.status.round = t
        own = shard.theta[self._own].copy()
        end.inbox.advance(Kind.THETA, t, t + 1)
        if self.decides:
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
        if self.decides:
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
