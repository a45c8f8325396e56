"""All shards in one process: the reference for every engine that puts them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedkin.admm.gradients import DeviceRows, GradientKind, Gradients, SampleStream
from fedkin.admm.shard import Average, Shard, StepRule
from fedkin.objective import Penalty

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RunPlan:
    """All that the devices of a run agree on, for V devices and E edges.

    Attributes
    ----------
    rows : DeviceRows
        Of all devices.
    edges : int array (E, 2)
    edge_radius : array (E,)
    penalty : Penalty
    rho : float
    steps : StepRule
    seed : int
    gradient : "plain" | "saga" | "svrg"
    snapshot_every : int
    average : "tail" | "paper" | "last"
    sparsity : array (V, p) or None
    radius : float or None
    """

    rows: DeviceRows
    edges: Index
    edge_radius: Array
    penalty: Penalty
    rho: float
    steps: StepRule
    seed: int
    gradient: GradientKind
    snapshot_every: int
    average: Average
    sparsity: Array | None = None
    radius: float | None = None

    @property
    def n_devices(self) -> int:
        return int(self.rows.starts.size)


class LocalShards:
    """Shards side by side in one process, exchanging thetas through memory.

    Parameters
    ----------
    plan : RunPlan
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
        plan: RunPlan,
        hosts: Index,
        theta: Array,
        alpha: Array | None = None,
        streams: Mapping[int, SampleStream] | None = None,
    ) -> None:
        self.plan, self.hosts, self.streams = plan, hosts, dict(streams or {})
        shape = (plan.rows.X.shape[0], plan.rows.table_width()) if plan.gradient == "saga" else (0, 1)
        #: SAGA's memory, shared by the shards like the rows are.
        self.table = np.zeros(shape)
        self.shards = []
        self._edge_numbers = []
        for host in np.unique(hosts):
            members = np.flatnonzero(hosts == host)
            numbers = np.flatnonzero((hosts[plan.edges] == host).any(axis=1))
            self.shards.append(self._shard(members, numbers, theta, alpha))
            self._edge_numbers.append(numbers)

    def _shard(self, members: Index, edges: Index, theta: Array, alpha: Array | None) -> Shard:
        plan = self.plan
        alone = members.size == plan.n_devices
        rows = plan.rows if alone else rows_of(plan.rows, members)
        steps = StepRule(plan.steps.start[members], plan.steps.growth[members], plan.steps.damping[members])
        streams = {k: self.streams[int(u)] for k, u in enumerate(members) if int(u) in self.streams}
        gradients = Gradients(
            rows, plan.seed, plan.gradient, snapshot_every=plan.snapshot_every, table=self.table, streams=streams
        )
        shard = Shard(
            members,
            plan.edges[edges],
            plan.edge_radius[edges],
            plan.penalty,
            plan.rho,
            steps,
            gradients,
            theta[members],
            alpha=None if alpha is None else alpha[edges],
            sparsity=None if plan.sparsity is None else plan.sparsity[members],
            radius=plan.radius,
            average=plan.average,
        )
        shard.take(shard.foreign, theta[shard.foreign])
        return shard

    def run(self, first: int, count: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Do ``count`` rounds from ``first`` on; presence and probabilities ``(count, V)`` when devices come and go."""
        for k in range(count):
            for shard in self.shards:
                here = None if available is None else available[k, shard.devices]
                chance = None if probability is None else probability[k, shard.devices]
                shard.node_step(first + k, here, chance)
            self._exchange()
            for shard in self.shards:
                shard.edge_step()

    def _exchange(self) -> None:
        if len(self.shards) == 1:
            return
        post = np.empty((self.plan.n_devices, self.plan.rows.ridge.size))
        for shard in self.shards:
            positions, theta = shard.give()
            post[positions] = theta
        for shard in self.shards:
            shard.take(shard.foreign, post[shard.foreign])

    # --- the whole picture ---

    def gather(self, name: str) -> Array:
        """A part of the shards' state (see `Shard.state`) for all devices ``(V, p)``, or all edges ``(E, p)``."""
        p = self.plan.rows.ridge.size
        if name == "alpha":
            alpha = np.empty((self.plan.edges.shape[0], p))
            for shard, numbers in zip(self.shards, self._edge_numbers, strict=True):
                alpha[numbers] = shard.alpha
            return alpha
        out = np.empty((self.plan.n_devices, p))
        for shard in self.shards:
            out[shard.devices] = getattr(shard, name)
        return out

    @property
    def looked(self) -> Index:
        """Rows that each device has looked at, ``(V,)``."""
        out = np.empty(self.plan.n_devices, dtype=np.int64)
        for shard in self.shards:
            out[shard.devices] = _gradients(shard).looked
        return out

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Everything that changes, in the federation's order; how devices are spread over shards does not show."""
        state: dict[str, NDArray[np.generic]] = {name: self.gather(name) for name in _SHARD_STATE}
        for name in self._gradient_state():
            parts = [getattr(_gradients(shard), name) for shard in self.shards]
            whole = np.empty((self.plan.n_devices, *parts[0].shape[1:]), dtype=parts[0].dtype)
            for shard, part in zip(self.shards, parts, strict=True):
                whole[shard.devices] = part
            state[name] = whole
        state["table"] = self.table
        state["streamed"] = np.array([self.streams[u].used for u in sorted(self.streams)], dtype=np.int64)
        return state

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        """Go back to a `state`, of this or another number of shards. Streams must stand at their beginning."""
        self.table[...] = state["table"]
        for u, used in zip(sorted(self.streams), state["streamed"].tolist(), strict=True):
            self.streams[u].skip(used)
        for shard, numbers in zip(self.shards, self._edge_numbers, strict=True):
            own = {name: np.asarray(state[name], dtype=np.float64)[shard.devices] for name in _SHARD_STATE[:-1]}
            own["alpha"] = np.asarray(state["alpha"], dtype=np.float64)[numbers]
            shard.restore(own, np.asarray(state["theta"], dtype=np.float64)[shard.foreign])
            for name in self._gradient_state():
                getattr(_gradients(shard), name)[...] = state[name][shard.devices]

    def _gradient_state(self) -> tuple[str, ...]:
        kind = self.plan.gradient
        anchors = {"plain": (), "saga": ("anchor_gradient",), "svrg": ("anchor_gradient", "anchor_theta", "stale")}
        return ("looked", *anchors[kind])


#: What `Shard.state` holds, alpha last.
_SHARD_STATE = ("theta", "balance", "balance_before", "average", "average_balance", "alpha")


def split_evenly(n_devices: int, shards: int) -> Index:
    """Hosts ``(V,)``: contiguous pieces of as equal size as possible."""
    return np.arange(n_devices) * shards // n_devices


def _gradients(shard: Shard) -> Gradients:
    assert shard.gradients is not None
    return shard.gradients


def rows_of(rows: DeviceRows, members: Index) -> DeviceRows:
    """The part of ``rows`` that belongs to some devices; the arrays of rows are shared."""
    losses = [rows.losses[u] for u in members]
    return DeviceRows(
        rows.X,
        rows.y,
        rows.offset,
        rows.starts[members],
        rows.counts[members],
        rows.keys[members],
        losses,
        rows.batch[members],
        rows.ridge,
    )
