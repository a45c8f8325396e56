"""The check of what may be disclosed: nothing is computed from rows that are too few, by share, answer or run.

Sums over few rows give them away: with no more rows than columns, rows follow from sums of products up to a rotation,
and of a level with a single row the products of its column with the others are the row itself. So there must be enough
rows, also in every fold, and every level, class and column of two values must have none or enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedkin._base import Mask, count
from fedkin.data import Column, Finding, Rows, deal_folds, level_text
from fedkin.errors import DataError

if TYPE_CHECKING:
    from fedkin.federate.contract import Contract


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a site must have before anything is computed from its rows; a site may ask for more, never for less.

    ``rows_per_parameter`` and ``cell`` are DataSHIELD's defaults: nfilter.glm = 0.33 parameters per row, and
    nfilter.tab = 3 rows in every cell that is not empty. For ``rows`` its nfilter.subset is 3; here it is 10, which it
    names as where census offices are going (https://wiki.datashield.org/en/statdev/disclosure-checks).
    """

    rows: Annotated[int, Meta(ge=1)] = 10
    rows_per_parameter: Annotated[float, Meta(ge=0)] = 3.0
    cell: Annotated[int, Meta(ge=1)] = 3

    def stricter(self, other: Thresholds) -> Thresholds:
        """Return the larger of both, one by one.

        Examples
        --------
        >>> from fedkin.federate import Thresholds
        >>> Thresholds(rows=20).stricter(Thresholds(cell=5))
        Thresholds(rows=20, rows_per_parameter=3.0, cell=5)
        """
        names = Thresholds.__struct_fields__
        return Thresholds(**{name: max(getattr(self, name), getattr(other, name)) for name in names})


def check_count(contract: Contract, n: int, own: Thresholds | None = None) -> list[Finding]:
    """Return why n rows are not enough, if they are not."""
    least = contract.thresholds if own is None else contract.thresholds.stricter(own)
    per_parameter = math.ceil(least.rows_per_parameter * contract.n_params)
    needed = max(least.rows, per_parameter)
    if n >= needed:
        return []
    words = f"{count(n, 'row')}, but at least {needed} are needed"
    more = f" ({least.rows_per_parameter:g} for each of {count(contract.n_params, 'parameter')})"
    return [Finding.from_text("", words + (more if per_parameter > least.rows else ""), code="few_rows")]


def check_disclosure(
    contract: Contract, rows: Rows, own: Thresholds | None = None, *, site: str | int = "", folds: int = 0
) -> list[Finding]:
    """Return why nothing may be computed from prepared rows of one site; [] when it may.

    The site's ``own`` thresholds count where they are stricter than the contract's. Sums in ``folds`` folds, which are
    dealt by the id of the ``site``, must have enough rows in each; 0 for sums over all rows only.
    """
    least = contract.thresholds if own is None else contract.thresholds.stricter(own)
    findings = check_count(contract, rows.n_samples, own)
    cells = list(_cells(contract, rows))
    needed = f"at least {least.cell} (or none) are needed"
    for name, value, inside in cells:
        if 0 < (n := int(inside.sum())) < least.cell:
            words = f"only {count(n, 'row')} with {value!r}, but {needed}: so few could be recognised"
            hint = "leave them out, or join levels in the contract"
            findings.append(Finding.from_text(name, f"{words}; {hint}", code="few_in_cell"))
    if findings or not folds:
        return findings
    fold_of = deal_folds(site, rows.n_samples, folds, contract.seed)
    smallest, fewest = int(np.bincount(fold_of, minlength=folds).min()), max(least.rows, contract.n_params + 1)
    if smallest < fewest:
        words = f"{count(len(fold_of), 'row')} in {folds} folds are only {smallest} in one of them"
        findings.append(Finding.from_text("", f"{words}, and at least {fewest} are needed", code="few_in_fold"))
    for name, value, inside in cells:
        parts = np.bincount(fold_of[inside], minlength=folds)
        if (parts := parts[parts > 0]).size and (smallest := int(parts.min())) < least.cell:
            words = f"{count(int(inside.sum()), 'row')} with {value!r}, but only {smallest} in one of {folds} folds"
            findings.append(Finding.from_text(name, f"{words}, and {needed}", code="few_in_fold"))
    return findings


def refuse_disclosure(findings: list[Finding], refused: str) -> None:
    """Raise `DataError` that begins with what is refused, with all findings, if there are any."""
    if findings:
        lines = "".join(f"\n  {finding}" for finding in findings)
        raise DataError(f"{refused}, because single rows could be recognised:{lines}")


def _cells(contract: Contract, rows: Rows) -> Iterator[tuple[str, str, Mask]]:
    """Yield column, value and which rows have it: levels, classes, and both values of columns that have only two."""
    at = int(contract.intercept)
    for column in contract.schema.features:
        block = rows.X[:, at : at + len(column.encoded)]
        at += block.shape[1]
        if column.kind == "category":
            yield column.name, level_text(column.levels[0]), (block == 0).all(axis=1)
            for k, level in enumerate(column.levels[1:]):
                yield column.name, level_text(level), block[:, k] != 0
        elif (values := np.unique(block)).size == 2:
            centre, scale = column.centre_and_scale
            for value in values.tolist():
                shown = value * scale + (centre if contract.intercept else 0.0)
                yield column.name, f"{shown:.6g}", block[:, 0] == value
    target = contract.schema.target
    if target is not None and target.kind == "category" and rows.y is not None:
        for k, label in enumerate(target.levels):
            yield target.name, level_text(label), np.asarray(rows.y == k)


def data_bounds(contract: Contract) -> tuple[list[float], float]:
    """Return the largest absolute values of prepared columns and of the target: what noise is measured by.

    Raises
    ------
    DataError
        When the contract gives a number no plausible range, or there is an offset, whose range nobody has agreed on.

    Examples
    --------
    >>> from fedkin.federate import Contract
    >>> from fedkin.federate.disclosure import data_bounds
    >>> target = 'target = {name = "y", low = 0, high = 9}'
    >>> data_bounds(Contract.from_toml(f'name = "h"\\nloss = "linear"\\nfeatures.x = {{low = 0, high = 4}}\\n{target}'))
    ([1.0, 1.0], 9.0)
    """
    schema = contract.schema
    if schema.offset is not None:
        raise DataError(
            f"noise needs bounds on all numbers, but the contract gives none for the offset {schema.offset!r}"
        )
    bounds = [1.0] if contract.intercept else []
    for column in schema.features:
        if column.kind == "category":
            bounds += [1.0] * len(column.encoded)
        else:
            centre, scale = column.centre_and_scale
            bounds.append(max(abs(end - (centre if contract.intercept else 0.0)) for end in _range(column)) / scale)
    return bounds, 1.0 if schema.target is None else max(map(abs, _range(schema.target)))


def _range(column: Column) -> tuple[float, float]:
    if column.low is None or column.high is None:
        raise DataError(
            f"noise needs bounds on all numbers, but the contract gives {column.name!r} no plausible range (low, high)"
        )
    return column.low, column.high
