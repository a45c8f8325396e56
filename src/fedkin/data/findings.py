"""Check the cells of a column. A `Finding` has a code for programs and a text for people.

Unless a reader names rows otherwise, they are counted as a spreadsheet counts them: the header is row 1, the first row
of data row 2.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fedkin._base import AnyArray, Mask, count, listed
from fedkin.data.cells import (
    COMMA_NUMBER,
    NUMBERS_PER_WORD,
    THOUSANDS,
    UNIT_NUMBER,
    Label,
    level_codes,
    level_text,
    looks_like_date,
    parsed_numbers,
)
from fedkin.errors import DataError

#: Names a row, numbered from 0, in messages.
RowName = Callable[[int], str]
#: What becomes of missing cells: they refuse the table, their rows are left out, or they are filled in.
Gaps = Literal["refuse", "drop", "fill"]

#: Numbers that people write where there is none.
_MISSING_CODES = frozenset({-1.0, -9.0, -99.0, -999.0, -9999.0, 9.0, 99.0, 999.0, 9999.0, 99999.0})
#: No amount is larger; squares of such numbers, and their sums, are finite.
_LARGEST = 1e100
DATES = "these are dates: turn them into numbers, such as days since a start"
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
    """Something about a column that its owner should know."""

    column: str  # "" for the table as a whole
    text: str  # what is wrong, where, and what to do
    code: str = "other"  # "missing", "unknown_level", "not_number", "out_of_range", ...
    refuses: bool = True  # whether rows cannot be used before it is fixed; False for a remark

    def __str__(self) -> str:
        return f"{self.column}: {self.text}" if self.column else self.text


class Hints(NamedTuple):
    """What a finding may propose, which depends on the interface."""

    fill: str = "fill them in, or leave these rows out"  # for missing cells
    empty: str = ""  # an option to add where a wrong cell is left empty
    more: str = ""  # follows every finding about numbers
    names: str = ""  # follows where many cells are not numbers


def raise_findings(findings: Iterable[Finding]) -> None:
    """Raise one `DataError` with all findings that refuse, if there are any."""
    serious = [finding for finding in findings if finding.refuses]
    if len(serious) == 1:
        raise DataError(f"the table does not fit: {serious[0]}")
    if serious:
        lines = "\n".join(f"  {finding}" for finding in serious)
        raise DataError(f"the table does not fit ({count(len(serious), 'finding')}):\n{lines}")


def near_names(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are most similar to one, capital letters and blanks aside."""
    by_lower = {word.strip().lower(): word for word in known}
    return [by_lower[word] for word in difflib.get_close_matches(name.strip().lower(), by_lower, most, cutoff)]


def near_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Guess what was meant by a name, to follow it in a message; "" when nothing is similar."""
    similar = near_names(name, known, 3, cutoff)
    return f" (did you mean {' or '.join(map(repr, similar))}?)" if similar else ""


def missing_column(name: str, present: Sequence[str], wanted: Sequence[str]) -> Finding:
    """Report a column that is not there, with the name that was likely meant."""
    others, short = [one for one in present if one not in wanted], name.lower()
    near = near_names(name, others)
    near = near or [one for one in others if short in one.lower() or (len(one) > 2 and one.lower() in short)]
    has = f"the table has {listed(present, 20)}" if present else "the table has no columns"
    guess = f"is {near[0]!r} what is meant? Then rename it" if near else has
    return Finding(name, f"there is no such column; {guess}", "no_column")


def _missing(name: str, missing: Mask, gaps: Gaps, at: RowName, fill: str) -> list[Finding]:
    rows = np.flatnonzero(missing)
    if not rows.size or gaps == "fill":
        return []
    if rows.size == len(missing) > 1:
        return [Finding(name, "is missing in every row", "missing")]
    hint = "these rows are left out" if gaps == "drop" else fill
    text = f"is missing in {rows.size} of {count(len(missing), 'row')}, first in {at(int(rows[0]))}; {hint}"
    return [Finding(name, text, "missing", refuses=gaps != "drop")]


def check_category(
    name: str, column: AnyArray, levels: Sequence[Label], gaps: Gaps, at: RowName, fill: str, *, open_ended: bool
) -> list[Finding]:
    """Find missing and unknown levels, and a constant column; an ``open_ended`` one may have unknown levels."""
    codes = level_codes(column, levels)
    findings = _missing(name, codes == -1, gaps, at, fill)
    unknown, found = np.flatnonzero(codes == -2), np.unique(codes[codes >= 0])
    if unknown.size:
        seen, known = Counter(level_text(column[row]) for row in unknown), [level_text(level) for level in levels]
        shown = ", ".join(f"{text!r} ({count(n, 'row')})" for text, n in seen.most_common(_SHOWN))
        more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
        text = f"unknown level {shown}{more}, first in {at(int(unknown[0]))}; the known ones are {listed(known, 12)}"
        first = seen.most_common(1)[0][0]
        for near in near_names(first, known, cutoff=0.7):
            text += f"; is {first!r} meant to be {near!r}?"
        text += "; these rows are predicted as an average over the known ones" if open_ended else ""
        findings.append(Finding(name, text, "unknown_level", refuses=not open_ended))
    elif found.size == 1 and len(column) > 1:
        level = level_text(levels[int(found[0])])
        findings.append(Finding(name, f"is {level!r} in every row", "constant", refuses=False))
    return findings


class NumberCheck(NamedTuple):
    """What numbers must be: their unit and plausible range, and whether they are whole."""

    unit: str = ""
    low: float | None = None
    high: float | None = None
    whole: bool = False


def check_number(
    name: str, column: AnyArray, wanted: NumberCheck, gaps: Gaps, at: RowName, hints: Hints
) -> list[Finding]:
    """Find missing values, text, values out of range, fractions among counts, and a constant column."""
    numbers = parsed_numbers(column)
    findings = _missing(name, numbers.missing, gaps, at, hints.fill)

    def find(code: str, text: str) -> None:
        findings.append(Finding(name, text + hints.more, code))

    correct = "correct the cell, or leave it empty" + (f" and add {hints.empty}" if hints.empty else "")
    if numbers.wrong:
        cells, n = [cell for _, cell in numbers.wrong], len(numbers.wrong)
        named = [repr(cell) if isinstance(cell, (str, float)) else str(cell) for cell in cells[:_SHOWN]]
        shown = ", ".join(f"{cell} in {at(row)}" for cell, (row, _) in zip(named, numbers.wrong, strict=False))
        more = f" and {n - _SHOWN} more" if n > _SHOWN else ""
        hint = _number_hint(cells) or correct
        if NUMBERS_PER_WORD * n > len(column) and not all(COMMA_NUMBER.fullmatch(str(cell).strip()) for cell in cells):
            hint += hints.names
        wrong = "is not a number" if n == 1 else "are not numbers"
        find("not_number", f"{n} of {len(column)} cells {wrong}: {shown}{more}; {hint}")
    usable = np.flatnonzero(np.isfinite(numbers.values))
    values, total = numbers.values[usable], usable.size

    def some(which: Mask, what: str) -> str:
        n = int(which.sum())
        return f"{n} of {total} values {'is' if n == 1 else 'are'} {what}: {first(which, several=False)}"

    def first(which: Mask, *, several: bool = True) -> str:
        at_first = int(np.flatnonzero(which)[0])
        text = f"{values[at_first]:g} in {at(int(usable[at_first]))}"
        return f"first {text}" if several and which.sum() > 1 else text

    large = np.abs(values) > _LARGEST
    if large.any():
        find("too_large", f"{some(large, 'too large to compute with')}; {correct}")
        return findings
    fractions = values != np.floor(values)
    if wanted.whole and fractions.any():
        find("not_whole", some(fractions, "not whole, but counts are"))
    low = 0.0 if wanted.whole and wanted.low is None else wanted.low
    sides = [
        (values < (-np.inf if low is None else low), "below", low, "lowest"),
        (values > (np.inf if wanted.high is None else wanted.high), "above", wanted.high, "highest"),
    ]
    outside = sides[0][0] | sides[1][0]
    unit = f" {wanted.unit}" if wanted.unit else ""
    if 2 * outside.sum() > total:
        which, side, limit, _ = max(sides, key=lambda each: int(each[0].sum()))
        share = f"{which.sum() / total:.0%} of values are {side} {limit:g}{unit}"
        find("out_of_range", f"{share}; {first(outside)}: check unit and contract")
    elif outside.any():
        parts = [
            f"{some(which, f'{side} {limit:g}{unit}, the {extreme} plausible value')}"
            for which, side, limit, extreme in sides
            if which.any()
        ]
        common, times = Counter(values[outside].tolist()).most_common(1)[0]
        if common in _MISSING_CODES and times > 1:
            parts.append(f"{common:g} occurs {times} times: if it stands for a missing value, leave the cell empty")
        find("out_of_range", "; ".join(parts))
    elif total > 1 and values.min() == values.max():
        findings.append(Finding(name, f"is {values[0]:g} in every row", "constant", refuses=False))
    return findings


def _number_hint(cells: Sequence[object]) -> str:
    """Return what to do about cells that are not numbers; "" where nothing is special about them."""
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
