"""Run the compiled iteration on shards of an engine.

An edge between two shards is stored in both. Each iteration exchanges only ``ahead`` of the sites at such edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fedkin._base import Array, Index
from fedkin.cluster import Cut, Engine, Host, cut_graph
from fedkin.core import FusedObjective, QuadraticTerms, make_penalty, sum_groups
from fedkin.graph import Graph
from fedkin.solvers import pdhg_kernels as kernels
from fedkin.solvers.compiled import CompiledIteration, KernelProblem, Numbering
from fedkin.solvers.pdhg import RELAXATION, Iteration, Moves, PrimalDual

#: Stands for the parameters that `ShardedIteration.fused` leaves in the shards.
_FUSED = np.empty((0, 0))


class SolverShard(CompiledIteration):
    """One shard; ``give`` and ``take`` number the sites that each neighbour needs and hosts, ``border`` are both."""

    _groups: kernels.Groups

    def __init__(
        self, host: Host, part: KernelProblem, give: Mapping[int, Index], take: Mapping[int, Index], border: Index
    ) -> None:
        self._host, self._give, self._take, self._border = host, give, take, border
        #: Number of edges between hosted sites, which come first.
        self._inner = int((np.maximum(part.head, part.tail) < part.linked.size).sum())
        self._stand(part, 1)

    @staticmethod
    def prepare() -> None:
        """Load the kernels."""
        kernels.load_kernels()

    def is_regular(self) -> bool:
        """Return whether every hosted site has its own minimiser."""
        return self.regular

    def value_and_gap(self, fused: bool, theta: Array | None = None) -> tuple[float, float]:
        """Return this shard's part of value and gap, optionally at other parameters ``theta (n_known, p)``."""
        if fused:
            return self.certificate(self._state.ahead)
        if theta is None:
            self._post(self._state.x)
            self._collect(self._state.x)
        return self.certificate(theta)

    def parts(self, fused: bool, duals: bool) -> tuple[Array, ...]:
        """Return parameters of hosted sites and, on request, counted edge duals, site duals and balances."""
        part, (x, y, z, s, ahead) = self._part, self._state
        hosted = part.linked.size
        theta = (ahead if fused else x)[:hosted]
        return (theta, y[: part.n_counted], z, s[0, :hosted]) if duals else (theta,)

    def group(self) -> tuple[NDArray[Any], ...]:
        """Group hosted sites that should be equal; return groups, sums, sizes and zeros of sites on the border."""
        self._groups = parent, size, zero, out = self._group_sums()
        roots, columns = parent[self._border], np.arange(out.shape[1])
        zeros = zero[roots, columns] if zero.size else zero
        return roots, out[roots, columns], size[roots, columns[: size.shape[1]]], zeros

    def fuse(self, sums: Array, sizes: Array, zeros: NDArray[np.bool_]) -> None:
        """Replace parameters by means over groups, given those of groups on the border."""
        parent, size, zero, out = self._groups
        roots, columns = parent[self._border], np.arange(out.shape[1])
        out[roots, columns], size[roots, columns[: size.shape[1]]] = sums, sizes
        if zero.size:
            zero[roots, columns] = zeros
        kernels.group_means(0, out.shape[1], self._groups)
        if self._part.ball < np.inf:
            out[:] = make_penalty("l2").project(out, self._part.ball)
        del self._groups

    def state(self) -> dict[str, Array]:
        """Return the mutable state."""
        hosted, (x, y, z, _, _) = self._part.linked.size, self._state
        return {"x": x[:hosted], "y": y, "z": z, "rho": self.rho}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restore a `state`."""
        self._state.x[: self._part.linked.size] = state["x"]
        self._state.y[:], self._state.z[:] = state["y"], state["z"]
        self.balance_duals()
        self.set_rho(state["rho"])

    def _shared_step(self, relax: float, moves: Array) -> None:
        sites, edges, rho, state = self._sites, self._edges, self._rho, self._state
        (_, y, _, s, ahead), counted, hosted = state, self._part.n_counted, self._part.linked.size
        s[:, hosted:] = 0.0  # balances of sites hosted elsewhere are not needed
        kernels.node_step(0, hosted, sites, rho, self._resolvent, state, relax, moves[0])
        self._post(ahead)
        # while messages travel, the edges within this shard take their step
        for lo, hi, whole in ((0, self._inner, False), (self._inner, len(y), True)):
            if whole:
                self._collect(ahead)
            if moves.size:
                kernels.edge_moves(lo, min(hi, counted), edges, rho, ahead, y, moves[0])
            kernels.edge_step(lo, hi, edges, rho, ahead, y, s[0], relax)

    def _post(self, values: Array) -> None:
        """Send values ``(n_known, p)`` of the sites that other shards need."""
        self._host.post({number: values[sites] for number, sites in self._give.items()})

    def _collect(self, values: Array) -> None:
        """Receive values ``(n_known, p)`` of sites hosted by other shards."""
        for number, theirs in self._host.collect(self._give).items():
            values[self._take[number]] = theirs


class Sharding:
    """Shards of a graph on an engine, reused by successive iterations."""

    def __init__(self, engine: Engine, graph: Graph) -> None:
        self.engine, self._graph = engine, graph
        self.shards: Any = None

    @cached_property
    def cuts(self) -> Sequence[Cut]:
        """The layout of each shard."""
        graph = self._graph
        return cut_graph(graph.n_sites, graph.edges, self.engine.workers, Numbering(graph).sites)

    def iteration(
        self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: PrimalDual | None
    ) -> ShardedIteration:
        """Start an iteration and stop the previous one."""

        def make(k: int) -> tuple[type[SolverShard], Sequence[object]]:
            cut = self.cuts[k]
            own, sizes = cut.sites[: cut.hosted], (cut.sites.size, cut.counted)
            part = KernelProblem(objective, quadratic, start, own, cut.edges, cut.ends, *sizes)
            return SolverShard, (part, cut.give, cut.take, cut.border)

        if self.shards is None:
            count = min(self.engine.workers, self._graph.n_sites)
            self.shards = self.engine.shards(make, count, SolverShard.prepare)
        else:
            self.shards.remake(make)
        return ShardedIteration(self, objective, rho)

    def close(self) -> None:
        """Stop the shards."""
        if self.shards is not None:
            self.shards.close()


class ShardedIteration(Iteration):
    """`fedkin.solvers.compiled.CompiledIteration` on shards, with sites in the caller's order."""

    def __init__(self, sharding: Sharding, objective: FusedObjective, rho: Array) -> None:
        self._sharding, self._shards, self._objective = sharding, sharding.shards, objective
        self.regular = all(self._shards.call("is_regular", changes=False))
        self._unsaved = 0
        super().__init__(rho)

    def set_rho(self, rho: Array) -> None:
        self.rho = rho
        self._shards.call("set_rho", rho)

    def balance_duals(self) -> None:
        """Do nothing: shards finish their steps."""

    def run(self, n: int, last: float, measure: bool) -> Moves | None:
        every = self._sharding.engine.save_every
        while n > 0:
            steps = min(n, every - self._unsaved)
            n -= steps
            found = self._shards.call("run", steps, RELAXATION if n else last, measure and not n)
            self._unsaved += steps
            if self._unsaved == every:
                self._shards.save()
                self._unsaved = 0
        if not measure:
            return None
        dual, primal = (np.sum([moves[k] for moves in found], axis=0) for k in (0, 1))
        return dual, primal

    def _gathered(self, fused: bool, duals: bool) -> list[Array]:
        """Return parameters and, if asked for, edge duals, site duals and balances in the caller's order."""
        cuts, found = self._sharding.cuts, self._shards.call("parts", fused, duals, changes=False)
        (n, p), rows = (sum(cut.hosted for cut in cuts), found[0][0].shape[1]), self._objective.graph.n_edges
        out = [np.empty((size, p)) for size in ((n, rows, n if found[0][2].size else 0, n) if duals else (n,))]
        for cut, parts in zip(cuts, found, strict=True):
            own = cut.sites[: cut.hosted]
            for k, (whole, part) in enumerate(zip(out, parts, strict=True)):
                if whole.size:
                    whole[cut.edges[: cut.counted] if k == 1 else own] = part
        return out

    def inside(self) -> Array | None:
        return None if self._objective.radius is None else self._objective.inside(self._gathered(False, False)[0])

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        other = theta is not None and theta is not _FUSED
        each = [(theta[cut.sites],) for cut in self._sharding.cuts] if theta is not None and other else None
        found = self._shards.call("value_and_gap", theta is _FUSED, each=each, changes=False)
        return sum(value for value, _ in found), sum(gap for _, gap in found)

    def fused(self) -> Array:
        """Fuse sites in the shards, which keep the parameters; only groups at sites of several shards meet here."""
        self._shards.call("fuse", each=_merged(self._sharding.cuts, self._shards.call("group")))
        return _FUSED

    def pair(self, theta: Array | None = None) -> PrimalDual:
        x, alpha, zeta, balance = self._gathered(theta is _FUSED, True)
        theta = x if theta is None or theta is _FUSED else theta
        return PrimalDual(theta, alpha, zeta if zeta.size else None, balance, self.rho)


def _merged(cuts: Sequence[Cut], found: Sequence[Sequence[NDArray[Any]]]) -> list[list[NDArray[Any]]]:
    """Return sums, sizes and zeros of the groups on the border of each shard, over all shards."""
    roots, sums, sizes, zeros = (np.concatenate(part) for part in zip(*found, strict=True))
    counts = [cut.border.size for cut in cuts]
    _, site = np.unique(np.concatenate([cut.sites[cut.border] for cut in cuts]), return_inverse=True)
    roots = roots + np.repeat(np.cumsum([0, *(cut.sites.size for cut in cuts[:-1])]), counts)[:, None]
    for k in range(roots.shape[1] if site.size else 0):
        # groups of different shards are one if they share a site
        _, first, group = np.unique(roots[:, k], return_index=True, return_inverse=True)
        n = first.size + site.size
        shared = coo_array((np.ones(site.size, dtype=np.int8), (group, first.size + site)), shape=(n, n))
        count, joined = connected_components(shared, directed=False)
        labels = joined.astype(np.int64)
        columns = slice(k, k + 1) if roots.shape[1] > 1 else slice(None)
        for values in (sums[:, columns], sizes[:, k : k + 1], *([zeros[:, columns]] if zeros.size else [])):
            values[:] = sum_groups(values[first], labels[: first.size], count)[labels[group]]
    ends = np.cumsum(counts[:-1])
    return [list(part) for part in zip(*(np.split(values, ends) for values in (sums, sizes, zeros)), strict=True)]
