"""The cells of a CSV file: reading them as text, telling what a column holds, and what went wrong with a number."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedkin._base import AnyArray, Array, count, listed
from fedkin.errors import DataError

LARGEST_EXACT_INTEGER = 2**53
_MISSING = frozenset({"", "NA", "nan", "NaN", "NAN"})
_NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
_INFINITIES = frozenset({"inf", "-inf", "+inf", "Inf", "-Inf", "Infinity", "-Infinity"})
_NUMBER_TEXT = re.compile(r"[0-9+\-.eE\n]*")
_SPECIAL_NUMBER = re.compile(r"^[+-]?(?:0[0-9]+|[0-9]{16,})$", re.MULTILINE)  # a leading zero, or maybe beyond 2**53
_INTEGER = re.compile(r"[+-]?[0-9]+")
LEADING_ZERO = re.compile(r"[+-]?0[0-9]+")
THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?")
#: A number with a decimal comma, or with commas between thousands.
COMMA_NUMBER = re.compile(rf"[+-]?[0-9]*,[0-9]+(?:[eE][+-]?[0-9]+)?|{THOUSANDS.pattern}")
#: A number with a unit, or the sign of a currency: 5.2%, 53 y, $ 9,990.
UNIT_NUMBER = re.compile(
    r"(?P<before>[$€£¥]?)\s*(?P<number>[+-]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"\s*(?P<after>(?:[^\W\d_]|[%‰°$€£¥])\D*|)"
)
#: So many numbers for each word make a column of numbers with mistakes, not of labels.
NUMBERS_PER_WORD = 20
_TRUTH = {"True": True, "False": False, "true": True, "false": False, "TRUE": True, "FALSE": False}


def read_cells(path: str | os.PathLike[str]) -> tuple[list[str], list[list[str]]]:
    """Header and columns of a CSV file as text, without any inference.

    Returns
    -------
    header : list of str, length c
    columns : list of c lists of str
    """
    path = Path(path)
    text = decoded(path)
    rows: list[list[str]] = []
    header: list[str] | None = None
    line = 0
    try:
        for line, row in csv_rows(text):
            if header is None:
                header = [name.strip() for name in row]
            elif len(row) != len(header):
                commas = len(row) > len(header) and delimiter_of(text) == ","
                points = ", or write decimal points, not commas, and none between thousands" if commas else ""
                raise DataError(
                    f"{path}, line {line}: {count(len(row), 'cell')}, but the header has {len(header)}; "
                    f"add or remove cells, or put quotes around a cell that contains the separator{points}"
                )
            else:
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {line + 1}: {error}; check the quotes around this cell") from None
    if header is None:
        raise DataError(f"{path} is empty: expected a header line and at least one row")
    check_header(path, header)
    columns = [list(cells) for cells in zip(*rows, strict=True)] if rows else [[] for _ in header]
    return header, columns


def check_header(path: Path, header: Sequence[str]) -> None:
    """Raise `DataError` when columns have the same name, with all such names."""
    twice = [name for name, times in Counter(header).items() if times > 1]
    if twice:
        raise DataError(f"{path}, line 1: several columns are called {listed(twice, 10)}; rename or remove all but one")


def csv_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file, the header first, each with the line on which it ends; blank lines are left out."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter_of(text), strict=True)
    for row in reader:
        if row:
            yield reader.line_num, row


def delimiter_of(text: str) -> str:
    """What parts the cells: the first of comma, semicolon, tab and bar that is in the header.

    Examples
    --------
    >>> delimiter_of("site;dose"), delimiter_of("site|dose"), delimiter_of("dose")
    (';', '|', ',')
    """
    first_line = text.lstrip("\r\n").partition("\n")[0]
    return next((mark for mark in ",;\t|" if mark in first_line), ",")


def infer_column(cells: Sequence[str]) -> AnyArray:
    """A column from its text: numbers, truth values or text.

    Examples
    --------
    >>> infer_column(["1", "", "2.5"]), infer_column(["007", "12"])
    (array([1. , nan, 2.5]), array(['007', '12'], dtype=object))
    """
    quick = _quick_numbers(cells)
    if quick is not None:
        return quick
    stripped = [cell.strip() for cell in cells]
    quick = _quick_numbers(stripped)
    if quick is not None:
        return quick
    distinct = set(stripped)
    values = distinct - _MISSING
    if distinct and distinct <= _TRUTH.keys():
        return np.array([_TRUTH[cell] for cell in stripped], dtype=bool)
    if all(_is_number(cell) for cell in values) and (values or distinct <= {""}):
        numbers = {cell: math.nan if cell in _MISSING else float(cell) for cell in distinct}
        if not any(_too_large(cell) for cell in values):
            return np.array([numbers[cell] for cell in stripped], dtype=np.float64)
        if all(_INTEGER.fullmatch(cell) for cell in values):
            identifiers = (None if cell in _MISSING else int(cell) for cell in stripped)
            return np.fromiter(identifiers, dtype=object, count=len(stripped))
        return np.array([numbers[cell] for cell in stripped], dtype=np.float64)
    return np.fromiter((cell if cell else None for cell in stripped), dtype=object, count=len(stripped))


def _quick_numbers(cells: Sequence[str]) -> Array | None:
    """The column if all its cells are ordinary numbers or empty, looking at all that differ at once; else None."""
    distinct = set(cells)
    text = "\n".join(distinct)
    if not _NUMBER_TEXT.fullmatch(text) or _SPECIAL_NUMBER.search(text):
        return None
    try:
        numbers = {cell: float(cell) if cell else math.nan for cell in distinct}
        return np.fromiter(map(numbers.__getitem__, cells), dtype=np.float64, count=len(cells))
    except ValueError:
        return None


def _is_number(cell: str) -> bool:
    if cell in _INFINITIES:
        return True
    # The characters first: float() would also take "1_000" and digits of other scripts.
    if not _NUMBER_CHARACTERS.issuperset(cell) or LEADING_ZERO.fullmatch(cell):
        return False
    try:
        float(cell)
    except ValueError:
        return False
    return True


def number_of(cell: str) -> float | None:
    """The number that a cell of text stands for, leading zeros allowed; None when it is no number.

    Examples
    --------
    >>> number_of("07"), number_of("1e3"), number_of("1,5")
    (7.0, 1000.0, None)
    """
    text = cell.strip()
    return float(text) if _is_number(text) or LEADING_ZERO.fullmatch(text) else None


def is_missing_text(cell: str) -> bool:
    """Whether a cell of text stands for nothing: empty, NA, nan."""
    return cell.strip() in _MISSING


def _too_large(cell: str) -> bool:
    return len(cell) > 15 and _INTEGER.fullmatch(cell) is not None and abs(int(cell)) > LARGEST_EXACT_INTEGER


def decoded(path: Path) -> str:
    """The text of a file, without a byte order mark; raises `DataError` when it is absent or not UTF-8."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"there is no file {path}: check the path") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a directory, expected a file") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: the byte {content[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        ) from None
