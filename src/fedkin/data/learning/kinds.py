"""What a column of a table seems to hold: numbers, a category, dates, row numbers, a code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from typing import Literal, NamedTuple

import numpy as np

from fedkin._base import AnyArray, Array
from fedkin.data.ids import is_missing
from fedkin.data.schema import level_text, looks_like_date
from fedkin.data.tables import COMMA_NUMBER, LEADING_ZERO, NUMBERS_PER_WORD, UNIT_NUMBER, is_missing_text, number_of

Kind = Literal["number", "category", "date", "empty"]
#: Text that has more levels than this, or more than half as many as rows, is rather a name or an id.
MOST_LEVELS = 200
_FEW_LEVELS = 10
_MOST_UNITS = 3
#: Beyond so many standard deviations from the median no number is right.
_FAR = 1e6
#: Median deviations in a standard deviation, if numbers are normal.
_DEVIATIONS = 1.4826
#: Rows that tell what is usual in a column.
_SAMPLE = 10_000
_INDEX_NAMES = re.compile(r"|unnamed: ?\d+|index|level_\d+|__index_level_\d+__|row|rownames?|\.\.\.1", re.IGNORECASE)
_CODE_NAME = re.compile(
    r"(^|[_\W])(code|type|kind|class|category|region|zone|district|ward|zip|zipcode|postcode|id|nr|no)$", re.IGNORECASE
)
_ID_NAME = re.compile(r"(^|[_\W])(ids?|uuid|mrn|ssn|nr|serial)$", re.IGNORECASE)
_KEY_NAME = re.compile(r"(^|[_\W])(number|no|key|code|record|case|row|patient|person|customer|order)$", re.IGNORECASE)
_MOST_CODES = 20
_ROWS_PER_CODE = 10


class Looked(NamedTuple):
    """What a column seems to hold, and the levels that it would have as a category."""

    kind: Kind
    levels: tuple[str, ...] = ()


def look_at(column: AnyArray, *, category: bool = False) -> Looked:
    """What a column holds; with ``category`` numbers are levels, too.

    A column of text is a category, unless most of its cells are dates, or all of them are numbers, or so many are, or
    such ones, that the rest must be mistakes: words among amounts such as 17.5 are. Numbers with leading zeros are
    codes, so that they stay text. Amounts with a unit, such as 5.2% or 53 y, are numbers to mend.

    Examples
    --------
    >>> look_at(np.array(["b", "a", None], dtype=object))
    Looked(kind='category', levels=('a', 'b'))
    >>> look_at(np.array(["17.5", "18", "oops", "21"], dtype=object)).kind
    'number'
    >>> look_at(np.array(["1,5", "2,25"], dtype=object)).kind, look_at(np.array(["007", "12"], dtype=object)).kind
    ('number', 'category')
    >>> look_at(np.array(["5.2%", "7%", "6.1%"], dtype=object)).kind, look_at(np.array(["1 star", "2 stars"])).kind
    ('number', 'category')
    """
    if column.dtype.kind in "fb" and not category:
        return Looked("empty" if column.dtype.kind == "f" and np.isnan(column).all() else "number")
    counted = _counted(column)
    if not counted:
        return Looked("empty")
    if category:
        return Looked("category", _levels(counted))
    if 2 * sum(n for cell, n in counted.items() if looks_like_date(cell)) > sum(counted.values()):
        return Looked("date")
    words = {cell: n for cell, n in counted.items() if isinstance(cell, str) and number_of(cell) is None}
    if not words:
        codes = any(isinstance(cell, str) and LEADING_ZERO.fullmatch(cell.strip()) for cell in counted)
        return Looked("category", _levels(counted)) if codes else Looked("number")
    if all(COMMA_NUMBER.fullmatch(cell.strip()) for cell in words) or _have_units(counted):
        return Looked("number")
    wrong = sum(words.values())
    right = sum(counted.values()) - wrong
    if right >= NUMBERS_PER_WORD * wrong or (right > wrong and _amounts(counted, fraction=True)):
        return Looked("number")
    return Looked("category", _levels(counted))


def has_slips(column: AnyArray) -> bool:
    """Whether a target of text rather holds amounts, and a few words by mistake.

    Then three numbers or more differ, and words that hold no digit are fewer than numbers. Labels such as 0, 1, 2, 3+
    are no mistake.

    Examples
    --------
    >>> has_slips(np.array(["17", "18", "oops", "21"], dtype=object))
    True
    >>> has_slips(np.array(["0", "1", "2", "3+"], dtype=object)), has_slips(np.array(["1", "2", "no"], dtype=object))
    (False, False)
    """
    counted = _counted(column)
    words = [cell for cell in counted if isinstance(cell, str) and number_of(cell) is None]
    wrong = sum(counted[word] for word in words)
    plain = bool(words) and not any(character.isdigit() for word in words for character in word)
    return plain and 2 * wrong < sum(counted.values()) and _amounts(counted)


def _amounts(counted: Counter[Hashable], *, fraction: bool = False) -> bool:
    """Whether three cells or more are different numbers; with ``fraction`` one of them not whole."""
    texts = (cell for cell in counted if isinstance(cell, str) and not LEADING_ZERO.fullmatch(cell.strip()))
    numbers = {number for text in texts if (number := number_of(text)) is not None}
    numbers |= {float(cell) for cell in counted if isinstance(cell, (int, float)) and not isinstance(cell, bool)}
    return len(numbers) >= 3 and not (fraction and all(number.is_integer() for number in numbers))


def _have_units(counted: Counter[Hashable]) -> bool:
    """Whether most cells are amounts, some with a unit: one of a few units, and numbers too many for levels."""
    units: Counter[str] = Counter()
    plain, numbers = 0, set()
    for cell, n in counted.items():
        found = UNIT_NUMBER.fullmatch(cell.strip()) if isinstance(cell, str) else None
        if found is None or LEADING_ZERO.fullmatch(found["number"]):
            continue
        unit = found["before"] + found["after"].strip().lower()
        numbers.add(found["number"])
        if unit:
            units[unit] += n
        else:
            plain += n
    told = sum(n for _, n in units.most_common(_MOST_UNITS))
    many = len(numbers) > _FEW_LEVELS or (len(numbers) >= 3 and any("." in number for number in numbers))
    return told > 0 and many and 2 * (plain + told) > sum(counted.values())


def far_row(values: Array) -> int | None:
    """The number that lies absurdly far from all others, by its row; None where there is none.

    Examples
    --------
    >>> far_row(np.array([51.0, 48.0, 5e9, 53.0])), far_row(np.array([0.0, 0.0, 1.0, 0.0]))
    (2, None)
    """
    there = values[np.isfinite(values)]
    some = there[:: 1 + len(there) // _SAMPLE]
    if len(some) < 3:
        return None
    middle = float(np.median(some))
    away = np.abs(some - middle)
    # of a column that is mostly the same: how far the others are
    spread = float(np.median(away)) or float(np.median(away[away > 0]) if away.any() else 0.0)
    if spread == 0 or max(there.max() - middle, middle - there.min()) <= _FAR * _DEVIATIONS * spread:
        return None
    return int(np.nanargmax(np.abs(values - middle)))


def _counted(column: AnyArray) -> Counter[Hashable]:
    """How often each cell occurs, missing ones left out."""
    cells = column.tolist()
    try:
        counted = Counter(cells)
    except TypeError:  # lists and other things that have no place in a table
        counted = Counter(map(str, cells))
    return Counter(
        {
            cell: n
            for cell, n in counted.items()
            if not (is_missing(cell) or (isinstance(cell, str) and is_missing_text(cell)))
        }
    )


def _levels(counted: Counter[Hashable]) -> tuple[str, ...]:
    """Levels as text, numbers by size and words by the alphabet."""
    texts = {level_text(cell) for cell in counted}
    numbers = {text: number_of(text) for text in texts}
    if None in numbers.values():
        return tuple(sorted(texts))
    return tuple(sorted(texts, key=lambda text: (numbers[text], text)))


def too_many_levels(levels: int, rows: int) -> bool:
    """Whether text has so many levels that it is rather a name or an id.

    Examples
    --------
    >>> too_many_levels(480, 500), too_many_levels(3, 4), too_many_levels(40, 1000)
    (True, False, False)
    """
    return levels > MOST_LEVELS or (levels > _FEW_LEVELS and 2 * levels > rows)


def is_row_number(name: str, column: AnyArray) -> bool:
    """Whether a column is an index that was saved along: without a name of its own, and counting rows.

    Examples
    --------
    >>> is_row_number("Unnamed: 0", np.array([0.0, 1.0, 2.0])), is_row_number("", np.array([4.0, 2.0]))
    (True, False)
    """
    if not _INDEX_NAMES.fullmatch(name.strip()) or column.dtype.kind != "f" or column.size == 0:
        return False
    return bool(column[0] in (0.0, 1.0) and (np.diff(column) == 1).all())


def looks_like_code(name: str, column: AnyArray) -> bool:
    """Whether numbers are rather names: few and whole, called a code or a type, or with gaps and far from 0.

    Examples
    --------
    >>> looks_like_code("zip", np.repeat([95608.0, 95610.0, 95815.0], 20))
    True
    >>> looks_like_code("rooms", np.repeat([1.0, 2.0, 3.0], 20))
    False
    """
    if column.dtype.kind != "f":
        return False
    values = column[~np.isnan(column)]
    if values.size < 3 * _ROWS_PER_CODE or (values[:1000] != np.floor(values[:1000])).any():
        return False
    distinct = np.unique(values)
    if not 3 <= distinct.size <= min(_MOST_CODES, values.size // _ROWS_PER_CODE) or (distinct % 1 != 0).any():
        return False
    return bool(_CODE_NAME.search(name)) or bool(distinct[0] >= 100 and np.unique(np.diff(distinct)).size > 1)


def looks_like_id(name: str, column: AnyArray) -> bool:
    """Whether whole numbers rather name rows: called an id, with many values; or a number or key, all different.

    Examples
    --------
    >>> looks_like_id("patient_id", np.arange(1000.0, 1060.0)), looks_like_id("dose", np.arange(60.0) // 2)
    (True, False)
    """
    if column.dtype.kind != "f":
        return False
    values = column[~np.isnan(column)]
    if values.size < 3 * _ROWS_PER_CODE or (values != np.floor(values)).any():
        return False
    distinct = np.unique(values)
    if distinct.size > _MOST_CODES and (_ID_NAME.search(name) or name.endswith(("Id", "ID"))):
        return True
    return distinct.size == values.size and _KEY_NAME.search(name) is not None
