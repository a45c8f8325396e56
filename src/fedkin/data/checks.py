"""Check the ids and arrays that come into a `Federation`, and cut the rows of sites into parts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkin._base import AnyArray, Array, Index, Mask, count, listed
from fedkin.data.cells import is_missing, unwrapped
from fedkin.data.columns import as_column
from fedkin.data.rows import Rows
from fedkin.errors import DataError, ParameterError

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_TARGETS = {"f": "numbers", "b": "truth values", "O": "labels"}


# --- ids ------------------------------------------------------------------------------------------------------------


class HasSites:
    """What has sites in an order: a federation, a graph, a model."""

    sites: tuple[Hashable, ...]

    @cached_property
    def index(self) -> Mapping[Hashable, int]:
        """Position of each site in `sites`."""
        return {site: position for position, site in enumerate(self.sites)}

    @property
    def n_sites(self) -> int:
        """Number of sites V."""
        return len(self.sites)


def site_id(value: object) -> Hashable:
    """Return a site id as a plain Python value; whole floats become ints, as ids with a gap are read as floats."""
    if isinstance(value, np.generic) and not isinstance(value, (np.datetime64, np.timedelta64)):
        value = value.item()
    if is_missing(value):
        raise DataError(f"a site id is missing ({value!r}): give every row and every edge a site")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        hash(value)
    except TypeError:
        raise DataError(
            f"site id {value!r} of type {type(value).__name__} cannot be hashed: use a text, a number or a tuple"
        ) from None
    return value


def site_ids(values: Iterable[object]) -> list[Hashable]:
    """Return `site_id` of every value; fast for arrays and for lists of plain ints and strings."""
    if isinstance(values, range):
        return list(values)
    values = unwrapped(values)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "biufUS":
        values = values.tolist()
    given = list(values)
    if set(map(type, given)) <= {int, str, bool}:
        return given
    return [site_id(value) for value in given]


def distinct_ids(values: Iterable[object]) -> tuple[Hashable, ...]:
    ids = tuple(site_ids(values))
    seen: set[Hashable] = set()
    for site in ids:
        if site in seen:
            raise DataError(f"site {site!r} is given twice: every site must be named once")
        seen.add(site)
    return ids


def grouped(site: Any) -> tuple[tuple[Hashable, ...], Index]:
    """Return site ids in order of first appearance, and the number of the site of each row."""
    if isinstance(site, (str, bytes)) or not isinstance(site, Iterable):
        raise DataError(f"site must hold one id per row, got {site!r}")
    site = unwrapped(site)
    if isinstance(site, np.ndarray):
        if site.ndim != 1:
            raise DataError(f"site has shape {site.shape}, expected one id per row")
        if site.dtype.kind in "biufUS":
            values, first, codes = np.unique(site, return_index=True, return_inverse=True)
            by_appearance = np.argsort(first)
            return tuple(site_ids(values[by_appearance])), np.argsort(by_appearance).astype(np.int64)[codes]
    numbers: dict[Hashable, int] = {}
    row_codes = [numbers.setdefault(value, len(numbers)) for value in site_ids(site)]
    return tuple(numbers), np.array(row_codes, dtype=np.int64)


# --- arrays ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowNames:
    """Name a stacked row in a message."""

    sites: tuple[Hashable, ...]
    codes: npt.NDArray[np.integer]
    counts: Index | None = None  # given when rows are counted within sites

    def __call__(self, row: int) -> str:
        u = int(self.codes[row])
        if self.counts is None:
            return f"row {row} (site {self.sites[u]!r})"
        return f"site {self.sites[u]!r}, row {row - int(self.counts[:u].sum())}"


def site_rows(site: Hashable, value: Any) -> Rows:
    """Return the rows that a user gives for one site."""
    where = f"site {site!r}: "
    if isinstance(value, Rows):
        return checked_rows(*value.arrays, value.weight, where)
    value = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(value) <= 3:
        raise DataError(f"{where}expected X, (X, y) or (X, y, offset), got a tuple of {len(value)}")
    X, y, offset = (*value, None, None)[:3]
    return checked_rows(X, y, offset, None, where)


def checked_rows(X: Any, y: Any, offset: Any, weight: Any, where: str = "") -> Rows:
    """Return arrays of the right types and lengths; ``where`` says whose they are."""
    matrix = _matrix(X, where)
    n = len(matrix)
    target = None if y is None else _target(y, n, where)
    offset = None if offset is None else _numbers(offset, n, "offset", where)
    if weight is not None:
        weight = _numbers(weight, n, "weight", where)
        for row in np.flatnonzero(~(np.isfinite(weight) & (weight > 0)))[:1]:
            raise DataError(f"{where}row {row} has the weight {weight[row]:g}: weights are more than 0, drop the row")
    return Rows(matrix, target, offset, weight)


def stacked_rows(sites: tuple[Hashable, ...], parts: Sequence[Rows]) -> Rows:
    """Stack the rows of all sites, which must have the same columns, and target, offset and weight all or none."""
    first = parts[0]
    for site, part in zip(sites, parts, strict=True):
        if part.n_samples == 0:
            raise DataError(f"site {site!r} has no rows: leave it out or give it data")
        if part.X.shape[1] != first.X.shape[1]:
            raise DataError(
                f"site {site!r} has {count(part.X.shape[1], 'feature')}, but site {sites[0]!r} has "
                f"{first.X.shape[1]}: all sites need the same features"
            )
    for name in ("y", "offset", "weight"):
        absent = [site for site, part in zip(sites, parts, strict=True) if getattr(part, name) is None]
        if absent and len(absent) < len(sites):
            raise DataError(f"{listed(absent)} came without {name}, other sites with one: give it to all or to none")
    kinds = [_TARGETS[part.y.dtype.kind] for part in parts if part.y is not None]
    for site, kind in zip(sites, kinds, strict=False):
        if kind != kinds[0]:
            raise DataError(
                f"y of site {site!r} is made of {kind}, but that of site {sites[0]!r} of {kinds[0]}: "
                "use one type for all sites"
            )
    return Rows.stack(parts)


def check_values(rows: Rows, names: tuple[str, ...], row_name: RowNames) -> None:
    """Raise for the first value that is missing or not finite."""
    if not np.isfinite(rows.X).all():
        row, column = (int(k) for k in np.argwhere(~np.isfinite(rows.X))[0])
        raise DataError(
            f"{row_name(row)}, feature {names[column]!r} is {rows.X[row, column]}: fill or drop such values "
            f"({int((~np.isfinite(rows.X)).any(axis=1).sum())} of {rows.n_samples} rows have one)"
        )
    for name, values in (("target", rows.y), ("offset", rows.offset)):
        if values is None:
            continue
        bad = np.array([cell is None for cell in values]) if values.dtype.kind == "O" else ~np.isfinite(values)
        for row in np.flatnonzero(bad)[:1].tolist():
            raise DataError(
                f"{row_name(row)}: the {name} is {values[row]}; fill or drop such rows ({bad.sum()} of {len(values)})"
            )


def checked_feature_names(names: Sequence[str] | None, q: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"x{k}" for k in range(q))
    given = tuple(str(name) for name in names)
    if len(given) != q:
        raise DataError(f"{len(given)} feature names for {count(q, 'feature')}")
    if len(set(given)) < q:
        raise DataError(f"feature name {next(name for name in given if given.count(name) > 1)!r} is given twice")
    return given


def times_of(time: Any, n: int) -> Array:
    """Return what orders rows: numbers, or days (2021-03-04, also with a time of day) as seconds."""
    column = as_column(_vector(time, n, "time", ""))
    if column.dtype.kind in "fb":
        values = column.astype(np.float64)
    else:
        try:
            values = column.astype("datetime64[us]").astype(np.float64) / 1e6
        except (ValueError, TypeError):
            first = next((cell for cell in column if not isinstance(cell, str) or not _DAY.match(cell)), column[0])
            raise DataError(
                f"the time {first!r} is neither a number nor a day such as 2021-03-04 or 2021-03-04T15:30"
            ) from None
    if not np.isfinite(values).all():
        raise DataError(f"{int((~np.isfinite(values)).sum())} of {n} rows have no time: fill it in, or drop them")
    return values


def row_numbers(rows: npt.ArrayLike, n: int) -> Index:
    """Return the rows that a mask or an array of row numbers chooses among n."""
    chosen = np.asarray(rows)
    if chosen.size == 0 and chosen.dtype.kind == "f":  # np.asarray([])
        chosen = chosen.astype(np.int64)
    if chosen.ndim != 1 or chosen.dtype.kind not in "biu":
        raise DataError(
            f"rows must be a bool array of shape ({n},) or an array of row numbers, got {chosen.dtype} {chosen.shape}"
        )
    if chosen.dtype.kind == "b":
        if len(chosen) != n:
            raise DataError(f"the mask has {count(len(chosen), 'value')}, but the federation has {count(n, 'row')}")
        return np.flatnonzero(chosen).astype(np.int64)
    for row in chosen[(chosen < 0) | (chosen >= n)][:1]:
        raise DataError(f"row {int(row)} is outside 0..{n - 1}")
    return chosen.astype(np.int64)


def _matrix(X: Any, where: str) -> Array:
    if hasattr(X, "toarray"):
        raise DataError(f"{where}X is a sparse matrix, expected a dense array: X.toarray()")
    try:
        raw = np.asarray(X)
    except ValueError:
        raise DataError(f"{where}the rows of X have different lengths, expected an array of shape (n, q)") from None
    if raw.ndim != 2:
        hint = "; for one feature use X.reshape(-1, 1)" if raw.ndim == 1 else ""
        raise DataError(f"{where}X has shape {raw.shape}, expected two dimensions (n, q){hint}")
    if raw.dtype.kind == "c":
        raise DataError(f"{where}X is complex, expected real numbers")
    if raw.dtype.kind not in "biufOUS":
        raise DataError(f"{where}X is not numeric: it has the type {raw.dtype}; turn it into numbers")
    if raw.dtype.kind in "OUS":
        for (row, column), cell in np.ndenumerate(raw.astype(object)):
            if cell is not None and not isinstance(cell, (int, float, np.number, np.bool_)):
                raise DataError(
                    f"{where}X is not numeric: row {row}, column {column} is {cell!r}; "
                    "encode text as numbers, fill gaps"
                )
    return np.array(raw, dtype=np.float64)


def _vector(values: Any, n: int, name: str, where: str) -> AnyArray:
    try:
        raw = np.asarray(values)
    except ValueError:
        raise DataError(f"{where}{name} has nested values of different lengths, expected {count(n, 'value')}") from None
    if raw.ndim != 1:
        raise DataError(f"{where}{name} has shape {raw.shape}, expected ({n},)")
    if len(raw) != n:
        raise DataError(f"{where}{name} has {count(len(raw), 'value')}, but X has {count(n, 'row')}")
    return raw


def _target(y: Any, n: int, where: str) -> AnyArray:
    """Return y as float64, bool or object (text)."""
    raw = _vector(y, n, "y", where)
    if raw.dtype.kind == "c":
        raise DataError(f"{where}y is complex, expected numbers or class labels")
    if not isinstance(y, np.ndarray) and raw.dtype.kind == "U":
        raw = np.fromiter(y, dtype=object, count=n)  # [1, "a"] must not become ["1", "a"]
    column = as_column(raw)
    if column.dtype.kind == "O":
        kinds = {type(cell).__name__ for cell in column if cell is not None}
        if kinds == {"int"}:  # beyond 2**53
            return column.astype(np.float64)
        if len(kinds) > 1:
            raise DataError(f"{where}y mixes {' and '.join(sorted(kinds))}: use labels of one type")
    return column


def _numbers(values: Any, n: int, name: str, where: str) -> Array:
    column = as_column(_vector(values, n, name, where))
    if column.dtype.kind not in "fb":
        raise DataError(f"{where}{name} is not numeric, expected {n} numbers")
    return column.astype(np.float64)


# --- cuts -----------------------------------------------------------------------------------------------------------


def held_out_rows(
    sites: Sequence[Hashable], sizes: Index, test_size: float, seed: int, *, ordered: bool = False
) -> Mask:
    """Return which stacked rows are held out: ``round(test_size * n)`` of n, but never all; the last if ordered."""
    if not 0 < test_size < 1:
        raise ParameterError(f"test_size must be between 0 and 1, got {test_size!r}")
    each = zip(sites, sizes.tolist(), strict=True)
    ranks = [np.arange(n)[::-1] if ordered else _shuffled_ranks(site, n, seed, "split") for site, n in each]
    held_out = np.where(sizes >= 2, np.clip(np.rint(test_size * sizes), 1, np.maximum(sizes - 1, 1)), 0)
    return np.asarray(np.concatenate(ranks) < np.repeat(held_out, sizes))


def fold_numbers(sites: Sequence[Hashable], sizes: Index, k: int, seed: int, *, ordered: bool = False) -> Index:
    """Return the fold 0..k-1 of each stacked row, cut within sites."""
    if not 2 <= k <= sizes.sum():
        raise ParameterError(f"the number of folds must be from 2 to the {sizes.sum()} rows, got {k!r}")
    each = zip(sites, sizes.tolist(), strict=True)
    return np.concatenate([block_folds(n, k) if ordered else deal_folds(site, n, k, seed) for site, n in each])


def deal_folds(site: Hashable, n: int, k: int, seed: int) -> Index:
    """Deal a site's n rows to k folds ``(n,)`` by its id and the seed alone, whatever the other sites are.

    Shuffled rows are dealt like cards, from a fold on that also depends on seed and site.
    """
    first = _stable_hash(f"first fold, seed {seed}", site) % k
    return np.asarray((first + _shuffled_ranks(site, n, seed, "folds")) % k, dtype=np.int64)


def block_folds(n: int, k: int) -> Index:
    """Cut n rows in the order of time into k folds ``(n,)``, the earliest first."""
    return np.repeat(np.arange(k), [len(part) for part in np.array_split(np.arange(n), k)])


def _stable_hash(purpose: str, site: Hashable) -> int:
    """Return a hash that is the same in every process."""
    text = f"{purpose}:{type(site).__name__}:{site!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _shuffled_ranks(site: Hashable, n: int, seed: int, purpose: str) -> Index:
    """Return the place of each of a site's n rows in a shuffle that depends on seed, purpose and site only."""
    return np.random.default_rng([seed, _stable_hash(purpose, site)]).permutation(n).astype(np.int64)
