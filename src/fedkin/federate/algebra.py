"""What combinations of sums reveal about rows: shares of few rows, weights at a point, values that can be solved for.

Whoever has the sums of several columns has those of every combination of them, and of several messages those of every
difference. These functions look for combinations in which few rows stand out; `disclosure` decides what to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.data import Rows, deal_folds, level_text
from fedkin.errors import DataError
from fedkin.federate.settings import Thresholds, required
from fedkin.losses import Loss
from fedkin.losses.cox import RiskSets, log_hazards

if TYPE_CHECKING:
    from fedkin.federate.contract import Contract

#: Directions with less than this share of the largest are rounding. Products of columns keep 16 digits, so a contract
#: whose columns nearly coincide, such as a curve with knots 1e-8 apart, tells of directions of 1e-10.
SMALLEST = 1e-13
#: Weights of rows at two points that differ by more than this share can be told apart: sums have 16 digits.
TOLD_APART = 1e-8
#: Possible values among which lattice reduction finds those of the rows.
MOST_CELLS = 2000
#: Values of a number that its sum and sum of squares count.
COUNTED = 3
#: A single row may not make up more than this share of any sum, along any direction.
MOST_OF_A_SUM = 0.98
_TINY = 1e-300
_ON_GRID = 0.9  # share of rows with values on a grid, so that these are decoded
#: A cell is visible in the columns of a curve when a curve of them is its indicator, but for this sum of squares.
_VISIBLE = 0.005
_SAME = 1e-6  # difference of equal values
_TURNS, _AT_ONCE = 20, 10**7  # of a search for few rows, and numbers that it holds
_ALIKE = 1e-5  # difference of predictors whose weights cannot be told apart
_APART, _STEP = 0.01, 1e-5  # by which equal values are told apart, and by which predictors move, in units of columns
_FEWEST_POINTS, _OFF = 8, 0.1  # of a function, and share of its size by which its values may be off
_ENOUGH = 2000  # rows of which columns are compared

#: Sums at a point ``(p,)`` over some of the rows.
Sums = tuple[Array, Mask]


@dataclass(frozen=True, eq=False)
class Release:
    """What is about to leave a site: sums of prepared rows, and the thresholds that hold for them.

    ``whole`` is the release of all rows if these are one of several ``folds``. Sums at a point ``theta`` leave after
    others: ``sums`` has all of them.
    """

    contract: Contract
    rows: Rows
    own: Thresholds | None = None
    whole: Release | None = None
    folds: int = 0
    theta: Array = field(default_factory=lambda: np.zeros(0))
    sums: Sequence[Sums] = ()

    @cached_property
    def least(self) -> Thresholds:
        return required(self.contract, self.own)

    @property
    def lifted(self) -> bool:
        """Whether the site's custodian has lifted the hard minima."""
        return self.own is not None and self.own.lowers_minima

    @cached_property
    def loss(self) -> Loss:
        return self.contract.loss_object()

    @property
    def everything(self) -> Mask:
        return np.ones(self.rows.n_samples, dtype=bool)

    @property
    def where(self) -> str:
        return f" in one of {self.folds} folds" if self.folds else ""

    def parts(self, site: str | int, folds: int) -> Iterator[Release]:
        """Yield the release of each fold of the rows of a site."""
        fold_of = deal_folds(site, self.rows.n_samples, folds, self.contract.seed)
        for k in range(folds):
            yield Release(self.contract, self.rows.take(fold_of == k), self.own, self, folds)

    @property
    def held(self) -> int:
        """Values that the rows have: one of each feature, whatever its levels or knots, and one of several classes."""
        return self.rows.n_samples * (len(self.contract.schema.features) + self.loss.n_params(1) - 1)

    @cached_property
    def cells(self) -> list[Cell]:
        """Values that sums count, by as many messages as leave at most as many numbers as the rows have."""
        most = COUNTED
        if self.whole is None and not self.loss.quadratic and self.loss.target != "survival":
            most = max(most, min(self.contract.messages, self.held // numbers_at(self.contract.n_params)))
        return list(_cells(self.contract, self.rows, most))

    @cached_property
    def of_features(self) -> list[Cell]:
        """Values of features that every message counts."""
        target = None if self.contract.schema.target is None else self.contract.schema.target.name
        return [cell for cell in self.cells if cell.column != target and cell.by != "messages"]

    def groups(self) -> Iterator[tuple[str, int, Mask]]:
        """Yield all rows, those with each level, and with each pair of levels: with how many levels they share."""
        yield "", 0, self.everything
        levels = [cell for cell in self.of_features if cell.by == "sums"]
        for one in levels:
            yield f" with {one.column} {one.value!r}", 1, one.rows
        for one, other in combinations(levels, 2):
            if one.column != other.column:
                name = f" with {one.column} {one.value!r} and {other.column} {other.value!r}"
                yield name, 2, one.rows & other.rows

    @cached_property
    def functions(self) -> list[tuple[frozenset[str], int]]:
        """Columns that are functions of one another, such as curves and squares, and how many of them sums have."""
        if self.whole is not None:
            return self.whole.functions
        some = self.rows.X[:: 1 + self.rows.n_samples // _ENOUGH]
        known = {
            column.name: (curve_values(column.knots, block) if column.knots else block[:, 0], block.shape[1])
            for column, block in self.contract.blocks(some)
            if column.kind != "category"
        }
        found = []
        for name, (values, _) in known.items():
            same = [one for one, (other, _) in known.items() if one == name or is_function(other, values)]
            found.append((frozenset(same), sum(known[one][1] for one in same)))
        return [(names, size) for names, size in found if size > 1]

    @property
    def summed(self) -> tuple[list[str], Array]:
        """Names and values of all columns whose products are in the sums."""
        rows, loss = self.rows, self.loss
        linear = loss.quadratic or loss.target in ("count", "positive")  # sums of columns times the target
        given = {"the target": rows.y if linear else None, "the offset": rows.offset}
        more = {} if self.contract.intercept else {"(intercept)": np.ones(rows.n_samples)}  # sums of columns, too
        more |= {name: values.astype(np.float64) for name, values in given.items() if values is not None}
        return [*self.contract.column_names, *more], np.column_stack([rows.X, *more.values()])

    @cached_property
    def weights(self) -> tuple[Array, list[Array], Array]:
        """Weights ``(n, m)`` and factors of rows in m sums, 0 where they are in none; weights in sums over all rows."""
        weights, factors = np.zeros((self.rows.n_samples, len(self.sums))), []
        for k, (at, which) in enumerate(self.sums):
            one = Weights.at(self.loss, at, self.rows.take(which))
            weights[which, k] = one.weight
            factors.append(np.zeros((len(which), one.factors.shape[1])))
            factors[k][which] = one.factors
        start = Weights.at(self.loss, self.sums[0][0], self.rows).weight
        over_all = [weights[:, k] for k, (_, which) in enumerate(self.sums) if which.all()]
        return weights, factors, np.stack([*over_all, start], axis=1)

    def moves(self) -> Iterator[tuple[str, Array, Array]]:
        """Yield by how much each column moves the linear predictors of the rows, and by how much it possibly can."""
        slopes, at = self.theta.reshape(-1, self.rows.X.shape[1]).T, int(self.contract.intercept)
        for column, block in self.contract.blocks(self.rows.X):
            if column.kind == "category":
                possible = np.vstack([np.zeros(block.shape[1]), np.eye(block.shape[1])])
            elif column.knots:
                possible = np.unique(block, axis=0)[: None if grid_of(curve_values(column.knots, block)).size else 0]
            else:
                possible = grid_of(block[:, 0])[:, None]
            slope = slopes[at : at + block.shape[1]]
            yield column.name, block @ slope, possible @ slope
            at += block.shape[1]
        if (offset := self.rows.offset) is not None:
            possible = grid_of(offset)
            possible = possible if possible.size else np.log(grid_of(np.exp(np.clip(offset, -300, 300))))
            wide = np.ones((1, slopes.shape[1]))
            yield "the offset", offset[:, None] * wide, possible[:, None] * wide


def sums_by_fold(rows: Rows, theta: Array, fold_of: Index | None) -> list[Sums]:
    """Return the sums at a point over each fold; over all rows without folds."""
    folds = np.zeros(rows.n_samples, dtype=np.int64) if fold_of is None else fold_of
    return [(theta, folds == k) for k in np.unique(folds).tolist()]


def numbers_at(p: int) -> int:
    """Return how many numbers a message has: value, gradient and half of the second derivatives."""
    return p * (p + 3) // 2 + 1


# --- few rows in a combination of columns -----------------------------------------------------------------------------


def basis(columns: Array, accuracy: float = SMALLEST) -> tuple[Array, Array]:
    """Return an orthonormal basis ``(n, r)`` of combinations of columns ``(n, c)``, and their coefficients ``(r, c)``.

    Columns count in units of their length; directions below ``accuracy`` of the largest are ignored.
    """
    size = np.sqrt((columns**2).sum(axis=0))
    left, values, right = np.linalg.svd(columns / np.where(size > 0, size, 1.0), full_matrices=False)
    seen = values > accuracy * max(float(values.max(initial=0.0)), _TINY)
    return left[:, seen], right[seen] / values[seen, None]


def row_shares(parts: Array, accuracy: float = SMALLEST) -> Array:
    """Return the largest share ``(n,)`` of each row in the sum of squares along any direction: its leverage.

    ``parts (n, k, p)`` has k lines for each row.
    """
    n, k, p = parts.shape
    left = basis(parts.reshape(n * k, p), accuracy)[0].reshape(n, k, -1)
    return np.asarray(np.linalg.norm(left, ord=2, axis=(1, 2)) ** 2 if k > 1 else (left**2).sum(axis=(1, 2)))


def share_of_one(factors: Sequence[Array]) -> float:
    """Return the largest share of one row in combinations of the number of rows and sums with these factors."""
    lines = np.hstack([np.ones((len(factors[0]), 1)), *factors])
    return float(row_shares(lines[:, None, :], TOLD_APART).max())


def most_of_few(left: Array, most: int, least: float) -> tuple[Array, float]:
    """Return the direction ``(r,)`` of an orthonormal ``left (n, r)`` of which ``most`` rows have most, and the share.

    From each row that may be one of them if they have ``least``, by turns: the rows that have most of a direction, and
    the direction of which these rows have most.
    """
    starts = np.flatnonzero((left**2).sum(axis=1) > least / most)
    best, share = np.zeros(left.shape[1]), 0.0
    for part in np.array_split(starts, 1 + starts.size * len(left) // _AT_ONCE) if starts.size else ():
        along, before = left[part], np.zeros(part.size)
        for _ in range(_TURNS):
            few = np.argpartition(-np.abs(along @ left.T), most - 1, axis=1)[:, :most]
            _, found, directions = np.linalg.svd(left[few], full_matrices=False)
            along, now = directions[:, 0], found[:, 0] ** 2
            if (now - before).max(initial=0.0) < _SAME:
                break
            before = now
        if part.size and now.max() > share:
            best, share = along[now.argmax()], float(now.max())
    return best, share


def fewest_alike(values: Array) -> int:
    """Return how many rows have the rarest of the values that are not 0."""
    ordered = np.sort(values[np.abs(values) > _SAME])
    return int(np.diff(np.flatnonzero(np.diff(ordered, prepend=-np.inf, append=np.inf) > _SAME)).min())


# --- rows in sums at a point ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Disclosure of each of n rows by sums at a point."""

    weight: Array  # (n,) of the row in the second derivatives
    factors: Array  # (n, c) by which the row's columns are multiplied in any of the sums
    share: float  # the largest of one row in the second derivatives, along any direction
    effective: float  # number of rows that have the weight

    @classmethod
    def at(cls, loss: Loss, theta: Array, rows: Rows) -> Weights:
        """Return what sums at ``theta (p,)`` of a loss that is not quadratic reveal about each row."""
        with np.errstate(all="ignore"):
            if loss.target == "survival":
                return cls._in_risk_sets(theta, rows)
            rowwise = loss.rowwise
            if rowwise is None or rows.y is None:
                raise DataError(f"disclosure by sums of the {loss.name} loss is not known, so none may leave")
            eta = rowwise.predictors(theta, rows.X, rows.offset)
            slope, curvature = rowwise.slope_at(eta, rows.y), rowwise.curvature_at(eta, rows.y)
        n, k = slope.shape
        if not (np.isfinite(curvature).all() and np.isfinite(slope).all()):
            return cls._of_anything(n)
        weight = np.einsum("nkk->n", curvature)
        first, second = np.triu_indices(k)
        # factors of each row's Hessian
        values, vectors = np.linalg.eigh(curvature)
        root = np.sqrt(np.maximum(values, 0.0))[:, :, None] * np.swapaxes(vectors, 1, 2)
        parts = np.einsum("nkj,nq->nkjq", root, rows.X).reshape(n, k, -1)
        factors = np.hstack([slope, curvature[:, first, second]])
        return cls(weight, factors, float(row_shares(parts).max()), effective_rows(weight))

    @classmethod
    def _in_risk_sets(cls, theta: Array, rows: Rows) -> Weights:
        """Return what sums of the Cox loss reveal: a row is in the sum of every event at which it is at risk.

        With p the share of a row in the hazard of a risk set and m the mean of the set, the gradient has the row p
        times (the expected number of its events), and the second derivatives have ``p (x - m) (x - m)'`` of it.
        """
        assert rows.y is not None
        risk, eta = RiskSets.from_times(rows.y), log_hazards(theta, rows.X, rows.offset)
        hazard = np.exp(eta - eta.max(initial=0.0))
        sums = risk.sums(hazard[:, None] * np.column_stack([np.ones(rows.n_samples), rows.X]))
        total, means = sums[:, 0], sums[:, 1:] / sums[:, :1]
        expected = hazard * risk.cumulated(1.0 / total)
        weight = np.maximum(expected - hazard**2 * risk.cumulated(total**-2.0), 0.0)
        factors = np.column_stack([expected, rows.y > 0])
        if not (np.isfinite(factors).all() and np.isfinite(means).all()):
            return cls._of_anything(eta.size)
        values, vectors = np.linalg.eigh((rows.X * expected[:, None]).T @ rows.X - means.T @ means)
        seen = values > SMALLEST * max(float(values[-1]), _TINY)
        Z, centre = (one @ (vectors[:, seen] / np.sqrt(values[seen])) for one in (rows.X, means))
        about = np.column_stack([centre / total[:, None], (centre**2).sum(axis=1) / total])
        of_means = hazard[:, None] * np.column_stack([risk.cumulated(one) for one in about.T])
        trace = expected * (Z**2).sum(axis=1) - 2 * (Z * of_means[:, :-1]).sum(axis=1) + of_means[:, -1]
        time, share = np.abs(rows.y), 0.0
        for k in np.flatnonzero(trace > MOST_OF_A_SUM).tolist():  # at most as many as there are directions
            away = (Z[k] - centre) * np.sqrt(hazard[k] / total * (time[risk.deaths] <= time[k]))[:, None]
            share = max(share, float(np.linalg.norm(away, ord=2)) ** 2)
        return cls(weight, factors, share, min(effective_rows(weight), effective_rows(expected)))

    @classmethod
    def _of_anything(cls, n: int) -> Weights:
        """Return what sums that are not finite may reveal."""
        return cls(np.zeros(n), np.full((n, 1), np.nan), 1.0, 0.0)


def effective_rows(weight: Array) -> float:
    """Return the effective number of rows with these weights, ``(sum w)^2 / sum w^2``."""
    return float(weight.sum()) ** 2 / max(float(weight @ weight), _TINY)


def determined(loss: Loss, rows: Rows, sums: Sequence[Sums], order: int) -> float:
    """Return how far sums determine a single value of a row: the largest share of it in the equations' directions.

    Each sum is at a point and over some of the rows. The weights follow from the values of the rows, so the equations
    are linearised. ``order``: how many of two factors are known, as the columns of levels are.
    """
    form, y = loss.rowwise, rows.y
    if form is None or y is None:
        return 1.0
    free = np.flatnonzero(np.ptp(rows.X, axis=0) > 0)
    X, k = rows.X.copy(), form.n_outputs
    # equal values count as different ones: who has all of them has each
    X[:, free] += _APART * np.random.default_rng(0).uniform(-1.0, 1.0, (len(X), free.size))
    lines = np.column_stack([np.ones(len(X)), X[:, free]])
    unit = np.tile(np.vstack([np.zeros(free.size), np.eye(free.size)]), (len(X), 1, 1))
    first, second = np.triu_indices(free.size + 1)
    products = lines[:, first] * lines[:, second]
    bends = unit[:, first] * lines[:, second, None] + lines[:, first, None] * unit[:, second]
    powers = [(lines[:, :1], unit[:, :1]), (lines, unit), (products, bends)]
    found = [np.swapaxes(powers[1][1], 0, 1), np.swapaxes(powers[2][1][:, first == second], 0, 1)] if order == 0 else []
    upper = np.triu_indices(k)

    def factors(eta: Array) -> Array:
        return np.hstack([form.slope_at(eta, y), form.curvature_at(eta, y)[:, upper[0], upper[1]]])

    for theta, which in sums:
        eta, along = form.predictors(theta, X, rows.offset), theta.reshape(k, -1)[:, free]
        value = factors(eta)
        moved = np.zeros((*value.shape, free.size))
        for a in range(k):
            step = _STEP * np.eye(k)[a]
            moved += ((factors(eta + step) - factors(eta - step)) / (2 * _STEP))[:, :, None] * along[a]
        for f in range(value.shape[1]):
            if (degree := (1 if f < k else 2) - order) >= 0:
                monomials, changes = powers[degree]
                lined = moved[:, f, None] * monomials[:, :, None] + value[:, f, None, None] * changes
                found.append(np.swapaxes(lined * which[:, None, None], 0, 1))
    equations = np.concatenate(found).reshape(sum(map(len, found)), -1)
    return float((basis(equations.T, TOLD_APART)[0] ** 2).sum(axis=1).max(initial=0.0))


# --- values that sums count -------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """Rows with one value of a column, of which sums tell how many there are.

    ``by``: "sums" of any message; "digits" by lattice reduction, since sums of curves have many bits; "messages" of
    which each weighs rows by another function of the column.
    """

    column: str
    value: str
    rows: Mask
    by: Literal["sums", "digits", "messages"] = "sums"


def _cells(contract: Contract, rows: Rows, most: int = COUNTED) -> Iterator[Cell]:
    """Yield levels, classes and values of numbers with at most so many: messages count those beyond three.

    Of two or three, their number, sum and sum of squares say how many rows have each. Of a curve, the parts that its
    knots single out, and all its values on a grid such as whole years.
    """
    for column, block in contract.blocks(rows.X):
        if column.kind == "category":
            yield Cell(column.name, level_text(column.levels[0]), (block == 0).all(axis=1))
            for k, level in enumerate(column.levels[1:]):
                yield Cell(column.name, level_text(level), block[:, k] != 0)
        elif column.knots:
            yield from _cells_of_curve(column.name, curve_values(column.knots, block), block)
        elif 1 < (values := np.unique(block[:, 0])).size <= most:
            centre, scale = column.centre_and_scale
            for value in values.tolist():
                shown = value * scale + (centre if contract.intercept else 0.0)
                by = "sums" if values.size <= COUNTED else "messages"
                yield Cell(column.name, f"{shown:.6g}", block[:, 0] == value, by)  # type: ignore[arg-type]
    target = contract.schema.target
    if target is not None and target.kind == "category" and rows.y is not None:
        for k, label in enumerate(target.levels):
            yield Cell(target.name, level_text(label), np.asarray(rows.y == k))
    elif target is not None and rows.y is not None and contract.loss_object().quadratic:
        values = np.unique(rows.y)
        for value in values.tolist() if 1 < values.size <= COUNTED else ():
            yield Cell(target.name, f"{value:.6g}", np.asarray(rows.y == value))


def _cells_of_curve(name: str, of_rows: Array, block: Array) -> Iterator[Cell]:
    """Yield the values, and both sides of the steps, whose indicators are curves: their rows are counted by the sums.

    Four knots with no value between make a step, five about one value an indicator of it.
    """
    values, first, which = np.unique(of_rows, return_index=True, return_inverse=True)
    left = basis(np.column_stack([np.ones(values.size), block[first]]))[0]
    seen = 1.0 - (left**2).sum(axis=1) < _VISIBLE
    for k in np.flatnonzero(seen | (grid_of(of_rows).size > 0)).tolist():
        yield Cell(name, f"{values[k]:.6g}", which == k, "sums" if seen[k] else "digits")
    below = np.arange(1.0, values.size + 1) - (np.cumsum(left, axis=0) ** 2).sum(axis=1)
    for k in np.flatnonzero(below[:-1] < _VISIBLE).tolist():
        yield Cell(name, f"at most {values[k]:.6g}", which <= k)
        yield Cell(name, f"above {values[k]:.6g}", which > k)


def curve_values(knots: Sequence[float], block: Array) -> Array:
    """Return the values of a column without its curve."""
    return np.asarray(knots[0] + block @ (np.asarray(knots[1:]) - knots[0]))


def grid_of(of_rows: Array) -> Array:
    """Return all values of the smallest grid that has nearly all of a column's, and the rest; none if too many.

    By Euclid's algorithm with the steps between values, first with all, then with those that occur again.
    """
    values = np.unique(of_rows)
    low, span = float(values[0]), float(np.ptp(values))
    steps = np.diff(values)
    steps = steps[steps > 1e-9 * span]  # less is rounding
    _, which, times = np.unique(np.round(steps / max(span, _TINY) * 1e9), return_inverse=True, return_counts=True)
    for left in (steps, steps[times[which] > 1]) if steps.size else ():
        while left.size and (unit := float(left.min())) * MOST_CELLS >= span:
            rest = np.abs(left - unit * np.round(left / unit))
            if (rest := rest[rest > 1e-6 * unit]).size:
                left = np.append(rest, unit)
                continue
            places = np.round((of_rows - low) / unit % 1.0, 4) % 1.0
            found, often = np.unique(places, return_counts=True)
            if often.max() < _ON_GRID * len(of_rows):
                break
            grid = low + unit * (found[often.argmax()] + np.arange(-1, round(span / unit) + 1))
            grid = grid[(grid > low - unit / 2) & (grid < values[-1] + unit / 2)]
            return np.concatenate([grid, np.unique(of_rows[places != found[often.argmax()]])])
    return values[: int(span == 0.0)]


def different(predictors: Array) -> tuple[Index, Index]:
    """Return the first and the number of each of the different lines; on no usual number does rounding split them."""
    lines = np.floor(predictors / _ALIKE + math.sqrt(0.5))
    lines = lines[:, 0] if lines.shape[1] == 1 else lines
    _, first, counts = np.unique(lines, axis=0, return_index=True, return_counts=True)
    return first, counts


def is_function(values: Array, of: Array) -> bool:
    """Return whether values are a function of others beyond a straight line, such as their squares or logarithms.

    Rows with the same value must have the same function. Where no values repeat, neighbours must predict it.
    """
    points, which, times = np.unique(of, return_inverse=True, return_counts=True)
    if points.size <= COUNTED or np.unique(values).size <= COUNTED:
        return False  # few values are counted as cells
    function = np.bincount(which, values) / times
    if np.abs(values - function[which]).max() > _OFF * values.std():
        return False
    line = np.column_stack([np.ones(points.size), points])
    bent = function - line @ np.linalg.lstsq(line, function, rcond=None)[0]
    if bent.std() <= _SAME * function.std():
        return False  # the same column in other units tells nothing more
    if values.size >= 2 * points.size:
        return True
    before, after = np.diff(points)[:-1], np.diff(points)[1:]
    between = (after * bent[:-2] + before * bent[2:]) / (before + after)
    return points.size >= _FEWEST_POINTS and bool(np.median(np.abs(bent[1:-1] - between)) < _OFF * bent.std())
