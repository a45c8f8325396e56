"""Define `Rows`, the only container of rows; check ids and arrays; split rows into parts."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import narwhals.stable.v2 as nw
import numpy as np
import numpy.typing as npt

from fedkin._base import AnyArray, Array, Index, count, listed, repeated, write_arrays
from fedkin.data.cells import DATES, RowName, is_missing, near_name, unwrapped
from fedkin.data.columns import as_column
from fedkin.errors import DataError, UnknownSiteError

_NAMES = ("X", "y", "offset", "weight")
#: Number of rows from which copies of all rows are not due to chance, and the share of copies to report.
_MANY_ROWS, _MANY_COPIES = 10, 0.01
_TEMPORAL = (datetime.date, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64)
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_TARGETS = {"f": "numbers", "b": "truth values", "O": "labels"}


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one site, or stacked rows of several; blocks of rows have further leading axes."""

    X: Array  # (n, q), features; for the mean loss, the samples themselves
    y: AnyArray | None = None  # (n,), numbers or class labels
    offset: Array | None = None  # (n,), known part of the linear predictor
    weight: Array | None = None  # (n,), how many rows each one stands for, more than 0

    @property
    def n_samples(self) -> int:
        """Length of the first axis."""
        return int(self.X.shape[0])

    @property
    def arrays(self) -> tuple[Array, AnyArray | None, Array | None]:
        """``(X, y, offset)``, the arguments of losses."""
        return self.X, self.y, self.offset

    @property
    def _parts(self) -> tuple[AnyArray | None, ...]:
        return (*self.arrays, self.weight)

    def map(self, change: Callable[[AnyArray], AnyArray]) -> Rows:
        """Change the arrays one by one."""
        return Rows(*(None if part is None else change(part) for part in self._parts))  # type: ignore[arg-type]

    def take(self, rows: int | slice | npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> Rows:
        """Take some of the rows: a view for a number or slice, a copy for row numbers of any shape or a mask."""
        if isinstance(rows, np.ndarray) and rows.dtype.kind != "b":
            return self.map(lambda part: part.take(rows, axis=0))  # twice as fast as indexing
        return self.map(lambda part: part[rows])

    @classmethod
    def stack(cls, parts: Sequence[Rows]) -> Rows:
        """Stack the rows of all parts in order; either all have a target (an offset, a weight) or none."""
        columns = zip(*(part._parts for part in parts), strict=True)
        return cls(*(None if column[0] is None else np.concatenate(column) for column in columns))  # type: ignore[arg-type]

    # --- files -------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an NPZ file that only the owner may read, with a digest of all its numbers."""
        given = self._numbers()
        write_arrays(path, {**given, "digest": _digest(given)})

    @property
    def digest(self) -> str:
        """SHA-256 of all numbers, in hexadecimal digits."""
        return _digest(self._numbers()).tobytes().hex()

    def _numbers(self) -> dict[str, Array]:
        named = zip(_NAMES, self._parts, strict=True)
        return {name: np.ascontiguousarray(part, dtype=np.float64) for name, part in named if part is not None}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rows:
        """Read the file that `save` wrote; raise `DataError` if it has changed."""
        if not Path(path).is_file():
            raise DataError(f"there is no file {path}")
        try:
            # opened here: numpy would leave a damaged file open
            with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                stored = {name: file[name] for name in file.files}
            digest = stored.pop("digest")
            parts = {name: np.ascontiguousarray(part, dtype=np.float64) for name, part in stored.items()}
        except Exception as error:  # numpy and zipfile raise various errors on damaged bytes
            raise DataError(f"{path} is damaged, or not an NPZ file of rows; create it again") from error
        if "X" not in parts or not parts.keys() <= set(_NAMES):
            has = ", ".join(parts) or "none"
            raise DataError(f"{path} has the arrays {has}, expected X, and y, offset and weight if used")
        if not np.array_equal(digest, _digest(parts)):
            raise DataError(f"{path} is damaged: its numbers do not match the stored digest; create it again")
        return cls(**parts)


def _digest(parts: Mapping[str, Array]) -> AnyArray:
    """Return the SHA-256 of arrays with their names and shapes."""
    whole = hashlib.sha256()
    for name in sorted(parts):
        whole.update(f"{name}{parts[name].shape}".encode())
        whole.update(parts[name].astype("<f8").tobytes())
    return np.frombuffer(whole.digest(), dtype=np.uint8)


# --- ids ------------------------------------------------------------------------------------------------------------


class HasSites:
    """A mixin for objects with ordered sites: federations, graphs, results and models."""

    sites: tuple[Hashable, ...]
    _lacks: ClassVar[str] = "is not among the {n} sites"  # why there is no site of a name
    _remedy: ClassVar[str] = ""  # what to do about it

    @cached_property
    def index(self) -> Mapping[Hashable, int]:
        """Position of each site in `sites`."""
        return {site: position for position, site in enumerate(self.sites)}

    @property
    def n_sites(self) -> int:
        """Number of sites V."""
        return len(self.sites)

    @cached_property
    def _by_text(self) -> dict[str, list[int]]:
        """Positions of the sites by their text."""
        found: dict[str, list[int]] = {}
        for u, site in enumerate(self.sites):
            found.setdefault(str(site), []).append(u)
        return found

    def find_site(self, site: object) -> int | None:
        """Return the position of a site by its id, or else by its text (``"23"`` for 23); None for an unknown one."""
        site = site_id(site)
        if site in self.index:
            return self.index[site]
        alike = self._by_text.get(str(site), [])
        if len(alike) > 1:
            ids = " and ".join(repr(self.sites[u]) for u in alike)
            raise UnknownSiteError(f"{site!r} may be any of the sites {ids}: give the id itself")
        return alike[0] if alike else None

    def position(self, site: object) -> int:
        """Return the position of a site as `find_site` does; raise `UnknownSiteError` for an unknown one."""
        found = self.find_site(site)
        if found is None:
            near = near_name(str(site), self._by_text)
            lacks = f"site {site_id(site)!r} {self._lacks.format(n=self.n_sites)}"
            raise UnknownSiteError(f"{lacks}{near}; there are {listed(self.sites)}{self._remedy}")
        return found


def site_id(value: object) -> Hashable:
    """Return a site id as a plain Python value; whole floats become ints, because ids with a gap are read as floats."""
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
        whole = values.dtype.kind == "f" and bool((values == np.floor(values)).all())
        values = (values.astype(np.int64) if whole and np.abs(values).max(initial=0) < 2**53 else values).tolist()
    given = list(values)
    if set(map(type, given)) <= {int, str, bool}:
        return given
    return [site_id(value) for value in given]


def distinct_ids(values: Iterable[object]) -> tuple[Hashable, ...]:
    """Return site ids, after checking that each is named once."""
    ids = tuple(site_ids(values))
    if twice := repeated(ids):
        raise DataError(f"site {twice[0]!r} is given twice: every site must be named once")
    return ids


def grouped(site: Any) -> tuple[tuple[Hashable, ...], Index]:
    """Return site ids in order of first appearance, and the number of the site of each row."""
    if isinstance(site, (str, bytes)) or not isinstance(site, Iterable):
        raise DataError(f"site must be a list with one id per row, got {site!r}")
    site = unwrapped(site)
    if isinstance(site, np.ndarray):
        if site.ndim != 1:
            raise DataError(f"site has shape {site.shape}, expected one id per row")
        if site.dtype.kind in "biufUS":
            values, first, codes = _distinct(site)
            by_appearance = np.argsort(first)
            return tuple(site_ids(values[by_appearance])), np.argsort(by_appearance).astype(np.int64)[codes]
    numbers: dict[Hashable, int] = {}
    row_codes = [numbers.setdefault(value, len(numbers)) for value in site_ids(site)]
    return tuple(numbers), np.array(row_codes, dtype=np.int64)


def _distinct(site: AnyArray) -> tuple[AnyArray, Index, Index]:
    """Return distinct values, their first positions, and the number of each value; integers are counted, not sorted."""
    n, low = len(site), site.min() if site.size and site.dtype.kind in "iuf" else np.inf
    whole = site.dtype.kind in "iuf" and n > 0 and bool(site.max() - low < 4 * n)  # not if one is missing
    if not whole or (site.dtype.kind == "f" and (site != np.floor(site)).any()):
        values, first, codes = np.unique(site, return_index=True, return_inverse=True)
        return values, first, codes
    code = (site - low).astype(np.int64)
    first = np.full(int(code.max()) + 1, n)
    first[code[::-1]] = np.arange(n)[::-1]
    there = first < n
    found = np.flatnonzero(there)
    return (found + low).astype(site.dtype), first[found], (np.cumsum(there) - 1)[code]


def stable_order(code: Index, n: int) -> Index:
    """Return the order of numbers below n; numpy sorts short ones several times faster."""
    return np.argsort(code.astype(np.uint16) if n <= 1 << 16 else code, kind="stable")


# --- arrays ---------------------------------------------------------------------------------------------------------


def checked_rows(X: Any, y: Any, offset: Any, weight: Any, names: Sequence[str], at: RowName, where: str = "") -> Rows:
    """Return finite arrays of the right types and lengths.

    ``names`` are the names of the features, ``at`` names a row, and ``where`` names the site.
    """
    matrix = _matrix(X, where)
    n = len(matrix)
    rows = Rows(
        matrix,
        None if y is None else _target(y, n, where),
        None if offset is None else _numbers(offset, n, "offset", where),
        None if weight is None else _numbers(weight, n, "weight", where),
    )
    if rows.weight is not None:
        for row in np.flatnonzero(~(np.isfinite(rows.weight) & (rows.weight > 0)))[:1]:
            value = rows.weight[row]
            raise DataError(f"{where}row {row} has the weight {value:g}: weights must be more than 0; drop the row")
    wrong = ~np.isfinite(matrix)
    for row, column in np.argwhere(wrong)[:1].tolist():
        name = names[column] if column < len(names) else f"x{column}"
        raise DataError(
            f"{at(row)}, feature {name!r} is {matrix[row, column]}: fill or drop such values "
            f"({int(wrong.any(axis=1).sum())} of {n} rows are affected)"
        )
    for name, values in (("target", rows.y), ("offset", rows.offset)):
        if values is None:
            continue
        bad = np.array([cell is None for cell in values]) if values.dtype.kind == "O" else ~np.isfinite(values)
        for row in np.flatnonzero(bad)[:1].tolist():
            raise DataError(f"{at(row)}: the {name} is {values[row]}; fill or drop such rows ({bad.sum()} of {n})")
    return rows


def rows_of_site(site: Hashable, value: Any, names: Sequence[str]) -> Rows:
    """Return the rows of one site from user input."""
    where = f"site {site!r}: "
    if isinstance(value, Rows):
        value = (*value.arrays, value.weight)
    elif not isinstance(value, tuple):
        value = (value,)
    elif not 1 <= len(value) <= 3:
        raise DataError(f"{where}expected X, (X, y) or (X, y, offset), got a tuple of {len(value)}")
    X, y, offset, weight = (*value, None, None, None)[:4]
    rows = checked_rows(X, y, offset, weight, names, lambda row: f"site {site!r}, row {row}", where)
    if rows.n_samples == 0:
        raise DataError(f"site {site!r} has no rows: leave it out or give it data")
    return rows


def stacked_rows(sites: tuple[Hashable, ...], parts: Sequence[Rows]) -> Rows:
    """Stack the rows of all sites, which must have the same columns, and target, offset and weight all or none."""
    q, targets = parts[0].X.shape[1], [part.y for part in parts if part.y is not None]
    for site, part in zip(sites, parts, strict=True):
        if part.X.shape[1] != q:
            raise DataError(
                f"site {site!r} has {count(part.X.shape[1], 'feature')}, but site {sites[0]!r} has {q}: "
                "all sites need the same features"
            )
    for name in ("y", "offset", "weight"):
        absent = [site for site, part in zip(sites, parts, strict=True) if getattr(part, name) is None]
        if absent and len(absent) < len(sites):
            raise DataError(f"no {name} at {listed(absent)}, but at other sites: give it for all sites or for none")
    for site, y in zip(sites, targets, strict=False):
        kind, first = _TARGETS[y.dtype.kind], _TARGETS[targets[0].dtype.kind]
        if kind != first:
            raise DataError(
                f"y of site {site!r} has the type {kind}, but y of site {sites[0]!r} of {first}: "
                "use one type for all sites"
            )
    return Rows.stack(parts)


def checked_feature_names(names: Sequence[str] | None, q: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"x{k}" for k in range(q))
    given = tuple(str(name) for name in names)
    if len(given) != q:
        raise DataError(f"{len(given)} feature names for {count(q, 'feature')}")
    if twice := repeated(given):
        raise DataError(f"feature name {twice[0]!r} is given twice")
    return given


def note_of_copies(rows: Rows, codes: Index, time: Array | None, at: RowName) -> str:
    """Return a note about repeated rows if chance does not explain them; "" otherwise.

    Copies are expected if all columns have few values. They are suspicious if a column has about as many values as
    there are distinct rows, or if all rows occur equally often.
    """
    y = rows.y
    if y is not None and y.dtype.kind == "O":
        y = np.unique(y.astype(str), return_inverse=True)[1]
    hashes = np.zeros(len(codes), dtype=np.uint64)
    for column in (*rows.X.T, *(part for part in (codes, y, rows.offset, rows.weight, time) if part is not None)):
        values = column.astype(np.float64)
        values = np.where(np.isnan(values), np.inf, values) + 0.0  # one bit pattern per number
        hashes = (hashes ^ values.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    _, first, which, counts = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    n, different = len(codes), len(counts)
    again = n - different
    every = different >= _MANY_ROWS and counts.min() == counts.max() > 1
    if not every:
        if again < max(2.0, _MANY_COPIES * n):
            return ""
        most = max((np.unique(column).size for column in rows.X.T), default=0)
        if most < max(_MANY_ROWS, 0.5 * different):
            return ""
    row = int(np.flatnonzero(first[which.reshape(-1)] != np.arange(n))[0])
    what = f"every row occurs {counts[0]} times" if every else f"{again} of {n} rows are copies of others"
    return f"{what}, the first copy in {at(row)}: remove them unless they are different samples"


def times_of(time: Any, n: int) -> Array:
    """Return sortable times: numbers, or days (2021-03-04, optionally with a time) as seconds."""
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
    """Return the rows selected by a mask or an array of row numbers among n."""
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


def refuse_dates(X: Any, where: str = "") -> None:
    """Raise `DataError` for the first column of dates in a data frame or an array."""
    dates: list[object] = []
    if hasattr(X, "columns") and not isinstance(X, Mapping):
        table = nw.from_native(X, pass_through=True)
        schema = table.collect_schema() if isinstance(table, nw.DataFrame | nw.LazyFrame) else {}
        dates = [name for name, kind in schema.items() if kind.is_temporal()]
    elif isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind in "mMO":
        dates = [k for k, cell in enumerate(X[0] if len(X) else ()) if isinstance(cell, _TEMPORAL)]
    for name in dates[:1]:
        raise DataError(f"{where}column {name!r} of X: {DATES}")


def _matrix(X: Any, where: str) -> Array:
    refuse_dates(X, where)
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


# --- splits ---------------------------------------------------------------------------------------------------------


def deal_folds(site: Hashable, n: int, k: int, seed: int) -> Index:
    """Assign a site's n rows to k folds ``(n,)`` by its id and the seed, independently of other sites.

    Shuffled rows are assigned in turn, starting from a fold that also depends on seed and site.
    """
    first = _stable_hash(f"first fold, seed {seed}", site) % k
    return np.asarray((first + shuffled_ranks(site, n, seed, "folds")) % k, dtype=np.int64)


def block_folds(n: int, k: int) -> Index:
    """Split n rows in time order into k folds ``(n,)``, the earliest first."""
    return np.repeat(np.arange(k), [len(part) for part in np.array_split(np.arange(n), k)])


def _stable_hash(purpose: str, site: Hashable) -> int:
    """Return a hash that is the same in all processes."""
    text = f"{purpose}:{type(site).__name__}:{site!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def shuffled_ranks(site: Hashable, n: int, seed: int, purpose: str) -> Index:
    """Return the rank of each of a site's n rows in a shuffle that depends only on seed, purpose and site."""
    return np.random.default_rng([seed, _stable_hash(purpose, site)]).permutation(n).astype(np.int64)
