"""The directory of one study: a part file per finished cell."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedkin._base import lock
from fedkin.studies.config import Cell
from fedkin.studies.rows import Part, Row, StudyError, load_pyarrow, read_part, write_rows


class Store:
    """The directory of one study.

    Parameters
    ----------
    folder : Path
        Created if need be: ``cells/`` holds the part files, ``rows.parquet`` all rows of the last finished run.
    """

    def __init__(self, folder: Path) -> None:
        load_pyarrow()  # say now that it is missing, not after the first cell
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

    def write(self, cell: Cell, rows: Sequence[Row], seconds: float) -> None:
        """Store a finished cell and the time that it took; a kill leaves the whole file or none."""
        write_rows(self.part(cell), rows, seconds, cell.key)

    def read(self, cell: Cell) -> Part:
        """A finished cell; raises `StudyError` when its file is damaged or holds another cell's rows."""
        path = self.part(cell)
        part = read_part(path)
        if part.key != cell.key:
            raise StudyError(f"{path} holds the rows of another cell")
        return part

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second run out of this directory; the lock goes away with the process, however it ends."""
        held = lock(self.folder / ".lock", str(os.getpid()))
        if held is None:
            raise StudyError(f"another run is writing to {self.folder}: wait for it, end it, or choose another --out")
        try:
            for leftover in self.cells.glob(".*.parquet"):  # of a run that was killed while it wrote
                leftover.unlink()
            yield
        finally:
            os.close(held)
