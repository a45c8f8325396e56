"""Compute mini-batch gradients of the hosted sites: plain, or variance-reduced by SAGA or SVRG.

No matrix product runs across sites or rows, because BLAS may split such products differently for another number of
sites or threads. Products are computed elementwise and summed along an axis of fixed length, so a site's gradient is
bitwise the same wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr

from fedkin._base import AnyArray, Array, Index, Mask, count
from fedkin.admm.availability import draw_batches, round_states
from fedkin.core import Problem, Status
from fedkin.data import Federation, Rows
from fedkin.errors import DataError, SolverError, UnknownSiteError
from fedkin.losses import Loss

#: Rows of a block, blocks before the test begins, and standard deviations that a block counts for at most.
BLOCK, FIRST_BLOCKS, MOST_SDS = 16, 10, 3.0
#: Shifts below twice this many standard deviations of a block are ignored; blocks between two false alarms.
SLACK, ALARM_BLOCKS = 0.5, 1e6
#: Estimates are compared after this many rounds, and again each time that rounds have grown by this factor.
FIRST_LOOK, LOOK_GROWTH = 30, 1.2


class SampleStream:
    """Batches of fixed size from an iterator of new samples.

    Samples are ``(x, y)``, ``(x, y, offset)`` or ``x`` alone (the mean loss), where ``x`` is one row ``(q,)`` or some
    rows ``(k, q)``. The site id is used in messages.
    """

    def __init__(self, site: object, samples: Iterable[Any], n_features: int) -> None:
        self.site, self.n_features = site, n_features
        self._samples: Iterator[Any] = iter(samples)
        self._left: list[Rows] = []
        #: Rows returned so far, and a callback that sees each batch before it is used.
        self.used = 0
        self.look: Callable[[Rows], None] | None = None

    def batch(self, size: int, t: int) -> Rows:
        """Return the next ``size`` samples as arrays with a leading axis of length 1."""
        rows = self._next_rows(size, t)
        if self.look is not None:
            self.look(rows)
        return rows.map(lambda part: part[None])

    def _next_rows(self, size: int, t: int) -> Rows:
        parts, missing = [], size
        while missing:
            part = self._left.pop() if self._left else self._next(t)
            if part.n_samples > missing:
                self._left.append(part.take(slice(missing, None)))
                part = part.take(slice(0, missing))
            missing -= part.n_samples
            parts.append(part)
        self.used += size
        return Rows.stack(parts)

    def skip(self, rows: int) -> None:
        """Skip samples that an earlier run has used."""
        if rows:
            self._next_rows(rows, 0)

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


class ChangeTest:
    """Change detector for streams: a CUSUM of the rows' scores at a fixed ``point (p,)``.

    Without a change, the scores (residuals times features, for least squares) have the same mean in every block of
    rows, even if the point is not the minimiser. Each block is compared with all earlier ones (the self-starting CUSUM
    of Hawkins, 1987), by coordinate and in both directions. A single outlying block does not raise an alarm.
    """

    def __init__(self, point: Array) -> None:
        p = point.size
        self.point, self.total, self.mean, self.squares = point.copy(), np.zeros(p), np.zeros(p), np.zeros(p)
        self.sums, self.began = np.zeros((2, p)), np.zeros((2, p))
        #: Blocks, rows in them, and rows that wait for a block.
        self.counts = np.zeros(3, dtype=np.int64)
        self.threshold = float(np.log(ALARM_BLOCKS * p) - 1.166)  # Siegmund's approximation, for both directions

    def add(self, score: Array, rows: int) -> int | None:
        """Add the mean score ``(p,)`` of some rows; return the row at which a change began if one is detected."""
        self.total += rows * score
        self.counts[2] += rows
        if self.counts[2] < BLOCK:
            return None
        n, first, size = self.counts.tolist()
        block, self.total = self.total / size, np.zeros_like(self.total)
        found = None
        if n >= FIRST_BLOCKS:
            scale = np.sqrt(self.squares / (n - 1) * (1 + 1 / n))
            t = np.divide(block - self.mean, scale, out=np.zeros_like(block), where=scale > 0)
            z = np.clip(np.sign(t) * -ndtri(stdtr(n - 1, -np.abs(t))), -MOST_SDS, MOST_SDS)
            self.began = np.where(self.sums > 0, self.began, first)
            self.sums = np.maximum(self.sums + np.stack([z, -z]) - SLACK, 0.0)
            if self.sums.max() > self.threshold:
                found = int(self.began.ravel()[self.sums.argmax()])
        off = block - self.mean
        self.mean = self.mean + off / (n + 1)
        self.squares = self.squares + off * (block - self.mean)
        self.counts = np.array([n + 1, first + size, 0])
        return found


class StreamWatch:
    """Prediction error and change detection on streams, updated by `look` after some rounds.

    New rows are predicted before they are used, by two averages: the one at the last look, and the one after half as
    many rounds. The difference is the gain of the second half of the rounds. If the error falls like 1 / rounds, the
    remaining error is about as large.
    """

    def __init__(self, problem: Problem, streams: Mapping[int, SampleStream]) -> None:
        self.problem, self.streams, self.due = problem, streams, FIRST_LOOK
        self.federation = problem.rows_for("Fed-ADMM")
        #: Rounds of the looks that are still needed and the averages then ``(V, p)``.
        self.looks: list[tuple[int, Array]] = []
        self.tests: dict[int, ChangeTest] = {}
        #: Row at which a change began, by number of the streamed site.
        self.changes: list[tuple[int, int]] = []
        self.columns = dict.fromkeys(("new_objective", "new_error", "gain", "gain_error"), np.nan)
        self._begin_again()
        for u, stream in streams.items():
            stream.look = partial(self._predict, u)

    def _begin_again(self) -> None:
        #: By stream: batches, sums of the losses and of the gains, and sums of their squares.
        self.sums = {u: np.zeros(5) for u in self.streams}

    @property
    def _half(self) -> Array | None:
        rounds = self.looks[-1][0]
        return next((theta for t, theta in reversed(self.looks) if t <= rounds / 2), None)

    def _predict(self, u: int, rows: Rows) -> None:
        if not self.looks:
            return
        loss, now, half = self.problem.losses[u], self.looks[-1][1][u], self._half
        value = loss.value(now, *rows.arrays)
        gain = 0.0 if half is None else loss.value(half[u], *rows.arrays) - value
        self.sums[u] += (1.0, value, gain, value**2, gain**2)
        test = self.tests.setdefault(u, ChangeTest(now))
        began = test.add(loss.gradient(test.point, *rows.arrays), rows.n_samples)
        if began is not None:
            first = self.streams[u].used - int(test.counts[1])
            self.changes.append((u, first + began))
            del self.tests[u]  # the next detector starts from the current estimate

    def look(self, t: int, average: Array) -> dict[str, float]:
        """Return objective and gain on new rows with standard errors, at the last look; NaN if unknown."""
        if t >= self.due:
            if self.looks and all(sums[0] > 1 for sums in self.sums.values()):
                self._compare()
            self.looks.append((t, average.copy()))
            self.due = max(t + 1, int(np.ceil(LOOK_GROWTH * t)))
            keep = max((k for k, (then, _) in enumerate(self.looks) if then <= t / 2), default=0)
            self.looks = self.looks[keep:]
            self._begin_again()
        return {**self.columns, "changes": float(len(self.changes))}

    def _compare(self) -> None:
        V, sums = self.problem.n_sites, np.stack(list(self.sums.values()))
        n, means = sums[:, :1], sums[:, 1:3] / sums[:, :1]
        errors = np.sqrt(((sums[:, 3:] / n - means**2) / (n - 1)).clip(0.0).sum(axis=0)) / V
        now, half = self.looks[-1][1], self._half
        rest = self._without_streams(now)
        self.columns |= {"new_objective": rest + means[:, 0].sum() / V, "new_error": errors[0]}
        if half is not None:
            gain = self._without_streams(half) - rest + means[:, 1].sum() / V
            self.columns |= {"gain": gain, "gain_error": errors[1]}

    def _without_streams(self, theta: Array) -> float:
        """Return the objective without the losses of streamed sites, whose stored rows are ignored."""
        stored = [
            self.problem.losses[u].value(theta[u], *self.federation[self.federation.sites[u]].arrays)
            for u in self.streams
        ]
        return self.problem.objective(theta) - sum(stored) / self.problem.n_sites

    def is_enough(self, tol: float) -> bool:
        """Return whether the gain is below ``tol`` times the objective, with two standard errors to spare.

        A negative gain shows how much averages still vary, so its absolute value is used.
        """
        seen = self.columns
        return bool(abs(seen["gain"]) + 2 * seen["gain_error"] <= tol * abs(seen["new_objective"]))

    def message(self, status: Status, done: int) -> str:
        """Format how a run of ``done`` rounds ended, and how well new rows are predicted."""
        seen, ended = self.columns, {"converged": "converged after", "interrupted": "interrupted after"}
        text = f"{ended.get(status, 'did')} {done} rounds on streams"
        if not np.isfinite(seen["new_objective"]):
            return f"{text}: too few new rows to estimate how well they are predicted"
        text += f": objective {seen['new_objective']:.4g} (s.e. {seen['new_error']:.1g}) on rows not seen before"
        if np.isfinite(seen["gain"]):
            text += f"; the second half of the rounds gained {seen['gain']:.1e} (s.e. {seen['gain_error']:.0e})"
        return text

    def state(self) -> dict[str, Any]:
        """Return the mutable state as arrays."""
        parts: dict[str, Any] = {"due": np.array([self.due]), "columns": np.array(list(self.columns.values()))}
        parts["rounds"] = np.array([t for t, _ in self.looks], dtype=np.int64)
        parts["averages"] = np.array([theta for _, theta in self.looks])
        parts["changes"] = np.array(self.changes, dtype=np.int64).reshape(-1, 2)
        parts |= {f"sums_{u}": sums for u, sums in self.sums.items()}
        for u, test in self.tests.items():
            parts |= {f"test_{u}_{name}": part for name, part in vars(test).items() if name != "threshold"}
        return parts

    def restore(self, parts: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.due, self.columns = int(parts["due"][0]), dict(zip(self.columns, parts["columns"].tolist(), strict=True))
        self.changes = [(u, row) for u, row in parts["changes"].tolist()]
        self.looks = list(zip(parts["rounds"].tolist(), parts["averages"], strict=True))
        for u in self.streams:
            self.sums[u] = parts[f"sums_{u}"]
            if f"test_{u}_point" in parts:
                self.tests[u] = ChangeTest(parts[f"test_{u}_point"])
                for name in vars(self.tests[u]).keys() - {"threshold"}:
                    setattr(self.tests[u], name, parts[f"test_{u}_{name}"])


GradientKind = Literal["plain", "saga", "svrg"]
GRADIENT_KINDS = ("plain", "saga", "svrg")

#: Mutable arrays of `Gradients`.
_MEMORY = ("table", "anchor_gradient", "anchor_theta", "stale", "looked")

#: Batches of several rounds are drawn at once, up to this many row numbers.
_DRAW_AHEAD = 200_000


@dataclass(frozen=True, eq=False)
class SiteRows:
    """Rows of B hosted sites, and their batch sizes.

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
        """Return the data of some sites, given by number; arrays of rows are shared."""
        parts: dict[str, Any] = {name: getattr(self, name)[sites] for name in ("starts", "counts", "keys", "batch")}
        return replace(self, **parts, losses=[self.losses[u] for u in sites])

    def of(self, site: int) -> Rows:
        """Return the rows of one site, given by number."""
        return self.data.take(slice(self.starts[site], self.starts[site] + self.counts[site]))

    def numbers(self, sites: Index) -> Index:
        """Return the row numbers of some sites, site after site."""
        n = self.counts[sites]
        return np.repeat(self.starts[sites] - (np.cumsum(n) - n), n) + np.arange(n.sum())


class Gradients:
    """Gradient estimator for hosted sites, a function of (seed, site, round) and theta.

    ``snapshot_every`` is the number of rounds between the full passes of SVRG, the first in round 1.
    Sites in ``streams``, by number, see new samples in every round.
    """

    def __init__(
        self,
        rows: SiteRows,
        seed: int,
        kind: GradientKind = "plain",
        snapshot_every: int = 1,
        *,
        streams: Mapping[int, SampleStream] | None = None,
    ) -> None:
        self.rows, self.seed, self.kind, self.snapshot_every = rows, seed, kind, snapshot_every
        self.streams = dict(streams or {})
        shape = (rows.starts.size, rows.ridge.size)
        #: Mean gradient of the table (SAGA) or of the snapshot (SVRG), and the snapshot itself.
        self.anchor_gradient = np.zeros(shape if kind != "plain" else (0, shape[1]))
        self.anchor_theta = np.zeros(shape if kind == "svrg" else (0, shape[1]))
        #: SAGA's memory, a line for each row of the hosted sites, one site after the other.
        width = max(loss.compact_width(shape[1]) for loss in {id(loss): loss for loss in rows.losses}.values())
        self.table = np.zeros((int(rows.counts.sum()), width) if kind == "saga" else (0, 1))
        self._first_line = np.cumsum(rows.counts) - rows.counts
        #: Sites whose snapshot is due (SVRG), and rows that each site has looked at.
        self.stale = np.ones(shape[0], dtype=np.bool_)
        self.looked = np.zeros(shape[0], dtype=np.int64)
        self._groups = [_Group(rows, members, seed) for members in self._stored_groups()]
        #: The group of all sites, if they are so alike.
        self._alike = self._groups[0] if len(self._groups) == 1 and not self.streams else None
        self._looks = (2 if kind == "svrg" else 1) * rows.batch

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the mutable state."""
        plain = self.kind == "plain"  # then only `looked` changes, and it is made anew
        return {name: getattr(self, name) if plain else getattr(self, name).copy() for name in _MEMORY}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore a `state`; raise `DataError` if the sites have other rows."""
        if any(getattr(self, name).shape != state[name].shape for name in _MEMORY):
            raise DataError("the state was written with another number of rows")
        for name in _MEMORY:
            setattr(self, name, state[name].copy())

    def _stored_groups(self) -> list[Index]:
        by_kind: dict[tuple[int, int], list[int]] = {}
        for u, loss in enumerate(self.rows.losses):
            if u not in self.streams:
                by_kind.setdefault((id(loss), int(self.rows.batch[u])), []).append(u)
        return [np.array(members, dtype=np.int64) for members in by_kind.values()]

    def __call__(self, t: int, theta: Array, available: Mask | None = None) -> Array:
        """Return estimates ``(B, p)`` at ``theta (B, p)`` in round ``t = 1, 2, ...``; 0 for sites that are absent."""
        if self.kind == "svrg":
            self.stale |= (t - 1) % self.snapshot_every == 0
            # an absent site takes its snapshot on return
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


class _Group:
    def __init__(self, rows: SiteRows, members: Index, seed: int) -> None:
        self.rows, self.members, self.seed = rows, members, seed
        self.loss: Loss = rows.losses[int(members[0])]
        self.size = int(rows.batch[members[0]])
        self._ahead = max(1, min(512, _DRAW_AHEAD // (self.size * members.size)))
        self._first, self._drawn = -1, np.empty((0, 0, 0), dtype=np.int64)

    def numbers(self, t: int, available: Mask | None) -> Index:
        """Return the rows that the (available) members use in round t, ``(B, b)``."""
        first = (t // self._ahead) * self._ahead
        if first != self._first:
            states = round_states(self.rows.keys[self.members], self.seed, np.arange(first, first + self._ahead))
            drawn = draw_batches(states, self.rows.counts[self.members], self.size)
            self._drawn = drawn + self.rows.starts[self.members][:, None]
            self._first = first
        numbers = self._drawn[t - first]
        return np.asarray(numbers if available is None else numbers[available[self.members]])

    def batch(self, numbers: Index) -> tuple[Array, AnyArray | None, Array | None]:
        X, y, offset = (None if part is None else part.take(numbers, axis=0) for part in self.rows.data.arrays)
        assert X is not None
        return X, y, offset
