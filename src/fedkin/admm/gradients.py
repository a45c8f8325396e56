"""Mini-batch gradients of the hosted sites: plain, or with the variance taken out by SAGA or SVRG.

No matrix product runs across sites or rows: BLAS may cut such products differently for another number of sites or
threads. Products are taken element by element and summed along an axis of fixed length, so that a site's gradient
has the same bits wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedkin._base import AnyArray, Array, Index, Mask
from fedkin.admm.availability import draw_batches, round_states
from fedkin.admm.streams import SampleStream
from fedkin.data import Rows
from fedkin.errors import DataError
from fedkin.losses import Loss

GradientKind = Literal["plain", "saga", "svrg"]
GRADIENT_KINDS = ("plain", "saga", "svrg")

#: Table, anchor gradient, anchor theta, stale, looked.
Memory = tuple[Array, Array, Array, Mask, Index]

#: Batches of several rounds are drawn at once, up to this many row numbers.
_DRAW_AHEAD = 200_000


@dataclass(frozen=True, eq=False)
class SiteRows:
    """The rows of B hosted sites, and how many of them a round looks at.

    Rows of site number u are ``starts[u] : starts[u] + counts[u]`` of the N stacked rows in ``data``, which may
    include those of other sites. ``keys`` are from `site_keys`; ``batch`` is from 1 to ``counts``; ``ridge`` is
    ``(p,)``.
    """

    data: Rows
    starts: Index
    counts: Index
    keys: NDArray[np.uint64]
    losses: Sequence[Loss]
    batch: Index
    ridge: Array

    def take(self, sites: Index) -> SiteRows:
        """Return the part of some sites, given by number; the arrays of rows are shared."""
        parts: dict[str, Any] = {name: getattr(self, name)[sites] for name in ("starts", "counts", "keys", "batch")}
        return replace(self, **parts, losses=[self.losses[u] for u in sites])

    def of(self, site: int) -> Rows:
        """Return the rows of one site, given by number."""
        return self.data.take(slice(self.starts[site], self.starts[site] + self.counts[site]))

    def table_width(self) -> int:
        """Return how many numbers SAGA remembers of a row: its slopes, or its whole score where there are none."""
        kinds = {id(loss): loss for loss in self.losses}.values()
        return max(loss.compact_width(self.ridge.size) for loss in kinds)


class Gradients:
    """Gradient estimates of hosted sites, a function of (seed, site, round) and theta.

    ``snapshot_every`` is the number of rounds between the full passes of SVRG, the first in round 1.
    Sites in ``streams``, by number, see new samples in every round.
    """

    def __init__(
        self,
        rows: SiteRows,
        seed: int,
        kind: GradientKind = "plain",
        *,
        snapshot_every: int = 1,
        streams: Mapping[int, SampleStream] | None = None,
    ) -> None:
        self.rows, self.seed, self.kind, self.snapshot_every = rows, seed, kind, snapshot_every
        self.streams = dict(streams or {})
        shape = (rows.starts.size, rows.ridge.size)
        #: Mean gradient of the table (SAGA) or of the snapshot (SVRG), and the snapshot itself.
        self.anchor_gradient = np.zeros(shape if kind != "plain" else (0, shape[1]))
        self.anchor_theta = np.zeros(shape if kind == "svrg" else (0, shape[1]))
        #: SAGA's memory, a line for each row of the hosted sites, one site after the other.
        self.table = np.zeros((int(rows.counts.sum()), rows.table_width()) if kind == "saga" else (0, 1))
        self._first_line = np.cumsum(rows.counts) - rows.counts
        #: Sites whose snapshot is due (SVRG), and rows that each site has looked at.
        self.stale = np.ones(shape[0], dtype=np.bool_)
        self.looked = np.zeros(shape[0], dtype=np.int64)
        self._groups = [_Group(rows, members, seed) for members in self._stored_groups()]
        #: The group of all sites, if they are so alike.
        self._alike = self._groups[0] if len(self._groups) == 1 and not self.streams else None
        self._looks = (2 if kind == "svrg" else 1) * rows.batch

    def memory(self) -> Memory:
        """Return what changes, as it is now, in the order of the last fields of `fedkin.admm.shard.ShardState`."""
        if self.kind == "plain":  # only `looked` changes, and it is made anew
            return self.table, self.anchor_gradient, self.anchor_theta, self.stale, self.looked
        anchors = (self.anchor_gradient.copy(), self.anchor_theta.copy())
        return self.table.copy(), *anchors, self.stale.copy(), self.looked

    def restore(self, memory: Memory) -> None:
        """Go back to a `memory`; raises `DataError` when it is of sites with other rows."""
        places = (self.table, self.anchor_gradient, self.anchor_theta, self.stale, self.looked)
        if any(there.shape != kept.shape for there, kept in zip(places, memory, strict=True)):
            raise DataError("the state was written with another number of rows")
        for there, kept in zip(places, memory, strict=True):
            there[...] = kept

    def _stored_groups(self) -> list[Index]:
        """Group sites with the same loss and batch size, which are computed together."""
        by_kind: dict[tuple[int, int], list[int]] = {}
        for u, loss in enumerate(self.rows.losses):
            if u not in self.streams:
                by_kind.setdefault((id(loss), int(self.rows.batch[u])), []).append(u)
        return [np.array(members, dtype=np.int64) for members in by_kind.values()]

    def __call__(self, t: int, theta: Array, available: Mask | None = None) -> Array:
        """Return estimates ``(B, p)`` at ``theta (B, p)`` in round ``t = 1, 2, ...``; 0 for sites that are absent."""
        if self.kind == "svrg":
            self.stale |= (t - 1) % self.snapshot_every == 0
            # an absent site takes its snapshot when it is back
            self._take_snapshots(theta, self.stale.copy() if available is None else self.stale & available)
        self.looked = self.looked + (self._looks if available is None else self._looks * available)
        if available is None and self._alike is not None:
            group = self._alike
            return self._estimate(group, group.numbers(t, None), group.members, theta) + theta * self.rows.ridge
        present = np.ones(theta.shape[0], dtype=np.bool_) if available is None else available
        out = np.zeros_like(theta)
        for group in self._groups:
            live = group.members if available is None else group.members[available[group.members]]
            if live.size:
                out[live] = self._estimate(group, group.numbers(t, available), live, theta[live])
        for u, stream in self.streams.items():
            if available is None or available[u]:
                batch = stream.batch(int(self.rows.batch[u]), t).arrays
                out[u] = self.rows.losses[u].batch_gradients(theta[u : u + 1], *batch)[0]
        return out + theta * self.rows.ridge * present[:, None]

    def _estimate(self, group: _Group, numbers: Index, live: Index, theta: Array) -> Array:
        batch, loss = group.batch(numbers), group.loss
        if self.kind == "plain":
            return loss.batch_gradients(theta, *batch)
        if self.kind == "svrg":
            change = loss.batch_gradients(theta, *batch) - loss.batch_gradients(self.anchor_theta[live], *batch)
            return change + self.anchor_gradient[live]
        new = loss.compact_scores(theta, *batch)
        width, share = new.shape[2], self.rows.batch[live] / self.rows.counts[live]
        lines = numbers + (self._first_line - self.rows.starts)[live][:, None]
        change = loss.mean_of_compact(new - self.table[lines, :width], batch[0])
        estimate = change + self.anchor_gradient[live]
        self.table[lines, :width] = new
        self.anchor_gradient[live] += change * share[:, None]
        return estimate

    def _take_snapshots(self, theta: Array, due: Mask) -> None:
        if not due.any():
            return
        self.anchor_theta[due] = theta[due]
        self.looked = self.looked + self.rows.counts * due
        self.stale &= ~due
        for group in self._groups:
            waiting = group.members[due[group.members]]
            counts = self.rows.counts[waiting]
            for n in np.unique(counts):
                members = waiting[counts == n]
                numbers = self.rows.starts[members][:, None] + np.arange(n)
                self.anchor_gradient[members] = group.loss.batch_gradients(theta[members], *group.batch(numbers))


def no_memory(theta: Array) -> Memory:
    """Return the memory of sites ``(B, p)`` that have no rows."""
    empty = np.zeros((0, theta.shape[1]))
    return np.zeros((0, 1)), empty, empty, np.ones(theta.shape[0], dtype=np.bool_), np.zeros(len(theta), dtype=np.int64)


class _Group:
    """Sites that share a loss and a batch size."""

    def __init__(self, rows: SiteRows, members: Index, seed: int) -> None:
        self.rows, self.members, self.seed = rows, members, seed
        self.loss: Loss = rows.losses[int(members[0])]
        self.size = int(rows.batch[members[0]])
        self._ahead = max(1, min(512, _DRAW_AHEAD // (self.size * members.size)))
        self._first, self._drawn = -1, np.empty((0, 0, 0), dtype=np.int64)

    def numbers(self, t: int, available: Mask | None) -> Index:
        """Return the rows that the (available) members look at in round t, ``(B, b)``."""
        first = (t // self._ahead) * self._ahead
        if first != self._first:
            states = round_states(self.rows.keys[self.members], self.seed, np.arange(first, first + self._ahead))
            drawn = draw_batches(states, self.rows.counts[self.members], self.size)
            self._drawn = drawn + self.rows.starts[self.members][:, None]
            self._first = first
        numbers = self._drawn[t - first]
        return np.asarray(numbers if available is None else numbers[available[self.members]])

    def batch(self, numbers: Index) -> tuple[Array, AnyArray | None, Array | None]:
        """Return ``X (B, b, q)``, ``y (B, b)`` and ``offset (B, b)`` of rows ``(B, b)``."""
        X, y, offset = (None if part is None else part.take(numbers, axis=0) for part in self.rows.data.arrays)
        assert X is not None
        return X, y, offset
