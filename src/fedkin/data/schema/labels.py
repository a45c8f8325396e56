"""Cells as numbers and as levels: what a cell says, whichever file or data frame it came from."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from datetime import date
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from fedkin._base import AnyArray, Array, Index, Mask
from fedkin.data.ids import is_missing
from fedkin.data.tables import is_missing_text, number_of

Label = str | bool | int


class Numbers(NamedTuple):
    """A column read as numbers: NaN where a cell is missing or no number."""

    values: Array
    missing: Mask
    wrong: list[tuple[int, object]]  # row from 0, cell


def parsed_numbers(column: AnyArray) -> Numbers:
    """The numbers of a column, which of its cells are missing, and those that are neither."""
    if column.dtype.kind in "fb":
        values = column.astype(np.float64)
        infinite = np.flatnonzero(np.isinf(values)).tolist()
        return Numbers(values, np.isnan(values), [(row, float(values[row])) for row in infinite])
    values = np.full(len(column), math.nan)
    missing = np.zeros(len(column), dtype=bool)
    wrong: list[tuple[int, object]] = []
    for row, cell in enumerate(column):
        if is_missing(cell) or (isinstance(cell, str) and is_missing_text(cell)):
            missing[row] = True
            continue
        number = number_of(cell) if isinstance(cell, str) else _plain_number(cell)
        if number is None or not math.isfinite(number):
            wrong.append((row, cell))
        else:
            values[row] = number
    return Numbers(values, missing, wrong)


def _plain_number(cell: object) -> float | None:
    return float(cell) if isinstance(cell, (int, float, np.integer, np.floating, Decimal)) else None


_MONTH = re.compile(
    "jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sept?(ember)?|oct(ober)?|nov(ember)?|dec(ember)?"
)
_BESIDE_MONTHS = re.compile(
    "(mon|tues?|wed(nes)?|thu(rs)?|fri|sat(ur)?|sun)(day)?|[ap]m|st|nd|rd|th|of|t|z|[a-z]{2,4}t"
)
_TOKENS = re.compile(r"[^\W\d_]+|\d+")


def looks_like_date(cell: object) -> bool:
    """Whether a cell is a day, as an object or as text (2021-03-04, 04.03.2021, 3/4/21, March 4, 2021, 4-Mar-21).

    Examples
    --------
    >>> looks_like_date("2021-03-04"), looks_like_date("3/4/21"), looks_like_date("1-2")
    (True, True, False)
    >>> looks_like_date("Wed May 21 00:00:00 EDT 2008"), looks_like_date("May"), looks_like_date("may 4 rooms")
    (True, False, False)
    """
    if isinstance(cell, (date, np.datetime64)):
        return True
    if not isinstance(cell, str):
        return False
    if _MONTH.search(cell.lower()):
        return _names_a_month(cell)
    day = cell.strip().replace("T", " ").partition(" ")[0]
    for mark in "-/.":
        parts = day.split(mark)
        if len(parts) == 3 and all(part.isdigit() and len(part) in (1, 2, 4) for part in parts):
            return True
    return False


def _names_a_month(cell: str) -> bool:
    """Whether text is a month by name, a year, perhaps a day, and nothing else but a weekday and a time of day."""
    tokens = _TOKENS.findall(cell.lower())
    words = [token for token in tokens if not token.isdigit()]
    others = [word for word in words if not _MONTH.fullmatch(word)]
    numbers = [token for token in tokens if token.isdigit()]
    if len(words) != len(others) + 1 or not all(map(_BESIDE_MONTHS.fullmatch, others)):
        return False
    return any(len(number) == 4 for number in numbers) or len(numbers) >= 2


def level_text(label: object) -> str:
    """A level or cell as text, the same for 1, 1.0 and "1", and for True, "True" and "TRUE".

    Examples
    --------
    >>> level_text(1.0), level_text("TRUE"), level_text(" A ")
    ('1', 'true', 'A')
    """
    if isinstance(label, (bool, np.bool_)):
        return "true" if label else "false"
    if isinstance(label, (float, np.floating)) and float(label).is_integer():
        return str(int(label))
    text = str(label).strip()
    return text.lower() if text.lower() in ("true", "false") else text


def level_codes(column: AnyArray, levels: Sequence[Label]) -> Index:
    """The number of each cell's level; -1 where it is missing, -2 where it is none of the levels.

    Where levels are 0 and 1, true and false stand for them, and the other way round.

    Examples
    --------
    >>> level_codes(np.array([True, False]), [0, 1]), level_codes(np.array(["b", "", "c"], dtype=object), ["a", "b"])
    (array([1, 0]), array([ 1, -1, -2]))
    """
    known = _Codes(levels)
    if column.dtype.kind in "fb":
        values, which = np.unique(column, return_inverse=True)
        return np.array([known[type(value), value] for value in values.tolist()], dtype=np.int64)[which.reshape(-1)]
    keys = (cell if type(cell) is str else _key(cell) for cell in column)
    return np.fromiter((known[key] for key in keys), dtype=np.int64, count=len(column))


class _Codes(dict[Any, int]):
    """The codes of cells, each worked out once; True, 1 and 1.0 would be one key without their types."""

    def __init__(self, levels: Sequence[Label]) -> None:
        super().__init__()
        self._numbers = {level_text(level): k for k, level in enumerate(levels)}
        for one, other in (({"0", "1"}, {"0": "false", "1": "true"}), ({"false", "true"}, {"false": "0", "true": "1"})):
            if set(self._numbers) == one:
                self._numbers |= {other[text]: k for text, k in list(self._numbers.items())}
                break

    def __missing__(self, key: Any) -> int:
        cell = key if type(key) is str else key[1]
        text = level_text(cell)
        code = self._numbers.get(text, -2)
        if code == -2 and (is_missing(cell) or is_missing_text(text)):
            code = -1
        self[key] = code
        return code


def _key(cell: object) -> tuple[type, object]:
    """A key for any cell, also for lists and other things that have no place in a table."""
    return type(cell), cell if isinstance(cell, Hashable) else str(cell)
