"""Rows that a model is given later: features, sites, offsets and labels, checked against the model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin._base import Array, Index, check_choice, listed
from fedkin.data import Schema, columns_of, site_id, site_ids
from fedkin.errors import DataError, UnknownSiteError, argument


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
        raise DataError(f"there is no column {listed(absent, 20)}; the model needs {listed(names, 20)}")
    wrong = [name for name in names if columns[name].dtype.kind not in "fb"]
    if wrong:
        raise DataError(f"column {wrong[0]!r} is not numeric, but the model needs numbers there")
    n = len(next(iter(columns.values()), ()))
    return np.column_stack([np.empty((n, 0)), *(columns[name] for name in names)]).astype(np.float64)


#: What becomes of rows of sites that were not part of the fit: refused, or predicted by the population of sites.
Unseen = Literal["raise", "population"]


def site_positions(site: object, n: int, index: Mapping[Hashable, int], unseen: Unseen = "raise") -> Index:
    """Return the number of each row's site, that of the last and one more for unseen ones that are allowed.

    ``site`` is one id, an id per row, or None for a model of one site.
    """
    check_choice("unseen", unseen, get_args(Unseen))
    if site is None:
        if len(index) == 1:
            return np.zeros(n, dtype=np.int64)
        raise DataError(
            f"the model has {len(index)} sites, so it must be told which one each row belongs to: "
            f"{argument('site')} one of {listed(index)}, or a list with an id per row"
        )
    if isinstance(site, str | bytes | tuple) or not isinstance(site, Iterable):
        return np.full(n, position_of(site_id(site), index, unseen))
    ids = site_ids(site)
    if len(ids) != n:
        raise DataError(f"site names {len(ids)} rows, but X has {n}: give one id per row, or one id for all")
    known = {one: position_of(one, index, unseen) for one in dict.fromkeys(ids)}
    return np.fromiter((known[one] for one in ids), dtype=np.int64, count=n)


def position_of(site: Hashable, index: Mapping[Hashable, int], unseen: Unseen = "raise") -> int:
    """Return the number of a site; raise `UnknownSiteError` for one that the model does not have.

    An unseen site that is allowed has the next number, unless a known one is written like it.
    """
    if site in index:
        return index[site]
    alike = [known for known in index if str(known) == str(site)]
    if unseen == "population" and not alike:
        return len(index)
    if alike:
        guess = f" (did you mean {alike[0]!r}, {type(alike[0]).__name__} instead of {type(site).__name__}?)"
        hint = ""
    else:
        guess = ""
        hint = (
            '. Fit again with rows of this site, or predict it from the population of sites (unseen="population" in '
            "Python). In cross-validation use cv=fedkin.WithinSiteKFold(), which leaves rows of every site to train on"
        )
    raise UnknownSiteError(
        f"site {site!r}{guess} was not part of the fit, so it has no model; the {len(index)} known sites are "
        f"{listed(index)}{hint}"
    )


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
    """Return the offset plus the logarithm of the exposure, as far as they are given."""
    if exposure is None:
        return offset
    values = np.asarray(exposure, dtype=np.float64)
    if not (values > 0).all():
        bad = values[~(values > 0)].flat[0]
        raise DataError(f"exposures are above 0, but one is {bad:g}: leave out rows that were not exposed")
    return np.asarray(np.log(values) + (0.0 if offset is None else np.asarray(offset, dtype=np.float64)))


def class_numbers(y: NDArray[Any], classes: tuple[Any, ...]) -> Array:
    """Return the number of each label among the classes of a fit."""
    number = {label: k for k, label in enumerate(classes)}
    unknown = [label for label in np.unique(y).tolist() if label not in number]
    if unknown:
        raise DataError(f"class {unknown[0]!r} is in the held-out rows, but not in the training rows")
    return np.array([number[label] for label in y.tolist()], dtype=np.float64)
