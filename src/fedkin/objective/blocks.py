"""Devices with the same number of rows, so that linear algebra runs on whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedkin.data import Federation, Rows

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class RowBlock:
    """Devices ``(B,)`` with the same number of rows, and these: ``X (B, n, q)``, ``y (B, n)``, ``offset (B, n)``."""

    devices: Index
    rows: Rows


def row_blocks(federation: Federation, devices: Index) -> tuple[RowBlock, ...]:
    """Devices grouped by their number of rows, in the order given within each group."""
    sizes = federation.n_samples[devices]
    blocks = []
    for size in np.unique(sizes):
        members = devices[sizes == size]
        rows = (federation.starts[members][:, None] + np.arange(size)).reshape(-1)
        contiguous = rows.size > 0 and bool((np.diff(rows) == 1).all())
        where = slice(int(rows[0]), int(rows[-1]) + 1) if contiguous else rows
        shape = (members.size, int(size))

        def fold(array: Array, shape: tuple[int, int] = shape) -> Array:
            return array.reshape(*shape, *array.shape[1:])

        blocks.append(RowBlock(members, federation.rows.take(where).map(fold)))
    return tuple(blocks)
