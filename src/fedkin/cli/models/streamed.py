"""``fedkin fit`` for tables larger than memory: one pass for least squares, one for every step of other losses."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedkin._base import Say, count
from fedkin.cli.models.edge_files import EdgeFiles
from fedkin.cli.models.results import check_converged
from fedkin.cli.shared.console import note
from fedkin.cli.shared.reading import check_exists
from fedkin.core import holds_labels, holds_zeros_and_ones, rows_in_files, summarise_files, table_size
from fedkin.data import PARQUET_SUFFIXES, files_of
from fedkin.errors import (
    ConvergenceWarning,
    DataError,
    DegenerateSiteWarning,
    FedkinError,
    ParameterError,
)
from fedkin.fitting import Comparison, Data, FitOptions, FittedModel, compare, fit, with_covariates
from fedkin.losses import loss_kind

#: A fit in memory takes about this many times the numbers of the table.
_COPIES = 4
_GIGABYTE = 1e9


def streams(
    data: Path, asked: bool | None, how: FitOptions, target: str | None, free: float | None = None
) -> bool:
    """Whether to leave rows in their files: as asked, or where they would not fit into half of the memory that is free.

    What will be in memory is said first, for a table of more than a gigabyte in any case; where all rows are needed and
    do not fit, that is an error. ``free`` is the memory in bytes, by default what the system says.
    """
    check_exists(data)
    parquet = all(file.suffix.lower() in PARQUET_SUFFIXES for file in files_of(data))
    if asked is False or (asked is None and not parquet):
        return False
    sums = sums_tell(data, how, target)
    if asked and not sums and how.chosen == "fused":
        raise ParameterError(
            "the fused estimator reads all rows unless the loss is linear: omit --stream, or its options"
        )
    rows, columns = table_size(data)
    needed = _COPIES * 8.0 * rows * columns
    free = _free_memory() if free is None else free
    if asked or ((sums or how.chosen == "kin") and free is not None and needed > 0.5 * free):
        parts = how.cv_folds + 1 if sums else 4  # sums by fold; or expansions, of which a few are in use at once
        site = 8 * parts * (columns + 2) ** 2
        way = "read in one pass, of which sums are kept" if sums else "read once for every Newton step, some 25 times"
        note(
            f"{data}: {count(rows, 'row')} of {count(columns, 'column')}, about {needed / _GIGABYTE:.2g} GB as rows in "
            f"memory; {way}, {site / 1000:.3g} kB for each site"
        )
        return True
    if free is not None and needed > free:
        size = f"{needed / _GIGABYTE:.2g} GB of memory and {free / _GIGABYTE:.2g} GB are free"
        raise ParameterError(
            f"{data}: {count(rows, 'row')} take about {size}, but the fused estimator keeps all rows "
            "unless the loss is linear: take --method kin, which leaves them in their files, or add --no-stream to try "
            "it all the same"
        )
    if needed > _GIGABYTE:
        way_out = " (--stream leaves rows in their files)" if sums or how.chosen == "kin" else ""
        note(f"{data}: {count(rows, 'row')} take about {needed / _GIGABYTE:.2g} GB of memory{way_out}")
    return False


def sums_tell(data: Path, how: FitOptions, target: str | None) -> bool:
    """Whether sums over rows tell everything: for least squares, and so not for labels."""
    if how.loss != "auto":
        return loss_kind(how.loss).quadratic
    return target is None or not holds_labels(data, target)


def _free_memory() -> float | None:
    try:
        # what the system keeps of files counts as free
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return None


def fit_streamed(
    data: Path, asked: Mapping[str, Any], files: EdgeFiles, how: FitOptions, compares: bool, say: Say
) -> tuple[FittedModel, Comparison | None]:
    """A model of rows that stay in files, and its comparison over folds; ``asked`` as in `summarise_files`."""
    if asked.get("site") is None:
        raise DataError(f"say which column of {data} holds the sites: --site COL")
    if asked.get("time") is not None:
        raise ParameterError("--time puts rows in order, which needs all of them in memory: omit --stream or --time")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DegenerateSiteWarning)
        target = asked.get("target")
        if sums_tell(data, how, target):
            if how.loss == "auto" and target is not None and holds_zeros_and_ones(data, target):
                words = "is modelled by least squares, which takes one pass; for probabilities add --loss logistic"
                note(f"the target {target!r} is 0 or 1 and {words}")
            model, rows = _from_sums(data, asked, files, how, say)
        else:
            model, rows = _from_files(data, asked, files, how, say)
        comparison = None
        if compares:
            say("comparing with simpler models, every fold held out in turn")
            try:
                comparison = compare(rows, None, how, model=model)
            except FedkinError as error:
                note(f"no comparison: {error}")
    return replace(model, comparison=None if comparison is None else comparison.plain()), comparison


def _from_sums(
    data: Path, said: Mapping[str, Any], files: EdgeFiles, how: FitOptions, say: Say
) -> tuple[FittedModel, Data]:
    streamed = summarise_files(data, **said, fit_intercept=how.fit_intercept, folds=how.cv_folds, seed=how.seed)
    for words in streamed.notes:
        note(words)
    edges, known = files.read(streamed.summaries.sites)
    model = fit(streamed.summaries, edges, how, say)
    assert isinstance(model, FittedModel)
    check_converged(model, how)
    names = {"target_name": said["target"], "offset_name": said.get("offset")}
    model = replace(with_covariates(model, known), schema=streamed.schema, **names, origin=None)
    return model, streamed.summaries


def _from_files(
    data: Path, said: Mapping[str, Any], files: EdgeFiles, how: FitOptions, say: Say
) -> tuple[FittedModel, Data]:
    rows = rows_in_files(data, **said, loss=how.loss, fit_intercept=how.fit_intercept)
    for words in rows.notes:
        note(words)
    edges, known = files.read(rows.sites)
    return with_covariates(fit(rows, edges, how, say), known), rows
