"""Reading the table that the user named, by its own columns or as a contract has agreed; errors begin with the file."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from fedkin._base import AnyArray, Array, in_file
from fedkin.cli.shared.console import note
from fedkin.data import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    Federation,
    Schema,
    files_of,
    near_name,
    raise_findings,
    read_columns,
    read_files,
    row_places,
    site_ids,
)
from fedkin.errors import DataError, FedkinError, ParameterError, TableWarning
from fedkin.fitting import FittedModel


def read_table(path: Path, **asked: Any) -> Federation:
    """`Federation.read` with these arguments; what it remarks on comes as notes."""
    check_exists(path)
    if asked.get("site") is None and path.is_file():
        raise DataError(f"say which column of {path} holds the sites: --site COL{_has(_column_names(path))}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # they are the federation's notes
        federation = Federation.read(path, **asked)
    for words in federation.notes:
        note(words)
    return federation


def check_exists(path: Path) -> None:
    """Raise unless there is a file or directory of that name, or the name is a pattern such as rows/*.parquet."""
    if not path.exists() and not has_magic(str(path)):
        near = near_name(path.name, _siblings(path), 0.8)
        raise DataError(f"there is no file or directory {path}{near}: check the path")


def check_new_file(out: Path, example: str, *inputs: Path | None) -> None:
    """Raise `ParameterError` for a place that cannot hold a new file: before the long work, not after it.

    A file that the command reads is no such place, neither is one of a directory that it reads; ``inputs`` are its
    files, directories and patterns.
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
    """The files that a path stands for: itself, all in a directory, or those of a pattern."""
    files = [Path(name) for name in glob(str(path), recursive=True)] if has_magic(str(path)) else []  # noqa: PTH207
    files = [path] if path.exists() else files
    return {file.resolve() for one in files for file in (one.iterdir() if one.is_dir() else [one])}


def agreed_federation(path: Path, site: str | None, schema: Schema) -> Federation:
    """The rows of all sites, checked and encoded as the schema says."""
    columns, found_column, _ = _schema_columns(path, site, schema, target=True)
    if found_column is None:
        raise DataError(f"say which column of {path} holds the sites: --site COL{_has(list(columns))}")
    with in_file(path, DataError):
        return Federation.from_schema(columns, schema, site=found_column)


def rows_to_predict(
    path: Path, site: str | None, model: FittedModel, offset: str | None = None
) -> tuple[list[Hashable], dict[str, AnyArray], Array | None]:
    """Rows to predict with a model that has a schema, the site of each, and the offset if another column has it.

    With one site it need not be named.
    """
    schema = model.schema
    assert schema is not None
    needed = schema if offset is None else replace(schema, offset=offset)
    columns, column, places = _schema_columns(path, site, needed, target=False)
    asked = model.n_sites > 1 or site != model.options.get("site_column")
    if site is not None and site not in columns and asked:
        raise DataError(
            f"{path}: there is no column {site!r} for the site{near_name(site, columns)}{_has([*columns])}"
        )
    if column is not None and column in columns:
        gap = next((row for row, cell in enumerate(columns[column].tolist()) if cell is None or cell != cell), None)
        if gap is not None:
            raise DataError(f"{path}, {places(gap)}: the site is missing (column {column!r}): fill it in")
        ids = site_ids(columns[column])
    elif model.n_sites == 1:
        ids = [model.sites[0]] * len(next(iter(columns.values()), ()))
    else:
        raise DataError(
            f"say which column of {path} holds the sites: --site COL{_has(list(columns))}; the model has "
            f"{model.n_sites} of them"
        )
    with in_file(path, DataError):
        found = needed.check(columns, target=False, at=places)
        raise_findings(found)
    for one in found:
        if one.code == "unknown_level":
            note(str(one))
    return ids, columns, None if offset is None else needed.offset_of(columns)


def _schema_columns(
    path: Path, site: str | None, schema: Schema, target: bool
) -> tuple[dict[str, AnyArray], str | None, Callable[[int], str]]:
    check_exists(path)
    if not path.is_dir():
        columns = read_columns(path)
        return columns, site, row_places(path, columns)
    names = [column.name for column in (schema.columns if target else schema.features)]
    return read_files(files_of(path), site, [*names, *([schema.offset] if schema.offset else [])])


def _column_names(path: Path) -> list[str]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if file.suffix.lower() in CSV_SUFFIXES + PARQUET_SUFFIXES:
            try:
                return list(read_columns(file))
            except FedkinError:
                return []
    return []


def _has(columns: Sequence[str]) -> str:
    return f"; it has {', '.join(columns[:20])}{', ...' if len(columns) > 20 else ''}" if columns else ""


def _siblings(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
