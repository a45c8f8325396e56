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
    """A site id as a plain Python value.

    Parameters
    ----------
    value : hashable
        numpy scalars become Python scalars; whole floats become ints, as a column of ids with a gap is read as floats.

    Raises
    ------
    DataError
        If the value is missing (None, NaN) or cannot be hashed.

    Examples
    --------
    >>> import numpy as np
    >>> site_id(np.float64(3.0)), site_id(np.str_("ward 7")), site_id((0, 1))
    (3, 'ward 7', (0, 1))
    """
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
    """`site_id` of every value; fast for arrays and for lists of plain ints and strings.

    Examples
    --------
    >>> import numpy as np
    >>> site_ids(np.array([1.0, 2.0]))
    [1, 2]
    """
    if isinstance(values, range):
        return list(values)
    values = unwrapped(values)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "biufUS":
        values = values.tolist()
    listed = list(values)
    if set(map(type, listed)) <= {int, str, bool}:
        return listed
    return [site_id(value) for value in listed]


# --- arrays ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowNames:
    """How to name a stacked row in a message."""

    sites: tuple[Hashable, ...]
    codes: npt.NDArray[np.integer]
    counts: Index | None  # given when rows are counted within sites

    def __call__(self, row: int) -> str:
        u = int(self.codes[row])
        if self.counts is None:
            return f"row {row} (site {self.sites[u]!r})"
        return f"site {self.sites[u]!r}, row {row - int(self.counts[:u].sum())}"


def distinct_ids(values: Iterable[object]) -> tuple[Hashable, ...]:
    ids = tuple(site_ids(values))
    seen: set[Hashable] = set()
    for site in ids:
        if site in seen:
            raise DataError(f"site {site!r} is given twice: every site must be named once")
        seen.add(site)
    return ids


def site_rows(site: Hashable, value: Any) -> Rows:
    """The rows that a user gives for one site, as `Rows`."""
    where = f"site {site!r}: "
    weight = None
    if isinstance(value, Rows):
        value, weight = value.arrays, value.weight
    if not isinstance(value, tuple):
        value = (value,)
    if not 1 <= len(value) <= 3:
        raise DataError(f"{where}expected X, (X, y) or (X, y, offset), got a tuple of {len(value)}")
    X, y, offset = (*value, None, None)[:3]
    matrix = checked_matrix(X, where)
    return Rows(
        matrix,
        None if y is None else checked_target(y, len(matrix), where),
        None if offset is None else checked_numbers(offset, len(matrix), "offset", where),
        None if weight is None else checked_weight(weight, len(matrix), where),
    )


def checked_matrix(X: Any, where: str) -> Array:
    """X as float64 of shape (n, q); ``where`` says whose it is."""
    if hasattr(X, "toarray"):
        raise DataError(f"{where}X is a sparse matrix, expected a dense array: X.toarray()")
    try:
        raw = np.asarray(X)
    except ValueError:
        raise DataError(f"{where}the rows of X have different lengths, expected an array of shape (n, q)") from None
    if raw.ndim != 2:
        cure = "; for one feature use X.reshape(-1, 1)" if raw.ndim == 1 else ""
        raise DataError(f"{where}X has shape {raw.shape}, expected two dimensions (n, q){cure}")
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


def checked_feature_names(names: Sequence[str] | None, q: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"x{k}" for k in range(q))
    given = tuple(str(name) for name in names)
    if len(given) != q:
        raise DataError(f"{len(given)} feature names for {count(q, 'feature')}")
    for name in given:
        if given.count(name) > 1:
            raise DataError(f"feature name {name!r} is given twice")
    return given


def check_finite(X: Array, names: tuple[str, ...], rows: RowNames) -> None:
    if np.isfinite(X).all():
        return
    row, column = (int(k) for k in np.argwhere(~np.isfinite(X))[0])
    raise DataError(
        f"{rows(row)}, feature {names[column]!r} is {X[row, column]}: fill or drop such values "
        f"({int((~np.isfinite(X)).any(axis=1).sum())} of {len(X)} rows have one)"
    )


def vector(values: Any, n: int, name: str, where: str) -> AnyArray:
    try:
        raw = np.asarray(values)
    except ValueError:
        raise DataError(f"{where}{name} has nested values of different lengths, expected {count(n, 'value')}") from None
    if raw.ndim != 1:
        raise DataError(f"{where}{name} has shape {raw.shape}, expected ({n},)")
    if len(raw) != n:
        raise DataError(f"{where}{name} has {count(len(raw), 'value')}, but X has {count(n, 'row')}")
    return raw


def checked_target(y: Any, n: int, where: str) -> AnyArray:
    """y as float64, bool or object (text)."""
    raw = vector(y, n, "y", where)
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


def checked_numbers(values: Any, n: int, name: str, where: str) -> Array:
    """An offset, weight or time as float64."""
    column = as_column(vector(values, n, name, where))
    if column.dtype.kind not in "fb":
        raise DataError(f"{where}{name} is not numeric, expected {n} numbers")
    return column.astype(np.float64)


def checked_weight(weight: Any, n: int, where: str) -> Array:
    """Weights as float64, all of them more than 0."""
    column = checked_numbers(weight, n, "weight", where)
    bad = np.flatnonzero(~(np.isfinite(column) & (column > 0)))
    if bad.size:
        raise DataError(f"{where}row {bad[0]} has the weight {column[bad[0]]:g}: weights are more than 0, drop the row")
    return column


def times_of(time: Any, n: int) -> Array:
    """What orders rows: numbers, or days (2021-03-04, also with a time of day) as seconds."""
    column = as_column(vector(time, n, "time", ""))
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


def check_labels(values: AnyArray, name: str, rows: RowNames) -> None:
    """No missing or infinite value in a target or offset."""
    if values.dtype.kind == "O":
        bad = np.fromiter((cell is None for cell in values), dtype=bool, count=len(values))
    else:
        bad = ~np.isfinite(values)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise DataError(
            f"{rows(row)}: the {name} is {values[row]}; fill or drop such rows ({int(bad.sum())} of {len(values)})"
        )


def all_or_none(sites: tuple[Hashable, ...], parts: list[Any], name: str) -> bool:
    absent = [site for site, part in zip(sites, parts, strict=True) if part is None]
    if absent and len(absent) < len(sites):
        raise DataError(f"{listed(absent)} came without {name}, other sites with one: give it to all or to none")
    return not absent


def stacked_targets(sites: tuple[Hashable, ...], parts: list[AnyArray | None], rows: RowNames) -> AnyArray | None:
    if not all_or_none(sites, parts, "y"):
        return None
    words = {"f": "numbers", "b": "truth values", "O": "labels"}
    kinds = [words[part.dtype.kind] for part in parts if part is not None]
    for site, kind in zip(sites, kinds, strict=True):
        if kind != kinds[0]:
            raise DataError(
                f"y of site {site!r} is made of {kind}, but that of site {sites[0]!r} of {kinds[0]}: "
                "use one type for all sites"
            )
    stacked: AnyArray = np.concatenate([part for part in parts if part is not None])
    check_labels(stacked, "target", rows)
    return stacked


def stacked_numbers(
    sites: tuple[Hashable, ...], parts: list[Array | None], name: str, rows: RowNames
) -> Array | None:
    """Offsets or weights of all sites."""
    if not all_or_none(sites, parts, name):
        return None
    stacked = np.concatenate([part for part in parts if part is not None])
    check_labels(stacked, name, rows)
    return stacked


def grouped(site: Any) -> tuple[tuple[Hashable, ...], Index]:
    """Site ids in order of first appearance, and the number of the site of each row."""
    if isinstance(site, (str, bytes)) or not isinstance(site, Iterable):
        raise DataError(f"site must hold one id per row, got {site!r}")
    site = unwrapped(site)
    if isinstance(site, np.ndarray):
        if site.ndim != 1:
            raise DataError(f"site has shape {site.shape}, expected one id per row")
        if site.dtype.kind in "biufUS":
            values, first, codes = np.unique(site, return_index=True, return_inverse=True)
            by_appearance = np.argsort(first)
            number = np.empty(len(values), dtype=np.int64)
            number[by_appearance] = np.arange(len(values))
            return tuple(site_ids(values[by_appearance])), number[codes]
    numbers: dict[Hashable, int] = {}
    row_codes = [numbers.setdefault(value, len(numbers)) for value in site_ids(site)]
    return tuple(numbers), np.array(row_codes, dtype=np.int64)


def row_numbers(rows: npt.ArrayLike, n: int) -> Index:
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
    outside = (chosen < 0) | (chosen >= n)
    if outside.any():
        raise DataError(f"row {int(chosen[outside][0])} is outside 0..{n - 1}")
    return chosen.astype(np.int64)


def stable_hash(purpose: str, site: Hashable) -> int:
    """The same in every process, unlike hash()."""
    text = f"{purpose}:{type(site).__name__}:{site!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def shuffled_ranks(site: Hashable, n: int, seed: int, purpose: str) -> Index:
    """For each of a site's n rows its place in a shuffle that depends on seed, purpose and site only."""
    return np.random.default_rng([seed, stable_hash(purpose, site)]).permutation(n).astype(np.int64)


# --- cuts -----------------------------------------------------------------------------------------------------------


def held_out_rows(
    sites: Sequence[Hashable], sizes: Index, test_size: float, seed: int, *, ordered: bool = False
) -> Mask:
    """Which stacked rows are held out: ``round(test_size * n)`` of a site's n, but never all; the last if ordered."""
    if not 0 < test_size < 1:
        raise ParameterError(f"test_size must be between 0 and 1, got {test_size!r}")
    each = zip(sites, sizes.tolist(), strict=True)
    ranks = [np.arange(n)[::-1] if ordered else shuffled_ranks(site, n, seed, "split") for site, n in each]
    held_out = np.where(sizes >= 2, np.clip(np.rint(test_size * sizes), 1, np.maximum(sizes - 1, 1)), 0)
    return np.asarray(np.concatenate(ranks) < np.repeat(held_out, sizes))


def fold_numbers(sites: Sequence[Hashable], sizes: Index, k: int, seed: int, *, ordered: bool = False) -> Index:
    """Fold 0..k-1 of each stacked row, cut within sites."""
    if not 2 <= k <= sizes.sum():
        raise ParameterError(f"the number of folds must be from 2 to the {sizes.sum()} rows, got {k!r}")
    each = zip(sites, sizes.tolist(), strict=True)
    return np.concatenate([block_folds(n, k) if ordered else deal_folds(site, n, k, seed) for site, n in each])


def deal_folds(site: Hashable, n: int, k: int, seed: int) -> Index:
    """Fold ``(n,)`` of each of a site's n rows; its id and the seed decide, whoever the other sites are.

    Shuffled rows are dealt to the k folds like cards, from a fold on that also depends on seed and site.
    """
    first = stable_hash(f"first fold, seed {seed}", site) % k
    return np.asarray((first + shuffled_ranks(site, n, seed, "folds")) % k, dtype=np.int64)


def block_folds(n: int, k: int) -> Index:
    """Fold ``(n,)`` of each of n rows in the order of time: k blocks, the earliest first.

    Examples
    --------
    >>> block_folds(7, 3)
    array([0, 0, 0, 1, 1, 2, 2])
    """
    return np.repeat(np.arange(k), [len(part) for part in np.array_split(np.arange(n), k)])
