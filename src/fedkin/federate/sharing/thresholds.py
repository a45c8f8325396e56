"""What is too little to be shared: the contract's thresholds or the site's stricter ones, also fold by fold.

A summary holds sums for every fold. Sums over few rows give them away: with no more rows than columns, rows follow from
sums of products up to a rotation, and of a level with a single row the products of its column with the others are the
row itself. So every fold must have enough rows, and every level, class and column of two values none or enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedkin._base import Index, Mask, count
from fedkin.data import Finding, Rows, deal_folds
from fedkin.federate.contract.contract import Contract, Thresholds
from fedkin.federate.contract.disclosure import cells


def too_little(
    contract: Contract, rows: Rows, thresholds: Thresholds, site: str | int, folds: int = 0
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
    folds : int
        In how many folds sums would be shared; 0 for sums over all rows only.
    """
    both = contract.thresholds.stricter(thresholds)
    least = both.cell
    findings = contract.disclosures(rows, thresholds)
    known = {finding.column for finding in findings}
    telling = dict(_cells_that_tell(contract, rows))
    for (column, value), inside in telling.items():
        if column not in known and 0 < inside.sum() < least:
            findings.append(Finding(column, f"only {count(int(inside.sum()), 'row')} with {value!r}{_needed(least)}"))
    if findings or not folds:
        return findings
    fold_of = deal_folds(site, rows.n_samples, folds, contract.seed)
    findings += _small_folds(fold_of, folds, max(both.rows, contract.n_params + 1))
    for (column, value), inside in telling.items():
        parts = np.bincount(fold_of[inside], minlength=folds)
        if ((parts > 0) & (parts < least)).any():
            smallest, n = int(parts[parts > 0].min()), count(int(inside.sum()), "row")
            words = f"{n} with {value!r}, but only {smallest} in one of {folds} folds"
            findings.append(Finding(column, words + _needed(least)))
    return findings


def _needed(least: int) -> str:
    return f", and at least {least} (or none) are needed"


def _small_folds(fold_of: Index, folds: int, least: int) -> list[Finding]:
    smallest = int(np.bincount(fold_of, minlength=folds).min())
    if smallest >= least:
        return []
    words = f"{count(len(fold_of), 'row')} in {folds} folds are only {smallest} in one of them"
    return [Finding("", f"{words}, and at least {least} are needed")]


def _cells_that_tell(contract: Contract, rows: Rows) -> Iterator[tuple[tuple[str, str], Mask]]:
    """Column, value and which rows have it: levels, classes, and both values of columns that have only two."""
    for name, label, inside in cells(contract, rows):
        yield (name, label), inside
    at = int(contract.intercept)
    for column in contract.schema.features:
        block = rows.X[:, at : at + len(column.encoded)]
        at += block.shape[1]
        values = np.unique(block) if column.kind != "category" else np.zeros(0)
        if values.size == 2:
            centre, scale = column.centre_and_scale if contract.intercept else (0.0, column.centre_and_scale[1])
            for value in values.tolist():
                yield (column.name, f"{value * scale + centre:.6g}"), block[:, 0] == value
