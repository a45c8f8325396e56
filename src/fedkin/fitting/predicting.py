"""Predict the rows of files with the models of their sites, in batches, here or on a cluster."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedkin._base import AnyArray, Array, count, in_file, probability
from fedkin._storage import place_of
from fedkin.cluster import On, chained, running_on
from fedkin.data import (
    DecimalMark,
    Federation,
    FileTable,
    RawColumns,
    Schema,
    Table,
    grouped,
    in_batches,
    near_name,
    no_site_column,
    open_files,
    raise_findings,
    read_files,
    write_batches,
)
from fedkin.errors import DataError, ParameterError, TableWarning, argument
from fedkin.fitting.model import FittedModel
from fedkin.kin.inference import Interval


class PredictedRows(NamedTuple):
    """Predictions of a batch of rows, in their order."""

    columns: dict[str, AnyArray]  # the sites first
    sites: tuple[Hashable, ...]
    notes: dict[str, str]  # remarks by what they are about, to be made once


@dataclass(frozen=True, eq=False)
class Predictor:
    """Predict the rows of a table, each with the model of its site; see `predict_files`."""

    model: FittedModel
    path: Path
    site: str | None = None
    offset: str | None = None
    level: float | None = None
    interval: Interval = "mean"
    times: Mapping[str, float] = field(default_factory=dict)
    new_sites: bool = False
    labelled: Mapping[str, RawColumns] = field(default_factory=dict)
    districts: Mapping[str, Hashable] = field(default_factory=dict)
    decimal: DecimalMark = "."

    def batches(self, tell: Callable[[str], object], sites: set[Hashable]) -> Iterator[dict[str, AnyArray]]:
        """Yield columns with predictions in the order of the rows, on the engine of `fedkin.cluster.running_on`.

        Each remark is reported once, and the sites of the rows are added to ``sites``.
        """
        told, done, (table, _) = set[str](), 0, self._opened
        for part in chained(self.predict, [None] if table is None else table.pieces()):
            for about, text in part.notes.items():
                if about not in told:
                    told.add(about)
                    tell(text)
            sites.update(part.sites)
            numbers = np.arange(done, done + len(next(iter(part.columns.values()))))
            done += numbers.size
            yield {"row": numbers, **part.columns}

    @cached_property
    def _schema(self) -> Schema | None:
        schema = self.model.schema
        if self.offset is None or schema is None:
            return schema
        if schema.agreed:
            raise ParameterError(f"{argument('offset')} is set by the contract ({schema.offset}): leave it out")
        return replace(schema, offset=self.offset)

    @cached_property
    def _column(self) -> str | None:
        """Name of the site column; None if each file of a directory is a site."""
        trained = self.model.options.get("site_column")
        if self.site or not self.path.is_dir():
            return self.site or trained
        named = trained and in_batches(self.path, self.decimal) and trained in open_files(self.path, trained)[0].names
        return trained if named else None

    @property
    def _names(self) -> list[str]:
        """Names of the columns to read besides the sites."""
        assert self._schema is not None
        offset = [] if self._schema.offset is None else [self._schema.offset]
        return [*(one.name for one in self._schema.features), *offset]

    @cached_property
    def _opened(self) -> tuple[FileTable | None, str | None]:
        """The table and its site column, if it is read in batches."""
        if self._schema is not None and in_batches(self.path, self.decimal):
            table, column = open_files(self.path, self._column)
            if {column, *self._names} <= {*table.names} and table.n_rows:
                return table, column
        return None, None

    def predict(self, piece: FileTable | None) -> Iterator[PredictedRows]:
        """Yield predictions of a piece of the table, or of the whole table for None."""
        fitted, models = self.model, dict[Hashable, FittedModel]()
        for found, columns, shift, notes in self._rows(piece):
            distinct, code = grouped(found)
            known = [(one, fitted.find_site(one)) for one in distinct]
            sites = tuple(one if u is None else fitted.sites[u] for one, u in known)
            models |= self._models([one for one in sites if one not in models], notes)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TableWarning)  # already noted with their rows
                predicted = self._columns(models, columns, sites, code, shift)
            ids = np.fromiter(sites, dtype=object, count=len(sites))[code]
            name = self.site or fitted.options.get("site_column") or "site"
            yield PredictedRows({name: ids, **predicted}, sites, notes)

    def _rows(
        self, piece: FileTable | None
    ) -> Iterator[tuple[Any, AnyArray | RawColumns, Array | None, dict[str, str]]]:
        """Yield the sites of rows, the rows, any offset from another column, and remarks."""
        schema = self._schema
        if schema is None:
            yield self._plain_rows()
            return
        table: Table
        if piece is None:
            table, column = read_files(self.path, self._column, self._names, self.decimal)
            batches = table.batches(table.names)
        else:
            table, column = piece, self._opened[1]
            assert column is not None
            batches = table.batches([column, *self._names])
        start = 0
        for columns in batches:
            at = lambda row, start=start: table.at(start + row)  # noqa: E731
            ids = self._ids(columns, column, at)
            with in_file(self.path, DataError):
                findings = schema.check(columns, target=False, at=at)
                raise_findings(findings)
            notes = {one.column: str(one) for one in findings if one.code == "unknown_level"}
            yield ids, columns, None if self.offset is None else schema.offset_of(columns), notes
            start += len(ids)

    def _ids(self, columns: RawColumns, column: str | None, at: Any) -> Any:
        """Return the site of each row."""
        fitted, path = self.model, self.path
        if column is not None and column in columns:
            cells = columns[column]
            gap = np.flatnonzero(np.isnan(cells) if cells.dtype.kind == "f" else cells == np.array(None, dtype=object))
            if gap.size:
                raise DataError(f"{path}, {at(int(gap[0]))}: the site is missing (column {column!r}): fill it in")
            return cells
        has = ", ".join(list(columns)[:20])
        if column is not None and (fitted.n_sites > 1 or column != fitted.options.get("site_column")):
            near = near_name(column, columns)
            raise DataError(f"{path}: there is no column {column!r} for the site{near}; it has {has}")
        if fitted.n_sites > 1:
            raise no_site_column(path, columns)
        return [fitted.sites[0]] * len(next(iter(columns.values()), ()))

    def _plain_rows(self) -> tuple[Any, AnyArray, Array | None, dict[str, str]]:
        """Return the rows of a table for a model of numbers without a schema."""
        model = self.model
        roles: dict[str, Any] = {"features": model.feature_names, "offset": self.offset or model.offset_name}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TableWarning)  # they are also the federation's notes
            found = Federation.read(self.path, site=self._column, decimal=self.decimal, **roles)
        order = np.argsort(found.row_order)  # back to the order of the file
        ids = [found.sites[u] for u in found.site_index[order].tolist()]
        offset = None if found.offset is None else found.offset[order]
        return ids, found.X[order], offset, {text: text for text in found.notes}

    def _models(self, sites: list[Hashable], notes: dict[str, str]) -> dict[Hashable, FittedModel]:
        """Return the model of every site: the fitted one, or for a new site a model from any labelled rows."""
        fitted = self.model
        unknown = [site for site in sites if site not in fitted.index]
        if unknown and not self.new_sites:
            fitted.position(unknown[0])  # which refuses it
        models = dict.fromkeys(sites, fitted)
        for site in unknown:
            rows, within = self.labelled.get(str(site)), self.districts.get(str(site))
            found = fitted.join(rows, name=site, within=within)
            models[site] = found.model
            n = 0 if rows is None else len(next(iter(rows.values())))
            common = "all sites have in common" if within is None else f"the sites of {within} have in common"
            text = f"new site {site}: a model from {count(n, 'labelled row')} and what {common}"
            if len(found.groups):
                likely = int(np.argmax(found.groups))
                text += f"; group {likely + 1} with probability {probability(float(found.groups[likely]))}"
            notes[text] = text
        return models

    def _columns(
        self,
        models: Mapping[Hashable, FittedModel],
        X: AnyArray | RawColumns,
        sites: tuple[Hashable, ...],
        code: AnyArray,
        shift: Array | None,
    ) -> dict[str, AnyArray]:
        """Return the columns of predictions, in the order of the rows."""
        owners = {id(models[site]): models[site] for site in sites}
        of_site = np.array([list(owners).index(id(models[site])) for site in sites], dtype=np.int64)
        parts, rows = list[dict[str, AnyArray]](), list[AnyArray]()
        for number, model in enumerate(owners.values()):
            own = np.flatnonzero(of_site[code] == number)
            part: Any = X[own] if isinstance(X, np.ndarray) else {name: column[own] for name, column in X.items()}
            ids, offset = [sites[k] for k in code[own].tolist()], None if shift is None else shift[own]
            rows.append(own)
            parts.append(self._predicted(model, part, ids, offset))
        back = np.argsort(np.concatenate(rows)) if len(rows) > 1 else slice(None)
        return {name: np.concatenate([part[name] for part in parts])[back] for name in parts[0]}

    def _predicted(self, model: FittedModel, X: Any, ids: list[Hashable], offset: Array | None) -> dict[str, AnyArray]:
        predicted = model.predict(X, ids, offset)
        # the means of the features, or one number or label
        found = dict(zip(model.feature_names, predicted.T, strict=True)) if predicted.ndim == 2 else {}
        found = found or {"prediction": predicted}
        if model.classes is not None:
            chances = model.predict_proba(X, ids, offset)
            found |= {f"probability:{label}": chances[:, k] for k, label in enumerate(model.classes)}
        if self.level is not None:
            interval = model.predict_interval(X, ids, offset, level=self.level, interval=self.interval)
            end = "" if model.classes is None else f":{model.classes[1]}"  # the class that intervals are for
            found |= {f"low{end}": interval.low, f"high{end}": interval.high}
        if self.times:
            curves = model.predict_survival(X, ids, list(self.times.values()), offset, level=self.level)
            for end, values in zip(("", ":low", ":high"), [curves] if self.level is None else curves, strict=False):
                found |= {f"survival:{name}{end}": values[:, k] for k, name in enumerate(self.times)}
        return found


def predict_files(
    model: FittedModel,
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    site: str | None = None,
    offset: str | None = None,
    level: float | None = None,
    interval: Interval = "mean",
    times: Sequence[float] = (),
    new_sites: bool = False,
    decimal: DecimalMark = ".",
    on: On | None = None,
) -> int:
    """Predict the rows of files in batches, and write the predictions to a Parquet or a CSV file.

    Parameters
    ----------
    model : FittedModel
        The fitted model.
    path : path
        Parquet or CSV files: a file, a directory, a pattern or an address such as ``s3://bucket/rows``.
    out : path
        The file to write, completely or not at all, with the columns ``row``, the site, ``prediction``, and those asked
        for. It may be an address, too.
    site, offset : str, optional
        Columns of sites and offsets; by default those of the fit. A single site need not be named.
    level : float, optional
        Level of intervals, which are left out by default.
    interval : "mean" or "observation"
        What the intervals are for.
    times : sequence of float
        Times of survival probabilities.
    new_sites : bool
        Whether to predict sites that were not part of the fit, from the population of sites.
    decimal : "." or ","
        Decimal separator of CSV files.
    on : str or Engine, optional
        Where to compute; by default the engine of `fedkin.cluster.running_on`. The file does not depend on it.

    Returns
    -------
    int
        Number of rows.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import pyarrow, pyarrow.parquet
    >>> import fedkin
    >>> table = {"site": ["a", "b"] * 4, "x": [0.0, 1, 2, 3, 4, 5, 6, 7], "y": [0.1, 2, 2, 3, 4.2, 5, 6, 8]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows, out = pathlib.Path(folder, "rows.parquet"), pathlib.Path(folder, "predictions.parquet")
    ...     pyarrow.parquet.write_table(pyarrow.table(table), rows)
    ...     model = fedkin.fit(fedkin.Federation.read(rows, site="site", target="y"))
    ...     fedkin.fitting.predict_files(model, rows, out, site="site")
    ...     pyarrow.parquet.read_table(out).column_names
    8
    ['row', 'site', 'prediction']
    """
    moments = {f"{time:g}": time for time in times}
    what = Predictor(model, place_of(path), site, offset, level, interval, moments, new_sites, decimal=decimal)
    with running_on(on):
        return write_batches(place_of(out), what.batches(_warn, set()))


def _warn(text: str) -> None:
    warnings.warn(text, TableWarning, stacklevel=2)
