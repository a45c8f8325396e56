"""Rows of a study in Parquet files, each there whole or not at all."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import fedkin
from fedkin._base import replacing
from fedkin.errors import FedkinError, missing_dependency

Row = Mapping[str, Any]

#: The file with all rows of a finished run.
ROWS = "rows.parquet"

#: Columns that say where a row was computed.
ENVIRONMENT = ("fedkin", "python", "numpy", "scipy", "scikit_learn", "numba", "platform", "cpu")

#: Entries of a file's metadata.
_SECONDS, _KEY = b"fedkin_seconds", b"fedkin_cell"


class StudyError(FedkinError, RuntimeError):
    """A study that cannot go on: a failing cell, a directory in use, rows that cannot be read."""


class Part(NamedTuple):
    """What a file holds: rows, the seconds that computing them took, and the key of their cell."""

    rows: list[dict[str, Any]]
    seconds: float | None = None
    key: str | None = None


def write_rows(path: Path, rows: Sequence[Row], seconds: float | None = None, key: str | None = None) -> None:
    """Write rows to a Parquet file; ``seconds`` and ``key`` go into its metadata."""
    pyarrow, parquet = load_pyarrow()
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    notes = {_SECONDS: None if seconds is None else repr(float(seconds)), _KEY: key}
    table = table.replace_schema_metadata({name: note for name, note in notes.items() if note is not None})
    with replacing(path, durable=True) as temporary:  # a loss of power leaves the whole file or none
        parquet.write_table(table, temporary, write_page_checksum=True)


def read_part(path: Path) -> Part:
    """Rows and metadata of a Parquet file; raises `StudyError` when they cannot be read."""
    _, parquet = load_pyarrow()
    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        notes = table.schema.metadata or {}
        seconds = float(notes[_SECONDS]) if _SECONDS in notes else None
        return Part(table.to_pylist(), seconds, notes[_KEY].decode() if _KEY in notes else None)
    except Exception as error:
        words = " ".join(str(error).split())
        raise StudyError(f"{path} cannot be read ({words})") from error


def read_rows(path: Path) -> Part:
    """All rows of a finished run, as `read_part`; the message says what to do."""
    try:
        return read_part(path)
    except StudyError as error:
        raise StudyError(f"{error}; remove it and run the study again") from error


def environment() -> dict[str, str]:
    """Versions and CPU: the columns `ENVIRONMENT` of the rows that are computed here."""
    packages = [_version(name) for name in ("numpy", "scipy", "scikit-learn", "numba")]
    machine = (f"{sys.platform} {platform.machine()}", _cpu_name())
    return dict(zip(ENVIRONMENT, (fedkin.__version__, platform.python_version(), *packages, *machine), strict=True))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def load_pyarrow() -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``; raises with the name of the extra when they are missing."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_dependency("pyarrow", "running a study", "report") from None
    return pyarrow, parquet
