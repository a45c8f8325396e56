"""Define ``fedkin predict``: predict each row of a table with the model of its site."""

from __future__ import annotations

import csv
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fedkin._base import check_level, count, in_file
from fedkin._progress import progress
from fedkin._storage import place_of
from fedkin.cli.console import Json, Place, argument, flag, messages, note, option, print_json, switch
from fedkin.cli.models import Model
from fedkin.cli.reading import check_exists, check_new_file, read_districts
from fedkin.cluster import running_on
from fedkin.data import DecimalMark, Federation, RawColumns, no_site_column, read_columns, site_ids, write_batches
from fedkin.errors import DataError, ParameterError
from fedkin.fitting import FittedModel, Predictor, load
from fedkin.kin.inference import Interval

Level = Annotated[float | None, option("X", "Add intervals at this level.")]
#: Default level of intervals.
_LEVEL = 0.95


def predict(
    model: Model,
    data: Annotated[Place, argument("DATA", "Rows to predict: a file or a directory; a path or an address.", place_of)],
    site: Annotated[str | None, option("COL", "Site column; by default that of the fit.")] = None,
    offset: Annotated[str | None, option("COL", "Offset column; by default that of the fit.")] = None,
    new_site: Annotated[
        bool, switch("--new-site", "Also predict sites that were not part of the fit (method kin).")
    ] = False,
    rows: Annotated[
        Path | None,
        option("FILE", "Labelled rows, for a model of new sites or the baseline hazards of known ones."),
    ] = None,
    level: Level = None,
    interval: Annotated[
        Interval | None, typer.Option(help="Add intervals for the mean response (default), or for a new observation.")
    ] = None,
    survival: Annotated[str | None, option("T,T,...", "Add survival probabilities at these times (cox).")] = None,
    decimal: Annotated[DecimalMark | None, typer.Option(help="Decimal separator; by default that of the fit.")] = None,
    on: Annotated[str, option("PLACE", "Where to run: local, ray or ray://host:port, a task per file.")] = "local",
    out: Annotated[
        Place | None, option("FILE", "CSV or Parquet file for the predictions; by default standard output.", place_of)
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict rows with a fitted model, each with the model of its site."""
    level = _LEVEL if level is None and interval is not None else level
    if level is not None:
        check_level(level)
    if out is not None:
        check_new_file(out, "predictions.csv", data, rows, model)
    check_exists(data)
    fitted, times = load(model), _times(survival)
    if level is not None and interval is None and fitted.loss.rowwise is not None and fitted.classes is None:
        note("intervals are for the mean of such rows: add --interval observation for single rows")
    if rows is not None and not new_site and (not times or fitted.baseline is not None):
        raise ParameterError("--rows are the labelled rows of new sites: add --new-site")
    column = site or fitted.options.get("site_column")
    mark: DecimalMark = decimal or fitted.options.get("decimal") or "."
    if times and fitted.baseline is None:
        fitted, rows = _with_baseline(fitted, model, rows, column, mark), None
    labelled = {} if rows is None else _rows_by_site(rows, column, mark)
    district, places = fitted.options.get("within_column"), dict[str, Hashable]()
    if district is not None and new_site:
        known = {} if fitted.kin is None else {str(one): one for one in fitted.kin.districts}
        places = {str(one): known.get(str(d), d) for one, d in read_districts(data, column, district, mark).items()}
    what = Predictor(
        fitted, data, site, offset, level, interval or "mean", times, new_site, labelled, places, decimal=mark
    )
    seen = set[Hashable]()
    with running_on(on), progress(f"predicting {data}"):
        predicted = what.batches(note, seen)
        if out is not None and not as_json:
            n = write_batches(out, predicted)
        else:
            batches = list(predicted)
            if out is not None:
                write_batches(out, batches)
    if out is not None and not as_json:
        messages().print(f"{out}: {count(n, 'prediction')} for {count(len(seen), 'site')}")
        return
    header = list(batches[0])
    table = [list(cells) for one in batches for cells in zip(*(cells.tolist() for cells in one.values()), strict=True)]
    if as_json:
        place = {"model": str(model), "data": str(data), "written": None if out is None else str(out)}
        print_json({**place, "columns": header, "predictions": table})
    else:
        csv.writer(sys.stdout, lineterminator="\n").writerows([header, *table])


def _with_baseline(
    fitted: FittedModel, model: Path, rows: Path | None, column: str | None, decimal: DecimalMark
) -> FittedModel:
    """Return the model of the sites of labelled rows, with baseline hazards from these rows."""
    schema = fitted.schema
    if schema is None or schema.event is None:
        raise ParameterError(f"{flag('survival')} is for survival models, and {model} is not one: leave it out")
    if rows is None:
        raise ParameterError(
            f"{model} has no baseline hazards, which are not in summaries: add --rows FILE, labelled rows"
        )
    with in_file(rows, DataError):
        columns = read_columns(rows, decimal)
        if fitted.n_sites == 1 and (column is None or column not in columns):
            column = column or "site"
            columns = {**columns, column: np.full(len(next(iter(columns.values()), ())), fitted.sites[0], dtype=object)}
        if column is None:
            raise no_site_column(rows, columns)
        found = Federation.from_schema(columns, schema, site=column)
    sites = [fitted.sites[fitted.position(one)] for one in found.sites]
    return fitted.with_baseline(Federation(dict(zip(sites, map(found.__getitem__, found.sites), strict=True))))


def _times(given: str | None) -> dict[str, float]:
    """Return the times of ``--survival`` by their text."""
    try:
        return {} if given is None else {part.strip(): float(part) for part in given.split(",")}
    except ValueError:
        raise ParameterError(f"{flag('survival')} takes times separated by commas, got {given!r}") from None


def _rows_by_site(path: Path, column: str | None, decimal: DecimalMark) -> dict[str, RawColumns]:
    """Return the labelled rows of each site."""
    with in_file(path, DataError):
        columns = read_columns(path, decimal)
        if column is None or column not in columns:
            raise no_site_column(path, columns)
        ids = np.array([str(site) for site in site_ids(columns[column])], dtype=object)
    return {site: {name: values[ids == site] for name, values in columns.items()} for site in dict.fromkeys(ids)}
