"""Thresholds below which nothing is computed from a site's rows, as DataSHIELD has them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import Array, count
from fedkin.data import Finding, Label, Rows, level_text

if TYPE_CHECKING:
    from fedkin.federate.contract.contract import Contract, Thresholds


def too_few(contract: Contract, n: int, thresholds: Thresholds) -> list[Finding]:
    """Why n rows are not enough, if they are not."""
    p = contract.n_params
    for_all = math.ceil(thresholds.rows_per_parameter * p)
    if n >= max(thresholds.rows, for_all):
        return []
    words = f"{count(n, 'row')}, but at least {max(thresholds.rows, for_all)} are needed"
    more = f" ({thresholds.rows_per_parameter:g} for each of {count(p, 'parameter')})"
    return [Finding("", words + (more if for_all > thresholds.rows else ""))]


def disclosures(contract: Contract, rows: Rows, thresholds: Thresholds) -> list[Finding]:
    """Why prepared rows are too few to compute anything from them; [] when they are enough."""
    findings = too_few(contract, rows.n_samples, thresholds)
    for name, label, cell in _cells(contract, rows):
        if 0 < cell < thresholds.cell:
            findings.append(
                Finding(
                    name,
                    f"only {count(cell, 'row')} with {level_text(label)!r}, but at least {thresholds.cell} (or none) "
                    "are needed: so few could be recognised; leave them out, or join levels in the contract",
                )
            )
    return findings


def _cells(contract: Contract, rows: Rows) -> Iterator[tuple[str, Label, int]]:
    """Every category, each of its levels, and the number of rows that have it."""
    at = int(contract.intercept)
    for column in contract.schema.features:
        width = len(column.encoded)
        if column.kind == "category":
            yield from _counted(column.name, column.levels, rows.X[:, at : at + width] != 0)
        at += width
    target = contract.schema.target
    if target is not None and target.kind == "category" and rows.y is not None:
        codes = np.arange(1, len(target.levels))
        yield from _counted(target.name, target.levels, rows.y[:, None] == codes)


def _counted(name: str, levels: tuple[Label, ...], others: Array) -> Iterator[tuple[str, Label, int]]:
    found = others.sum(axis=0).astype(int).tolist()
    yield name, levels[0], len(others) - sum(found)
    for label, cell in zip(levels[1:], found, strict=True):
        yield name, label, cell
