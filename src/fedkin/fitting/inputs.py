"""Read the rows, offsets and targets that users give to a model, and name its columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin._base import Array, Index, listed
from fedkin.core import Columns
from fedkin.data import INTERCEPT, Schema, columns_of
from fedkin.errors import DataError, argument
from fedkin.losses import Loss

#: How to treat rows of sites that were not part of the fit: refuse them, or predict from the population of sites.
Unseen = Literal["raise", "population"]


def is_each(site: object) -> TypeGuard[Iterable[object]]:
    """Return whether sites are given for each row; texts and tuples are ids."""
    return isinstance(site, Iterable) and not isinstance(site, str | bytes | tuple)


def is_table(X: object) -> bool:
    """Return whether rows have named columns: a mapping or a data frame, not an array."""
    return isinstance(X, Mapping) or hasattr(X, "columns") or hasattr(X, "column_names")


def feature_matrix(X: object, names: tuple[str, ...], schema: Schema | None) -> Array:
    """Return the features ``(n, q)`` of an array, or of a table with the columns of the model or of its schema."""
    if is_table(X):
        columns = columns_of(X)
        rows = _from_table(columns, names) if schema is None else schema.encode(columns)
    elif hasattr(X, "toarray"):
        raise DataError("X is a sparse matrix, expected a dense array: X.toarray()")
    else:
        rows = np.asarray(X, dtype=np.float64)
        if schema is not None and rows.ndim == 2 and rows.shape[1] == len(names):
            rows = schema.filled(rows)
    if rows.ndim != 2 or rows.shape[1] != len(names):
        raise DataError(f"X has shape {rows.shape}, expected (n, {len(names)}): {listed(names, 20)}")
    if not np.isfinite(rows).all():
        row, column = (int(number) for number in np.argwhere(~np.isfinite(rows))[0])
        raise DataError(f"row {row}, feature {names[column]!r} is {rows[row, column]}: fill or drop such values")
    return rows


def _from_table(columns: Mapping[str, NDArray[Any]], names: tuple[str, ...]) -> Array:
    absent = [name for name in names if name not in columns]
    if absent:
        raise DataError(f"missing column {listed(absent, 20)}; the model needs {listed(names, 20)}")
    wrong = [name for name in names if columns[name].dtype.kind not in "fb"]
    if wrong:
        raise DataError(f"column {wrong[0]!r} is not numeric, but the model needs numbers there")
    n = len(next(iter(columns.values()), ()))
    return np.column_stack([np.empty((n, 0)), *(columns[name] for name in names)]).astype(np.float64)


def offset_column(offset: ArrayLike | None, n: int, *, needed: bool) -> Array | None:
    """Return the offset of each row, ``(n,)``."""
    if offset is None:
        if needed:
            raise DataError(
                f"the model was fitted with an offset: give {argument('offset')} for the rows to predict (zeros "
                "predict rates for one unit of exposure)"
            )
        return None
    shift = np.asarray(offset, dtype=np.float64)
    if shift.shape != (n,):
        raise DataError(f"offset has shape {shift.shape}, expected ({n},), one value per row of X")
    if not np.isfinite(shift).all():
        row = int(np.flatnonzero(~np.isfinite(shift))[0])
        raise DataError(f"row {row}: the offset is {shift[row]}; fill or drop such rows")
    return shift


def with_exposure(offset: ArrayLike | None, exposure: ArrayLike | None) -> ArrayLike | None:
    """Return the sum of the offset and the logarithm of the exposure, if given."""
    if exposure is None:
        return offset
    values = np.asarray(exposure, dtype=np.float64)
    if not (values > 0).all():
        bad = values[~(values > 0)].flat[0]
        raise DataError(f"exposures must be positive, but one is {bad:g}: leave out rows that were not exposed")
    return np.asarray(np.log(values) + (0.0 if offset is None else np.asarray(offset, dtype=np.float64)))


def class_numbers(y: NDArray[Any], classes: tuple[Any, ...]) -> Array:
    """Return the number of each label among the classes of a fit."""
    number = {label: k for k, label in enumerate(classes)}
    unknown = [label for label in np.unique(y).tolist() if label not in number]
    if unknown:
        raise DataError(f"class {unknown[0]!r} is in the held-out rows, but not in the training rows")
    return np.array([number[label] for label in y.tolist()], dtype=np.float64)


def in_order_of_appearance(labels: NDArray[Any]) -> Index:
    """Return labels renumbered 0, 1, ... by first appearance."""
    _, first, number = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[number], dtype=np.int64)


def schema_columns(schema: Schema, loss: Loss, intercept: bool) -> Columns:
    """Return the columns of rows that `Schema.rows` prepared."""
    mean = schema.mean if intercept else np.zeros_like(schema.mean)
    return columns_for(loss, schema.names, mean, schema.scale, intercept, schema.classes)


def columns_for(
    loss: Loss, names: Sequence[str], mean: Array, scale: Array, intercept: bool, classes: tuple[Any, ...] | None = None
) -> Columns:
    """Return the columns of features with this centre and scale."""
    if intercept:
        names, mean, scale = (INTERCEPT, *names), np.append(0.0, mean), np.append(1.0, scale)
    labels = None if classes is None else classes[1:]
    return Columns(tuple(names), mean, scale, max(loss.n_outputs, 1), loss.location, labels)


def survival_target(y: ArrayLike) -> Array:
    """Return signed times ``(n,)``: censored times are negative.

    Parameters
    ----------
    y : structured array (n,), or array (n, 2)
        As in scikit-survival, with a boolean field of events and a field of times; or columns of events (0 or 1) and
        times.

    Examples
    --------
    >>> survival_target([(True, 2.0), (False, 3.0)]).tolist()
    [2.0, -3.0]
    """
    raw: NDArray[Any] = np.asarray(y)
    if raw.dtype.names is not None:
        kinds = {name: raw.dtype[name].kind for name in raw.dtype.names}
        events, times = ([n for n, k in kinds.items() if (k == "b") == wanted] for wanted in (True, False))
        if raw.ndim != 1 or len(events) != 1 or len(times) != 1 or kinds[times[0]] not in "fiu":
            raise DataError(f"y needs a boolean field of events and a numeric field of times, got {raw.dtype}")
        event, time = raw[events[0]], raw[times[0]].astype(np.float64)
    elif raw.ndim == 2 and raw.shape[1] == 2 and raw.dtype.kind in "biuf":
        event, time = raw[:, 0], raw[:, 1].astype(np.float64)
        if wrong := [one for one in np.unique(event).tolist() if one not in (0, 1)]:
            raise DataError(f"the first column of y is 1 for an event and 0 for a censored time, got {wrong[0]:g}")
    else:
        raise DataError(
            "y must be a structured array with a boolean field of events and a field of times, or an array (n, 2) of "
            f"events and times, got {raw.dtype} of shape {raw.shape}"
        )
    if (bad := ~(np.isfinite(time) & (time > 0))).any():
        row = int(np.argmax(bad))
        raise DataError(f"row {row}: the time is {time[row]:g}, expected a number above 0")
    return np.where(event.astype(bool), time, -time)
