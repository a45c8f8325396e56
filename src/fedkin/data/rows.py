"""Rows: features, and target, offset and weight where there are any. The only container of rows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedkin._base import AnyArray, Array, write_arrays
from fedkin.errors import DataError

_NAMES = ("X", "y", "offset", "weight")


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one site, or of several that are stacked; blocks of them have further leading axes.

    >>> rows = Rows(np.array([[1.0], [2.0], [3.0]]), np.array([0.5, 1.5, 2.5]))
    >>> rows.n_samples, rows.take(slice(1, None)).y
    (3, array([1.5, 2.5]))
    >>> Rows.stack([rows, rows]).n_samples
    6
    """

    X: Array  # (n, q), features; for the mean loss, the samples themselves
    y: AnyArray | None = None  # (n,), numbers or class labels
    offset: Array | None = None  # (n,), known part of the linear predictor
    weight: Array | None = None  # (n,), as how many rows each one counts, more than 0

    @property
    def n_samples(self) -> int:
        """Length of the first axis."""
        return int(self.X.shape[0])

    @property
    def arrays(self) -> tuple[Array, AnyArray | None, Array | None]:
        """``(X, y, offset)``, as losses take them."""
        return self.X, self.y, self.offset

    @property
    def _parts(self) -> tuple[AnyArray | None, ...]:
        return (*self.arrays, self.weight)

    def map(self, change: Callable[[AnyArray], AnyArray]) -> Rows:
        """Change the arrays one by one."""
        return Rows(*(None if part is None else change(part) for part in self._parts))  # type: ignore[arg-type]

    def take(self, rows: int | slice | npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> Rows:
        """Take some of the rows: a view for a number or slice, a copy for row numbers of any shape or a mask."""
        if isinstance(rows, np.ndarray) and rows.dtype.kind != "b":
            return self.map(lambda part: part.take(rows, axis=0))  # twice as fast as indexing
        return self.map(lambda part: part[rows])

    @classmethod
    def stack(cls, parts: Sequence[Rows]) -> Rows:
        """Stack the rows of all parts in their order; either all have a target (an offset, a weight) or none."""
        columns = zip(*(part._parts for part in parts), strict=True)
        return cls(*(None if column[0] is None else np.concatenate(column) for column in columns))  # type: ignore[arg-type]

    # --- as a file ---

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an NPZ file that only the owner may read, with a digest of all its numbers."""
        given = self._numbers()
        write_arrays(path, {**given, "digest": _digest(given)})

    @property
    def digest(self) -> str:
        """SHA-256 of all numbers, in hexadecimal digits."""
        return _digest(self._numbers()).tobytes().hex()

    def _numbers(self) -> dict[str, Array]:
        named = zip(_NAMES, self._parts, strict=True)
        return {name: np.ascontiguousarray(part, dtype=np.float64) for name, part in named if part is not None}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rows:
        """Read the numbers that `save` wrote; raises `DataError` when the file is not as it was written."""
        if not Path(path).is_file():
            raise DataError(f"there is no file {path}")
        try:
            # opened here: numpy would leave a damaged file open
            with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                stored = {name: file[name] for name in file.files}
            digest = stored.pop("digest")
            parts = {name: np.ascontiguousarray(part, dtype=np.float64) for name, part in stored.items()}
        except Exception as error:  # numpy and zipfile raise what they like on damaged bytes
            raise DataError(f"{path} is damaged, or not an NPZ file of rows; make it again") from error
        if "X" not in parts or not parts.keys() <= set(_NAMES):
            has = ", ".join(parts) or "none"
            raise DataError(f"{path} has the arrays {has}, expected X, and y, offset and weight if used")
        if not np.array_equal(digest, _digest(parts)):
            raise DataError(f"{path} is damaged: its numbers do not have the digest that was written; make it again")
        return cls(**parts)


def _digest(parts: Mapping[str, Array]) -> AnyArray:
    """Return the SHA-256 of arrays with their names and shapes."""
    whole = hashlib.sha256()
    for name in sorted(parts):
        whole.update(f"{name}{parts[name].shape}".encode())
        whole.update(parts[name].astype("<f8").tobytes())
    return np.frombuffer(whole.digest(), dtype=np.uint8)
