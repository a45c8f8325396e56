"""The disclosure gate, which every number must pass before it leaves a site, by share, answer, run or publish.

Sums over few rows reveal them. With no more rows than columns, sums of products determine the rows up to a rotation;
for a level with a single row, the products of its column with the others are the row itself. So there must be enough
rows, also in every fold, and every level, class and value of a binary column must have either no rows or enough.

A query names the point at which losses are summed, and a loss that is not quadratic weights rows by its curvature
there: at a maliciously chosen point, one row has all the weight. So a query is answered only inside the contract's
ball, where the model is plausible for the site's rows and enough rows have weight.

| before | rows must pass |
|---|---|
| anything leaves (also `join`) | `check_disclosure`: counts, cells, pairs, few rows along any direction, folds |
| sums at a point | `check_point`: rows with weight, equations that could be solved, few alike |
| the answer to a query | `check_query`: the ball, a plausible point, `check_point`, everything sent before |
| rounds | `check_rounds`: all of the first two, no batches |

What has noise for differential privacy must pass `check_count` only, since refusals may depend on no row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedkin._base import Array, Index, Mask, count
from fedkin.data import Finding, Rows, deal_folds, level_text
from fedkin.errors import DataError
from fedkin.losses import Loss
from fedkin.losses.cox import RiskSets, log_hazards

if TYPE_CHECKING:
    from fedkin.federate.contract import Contract


#: A single row may not make up more than this share of any sum, along any direction.
MOST_OF_A_SUM = 0.98
#: Fewer rows than a cell must have may not make up more than this share of a sum.
_MOST_OF_FEW = 0.999
#: Fewer than ten rows may not make up more than this share of a sum, unless enough of them have the same value.
_NEARLY_ALL = 0.99999
#: How much larger the mean loss may be at a queried point than at the site's own estimate, in units of the latter and
#: of what the estimate gains over no model at all.
_FAR = 5.0
#: Weights of rows at two points that differ by less than this share count once in how many numbers have left, so that
#: a fit may converge. What differs by more than the second can be told apart: sums have 16 digits.
_SAME_WEIGHTS, _TOLD_APART = 1e-4, 1e-8
#: Directions with less than this share of the largest are rounding. Products of columns keep 16 digits, so a contract
#: whose columns nearly coincide, such as a curve with knots 1e-8 apart, tells of directions of 1e-10.
_SMALLEST = 1e-13
#: A cell is visible in the columns of a curve when a curve of them is its indicator, but for this sum of squares.
_VISIBLE = 0.005
_TINY = 1e-300
_ALL_OF_A_SUM = 1.0 - 1e-9  # few rows may not have so much of the weight in a difference of answers
_ON_GRID = 0.9  # share of rows with values on a grid, so that these are decoded
_COUNTED = 3  # values of a number that its sum and sum of squares count
_MOST_CELLS = 2000  # possible values among which lattice reduction finds those of the rows
_NEAR = 30  # rows to look at for a group of few; equations for more have too many unknowns to be solved
_SOLVED = 0.9999  # share of a value in the directions that equations determine: it is known to 1% of its unit
_FEWEST_APART = 10  # rows in which a column is not constant: with eight, decoding failed
_SAME = 1e-6  # difference of equal values
_TURNS, _AT_ONCE = 20, 10**7  # of a search for few rows, and numbers that it holds
_STILL = 0.1  # moves of predictors by a column that do not make weights differ
_ALIKE = 1e-5  # difference of predictors whose weights cannot be told apart
_APART, _STEP = 0.01, 1e-5  # by which equal values are told apart, and by which predictors move, in units of columns


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Minimum counts for any computation from a site's rows; a site may raise them, never lower them.

    ``rows_per_parameter`` and ``cell`` are DataSHIELD's defaults: nfilter.glm = 0.33 parameters per row, and
    nfilter.tab = 3 rows in every cell that is not empty. For ``rows`` its nfilter.subset is 3; here it is 10, the value
    to which it says census offices are moving (https://wiki.datashield.org/en/statdev/disclosure-checks). ``pair`` is
    nfilter.tab for pairs of levels of two features, which sums of products count. ``effective_rows`` is the minimum
    number of rows with weight in the answer to a query.
    """

    rows: Annotated[int, Meta(ge=1)] = 10
    rows_per_parameter: Annotated[float, Meta(ge=0)] = 3.0
    cell: Annotated[int, Meta(ge=1)] = 3
    pair: Annotated[int, Meta(ge=1)] = 3
    effective_rows: Annotated[float, Meta(ge=1)] = 5.0

    def stricter(self, other: Thresholds | None) -> Thresholds:
        """Return the larger of each pair of thresholds."""
        names = Thresholds.__struct_fields__
        return Thresholds(**{name: max(getattr(self, name), getattr(other or self, name)) for name in names})

    @property
    def lowers_minima(self) -> bool:
        """Whether the site's custodian has lifted the hard `MINIMA`."""
        return False


#: Minima that no contract can lower, only the custodian of a site (``below_minima`` in ``site.toml``).
MINIMA = Thresholds(rows=5, rows_per_parameter=2.0, cell=3, pair=3, effective_rows=3.0)


def required(contract: Contract, own: Thresholds | None = None) -> Thresholds:
    """Return the strictest of the contract's thresholds, the site's own and the hard minima."""
    least = contract.thresholds.stricter(own)
    return least if own is not None and own.lowers_minima else least.stricter(MINIMA)


def fewest_rows(contract: Contract, own: Thresholds | None = None) -> int:
    """Return the minimum number of rows in sums, and in differences of sums."""
    least = required(contract, own)
    return max(least.rows, math.ceil(least.rows_per_parameter * contract.n_params))


def fewest_in_fold(contract: Contract, own: Thresholds | None = None) -> int:
    """Return the minimum number of rows in a fold: sums of whole numbers with as many rows as columns are decoded."""
    each = MINIMA.rows_per_parameter if own is None or not own.lowers_minima else 1.0
    return max(required(contract, own).rows, math.ceil(each * contract.n_params))


def check_count(contract: Contract, n: int, own: Thresholds | None = None) -> list[Finding]:
    """Return findings if n rows are not enough."""
    least, needed = required(contract, own), fewest_rows(contract, own)
    if n >= needed:
        return []
    words = f"{count(n, 'row')}, but at least {needed} are needed"
    more = f" ({least.rows_per_parameter:g} for each of {count(contract.n_params, 'parameter')})"
    return [Finding("", words + (more if needed > least.rows else ""), "few_rows")]


def check_disclosure(
    contract: Contract, rows: Rows, own: Thresholds | None = None, *, site: str | int = "", folds: int = 0
) -> list[Finding]:
    """Return findings that forbid any computation from a site's prepared rows; [] if there are none.

    The site's ``own`` thresholds apply if they are stricter than the contract's. With ``folds`` folds, which depend on
    the id of the ``site``, each fold must have enough rows; 0 stands for sums over all rows only. No row may make up
    nearly all of a sum of squares, along any combination of columns, nor may fewer rows than a cell must have.
    """
    least, cells = required(contract, own), list(_cells(contract, rows))
    decoded = [one for one in _cells(contract, rows, decoded=True) if one[:2] not in {known[:2] for known in cells}]
    loss, most = contract.loss_object(), _COUNTED
    if not loss.quadratic and loss.target != "survival":  # as many messages as `check_query` may allow
        held = rows.n_samples * len(contract.column_names)
        most = max(most, min(contract.messages, held // _numbers_at(contract.n_params)))
    findings, needed = check_count(contract, rows.n_samples, own), f"at least {least.cell} (or none) are needed"
    # sums of a curve's columns over a level are equations in one value a row
    curved = {one.name: len(one.encoded) for one in contract.schema.features if one.knots}
    curve = max(curved.values(), default=0) if own is None or not own.lowers_minima else 0
    for name, value, inside in cells:
        if name not in curved and least.cell <= (n := int(inside.sum())) < least.cell + curve:
            words = f"only {count(n, 'row')} with {value!r}, but with a curve of {count(curve, 'column')} at least"
            findings.append(Finding(name, f"{words} {least.cell + curve} are needed", "few_in_cell"))
    # sums at so many points, weighted by a function of one number, count its values
    rare: dict[str, list[str]] = {}
    for name, value, inside in _cells(contract, rows, most, decoded=True):
        if 0 < (n := int(inside.sum())) < least.cell:
            rare.setdefault(name, []).append(f"{count(n, 'row')} with {value!r}")
    for name, (first, *more) in rare.items():
        also = f" (and so few with {count(len(more), 'other value')})" if more else ""
        hint = "leave them out, or join levels or values"
        words = f"only {first}{also}, but {needed}: so few could be recognised; {hint}"
        findings.append(Finding(name, words, "few_in_cell"))
    findings += _rare_pairs(contract, cells, least.pair, np.zeros(rows.n_samples, dtype=np.int64), decoded)
    findings += _few_events(contract, rows, fewest := max(least.rows, contract.n_params + 1))
    dominated = _Dominance(contract, rows, least.cell) if own is None or not own.lowers_minima else None
    if not findings and dominated is not None:
        findings += dominated.check()
    if findings or not folds:
        return findings
    fold_of = deal_folds(site, rows.n_samples, folds, contract.seed)
    smallest = int(np.bincount(fold_of, minlength=folds).min())
    if smallest < (fewest := fewest_in_fold(contract, own)):
        words = f"{count(len(fold_of), 'row')} in {folds} folds are only {smallest} in one of them"
        findings.append(Finding("", f"{words}, and at least {fewest} are needed", "few_in_fold"))
    for name, value, inside in [*cells, *decoded]:
        parts, enough = np.bincount(fold_of[inside], minlength=folds), least.cell + curve * (name not in curved)
        if (parts := parts[parts > 0]).size and (smallest := int(parts.min())) < enough:
            words = f"{count(int(inside.sum()), 'row')} with {value!r}, but only {smallest} in one of {folds} folds"
            findings.append(Finding(name, f"{words}, and at least {enough} (or none) are needed", "few_in_fold"))
    findings += _rare_pairs(contract, cells, least.pair, fold_of, decoded)
    for k in range(folds):
        findings += _few_events(contract, rows.take(fold_of == k), fewest, f" in fold {k + 1} of {folds}")
    for k in range(folds if dominated is not None and not findings else 0):
        assert dominated is not None
        findings += dominated.check(fold_of == k, f" in fold {k + 1} of {folds}")
    return findings


def most_folds(contract: Contract, rows: Rows, own: Thresholds | None = None, *, site: str | int) -> int:
    """Return the largest allowed number of folds, at most the contract's; 0 for none."""
    most = contract.folds
    return next((k for k in range(most, 1, -1) if not check_disclosure(contract, rows, own, site=site, folds=k)), 0)


def check_point(
    contract: Contract, rows: Rows, theta: Array, own: Thresholds | None = None, fold_of: Index | None = None
) -> list[Finding]:
    """Return findings that forbid sums at ``theta (p,)``, also in each fold of ``fold_of (n,)``; [] if none.

    A loss that is not quadratic weighs rows by its curvature. The effective number of rows, ``(sum w)^2 / sum w^2``,
    must reach the threshold, and no row may contribute nearly all of any sum of second derivatives.
    """
    least, loss = required(contract, own).effective_rows, contract.loss_object()
    for part in [None] if fold_of is None else [None, *np.unique(fold_of).tolist()]:
        chosen = rows if part is None else rows.take(fold_of == part)
        words = concentration(loss, chosen, theta, least) or _difference(loss, chosen, theta)
        if words is not None:
            where = "there" if part is None else f"there, in fold {part + 1},"
            return [Finding("", f"{where} {words}", "concentrated")]
    if own is None or not own.lowers_minima:
        folds = [None] if fold_of is None else np.unique(fold_of).tolist()
        parts = [np.ones(rows.n_samples, dtype=bool) if k is None else fold_of == k for k in folds]
        if findings := _solvable(contract, rows, [(theta, part) for part in parts]):
            return findings
    return _few_alike(contract, rows, theta, required(contract, own).cell)


def check_rounds(contract: Contract, rows: Rows, theta: Array, own: Thresholds | None = None) -> list[Finding]:
    """Return findings that forbid a site to join rounds that start at ``theta (p,)``; [] if there are none.

    This goes beyond `check_disclosure` and `check_point`. Every round must use all rows, since others know which rows
    are in a batch and could solve for each of them. Edge tests with a sandwich variance, a sum of squared scores, need
    enough rows with weight, and with every level.
    """
    batch, select = contract.rounds.batch_size, contract.rounds.select
    if batch is not None and batch < rows.n_samples and not (own is not None and own.lowers_minima):
        words = f"rounds.batch_size is {batch}, but these are {count(rows.n_samples, 'row')}: many sums over some of "
        hint = "them can be solved for each row; a contract without batch_size uses all rows"
        return [Finding("", words + hint, "batches")]
    if findings := check_disclosure(contract, rows, own) or check_point(contract, rows, theta, own):
        return findings
    rowwise, least = contract.loss_object().rowwise, required(contract, own).effective_rows
    if select is None or select.variance != "sandwich" or rowwise is None or rows.y is None:
        return []
    for name, value, inside in () if own is not None and own.lowers_minima else _cells(contract, rows):
        if 0 < (few := int(inside.sum())) < _FEWEST_APART:  # squared residuals by level determine the rows of few
            words = f"only {count(few, 'row')} with {value!r}, but at least {_FEWEST_APART} are needed"
            return [Finding(name, f'{words} with rounds.select.variance "sandwich"; use "model"', "few_in_cell")]
    scores = rowwise.slope_at(rowwise.predictors(theta, rows.X, rows.offset), rows.y)
    if not (effective := _effective((scores**2).sum(axis=1))) >= least:
        words = f"{effective:.3g} rows in effect have the weight in the sandwich variance, but {least:g} are needed"
        return [Finding("", words, "concentrated")]
    return []


def concentration(loss: Loss, rows: Rows, theta: Array, least: float) -> str | None:
    """Return why sums at ``theta (p,)`` reveal too much about few rows; None if at least ``least`` rows have weight.

    The weights of a quadratic loss were checked by `check_disclosure`.
    """
    if loss.quadratic:
        return None
    one = _told(loss, theta, rows)
    if not one.effective >= least:
        return f"{one.effective:.3g} rows in effect have the weight, but {least:g} are needed"
    if one.share > MOST_OF_A_SUM:
        return f"one row makes up {one.share:.4f} of a sum, but at most {MOST_OF_A_SUM:g} may leave"
    return None


def _difference(loss: Loss, rows: Rows, theta: Array) -> str | None:
    """Return why differences of the sums of one message reveal too much about one row; None if they do not.

    A message has sums of the columns, the gradient and the Hessian. The gradient minus the Hessian's first line is a
    row if only that row has a count; so are the sums minus the Hessian's first line if only that row has no curvature.
    """
    if loss.quadratic:
        return None
    factors = np.hstack([np.ones((rows.n_samples, 1)), _told(loss, theta, rows).factors])
    if (share := float(_row_shares(factors[:, None, :], _TOLD_APART).max())) > MOST_OF_A_SUM:
        return f"one row makes up {share:.4f} of a difference of sums, but at most {MOST_OF_A_SUM:g} may leave"
    return None


def check_query(
    contract: Contract,
    rows: Rows,
    theta: Array,
    known: Sequence[Array],
    own: Thresholds | None = None,
    *,
    fold_of: Index | None = None,
) -> list[Finding]:
    """Return findings that forbid sums at ``theta (p,)`` after earlier ones; [] if there are none.

    ``known`` are the points of all earlier messages, starting with the site's own estimate, whose sums were sent for
    each fold of ``fold_of (n,)``. Beyond `check_point`, no row may contribute nearly all of any combination of new and
    earlier sums. All messages together may not have more numbers than the rows, because the rows could then be solved
    for.
    """
    loss, size = contract.loss_object(), float(np.linalg.norm(theta))
    if not size <= contract.radius:
        words = f"the point has length {size:.3g}, outside the contract's ball of radius {contract.radius:.3g}"
        return [Finding("", words, "query_outside")]
    if loss.quadratic:
        return []  # the sums follow from those that were shared
    with np.errstate(all="ignore"):
        here, start, zero = (loss.value(at, *rows.arrays) for at in (theta, known[0], np.zeros_like(theta)))
    most = start + _FAR * (max(zero - start, 0.0) + abs(start))
    if not here <= most:
        words = f"there the mean loss is {here:.3g}, but at most {most:.3g} is plausible for these rows"
        return [Finding("", words, "query_far")]
    if findings := check_point(contract, rows, theta, own):
        return findings
    folds = [np.ones(rows.n_samples, dtype=bool)] if fold_of is None else [fold_of == k for k in np.unique(fold_of)]
    blocks = [_told(loss, at, rows) for at in (theta, *known[1:])]
    weights, factors = [one.weight for one in blocks], [np.ones((rows.n_samples, 1)), *(one.factors for one in blocks)]
    for fold in folds:
        part, whole = _told(loss, known[0], rows.take(fold)), np.zeros((rows.n_samples, blocks[0].factors.shape[1] + 1))
        whole[fold] = np.column_stack([part.weight, part.factors])
        weights.append(whole[:, 0])
        factors.append(whole[:, 1:])
    columns = np.stack(weights, axis=1)
    # points that are nearly the same tell the same
    values = np.linalg.svd(columns / np.maximum(np.linalg.norm(columns, axis=0), _TINY), compute_uv=False)
    told, p = int((values > _SAME_WEIGHTS * values[0]).sum()), theta.size
    told, held = told * _numbers_at(p), rows.n_samples * len(contract.column_names)
    if told > held:
        words = f"with the answer {told} numbers would have left, but the rows have only {held}"
        return [Finding("", f"{words}: with so many, rows could be solved for", "query_many")]
    if (share := float(_row_shares(np.hstack(factors)[:, None, :], _TOLD_APART).max())) > MOST_OF_A_SUM:
        words = f"together with what was sent before, one row makes up {share:.4f} of a sum"
        words += "; query another point or, with the Huber loss, agree on a larger threshold in the contract"
        return [Finding("", words, "query_difference")]
    if own is not None and own.lowers_minima:
        return []
    whole = np.stack([*weights[: len(blocks)], _told(loss, known[0], rows).weight], axis=1)
    left, values, _ = np.linalg.svd(whole / np.maximum(np.linalg.norm(whole, axis=0), _TINY), full_matrices=False)
    left = left[:, values > _TOLD_APART * values[0]]
    most = min(_FEWEST_APART - 1, (len(left) - left.shape[1]) // 2)
    if most > 0 and _most_of_few(left, most, _ALL_OF_A_SUM)[1] > _ALL_OF_A_SUM:
        words = f"with what was sent before, at most {most} rows have all the weight in a difference of sums"
        return [Finding("", f"{words}, but at least {_FEWEST_APART} are needed, or none", "query_difference")]
    whole_table = np.ones(rows.n_samples, dtype=bool)
    before = [(known[0], fold) for fold in folds] + [(at, whole_table) for at in known[1:]]
    return _solvable(contract, rows, [*before, (theta, whole_table)])


def _solvable(contract: Contract, rows: Rows, sums: Sequence[tuple[Array, Mask]]) -> list[Finding]:
    """Return findings if few rows could be solved for from sums, each at a point and over some rows.

    A level or a pair of levels has sums of its own: the second derivatives of its column with all others, or with the
    other level's. The weights follow from the values of the rows. Where these equations, linearised, determine a value
    of a row alone, somebody who solves them has the patient.
    """
    loss = contract.loss_object()
    if loss.quadratic or loss.target == "survival":
        return []
    target = None if contract.schema.target is None else contract.schema.target.name
    cells = [(name, value, inside) for name, value, inside in _cells(contract, rows) if name != target]
    groups = [(f"{name} {value!r}", 1, inside) for name, value, inside in cells]
    groups += [
        (f"{one} {first!r} and {other} {second!r}", 2, inside & also)
        for (one, first, inside), (other, second, also) in combinations(cells, 2)
        if one != other
    ]
    wide = loss.n_params(1)  # outputs
    each = {0: 1 + 2 * wide + 3 * wide * (wide + 1) // 2, 1: wide + wide * (wide + 1), 2: wide * (wide + 1) // 2}
    for name, order, inside in [("", 0, np.ones(rows.n_samples, dtype=bool)), *groups]:
        # with one unknown a row, to which a point can reduce them
        if not 0 < inside.sum() <= min(2 + each[order] * len(sums), _NEAR):
            continue
        if _solved(loss, rows.take(inside), [(at, which[inside]) for at, which in sums], order) > _SOLVED:
            words = f"values of the {count(int(inside.sum()), 'row')}{' with ' * bool(name)}{name} could be solved for"
            return [Finding("", f"{words} from the sums that would have left", "solvable")]
    return []


def _solved(loss: Loss, rows: Rows, sums: Sequence[tuple[Array, Mask]], order: int) -> float:
    """Return how far sums determine a single value of a row: the largest share of it in the equations' directions."""
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
    size = np.linalg.norm(equations, axis=1, keepdims=True)
    _, values, directions = np.linalg.svd(equations / np.where(size > 0, size, 1.0), full_matrices=False)
    seen = directions[values > _TOLD_APART * max(float(values.max(initial=0.0)), _TINY)]
    return float((seen**2).sum(axis=0).max(initial=0.0))


def _numbers_at(p: int) -> int:
    """Return how many numbers a message has: value, gradient and half of the second derivatives."""
    return p * (p + 3) // 2 + 1


@dataclass(frozen=True)
class _Told:
    """Disclosure of each of n rows by sums at a point."""

    weight: Array  # (n,) of the row in the second derivatives
    factors: Array  # (n, c) by which the row's columns are multiplied in any of the sums
    share: float  # the largest of one row in the second derivatives, along any direction
    effective: float  # number of rows that have the weight


def _told(loss: Loss, theta: Array, rows: Rows) -> _Told:
    """Return what sums at ``theta (p,)`` of a loss that is not quadratic reveal about each row."""
    with np.errstate(all="ignore"):
        if loss.target == "survival":
            return _told_by_risk_sets(theta, rows)
        rowwise = loss.rowwise
        if rowwise is None or rows.y is None:
            raise DataError(f"disclosure by sums of the {loss.name} loss is not known, so none may leave")
        eta = rowwise.predictors(theta, rows.X, rows.offset)
        slope, curvature = rowwise.slope_at(eta, rows.y), rowwise.curvature_at(eta, rows.y)
    n, k = slope.shape
    weight = np.einsum("nkk->n", curvature)
    if not (np.isfinite(curvature).all() and np.isfinite(slope).all()):
        return _Told(np.zeros(n), np.full((n, 1), np.nan), 1.0, 0.0)
    first, second = np.triu_indices(k)
    # factors of each row's Hessian
    values, vectors = np.linalg.eigh(curvature)
    root = np.sqrt(np.maximum(values, 0.0))[:, :, None] * np.swapaxes(vectors, 1, 2)
    parts = np.einsum("nkj,nq->nkjq", root, rows.X).reshape(n, k, -1)
    factors = np.hstack([slope, curvature[:, first, second]])
    return _Told(weight, factors, float(_row_shares(parts).max()), _effective(weight))


def _told_by_risk_sets(theta: Array, rows: Rows) -> _Told:
    """Return what sums of the Cox loss reveal: a row is in the sum of every event at which it is at risk.

    With p the share of a row in the hazard of a risk set and m the mean of the set, the gradient has the row p times
    (the expected number of its events), and the second derivatives have ``p (x - m) (x - m)'`` of it.
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
        return _Told(np.zeros_like(eta), np.full((eta.size, 1), np.nan), 1.0, 0.0)
    values, vectors = np.linalg.eigh((rows.X * expected[:, None]).T @ rows.X - means.T @ means)
    seen = values > _SMALLEST * max(float(values[-1]), _TINY)
    Z, centre = (one @ (vectors[:, seen] / np.sqrt(values[seen])) for one in (rows.X, means))
    about = np.column_stack([centre / total[:, None], (centre**2).sum(axis=1) / total])
    of_means = hazard[:, None] * np.column_stack([risk.cumulated(one) for one in about.T])
    trace = expected * (Z**2).sum(axis=1) - 2 * (Z * of_means[:, :-1]).sum(axis=1) + of_means[:, -1]
    time, share = np.abs(rows.y), 0.0
    for k in np.flatnonzero(trace > MOST_OF_A_SUM).tolist():  # at most as many as there are directions
        away = (Z[k] - centre) * np.sqrt(hazard[k] / total * (time[risk.deaths] <= time[k]))[:, None]
        share = max(share, float(np.linalg.norm(away, ord=2)) ** 2)
    return _Told(weight, factors, share, min(_effective(weight), _effective(expected)))


def _effective(weight: Array) -> float:
    return float(weight.sum()) ** 2 / max(float(weight @ weight), _TINY)


def _few_events(contract: Contract, rows: Rows, fewest: int, where: str = "") -> list[Finding]:
    """Return findings if sums over the events of survival times reveal too much."""
    if contract.loss_object().target != "survival" or rows.y is None:
        return []
    if (events := int((rows.y > 0).sum())) >= fewest:
        return []
    words = f"only {count(events, 'event')}{where}, but at least {fewest} are needed: sums are over events"
    return [Finding("", words, "few_events")]


def _rare_pairs(
    contract: Contract,
    cells: Sequence[tuple[str, str, Mask]],
    least: int,
    fold_of: Index,
    decoded: Sequence[tuple[str, str, Mask]],
) -> list[Finding]:
    """Return the pairs of values of two features that occur, but in too few rows: sums of products count them.

    ``decoded`` are values of curves, of which the sums with a level, or with another curve if there are not too many
    pairs, tell how many rows have each.
    """
    target = None if contract.schema.target is None else contract.schema.target.name
    known = [cell for cell in cells if cell[0] != target]
    exact, known = len(known), known + list(decoded)
    sizes = Counter(name for name, _, _ in known)
    inside = np.array([mask for _, _, mask in known], dtype=np.float64)
    rare: dict[tuple[str, str], dict[str, None]] = {}
    for fold in np.unique(fold_of) if known else ():
        part = inside[:, fold_of == fold]
        together = part @ part.T
        for a, b in np.argwhere(np.triu((together > 0) & (together < least), 1)).tolist():
            (one, first, _), (other, second, _) = known[a], known[b]
            where = "" if fold_of.max() == 0 else " in one of the folds"
            words = f"only {count(int(together[a, b]), 'row')} with {first!r} and {other} {second!r}{where}"
            if one != other and (a < exact or sizes[one] * sizes[other] <= _MOST_CELLS):
                rare.setdefault((one, other), {})[words] = None
    hint = f"but at least {least} (or none) are needed: leave them out, or join levels or values"
    findings = []
    for (one, _), (words, *more) in rare.items():
        also = f" (and so few of {count(len(more), 'other pair')})" if more else ""
        findings.append(Finding(one, f"{words}{also}, {hint}", "few_in_pair"))
    return findings


def _few_alike(contract: Contract, rows: Rows, theta: Array, least: int) -> list[Finding]:
    """Return a finding if rows' weights at ``theta (p,)`` depend on few possible values, of which some are rare.

    Sums have 53 bits, and values are often whole numbers: anyone who knows all possible weights finds, by lattice
    reduction, how many rows have each, and the totals of all columns over these rows. Weights follow from the linear
    predictors, so their values count, whatever columns (and offset) they are the sums of.
    """
    loss = contract.loss_object()
    if loss.quadratic or loss.target == "survival":
        return []
    at, slopes = int(contract.intercept), theta.reshape(-1, rows.X.shape[1]).T
    moves = list[tuple[str, Array, Array]]()  # of predictors by a column: its name, those of rows and all possible ones
    for column in contract.schema.features:
        which = slice(at, at := at + len(column.encoded))
        block = rows.X[:, which]
        if column.kind == "category":
            possible = np.vstack([np.zeros(block.shape[1]), np.eye(block.shape[1])])
        elif column.knots:
            possible = np.unique(block, axis=0)[: None if _possible(_straight(column.knots, block)).size else 0]
        else:
            possible = _possible(block[:, 0])[:, None]
        moves.append((column.name, block @ slopes[which], possible @ slopes[which]))
    if rows.offset is not None:
        possible = _possible(rows.offset)
        possible = possible if possible.size else np.log(_possible(np.exp(np.clip(rows.offset, -300, 300))))
        wide = np.ones((1, slopes.shape[1]))
        moves.append(("the offset", rows.offset[:, None] * wide, possible[:, None] * wide))
    moves = [one for one in moves if (np.ptp(one[1], axis=0) >= _STILL).any()]
    sums = np.zeros((1, slopes.shape[1]))
    for _, _, possible in moves:
        sums = (sums[:, None] + possible).reshape(-1, slopes.shape[1])
        sums = sums[_different(sums)[0]]
        if not 0 < len(sums) <= _MOST_CELLS:
            return []
    if not moves or (few := int(_different(np.sum([of_rows for _, of_rows, _ in moves], axis=0))[1].min())) >= least:
        return []
    words = f"weights there depend on {' and '.join(name for name, _, _ in moves)} only, and some values have only"
    hint = f"but at least {least} are needed: coarser values, or join levels"
    return [Finding("", f"{words} {count(few, 'row')}, {hint}", "few_in_cell")]


def _different(predictors: Array) -> tuple[Index, Index]:
    """Return the first and the number of each of the different lines; on no usual number does rounding split them."""
    cells = np.floor(predictors / _ALIKE + math.sqrt(0.5))
    cells = cells[:, 0] if cells.shape[1] == 1 else cells
    _, first, counts = np.unique(cells, axis=0, return_index=True, return_counts=True)
    return first, counts


class _Dominance:
    """Whether few rows make up nearly all of a sum of squares, along any combination of columns, target and offset.

    The largest share of a row is its leverage, ``h_ii`` of the projection on the columns; that of several rows is the
    largest eigenvalue of their block of the projection. A column that is 0 except in two rows, and two columns that
    differ in one row, have shares of 1. Sums of such a column with itself and others are sums over these rows, weighted
    by its values: where these are numbers of a few digits, they are decoded to the rows, unless enough rows have each.
    """

    def __init__(self, contract: Contract, rows: Rows, cell: int) -> None:
        constant = () if contract.intercept else (np.ones(rows.n_samples),)  # sums of columns are shared, too
        loss = contract.loss_object()
        linear = loss.quadratic or loss.target in ("count", "positive")  # sums of columns times the target are shared
        given = {"the target": rows.y if linear else None, "the offset": rows.offset}
        more = {name: values.astype(np.float64) for name, values in given.items() if values is not None}
        self.columns = np.column_stack([rows.X, *constant, *more.values()])
        self.names = [*contract.column_names, *("(intercept)" for _ in constant), *more]
        self.cell = cell

    def check(self, which: Mask | slice = slice(None), where: str = "") -> list[Finding]:
        """Return findings that forbid sums over some of the rows."""
        columns = self.columns[which]
        size = np.sqrt((columns**2).sum(axis=0))
        left, values, right = np.linalg.svd(columns / np.where(size > 0, size, 1.0), full_matrices=False)
        seen = values > _SMALLEST * max(float(values[0]), _TINY)
        left, right = left[:, seen], right[seen] / values[seen, None]
        share = (left**2).sum(axis=1)
        row = int(share.argmax())
        if share[row] > MOST_OF_A_SUM:
            return [self._finding(f"one row makes up {share[row]:.1%} of a sum", left[row] @ right, where)]
        larger = min(_FEWEST_APART - 1, (len(left) - left.shape[1]) // 2)
        for most, least in ((self.cell - 1, _MOST_OF_FEW), (max(larger, self.cell - 1), _NEARLY_ALL)):
            while left.shape[1]:
                along, total = _most_of_few(left, min(most, len(left)), least)
                if total <= least:
                    break
                values = np.sort(left @ along)
                values = values[np.abs(values) > _SAME]
                alike = np.diff(np.flatnonzero(np.diff(values, prepend=-np.inf, append=np.inf) > _SAME))
                if alike.min() < self.cell:
                    few = 1 + int((np.cumsum(np.sort(values**2)[::-1]) <= least).sum())
                    words = f"only {count(few, 'row')} make up {total:.2%} of a sum"
                    return [self._finding(words, along @ right, where)]
                others = np.linalg.svd(along[None])[2][1:]  # enough rows have each value: look at other directions
                left, right = left @ others.T, others @ right
        return []

    def _finding(self, words: str, direction: Array, where: str) -> Finding:
        order = np.argsort(-np.abs(direction), kind="stable")[:2]
        names = " and ".join(self.names[k] for k in order.tolist() if abs(direction[k]) > 0.1 * np.abs(direction).max())
        hint = "leave these rows or a column out, or join levels in the contract"
        return Finding("", f"{words}{where}, along {names}: so few could be recognised; {hint}", "dominated")


def _most_of_few(left: Array, most: int, least: float) -> tuple[Array, float]:
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


def _row_shares(parts: Array, accuracy: float = _SMALLEST) -> Array:
    """Return the largest share ``(n,)`` of each row in the sum of squares along any direction: its leverage.

    ``parts (n, k, p)`` has k lines for each row. Directions below ``accuracy`` of the largest are ignored.
    """
    n, k, p = parts.shape
    lines = parts.reshape(n * k, p)
    size = np.sqrt((lines**2).sum(axis=0))
    left, values, _ = np.linalg.svd(lines / np.where(size > 0, size, 1.0), full_matrices=False)
    left = left[:, values > accuracy * max(float(values[0]), _TINY)].reshape(n, k, -1)
    return np.asarray(np.linalg.norm(left, ord=2, axis=(1, 2)) ** 2 if k > 1 else (left**2).sum(axis=(1, 2)))


def refuse_disclosure(findings: list[Finding], refused: str, what: str = "single rows") -> None:
    """Raise a `DataError` with all findings, if there are any; it starts with what is refused."""
    if findings:
        why = "single rows could be recognised" if what == "single rows" else f"{what} could single rows out"
        lines = "".join(f"\n  {finding}" for finding in findings)
        raise DataError(f"{refused}, because {why}:{lines}")


def _cells(
    contract: Contract, rows: Rows, most: int = _COUNTED, *, decoded: bool = False
) -> Iterator[tuple[str, str, Mask]]:
    """Yield column, value and which rows have it: levels, classes, all values of numbers that have at most so many.

    Of two or three, their number, sum and sum of squares say how many rows have each. Also parts of a curve, where its
    knots single them out, and with ``decoded`` all its values on a grid such as whole years: sums of curves have so
    many bits that lattice reduction finds how many rows have each.
    """
    at = int(contract.intercept)
    for column in contract.schema.features:
        block = rows.X[:, at : at + len(column.encoded)]
        at += block.shape[1]
        if column.kind == "category":
            yield column.name, level_text(column.levels[0]), (block == 0).all(axis=1)
            for k, level in enumerate(column.levels[1:]):
                yield column.name, level_text(level), block[:, k] != 0
        elif column.knots:
            for text, inside in _cells_of_curve(column.knots, block, decoded):
                yield column.name, text, inside
        elif 1 < (values := np.unique(block[:, 0])).size <= most:
            centre, scale = column.centre_and_scale
            for value in values.tolist():
                shown = value * scale + (centre if contract.intercept else 0.0)
                yield column.name, f"{shown:.6g}", block[:, 0] == value
    target = contract.schema.target
    if target is not None and target.kind == "category" and rows.y is not None:
        for k, label in enumerate(target.levels):
            yield target.name, level_text(label), np.asarray(rows.y == k)
    elif target is not None and rows.y is not None and contract.loss_object().quadratic:
        values = np.unique(rows.y)
        for value in values.tolist() if 1 < values.size <= _COUNTED else ():
            yield target.name, f"{value:.6g}", np.asarray(rows.y == value)


def _possible(of_rows: Array) -> Array:
    """Return all values of the smallest grid that has nearly all of a column's, and the rest; none if too many.

    By Euclid's algorithm with the steps between values, first with all, then with those that occur again.
    """
    values = np.unique(of_rows)
    low, span = float(values[0]), float(np.ptp(values))
    steps = np.diff(values)
    steps = steps[steps > 1e-9 * span]  # less is rounding
    _, which, times = np.unique(np.round(steps / max(span, _TINY) * 1e9), return_inverse=True, return_counts=True)
    for left in (steps, steps[times[which] > 1]) if steps.size else ():
        while left.size and (unit := float(left.min())) * _MOST_CELLS >= span:
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


def _straight(knots: Sequence[float], block: Array) -> Array:
    """Return the values of a column without its curve."""
    return knots[0] + block @ (np.asarray(knots[1:]) - knots[0]) if knots else block[:, 0]


def _cells_of_curve(knots: Sequence[float], block: Array, decoded: bool) -> Iterator[tuple[str, Mask]]:
    """Yield the values, and both sides of the steps, whose indicators are curves: their rows are counted by the sums.

    Four knots with no value between make a step, five about one value an indicator of it. With ``decoded`` all values
    are yielded where they are on a grid.
    """
    of_rows = _straight(knots, block)
    values, first, which = np.unique(of_rows, return_index=True, return_inverse=True)
    basis = np.column_stack([np.ones(values.size), block[first]])
    size = np.sqrt((basis**2).sum(axis=0))
    left, found, _ = np.linalg.svd(basis / np.where(size > 0, size, 1.0), full_matrices=False)
    left = left[:, found > _SMALLEST * max(float(found[0]), _TINY)]
    seen = 1.0 - (left**2).sum(axis=1) < _VISIBLE
    if decoded and _possible(of_rows).size:
        seen[:] = True
    for k in np.flatnonzero(seen).tolist():
        yield f"{values[k]:.6g}", which == k
    below = np.arange(1.0, values.size + 1) - (np.cumsum(left, axis=0) ** 2).sum(axis=1)
    for k in np.flatnonzero(below[:-1] < _VISIBLE).tolist():
        yield f"at most {values[k]:.6g}", which <= k
        yield f"above {values[k]:.6g}", which > k
