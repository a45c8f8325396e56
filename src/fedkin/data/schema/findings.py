"""What is wrong with a column, in words for those who look after the data.

Unless a reader says otherwise, rows are counted as a spreadsheet counts them: the header is row 1, the first row of
data row 2.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedkin._base import AnyArray, Array, Mask, count, listed
from fedkin.data.schema.labels import Label, level_codes, level_text, looks_like_date, parsed_numbers
from fedkin.data.schema.units import other_unit
from fedkin.data.tables import COMMA_NUMBER, THOUSANDS, UNIT_NUMBER
from fedkin.errors import DataError

Range = tuple[float | None, float | None]
#: What a row, numbered from 0, is called in messages.
RowWords = Callable[[int], str]
#: What becomes of missing cells: they refuse the table, their rows are left out, or they are filled in.
Gaps = Literal["refuse", "drop", "fill"]

#: The cure for a cell that holds nothing of use; what becomes of empty cells is for others to say.
LEAVE_EMPTY = "leave it empty"
#: The cure for rows with empty cells; a model may know another one.
FILL_IN = "fill them in, or leave these rows out"
#: Numbers that people write where there is none.
_MISSING_CODES = frozenset({-1.0, -9.0, -99.0, -999.0, -9999.0, 9.0, 99.0, 999.0, 9999.0, 99999.0})
#: No amount is larger; squares of such numbers, and their sums, are finite.
_LARGEST = 1e100
#: Cells and levels that a finding shows.
_SHOWN = 3
#: Values in less than this share of the plausible range are more likely to be in another unit.
_NARROW = 0.01


def sheet_row(row: int) -> str:
    """A row as a spreadsheet counts it.

    Examples
    --------
    >>> sheet_row(0)
    'row 2'
    """
    return f"row {row + 2}"


@dataclass(frozen=True)
class Finding:
    """Something about a column that its owner should know.

    Attributes
    ----------
    column : str
        "" for the table as a whole.
    words : str
        What is wrong, where, and what to do.
    refuses : bool
        Whether rows cannot be used before it is mended; False for a remark.

    Examples
    --------
    >>> print(Finding("age", "is missing in 3 of 40 rows"))
    age: is missing in 3 of 40 rows
    """

    column: str
    words: str
    refuses: bool = True

    def __str__(self) -> str:
        return f"{self.column}: {self.words}" if self.column else self.words


def raise_findings(findings: Iterable[Finding]) -> None:
    """Raise one `DataError` with all findings that refuse, if there are any."""
    serious = [finding for finding in findings if finding.refuses]
    if len(serious) == 1:
        raise DataError(f"the table does not fit: {serious[0]}")
    if serious:
        lines = "\n".join(f"  {finding}" for finding in serious)
        raise DataError(f"the table does not fit ({count(len(serious), 'finding')}):\n{lines}")


def missing_column(name: str, present: Sequence[str], wanted: Sequence[str]) -> Finding:
    """A column that is not there, with the name that was likely meant."""
    known = {one.strip().lower(): one for one in present if one not in wanted}
    near = difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=0.6)
    near = near or [one for one in known if name.lower() in one or (len(one) > 2 and one in name.lower())][:1]
    if near:
        cure = f"is {known[near[0]]!r} what is meant? Then rename it"
    else:
        cure = f"the table has {listed(present, 20)}" if present else "the table has no columns"
    return Finding(name, f"there is no such column; {cure}")


# --- categories -------------------------------------------------------------------------------------------------


def check_category(
    name: str,
    column: AnyArray,
    levels: Sequence[Label],
    gaps: Gaps = "refuse",
    at: RowWords = sheet_row,
    *,
    open_ended: bool = False,
) -> list[Finding]:
    """Missing and unknown levels, and a column that never changes; an ``open_ended`` one may have unknown levels."""
    codes = level_codes(column, levels)
    findings = _missing(name, codes == -1, gaps, at)
    unknown = np.flatnonzero(codes == -2)
    if unknown.size:
        words = _unknown_levels(column, unknown.tolist(), levels, at)
        rule = "; these rows are predicted as an average over the known ones" if open_ended else ""
        findings.append(Finding(name, words + rule, refuses=not open_ended))
    found = np.unique(codes[codes >= 0])
    if found.size == 1 and len(column) > 1 and not unknown.size:
        findings.append(_constant(name, repr(level_text(levels[int(found[0])]))))
    return findings


def _unknown_levels(column: AnyArray, rows: list[int], levels: Sequence[Label], at: RowWords) -> str:
    texts = [level_text(level) for level in levels]
    seen = Counter(level_text(column[row]) for row in rows)
    shown = ", ".join(f"{text!r} ({count(n, 'row')})" for text, n in seen.most_common(_SHOWN))
    more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
    words = f"unknown level {shown}{more}, first in {at(rows[0])}; the known ones are {listed(texts, 12)}"
    first = seen.most_common(1)[0][0]
    lower = {text.lower(): text for text in texts}
    near = difflib.get_close_matches(first.lower(), lower, n=1, cutoff=0.7)
    return f"{words}; is {first!r} meant to be {lower[near[0]]!r}?" if near else words


# --- numbers ----------------------------------------------------------------------------------------------------


def check_number(
    name: str,
    column: AnyArray,
    unit: str,
    plausible: Range,
    gaps: Gaps = "refuse",
    at: RowWords = sheet_row,
    *,
    whole: bool = False,
) -> list[Finding]:
    """Missing values, text, values out of range, another unit, fractions among counts, and a column without change."""
    numbers = parsed_numbers(column)
    findings = _missing(name, numbers.missing, gaps, at)
    if numbers.wrong:
        findings.append(Finding(name, _not_numbers(numbers.wrong, len(column), at)))
    usable = np.flatnonzero(np.isfinite(numbers.values))
    values = numbers.values[usable]
    if values.size == 0:
        return findings
    large = np.flatnonzero(np.abs(values) > _LARGEST)
    if large.size:
        row = int(usable[large[0]])
        words = f"{_of(large.size, values.size)} too large to compute with: {numbers.values[row]:g} in {at(row)}"
        return [*findings, Finding(name, f"{words}; correct the cell, or {LEAVE_EMPTY}")]
    if whole and (fractions := np.flatnonzero(values != np.floor(values))).size:
        row = usable[fractions[0]]
        findings.append(
            Finding(
                name,
                f"{_of(fractions.size, values.size)} not whole, but counts are: "
                f"{numbers.values[row]:g} in {at(int(row))}",
            )
        )
    low, high = plausible
    if whole and low is None:
        low = 0.0
    outside = np.zeros(values.size, dtype=bool)
    outside |= False if low is None else values < low
    outside |= False if high is None else values > high
    if outside.any():
        words = _out_of_range(values, lambda k: at(int(usable[k])), outside, unit, (low, high))
        findings.append(Finding(name, words))
    elif values.size > 1 and values.min() == values.max():
        findings.append(_constant(name, f"{values[0]:g}"))
    elif low is not None and high is not None and values.size >= 5 and np.ptp(values) < _NARROW * (high - low):
        guess = other_unit(values, unit, (low, high), narrow=True)
        findings.append(
            Finding(
                name,
                f"all values lie between {values.min():g} and {values.max():g}, in less than {_NARROW:.0%} of the "
                f"plausible range {low:g} to {high:g}{_in(unit)}: is the unit right?" + (f" {guess}" if guess else ""),
                refuses=False,
            )
        )
    return findings


def _not_numbers(wrong: list[tuple[int, object]], n: int, at: RowWords) -> str:
    cells = ", ".join(f"{_cell(cell)} in {at(row)}" for row, cell in wrong[:_SHOWN])
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    words = f"{len(wrong)} of {n} cells {'is not a number' if len(wrong) == 1 else 'are not numbers'}: {cells}{more}"
    first = wrong[0][1]
    if looks_like_date(first):
        return f"{words}; turn dates into numbers, for example an age in years or days since admission"
    with_commas = [cell.strip() for _, cell in wrong if isinstance(cell, str) and "," in cell]
    if with_commas and all(map(THOUSANDS.fullmatch, with_commas)):
        return f"{words}; thousands commas: remove them (if they are decimal commas, write points)"
    if isinstance(first, str) and COMMA_NUMBER.fullmatch(first.strip()):
        return f"{words}; write decimal points, not commas"
    if isinstance(first, str) and first[:1] in "<>":
        return f"{words}; a limit of detection is not a value: agree on what to write there"
    if isinstance(first, str) and (first[:1].isdigit() or UNIT_NUMBER.fullmatch(first.strip())):
        return f"{words}; leave units and remarks out of the cells"
    return f"{words}; correct the cell, or {LEAVE_EMPTY}"


def _out_of_range(values: Array, rows: RowWords, outside: Mask, unit: str, plausible: Range) -> str:
    low, high = plausible
    below = outside & (values < (-np.inf if low is None else low))
    above = outside & ~below
    guess = other_unit(values if outside.mean() > 0.5 else values[outside], unit, plausible)
    if outside.mean() > 0.5:
        which, limit = (below, low) if below.sum() > above.sum() else (above, high)
        side = "below" if below.sum() > above.sum() else "above"
        words = f"{which.mean():.0%} of values are {side} {limit:g}{_in(unit)}"
        return f"{words}; {guess}" if guess else f"{words}; {_first(values, rows, outside)}: check unit and contract"
    parts = []
    for which, side, limit, extreme in ((below, "below", low, "lowest"), (above, "above", high, "highest")):
        if which.any():
            parts.append(
                f"{_of(int(which.sum()), values.size)} {side} {limit:g}{_in(unit)}, the {extreme} plausible value: "
                f"{_first(values, rows, which)}"
            )
    words = "; ".join(parts)
    common, times = Counter(values[outside].tolist()).most_common(1)[0]
    if common in _MISSING_CODES and times > 1:
        return f"{words}; {common:g} occurs {times} times: if it stands for a missing value, leave the cell empty"
    return f"{words}; {guess}" if guess and outside.sum() >= _SHOWN else words


def _first(values: Array, rows: RowWords, which: Mask) -> str:
    at = int(np.flatnonzero(which)[0])
    return f"{'first ' if which.sum() > 1 else ''}{values[at]:g} in {rows(at)}"


# --- what both have ---------------------------------------------------------------------------------------------


def _missing(name: str, missing: Mask, gaps: Gaps, at: RowWords) -> list[Finding]:
    if not missing.any() or gaps == "fill":
        return []
    n, row = int(missing.sum()), int(np.flatnonzero(missing)[0])
    if n == len(missing) > 1:
        return [Finding(name, "is missing in every row")]
    drop = gaps == "drop"
    cure = "these rows are left out" if drop else FILL_IN
    return [
        Finding(
            name, f"is missing in {n} of {count(len(missing), 'row')}, first in {at(row)}; {cure}", refuses=not drop
        )
    ]


def _constant(name: str, value: str) -> Finding:
    return Finding(name, f"is {value} in every row", refuses=False)


def _of(n: int, total: int) -> str:
    return f"{n} of {total} values {'is' if n == 1 else 'are'}"


def _in(unit: str) -> str:
    return f" {unit}" if unit else ""


def _cell(cell: object) -> str:
    return repr(cell) if isinstance(cell, (str, float)) else str(cell)
