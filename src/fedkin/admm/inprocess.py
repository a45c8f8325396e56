"""All shards in one process: the reference for every engine that puts them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask, check_whole
from fedkin.admm.gradients import Gradients, SampleStream
from fedkin.admm.plan import Plan
from fedkin.admm.rounds import Attendance, Course, DirectLink, run_rounds
from fedkin.admm.shard import Shard, ShardState
from fedkin.errors import ParameterError


class LocalShards:
    """Shards side by side in one process; together they behave like one (`fedkin.admm.rounds.Hosted`).

    Parameters
    ----------
    plan : Plan
        Of all devices.
    hosts : int array (V,)
        Number of the shard that hosts each device.
    theta : array (V, p)
        Where the devices start.
    alpha : array (E, p), optional
        Where the edge duals start.
    streams : mapping {device number: SampleStream}
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
        self.devices = np.arange(plan.n_devices)
        shape = (plan.rows.data.n_samples, plan.rows.table_width()) if plan.gradient == "saga" else (0, 1)
        #: SAGA's memory, shared by the shards like the rows are.
        self.table = np.zeros(shape)
        self.shards: list[Shard] = []
        for host in np.unique(hosts):
            members = np.flatnonzero(hosts == host)
            self.shards.append(
                plan.shard(members, theta=theta[members], alpha=alpha, table=self.table, streams=self.streams)
            )
        self._edge_numbers = [np.flatnonzero(np.isin(plan.edges, one.devices).any(axis=1)) for one in self.shards]

    def run(self, first: int, count: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Do ``count`` rounds from ``first`` on; presence and probabilities ``(count, V)`` when devices come and go."""
        attendance = None
        if available is not None and probability is not None:
            attendance = Attendance(first, available, probability)
        hosted: Shard | LocalShards = self.shards[0] if len(self.shards) == 1 else self
        run_rounds(hosted, DirectLink(), None, Course(first + count - 1), first - 1, attendance)

    # --- as one shard ---

    @property
    def theta(self) -> Array:
        """Parameters ``(V, p)`` of all devices."""
        return self.gather("theta")

    def node_step(self, t: int, available: Mask | None = None, probability: Array | None = None) -> None:
        for shard in self.shards:
            here = None if available is None else available[shard.devices]
            shard.node_step(t, here, None if probability is None else probability[shard.devices])

    def round_thetas(self) -> None:
        for shard in self.shards:
            shard.round_thetas()

    def give(self) -> tuple[Index, Array]:
        given = [shard.give() for shard in self.shards]
        return np.concatenate([positions for positions, _ in given]), np.concatenate([theta for _, theta in given])

    def take(self, positions: Index, theta: Array) -> None:
        post = np.empty((self.plan.n_devices, theta.shape[1]))
        post[positions] = theta
        for shard in self.shards:
            shard.take(shard.foreign, post[shard.foreign])

    def edge_step(self) -> None:
        for shard in self.shards:
            shard.edge_step()

    # --- the whole picture ---

    def gather(self, name: str) -> Array:
        """A part of the shards' state (see `ShardState`) for all devices ``(V, p)``, or all edges ``(E, p)``."""
        if name == "alpha":
            parts, numbers = [shard.alpha for shard in self.shards], self._edge_numbers
            return _gathered(parts, numbers, self.plan.edges.shape[0])
        return _gathered([getattr(one, name) for one in self.shards], self._members(), self.plan.n_devices)

    @property
    def looked(self) -> Index:
        """Rows that each device has looked at, ``(V,)``."""
        return _gathered([_gradients(one).looked for one in self.shards], self._members(), self.plan.n_devices)

    def _members(self) -> list[Index]:
        return [shard.devices for shard in self.shards]

    def _lines(self) -> dict[str, tuple[list[Index], int]]:
        """Where the lines of each part of a shard's state belong in that of all, and how many there are."""
        members, kind, rows = self._members(), self.plan.gradient, self.plan.rows
        devices, none = (members, self.plan.n_devices), ([np.empty(0, dtype=np.int64)] * len(members), 0)
        own = [np.concatenate([np.arange(rows.starts[u], rows.starts[u] + rows.counts[u]) for u in m]) for m in members]
        return dict.fromkeys(ShardState.__dataclass_fields__, devices) | {
            "alpha": (self._edge_numbers, self.plan.edges.shape[0]),
            "table": (own, rows.data.n_samples) if kind == "saga" else none,
            "anchor_gradient": none if kind == "plain" else devices,
            "anchor_theta": devices if kind == "svrg" else none,
        }

    def state(self) -> ShardState:
        """Everything that changes, in the federation's order; how devices are spread over shards does not show."""
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


def split_evenly(n_devices: int, shards: int) -> Index:
    """Hosts ``(V,)``: contiguous pieces of as equal size as possible."""
    return np.arange(n_devices) * shards // n_devices


def hosts_of(shards: int | Sequence[int], n_devices: int) -> Index:
    """The shard of each device, ``(V,)``."""
    if np.ndim(shards) == 0:
        check_whole("shards", shards, least=1)
        return split_evenly(n_devices, min(int(np.asarray(shards)), n_devices))
    hosts = np.asarray(shards)
    if hosts.shape != (n_devices,) or hosts.dtype.kind not in "iu":
        raise ParameterError(
            f"shards must be a whole number or one for each of the {n_devices} devices, got {shards!r}"
        )
    return hosts.astype(np.int64)
