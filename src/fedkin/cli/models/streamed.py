"""``fedkin fit`` for tables larger than memory: one pass for least squares, and how much memory other fits take."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedkin._base import Say, count
from fedkin.cli.shared.console import note
from fedkin.cli.shared.reading import check_exists
from fedkin.data import PARQUET_SUFFIXES, files_of
from fedkin.errors import (
    ConvergenceWarning,
    DataError,
    DegenerateDeviceWarning,
    FedkinError,
    ParameterError,
    SolverError,
)
from fedkin.fitting import FitOptions, FittedModel, FoldComparison, compare_folds, fit_summaries
from fedkin.graph import Graph
from fedkin.stats import summarise_files, table_size

#: A fit in memory takes about this many times the numbers of the table.
_COPIES = 4
_GIGABYTE = 1e9


def streams(data: Path, asked: bool | None, how: FitOptions) -> bool:
    """Whether to read a table in one pass: as asked, or where it would not fit into half of the memory that is free.

    For a table of more than a gigabyte the memory is said first.
    """
    check_exists(data)
    parquet = all(file.suffix.lower() in PARQUET_SUFFIXES for file in files_of(data))
    if asked is False or (asked is None and not parquet):
        return False
    sums = how.loss in ("auto", "linear")
    if asked and not sums:
        raise ParameterError(f"only least squares is read in one pass, not the {how.loss} loss: omit --stream")
    rows, columns = table_size(data)
    needed = _COPIES * 8.0 * rows * columns
    free = _free_memory()
    if asked or (sums and free is not None and needed > 0.5 * free):
        folds = 8 * (how.cv_folds + 1) * (columns + 2) ** 2
        note(
            f"{data}: {count(rows, 'row')} of {count(columns, 'column')}, about {needed / _GIGABYTE:.2g} GB as rows in "
            f"memory; read in one pass, of which sums are kept, {folds / 1000:.3g} kB for each site"
        )
        return True
    if needed > _GIGABYTE:
        way_out = " (--stream takes one pass)" if sums else ""
        note(f"{data}: {count(rows, 'row')} take about {needed / _GIGABYTE:.2g} GB of memory{way_out}")
    return False


def _free_memory() -> float | None:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return None


def fit_streamed(
    data: Path, asked: Mapping[str, Any], graph: Path | None, how: FitOptions, compares: bool, say: Say
) -> tuple[FittedModel, FoldComparison | None]:
    """A model from one pass over files, and its comparison over folds; ``asked`` are arguments of `summarise_files`."""
    if asked.get("device") is None:
        raise DataError(f"say which column of {data} holds the devices: --device COL")
    said = {name: value for name, value in asked.items() if name != "time"}
    if asked.get("time") is not None:
        raise ParameterError("--time puts rows in order, which needs all of them in memory: omit --stream or --time")
    streamed = summarise_files(data, **said, fit_intercept=how.fit_intercept, folds=how.cv_folds, seed=how.seed)
    for words in streamed.notes:
        note(words)
    edges = None if graph is None else Graph.read(graph, streamed.summaries.devices)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DegenerateDeviceWarning)
        model = fit_summaries(streamed.summaries, edges, how, say)
        if model.status != "converged":
            raise SolverError(f"the fit did not converge: the relative gap is {model.gap:.1e}; raise --max-iter")
        comparison = None
        if compares:
            say("comparing with simpler models, every fold held out in turn")
            try:
                comparison = compare_folds(streamed.summaries, model, how)
            except FedkinError as error:
                note(f"no comparison: {error}")
    made = replace(
        model, schema=streamed.schema, target_name=asked["target"], offset_name=asked.get("offset"), origin=None
    )
    return made, comparison
