"""Parse cells as missing values, numbers, dates and levels, infer kinds of columns, and report errors in them.

A `Finding` has a code for programs and a text for people. By default rows are numbered as in a spreadsheet: the header
is row 1, the first row of data row 2.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import numpy as np

from fedkin._base import AnyArray, Array, Index, Mask, count, listed
from fedkin.errors import DataError

Label = str | bool | int
#: Function that names a row, numbered from 0, in messages.
RowName = Callable[[int], str]
#: How to treat missing cells: refuse the table, leave out their rows, or fill them in.
Gaps = Literal["refuse", "drop", "fill"]
DATES = "these are dates: turn them into numbers, such as days since a start"
#: Decimal separator of numbers.
DecimalMark = Literal[".", ","]

LARGEST_EXACT_INTEGER = 2**53
MISSING = frozenset({"", "NA", "nan", "NaN", "NAN"})
_INTEGER = re.compile(r"[+-]?[0-9]+")
LEADING_ZERO = re.compile(r"[+-]?0[0-9]+")
_NUMBER = re.compile(
    rf"(?!{LEADING_ZERO.pattern}\Z)[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?[iI]nf|[+-]?Infinity"
)
THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_THOUSANDS_POINTS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3})+(?:,[0-9]*)?")
#: A number with a decimal comma, or with commas between thousands.
COMMA_NUMBER = re.compile(rf"[+-]?[0-9]*,[0-9]+(?:[eE][+-]?[0-9]+)?|{THOUSANDS.pattern}")
#: A number with a unit, or the sign of a currency: 5.2%, 53 y, $ 9,990.
UNIT_NUMBER = re.compile(
    r"(?P<before>[$€£¥]?)\s*(?P<number>[+-]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"\s*(?P<after>(?:[^\W\d_]|[%‰°$€£¥])\D*|)"
)
_TRUTH = {"True": True, "False": False, "true": True, "false": False, "TRUE": True, "FALSE": False}
_MONTH = re.compile(
    "jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sept?(ember)?|oct(ober)?|nov(ember)?|dec(ember)?"
)
_WITH_MONTHS = re.compile("(mon|tues?|wed(nes)?|thu(rs)?|fri|sat(ur)?|sun)(day)?|[ap]m|st|nd|rd|th|of|t|z|[a-z]{2,4}t")
_TOKENS = re.compile(r"[^\W\d_]+|\d+")
#: Text with more levels than this, or with more than half as many levels as rows, is a name or an id.
MOST_LEVELS = 200
_FEW_LEVELS, _MOST_UNITS = 10, 3
#: With this many numbers per word, a column holds numbers with mistakes, not labels.
NUMBERS_PER_WORD = 20
_INDEX_NAMES = re.compile(r"|unnamed: ?\d+|index|level_\d+|__index_level_\d+__|row|rownames?|\.\.\.1", re.IGNORECASE)
_CODE_NAME = re.compile(
    r"(^|[_\W])(code|type|kind|class|category|region|zone|district|ward|zip|zipcode|postcode|id|nr|no)$", re.IGNORECASE
)
_ID_NAME = re.compile(r"(^|[_\W])(ids?|uuid|mrn|ssn|nr|serial)$", re.IGNORECASE)
_KEY_NAME = re.compile(r"(^|[_\W])(number|no|key|code|record|case|row|patient|person|customer|order)$", re.IGNORECASE)
_MOST_CODES, _ROWS_PER_CODE = 20, 10


def is_missing(value: object) -> bool:
    """Return whether a value is None, NaN, NaT or pandas.NA."""
    if value is None:
        return True
    try:
        return bool(value != value)  # NaN and NaT
    except (TypeError, ValueError):  # pandas.NA has no truth value, neither have arrays
        return type(value).__name__ == "NAType"


def is_missing_text(cell: str) -> bool:
    """Return whether a cell of text is missing: empty, NA, nan."""
    return cell.strip() in MISSING


def is_gap(cell: object) -> bool:
    """Return whether a cell is missing, as a value or as text."""
    return is_missing(cell) or (isinstance(cell, str) and is_missing_text(cell))


def unwrapped(values: Any) -> Any:
    """Return a pandas or polars series as an array, a pyarrow array as a list, anything else unchanged."""
    if hasattr(values, "to_pylist"):
        return values.to_pylist()
    return values.to_numpy() if hasattr(values, "to_numpy") else values


# --- columns of text ----------------------------------------------------------------------------------------------


def infer_column(cells: Sequence[str], decimal: DecimalMark = ".") -> AnyArray:
    """Return a column of text as numbers, truth values or text."""
    stripped = {cell: cell.strip() if decimal == "." else _with_point(cell.strip()) for cell in set(cells)}
    distinct = set(stripped.values())
    values = distinct - MISSING

    def column(read: Callable[[str], object], dtype: type) -> AnyArray:
        known = {cell: read(text) for cell, text in stripped.items()}
        return np.fromiter(map(known.__getitem__, cells), dtype=dtype, count=len(cells))

    if values and distinct <= _TRUTH.keys():
        return column(_TRUTH.__getitem__, bool)
    if all(map(_NUMBER.fullmatch, values)) and (values or distinct <= {""}):
        if all(map(_INTEGER.fullmatch, values)) and any(abs(int(cell)) > LARGEST_EXACT_INTEGER for cell in values):
            return column(lambda text: None if text in MISSING else int(text), object)
        return column(lambda text: math.nan if text in MISSING else float(text), np.float64)
    return column(lambda text: text or None, object)


def _with_point(text: str) -> str:
    """Return text with a decimal comma, and perhaps points between thousands, as a number in Python's notation."""
    plain = text.replace(".", "") if _THOUSANDS_POINTS.fullmatch(text) else text
    changed = plain.replace(",", ".", 1)
    return changed if _NUMBER.fullmatch(changed) else text


def number_of(cell: str) -> float | None:
    """Return the number in a cell of text, leading zeros allowed; None if it is not a number."""
    text = cell.strip()
    return float(text) if _NUMBER.fullmatch(text) or LEADING_ZERO.fullmatch(text) else None


class Numbers(NamedTuple):
    """A column read as numbers: NaN for cells that are missing or not numbers."""

    values: Array
    missing: Mask
    wrong: list[tuple[int, object]]  # row from 0, cell


def parsed_numbers(column: AnyArray) -> Numbers:
    """Return the numbers of a column, a mask of its missing cells, and the cells that are neither."""
    if column.dtype.kind in "fb":
        values = column.astype(np.float64, copy=False)
        if np.isfinite(values).all():
            return Numbers(values, np.zeros(len(values), dtype=bool), [])
        infinite = np.flatnonzero(np.isinf(values)).tolist()
        return Numbers(values, np.isnan(values), [(row, float(values[row])) for row in infinite])
    values = np.full(len(column), math.nan)
    missing = np.zeros(len(column), dtype=bool)
    wrong: list[tuple[int, object]] = []
    for row, cell in enumerate(column):
        if is_gap(cell):
            missing[row] = True
            continue
        plain = isinstance(cell, (int, float, np.integer, np.floating, Decimal))
        number = number_of(cell) if isinstance(cell, str) else float(cell) if plain else None
        if number is None or not math.isfinite(number):
            wrong.append((row, cell))
        else:
            values[row] = number
    return Numbers(values, missing, wrong)


# --- dates ----------------------------------------------------------------------------------------------------------


def looks_like_date(cell: object) -> bool:
    """Return whether a cell is a day, as an object or as text (2021-03-04, 04.03.2021, 3/4/21, March 4, 2021)."""
    if not isinstance(cell, str):
        return isinstance(cell, (date, np.datetime64))
    if _MONTH.search(cell.lower()):
        return _names_a_month(cell)
    day = cell.strip().replace("T", " ").partition(" ")[0]
    parts = next((day.split(mark) for mark in "-/." if day.count(mark) == 2), [])
    return bool(parts) and all(part.isdigit() and len(part) in (1, 2, 4) for part in parts)


def _names_a_month(cell: str) -> bool:
    """Return whether text has the name of a month, a year, perhaps a day, a weekday or a time, and nothing else."""
    tokens = _TOKENS.findall(cell.lower())
    words = [token for token in tokens if not token.isdigit()]
    others = [word for word in words if not _MONTH.fullmatch(word)]
    numbers = [token for token in tokens if token.isdigit()]
    if len(words) != len(others) + 1 or not all(map(_WITH_MONTHS.fullmatch, others)):
        return False
    return any(len(number) == 4 for number in numbers) or len(numbers) >= 2


# --- levels ---------------------------------------------------------------------------------------------------------


def level_text(label: object) -> str:
    """Return a level or cell as text, the same for 1, 1.0 and "1", and for True, "True" and "TRUE"."""
    if isinstance(label, (bool, np.bool_)):
        return "true" if label else "false"
    if isinstance(label, (float, np.floating)) and float(label).is_integer():
        return str(int(label))
    text = str(label).strip()
    return text.lower() if text.lower() in ("true", "false") else text


def level_codes(column: AnyArray, levels: Sequence[Label]) -> Index:
    """Return the number of each cell's level; -1 for missing cells, -2 for unknown levels.

    True and false match the levels 1 and 0, and vice versa. Missing cells have the level "" if there is one.
    """
    known = {level_text(level): code for code, level in enumerate(levels)}
    for one, other in (("0 1", "false true"), ("false true", "0 1")):
        if known and known.keys() - {""} <= set(one.split()):
            swapped = dict(zip(one.split(), other.split(), strict=True)) | {"": ""}
            known = known | {swapped[text]: code for text, code in known.items()}
            break

    def code_of(cell: object) -> int:
        text = level_text(cell)
        gap = is_missing(cell) or is_missing_text(text)
        return known.get("" if gap and "" in known else text, -1 if gap else -2)

    if column.dtype.kind in "fb":
        values, which = np.unique(column, return_inverse=True)
        return np.array([code_of(value) for value in values.tolist()], dtype=np.int64)[which.reshape(-1)]
    # True, 1 and 1.0 would be one key without their types; lists cannot be keys
    keys = [(type(cell), cell if isinstance(cell, Hashable) else str(cell)) for cell in column.tolist()]
    codes = {key: code_of(key[1]) for key in set(keys)}
    return np.fromiter(map(codes.__getitem__, keys), dtype=np.int64, count=len(keys))


# --- kinds of columns ------------------------------------------------------------------------------------------------


class ColumnKind(NamedTuple):
    """The inferred kind of a column, with its levels as a category and their counts."""

    kind: Literal["number", "category", "date", "empty"]
    levels: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()


def infer_kind(column: AnyArray) -> ColumnKind:
    """Infer the kind of a column.

    A column of text is a category, unless most of its cells are dates or numbers; the other cells are then mistakes,
    such as words among amounts like 17.5. Numbers with leading zeros are codes and stay text. Amounts with a unit, such
    as 5.2% or 53 y, are numbers to correct.
    """
    if column.dtype.kind in "fb":
        return ColumnKind("empty" if column.dtype.kind == "f" and np.isnan(column).all() else "number")
    return kind_of_counts(count_cells(column))


def count_cells(column: AnyArray) -> Counter[Hashable]:
    """Count the occurrences of each cell that is not missing."""
    cells = column.tolist()
    try:
        counted = Counter(cells)
    except TypeError:  # lists and other values that do not belong in a table
        counted = Counter(map(str, cells))
    return Counter({cell: n for cell, n in counted.items() if not is_gap(cell)})


def kind_of_counts(counted: Counter[Hashable], category: bool = False) -> ColumnKind:
    """Infer the kind of a column from the counts of its cells; with ``category`` numbers are also levels."""
    if not counted:
        return ColumnKind("empty")
    if category:
        return _levels(counted)
    if 2 * sum(n for cell, n in counted.items() if looks_like_date(cell)) > sum(counted.values()):
        return ColumnKind("date")
    words = {cell: n for cell, n in counted.items() if isinstance(cell, str) and number_of(cell) is None}
    if not words:
        codes = any(isinstance(cell, str) and LEADING_ZERO.fullmatch(cell.strip()) for cell in counted)
        return _levels(counted) if codes else ColumnKind("number")
    if all(COMMA_NUMBER.fullmatch(cell.strip()) for cell in words) or _have_units(counted):
        return ColumnKind("number")
    wrong = sum(words.values())
    right = sum(counted.values()) - wrong
    if right >= NUMBERS_PER_WORD * wrong or (right > wrong and _amounts(counted, fraction=True)):
        return ColumnKind("number")
    return _levels(counted)


def target_kind(counted: Counter[Hashable], category: bool) -> ColumnKind:
    """Infer the kind of a text target: classes, unless it holds amounts with a few mistaken words."""
    found = kind_of_counts(counted, category)
    if category:
        return found
    if found.kind == "category":
        words = [cell for cell in counted if isinstance(cell, str) and number_of(cell) is None]
        few = 2 * sum(counted[word] for word in words) < sum(counted.values())
        digits = any(character.isdigit() for word in words for character in word)  # labels such as 3+
        return ColumnKind("number") if words and few and not digits and _amounts(counted) else found
    as_text = _levels(counted)
    two = len(as_text.levels) <= 2 and all(number_of(level) is not None for level in as_text.levels)
    return as_text if found.kind == "number" and two else found  # 0 and 1 stored as text


def _levels(counted: Counter[Hashable]) -> ColumnKind:
    """Return the levels as text, numbers by size and words in alphabetical order."""
    counts: Counter[str] = Counter()
    for cell, n in counted.items():
        counts[level_text(cell)] += n
    numbers = {text: number_of(text) for text in counts}
    ordered = sorted(counts) if None in numbers.values() else sorted(counts, key=lambda text: (numbers[text], text))
    return ColumnKind("category", tuple(ordered), tuple(counts[text] for text in ordered))


def _amounts(counted: Counter[Hashable], *, fraction: bool = False) -> bool:
    """Return whether at least three cells are different numbers; with ``fraction``, at least one is not whole."""
    texts = (cell for cell in counted if isinstance(cell, str) and not LEADING_ZERO.fullmatch(cell.strip()))
    numbers = {number for text in texts if (number := number_of(text)) is not None}
    numbers |= {float(cell) for cell in counted if isinstance(cell, (int, float)) and not isinstance(cell, bool)}
    return len(numbers) >= 3 and not (fraction and all(number.is_integer() for number in numbers))


def _have_units(counted: Counter[Hashable]) -> bool:
    """Return whether most cells are amounts, some with one of a few units, with too many values for levels."""
    units, numbers = Counter[str](), set()
    for cell, n in counted.items():
        found = UNIT_NUMBER.fullmatch(cell.strip()) if isinstance(cell, str) else None
        if found is None or LEADING_ZERO.fullmatch(found["number"]):
            continue
        numbers.add(found["number"])
        units[found["before"] + found["after"].strip().lower()] += n
    plain = units.pop("", 0)
    common = sum(n for _, n in units.most_common(_MOST_UNITS))
    many = len(numbers) > _FEW_LEVELS or (len(numbers) >= 3 and any("." in number for number in numbers))
    return common > 0 and many and 2 * (plain + common) > sum(counted.values())


def too_many_levels(levels: int, rows: int) -> bool:
    """Return whether text has so many levels that it is a name or an id."""
    return levels > MOST_LEVELS or (levels > _FEW_LEVELS and 2 * levels > rows)


def is_row_number(name: str, column: AnyArray) -> bool:
    """Return whether a column is a saved index: unnamed, and counting rows."""
    if not _INDEX_NAMES.fullmatch(name.strip()) or column.dtype.kind != "f" or column.size == 0:
        return False
    return bool(column[0] in (0.0, 1.0) and (np.diff(column) == 1).all())


def looks_like_name(name: str, column: AnyArray) -> Literal["id", "code", ""]:
    """Return whether whole numbers look like ids of rows, or codes of a few kinds, by their name and values."""
    values = column[~np.isnan(column)] if column.dtype.kind == "f" else np.empty(0)
    if values.size < 3 * _ROWS_PER_CODE or (values != np.floor(values)).any():
        return ""
    distinct = np.unique(values)
    if distinct.size > _MOST_CODES and (_ID_NAME.search(name) or name.endswith(("Id", "ID"))):
        return "id"
    if distinct.size == values.size and _KEY_NAME.search(name):
        return "id"
    few = 3 <= distinct.size <= min(_MOST_CODES, values.size // _ROWS_PER_CODE)
    uneven = distinct[0] >= 100 and np.unique(np.diff(distinct)).size > 1
    return "code" if few and (_CODE_NAME.search(name) or uneven) else ""


# --- findings ---------------------------------------------------------------------------------------------------------


def sheet_row(row: int) -> str:
    """Name a row as numbered in a spreadsheet."""
    return f"row {row + 2}"


def frame_row(row: int) -> str:
    """Name a row of a data frame or of arrays, numbered from 0."""
    return f"row {row} (from 0)"


@dataclass(frozen=True)
class Finding:
    """An error or remark about a column."""

    column: str  # "" for the table as a whole
    text: str  # the problem, where it is, and what to do
    code: str = "other"  # "missing", "unknown_level", "not_number", "out_of_range", ...
    refuses: bool = True  # whether it must be fixed before rows can be used; False for a remark

    def __str__(self) -> str:
        return f"{self.column}: {self.text}" if self.column else self.text


class Hints(NamedTuple):
    """Proposals in findings, which depend on the interface."""

    fill: str = "fill them in, or leave these rows out"  # for missing cells
    empty: str = ""  # an option to add if a wrong cell is left empty
    more: str = ""  # follows every finding about numbers
    names: str = ""  # follows if many cells are not numbers


def raise_findings(findings: Iterable[Finding]) -> None:
    """Raise one `DataError` with all serious findings, if any."""
    serious = [finding for finding in findings if finding.refuses]
    if len(serious) == 1:
        raise DataError(f"the table does not fit: {serious[0]}")
    if serious:
        lines = "\n".join(f"  {finding}" for finding in serious)
        raise DataError(f"the table does not fit ({count(len(serious), 'finding')}):\n{lines}")


def near_names(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are most similar to one, ignoring case and blanks."""
    by_lower = {word.strip().lower(): word for word in known}
    return [by_lower[word] for word in difflib.get_close_matches(name.strip().lower(), by_lower, most, cutoff)]


def near_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a suggestion of similar names to append to a message; "" if there are none."""
    similar = near_names(name, known, 3, cutoff)
    return f" (did you mean {' or '.join(map(repr, similar))}?)" if similar else ""


def missing_column(name: str, present: Sequence[str], wanted: Sequence[str]) -> Finding:
    """Report a missing column, with the name that was likely meant."""
    others, short = [one for one in present if one not in wanted], name.lower()
    near = near_names(name, others)
    near = near or [one for one in others if short in one.lower() or (len(one) > 2 and one.lower() in short)]
    has = f"the table has {listed(present, 20)}" if present else "the table has no columns"
    guess = f"did you mean {near[0]!r}? Then rename it" if near else has
    return Finding(name, f"there is no such column; {guess}", "no_column")


def number_hint(cells: Sequence[object]) -> str:
    """Return advice about cells that are not numbers; "" if there is none."""
    first = cells[0]
    if looks_like_date(first):
        return "turn dates into numbers, for example an age in years or days since admission"
    with_commas = [cell.strip() for cell in cells if isinstance(cell, str) and "," in cell]
    if with_commas and all(map(THOUSANDS.fullmatch, with_commas)):
        return "thousands commas: remove them (if they are decimal commas, write points)"
    text = first.strip() if isinstance(first, str) else ""
    if COMMA_NUMBER.fullmatch(text):
        return "write decimal points, not commas"
    if text[:1] in ("<", ">"):
        return "a limit of detection is not a value: agree on what to write there"
    if text[:1].isdigit() or (text and UNIT_NUMBER.fullmatch(text)):
        return "leave units and remarks out of the cells"
    return ""


# --- natural cubic splines ------------------------------------------------------------------------------------------

# The columns are the cardinal basis without its first function (Wood 2017, section 5.3.1): the coefficient of a column
# at a knot is how much higher the curve is there than at the first knot. Beyond the outer knots the curve is straight.

#: Default number of knots, at equally spaced quantiles between the outer ones (Harrell 2015, section 2.4.6).
N_KNOTS, OUTER = 5, (0.05, 0.95)
_DENSE = 64  # grid points between two knots for the range of a column


def natural_basis(values: Array, knots: Sequence[float]) -> Array:
    """Return the columns ``(n, K - 1)`` of a natural cubic spline with K knots; NaN for NaN values."""
    spline, inside = _cardinal(knots), np.clip(values, knots[0], knots[-1])
    beyond = (values - inside)[:, None]
    slope = np.where(beyond < 0, spline(knots[0], 1), spline(knots[-1], 1))
    return np.asarray((spline(inside) + beyond * slope)[:, 1:])


def _cardinal(knots: Sequence[float]) -> Any:
    """Return the natural splines that are 1 at one knot and 0 at the others."""
    from scipy.interpolate import CubicSpline  # which most programs start without

    return CubicSpline(knots, np.eye(len(knots)), bc_type="natural")


def basis_range(knots: Sequence[float], low: float, high: float) -> tuple[Array, Array]:
    """Return bounds ``(K - 1,)`` of the columns for values from low to high."""
    ends = np.unique([low, *(knot for knot in knots if low < knot < high), high])
    grid = np.linspace(ends[:-1], ends[1:], _DENSE + 1).reshape(-1)
    found = natural_basis(grid, knots)
    # largest distance of a function with these second derivatives from its chord between grid points
    beyond = (np.diff(ends).max() / _DENSE) ** 2 / 8 * np.abs(_cardinal(knots)(knots, 2))[:, 1:].max()
    return found.min(axis=0) - beyond, found.max(axis=0) + beyond


def quantile_knots(values: Array, n_knots: int = N_KNOTS) -> tuple[float, ...]:
    """Return knots at quantiles, rounded to about three digits; () for fewer than three distinct values."""
    known = values[np.isfinite(values)]
    distinct = np.unique(known)
    if distinct.size <= n_knots:
        return tuple(distinct.tolist()) if distinct.size > 2 else ()
    digits = 2 - int(np.floor(np.log10(distinct[-1] - distinct[0])))
    for cells in (known, distinct):  # if most values are equal, quantiles of the distinct ones
        found = np.quantile(cells, np.linspace(*OUTER, n_knots))
        if np.unique(np.round(found, digits)).size == n_knots:
            return tuple(np.round(found, digits).tolist())
    return tuple(found.tolist())
