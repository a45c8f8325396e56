"""One device in the field: a shard of one, a transport, and a checkpoint.

A round is: node step, tell the neighbours theta, wait for theirs, edge step. How devices keep in step, and why crashes
do no harm, is in `fedkin.federate.lockstep`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.admm import ShardState
from fedkin.data import Rows
from fedkin.errors import DataError, ModelFileError, SolverError
from fedkin.federate.contract.computation import shard_of
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.contract.plans import TOO_LONG
from fedkin.federate.journal import Journal
from fedkin.federate.links.memory import Transport
from fedkin.federate.lockstep import Arrays, Lockstep, Patience, keys_of
from fedkin.federate.messages import Expected, Kind

Array = NDArray[np.float64]

#: Differences between the replicas of an edge dual up to this share of its bound are rounding of different processors.
SAME_DUAL = 1e-9
_BOUND_KIND = {"l1": "max", "l2": "length", "linf": "sum"}  # dual norms of the penalties


class Device(Lockstep):
    """A device process without the process: `run` does all rounds.

    Parameters
    ----------
    manifest : Manifest
    position : int
        Which device this is.
    rows : Rows
        Its rows.
    transport : Transport
    journal : Journal
    checkpoint : path, optional
        Where its state is kept.
    patience : Patience
    left : set of int
        Positions of neighbours that have left for good.
    tick : callable, optional
        Called after every round and twice a second while waiting; it may raise `fedkin.federate.lockstep.Stopped`.
    """

    def __init__(
        self,
        manifest: Manifest,
        position: int,
        rows: Rows,
        transport: Transport,
        journal: Journal,
        *,
        checkpoint: Path | None = None,
        patience: Patience | None = None,
        left: frozenset[int] = frozenset(),
        tick: Callable[[Device], None] | None = None,
    ) -> None:
        self.rows = rows
        self.shard = shard_of(manifest, {position: rows})
        neighbours = self.shard.foreign.tolist()
        super().__init__(
            manifest, position, neighbours, transport, journal, checkpoint=checkpoint, patience=patience, tick=tick
        )
        self.load()
        if left:
            self.drop(left)
        self.open()

    def run(self) -> Array:
        """Do all rounds that are left, and return the averaged parameters ``(p,)``."""
        self.run_rounds()
        return np.asarray(self.shard.average[0])

    def step(self, t: int) -> Array:
        before = self.shard.theta[0].copy()
        with np.errstate(over="ignore", invalid="ignore"):
            self.shard.node_step(t)
        if self.manifest.wire == "float32":
            # both ends of an edge must compute with the same numbers: what is sent is what is used
            self.shard.round_thetas()
        theta: Array = self.shard.theta[0].copy()
        if not np.isfinite(theta).all():
            raise SolverError(f"round {t}: the parameters of device {self.names[self.position]!r} diverged: {TOO_LONG}")
        self.status.change = float(np.abs(theta - before).max(initial=0.0))
        return theta

    def learn(self, t: int) -> None:
        if self.neighbours:
            thetas = np.stack([self.inbox.values(Kind.THETA, v, t) for v in self.neighbours])
            self.shard.take(self.shard.foreign, thetas)
        self.shard.edge_step()
        if self.manifest.compare_every and t % self.manifest.compare_every == 0:
            self._compare_duals(t)

    # --- edge duals ---

    def expected(self, v: int) -> list[Expected]:
        if v > self.position or not self.manifest.compare_every:
            return super().expected(v)
        t, edge = self.done + 1, self.shard.edges.tolist().index([self.position, v])
        bound, kind = float(self.shard.edge_radius[edge]), _BOUND_KIND[self.manifest.penalty]
        # duals are compared as they are; only thetas are rounded on the way
        dual = Expected(
            self.run_bytes,
            Kind.ALPHA,
            v,
            self.manifest.n_params,
            t,
            t + 1,
            "float64",
            bound,
            kind,  # type: ignore[arg-type]
        )
        return [*super().expected(v), dual]

    def _compare_duals(self, t: int) -> None:
        """Compare the replicas of each edge dual; the end with the smaller position is right by definition."""
        for edge, (i, j) in enumerate(self.shard.edges.tolist()):
            if j == self.position:
                key = keys_of(self.manifest, j, i)[Kind.ALPHA]
                self.transport.publish(key, self._frame(Kind.ALPHA, t, self.shard.alpha[edge]))
        self._remember(Kind.ALPHA, t, self.shard.alpha.ravel())
        lower = [v for v in self.neighbours if v < self.position]
        self.inbox.advance(Kind.ALPHA, t, t + self.manifest.compare_every)
        self._await(Kind.ALPHA, lower, t)
        alpha = self.shard.alpha.copy()
        for edge, (_, j) in enumerate(self.shard.edges.tolist()):
            if j == self.position:
                continue
            theirs = self.inbox.values(Kind.ALPHA, j, t)
            difference = float(np.abs(theirs - alpha[edge]).max(initial=0.0))
            if difference > SAME_DUAL * self.shard.edge_radius[edge]:
                self.journal.write("warning", "edge dual repaired", peer=self.names[j], round=t, difference=difference)
                self.status.repaired += 1
            alpha[edge] = theirs
        if alpha.tobytes() != self.shard.alpha.tobytes():
            self.shard.take_duals(alpha)

    def _answer_with(self, kind: Kind, v: int, t: int, values: Array) -> bytes | None:
        if kind is Kind.ALPHA:
            own = np.flatnonzero((self.shard.edges == v).any(axis=1))
            duals = values.reshape(-1, self.manifest.n_params)
            return self._frame(kind, t, duals[own[0]]) if own.size else None
        return self._frame(kind, t, values)

    def drop(self, gone: frozenset[int]) -> None:
        """Go on without neighbours that have left for good: their edges leave the objective, with duals set to 0.

        Only the device's own part changes, so neighbours of the same leaver need not agree on the round.
        """
        gone = (gone & set(self.neighbours)) - self.left
        if not gone:
            return
        self.left = self.left | gone
        self.shard.drop(gone)
        self.neighbours = [v for v in self.neighbours if v not in gone]
        for v in sorted(gone):
            self.inbox.forget(v)
            self.journal.write("warning", "edge dropped", peer=self.names[v], round=self.done)

    # --- checkpoints ---

    def state(self) -> Arrays:
        return dict(vars(self.shard.state()))

    def restore(self, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any]) -> None:
        if header["left"]:
            self.drop(frozenset(header["left"]))
        try:
            self.shard.restore(ShardState(**{name: arrays[name] for name in ShardState.__dataclass_fields__}))
        except DataError:
            raise ModelFileError(
                f"{self.checkpoint} was written with another number of rows: put the rows of before back into "
                "rows.npz, or make the federation again with fedkin peer init"
            ) from None
