"""Finished cells on disk: one Parquet part file each, there whole or not at all."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fedkin
from fedkin.errors import FedkinError, missing_dependency
from fedkin.studies.config import Cell

Row = Mapping[str, Any]

#: The file with all rows of a finished run.
ROWS = "rows.parquet"

#: Entries of a part file's metadata: how long its cell took, and which one it is.
_SECONDS, _KEY = b"fedkin_seconds", b"fedkin_cell"


class StudyError(FedkinError, RuntimeError):
    """A study that cannot go on: a failing cell, a directory in use, rows that cannot be read."""


class Store:
    """The directory of one study.

    Parameters
    ----------
    folder : Path
        Created if need be: ``cells/`` holds the part files, ``rows.parquet`` all rows of the last finished run.
    """

    def __init__(self, folder: Path) -> None:
        _pyarrow()  # say now that it is missing, not after the first cell
        self.folder = folder
        self.cells = folder / "cells"
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StudyError(
                f"--out: the directory {self.cells} cannot be made ({error.strerror}); choose another --out"
            ) from None

    def part(self, cell: Cell) -> Path:
        """Where the rows of a cell belong."""
        return self.cells / f"{cell.key}.parquet"

    def has(self, cell: Cell) -> bool:
        """Whether the cell is finished."""
        return self.part(cell).is_file()

    def write(self, cell: Cell, rows: Sequence[Row], seconds: float | None = None) -> None:
        """Store a finished cell and the time that it took, atomically: a kill leaves the whole file or none."""
        write_rows(self.part(cell), rows, seconds, cell.key)

    def seconds(self, cells: Sequence[Cell]) -> tuple[float, int]:
        """Time that finished cells took, summed, and the number of cells that have none noted."""
        found = [read_seconds(self.part(cell)) for cell in cells]
        known = [one for one in found if one is not None]
        return sum(known), len(found) - len(known)

    def read(self, cell: Cell) -> list[dict[str, Any]]:
        """The rows of a finished cell; raises `StudyError` when its file is damaged or holds another cell's rows."""
        path = self.part(cell)
        rows, noted = _read(path)
        key = noted.get(_KEY)
        if key is not None and key.decode() != cell.key:
            raise StudyError(f"{path} holds the rows of another cell")
        if key is None and not _may_belong(rows, cell):  # written before keys were noted
            raise StudyError(f"{path} holds rows of another grid point or of other replications")
        return rows

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second run out of this directory; the lock goes away with the process, however it ends."""
        path = self.folder / ".lock"
        with path.open("w") as handle:
            try:
                import fcntl
            except ImportError:  # not on Windows: two runs would only do the same work twice
                yield
                return
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StudyError(
                    f"another run is writing to {self.folder}: wait for it, end it, or choose another --out"
                ) from None
            for leftover in self.cells.glob("*.writing"):
                leftover.unlink()
            yield


def write_rows(path: Path, rows: Sequence[Row], seconds: float | None = None, key: str | None = None) -> None:
    """Write rows as a Parquet file that is there whole or not at all; ``seconds`` and ``key`` go into its metadata."""
    pyarrow, parquet = _pyarrow()
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    notes = {_SECONDS: None if seconds is None else repr(float(seconds)), _KEY: key}
    table = table.replace_schema_metadata({name: note for name, note in notes.items() if note is not None})
    draft = path.with_name(path.name + ".writing")
    try:
        parquet.write_table(table, draft, write_page_checksum=True)
        with draft.open("rb") as handle:
            os.fsync(handle.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # Ctrl-C, or a full disk


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file."""
    try:
        return _read(path)[0]
    except StudyError as error:
        raise StudyError(f"{error}; remove it and run the study again") from error


def _read(path: Path) -> tuple[list[dict[str, Any]], Mapping[bytes, bytes]]:
    """Rows and metadata of a Parquet file."""
    _, parquet = _pyarrow()
    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        return table.to_pylist(), table.schema.metadata or {}
    except Exception as error:
        words = " ".join(str(error).split())
        raise StudyError(f"{path} cannot be read ({words})") from error


def _may_belong(rows: Sequence[Row], cell: Cell) -> bool:
    """Whether replications, seeds and grid point of the rows are those of a cell."""
    seeds = set(zip(cell.replications, cell.seeds, strict=True))
    return all(
        (row.get("replication"), row.get("seed")) in seeds
        and all(row.get(name) == value for name, value in cell.params.items())
        for row in rows
    )


def read_seconds(path: Path) -> float | None:
    """The seconds in a file's metadata, None where there are none or they cannot be read."""
    _, parquet = _pyarrow()
    try:
        noted = (parquet.read_metadata(path).metadata or {}).get(_SECONDS)
    except Exception:  # whoever reads the rows says what is wrong with the file
        return None
    return None if noted is None else float(noted)


def environment() -> dict[str, str]:
    """Versions and CPU: the columns that say where a row was computed."""
    return {
        "fedkin": fedkin.__version__,
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "scipy": _version("scipy"),
        "scikit_learn": _version("scikit-learn"),
        "numba": _version("numba"),
        "platform": f"{sys.platform} {platform.machine()}",
        "cpu": cpu_name(),
    }


def cpu_name() -> str:
    """The model of the CPU, as well as the system tells it."""
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


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_dependency("pyarrow", "running a study", "report") from None
    return pyarrow, parquet
