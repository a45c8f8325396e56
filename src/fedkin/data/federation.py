"""The rows of all sites, stacked in site order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
import numpy.typing as npt

from fedkin._base import AnyArray, Array, Index, count, frozen, html_card, in_file, listed, some_of
from fedkin.data.cells import (
    DecimalMark,
    Finding,
    is_missing,
    missing_column,
    parsed_numbers,
    sheet_row,
)
from fedkin.data.columns import RawColumns, columns_of
from fedkin.data.files import no_site_column, read_files
from fedkin.data.infer import SchemaScan
from fedkin.data.rows import (
    HasSites,
    Rows,
    block_folds,
    checked_feature_names,
    checked_rows,
    deal_folds,
    distinct_ids,
    grouped,
    note_of_copies,
    row_numbers,
    rows_of_site,
    shuffled_ranks,
    stable_order,
    stacked_rows,
    times_of,
)
from fedkin.data.schema import Schema
from fedkin.data.tables import Roles, TableInMemory, TableOptions, as_columns
from fedkin.errors import DataError, ParameterError, TableWarning

INTERCEPT = "(intercept)"


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Federation(HasSites):
    """The rows of several sites. Immutable: methods return new federations.

    Parameters
    ----------
    data : mapping of site id to ``(X, y)``, ``(X, y, offset)``, `Rows` or ``X`` alone
        X of shape (n_u, q), y and offset of shape (n_u,). ``X`` alone is for the mean loss. Site ids are any
        hashable values. Numbers in y become float64; bool and text labels are kept.
    feature_names : sequence of q str, optional
        By default ``x0, x1, ...``.

    Examples
    --------
    >>> fed = Federation({"north": ([[0.0], [1.0]], [1.0, 3.0]), "south": ([[2.0]], [4.0])})
    >>> fed
    Federation(2 sites, 3 rows, 1 feature)
    >>> fed.n_samples
    array([2, 1])
    >>> fed["south"].X
    array([[2.]])
    """

    sites: tuple[Hashable, ...]
    rows: Rows  #: rows of all sites, site after site; read only, with float64, bool or text as targets
    starts: Index  #: the rows of site number u are ``starts[u]:starts[u + 1]``
    row_order: Index  #: position of each stacked row in the original arrays or file
    feature_names: tuple[str, ...]
    target_name: str | None
    schema: Schema | None  #: description of the columns of the original table
    notes: tuple[str, ...]  #: remarks on that table: columns and rows left out, columns to check
    ordered: bool  #: whether the rows of each site are in time order
    has_rows: ClassVar[Literal[True]] = True
    in_memory: ClassVar[Literal[True]] = True

    def __init__(self, data: Mapping[Any, Any], feature_names: Sequence[str] | None = None) -> None:
        if not isinstance(data, Mapping):
            raise DataError(
                f"Federation needs a mapping {{site: (X, y)}}, got {type(data).__name__}; "
                "for stacked arrays use Federation.from_arrays(X, y, site)"
            )
        if not data:
            raise DataError("a federation needs at least one site, got an empty mapping")
        sites = distinct_ids(data)
        given = () if feature_names is None else tuple(feature_names)
        parts = [rows_of_site(site, value, given) for site, value in zip(sites, data.values(), strict=True)]
        rows = stacked_rows(sites, parts)
        counts = np.array([part.n_samples for part in parts], dtype=np.int64)
        names = checked_feature_names(feature_names, rows.X.shape[1])
        self._set(sites, counts, rows, np.arange(len(rows.X)), feature_names=names)

    def _set(
        self, sites: tuple[Hashable, ...], counts: Index, rows: Rows, row_order: npt.NDArray[np.integer], **more: Any
    ) -> Federation:
        """Set checked parts; ``more`` are other attributes."""
        parts = {"target_name": None, "schema": None, "notes": (), "ordered": False, **more, "sites": sites}
        parts["rows"] = rows.map(lambda part: frozen(np.ascontiguousarray(part)))
        parts["starts"] = frozen(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        parts["row_order"] = frozen(row_order.astype(np.int64))
        for name, part in parts.items():
            object.__setattr__(self, name, part)
        return self

    @classmethod
    def _stacked(
        cls, sites: tuple[Hashable, ...], codes: Index, rows: Rows, time: Array | None, numbers: Index, **more: Any
    ) -> Federation:
        """Make a federation from checked rows, their site numbers, and their positions in the table."""
        order = stable_order(codes, len(sites)) if time is None else np.lexsort((time, codes))
        counts = np.bincount(codes, minlength=len(sites))
        more["ordered"] = time is not None
        return object.__new__(cls)._set(sites, counts, rows.take(order), numbers[order], **more)

    def _like(
        self, sites: tuple[Hashable, ...], counts: Index, rows: Rows, row_order: Index, **more: Any
    ) -> Federation:
        """Make another federation with the metadata of this one's columns."""
        known = {name: getattr(self, name) for name in ("feature_names", "target_name", "schema", "notes", "ordered")}
        return object.__new__(Federation)._set(sites, counts, rows, row_order, **{**known, **more})

    # --- other ways to make one -------------------------------------------------------------------------------

    @classmethod
    def from_arrays(
        cls,
        X: npt.ArrayLike,
        y: npt.ArrayLike | None,
        site: Iterable[Hashable],
        *,
        offset: npt.ArrayLike | None = None,
        weight: npt.ArrayLike | None = None,
        time: npt.ArrayLike | None = None,
        feature_names: Sequence[str] | None = None,
        target_name: str | None = None,
    ) -> Federation:
        """Make a federation from stacked rows in any order.

        Parameters
        ----------
        X, y : arrays of shape (N, q) and (N,)
            Features and target; the target is None for the mean loss.
        site : iterable of N ids
            The site of each row. Sites are ordered by first appearance; rows of a site keep their order.
        offset, weight, time : arrays of shape (N,), optional
            As the columns in `from_frame`; weights are more than 0.
        feature_names, target_name : sequence of q str and str, optional
            By default ``x0, x1, ...``, and no name.

        Examples
        --------
        >>> fed = Federation.from_arrays([[1.0], [2.0], [3.0]], [1, 2, 3], ["b", "a", "b"])
        >>> fed.sites, fed.X[:, 0], fed.row_order
        (('b', 'a'), array([1., 3., 2.]), array([0, 2, 1]))
        """
        sites, codes = grouped(site)
        at = lambda row: f"row {row} (site {sites[codes[row]]!r})" if row < len(codes) else f"row {row}"  # noqa: E731
        rows = checked_rows(X, y, offset, weight, () if feature_names is None else tuple(feature_names), at)
        n, q = rows.X.shape
        names = checked_feature_names(feature_names, q)
        if len(codes) != n:
            raise DataError(f"X has {count(n, 'row')}, but site= has {len(codes)}: give every row its site")
        if not sites:
            raise DataError("there are no rows; at least one is needed")
        ordered = None if time is None else times_of(time, n)
        return cls._stacked(sites, codes, rows, ordered, np.arange(n), feature_names=names, target_name=target_name)

    @classmethod
    def from_frame(
        cls, frame: object, *, site: str, target: str | None = None, **others: Unpack[TableOptions]
    ) -> Federation:
        """Make a federation from a table with one row per sample.

        Parameters
        ----------
        frame : table
            A pandas, polars or pyarrow table, or a dict of columns.
        site : str
            Column of site ids.
        target : str, optional
            Column of the target, numbers or classes; None for the mean loss, whose samples are the features.

        Other Parameters
        ----------------
        features : sequence of str, optional
            Columns of numbers, truth values or text, whose levels become columns of 0 and 1. By default all others,
            except constant columns and functions of others; a `TableWarning` names them.
        event : str, optional
            Column with 1 (or true) for an event at the time in the target, 0 for a censored time, whose target is the
            negative time.
        offset, exposure : str, optional
            Column with known parts of the linear predictor; or with exposures of counts (person-years, area) above 0,
            whose logarithms they are.
        weight : str, optional
            Column that says how many rows each row stands for; rows of weight 0 are left out.
        time : str, optional
            Column of numbers or days that orders the rows of a site; splits then hold out later rows.
        missing : "refuse" | "drop" | "mean" | "indicator"
            How to treat missing cells: refuse the table, leave out the rows, fill in the mean of the training rows, or
            fill it in and add an indicator column.
        categories, drop : sequence of str
            Columns of numbers to treat as categories (zip codes, types); columns to leave out of all others.
        spline : sequence of str, or mapping {str: number of knots, or knots}
            Columns with nonlinear effects, as natural cubic splines; by default with 5 knots at quantiles.

        Examples
        --------
        >>> table = {"site": ["a", "a", "b"], "age": [40, 50, 60], "ward": ["x", "y", "x"], "score": [1.0, 2.0, 3.0]}
        >>> Federation.from_frame(table, site="site", target="score").feature_names
        ('age', 'ward=y')
        """
        return cls._from_table(TableInMemory(columns_of(frame)), Roles(site, target, **others))

    @classmethod
    def _from_table(cls, whole: TableInMemory, roles: Roles) -> Federation:
        scan = SchemaScan(whole, roles)
        ((table, rows),) = scan.rows()
        inferred = scan.result()
        schema = inferred.schema
        sites, codes = grouped(table[roles.site])
        y = None if roles.target is None else _target_cells(table, schema, roles.target)
        weight = None if roles.weight is None else parsed_numbers(table[roles.weight]).values
        stacked = Rows(schema.encoded(table), y, schema.offset_of(table), weight)
        time = None if roles.time is None else times_of(table[roles.time], len(rows))
        copies = note_of_copies(stacked, codes, time, lambda row: whole.at(int(rows[row])))
        told = (*inferred.notes, copies) if copies else inferred.notes
        for text in told:
            warnings.warn(text, TableWarning, stacklevel=3)
        notes = (*told, inferred.filled) if inferred.filled else told
        more = {"feature_names": schema.names, "target_name": roles.target, "schema": schema, "notes": notes}
        return cls._stacked(sites, codes, stacked, time, rows, **more)

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        site: str | None = None,
        target: str | None = None,
        decimal: DecimalMark = ".",
        **others: Unpack[TableOptions],
    ) -> Federation:
        """Read a federation from one CSV or Parquet file, from several, or from a directory with one file per site.

        Parameters
        ----------
        path : path
            A file with a column of site ids, a pattern such as ``rows/*.parquet``, or a directory of files with the
            same columns, here or at an address such as ``s3://bucket/rows`` (any of `pyarrow.fs`). CSV files may be
            compressed (``.csv.gz``); folders such as ``clinic=north`` are columns.
        site : str, optional
            Column of site ids. For several files the default is the folder's column, or the name of the file without
            its suffix.
        decimal : "." | ","
            Decimal separator in CSV files.
        target, features, event, offset, exposure, weight, time, missing, categories, spline, drop
            As in `from_frame`.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for site in ("north", "south"):
        ...         _ = pathlib.Path(folder, f"{site}.csv").write_text("x,y\\n1,2\\n3,4\\n")
        ...     Federation.read(folder, target="y").sites
        ('north', 'south')
        """
        roles = Roles(site or "", target, **others)
        wanted = None
        if roles.features is not None:
            wanted = [*(name for name in roles.taken if name), *roles.features, *roles.categories, *roles.spline]
        table, found = read_files(path, site or None, wanted, decimal)
        if found is None:
            raise no_site_column(path, table.names)
        with in_file(path, DataError):
            return cls._from_table(table, replace(roles, site=found))

    @classmethod
    def from_schema(cls, columns: Mapping[str, object], schema: Schema, *, site: str) -> Federation:
        """Make a federation from a table of several sites according to a schema, in the user's units.

        Examples
        --------
        >>> from fedkin.data import Column, Schema
        >>> schema = Schema((Column("ward", "category", levels=("A", "B")),), Column("days"))
        >>> Federation.from_schema({"site": ["n", "s"], "ward": ["B", "A"], "days": [3, 4]}, schema, site="site")
        Federation(2 sites, 2 rows, 1 feature)
        """
        table = as_columns(columns)
        findings = []
        if site not in table:
            findings.append(missing_column(site, list(table), [one.name for one in schema.columns]))
        elif gaps := [row for row, cell in enumerate(table[site]) if is_missing(cell)]:
            where = f"is empty in {count(len(gaps), 'row')}, first in {sheet_row(gaps[0])}"
            findings.append(Finding(site, f"{where}, so they belong to no site", "no_site"))
        table = schema.complete(table, findings)
        y: AnyArray | None = schema.target_of(table)
        if schema.classes is not None and y is not None:
            y = np.fromiter((schema.classes[code] for code in y.astype(int)), dtype=object, count=len(y))
        X, offset = schema.encoded(table), schema.offset_of(table)
        name = None if schema.target is None else schema.target.name
        return cls.from_arrays(X, y, table[site], offset=offset, feature_names=schema.names, target_name=name)

    # --- properties -------------------------------------------------------------------------------------------

    @property
    def n_features(self) -> int:
        """Number of features q."""
        return int(self.X.shape[1])

    @cached_property
    def n_samples(self) -> Index:
        """Rows of each site, int64 array of shape (V,)."""
        return frozen(np.diff(self.starts))

    @cached_property
    def site_index(self) -> Index:
        """Position of the site of each stacked row, int64 array of shape (N,)."""
        return frozen(np.repeat(np.arange(self.n_sites, dtype=np.int64), self.n_samples))

    @property
    def X(self) -> Array:
        """Features of all rows, array of shape (N, q)."""
        return self.rows.X

    @property
    def y(self) -> AnyArray | None:
        """Target of all rows, array of shape (N,) or None."""
        return self.rows.y

    @property
    def offset(self) -> Array | None:
        """Offset of all rows, array of shape (N,) or None."""
        return self.rows.offset

    @property
    def weight(self) -> Array | None:
        """Weight of all rows, array of shape (N,) or None."""
        return self.rows.weight

    @cached_property
    def weight_sums(self) -> Array:
        """Total weight of the rows of each site, array of shape (V,)."""
        return frozen(np.bincount(self.site_index, self.weight, self.n_sites).astype(np.float64))

    def __getitem__(self, site: Hashable) -> Rows:
        u = self.position(site)
        return self.rows.take(slice(int(self.starts[u]), int(self.starts[u + 1])))

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.sites)

    def __contains__(self, site: object) -> bool:
        return site in self.index

    def __repr__(self) -> str:
        sizes = {"site": self.n_sites, "row": len(self.X), "feature": self.n_features}
        return f"Federation({', '.join(count(n, word) for word, n in sizes.items())})"

    def _repr_html_(self) -> str:
        facts = {
            "sites": f"{self.n_sites:,}: {some_of(self.sites)}",
            "rows": f"{len(self.X):,}, {self.n_samples.min()} to {self.n_samples.max()} at a site",
            "features": f"{self.n_features}: {some_of(self.feature_names)}",
            "target": "none" if self.y is None else self.target_name or "y",
        }
        return html_card("Federation", facts)

    def constant_sites(self) -> tuple[Hashable, ...]:
        """Return the sites with several rows that all have the same target."""
        if self.y is None:
            return ()
        code = np.unique(self.y, return_inverse=True)[1]
        ordered, several = code[np.lexsort((code, self.site_index))], np.flatnonzero(self.n_samples > 1)
        same = ordered[self.starts[several]] == ordered[self.starts[several + 1] - 1]
        return tuple(self.sites[u] for u in several[same].tolist())

    # --- derived federations -----------------------------------------------------------------------------------

    def take(self, rows: npt.ArrayLike, *, allow_empty: bool = False) -> Federation:
        """Restrict the federation to stacked rows by a mask or their numbers, with all sites in the same order.

        Rows of a site keep the order of ``rows``. Every site must keep a row, unless ``allow_empty``.
        """
        chosen = row_numbers(rows, len(self.X))
        codes = self.site_index[chosen]
        chosen = chosen[np.argsort(codes, kind="stable")]
        counts = np.bincount(codes, minlength=self.n_sites)
        if not allow_empty and not counts.all():
            empty = [self.sites[u] for u in np.flatnonzero(counts == 0)]
            raise DataError(
                f"no rows would be left for {listed(empty)}: keep at least one row of each site, "
                "or pass allow_empty=True"
            )
        return self._like(self.sites, counts, self.rows.take(chosen), self.row_order[chosen])

    def subset(self, sites: Iterable[Hashable]) -> Federation:
        """Restrict the federation to some sites, in the order given."""
        positions = [self.position(site) for site in sites]
        if not positions:
            raise DataError("a federation needs at least one site, got none")
        kept = distinct_ids(self.sites[u] for u in positions)
        rows = np.concatenate([np.arange(self.starts[u], self.starts[u + 1]) for u in positions])
        return self._like(kept, self.n_samples[positions], self.rows.take(rows), self.row_order[rows])

    def replaced(self, *, feature_names: tuple[str, ...] | None = None, **arrays: AnyArray | None) -> Federation:
        """Replace arrays (``X``, ``y``, ...) of the same rows."""
        names = self.feature_names if feature_names is None else feature_names
        rows = replace(self.rows, **arrays)  # type: ignore[arg-type]
        return self._like(self.sites, self.n_samples, rows, self.row_order, feature_names=names)

    def split(self, test_size: float = 0.25, seed: int = 0) -> tuple[Federation, Federation]:
        """Split every site into training and test rows, two federations with all sites in the same order.

        Site u gives ``round(test_size * n_u)`` test rows, and at least one row to each side; of rows in time order,
        the last ones. A single row is a training row. The split of a site depends on the seed, its id and its number
        of rows, not on the other sites.

        Examples
        --------
        >>> fed = Federation.from_arrays([[float(k)] for k in range(10)], None, ["a"] * 6 + ["b"] * 4)
        >>> train, test = fed.split(test_size=0.5)
        >>> train.n_samples, test.n_samples
        (array([3, 2]), array([3, 2]))
        """
        if not 0 < test_size < 1:
            raise ParameterError(f"test_size must be between 0 and 1, got {test_size!r}")
        sizes, each = self.n_samples, zip(self.sites, self.n_samples.tolist(), strict=True)
        ranks = [np.arange(n)[::-1] if self.ordered else shuffled_ranks(site, n, seed, "split") for site, n in each]
        held_out = np.where(sizes >= 2, np.clip(np.rint(test_size * sizes), 1, np.maximum(sizes - 1, 1)), 0)
        is_test = np.concatenate(ranks) < np.repeat(held_out, sizes)
        return self.take(~is_test, allow_empty=True), self.take(is_test, allow_empty=True)

    def folds(self, k: int = 5, seed: int = 0) -> Index:
        """Return the fold 0..k-1 of each stacked row, assigned within each site.

        The folds of a site depend on the seed, its id and its number of rows, so a site can compute them alone.
        Shuffled rows are assigned in turn: fold sizes differ by at most one within each site. Rows in time order are
        split into blocks, the earliest in fold 0.

        Examples
        --------
        >>> fed = Federation.from_arrays([[float(k)] for k in range(6)], None, ["a"] * 4 + ["b"] * 2)
        >>> sorted(fed.folds(2)[:4].tolist())
        [0, 0, 1, 1]
        """
        if not 2 <= k <= len(self.X):
            raise ParameterError(f"the number of folds must be from 2 to the {len(self.X)} rows, got {k!r}")
        each = zip(self.sites, self.n_samples.tolist(), strict=True)
        return np.concatenate([block_folds(n, k) if self.ordered else deal_folds(site, n, k, seed) for site, n in each])

    def with_intercept(self) -> Federation:
        """Add a leading column of ones, named ``(intercept)``."""
        if INTERCEPT in self.feature_names:
            raise DataError(f"there is already a feature called {INTERCEPT!r}")
        X = np.column_stack([np.ones(len(self.X)), self.X])
        return self.replaced(X=X, feature_names=(INTERCEPT, *self.feature_names))

    def standardized(self) -> tuple[Federation, Array, Array]:
        """Scale features to mean 0 and standard deviation 1 (divisor N) over all rows; return also means and scales.

        Constant columns become zero and have the scale 1.

        Examples
        --------
        >>> fed, mean, scale = Federation({"a": [[1.0, 5.0]], "b": [[3.0, 5.0]]}).standardized()
        >>> fed.X, mean, scale
        (array([[-1.,  0.],
               [ 1.,  0.]]), array([2., 5.]), array([1., 1.]))
        """
        if len(self.X) == 0:
            raise DataError("the federation has no rows, so it has no mean and no standard deviation")
        constant = self.X.min(axis=0) == self.X.max(axis=0)
        # a rounded mean would leave a tiny deviation
        mean = np.where(constant, self.X[0], np.average(self.X, axis=0, weights=self.weight))
        centred = self.X - mean
        scale = np.sqrt(np.average(centred**2, axis=0, weights=self.weight))
        scale[scale == 0] = 1.0
        return self.replaced(X=centred / scale), mean, scale


def _target_cells(table: RawColumns, schema: Schema, target: str) -> AnyArray:
    cells = table[target]
    if cells.dtype.kind in "fb" and schema.event is None:
        return cells
    if schema.target is not None and schema.target.kind == "number" and (y := schema.target_of(table)) is not None:
        return y
    return np.array([cell.strip() if isinstance(cell, str) else cell for cell in cells.tolist()], dtype=object)
