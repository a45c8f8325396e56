"""What is too little to be shared: the contract's thresholds or the site's stricter ones, also fold by fold.

A summary holds sums for every fold. A level of a category with a single row in a fold gives that row away: the products
of its column with the others are the row itself. So every level, class, column of two values and fold must have no rows
or enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedkin._base import Index, Mask, count
from fedkin.data import Finding, Rows, deal_folds, level_text
from fedkin.federate.contract.contract import Contract, Thresholds


def too_little(
    contract: Contract, rows: Rows, thresholds: Thresholds, site: str | int, *, by_fold: bool = True
) -> list[Finding]:
    """Why sums over these rows must not be shared, in words; [] when they may.

    Parameters
    ----------
    contract : Contract
        What the rows were prepared for.
    rows : Rows
        Prepared rows of one site.
    thresholds : Thresholds
        The site's own; the contract's hold in any case.
    site : str or int
        Its id, which decides about its folds.
    by_fold : bool
        Whether sums of each fold would be shared, too.
    """
    least = contract.thresholds.stricter(thresholds).cell
    findings = contract.disclosures(rows, thresholds)
    known = {finding.column for finding in findings}
    cells = dict(_cells(contract, rows))
    for (column, value), inside in cells.items():
        if column not in known and 0 < inside.sum() < least:
            findings.append(Finding(column, f"only {count(int(inside.sum()), 'row')} with {value!r}{_needed(least)}"))
    if findings or not by_fold:
        return findings
    fold_of = deal_folds(site, rows.n_samples, contract.folds, contract.seed)
    findings += _small_folds(fold_of, contract.folds, least)
    for (column, value), inside in cells.items():
        parts = np.bincount(fold_of[inside], minlength=contract.folds)
        if ((parts > 0) & (parts < least)).any():
            smallest, n = int(parts[parts > 0].min()), count(int(inside.sum()), "row")
            words = f"{n} with {value!r}, but only {smallest} in one of {contract.folds} folds"
            findings.append(Finding(column, words + _needed(least)))
    return findings


def _needed(least: int) -> str:
    return f", and at least {least} (or none) are needed"


def _small_folds(fold_of: Index, folds: int, least: int) -> list[Finding]:
    smallest = int(np.bincount(fold_of, minlength=folds).min())
    if smallest >= least:
        return []
    words = f"{count(len(fold_of), 'row')} in {folds} folds are only {smallest} in one of them"
    return [Finding("", words + _needed(least))]


def _cells(contract: Contract, rows: Rows) -> Iterator[tuple[tuple[str, str], Mask]]:
    """Column, value and which rows have it: levels, classes, and both values of columns that have only two."""
    at = int(contract.intercept)
    for column in contract.schema.features:
        block = rows.X[:, at : at + len(column.encoded)]
        at += block.shape[1]
        if column.kind == "category":
            yield (column.name, level_text(column.levels[0])), (block == 0).all(axis=1)
            for k, level in enumerate(column.levels[1:]):
                yield (column.name, level_text(level)), block[:, k] != 0
        else:
            values = np.unique(block)
            if values.size == 2:
                centre, scale = column.centre_and_scale if contract.intercept else (0.0, column.centre_and_scale[1])
                for value in values.tolist():
                    yield (column.name, f"{value * scale + centre:.6g}"), block[:, 0] == value
    target = contract.schema.target
    if target is not None and target.kind == "category" and rows.y is not None:
        for k, label in enumerate(target.levels):
            yield (target.name, level_text(label)), np.asarray(rows.y == k)
