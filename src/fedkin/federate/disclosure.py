"""The disclosure gate: what every number passes before it leaves a site, by share, answer, run or publish.

Sums over few rows give them away: with no more rows than columns, rows follow from sums of products up to a rotation,
and of a level with a single row the products of its column with the others are the row itself. So there must be enough
rows, also in every fold, and every level, class and column of two values must have none or enough.

A query names the point at which losses are summed up, and a loss that is not quadratic weighs rows by its curvature
there: at a point that was chosen for it, one row has all the weight. So a query is answered only inside the contract's
ball, where the model is not absurd for the site's rows, and where enough rows carry the weight (`check_query`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from fedkin._base import Array, Index, Mask, count
from fedkin.core import Summary
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
#: How much larger the mean loss may be at a queried point than at the site's own estimate, in units of the latter and
#: of what the estimate gains over no model at all.
_FAR = 5.0
#: Weights of rows at two points that differ by less than this share are the same, so that a fit may converge.
_SAME_WEIGHTS = 1e-4
#: Directions with less than this share of the largest are rounding. Products of columns keep 16 digits, so a contract
#: whose columns nearly coincide, such as a curve with knots 1e-8 apart, tells of directions of 1e-10.
_SMALLEST = 1e-13
#: A cell is visible in the columns of a curve when a curve of them is its indicator, but for this sum of squares.
_VISIBLE = 0.005
_TINY = 1e-300
_NEAR = 30  # rows to look at for a group of few


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a site must have before anything is computed from its rows; a site may ask for more, never for less.

    ``rows_per_parameter`` and ``cell`` are DataSHIELD's defaults: nfilter.glm = 0.33 parameters per row, and
    nfilter.tab = 3 rows in every cell that is not empty. For ``rows`` its nfilter.subset is 3; here it is 10, which it
    names as where census offices are going (https://wiki.datashield.org/en/statdev/disclosure-checks).
    ``pair`` is nfilter.tab for pairs of levels of two features, which sums of products count.
    ``effective_rows`` must carry the weight in the answer to a query.
    """

    rows: Annotated[int, Meta(ge=1)] = 10
    rows_per_parameter: Annotated[float, Meta(ge=0)] = 3.0
    cell: Annotated[int, Meta(ge=1)] = 3
    pair: Annotated[int, Meta(ge=1)] = 3
    effective_rows: Annotated[float, Meta(ge=1)] = 5.0

    def stricter(self, other: Thresholds | None) -> Thresholds:
        """Return the larger of both, one by one."""
        names = Thresholds.__struct_fields__
        return Thresholds(**{name: max(getattr(self, name), getattr(other or self, name)) for name in names})

    @property
    def lowers_minima(self) -> bool:
        """Whether the site's custodian has decided that `MINIMA` do not hold."""
        return False


#: What no contract can lower; only the custodian of a site can, who records it (``below_minima`` in ``site.toml``).
MINIMA = Thresholds(rows=5, rows_per_parameter=2.0, cell=3, pair=3, effective_rows=3.0)


def required(contract: Contract, own: Thresholds | None = None) -> Thresholds:
    """Return what a site must have: the strictest of the contract, the site's own thresholds and the hard minima."""
    least = contract.thresholds.stricter(own)
    return least if own is not None and own.lowers_minima else least.stricter(MINIMA)


def fewest_rows(contract: Contract, own: Thresholds | None = None) -> int:
    """Return how many rows sums must be over, and differences of sums."""
    least = required(contract, own)
    return max(least.rows, math.ceil(least.rows_per_parameter * contract.n_params))


def check_count(contract: Contract, n: int, own: Thresholds | None = None) -> list[Finding]:
    """Return why n rows are not enough, if they are not."""
    least, needed = required(contract, own), fewest_rows(contract, own)
    if n >= needed:
        return []
    words = f"{count(n, 'row')}, but at least {needed} are needed"
    more = f" ({least.rows_per_parameter:g} for each of {count(contract.n_params, 'parameter')})"
    return [Finding("", words + (more if needed > least.rows else ""), "few_rows")]


def check_disclosure(
    contract: Contract, rows: Rows, own: Thresholds | None = None, *, site: str | int = "", folds: int = 0
) -> list[Finding]:
    """Return why nothing may be computed from prepared rows of one site; [] when it may.

    The site's ``own`` thresholds count where they are stricter than the contract's. Sums in ``folds`` folds, which are
    dealt by the id of the ``site``, must have enough rows in each; 0 for sums over all rows only. No row may make up
    nearly all of a sum of squares, along any combination of columns, nor may fewer rows than a cell must have.
    """
    least, cells = required(contract, own), list(_cells(contract, rows))
    findings, needed = check_count(contract, rows.n_samples, own), f"at least {least.cell} (or none) are needed"
    for name, value, inside in cells:
        if 0 < (n := int(inside.sum())) < least.cell:
            words = f"only {count(n, 'row')} with {value!r}, but {needed}: so few could be recognised"
            hint = "leave them out, or join levels in the contract"
            findings.append(Finding(name, f"{words}; {hint}", "few_in_cell"))
    findings += _rare_pairs(contract, cells, least.pair, np.zeros(rows.n_samples, dtype=np.int64))
    findings += _few_events(contract, rows, fewest := max(least.rows, contract.n_params + 1))
    dominated = _Dominance(contract, rows, least.cell) if own is None or not own.lowers_minima else None
    if not findings and dominated is not None:
        findings += dominated.check()
    if findings or not folds:
        return findings
    fold_of = deal_folds(site, rows.n_samples, folds, contract.seed)
    smallest = int(np.bincount(fold_of, minlength=folds).min())
    if smallest < fewest:
        words = f"{count(len(fold_of), 'row')} in {folds} folds are only {smallest} in one of them"
        findings.append(Finding("", f"{words}, and at least {fewest} are needed", "few_in_fold"))
    for name, value, inside in cells:
        parts = np.bincount(fold_of[inside], minlength=folds)
        if (parts := parts[parts > 0]).size and (smallest := int(parts.min())) < least.cell:
            words = f"{count(int(inside.sum()), 'row')} with {value!r}, but only {smallest} in one of {folds} folds"
            findings.append(Finding(name, f"{words}, and {needed}", "few_in_fold"))
    findings += _rare_pairs(contract, cells, least.pair, fold_of)
    for k in range(folds):
        findings += _few_events(contract, rows.take(fold_of == k), fewest, f" in fold {k + 1} of {folds}")
    for k in range(folds if dominated is not None and not findings else 0):
        assert dominated is not None
        findings += dominated.check(fold_of == k, f" in fold {k + 1} of {folds}")
    return findings


def most_folds(contract: Contract, rows: Rows, own: Thresholds | None = None, *, site: str | int) -> int:
    """Return in how many folds rows may be cut, at most as many as the contract has; 0 for none."""
    most = contract.folds
    return next((k for k in range(most, 1, -1) if not check_disclosure(contract, rows, own, site=site, folds=k)), 0)


def check_point(
    contract: Contract, rows: Rows, theta: Array, own: Thresholds | None = None, fold_of: Index | None = None
) -> list[Finding]:
    """Return why sums at ``theta (p,)``, also in each fold of ``fold_of (n,)``, may not leave; [] when they may.

    A loss that is not quadratic weighs rows by its curvature. ``(sum w)^2 / sum w^2``, the effective number of rows,
    must reach the threshold, and no row may have nearly all of any sum of second derivatives.
    """
    least, loss = required(contract, own).effective_rows, contract.loss_object()
    for part in [None] if fold_of is None else [None, *np.unique(fold_of).tolist()]:
        chosen = rows if part is None else rows.take(fold_of == part)
        words = concentration(loss, chosen, theta, least) or _difference(loss, chosen, theta)
        if words is not None:
            where = "there" if part is None else f"there, in fold {part + 1},"
            return [Finding("", f"{where} {words}", "concentrated")]
    return []


def concentration(loss: Loss, rows: Rows, theta: Array, least: float) -> str | None:
    """Return why sums of rows at ``theta (p,)`` say too much of few; None when ``least`` rows or more have the weight.

    The weights of a quadratic loss are those that `check_disclosure` has seen.
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
    """Return why the sums of one message, less each other, tell too much of one row; None when they do not.

    A message has sums of the columns, the gradient and the Hessian. The gradient less the Hessian's first line is a
    row when that row alone has a count; the sums less the Hessian's first line when it alone has no curvature.
    """
    if loss.quadratic:
        return None
    factors = np.hstack([np.ones((rows.n_samples, 1)), _told(loss, theta, rows).factors])
    if (share := float(_row_shares(factors[:, None, :], _SAME_WEIGHTS).max())) > MOST_OF_A_SUM:
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
    """Return why sums at ``theta (p,)`` may not leave after others; [] when they may.

    ``known`` are the points of all that was sent before, the site's own estimate first, of which there are sums for
    each fold of ``fold_of (n,)``. Beyond `check_point`, no row may have nearly all of any combination of the new sums
    with those that were sent before. All messages together may not have more numbers than the rows, which could then
    be solved for.
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
    told, held = told * (p * (p + 3) // 2 + 1), rows.n_samples * len(contract.column_names)
    if told > held:
        words = f"with the answer {told} numbers would have left, but the rows have only {held}"
        return [Finding("", f"{words}: with so many, rows could be solved for", "query_many")]
    if (share := float(_row_shares(np.hstack(factors)[:, None, :], _SAME_WEIGHTS).max())) > MOST_OF_A_SUM:
        words = f"together with what was sent before, one row makes up {share:.4f} of a sum"
        words += "; ask at another point, or with the Huber loss for a larger threshold in the contract"
        return [Finding("", words, "query_difference")]
    return []


@dataclass(frozen=True)
class _Told:
    """What sums of n rows at a point tell of each row."""

    weight: Array  # (n,) of the row in the second derivatives
    factors: Array  # (n, c) by which the row's columns are multiplied in any of the sums
    share: float  # the largest of one row in the second derivatives, along any direction
    effective: float  # number of rows that have the weight


def _told(loss: Loss, theta: Array, rows: Rows) -> _Told:
    """Return what sums of rows at ``theta (p,)`` tell of each row, of a loss that is not quadratic."""
    with np.errstate(all="ignore"):
        if loss.target == "survival":
            return _told_by_risk_sets(theta, rows)
        rowwise = loss.rowwise
        if rowwise is None or rows.y is None:
            raise DataError(f"nobody knows what sums of the {loss.name} loss tell about single rows: none may leave")
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
    """Return what sums of the Cox loss tell: a row is in the sum of every event at which it is at risk.

    With p the share of a row in the hazard of a risk set and m the mean of the set, the gradient has the row p times
    (the expected number of its events), and the second derivatives have ``p (x - m) (x - m)'`` of it.
    """
    assert rows.y is not None
    risk, eta = RiskSets.of(rows.y), log_hazards(theta, rows.X, rows.offset)
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
    """Return why sums over the events of survival times tell too much, if they do."""
    if contract.loss_object().target != "survival" or rows.y is None:
        return []
    if (events := int((rows.y > 0).sum())) >= fewest:
        return []
    words = f"only {count(events, 'event')}{where}, but at least {fewest} are needed: sums are over events"
    return [Finding("", words, "few_events")]


def _rare_pairs(
    contract: Contract, cells: Sequence[tuple[str, str, Mask]], least: int, fold_of: Index
) -> list[Finding]:
    """Return the pairs of values of two features that occur, but in too few rows: sums of products count them."""
    target = None if contract.schema.target is None else contract.schema.target.name
    known = [cell for cell in cells if cell[0] != target]
    inside, findings = np.array([mask for _, _, mask in known], dtype=np.float64), dict[tuple[int, int], Finding]()
    for fold in np.unique(fold_of) if known else ():
        part = inside[:, fold_of == fold]
        together = part @ part.T
        for a, b in np.argwhere(np.triu((together > 0) & (together < least), 1)).tolist():
            (one, first, _), (other, second, _) = known[a], known[b]
            where = "" if fold_of.max() == 0 else " in one of the folds"
            words = f"only {count(int(together[a, b]), 'row')} with {first!r} and {other} {second!r}{where}"
            hint = f"at least {least} (or none) are needed: leave them out, or join levels in the contract"
            if one != other:
                findings[a, b] = Finding(one, f"{words}, but {hint}", "few_in_pair")
    return list(findings.values())


class _Dominance:
    """Whether few rows make up nearly all of a sum of squares, along any combination of columns.

    The largest share of a row is its leverage, ``h_ii`` of the projection on the columns; that of several rows is the
    largest eigenvalue of their block of the projection. A column that is 0 but for two rows, and two columns that
    differ in one row, have shares of 1.
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
        """Return why sums over some of the rows may not leave."""
        columns = self.columns[which]
        size = np.sqrt((columns**2).sum(axis=0))
        left, values, right = np.linalg.svd(columns / np.where(size > 0, size, 1.0), full_matrices=False)
        seen = values > _SMALLEST * max(float(values[0]), _TINY)
        left, right = left[:, seen], right[seen] / values[seen, None]
        share = (left**2).sum(axis=1)
        row = int(share.argmax())
        if share[row] > MOST_OF_A_SUM:
            return [self._finding(f"one row makes up {share[row]:.1%} of a sum", left[row] @ right, where)]
        for first in np.flatnonzero(
            share > _MOST_OF_FEW / max(self.cell - 1, 1)
        ).tolist():  # one of the few has as much
            chosen, total = [first], 0.0
            while len(chosen) < self.cell - 1 and total <= _MOST_OF_FEW:
                along = np.linalg.svd(left[chosen], full_matrices=False)[2][0]
                near = [k for k in np.argsort(-np.abs(left @ along), kind="stable")[:_NEAR].tolist() if k not in chosen]
                sizes = np.linalg.norm(np.stack([left[[*chosen, k]] for k in near]), ord=2, axis=(1, 2)) ** 2
                chosen.append(near[int(sizes.argmax())])
                total = float(sizes.max())
            if total > _MOST_OF_FEW:
                direction = np.linalg.svd(left[chosen])[2][0] @ right
                return [self._finding(f"only {len(chosen)} rows make up {total:.2%} of a sum", direction, where)]
        return []

    def _finding(self, words: str, direction: Array, where: str) -> Finding:
        order = np.argsort(-np.abs(direction), kind="stable")[:2]
        names = " and ".join(self.names[k] for k in order.tolist() if abs(direction[k]) > 0.1 * np.abs(direction).max())
        hint = "leave these rows or a column out, or join levels in the contract"
        return Finding("", f"{words}{where}, along {names}: so few could be recognised; {hint}", "dominated")


def _row_shares(parts: Array, accuracy: float = _SMALLEST) -> Array:
    """Return the largest share ``(n,)`` of each row in the sum of squares along any direction: its leverage.

    ``parts (n, k, p)`` has k lines for each row. Directions below ``accuracy`` of the largest are not seen.
    """
    n, k, p = parts.shape
    lines = parts.reshape(n * k, p)
    size = np.sqrt((lines**2).sum(axis=0))
    left, values, _ = np.linalg.svd(lines / np.where(size > 0, size, 1.0), full_matrices=False)
    left = left[:, values > accuracy * max(float(values[0]), _TINY)].reshape(n, k, -1)
    return np.asarray(np.linalg.norm(left, ord=2, axis=(1, 2)) ** 2 if k > 1 else (left**2).sum(axis=(1, 2)))


def refuse_disclosure(findings: list[Finding], refused: str, what: str = "single rows") -> None:
    """Raise `DataError` that begins with what is refused, with all findings, if there are any."""
    if findings:
        why = "single rows could be recognised" if what == "single rows" else f"{what} could single rows out"
        lines = "".join(f"\n  {finding}" for finding in findings)
        raise DataError(f"{refused}, because {why}:{lines}")


def _cells(contract: Contract, rows: Rows) -> Iterator[tuple[str, str, Mask]]:
    """Yield column, value and which rows have it: levels, classes, both values of columns that have only two.

    Also parts of a curve, where its knots single them out.
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
            for text, inside in _cells_of_curve(column.knots, block):
                yield column.name, text, inside
        elif (values := np.unique(block[:, 0])).size == 2:
            centre, scale = column.centre_and_scale
            for value in values.tolist():
                shown = value * scale + (centre if contract.intercept else 0.0)
                yield column.name, f"{shown:.6g}", block[:, 0] == value
    target = contract.schema.target
    if target is not None and target.kind == "category" and rows.y is not None:
        for k, label in enumerate(target.levels):
            yield target.name, level_text(label), np.asarray(rows.y == k)


def _cells_of_curve(knots: Sequence[float], block: Array) -> Iterator[tuple[str, Mask]]:
    """Yield the values, and both sides of the steps, whose indicators are curves: their rows are counted by the sums.

    Four knots with no value between make a step, five about one value an indicator of it.
    """
    at = knots[0] + block @ (np.asarray(knots[1:]) - knots[0])  # the curve that is straight
    values, first, which = np.unique(at, return_index=True, return_inverse=True)
    basis = np.column_stack([np.ones(values.size), block[first]])
    size = np.sqrt((basis**2).sum(axis=0))
    left, found, _ = np.linalg.svd(basis / np.where(size > 0, size, 1.0), full_matrices=False)
    left = left[:, found > _SMALLEST * max(float(found[0]), _TINY)]
    for k in np.flatnonzero(1.0 - (left**2).sum(axis=1) < _VISIBLE).tolist():
        yield f"{values[k]:.6g}", which == k
    below = np.arange(1.0, values.size + 1) - (np.cumsum(left, axis=0) ** 2).sum(axis=1)
    for k in np.flatnonzero(below[:-1] < _VISIBLE).tolist():
        yield f"at most {values[k]:.6g}", which <= k
        yield f"above {values[k]:.6g}", which > k


# --- what the numbers of a summary tell ------------------------------------------------------------------------

_PRODUCTS = (
    "means, variances and correlations of the columns; for levels, how many rows have each of them, and each pair of "
    "them (a cross table). Small counts single rows out: thresholds on cells are for these."
)
#: What numbers are and what they tell, by the name of the entry, or by entry and kind of loss.
_TEXT = {
    "rows": ("how many rows there are", "the number of rows."),
    "linear value": (
        "half the sum of the squared targets (less the offset)",
        "how large the targets are on average; with the other sums, how well any coefficients fit.",
    ),
    "mean value": ("half the sum of all squared entries", "how large the entries are on average."),
    "other value": (
        "the sum of the losses of rows at the parameters 'at'",
        "how well the model with those parameters fits the rows as a whole.",
    ),
    "linear gradient": (
        "minus the sum of every column times the target",
        "the sum of the targets (intercept), and for a level such as ward=B the sum of the targets of its rows: of a "
        "level with a single row, that row's target.",
    ),
    "mean gradient": ("minus the sum of every column", "the mean of every column."),
    "other gradient": (
        "the sum of every column times the error of the model's prediction",
        "for a level, how far the model misses its rows in sum: of a level with a single row, that row's target.",
    ),
    "products": ("sums of the products of every two columns", _PRODUCTS),
    "linear hessian": ("sums of the products of every two columns", _PRODUCTS),
    "other hessian": (
        "sums of the products of every two columns, each row weighted by how uncertain the model is of it",
        _PRODUCTS + " Weights blur these counts a little.",
    ),
    "column_sums": ("the sum of every column over all rows", "the mean of every column; of a level, its rows."),
    "column_squares": ("the sum of every column's square", "the variance of every column, together with its sum."),
    "own at": ("the parameters at which the sums are taken", "the site's own estimate from its rows."),
    "asked at": ("the parameters at which the sums are taken", "nothing new: they were asked."),
    "own": ("how the estimate was found", "how noisy the rows are around the estimate"),
    "gap": (
        "how far the asked parameters are from balance with the neighbours",
        "one number of the site's fit; nothing about single rows.",
    ),
    "privacy": ("how large the noise is, and what it promises", "nothing about rows."),
}


@dataclass(frozen=True)
class Disclosure:
    """Some numbers of a message: what they are, and what they tell about rows."""

    name: str  # of the entry of the message
    what: str
    tells: str
    numbers: Any  # as in the summary; of symmetric matrices, the rows from the diagonal on
    parts: tuple[str, ...] = ()  # of numbers by fold: which rows each entry is about


def describe_summary(summary: Summary) -> list[Disclosure]:
    """Return every number of a summary, what it is and what it tells about rows: a site reads it before it shares."""
    kind = "mean" if summary.loss.location else "linear" if summary.loss.quadratic else "other"
    used = summary.used.tolist()
    folds = [f"fold {k + 1}" for k in used if k < summary.folds]
    rest = [] if len(folds) == len(used) else ["rows in no fold" if folds else "all rows"]
    cut = f", in each of {len(folds)} folds" if folds else ", in all"
    cut += ", and of rows that are in no fold" if folds and rest else ""
    out = []

    def by_fold(name: str, key: str, numbers: Any) -> None:
        out.append(Disclosure(name, _TEXT[key][0] + cut, _TEXT[key][1], numbers, (*folds, *rest)))

    def plain(name: str, key: str, numbers: Any, more: str = "") -> None:
        out.append(Disclosure(name, _TEXT[key][0], _TEXT[key][1] + more, numbers))

    by_fold("rows", "rows", summary.count[used].tolist())
    by_fold("value", f"{kind} value", summary.value[used].tolist())
    by_fold("gradient", f"{kind} gradient", summary.gradient[used].tolist())
    if summary.scores is not None:
        by_fold("products", "products", [_triangle(summary.scores[k]) for k in used])
    elif summary.curvature is None:
        by_fold("hessian", f"{kind} hessian", [_triangle(summary.hessian[k]) for k in used])
    else:
        out.append(_of_curvature(summary, *_TEXT[f"{kind} hessian"]))
    plain("column_sums", "column_sums", summary.column_sums.tolist())
    plain("column_squares", "column_squares", summary.column_squares.tolist())
    if summary.at.any():
        plain("at", "asked at" if summary.own is None else "own at", summary.at.tolist())
    if (own := summary.own) is not None:
        numbers = {"dispersion": own.dispersion, "degrees of freedom": own.dof, "ridge": own.ridge.tolist()}
        plain("own", "own", numbers, f", and that it has none without a ridge ({own.note})." if own.note else ".")
    if summary.gap is not None:
        plain("gap", "gap", summary.gap)
    if (noise := summary.privacy) is not None:
        numbers = {name: getattr(noise, name) for name in ("epsilon", "delta", "bound", "noise")}
        odds = (
            f" All sums above are noisy: they change the odds of any guess about one row by a factor of at most "
            f"{np.exp(noise.epsilon):.3g} (except with probability {noise.delta:g}), whatever else is known."
        )
        plain("privacy", "privacy", numbers | {"limits": noise.limits.tolist()}, odds)
    return out


def _triangle(matrix: Array) -> list[list[float]]:
    return [row[k:].tolist() for k, row in enumerate(matrix)]


def _of_curvature(summary: Summary, what: str, tells: str) -> Disclosure:
    curvature, p = summary.curvature, summary.n_params
    assert curvature is not None
    what += f", in all, as a diagonal (first) plus {curvature.rank} directions of {p} numbers each"
    what += f"; {curvature.left_out} directions are left out" if curvature.left_out else ""
    if curvature.exact:
        tells = "the same as all products, which follow from it: " + tells
    else:
        directions = f"the {curvature.rank} directions in which they are largest, roughly the rest"
        tells = f"products of columns in {directions}: {tells}"
    if summary.n_samples <= p:
        tells += " There are no more rows than parameters: rows follow from it up to a rotation."
    return Disclosure("curvature", what, tells, np.column_stack([curvature.diagonal, curvature.factor]).tolist())
