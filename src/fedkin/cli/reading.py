"""Read the input of ``fedkin fit``: tables, Parquet files larger than memory, summaries, graphs and covariates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import has_magic
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import count, free_memory, in_file, listed
from fedkin._storage import Remote
from fedkin.cli.console import flag, note
from fedkin.core import Summaries, infer_target, rows_in_files, summarise_files
from fedkin.data import (
    DecimalMark,
    Federation,
    FileTable,
    Schema,
    files_of,
    in_batches,
    level_text,
    near_name,
    no_site_column,
    open_files,
    read_files,
    site_ids,
)
from fedkin.errors import DataError, ParameterError, SolverError, TableWarning
from fedkin.federate import Contract, Organiser
from fedkin.federate.received import check_queries, read_summaries
from fedkin.fitting import Data, FitOptions, Queries
from fedkin.fitting.options import AUTO
from fedkin.fitting.preparation import with_fixed_curves
from fedkin.graph import Graph
from fedkin.kin import Covariates, covariate_graph, covariate_remarks, read_covariates
from fedkin.losses import loss_for, loss_kind, loss_names

_COPIES = 4  # memory of a fit, as a multiple of the table
_MOST_IN_MEMORY = 1e9  # most bytes of rows in memory if sums suffice
_GIGABYTE = 1e9
_MANY_IDS = 50  # rows with distinct whole numbers, from which on a target looks like an id
_MOST_LOG_EXPOSURE = 40.0  # largest log exposure of counts


# --- paths ------------------------------------------------------------------------------------------------------------


def check_exists(path: Path) -> None:
    """Raise unless a file or directory has this name, or the name is a pattern such as rows/*.parquet."""
    if not path.exists() and not has_magic(str(path)):
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = near_name(path.name, siblings, 0.8)
        raise DataError(f"there is no file or directory {path}{near}: check the path")


def check_new_file(out: Path, example: str, *inputs: Path | None) -> None:
    """Raise `ParameterError` early if a new file cannot be written here.

    ``inputs`` are the files, directories and patterns that the command reads and must not overwrite.
    """
    if out.is_dir():
        raise ParameterError(f"{out} is a directory, expected the name of a file: {out / example}, for example")
    folder = out.absolute().parent
    if not isinstance(out, Remote) and not folder.is_dir():
        raise ParameterError(f"there is no directory {folder} for {out.name}: create it first")
    for path in inputs:
        if path is not None and out.exists() and _reads(path, out):
            raise ParameterError(f"{out} is an input of this command and would be overwritten: choose another name")
    try:
        probe = out.with_name(f".{out.name}.part")
        probe.open("wb").close()
        probe.unlink()
    except OSError as error:
        raise ParameterError(f"{out} cannot be written ({error.strerror or error}): choose another path") from None


def _reads(path: Path, file: Path) -> bool:
    """Return whether a file belongs to a path: a file, a directory, or the matches of a pattern."""
    if path.is_dir():
        return path.resolve() in file.resolve().parents
    return file.resolve() in {one.resolve() for one in files_of(path)}


# --- what is fitted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Opened:
    """Data to fit, in memory, in files or as summaries, with metadata."""

    data: Data
    options: FitOptions
    schema: Schema | None = None
    graph: Graph | None = None
    covariates: Covariates | None = None  # covariates of the graph
    queries: Queries | None = None
    known: Mapping[str, Any] = field(default_factory=dict)  # further fields of the model
    facts: Mapping[str, str] = field(default_factory=dict)
    ask: Callable[[Queries], Sequence[Path]] | None = None  # writes queries for the sites
    alone: Mapping[str, str] = field(default_factory=dict)  # sites that are left out, and why
    within: str | None = None  # the column of districts

    def with_edges(self, graph: Path | None, covariates: Path | None, site: str | None) -> Opened:
        """Read the graph or the covariates, if given; ``site`` is the site column."""
        if graph is not None:
            return replace(self, graph=Graph.read(graph, self.data.sites))
        if covariates is None:
            return self
        check_exists(covariates)
        if covariates.is_dir():
            raise ParameterError(f"--covariates: {covariates} is a directory, expected a file with one line per site")
        known = read_covariates(covariates, self.data.sites, site)
        for text in covariate_remarks(known):
            note(f"{covariates}: {text}")
        with in_file(covariates, DataError):
            return replace(self, graph=covariate_graph(known, self.data.sites), covariates=known)


def open_table(path: Path, options: Mapping[str, Any], columns: Mapping[str, Any]) -> Opened:
    """Open a table in memory, or in its Parquet files if memory is short; ``columns`` are as in `Federation.read`."""
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
    if (table := stays_in_files(path, how, columns)) is not None:
        return _open_files(path, table, how, {name: value for name, value in columns.items() if name != "decimal"})
    rows = read_table(path, **columns)
    return Opened(rows, _checked(rows, how), known={"offset_name": columns.get("offset") or columns.get("exposure")})


def open_by_contract(
    path: Path, options: Mapping[str, Any], contract: Contract, site: str | None, decimal: DecimalMark = "."
) -> Opened:
    """Open the rows of all sites, checked and encoded according to the contract."""
    check_exists(path)
    offset = [] if contract.schema.offset is None else [contract.schema.offset]
    table, column = read_files(path, site, [*(one.name for one in contract.schema.columns), *offset], decimal)
    if column is None:
        raise no_site_column(path, table.names)
    with in_file(path, DataError):
        rows = Federation.from_schema(table.columns, contract.schema, site=column)
    known = {"offset_name": contract.schema.offset}
    districts = read_districts(path, site, contract.within, decimal) if contract.within else None
    how = contract_options(options, contract, districts)
    return Opened(rows, how, contract.schema, known=known, within=contract.within or None)


def open_summaries(folder: Path, options: Mapping[str, Any], federation: Path | None = None) -> Opened:
    """Open the summaries of sites, checked, with the organiser's last queries."""
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
        note(f"{name} is left out of this fit: {why}")

    def ask(queries: Queries) -> Sequence[Path]:
        if organiser is None:
            raise ParameterError(
                f"the {contract.loss['name']} loss needs more than one message per site, and only the organiser can "
                "ask for more: fit in its directory"
            )
        if queries.round > contract.messages:
            raise SolverError(
                f"the contract allows {count(contract.messages, 'message')} per site, after which the relative gap is "
                f"{queries.gap:.1e}: accept it with a larger {flag('tol')}, or agree on a contract with more messages"
            )
        check_queries(queries.questions, collected)
        return organiser.write_queries(queries.questions, queries.to_plain())

    facts = {"contract": f"{contract.name}, {count(collected.round, 'message')} from every site"}
    how = contract_options(options, contract, collected.districts)
    return Opened(
        data,
        how,
        contract.schema,
        graph,
        queries=queries,
        facts=facts,
        ask=ask,
        alone=collected.alone,
        within=contract.within or None,
    )


def _check_round(asked: int, answered: int, sites: Sequence[str]) -> None:
    if answered < asked:
        raise DataError(
            f"the sites were sent query {asked}, but none has answered: wait for the files of {listed(sites, 8)}"
        )
    if answered > asked:
        raise DataError(
            f"the answers are to query {answered}, which is not in the organiser's folder asks: fit in the "
            "organiser's directory, where the query came from"
        )


def folder_of_summaries(path: Path) -> Path | None:
    """Return the folder with the summaries, ``heart/summaries`` for ``heart``; None for other data."""
    folders = [folder for folder in (path, path / "summaries") if folder.is_dir()]
    for folder in folders:
        if next(folder.glob("*.summary"), None) is not None:
            return folder
    # none has arrived; the reader of summaries reports that
    own = [one for one in folders if one.name == "summaries" and (one.absolute().parent / "federation.json").exists()]
    return own[0] if own else None


def contract_options(
    given: Mapping[str, Any], contract: Contract, districts: Mapping[Any, Any] | None = None
) -> FitOptions:
    """Return the options with the settings of a contract; the options may ask for another method.

    ``districts`` are those of the sites, if the contract asks for them. ``given`` has the options on the command line;
    those that differ from the contract are refused. Nothing is standardised, since the contract sets the scale.
    """
    method = given.get("method", contract.method)
    if method != contract.method:
        note(f'the contract says method = "{contract.method}"; this fit uses {method}, as requested by the options')
    agreed = {"loss": contract.loss["name"], "fit_intercept": contract.intercept, "seed": contract.seed}
    if method == "kin":
        agreed |= {"fixed": contract.fixed, "within": None if districts is None else dict(districts)}
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


def stays_in_files(path: Path, how: FitOptions, columns: Mapping[str, Any]) -> FileTable | None:
    """Return the table if its rows stay in their Parquet or CSV files.

    They do if a fit would take more than half of the free memory. For least squares, which needs one pass, the limit is
    a gigabyte, unless gaps are to be filled or rows are ordered in time.
    """
    if not in_batches(path, columns.get("decimal", ".")) or (how.loss != AUTO and not loss_kind(how.loss).additive):
        return None
    table, _ = open_files(path, columns.get("site"))
    rows, width = table.n_rows, len(table.names)
    needed, free = _COPIES * 8.0 * rows * width, free_memory() or math.inf
    sums = _sums_suffice(table, how, columns.get("target"))
    one_pass = sums and columns.get("missing", "refuse") in ("refuse", "drop") and columns.get("time") is None
    if needed <= min(0.5 * free, _MOST_IN_MEMORY if one_pass else math.inf):
        return None
    size = f"{path}: {count(rows, 'row')} of {count(width, 'column')}, about {needed / _GIGABYTE:.2g} GB in memory"
    if sums or how.method == "kin":
        way = "read in one pass that keeps sums only" if sums else "read once for every Newton step, about 25 times"
        note(f"{size}: rows stay in their files, {way}")
        return table
    if needed <= free:
        return None
    raise ParameterError(
        f"{size}, and {free / _GIGABYTE:.2g} GB are free, but the fused estimator keeps all rows unless the loss is "
        "linear: use --method kin, which leaves them in their files"
    )


def _sums_suffice(table: FileTable, how: FitOptions, target: str | None) -> bool:
    """Return whether sums over rows are sufficient: for least squares, not for classes."""
    if how.loss == AUTO:
        return infer_target(table, target) == "numbers"
    kind = loss_kind(how.loss)
    return kind.quadratic and kind.target is not None


def _open_files(path: Path, table: FileTable, how: FitOptions, columns: Mapping[str, Any]) -> Opened:
    target = columns.get("target")
    if not _sums_suffice(table, how, target):
        if how.loss == AUTO and infer_target(table, target) == "binary":
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
    """Call `Federation.read`, and print its warnings as notes."""
    check_exists(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # they are also the federation's notes
        federation = Federation.read(path, **columns)
    for text in federation.notes:
        note(text)
    return federation


def read_districts(path: Path, site: str | None, column: str, decimal: DecimalMark = ".") -> dict[Hashable, Hashable]:
    """Return the district of each site, from a column of the table."""
    with in_file(path, DataError):
        table, found = read_files(path, site, [column], decimal)
        if found is None:
            raise no_site_column(path, table.names)
        if column not in table.names:
            raise DataError(f"there is no column {column!r} of districts: correct --within")
        pairs = dict.fromkeys(zip(*(site_ids(table.columns[name]) for name in (found, column)), strict=True))
    made = dict(pairs.keys())
    for one, district in pairs:
        if made[one] != district:
            both = f"{made[one]!r} and {district!r}"
            raise DataError(
                f"site {one!r} is in {both}: sites must be nested in districts; name a column that is the same in all "
                "rows of a site with --within"
            )
    return made


def _checked(rows: Federation, how: FitOptions) -> FitOptions:
    """Refuse meaningless targets, note unusual sites, and choose a loss for the target."""
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
            f"the offset reaches {offset[np.abs(offset).argmax()]:g}, too large for a log exposure: an offset of "
            "counts is the log exposure; pass the exposure itself with --exposure"
        )
    if rows.n_sites == 1:
        note(f"there is only one site, {rows.sites[0]!r}: kin needs several sites; is --site the right column?")
    if y is None:
        return how
    if flat := [site for site in rows.constant_sites() if rows[site].n_samples > 2]:
        where = f"site {flat[0]!r}" if len(flat) == 1 else f"{len(flat)} sites ({listed(flat)})"
        note(f"the target {name!r} has only one value at {where}: check that it was recorded there")
    if how.loss != "auto" or y.dtype.kind != "f":
        return how
    if len(y) >= _MANY_IDS and (y == np.floor(y)).all() and np.unique(y).size == len(y):
        raise DataError(
            f"the target {name!r} is a different whole number in each of {count(len(y), 'row')}, like an id: name "
            "another "
            f"column with --target, or add --loss {loss_for('number').name} if these are amounts"
        )
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
