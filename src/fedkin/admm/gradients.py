"""Mini-batch gradients of the hosted sites: plain, or with the variance taken out by SAGA or SVRG.

No matrix product runs across sites or rows: BLAS may cut such products differently for another number of sites or
threads. Products are taken element by element and summed along an axis of fixed length, so that a site's gradient
has the same bits wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedkin._base import AnyArray, Array, Index, Mask, count
from fedkin.admm.sampling import draw_batches, round_states
from fedkin.data import Federation, Rows
from fedkin.errors import DataError, SolverError, UnknownSiteError
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
    ``table (N, width)`` is SAGA's memory, a line for each row of ``rows.data``; it is written to. Sites in
    ``streams``, by number, see new samples in every round.
    """

    def __init__(
        self,
        rows: SiteRows,
        seed: int,
        kind: GradientKind = "plain",
        *,
        snapshot_every: int = 1,
        table: Array | None = None,
        streams: Mapping[int, SampleStream] | None = None,
    ) -> None:
        self.rows, self.seed, self.kind, self.snapshot_every = rows, seed, kind, snapshot_every
        self.streams = dict(streams or {})
        shape = (rows.starts.size, rows.ridge.size)
        #: Mean gradient of the table (SAGA) or of the snapshot (SVRG), and the snapshot itself.
        self.anchor_gradient = np.zeros(shape if kind != "plain" else (0, shape[1]))
        self.anchor_theta = np.zeros(shape if kind == "svrg" else (0, shape[1]))
        if table is None:
            table = np.zeros((rows.data.n_samples, rows.table_width()) if kind == "saga" else (0, 1))
        self.table = table
        #: Sites whose snapshot is due (SVRG), and rows that each site has looked at.
        self.stale = np.ones(shape[0], dtype=np.bool_)
        self.looked = np.zeros(shape[0], dtype=np.int64)
        self._groups = [_Group(rows, members, seed) for members in self._stored_groups()]
        #: The group of all sites, if they are so alike.
        self._alike = self._groups[0] if len(self._groups) == 1 and not self.streams else None
        self._looks = (2 if kind == "svrg" else 1) * rows.batch

    def _own_lines(self) -> Index | slice:
        """Return the lines of the table that belong to the hosted sites."""
        rows = self.rows
        if not self.table.shape[0] or int(rows.counts.sum()) == self.table.shape[0]:
            return slice(None)
        return np.concatenate([np.arange(s, s + n) for s, n in zip(rows.starts, rows.counts, strict=True)])

    def memory(self) -> Memory:
        """Return what changes, as it is now, in the order of the last fields of `fedkin.admm.shard.ShardState`."""
        if self.kind == "plain":  # only `looked` changes, and it is made anew
            return self.table, self.anchor_gradient, self.anchor_theta, self.stale, self.looked
        table = self.table[self._own_lines()].copy()
        return table, self.anchor_gradient.copy(), self.anchor_theta.copy(), self.stale.copy(), self.looked

    def restore(self, memory: Memory) -> None:
        """Go back to a `memory`; raises `DataError` when it is of sites with other rows."""
        lines = self._own_lines()
        places = (self.table[lines], self.anchor_gradient, self.anchor_theta, self.stale, self.looked)
        if any(there.shape != kept.shape for there, kept in zip(places, memory, strict=True)):
            raise DataError("the state was written with another number of rows")
        self.table[lines] = memory[0]
        for there, kept in zip(places[1:], memory[1:], strict=True):
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
        change = loss.mean_of_compact(new - self.table[numbers, :width], batch[0])
        estimate = change + self.anchor_gradient[live]
        self.table[numbers, :width] = new
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


class SampleStream:
    """Batches of fixed size, cut from an iterator of new samples.

    Samples are ``(x, y)``, ``(x, y, offset)`` or ``x`` alone (the mean loss), where ``x`` is one row ``(q,)`` or some
    rows ``(k, q)``. The site id is for messages.
    """

    def __init__(self, site: object, samples: Iterable[Any], n_features: int) -> None:
        self.site, self.n_features = site, n_features
        self._samples: Iterator[Any] = iter(samples)
        self._left: list[Rows] = []
        #: Rows handed out so far.
        self.used = 0

    def batch(self, size: int, t: int) -> Rows:
        """Return the next ``size`` samples as arrays with a leading axis of length 1."""
        parts, missing = [], size
        while missing:
            part = self._left.pop() if self._left else self._next(t)
            if part.n_samples > missing:
                self._left.append(part.take(slice(missing, None)))
                part = part.take(slice(0, missing))
            missing -= part.n_samples
            parts.append(part)
        self.used += size
        return Rows.stack(parts).map(lambda part: part[None])

    def skip(self, rows: int) -> None:
        """Pass over samples that an earlier run has seen."""
        if rows:
            self.batch(rows, 0)

    def _next(self, t: int) -> Rows:
        try:
            item = next(self._samples)
        except StopIteration:
            raise SolverError(
                f"the samples of site {self.site!r} ended in round {t} after {count(self.used, 'row')}; "
                "give an endless iterator, or ask for fewer rounds"
            ) from None
        parts = item if isinstance(item, tuple) else (item,)
        X = np.atleast_2d(np.asarray(parts[0], dtype=np.float64))
        if X.ndim != 2 or X.shape[1] != self.n_features:
            raise DataError(
                f"a sample of site {self.site!r} has shape {np.shape(parts[0])}, expected ({self.n_features},) "
                f"or (k, {self.n_features})"
            )
        rest = [np.asarray(part, dtype=np.float64).reshape(-1) for part in parts[1:] if part is not None]
        for part in (X, *rest):
            if part.shape[0] != X.shape[0]:
                raise DataError(
                    f"a sample of site {self.site!r} has {count(X.shape[0], 'row')} but {part.shape[0]} targets"
                )
            if not np.isfinite(part).all():
                raise DataError(f"a sample of site {self.site!r} (row {self.used} of its stream) is not finite")
        return Rows(X, *rest[:2])


def sample_streams(federation: Federation, streams: Mapping[Any, Iterable[Any]] | None) -> dict[int, SampleStream]:
    """Return the streams of sites by their number, checked."""
    out = {}
    for site, samples in (streams or {}).items():
        if site not in federation:
            raise UnknownSiteError(f"streams names site {site!r}, which the federation does not have")
        if not isinstance(samples, Iterable):
            raise DataError(f"the stream of site {site!r} must be an iterable of samples, got {type(samples).__name__}")
        out[federation.index[site]] = SampleStream(site, samples, federation.n_features)
    return out
