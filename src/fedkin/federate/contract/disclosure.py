"""Thresholds below which nothing is computed from a site's rows, as DataSHIELD has them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import Mask, count
from fedkin.data import Finding, Rows, level_text

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
    for name, label, inside in cells(contract, rows):
        n = int(inside.sum())
        if 0 < n < thresholds.cell:
            findings.append(
                Finding(
                    name,
                    f"only {count(n, 'row')} with {label!r}, but at least {thresholds.cell} (or none) "
                    "are needed: so few could be recognised; leave them out, or join levels in the contract",
                )
            )
    return findings


def cells(contract: Contract, rows: Rows) -> Iterator[tuple[str, str, Mask]]:
    """Every category, each of its levels in words, and which rows have it ``(n,)``; the target's classes, too."""
    at = int(contract.intercept)
    for column in contract.schema.features:
        block = rows.X[:, at : at + len(column.encoded)]
        at += block.shape[1]
        if column.kind == "category":
            yield column.name, level_text(column.levels[0]), (block == 0).all(axis=1)
            for k, level in enumerate(column.levels[1:]):
                yield column.name, level_text(level), block[:, k] != 0
    target = contract.schema.target
    if target is not None and target.kind == "category" and rows.y is not None:
        for k, label in enumerate(target.levels):
            yield target.name, level_text(label), np.asarray(rows.y == k)
