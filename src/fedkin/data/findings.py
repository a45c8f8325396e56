"""Check the cells of a column. A `Finding` has a code and data; its text is made here, when it is shown.

Unless a reader names rows otherwise, they are counted as a spreadsheet counts them: the header is row 1, the first row
of data row 2.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fedkin._base import AnyArray, Array, Mask, count, listed
from fedkin.data.cells import (
    COMMA_NUMBER,
    THOUSANDS,
    UNIT_NUMBER,
    Label,
    level_codes,
    level_text,
    looks_like_date,
    parsed_numbers,
)
from fedkin.errors import DataError

Range = tuple[float | None, float | None]
#: Names a row, numbered from 0, in messages.
RowName = Callable[[int], str]
#: What becomes of missing cells: they refuse the table, their rows are left out, or they are filled in.
Gaps = Literal["refuse", "drop", "fill"]

#: Numbers that people write where there is none.
_MISSING_CODES = frozenset({-1.0, -9.0, -99.0, -999.0, -9999.0, 9.0, 99.0, 999.0, 9999.0, 99999.0})
#: No amount is larger; squares of such numbers, and their sums, are finite.
_LARGEST = 1e100
#: Cells and levels that a finding shows.
_SHOWN = 3


def sheet_row(row: int) -> str:
    """Name a row as a spreadsheet counts it."""
    return f"row {row + 2}"


def frame_row(row: int) -> str:
    """Name a row of a data frame or of arrays as Python counts it."""
    return f"row {row} (from 0)"


@dataclass(frozen=True)
class Finding:
    """Something about a column that its owner should know.

    >>> print(Finding("age", "missing", rows=(7,), values={"n": 3, "total": 40}))
    age: is missing in 3 of 40 rows, first in row 9; fill them in, or leave these rows out
    """

    column: str  # "" for the table as a whole
    code: str  # "missing", "unknown_level", "not_number", "out_of_range", ...
    refuses: bool = True  # whether rows cannot be used before it is fixed; False for a remark
    rows: tuple[int, ...] = ()  # the rows concerned, numbered from 0, or the first of them
    values: Mapping[str, Any] = field(default_factory=dict)  # cells, counts, limits and hints, by the code
    at: RowName = field(default=sheet_row, repr=False, compare=False)  # names a row in the text

    @classmethod
    def from_text(cls, column: str, text: str, *, refuses: bool = True, code: str = "text") -> Finding:
        """Make a finding whose text is known."""
        return cls(column, code, refuses, values={"text": text})

    def hinted(self, **values: Any) -> Finding:
        """Return the finding with more values, such as hints on what else may be done."""
        return replace(self, values={**self.values, **values})

    @property
    def text(self) -> str:
        """What is wrong, where, and what to do."""
        text: str = self.values["text"] if "text" in self.values else _TEXTS[self.code](self)
        return f"{text}{self.values.get('more', '')}"

    def __str__(self) -> str:
        return f"{self.column}: {self.text}" if self.column else self.text


def raise_findings(findings: Iterable[Finding]) -> None:
    """Raise one `DataError` with all findings that refuse, if there are any."""
    serious = [finding for finding in findings if finding.refuses]
    if len(serious) == 1:
        raise DataError(f"the table does not fit: {serious[0]}")
    if serious:
        lines = "\n".join(f"  {finding}" for finding in serious)
        raise DataError(f"the table does not fit ({count(len(serious), 'finding')}):\n{lines}")


def near_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Guess what was meant by a name, to follow it in a message; "" when nothing is similar."""
    by_lower = {word.lower(): word for word in known}
    similar = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)
    return f" (did you mean {' or '.join(repr(by_lower[word]) for word in similar)}?)" if similar else ""


# --- checks -----------------------------------------------------------------------------------------------------


def missing_column(name: str, present: Sequence[str], wanted: Sequence[str]) -> Finding:
    """Report a column that is not there, with the name that was likely meant."""
    known = {one.strip().lower(): one for one in present if one not in wanted}
    near = difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=0.6)
    near = near or [one for one in known if name.lower() in one or (len(one) > 2 and one in name.lower())][:1]
    return Finding(name, "no_column", values={"present": tuple(present), "near": known[near[0]] if near else None})


def check_category(
    name: str, column: AnyArray, levels: Sequence[Label], gaps: Gaps, at: RowName, *, open_ended: bool = False
) -> list[Finding]:
    """Find missing and unknown levels, and a constant column; an ``open_ended`` one may have unknown levels."""
    codes = level_codes(column, levels)
    findings = _missing(name, codes == -1, gaps, at)
    unknown = tuple(np.flatnonzero(codes == -2).tolist())
    if unknown:
        seen = Counter(level_text(column[row]) for row in unknown)
        values = {"seen": seen, "known": tuple(map(level_text, levels)), "averaged": open_ended}
        findings.append(Finding(name, "unknown_level", not open_ended, unknown, values, at))
    found = np.unique(codes[codes >= 0])
    if found.size == 1 and len(column) > 1 and not unknown:
        findings.append(Finding(name, "constant", False, values={"value": repr(level_text(levels[int(found[0])]))}))
    return findings


def check_number(
    name: str, column: AnyArray, unit: str, plausible: Range, gaps: Gaps, at: RowName, *, whole: bool = False
) -> list[Finding]:
    """Find missing values, text, values out of range, fractions among counts, and a constant column."""
    numbers = parsed_numbers(column)
    findings = _missing(name, numbers.missing, gaps, at)
    if numbers.wrong:
        rows, cells = zip(*numbers.wrong, strict=True)
        findings.append(Finding(name, "not_number", True, rows, {"cells": cells, "total": len(column)}, at))
    usable = np.flatnonzero(np.isfinite(numbers.values))
    values = numbers.values[usable]

    def among(code: str, which: Mask, **more: Any) -> Finding:
        rows = tuple(usable[which].tolist())
        return Finding(name, code, True, rows, {"numbers": values[which], "total": values.size, **more}, at)

    large = np.abs(values) > _LARGEST
    if large.any():
        return [*findings, among("too_large", large)]
    low, high = plausible
    if whole:
        low = 0.0 if low is None else low
        fractions = values != np.floor(values)
        if fractions.any():
            findings.append(among("not_whole", fractions))
    outside = (values < (-np.inf if low is None else low)) | (values > (np.inf if high is None else high))
    if outside.any():
        findings.append(among("out_of_range", outside, low=low, high=high, unit=f" {unit}" if unit else ""))
    elif values.size > 1 and values.min() == values.max():
        findings.append(Finding(name, "constant", False, values={"value": f"{values[0]:g}"}))
    return findings


def _missing(name: str, missing: Mask, gaps: Gaps, at: RowName) -> list[Finding]:
    if not missing.any() or gaps == "fill":
        return []
    rows = tuple(np.flatnonzero(missing).tolist())
    every = len(rows) == len(missing) > 1
    values = {"n": len(rows), "total": len(missing), "dropped": gaps == "drop"}
    return [Finding(name, "missing", every or gaps != "drop", rows, values, at)]


# --- texts ------------------------------------------------------------------------------------------------------


def _no_column(one: Finding) -> str:
    near, present = one.values["near"], one.values["present"]
    if near is not None:
        return f"there is no such column; is {near!r} what is meant? Then rename it"
    has = f"the table has {listed(present, 20)}" if present else "the table has no columns"
    return f"there is no such column; {has}"


def _missing_text(one: Finding) -> str:
    n, total = one.values["n"], one.values["total"]
    if n == total > 1:
        return "is missing in every row"
    hint = one.values.get("fill", "fill them in, or leave these rows out")
    hint = "these rows are left out" if one.values.get("dropped") else hint
    return f"is missing in {n} of {count(total, 'row')}, first in {one.at(one.rows[0])}; {hint}"


def _unknown_level(one: Finding) -> str:
    seen, known = one.values["seen"], one.values["known"]
    shown = ", ".join(f"{text!r} ({count(n, 'row')})" for text, n in seen.most_common(_SHOWN))
    more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
    text = f"unknown level {shown}{more}, first in {one.at(one.rows[0])}; the known ones are {listed(known, 12)}"
    first, lower = seen.most_common(1)[0][0], {level.lower(): level for level in known}
    near = difflib.get_close_matches(first.lower(), lower, n=1, cutoff=0.7)
    text += f"; is {first!r} meant to be {lower[near[0]]!r}?" if near else ""
    return f"{text}; these rows are predicted as an average over the known ones" if one.values["averaged"] else text


def _not_number(one: Finding) -> str:
    cells, n = one.values["cells"], len(one.rows)
    named = [repr(cell) if isinstance(cell, (str, float)) else str(cell) for cell in cells[:_SHOWN]]
    shown = ", ".join(f"{cell} in {one.at(row)}" for cell, row in zip(named, one.rows, strict=False))
    more = f" and {n - _SHOWN} more" if n > _SHOWN else ""
    wrong = "is not a number" if n == 1 else "are not numbers"
    return f"{n} of {one.values['total']} cells {wrong}: {shown}{more}; {_number_hint(cells, one)}"


def _number_hint(cells: Sequence[object], one: Finding) -> str:
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
    return _correct(one)


def _correct(one: Finding) -> str:
    option = one.values.get("empty")
    return "correct the cell, or leave it empty" + (f" and add {option}" if option else "")


def _some(n: int, one: Finding) -> str:
    return f"{n} of {one.values['total']} values {'is' if n == 1 else 'are'}"


def _first(numbers: Array, rows: Sequence[int] | AnyArray, one: Finding) -> str:
    return f"{numbers[0]:g} in {one.at(int(rows[0]))}"


def _out_of_range(one: Finding) -> str:
    numbers, unit, total = one.values["numbers"], one.values["unit"], one.values["total"]
    low, high, rows = one.values["low"], one.values["high"], np.array(one.rows)
    below = numbers < (-np.inf if low is None else low)
    sides = [(below, "below", low, "lowest"), (~below, "above", high, "highest")]
    if 2 * numbers.size > total:
        which, side, limit, _ = max(sides, key=lambda each: int(each[0].sum()))
        hint = _power_of_ten(numbers, low, high) or f"first {_first(numbers, rows, one)}: check unit and contract"
        return f"{which.sum() / total:.0%} of values are {side} {limit:g}{unit}; {hint}"
    parts = [
        f"{_some(int(which.sum()), one)} {side} {limit:g}{unit}, the {extreme} plausible value: "
        f"{'first ' if which.sum() > 1 else ''}{_first(numbers[which], rows[which], one)}"
        for which, side, limit, extreme in sides
        if which.any()
    ]
    common, times = Counter(numbers.tolist()).most_common(1)[0]
    if common in _MISSING_CODES and times > 1:
        parts.append(f"{common:g} occurs {times} times: if it stands for a missing value, leave the cell empty")
    return "; ".join(parts)


def _power_of_ten(numbers: Array, low: float | None, high: float | None) -> str:
    """Return by which power of ten nearly all numbers get into the range, as in grams for kilograms; "" for none."""
    powers = [power for power in (1, 2, 3, 6, -1, -2, -3, -6) if low is not None and high is not None]
    for power in powers:
        scaled = numbers / 10.0**power
        if ((scaled >= low) & (scaled <= high)).mean() > 0.95:  # type: ignore[operator]
            how = "divided by" if power > 0 else "times"
            return f"{how} {10 ** abs(power)} they fit: another unit?"
    return ""


_TEXTS: Mapping[str, Callable[[Finding], str]] = {
    "no_column": _no_column,
    "no_rows": lambda one: "the table has no rows",
    "no_site": lambda one: (
        f"is empty in {count(len(one.rows), 'row')}, first in {one.at(one.rows[0])}, so they belong to no site"
    ),
    "missing": _missing_text,
    "unknown_level": _unknown_level,
    "constant": lambda one: f"is {one.values['value']} in every row",
    "not_number": _not_number,
    "too_large": lambda one: (
        f"{_some(len(one.rows), one)} too large to compute with: "
        f"{_first(one.values['numbers'], one.rows, one)}; {_correct(one)}"
    ),
    "not_whole": lambda one: (
        f"{_some(len(one.rows), one)} not whole, but counts are: {_first(one.values['numbers'], one.rows, one)}"
    ),
    "out_of_range": _out_of_range,
}
