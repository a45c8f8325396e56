"""The iteration on shards: each hosts some sites and every edge that touches them, on kernels, wherever an engine runs.

An edge between two shards is in both, which take the same step from the same two parameters: only ``ahead`` of the
sites at such edges travels, once an iteration, from shard to shard. Sums over edges count it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index
from fedkin.cluster import Engine, Peers, partition
from fedkin.core import FusedObjective, QuadraticTerms
from fedkin.graph import Graph
from fedkin.solvers import kernels
from fedkin.solvers.compiled import CompiledIteration, Numbering, Part
from fedkin.solvers.pdhg import INTERIOR, RELAXATION, Iteration, Moves, PrimalDual, weights_of_sites


class SolverShard(CompiledIteration):
    """One shard. ``give`` and ``take`` are its numbers of the sites that each neighbour needs, and hosts."""

    def __init__(self, peers: Peers, part: Part, give: Mapping[int, Index], take: Mapping[int, Index]) -> None:
        self._peers, self._give, self._take = peers, give, take
        self._stand(part, 1)

    def is_regular(self) -> bool:
        """Return whether every hosted site has a minimiser of its own."""
        return self.regular

    def set_rho(self, rho: Array) -> None:
        """Set ``rho (p,)`` or ``(1,)``."""
        self._set_rho(rho)

    def run(self, n: int, last: float, measure: bool) -> Moves | None:
        """Take ``n`` steps, all over-relaxed but the last."""
        return self._run(n, last, measure)

    def value_and_gap(self, theta: Array | None = None) -> tuple[float, float]:
        """Return this shard's part of value and gap, also of other parameters ``theta (n_known, p)``."""
        if theta is None:
            self._meet(self._state.x)
        return self.certificate(theta)

    def parts(self, duals: bool) -> tuple[Array, ...]:
        """Return parameters of hosted sites and, if asked for, counted edge duals, site duals and balances."""
        part, (x, y, z, s, _) = self._part, self._state
        hosted = part.linked.size
        return (x[:hosted], y[: part.n_counted], z, s[0, :hosted]) if duals else (x[:hosted],)

    def free(self) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """Return 0 where counted edge duals, and site duals, are inside their balls, 1 elsewhere, for `fuse`."""
        part, y, z = self._part, self._state.y, self._state.z
        limit, y = (1.0 - INTERIOR) * part.radius[: part.n_counted, None], y[: part.n_counted]
        size = np.abs(y)
        if part.kind != kernels.L1:
            size = np.sqrt((y * y).sum(axis=1))[:, None] if part.kind == kernels.L2 else size.sum(axis=1)[:, None]
        inside = np.abs(z) < (1.0 - INTERIOR) * part.box
        return (size >= limit).astype(np.int8), (~inside).astype(np.int8)

    def state(self) -> dict[str, Array]:
        """Return everything that changes."""
        hosted, (x, y, z, _, _) = self._part.linked.size, self._state
        return {"x": x[:hosted], "y": y, "z": z, "rho": self.rho}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go back to a `state`."""
        self._state.x[: self._part.linked.size] = state["x"]
        self._state.y[:], self._state.z[:] = state["y"], state["z"]
        self._balance_duals()
        self._set_rho(state["rho"])

    def _meet(self, values: Array) -> None:
        self._state.s[:, self._part.linked.size :] = 0.0  # nobody needs the balances of others
        found = self._peers.exchange({number: values[sites] for number, sites in self._give.items()})
        for number, theirs in found.items():
            values[self._take[number]] = theirs


@dataclass(frozen=True, eq=False)
class Cut:
    """One shard of a graph: the numbers of its sites and edges, and of the sites that other shards need or host."""

    sites: Index  # hosted ones first
    hosted: int
    edges: Index  # counted ones first
    counted: int
    ends: Index  # (E, 2), local numbers
    give: dict[int, Index]
    take: dict[int, Index]

    @classmethod
    def of(cls, edges: Index, labels: Index, order: Index, k: int) -> Cut:
        """Return shard ``k`` of sites with ``labels (V,)``, hosted in an ``order`` that keeps neighbours close."""
        own = order[labels[order] == k]
        first, second = (labels[edges] == k).T
        chosen = np.concatenate([np.flatnonzero(first), np.flatnonzero(second & ~first)])
        ends = edges[chosen]
        crossing = ends[labels[ends[:, 0]] != labels[ends[:, 1]]]
        here = labels[crossing] == k
        mine, theirs = crossing[here], crossing[~here]
        others = np.unique(theirs)
        place = np.empty(labels.size, dtype=np.int64)
        place[own], place[others] = np.arange(own.size), own.size + np.arange(others.size)
        shard_of = labels[theirs]
        give = {int(r): place[np.unique(mine[shard_of == r])] for r in np.unique(shard_of)}
        take = {r: place[others[labels[others] == r]] for r in give}
        return cls(np.concatenate([own, others]), own.size, chosen, int(first.sum()), place[ends], give, take)

    def part(self, objective: FusedObjective, quadratic: QuadraticTerms, start: PrimalDual | None) -> Part:
        """Return what the shard starts from."""
        own, edges, box = self.sites[: self.hosted], self.edges, objective.box
        if start is not None:
            zeta, nothing = None if start.zeta is None else start.zeta[own], np.empty((0, quadratic.n_params))
            start = PrimalDual(start.theta[own], start.alpha[edges], zeta, nothing, start.rho)
        head, tail = np.ascontiguousarray(self.ends.T.astype(np.int32))
        return Part(
            terms=quadratic.take(own),
            order=np.arange(self.hosted),
            n_known=self.sites.size,
            n_counted=self.counted,
            head=head,
            tail=tail,
            radius=objective.edge_radius[edges],
            kind=kernels.L1 if quadratic.n_params == 1 else kernels.KINDS[objective.penalty.name],
            b=quadratic.b[own],
            linked=weights_of_sites(objective)[own],
            box=np.empty((0, quadratic.n_params)) if box is None else box[own],
            ball=float(objective.radius or np.inf),
            start=start,
            in_order=True,
        )


class Sharding:
    """The shards of a graph on an engine, for one iteration after the other."""

    def __init__(self, engine: Engine, graph: Graph) -> None:
        self.engine, edges, order = engine, graph.edges, Numbering(graph).sites
        labels = partition(graph.n_sites, edges, min(engine.workers, graph.n_sites))
        self.cuts: Sequence[Cut] = [Cut.of(edges, labels, order, k) for k in np.unique(labels).tolist()]
        self.shards: Any = None

    def iteration(
        self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: PrimalDual | None
    ) -> ShardedIteration:
        """Return an iteration, which ends the one before."""

        def make(k: int) -> tuple[type[SolverShard], Sequence[object]]:
            cut = self.cuts[k]
            return SolverShard, (cut.part(objective, quadratic, start), cut.give, cut.take)

        if self.shards is None:
            self.shards = self.engine.shards(make, len(self.cuts))
        else:
            self.shards.remake(make)
        return ShardedIteration(self, objective, rho)

    def close(self) -> None:
        """End the shards."""
        if self.shards is not None:
            self.shards.close()


class ShardedIteration(Iteration):
    """`fedkin.solvers.compiled.CompiledIteration` on shards; sites are in the caller's order."""

    recovers = True

    def __init__(self, sharding: Sharding, objective: FusedObjective, rho: Array) -> None:
        self._sharding, self._shards, self._objective = sharding, sharding.shards, objective
        self.regular = all(self._shards.call("is_regular", changes=False))
        self._unsaved = 0
        super().__init__(rho)

    def _set_rho(self, rho: Array) -> None:
        self.rho = rho
        self._shards.call("set_rho", rho)

    def advance(self, n: int) -> None:
        try:
            super().advance(n)
        except KeyboardInterrupt:
            self._run(1, 1.0, measure=False)
            self.n_iter += 1
            raise

    def _run(self, n: int, last: float, measure: bool) -> Moves | None:
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

    def _gathered(self, duals: bool) -> list[Array]:
        """Return parameters and, if asked for, edge duals, site duals and balances in the caller's order."""
        cuts, found = self._sharding.cuts, self._shards.call("parts", duals, changes=False)
        (n, p), rows = (sum(cut.hosted for cut in cuts), found[0][0].shape[1]), self._objective.graph.n_edges
        out = [np.empty((size, p)) for size in ((n, rows, n if found[0][2].size else 0, n) if duals else (n,))]
        for cut, parts in zip(cuts, found, strict=True):
            own = cut.sites[: cut.hosted]
            for k, (whole, part) in enumerate(zip(out, parts, strict=True)):
                if whole.size:
                    whole[cut.edges[: cut.counted] if k == 1 else own] = part
        return out

    def inside(self) -> Array | None:
        return None if self._objective.radius is None else self._objective.inside(self._gathered(False)[0])

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        each = None if theta is None else [(theta[cut.sites],) for cut in self._sharding.cuts]
        found = self._shards.call("value_and_gap", each=each, changes=False)
        return sum(value for value, _ in found), sum(gap for _, gap in found)

    def fused(self) -> Array:
        x, cuts, graph = self._gathered(False)[0], self._sharding.cuts, self._objective.graph
        (n, p), box = x.shape, self._objective.box
        edges, sites = np.empty((graph.n_edges, p), dtype=np.int8), np.empty((0 if box is None else n, p), np.int8)
        for cut, (of_edges, of_sites) in zip(cuts, self._shards.call("free", changes=False), strict=True):
            edges[cut.edges[: cut.counted]] = of_edges
            if box is not None:
                sites[cut.sites[: cut.hosted]] = of_sites
        kind = kernels.L1 if p == 1 else kernels.KINDS[self._objective.penalty.name]
        head, tail = np.ascontiguousarray(graph.edges.T.astype(np.int32))
        # 0 is inside a ball of radius 1, 1 is not inside 1 - INTERIOR of it, in any norm
        known = kernels.Edges(head, tail, np.ones(graph.n_edges), kind)
        out, ones = np.empty_like(x), np.ones(sites.shape)
        kernels.fuse(0, p, known, edges, 1.0 - INTERIOR, sites, ones, x, out)
        return self._objective.inside(out)

    def pair(self, theta: Array | None = None) -> PrimalDual:
        x, alpha, zeta, balance = self._gathered(True)
        return PrimalDual(x if theta is None else theta, alpha, zeta if zeta.size else None, balance, self.rho)
