"""Summaries and questions as plain numbers and names, and back: every entry checked, faults told in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from fedkin._base import Array
from fedkin.errors import DataError

INFINITE = "infinite"  # JSON has no infinity


def upper_triangle(matrix: Array) -> list[list[float]]:
    """The rows of a symmetric matrix from the diagonal on."""
    return [row[k:].tolist() for k, row in enumerate(matrix)]


class Reader:
    """Entries of a plain mapping, each asked for once; ``what`` begins every error."""

    def __init__(self, plain: object, what: str) -> None:
        self.what = what
        if not isinstance(plain, Mapping):
            self.refuse(f"is {_kind(plain)}, expected named entries")
        self.left: dict[str, Any] = dict(plain)

    def refuse(self, why: str) -> NoReturn:
        """Raise the error that says why."""
        raise DataError(f"{self.what} {why}; ask for it again")

    def take(self, name: str) -> Any:
        """The entry of that name."""
        if name not in self.left:
            self.refuse(f"has no entry {name!r}")
        return self.left.pop(name)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            self.refuse(f"has {_kind(value)} for {name!r}, expected a text")
        return str(value)

    def whole(self, name: str, least: int = 0) -> int:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(f"has {value!r} for {name!r}, expected a whole number of at least {least}")
        return int(value)

    def number(self, name: str, *, infinite: bool = False) -> float:
        value = self.take(name)
        return np.inf if infinite and value == INFINITE else self._number(value, name)

    def numbers(self, name: str, length: int) -> Array:
        """A list of that length."""
        return np.array(self._list(self.take(name), name, length), dtype=np.float64)

    def matrix(self, name: str, rows: int, columns: int) -> Array:
        """As many lists as ``rows``, each of ``columns`` numbers."""
        value = self.take(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != rows:
            self.refuse(f"needs {rows} lists for {name!r}")
        return np.array([self._list(row, name, columns) for row in value], dtype=np.float64).reshape(rows, columns)

    def symmetric(self, name: str, size: int) -> Array:
        """A symmetric matrix ``(size, size)``, given by its rows from the diagonal on."""
        rows = self.take(name)
        if not isinstance(rows, Sequence) or isinstance(rows, str) or len(rows) != size:
            self.refuse(f"needs {size} lists for {name!r}, each shorter by one than the one before")
        matrix = np.zeros((size, size))
        for k, row in enumerate(rows):
            matrix[k, k:] = matrix[k:, k] = self._list(row, name, size - k)
        return matrix

    def names(self, name: str) -> tuple[str, ...]:
        """A list of different texts."""
        value = self.take(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
            self.refuse(f"needs a list of names for {name!r}")
        if len(set(value)) < len(value):
            self.refuse(f"has a name twice in {name!r}")
        return tuple(value)

    def done(self) -> None:
        """Raise when there are entries that nobody asked for."""
        if self.left:
            self.refuse(f"has the unknown entry {next(iter(self.left))!r}")

    def _list(self, value: Any, name: str, length: int) -> list[float]:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != length:
            found = (
                f"{len(value)} numbers" if isinstance(value, Sequence) and not isinstance(value, str) else _kind(value)
            )
            self.refuse(f"has {found} in {name!r}, expected {length}")
        return [self._number(one, name) for one in value]

    def _number(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            self.refuse(f"has {value!r} in {name!r}, expected a finite number")
        return float(value)


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
