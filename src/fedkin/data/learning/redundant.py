"""Columns that tell nothing: those that never change, and those that follow from others."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array

#: A column is a combination of others when no more than this share of its variance is its own.
_OWN_SHARE = 1e-13


def constant(values: Array) -> bool:
    """Whether all numbers of a column that are there are the same."""
    there = values[~np.isnan(values)]
    return there.size > 0 and bool(there.min() == there.max())


def dependent_names(numbers: dict[str, Array]) -> list[str]:
    """Columns that are linear combinations of a constant and the columns before them."""
    if len(numbers) < 2:
        return []
    X = np.column_stack(list(numbers.values()))
    X = X - np.nanmean(X, axis=0)
    X[np.isnan(X)] = 0.0
    X = X / np.sqrt((X**2).sum(axis=0))
    names = list(numbers)
    return [names[k] for k in dependent_columns(X.T @ X)]


def dependent_columns(gram: Array, share: float = _OWN_SHARE) -> list[int]:
    """Columns that follow from those before them, by the inner products ``(q, q)`` of columns of length 1.

    Examples
    --------
    >>> dependent_columns(np.array([[1.0, 0.6, 1.0], [0.6, 1.0, 0.6], [1.0, 0.6, 1.0]]))
    [2]
    """
    left, out = gram.copy(), []
    # Cholesky, column after column: what is left of the diagonal is each column's own share
    for k in range(len(left)):
        if left[k, k] <= share:
            out.append(k)
            continue
        row = left[k, k + 1 :] / left[k, k]
        left[k + 1 :, k + 1 :] -= np.outer(left[k + 1 :, k], row)
    return out
