"""Find columns of a table that tell nothing: constants, copies of the target, and combinations of others."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping

import numpy as np

from fedkin._base import Array, listed, some_of
from fedkin.data.columns import RawColumns
from fedkin.data.schema import Schema
from fedkin.errors import DataError, argument

#: With fewer rows than this, columns can be equal by chance.
_ENOUGH_ROWS = 10
#: Up to this many encoded columns all are compared with each other; beyond it, numbers only.
_MOST_COMPARED = 500
#: Standardised weight from which a column is named as part of a combination.
_SHARE_NAMED = 1e-6
#: A column is a combination of others if at most this share of its variance is unexplained.
_OWN_SHARE = 1e-13


class ColumnSums:
    """Sums over rows of encoded columns and their target; ``head`` are some complete rows, for the centres."""

    def __init__(self, schema: Schema, head: RawColumns) -> None:
        columns = schema.features
        if sum(len(column.encoded) for column in columns) > _MOST_COMPARED:
            columns = tuple(column for column in columns if column.kind == "number")
        self._schema, self._columns = schema, columns
        X = self._encoded(head)
        gaps = np.isnan(X)
        # squares keep their digits if about centred
        self._centre = np.where(gaps, 0.0, X).sum(axis=1) / np.maximum((~gaps).sum(axis=1), 1)
        self._clear()

    def _clear(self) -> None:
        q = len(self._centre)
        self._low, self._high = np.full(q, np.inf), np.full(q, -np.inf)
        self._sums, self._squares = np.zeros(q), np.zeros((q, q))

    def _encoded(self, rows: RawColumns) -> Array:
        """Return the encoded columns, and the target last, as rows ``(q, n)``: contiguous columns."""
        y = self._schema.target_of(rows)
        y = np.zeros(len(next(iter(rows.values())))) if y is None else y
        y = y if self._schema.event is None else np.abs(y)
        return np.concatenate([*(column.encode(rows[column.name]).T for column in self._columns), y[None]])

    def like(self) -> ColumnSums:
        """Return sums of the same columns over no rows."""
        made = copy.copy(self)
        made._clear()
        return made

    def add(self, rows: RawColumns) -> None:
        """Add complete rows."""
        X = self._encoded(rows)
        gaps = np.isnan(X)
        has_gaps = bool(gaps.any())
        low, high = (np.fmin.reduce(X, 1), np.fmax.reduce(X, 1)) if has_gaps else (X.min(axis=1), X.max(axis=1))
        X -= self._centre[:, None]
        if has_gaps:
            X[gaps] = 0.0
        self._merge(low, high, X.sum(axis=1), X @ X.T)

    def merge(self, other: ColumnSums) -> None:
        """Add the sums over other rows."""
        self._merge(other._low, other._high, other._sums, other._squares)

    def _merge(self, low: Array, high: Array, sums: Array, squares: Array) -> None:
        self._low, self._high = np.fmin(self._low, low), np.fmax(self._high, high)
        # not in place: sums from another process are read-only
        self._sums, self._squares = self._sums + sums, self._squares + squares

    def redundant(self, n: int, curves: Container[str]) -> tuple[set[str], list[str]]:
        """Return the columns to leave out of tables with n rows, and notes; raise for copies of the target."""
        owner = [column.name for column in self._columns for _ in column.encoded]
        names = [name for column in self._columns for name in column.encoded]
        varies = self._low < self._high
        flat = {name for name in owner if not varies[:-1][[other == name for other in owner]].any()}
        if len(flat) == len(self._schema.features):
            return set(), []
        constant = [name for name in dict.fromkeys(owner) if name in flat]
        notes = [f"left out {listed(constant, 10)}: the same in every row"] if flat else []
        scatter = self._squares - np.outer(self._sums, self._sums) / n
        varies &= np.diag(scatter) > 0
        size = np.sqrt(np.where(varies, np.diag(scatter), 1.0))
        used, gram = np.flatnonzero(varies[:-1]).tolist(), scatter / np.outer(size, size)
        blocks = {name: [k for k in used if owner[k] == name] for name in owner}
        if varies[-1] and n >= _ENOUGH_ROWS:
            self._refuse_copies(gram, blocks, curves)
        if n < max(_ENOUGH_ROWS, 2 * len(used)):
            return flat, notes
        out = dependent_columns(gram[np.ix_(used, used)])
        alone, made = [used[k] for k in range(len(used)) if k not in out], [used[k] for k in out]
        whole = [name for name, block in blocks.items() if name not in flat and set(block) <= set(made)]
        reasons: dict[str, bool] = {}  # and whether the column is left out
        for k in made:
            name = owner[k] if owner[k] in whole else names[k]
            reasons[f"{name!r} follows from {_named_parts(gram, alone, k, owner)[0]}"] = owner[k] in whole
        parts, unexplained = _named_parts(gram, alone, -1, owner)
        if varies[-1] and len(alone) < n - 1 and unexplained <= _OWN_SHARE:
            assert self._schema.target is not None
            text = f"the target {self._schema.target.name!r} is an exact combination of {parts}"
            notes.append(f"{text}: leave out what was computed from it with {argument('drop')}")
        for left, verb in ((True, "left out: "), (False, "")):
            if texts := [text for text, is_out in reasons.items() if is_out == left]:
                notes.append(verb + some_of(texts, 10))
        return {*flat, *whole}, notes

    def _refuse_copies(self, gram: Array, blocks: Mapping[str, list[int]], curves: Container[str]) -> None:
        """Raise for columns that equal the target, in other units, or with other names for its classes."""
        classes, copies = self._schema.classes, []
        for name, block in blocks.items():
            same = classes is not None and len(block) == len(classes) - 1 > 0
            if (len(block) == 1 or same or name in curves) and _share(gram, block, -1)[1] <= _OWN_SHARE:
                copies.append(name)
        if copies and self._schema.target is not None:
            which = f"column {copies[0]!r} is" if len(copies) == 1 else f"columns {listed(copies)} are"
            raise DataError(
                f"{which} the target {self._schema.target.name!r} under another name or in other units, so the model "
                f"would have nothing to learn: leave it out with {argument('drop')}, or name all features with "
                f"{argument('features')}"
            )


def _share(gram: Array, others: list[int], k: int) -> tuple[Array, float]:
    """Return the weights of other columns in column k, and the share of its variance that they leave unexplained."""
    weights = np.linalg.lstsq(gram[np.ix_(others, others)], gram[others, k], rcond=None)[0]
    return np.asarray(weights), float(1 - weights @ gram[others, k])


def _named_parts(gram: Array, others: list[int], k: int, owner: list[str]) -> tuple[str, float]:
    """List the owners of the columns that column k combines; return also the unexplained share."""
    weights, rest = _share(gram, others, k)
    parts = dict.fromkeys(owner[other] for other, w in zip(others, weights, strict=True) if abs(w) > _SHARE_NAMED)
    return listed(parts), rest


def dependent_columns(gram: Array) -> list[int]:
    """Return the columns that are combinations of earlier ones, from inner products ``(q, q)`` of unit columns."""
    left, out = gram.copy(), []
    # Cholesky by columns: the remaining diagonal is each column's unexplained share
    for k in range(len(left)):
        if left[k, k] <= _OWN_SHARE:
            out.append(k)
            continue
        row = left[k, k + 1 :] / left[k, k]
        left[k + 1 :, k + 1 :] -= np.outer(left[k + 1 :, k], row)
    return out
