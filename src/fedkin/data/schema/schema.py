"""What the columns of a table must be: kind, unit, plausible range or levels; and rows prepared accordingly.

A schema is agreed on before anybody looks at rows, so it says everything that preparation needs: how levels become
columns of 0 and 1, and by which numbers features are centred and scaled. Whoever has the schema prepares the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from fedkin._base import AnyArray, Array, check_choice, frozen
from fedkin.data.federation import Federation
from fedkin.data.ids import is_missing
from fedkin.data.rows import Rows
from fedkin.data.schema.column import Column
from fedkin.data.schema.findings import Finding, Gaps, RowWords, missing_column, raise_findings, sheet_row
from fedkin.data.schema.labels import Label, level_codes, parsed_numbers
from fedkin.data.tables import columns_of
from fedkin.errors import DataError, ParameterError

Missing = Literal["refuse", "drop", "mean", "indicator"]


@dataclass(frozen=True)
class Schema:
    """Features, target and offset of a table.

    Parameters
    ----------
    features : tuple of Column
    target : Column, optional
        A number, a count, or a category whose levels are the classes; None for the mean loss.
    offset : str, optional
        Column that is added to the linear predictor as it is.
    missing : "refuse" | "drop"
        What becomes of rows with missing cells: the table is refused until they are filled in, or they are left out.
        Rows to predict are never left out.

    Examples
    --------
    >>> from fedkin.data import Column, Schema
    >>> ward = Column("ward", "category", levels=("A", "B"))
    >>> schema = Schema((Column("age", unit="years", low=20, high=100), ward), Column("days"))
    >>> schema.names
    ('age', 'ward=B')
    >>> schema.rows({"age": [60, 80], "ward": ["A", "B"], "days": [3, 4]}, intercept=True).X
    array([[1. , 0. , 0. ],
           [1. , 0.5, 1. ]])
    >>> print(schema.check({"age": [60, 8], "ward": ["A", "C"], "days": [3, 4]})[0])
    age: 1 of 2 values is below 20 years, the lowest plausible value: 8 in row 3
    """

    features: tuple[Column, ...]
    target: Column | None = None
    offset: str | None = None
    missing: Missing = "refuse"

    #: The rules that sites can follow without knowing the rows of others.
    _RULES: ClassVar[tuple[str, ...]] = ("refuse", "drop")
    _MAY_BE_EMPTY: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, self._RULES)
        if not self.features and not self._MAY_BE_EMPTY:
            raise ParameterError("a schema needs at least one feature")
        columns = [column.name for column in self.columns]
        if self.offset is not None:
            columns.append(self.offset)
        for name in columns:
            if columns.count(name) > 1:
                raise ParameterError(f"the column {name!r} is named twice among features, target and offset")
        for name in self.names:
            if self.names.count(name) > 1:
                raise ParameterError(f"two encoded columns would be called {name!r}: rename a feature or a level")
        for column in self.features:
            if column.kind == "count":
                raise ParameterError(f'column {column.name!r} is a feature: its kind is "number" or "category"')

    @property
    def columns(self) -> tuple[Column, ...]:
        """Features, then the target if there is one."""
        return self.features if self.target is None else (*self.features, self.target)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns, q in number, without the intercept."""
        return self._encoded_names()

    def _encoded_names(self) -> tuple[str, ...]:
        return tuple(name for column in self.features for name in column.encoded)

    @property
    def classes(self) -> tuple[Label, ...] | None:
        """Labels of the target's codes 0, 1, ...; None when it is no category."""
        return self.target.levels if self.target is not None and self.target.kind == "category" else None

    @cached_property
    def mean(self) -> Array:
        """By what the encoded columns are centred, ``(q,)``; with an intercept only."""
        return self._per_encoded(0)

    @cached_property
    def scale(self) -> Array:
        """By what the encoded columns are divided, ``(q,)``."""
        return self._per_encoded(1)

    def _per_encoded(self, which: int) -> Array:
        values = [column.centre_and_scale[which] for column in self.features for _ in column.encoded]
        return frozen(np.array(values, dtype=np.float64))

    def _used(self, *, target: bool = True, offset: bool = True) -> tuple[Column, ...]:
        """The columns that a table must have."""
        columns = self.columns if target else self.features
        return (*columns, Column(self.offset)) if offset and self.offset is not None else columns

    # --- tables -----------------------------------------------------------------------------------------------

    def check(
        self, columns: Mapping[str, object], *, target: bool = True, offset: bool = True, at: RowWords = sheet_row
    ) -> list[Finding]:
        """Everything that is wrong with a table, in words.

        Parameters
        ----------
        columns : mapping of name to one value per row, or any table that `fedkin.data.columns_of` reads
            It may have other columns, too.
        target, offset : bool
            Whether the target and the offset must be there; a target not for rows to predict.
        at : callable
            What a row, numbered from 0, is called; by default as a spreadsheet counts it.

        Returns
        -------
        list of Finding
            In the order of the columns; [] when all is well. Those with ``refuses`` must be mended.
        """
        table = _as_columns(columns)
        findings = []
        used = self._used(target=target, offset=offset)
        for column in used:
            if column.name in table:
                findings += self._findings(column, table[column.name], target, at)
            else:
                findings.append(missing_column(column.name, list(table), [one.name for one in used]))
        if len(next(iter(table.values()), ())) == 0:
            findings.append(Finding("", "the table has no rows", refuses=True))
        return findings

    def _findings(self, column: Column, cells: AnyArray, training: bool, at: RowWords) -> list[Finding]:
        gaps: Gaps = "drop" if training and self.missing == "drop" else "refuse"
        return column.findings(cells, gaps, at)

    def encode(self, columns: Mapping[str, object]) -> Array:
        """The features ``(n, q)`` of a table, levels expanded, in the user's units: as a model takes them.

        Raises one `DataError` with all that does not fit; neither target nor offset are needed.
        """
        table = _as_columns(columns)
        raise_findings(self.check(table, target=False, offset=False))
        return self.encoded(table)

    def encoded(self, table: Mapping[str, AnyArray]) -> Array:
        """As `encode`, without a check."""
        n = len(next(iter(table.values()), ()))
        parts = (column.encode(table[column.name]) for column in self.features)
        return np.concatenate([np.empty((n, 0)), *parts], axis=1)

    def offset_of(self, columns: Mapping[str, object]) -> Array | None:
        """The offset of each row, if the schema has one."""
        return None if self.offset is None else parsed_numbers(_as_columns(columns)[self.offset]).values

    def rows(self, columns: Mapping[str, object], intercept: bool) -> Rows:
        """Rows as solvers take them: levels expanded, centred and scaled, classes numbered from 0.

        Parameters
        ----------
        columns : mapping of name to one value per row, or any table
            As in `check`.
        intercept : bool
            Whether to put a column of ones first. Without it features are scaled but not centred, since a shift would
            make another model.

        Raises
        ------
        DataError
            With everything that `check` finds.
        """
        table = self._complete(_as_columns(columns))
        X = self.scaled(self.encoded(table), intercept)
        if intercept:
            X = np.column_stack([np.ones(len(X)), X])
        return Rows(np.ascontiguousarray(X), self._target_of(table), self.offset_of(table))

    def _complete(self, table: dict[str, AnyArray], more: Sequence[Finding] = ()) -> dict[str, AnyArray]:
        """The table without the rows that are left out; raises one `DataError` with all that does not fit."""
        raise_findings([*self.check(table), *more])
        if self.missing == "refuse":
            return table
        kept = ~np.any([column.gaps(table[column.name]) for column in self._used()], axis=0)
        if not kept.any():
            raise DataError("every row has a missing cell, so no row is left: fill some in")
        return {name: column[kept] for name, column in table.items()}

    def scaled(self, X: Array, intercept: bool) -> Array:
        """Encoded columns ``(n, q)`` in prepared units; centred where there is an intercept to take the shift."""
        return (X - self.mean) / self.scale if intercept else X / self.scale

    def _target_of(self, table: Mapping[str, AnyArray]) -> Array | None:
        if self.target is None:
            return None
        cells = table[self.target.name]
        if self.target.kind == "category":
            return level_codes(cells, self.target.levels).astype(np.float64)
        return parsed_numbers(cells).values

    def federation(self, columns: Mapping[str, object], site: str) -> Federation:
        """The rows of several sites in one table, levels expanded, in the user's units.

        Parameters
        ----------
        columns : mapping of name to one value per row, or any table
            As in `check`.
        site : str
            Column that says which site a row belongs to.

        Returns
        -------
        Federation
            Its targets are class labels as the schema has them, or numbers.

        Examples
        --------
        >>> from fedkin.data import Column, Schema
        >>> schema = Schema((Column("ward", "category", levels=("A", "B")),), Column("days"))
        >>> schema.federation({"hospital": ["n", "s"], "ward": ["B", "A"], "days": [3, 4]}, "hospital")
        Federation(2 sites, 2 rows, 1 feature)
        """
        table = _as_columns(columns)
        findings = []
        if site not in table:
            findings.append(missing_column(site, list(table), [one.name for one in self.columns]))
        elif any(map(is_missing, table[site])):
            findings.append(Finding(site, "is empty in some rows, so they belong to no site"))
        table = self._complete(table, findings)
        y: AnyArray | None = self._target_of(table)
        if self.classes is not None and y is not None:
            y = np.fromiter((self.classes[code] for code in y.astype(int)), dtype=object, count=len(y))
        name = None if self.target is None else self.target.name
        offset = self.offset_of(table)
        return Federation.from_arrays(
            self.encoded(table), y, table[site], offset=offset, feature_names=self.names, target_name=name
        )

    # --- as plain values --------------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """The schema as JSON can hold it; `from_plain` reads it back."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Schema:
        """The schema that `plain` described.

        Examples
        --------
        >>> from fedkin.data import Column, Schema
        >>> schema = Schema((Column("ward", "category", levels=("A", "B")),), Column("days", unit="d"))
        >>> Schema.from_plain(schema.plain()) == schema
        True
        """
        target, more = plain["target"], dict[str, Any](plain)
        more["features"] = tuple(map(_plain_column, plain["features"]))
        more["target"] = None if target is None else _plain_column(target)
        if cls is Schema and more.keys() - {item.name for item in fields(Schema)}:
            from fedkin.data.schema.learned import TableSchema

            cls = TableSchema
        entries: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in more.items()}
        return cls(**entries)


def _plain_column(plain: Mapping[str, Any]) -> Column:
    return Column(**{**plain, "levels": tuple(plain["levels"])})


def _as_columns(columns: object) -> dict[str, AnyArray]:
    if isinstance(columns, dict) and all(isinstance(one, np.ndarray) for one in columns.values()):
        return columns
    return columns_of(columns)
