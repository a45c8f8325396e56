"""The disclosure gate, which every number must pass before it leaves a site, by share, answer, run or publish.

Sums over few rows reveal them. With no more rows than columns, sums of products determine the rows up to a rotation;
for a level with a single row, the products of its column with the others are the row itself. A query names the point
at which losses are summed, and a loss that is not quadratic weighs rows by its curvature there: at a maliciously chosen
point, one row has all the weight.

Every check is one function, whose first sentence says what it refuses and why; its name is the code of its findings.
Four lists have the checks in the order in which they are made, and `fedkin.federate.algebra` has the mathematics.

| before | checks |
|---|---|
| anything leaves (also `join`) | `OF_ROWS`, of all rows and of each fold |
| sums at a point | `OF_POINTS` |
| the answer to a query | `OF_QUERIES`, together with everything sent before |
| rounds | `OF_ROUNDS` |

What has noise for differential privacy must pass `check_count` only, since refusals may depend on no row. A site's
custodian may lower the thresholds below the hard minima, and lifts the checks in `LIFTED` with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import Array, Index, count
from fedkin.data import Finding, Rows
from fedkin.errors import DataError
from fedkin.federate.algebra import (
    MOST_CELLS,
    MOST_OF_A_SUM,
    TOLD_APART,
    Release,
    Weights,
    basis,
    determined,
    different,
    effective_rows,
    fewest_alike,
    most_of_few,
    numbers_at,
    share_of_one,
    sums_by_fold,
)
from fedkin.federate.settings import Thresholds, fewest_in_fold, fewest_rows, required
from fedkin.losses import Loss

if TYPE_CHECKING:
    from fedkin.federate.contract import Contract

#: Fewer rows than a cell must have may not make up more than this share of a sum.
_MOST_OF_FEW = 0.999
#: Fewer than ten rows may not make up more than this share of a sum, unless enough of them have the same value.
_NEARLY_ALL = 0.99999
_ALL_OF_A_SUM = 1.0 - 1e-9  # few rows may not have so much of the weight in a difference of answers
_FEWEST_APART = 10  # rows in which a column is not constant: with eight, decoding failed
#: How much larger the mean loss may be at a queried point than at the site's own estimate, in units of the latter and
#: of what the estimate gains over no model at all.
_FAR = 5.0
#: Weights of rows at two points that differ by less than this share count once in how many numbers have left, so that
#: a fit may converge.
_SAME_WEIGHTS = 1e-4
_NEAR = 30  # rows to look at for a group of few; equations for more have too many unknowns to be solved
_SOLVED = 0.9999  # share of a value in the directions that equations determine: it is known to 1% of its unit
_STILL = 0.1  # moves of predictors by a column that do not make weights differ

Refusals = Iterator[tuple[str, str]]  #: columns, or "" for none, and what is wrong with them


# --- before anything leaves -------------------------------------------------------------------------------------------


def check_disclosure(
    contract: Contract, rows: Rows, own: Thresholds | None = None, *, site: str | int = "", folds: int = 0
) -> list[Finding]:
    """Return findings that forbid any computation from a site's prepared rows; [] if there are none.

    The site's ``own`` thresholds apply if they are stricter than the contract's. With ``folds`` folds, which depend on
    the id of the ``site``, each fold must pass the same checks; 0 stands for sums over all rows only.
    """
    release = Release(contract, rows, own)
    return _check_rows(release) or (_check_folds(release, site, folds) if folds else [])


def most_folds(contract: Contract, rows: Rows, own: Thresholds | None = None, *, site: str | int) -> int:
    """Return the largest allowed number of folds, at most the contract's; 0 for none."""
    release = Release(contract, rows, own)
    allowed = () if _check_rows(release) else range(contract.folds, 1, -1)
    return next((k for k in allowed if not _check_folds(release, site, k)), 0)


def check_count(contract: Contract, n: int, own: Thresholds | None = None) -> list[Finding]:
    """Return findings if n rows are not enough."""
    least, needed = required(contract, own), fewest_rows(contract, own)
    if n >= needed:
        return []
    words = f"{count(n, 'row')}, but at least {needed} are needed"
    more = f" ({least.rows_per_parameter:g} for each of {count(contract.n_params, 'parameter')})"
    return [Finding("", words + (more if needed > least.rows else ""), few_rows.__name__)]


def _check_rows(release: Release) -> list[Finding]:
    """Return the findings of all checks of counts or, if there are none, of the last check."""
    return [one for check in OF_ROWS[:-1] for one in _first([check], release)] or _first(OF_ROWS[-1:], release)


def _check_folds(release: Release, site: str | int, folds: int) -> list[Finding]:
    return next((found for fold in release.parts(site, folds) if (found := _check_rows(fold))), [])


def few_rows(release: Release) -> Refusals:
    """Refuse few rows: with no more than columns, sums of products determine them up to a rotation."""
    n, fewest = release.rows.n_samples, fewest_in_fold(release.contract, release.own)
    if release.whole is None:
        yield from (("", one.text) for one in check_count(release.contract, n, release.own))
    elif n < fewest:
        whole = count(release.whole.rows.n_samples, "row")
        yield "", f"{whole} in {release.folds} folds are only {n} in one of them, but at least {fewest} are needed"


def few_in_cell(release: Release) -> Refusals:
    """Refuse levels, classes and values that occur in few rows, since sums over these rows leave.

    Products of a level with k functions of a column are k equations in one value a row, so there must be k rows more.
    """
    least, found = release.least.cell, dict[str, list[str]]()
    for cell in release.cells:
        needed, n = least, int(cell.rows.sum())
        if cell.by != "messages" and not release.lifted and least <= n < least + release.rows.X.shape[1]:
            known = any(cell.column in names for names, _ in release.functions)
            needed += max((size for _, size in release.functions), default=0) * (not known)
        if 0 < n < needed:
            more = f" with {needed - least} functions of one column, such as a curve or a square," * (needed > least)
            words = f"only {count(n, 'row')} with {cell.value!r}{release.where}, but{more} at least {needed}"
            found.setdefault(cell.column, []).append(words)
    for name, told in found.items():
        hint = "(or none) are needed: so few could be recognised; leave them out, or join levels or values"
        yield name, f"{_and_others(told, 'value')} {hint}"


def few_in_pair(release: Release) -> Refusals:
    """Refuse pairs of values of two features that occur in few rows, since sums of products count them."""
    least, found = release.least.pair, dict[str, list[str]]()
    known = sorted(release.of_features, key=lambda cell: cell.by == "digits")
    sizes = Counter(cell.column for cell in known)
    inside = np.array([cell.rows for cell in known], dtype=np.float64).reshape(len(known), release.rows.n_samples)
    together = inside @ inside.T
    for a, b in np.argwhere(np.triu((together > 0) & (together < least), 1)).tolist():
        one, other = known[a], known[b]
        counted = one.by == "sums" or sizes[one.column] * sizes[other.column] <= MOST_CELLS
        if one.column != other.column and counted:
            words = f"only {count(int(together[a, b]), 'row')} with {one.value!r} and {other.column} {other.value!r}"
            found.setdefault(one.column, []).append(f"{words}{release.where}, but at least {least}")
    for name, told in found.items():
        yield name, f"{_and_others(told, 'pair')} (or none) are needed: leave them out, or join levels or values"


def few_events(release: Release) -> Refusals:
    """Refuse survival times with few events, since the sums of the Cox loss are over events."""
    fewest, y = max(release.least.rows, release.contract.n_params + 1), release.rows.y
    if release.loss.target == "survival" and y is not None and (events := int((y > 0).sum())) < fewest:
        yield (
            "",
            f"only {count(events, 'event')}{release.where}, but at least {fewest} are needed: sums are over events",
        )


def few_ranks(release: Release) -> Refusals:
    """Refuse survival times of levels with few rows: a search finds the ranks of their times that give the sums."""
    for cell in release.of_features if release.loss.target == "survival" else ():
        if 0 < (n := int(cell.rows.sum())) < _FEWEST_APART:
            hint = f"but with survival times at least {_FEWEST_APART} (or none) are needed: their ranks could be found"
            yield cell.column, f"only {count(n, 'row')} with {cell.value!r}{release.where}, {hint}; join levels"


def dominated(release: Release) -> Refusals:
    """Refuse few rows that make up nearly all of a sum of squares, along any combination of columns, target and offset.

    The largest share of a row is its leverage, ``h_ii`` of the projection on the columns; that of several rows is the
    largest eigenvalue of their block of the projection. A column that is 0 except in two rows, and two columns that
    differ in one row, have shares of 1. Sums of such a column with itself and others are sums over these rows, weighted
    by its values: where these are numbers of a few digits, they are decoded to the rows, unless enough rows have each.
    """
    names, columns = release.summed
    left, right = basis(columns)
    cell, share = release.least.cell, (left**2).sum(axis=1)

    def words(told: str, direction: Array) -> str:
        order = np.argsort(-np.abs(direction), kind="stable")[:2].tolist()
        along = " and ".join(names[k] for k in order if abs(direction[k]) > 0.1 * np.abs(direction).max())
        hint = "so few could be recognised; leave these rows or a column out, or join levels in the contract"
        return f"{told} of a sum{release.where}, along {along}: {hint}"

    if share[row := int(share.argmax())] > MOST_OF_A_SUM:
        yield "", words(f"one row makes up {share[row]:.1%}", left[row] @ right)
        return
    larger = min(_FEWEST_APART - 1, (len(left) - left.shape[1]) // 2)
    for most, least in ((cell - 1, _MOST_OF_FEW), (max(larger, cell - 1), _NEARLY_ALL)):
        while left.shape[1]:
            along, total = most_of_few(left, min(most, len(left)), least)
            if total <= least:
                break
            if fewest_alike(values := left @ along) < cell:
                few = 1 + int((np.cumsum(np.sort(values**2)[::-1]) <= least).sum())
                yield "", words(f"only {count(few, 'row')} make up {total:.2%}", along @ right)
                return
            others = np.linalg.svd(along[None])[2][1:]  # enough rows have each value: look at other directions
            left, right = left @ others.T, others @ right


#: Checks of rows, the last one only if all others pass.
OF_ROWS = (few_rows, few_in_cell, few_in_pair, few_events, few_ranks, dominated)


# --- before sums at a point leave -------------------------------------------------------------------------------------


def check_point(
    contract: Contract, rows: Rows, theta: Array, own: Thresholds | None = None, fold_of: Index | None = None
) -> list[Finding]:
    """Return findings that forbid sums at ``theta (p,)``, also in each fold of ``fold_of (n,)``; [] if none."""
    return _first(OF_POINTS, Release(contract, rows, own, theta=theta, sums=sums_by_fold(rows, theta, fold_of)))


def concentration(loss: Loss, rows: Rows, theta: Array, least: float) -> str | None:
    """Return why sums at ``theta (p,)`` reveal too much about few rows; None if at least ``least`` rows have weight.

    The weights of a quadratic loss were checked by `check_disclosure`.
    """
    if loss.quadratic:
        return None
    one = Weights.at(loss, theta, rows)
    if not one.effective >= least:
        return f"{one.effective:.3g} rows in effect have the weight, but {least:g} are needed"
    if one.share > MOST_OF_A_SUM:
        return f"one row makes up {one.share:.4f} of a sum, but at most {MOST_OF_A_SUM:g} may leave"
    return None


def concentrated(release: Release) -> Refusals:
    """Refuse points at which few rows have weight, or a row is nearly all of a sum or of a difference of sums.

    A message has sums of the columns, the gradient and the Hessian. The gradient minus the Hessian's first line is a
    row if only that row has a count; so are the sums minus the Hessian's first line if only that row has no curvature.
    """
    loss, theta = release.loss, release.theta
    folds = [which for at, which in release.sums if at is theta and not which.all()]
    for k, which in enumerate([release.everything, *folds] if not loss.quadratic else ()):
        rows, where = release.rows.take(which), "there" if k == 0 else f"there, in fold {k},"
        if (words := concentration(loss, rows, theta, release.least.effective_rows)) is not None:
            yield "", f"{where} {words}"
        elif (share := share_of_one([Weights.at(loss, theta, rows).factors])) > MOST_OF_A_SUM:
            hint = f"of a difference of sums, but at most {MOST_OF_A_SUM:g} may leave"
            yield "", f"{where} one row makes up {share:.4f} {hint}"


def solvable(release: Release) -> Refusals:
    """Refuse sums of which those over the few rows with a level, or pair of levels, determine a value of a row.

    A level has sums of its own, the second derivatives of its column with all others. Somebody who solves these
    equations has the patient.
    """
    loss, sums = release.loss, release.sums
    wide = loss.n_params(1)  # outputs
    each = {0: 1 + 2 * wide + 3 * wide * (wide + 1) // 2, 1: wide + wide * (wide + 1), 2: wide * (wide + 1) // 2}
    for name, order, inside in release.groups() if loss.target != "survival" and not loss.quadratic else ():
        # with one unknown a row, to which a point can reduce them
        if not 0 < (n := int(inside.sum())) <= min(2 + each[order] * len(sums), _NEAR):
            continue
        part = [(at, which[inside]) for at, which in sums]
        if determined(loss, release.rows.take(inside), part, order) > _SOLVED:
            yield "", f"values of the {count(n, 'row')}{name} could be solved for from the sums that would have left"
            return


def alike(release: Release) -> Refusals:
    """Refuse points at which weights have few possible values, and few rows have one of them.

    Sums have 53 bits, and values are often whole numbers: anyone who knows all possible weights finds, by lattice
    reduction, how many rows have each, and the totals of all columns over these rows. Weights follow from the linear
    predictors, so their values count, whatever columns (and offset) they are the sums of.
    """
    if release.loss.quadratic or release.loss.target == "survival":
        return
    moves = [move for move in release.moves() if (np.ptp(move[1], axis=0) >= _STILL).any()]
    weights = np.zeros((1, moves[0][1].shape[1] if moves else 0))
    for _, _, possible in moves:
        weights = (weights[:, None] + possible).reshape(-1, weights.shape[1])
        weights = weights[different(weights)[0]]
        if not 0 < len(weights) <= MOST_CELLS:
            return
    least, columns = release.least.cell, " and ".join(name for name, _, _ in moves)
    if moves and (few := int(different(np.sum([of_rows for _, of_rows, _ in moves], axis=0))[1].min())) < least:
        words = f"weights there depend on {columns} only, and some values have only {count(few, 'row')}"
        yield "", f"{words}, but at least {least} are needed: coarser values, or join levels"


#: Checks of sums at a point; those of quadratic losses do not depend on it.
OF_POINTS = (concentrated, solvable, alike)


# --- before a query is answered ---------------------------------------------------------------------------------------


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
    each fold of ``fold_of (n,)``.
    """
    later = [sums for at in (*known[1:], theta) for sums in sums_by_fold(rows, at, None)]
    release = Release(contract, rows, own, theta=theta, sums=[*sums_by_fold(rows, known[0], fold_of), *later])
    return _first(OF_QUERIES[:1] if release.loss.quadratic else OF_QUERIES, release)


def query_outside(release: Release) -> Refusals:
    """Refuse points outside the contract's ball, in which every estimate lies."""
    size, radius = float(np.linalg.norm(release.theta)), release.contract.radius
    if not size <= radius:
        yield "", f"the point has length {size:.3g}, outside the contract's ball of radius {radius:.3g}"


def query_far(release: Release) -> Refusals:
    """Refuse points at which the model fits the rows implausibly badly: no fit asks there."""
    points = (release.theta, release.sums[0][0], np.zeros_like(release.theta))
    with np.errstate(all="ignore"):
        here, start, zero = (release.loss.value(at, *release.rows.arrays) for at in points)
    most = start + _FAR * (max(zero - start, 0.0) + abs(start))
    if not here <= most:
        yield "", f"there the mean loss is {here:.3g}, but at most {most:.3g} is plausible for these rows"


def query_many(release: Release) -> Refusals:
    """Refuse an answer after which more numbers would have left than the rows have: these could be solved for."""
    # points that are nearly the same tell the same
    told = basis(release.weights[0], _SAME_WEIGHTS)[0].shape[1] * numbers_at(release.theta.size)
    held = release.held
    if told > held:
        words = f"with the answer {told} numbers would have left, but the rows have only {held}"
        yield "", f"{words}: with so many, rows could be solved for"


def query_difference(release: Release) -> Refusals:
    """Refuse an answer if one row is nearly all of a combination of new and earlier sums."""
    if (share := share_of_one(release.weights[1])) > MOST_OF_A_SUM:
        words = f"together with what was sent before, one row makes up {share:.4f} of a sum"
        yield "", f"{words}; query another point or, with the Huber loss, agree on a larger threshold in the contract"


def query_few(release: Release) -> Refusals:
    """Refuse an answer if few rows have all the weight in a combination of new and earlier sums."""
    left, _ = basis(release.weights[2], TOLD_APART)
    most = min(_FEWEST_APART - 1, (len(left) - left.shape[1]) // 2)
    if most > 0 and most_of_few(left, most, _ALL_OF_A_SUM)[1] > _ALL_OF_A_SUM:
        words = f"with what was sent before, at most {most} rows have all the weight in a difference of sums"
        yield "", f"{words}, but at least {_FEWEST_APART} are needed, or none"


#: Checks of a query; sums of quadratic losses follow from those that were shared, so only the first holds for these.
OF_QUERIES = (query_outside, query_far, concentrated, alike, query_many, query_difference, query_few, solvable)


# --- before rounds ----------------------------------------------------------------------------------------------------


def check_rounds(contract: Contract, rows: Rows, theta: Array, own: Thresholds | None = None) -> list[Finding]:
    """Return findings that forbid a site to join rounds that start at ``theta (p,)``; [] if there are none."""
    return _first(OF_ROUNDS, Release(contract, rows, own, theta=theta, sums=sums_by_fold(rows, theta, None)))


def batches(release: Release) -> Refusals:
    """Refuse rounds in batches: others know which rows are in each, and could solve the sums for every row."""
    batch, n = release.contract.rounds.batch_size, release.rows.n_samples
    if batch is not None and batch < n:
        words = f"rounds.batch_size is {batch}, but these are {count(n, 'row')}: many sums over some of them"
        yield "", f"{words} can be solved for each row; a contract without batch_size uses all rows"


def sandwich_of_level(release: Release) -> Refusals:
    """Refuse edge tests with a sandwich variance and few rows with a level: squared residuals determine these rows."""
    for cell in release.cells if _sandwich(release) else ():
        if cell.by == "sums" and 0 < (n := int(cell.rows.sum())) < _FEWEST_APART:
            words = f"only {count(n, 'row')} with {cell.value!r}, but at least {_FEWEST_APART} are needed with"
            yield cell.column, f'{words} rounds.select.variance "sandwich"; use "model"'


def sandwich_of_few(release: Release) -> Refusals:
    """Refuse edge tests with a sandwich variance, a sum of squared scores, in which few rows have the weight."""
    loss, rows, least = release.loss.rowwise, release.rows, release.least.effective_rows
    if _sandwich(release) and loss is not None and rows.y is not None:
        scores = loss.slope_at(loss.predictors(release.theta, rows.X, rows.offset), rows.y)
        if not (effective := effective_rows((scores**2).sum(axis=1))) >= least:
            yield (
                "",
                f"{effective:.3g} rows in effect have the weight in the sandwich variance, but {least:g} are needed",
            )


def _sandwich(release: Release) -> bool:
    select = release.contract.rounds.select
    return select is not None and select.variance == "sandwich"


#: Checks before rounds.
OF_ROUNDS = (batches, *OF_ROWS, *OF_POINTS, sandwich_of_level, sandwich_of_few)

#: Checks that do not hold where the site's custodian has lifted the hard minima, which the ledger records.
LIFTED = frozenset({few_ranks, dominated, solvable, query_few, batches, sandwich_of_level})


# --- refusals ---------------------------------------------------------------------------------------------------------


def refuse_disclosure(findings: list[Finding], refused: str, what: str = "single rows") -> None:
    """Raise a `DataError` with all findings, if there are any; it starts with what is refused."""
    if findings:
        why = "single rows could be recognised" if what == "single rows" else f"{what} could single out rows"
        lines = "".join(f"\n  {finding}" for finding in findings)
        raise DataError(f"{refused}, because {why}:{lines}")


def _first(checks: Sequence[Callable[[Release], Refusals]], release: Release) -> list[Finding]:
    """Return the findings of the first check that holds for the site and has any."""
    hold = (check for check in checks if not (release.lifted and check in LIFTED))
    findings = ([Finding(column, text, check.__name__) for column, text in check(release)] for check in hold)
    return next(filter(None, findings), [])


def _and_others(words: Sequence[str], noun: str) -> str:
    """Return the first of several words, and how many others there are."""
    first, *more = dict.fromkeys(words)
    other = f" (and so few with {count(len(more), f'other {noun}')})" if more else ""
    return first.replace(", but", f"{other}, but", 1)
