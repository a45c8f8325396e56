"""What ``fedkin fit`` reads: tables, Parquet files larger than memory, summaries of sites, graphs and covariates."""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import count, in_file, listed
from fedkin.cli.console import flag, note
from fedkin.core import Summaries, holds_labels, holds_zeros_and_ones, rows_in_files, summarise_files, table_size
from fedkin.data import (
    PARQUET_SUFFIXES,
    Column,
    DecimalMark,
    Federation,
    RawColumns,
    RowPlaces,
    Schema,
    files_of,
    level_text,
    near_name,
    open_files,
    read_columns,
    read_files,
    row_places,
    site_ids,
)
from fedkin.errors import DataError, ParameterError, SolverError, TableWarning
from fedkin.federate import Contract, Organiser
from fedkin.federate.sharing import read_summaries
from fedkin.fitting import Data, FitOptions, Queries
from fedkin.fitting.options import AUTO
from fedkin.fitting.preparation import with_fixed_curves
from fedkin.graph import Graph
from fedkin.kin import Covariates, covariate_graph, covariate_remarks, read_covariates
from fedkin.losses import loss_for, loss_kind, loss_names

_COPIES = 4  # a fit in memory takes about this many times the numbers of the table
_MOST_IN_MEMORY = 1e9  # bytes up to which rows are kept in memory where sums suffice
_GIGABYTE = 1e9
_LARGE_CSV = 10_000_000  # bytes below which a CSV file is always read whole
_MOST_LOG_EXPOSURE = 40.0  # logarithm of the largest exposure that counts may have


# --- paths ------------------------------------------------------------------------------------------------------------


def check_exists(path: Path) -> None:
    """Raise unless there is a file or directory of that name, or the name is a pattern such as rows/*.parquet."""
    if not path.exists() and not has_magic(str(path)):
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = near_name(path.name, siblings, 0.8)
        raise DataError(f"there is no file or directory {path}{near}: check the path")


def check_new_file(out: Path, example: str, *inputs: Path | None) -> None:
    """Raise `ParameterError` for a place that cannot hold a new file: before the long work, not after it.

    ``inputs`` are the files, directories and patterns that the command reads, which must not be lost.
    """
    if out.is_dir():
        raise ParameterError(f"{out} is a directory, expected the name of a file: {out / example}, for example")
    folder = out.absolute().parent
    if not folder.is_dir():
        raise ParameterError(f"there is no directory {folder} for {out.name}: make it first")
    for path in inputs:
        if path is not None and out.exists() and out.resolve() in _files_read(path):
            raise ParameterError(f"{out} is what this command reads, and would be lost: choose another name")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ParameterError(f"{out} cannot be written ({error.strerror}): choose another place") from None


def _files_read(path: Path) -> set[Path]:
    """Return the files that a path stands for: itself, all in a directory, or those of a pattern."""
    files = [Path(name) for name in glob(str(path), recursive=True)] if has_magic(str(path)) else []  # noqa: PTH207
    files = [path] if path.exists() else files
    return {file.resolve() for one in files for file in (one.iterdir() if one.is_dir() else [one])}


def no_sites(path: Path, columns: Sequence[str]) -> DataError:
    has = f"; it has {', '.join(columns[:20])}{', ...' if len(columns) > 20 else ''}" if columns else ""
    return DataError(f"no site column given for {path}: add --site COL{has}")


# --- what is fitted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Opened:
    """Data to fit, in memory, in files or as summaries, and what is known about them."""

    data: Data
    options: FitOptions
    schema: Schema | None = None
    graph: Graph | None = None
    covariates: Covariates | None = None  # what the graph was made of
    queries: Queries | None = None
    known: Mapping[str, Any] = field(default_factory=dict)  # fields of the model that the data do not tell
    facts: Mapping[str, str] = field(default_factory=dict)
    ask: Callable[[Queries], Sequence[Path]] | None = None  # writes queries for the sites
    alone: Mapping[str, str] = field(default_factory=dict)  # sites that are left out, and why

    def with_edges(self, graph: Path | None, covariates: Path | None, site: str | None) -> Opened:
        """Read which sites may be alike from the file that is given, if any; ``site`` is the column of the sites."""
        if graph is not None:
            return replace(self, graph=Graph.read(graph, self.data.sites))
        if covariates is None:
            return self
        check_exists(covariates)
        if covariates.is_dir():
            raise ParameterError(f"--covariates: {covariates} is a directory, expected a file: a line per site")
        known = read_covariates(covariates, self.data.sites, site)
        for text in covariate_remarks(known):
            note(f"{covariates}: {text}")
        with in_file(covariates, DataError):
            return replace(self, graph=covariate_graph(known, self.data.sites), covariates=known)


def open_table(path: Path, options: Mapping[str, Any], columns: Mapping[str, Any]) -> Opened:
    """Open a table: in memory, or in its Parquet files where memory is short; ``columns`` are `Federation.read`'s."""
    how, target = FitOptions(**options), columns.get("target")
    survival, event = loss_names("survival"), columns.get("event")
    if event is not None and how.loss == AUTO:
        how = replace(how, loss=survival[0])
    if (how.loss in survival) != (event is not None):
        text = f"the {how.loss} loss has no events: leave {flag('event')} out" if event else f"add {flag('event')} COL"
        roles = f"times as {flag('target')} and events as {flag('event')}"
        raise DataError(f"{text}; {flag('loss', survival[0])} takes {roles}")
    wanted = how.loss == "auto" or loss_kind(how.loss).target is not None
    if target is None and wanted:
        raise DataError("no target given: add --target COL (or --loss mean, which estimates the means of the features)")
    if target is not None and not wanted:
        raise DataError(f"the {how.loss} loss has no target: leave out --target {target}, or name it in --features")
    check_exists(path)
    if stays_in_files(path, how, columns):
        return _open_files(path, how, {name: value for name, value in columns.items() if name != "decimal"})
    rows = read_table(path, **columns)
    return Opened(rows, _checked(rows, how), known={"offset_name": columns.get("offset") or columns.get("exposure")})


def open_by_contract(
    path: Path, options: Mapping[str, Any], contract: Contract, site: str | None, decimal: DecimalMark = "."
) -> Opened:
    """Open the rows of all sites, checked and encoded as the contract says."""
    columns, column, _ = read_by_schema(path, site, contract.schema, contract.schema.columns, decimal)
    if column is None:
        raise no_sites(path, list(columns))
    with in_file(path, DataError):
        rows = Federation.from_schema(columns, contract.schema, site=column)
    known = {"offset_name": contract.schema.offset}
    return Opened(rows, contract_options(options, contract), contract.schema, known=known)


def open_summaries(folder: Path, options: Mapping[str, Any], federation: Path | None = None) -> Opened:
    """Open what sites have shared, checked, with what the organiser asked last."""
    collected = read_summaries(folder, federation)
    data, contract = Summaries.stack(collected.summaries.values()), collected.contract
    places = [folder, folder.absolute().parent]
    if federation is not None:
        places = [federation if federation.is_dir() else federation.parent]
    place = next((one for one in places if (one / "sites.csv").exists()), None)
    organiser = None if place is None else Organiser.read(place)
    graph, queries = None, None
    if organiser is not None and organiser.graph.n_edges:
        position = np.array([data.index.get(str(site), -1) for site in organiser.graph.sites])
        ends = position[organiser.graph.edges]
        here = (ends >= 0).all(axis=1)
        graph = Graph.from_indices(data.sites, ends[here], organiser.graph.weights[here])
    if not data.loss.quadratic:
        state = None if organiser is None else organiser.read_state()
        queries = None if state is None else Queries.from_plain(state)
        _check_round(1 if queries is None else queries.round, collected.round, list(collected.summaries))
    for name in collected.missing:
        note(f"{name} has sent no summary, so it has no model")
    for name, why in collected.alone.items():
        note(f"{name} stands alone and has no part in this fit: {why}")

    def ask(queries: Queries) -> Sequence[Path]:
        if organiser is None:
            raise ParameterError(
                f"the {contract.loss['name']} loss needs more than one message per site, and only the organiser can "
                "ask for more: fit in its directory"
            )
        if queries.round > contract.messages:
            raise SolverError(
                f"the contract allows {count(contract.messages, 'message')} of a site, after which the relative gap is "
                f"{queries.gap:.1e}: accept it with a larger {flag('tol')}, or agree on a contract with more messages"
            )
        return organiser.write_queries(queries.questions, queries.to_plain())

    facts = {"contract": f"{contract.name}, {count(collected.round, 'message')} of every site"}
    how = contract_options(options, contract)
    return Opened(data, how, contract.schema, graph, queries=queries, facts=facts, ask=ask, alone=collected.alone)


def _check_round(asked: int, answered: int, sites: Sequence[str]) -> None:
    if answered < asked:
        raise DataError(
            f"the sites were asked question {asked}, but no answer is here: wait for the files of {listed(sites, 8)}"
        )
    if answered > asked:
        raise DataError(
            f"the answers are to question {answered}, but the organiser's folder asks does not know it: fit in the "
            "organiser's directory, where the question came from"
        )


def folder_of_summaries(path: Path) -> Path | None:
    """Return the folder with the summaries: ``heart/summaries``, which may be called ``heart``; None for other data."""
    folders = [folder for folder in (path, path / "summaries") if folder.is_dir()]
    for folder in folders:
        if next(folder.glob("*.summary"), None) is not None:
            return folder
    # none has arrived, which is for the reader of summaries to say
    own = [one for one in folders if one.name == "summaries" and (one.absolute().parent / "federation.json").exists()]
    return own[0] if own else None


def contract_options(given: Mapping[str, Any], contract: Contract) -> FitOptions:
    """Return the options with what a contract settles; another method is taken where the options ask for it.

    ``given`` has the options that were typed; one that differs from the contract is refused. Nothing is standardised,
    since the contract's scale is agreed on.
    """
    asked = FitOptions(**given)
    method = contract.method if asked.method == "auto" and asked.chosen == "kin" else asked.chosen
    if method != contract.method:
        note(f'the contract says method = "{contract.method}"; this is fitted by {method}, as the options ask for')
    agreed = {"loss": contract.loss["name"], "fit_intercept": contract.intercept, "seed": contract.seed}
    if method == "kin":
        agreed["fixed"] = contract.fixed
    else:
        agreed |= {"penalty": contract.penalty, "ridge": contract.ridge, "sparsity": contract.sparsity}
        agreed |= {"standardize": False, "cv_folds": contract.folds}
    for name, value in agreed.items():
        typed = given.get(name, value)
        if typed != value:
            raise ParameterError(
                f"the contract is binding: it says {name} = {value}, but {flag(name)} asks for {typed}: leave "
                f"{flag(name)} out, or agree on a contract with {typed}"
            )
    return FitOptions(**{**given, **agreed, "loss": contract.loss_object(), "method": method})


# --- Parquet files that stay on disk ----------------------------------------------------------------------------------


def stays_in_files(path: Path, how: FitOptions, columns: Mapping[str, Any]) -> bool:
    """Return whether rows stay in their Parquet files or their CSV file.

    They do where a fit would take more than half of the free memory; for least squares, where one pass suffices, more
    than a gigabyte, unless gaps are to be filled or rows have an order in time.
    """
    if not in_batches(path, columns.get("decimal", ".")) or (how.loss != AUTO and not loss_kind(how.loss).additive):
        return False
    rows, width = table_size(path)
    needed, free = _COPIES * 8.0 * rows * width, free_memory() or math.inf
    sums = _sums_suffice(path, how, columns.get("target"))
    one_pass = sums and columns.get("missing", "refuse") in ("refuse", "drop") and columns.get("time") is None
    if needed <= min(0.5 * free, _MOST_IN_MEMORY if one_pass else math.inf):
        return False
    size = f"{path}: {count(rows, 'row')} of {count(width, 'column')}, about {needed / _GIGABYTE:.2g} GB in memory"
    if sums or how.chosen == "kin":
        way = "read in one pass, of which sums are kept" if sums else "read once for every Newton step, some 25 times"
        note(f"{size}: they stay in their files, {way}")
        return True
    if needed <= free:
        return False
    raise ParameterError(
        f"{size}, and {free / _GIGABYTE:.2g} GB are free, but the fused estimator keeps all rows unless the loss is "
        "linear: take --method kin, which leaves them in their files"
    )


def _sums_suffice(path: Path, how: FitOptions, target: str | None) -> bool:
    """Return whether sums over rows are sufficient: for least squares, and so not for classes."""
    if how.loss == "auto":
        return target is None or not (holds_labels(path, target) or holds_zeros_and_ones(path, target))
    kind = loss_kind(how.loss)
    return kind.quadratic and kind.target is not None


def free_memory() -> float | None:
    """Return the bytes of memory that are free, as far as the system says; files that it caches count as free."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return None


def _open_files(path: Path, how: FitOptions, columns: Mapping[str, Any]) -> Opened:
    target = columns.get("target")
    if columns.get("site") is None:
        raise no_sites(path, [])
    if not _sums_suffice(path, how, target):
        if how.loss == "auto" and target is not None and holds_zeros_and_ones(path, target):
            how = _as_classes(how, target)
        rows = rows_in_files(path, **columns, loss=how.loss, fit_intercept=how.fit_intercept)
        for text in rows.notes:
            note(text)
        return Opened(rows, how)
    streamed = summarise_files(path, **columns, fit_intercept=how.fit_intercept, folds=how.cv_folds, seed=how.seed)
    for text in streamed.notes:
        note(text)
    offset = columns.get("offset") or columns.get("exposure")
    known = {"schema": streamed.schema, "target_name": target, "offset_name": offset, "origin": None}
    return Opened(streamed.summaries, with_fixed_curves(how, streamed.schema), known=known)


# --- tables in memory -------------------------------------------------------------------------------------------------


def read_table(path: Path, **columns: Any) -> Federation:
    """Call `Federation.read`; what it remarks on comes as notes."""
    check_exists(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # they are the federation's notes
        federation = Federation.read(path, **columns)
    for text in federation.notes:
        note(text)
    return federation


def read_districts(path: Path, site: str | None, column: str, decimal: DecimalMark = ".") -> dict[Hashable, Hashable]:
    """Return the district of each site, which a column of the table names."""
    with in_file(path, DataError):
        columns, found, _ = read_files(path, site, [column], decimal)
        if column not in columns:
            raise DataError(f"there is no column {column!r} of districts: correct --within")
        pairs = dict.fromkeys(zip(site_ids(columns[found]), site_ids(columns[column]), strict=True))
    made = dict(pairs.keys())
    for one, district in pairs:
        if made[one] != district:
            both = f"{made[one]!r} and {district!r}"
            raise DataError(f"site {one!r} is in {both}: sites are to be within districts, crossed ones are not served")
    return made


def read_by_schema(
    path: Path, site: str | None, schema: Schema, needed: Sequence[Column], decimal: DecimalMark = "."
) -> tuple[RawColumns, str | None, RowPlaces]:
    """Read a table as a schema has it: the columns, the name of the site column, and where rows came from."""
    check_exists(path)
    if not path.is_dir():
        columns = read_columns(path, decimal)
        return columns, site, row_places(path, columns)
    offset = [schema.offset] if schema.offset else []
    return read_files(path, site, [*(column.name for column in needed), *offset], decimal)


def batches_by_schema(
    path: Path, site: str | None, schema: Schema, needed: Sequence[Column], decimal: DecimalMark = "."
) -> Iterator[tuple[RawColumns, str | None, Callable[[int], str]]]:
    """Yield what `read_by_schema` returns, of Parquet files and large CSV files in batches."""
    check_exists(path)
    if site is not None and in_batches(path, decimal):
        table, start = open_files(path), 0
        names = [site, *(column.name for column in needed), *([schema.offset] if schema.offset else [])]
        if set(names) <= set(table.names):
            places = table.places()
            for columns in table.batches(names):
                yield columns, site, lambda row, start=start: places(start + row)  # type: ignore[misc]
                start += len(columns[site])
            if start:
                return
    yield read_by_schema(path, site, schema, needed, decimal)


def in_batches(path: Path, decimal: DecimalMark = ".") -> bool:
    """Return whether files are worth reading in batches: Parquet, or one large CSV file."""
    files = files_of(path)
    if len(files) > 1 or files[0].suffix.lower() in PARQUET_SUFFIXES:
        return all(file.suffix.lower() in PARQUET_SUFFIXES for file in files)
    return files[0].is_file() and files[0].stat().st_size >= _LARGE_CSV and decimal == "."


def _checked(rows: Federation, how: FitOptions) -> FitOptions:
    """Refuse what would give nonsense, remark on odd sites, and choose the loss that suits the target."""
    y, offset, name = rows.y, rows.offset, rows.target_name
    if rows.schema is not None and rows.schema.event is not None and y is not None and not (y > 0).any():
        raise DataError(f"{rows.schema.event!r} is 0 in every row: without an event there is nothing to fit")
    if y is not None and len(y) > 1 and (y == y[0]).all():
        raise DataError(
            f"the target {name!r} is {level_text(y[0])} in all {count(len(y), 'row')}: there is nothing to predict; "
            "name another column with --target"
        )
    counts = how.loss != "auto" and loss_kind(how.loss).target == "count"
    if counts and offset is not None and np.abs(offset).max() > _MOST_LOG_EXPOSURE:
        raise DataError(
            f"the offset reaches {offset[np.abs(offset).argmax()]:g}, and its exponential is no exposure: an offset of "
            "counts is the logarithm of the exposure; --exposure takes the exposure itself"
        )
    if rows.n_sites == 1:
        note(f"there is one site only, {rows.sites[0]!r}: kin needs several sites; is --site the right column?")
    if y is None:
        return how
    code = np.unique(y, return_inverse=True)[1]
    low, high = (every.reduceat(code, rows.starts[:-1]) for every in (np.minimum, np.maximum))
    if flat := [rows.sites[u] for u in np.flatnonzero((low == high) & (rows.n_samples > 2)).tolist()]:
        where = f"site {flat[0]!r}" if len(flat) == 1 else f"{len(flat)} sites ({listed(flat)})"
        note(f"the target {name!r} has one value only at {where}: check that it was recorded there")
    if how.loss != "auto" or y.dtype.kind != "f":
        return how
    if loss_for("class").suits(y):
        return _as_classes(how, name)
    if loss_for("count").suits(y):
        note(
            f"the target {name!r} holds whole numbers of at least 0 and is modelled by least squares; if it counts "
            f"events, add --loss {loss_for('count').name}"
        )
    return how


def _as_classes(how: FitOptions, target: str | None) -> FitOptions:
    linear = loss_for("number").name
    note(f"the target {target!r} is 0 or 1 everywhere: its probabilities are modelled; --loss {linear} fits numbers")
    return replace(how, loss=loss_for("class").name)
