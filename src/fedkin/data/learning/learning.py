"""A table as it is: what its columns are, which of them and of its rows can be used, and what to say about the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedkin._base import AnyArray, Array, Index, Mask, check_choice, count, listed
from fedkin.data.learning.columns import Roles
from fedkin.data.learning.kinds import (
    Looked,
    far_row,
    has_slips,
    is_row_number,
    look_at,
    looks_like_code,
    looks_like_id,
    too_many_levels,
)
from fedkin.data.learning.redundant import constant, dependent_names
from fedkin.data.schema import (
    FILLING,
    LEAVE_EMPTY,
    Column,
    Finding,
    RowWords,
    TableSchema,
    parsed_numbers,
    raise_findings,
)
from fedkin.data.tables import COMMA_NUMBER, NUMBERS_PER_WORD, Columns, number_of
from fedkin.errors import DataError

#: Fewer rows than this say nothing about columns that are alike by chance.
_ENOUGH_ROWS = 5


@dataclass(frozen=True, eq=False)
class LearnedTable:
    """What a table turned out to be.

    Attributes
    ----------
    schema : TableSchema
    rows : int array (n,)
        Rows that are used, in the order of the table.
    notes : tuple of str
        What was left out, and what its owner may want to know.
    done : tuple of str
        What was done because it was asked for: how many cells were filled.
    """

    schema: TableSchema
    rows: Index
    notes: tuple[str, ...]
    done: tuple[str, ...] = ()


def learn_table(columns: Columns, roles: Roles, at: RowWords) -> LearnedTable:
    """Find out what the columns of a table are.

    Parameters
    ----------
    columns : Columns
        The table.
    roles : Roles
        What its owner said about them. Features that are named are used whatever they look like; by default all others
        are, except those that cannot tell anything.
    at : callable
        What a row, numbered from 0, is called in messages.

    Raises
    ------
    DataError
        With everything that stands in the way.
    """
    check_choice("missing", roles.missing, TableSchema._RULES)
    roles.check(columns)
    return _Learning(columns, roles, at).result()


@dataclass(eq=False)
class _Learning:
    columns: Columns
    roles: Roles
    at: RowWords
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def result(self) -> LearnedTable:
        chosen = self._chosen()
        known = [column for name in chosen if (column := self._feature(name)) is not None]
        target = None if self.roles.target is None else self._target(self.roles.target)
        self._check_roles()
        sites = self.columns[self.roles.site]
        if sites.dtype.kind == "O":
            names = dict.fromkeys(cell for cell in sites.tolist() if isinstance(cell, str))
            self._tell_case(names, lambda pair: f"sites {pair} differ in case only, and are taken for different ones")
        raise_findings(self.findings)
        kept, gaps = self._complete(known)
        if not kept.size:
            raise DataError("there are no rows, at least one row is needed")
        if self.roles.features is None and self.roles.target is not None:
            known = self._telling(known, kept)
        if not known and self.roles.features is None:
            raise DataError(f"no column is left for the features beside {listed(self.roles.taken)}")
        self._remark_on(known)
        self._tell_filled(known, kept)
        missing = self.roles.missing
        told = tuple(column.name for column in known if column.name in gaps) if missing == "indicator" else ()
        schema = TableSchema(tuple(known), target, self.roles.offset, missing, indicators=told)
        return LearnedTable(schema, kept, tuple(self.notes), tuple(self.done))

    # --- columns ------------------------------------------------------------------------------------------------

    def _chosen(self) -> list[str]:
        if self.roles.features is not None:
            return list(self.roles.features)
        rest = [name for name in self.columns if name not in self.roles.taken]
        index = [name for name in rest if is_row_number(name, self.columns[name])]
        if index and len(index) < len(rest):
            self._leave_out(index, "counts the rows (an index that was saved along)", "count the rows")
            rest = [name for name in rest if name not in index]
        if "" in rest:
            self.findings.append(
                Finding("", "a column has no name: give it one, or say which columns to use with features=")
            )
            rest.remove("")
        if not rest and not self.findings:
            raise DataError(f"no column is left for the features beside {listed(self.roles.taken)}")
        return rest

    def _leave_out(self, names: Sequence[str], one: str, several: str) -> None:
        if names:
            words = f"column {names[0]!r} {one}" if len(names) == 1 else f"columns {listed(names, 10)} {several}"
            self.notes.append(f"{words}: left out")

    def _feature(self, name: str) -> Column | None:
        cells = self.columns[name]
        looked = look_at(cells, category=name in self.roles.categories)
        if looked.kind == "empty" and len(cells):
            if self.roles.features is None:
                self._leave_out([name], "is empty in every row", "")
            else:
                self.findings.append(Finding(name, "is empty in every row: leave it out of features="))
            return None
        if looked.kind == "date":
            self.findings.append(Finding(name, _DATES))
            return None
        if looked.kind == "category":
            return self._category(name, looked)
        column = Column(name)
        found = column.findings(cells, "fill", self.at)
        wrong = [str(cell).strip() for _, cell in parsed_numbers(cells).wrong]
        many = NUMBERS_PER_WORD * len(wrong) > len(cells) and not all(map(COMMA_NUMBER.fullmatch, wrong))
        more = "; if these are names, say so with categories=" if many else ""
        self.findings += [self._with_cure(one, 'missing="drop" or missing="mean"', more) for one in found]
        return column

    def _with_cure(self, finding: Finding, how: str, more: str = "") -> Finding:
        """The finding, with what a cell that is left empty needs, and what else may be meant."""
        if not finding.refuses:
            return finding
        words = finding.words
        if self.roles.missing == "refuse":
            words = words.replace(LEAVE_EMPTY, f"{LEAVE_EMPTY} and add {how}")
        return Finding(finding.column, words + more)

    def _category(self, name: str, looked: Looked) -> Column | None:
        levels, n = looked.levels, len(self.columns[name])
        if len(levels) == 1:
            if self.roles.features is None or n > 1:
                self._leave_out([name], f"is {levels[0]!r} in every row", "")
            return None
        if too_many_levels(len(levels), n) and name not in self.roles.categories:
            how = "with drop=" if self.roles.features is None else "of features="
            self.findings.append(
                Finding(
                    name,
                    f"text with {len(levels)} different values in {n} rows, such as {listed(levels[:2])}: a name or an "
                    f"id? Leave it out {how} (or call it a category, categories=)",
                )
            )
            return None
        self._tell_case(levels, lambda pair: f"column {name!r} has {pair} as different levels")
        return Column(name, "category", levels=levels)

    def _tell_case(self, names: Iterable[str], words: Callable[[str], str]) -> None:
        """Remark on the first two names that are the same but for capital letters."""
        lower: dict[str, str] = {}
        for name in names:
            if lower.setdefault(name.lower(), name) != name:
                self.notes.append(words(f"{lower[name.lower()]!r} and {name!r}"))
                return

    def _target(self, name: str) -> Column | None:
        cells = self.columns[name]
        looked = look_at(cells)
        if looked.kind == "category" and has_slips(cells):
            looked = Looked("number")
        if looked.kind == "number" and cells.dtype.kind == "O":
            levels = look_at(cells, category=True)
            if len(levels.levels) <= 2 and all(number_of(level) is not None for level in levels.levels):
                looked = levels  # 0 and 1 stored as text
        if looked.kind == "empty" and len(cells):
            self.findings.append(Finding(name, "the target is empty in every row"))
        elif looked.kind == "date":
            self.findings.append(Finding(name, _DATES))
        elif looked.kind == "number" and cells.dtype.kind != "b":
            found = Column(name).findings(cells, "fill", self.at)
            wrong = [one for one in found if one.refuses]
            classes = "; if these are classes, give each a letter (c1, c2)"
            self.findings += [self._with_cure(one, 'missing="drop"', classes) for one in wrong]
            return Column(name)
        elif looked.kind == "category" and too_many_levels(len(looked.levels), len(cells)):
            self.findings.append(
                Finding(name, f"the target is text with {len(looked.levels)} different values in {len(cells)} rows")
            )
        elif cells.dtype.kind == "b":
            return Column(name, "category", levels=(False, True))
        self._tell_case(looked.levels, lambda pair: f"the target {name!r} has {pair} as different classes")
        return Column(name, "category", levels=looked.levels) if len(looked.levels) > 1 else None

    def _check_roles(self) -> None:
        for role in ("offset", "weight"):
            name = getattr(self.roles, role)
            if name is None:
                continue
            cells = self.columns[name]
            found = [one for one in Column(name).findings(cells, "fill", self.at) if one.refuses]
            self.findings += [self._with_cure(one, 'missing="drop"', f" (it is the {role})") for one in found]
            values = parsed_numbers(cells).values
            below = np.flatnonzero(values < 0)
            if role == "weight" and below.size:
                row = int(below[0])
                self.findings.append(
                    Finding(name, f"a weight is at least 0, but it is {values[row]:g} in {self.at(row)}")
                )

    # --- rows ---------------------------------------------------------------------------------------------------

    def _complete(self, known: Sequence[Column]) -> tuple[Index, set[str]]:
        """Rows to use, and the features that have gaps."""
        n = len(self.columns[self.roles.site])
        gaps = {column.name: column.gaps(self.columns[column.name]) for column in known}
        roles = {name: _gaps(self.columns[name]) for name in self.roles.taken}
        empty = {name: mask for name, mask in (roles | gaps).items() if mask.any()}
        fills = self.roles.missing in FILLING
        losing = [mask for name, mask in empty.items() if not (fills and name in gaps)]
        if self.roles.missing == "refuse" and empty:
            raise DataError(_missing_words(empty, roles.keys(), self.at))
        lost: Mask = np.any(losing, axis=0) if losing else np.zeros(n, dtype=bool)
        if lost.any():
            causes = [name for name, mask in empty.items() if not (fills and name in gaps)]
            self.notes.append(
                f"{count(int(lost.sum()), 'row')} of {n} left out, where {listed(causes, 10)} "
                f"{'is' if len(causes) == 1 else 'are'} missing"
            )
        if lost.all() and n:
            raise DataError("every row has a missing cell, so no row is left: fill some in")
        kept = ~lost
        if self.roles.weight is not None:
            kept &= parsed_numbers(self.columns[self.roles.weight]).values > 0
            if not kept.any() and n:
                raise DataError(
                    f"the weight {self.roles.weight!r} is 0 in every row, so no row is left: check the column"
                )
        return np.flatnonzero(kept).astype(np.int64), {name for name, mask in gaps.items() if mask[kept].any()}

    # --- columns that tell nothing, or too much --------------------------------------------------------------------

    def _telling(self, known: list[Column], rows: Index) -> list[Column]:
        """The columns without those that are constant or made of others; raises for one that is the target."""
        numbers = {c.name: parsed_numbers(self.columns[c.name]).values[rows] for c in known if c.kind == "number"}
        self._refuse_copies(known, numbers, rows)
        flat = [name for name, values in numbers.items() if constant(values)] if rows.size > 1 else []
        if len(flat) == len(known):
            return known
        self._leave_out(flat, "is the same in every row", "are the same in every row")
        known = [column for column in known if column.name not in flat]
        numbers = {name: values for name, values in numbers.items() if name not in flat}
        if rows.size >= max(_ENOUGH_ROWS, 2 * len(numbers)):
            made = dependent_names(numbers)
            self._leave_out(made, "follows from the columns before it", "follow from the columns before them")
            known = [column for column in known if column.name not in made]
        return known

    def _refuse_copies(self, known: Sequence[Column], numbers: dict[str, Array], rows: Index) -> None:
        assert self.roles.target is not None
        target, copies = self.columns[self.roles.target][rows], []
        if rows.size < _ENOUGH_ROWS:
            return
        for column in known:
            cells = self.columns[column.name][rows]
            if target.dtype.kind in "fb" and column.name in numbers:
                same = np.array_equal(numbers[column.name], target.astype(np.float64))
                same = same and not constant(numbers[column.name])
            else:
                same = target.dtype.kind == "O" and cells.dtype.kind == "O" and bool((cells == target).all())
            if same:
                copies.append(column.name)
        if copies:
            which = f"column {copies[0]!r} is" if len(copies) == 1 else f"columns {listed(copies)} are"
            raise DataError(
                f"{which} the target {self.roles.target!r} under another name, so the model would have nothing to "
                "learn: leave it out with drop="
            )

    def _tell_filled(self, known: Sequence[Column], rows: Index) -> None:
        if self.roles.missing not in FILLING:
            return
        filled = {c.name: int(c.gaps(self.columns[c.name])[rows].sum()) for c in known}
        parts = [f"{name!r} {n}" for name, n in filled.items() if n]
        if parts:
            more = f" and {len(parts) - 10} more columns" if len(parts) > 10 else ""
            cells = count(sum(filled.values()), "missing cell")
            means = "the mean of its column" if sum(filled.values()) == 1 else "means of the rows that train"
            self.done.append(f"{cells} filled by {means}: {', '.join(parts[:10])}{more}")

    def _remark_on(self, known: Sequence[Column]) -> None:
        amounts = [c.name for c in known if c.kind == "number"]
        if self.roles.target is not None and self.columns[self.roles.target].dtype.kind == "f":
            amounts.append(self.roles.target)
        for name in amounts:
            values = parsed_numbers(self.columns[name]).values
            row = far_row(values)
            if row is not None:
                usual = f"{np.nanmedian(values):g} in the middle of all rows"
                self.notes.append(f"{name!r} is {values[row]:g} in {self.at(row)}, and {usual}: a typing error?")
        numbers = [c.name for c in known if c.kind == "number"] if self.roles.features is None else []
        ids = [name for name in numbers if looks_like_id(name, self.columns[name])]
        if ids:
            verb, one, its = ("looks", "an id", "its") if len(ids) == 1 else ("look", "ids", "their")
            self.notes.append(
                f"{listed(ids, 10)} {verb} like {one}, but {its} numbers are used as amounts; leave "
                f"{'it' if len(ids) == 1 else 'them'} out with drop= if so"
            )
        codes = [c.name for c in known if c.kind == "number" and looks_like_code(c.name, self.columns[c.name])]
        if codes:
            verb, one = ("looks", "a code") if len(codes) == 1 else ("look", "codes")
            self.notes.append(
                f"{listed(codes, 10)} {verb} like {one}, but {'its' if len(codes) == 1 else 'their'} numbers are used "
                "as amounts; if they are names, say so with categories="
            )


_DATES = (
    "these are dates: turn them into numbers, such as days since a start; or, if the column puts rows in order, name "
    "it with time= (written like 2021-03-04)"
)


def _gaps(cells: AnyArray) -> Mask:
    """Which cells of a column that is no feature are missing."""
    if cells.dtype.kind in "fb":
        return np.asarray(np.isnan(cells.astype(np.float64)))
    return np.fromiter((cell is None or cell != cell or cell == "" for cell in cells), dtype=bool, count=len(cells))


def _missing_words(empty: dict[str, Mask], roles: Collection[str], at: RowWords) -> str:
    n = len(next(iter(empty.values())))
    whole = int(np.any(list(empty.values()), axis=0).sum())
    shown = sorted(empty, key=lambda name: -int(empty[name].sum()))
    parts = [
        f"{name!r} in {int(empty[name].sum())}" + (f" (first in {at(int(np.flatnonzero(empty[name])[0]))})")
        for name in shown[:10]
    ]
    more = f" and {len(shown) - 10} more columns" if len(shown) > 10 else ""
    words = f"cells are missing: {', '.join(parts)}{more}, of {count(n, 'row')}"
    if all(name in roles for name in empty):
        return f'{words}. Fill them in, or leave such rows out with missing="drop"'
    return (
        f'{words}. Say what to do: missing="drop" leaves out the {count(whole, "row")} with a gap, missing="mean" '
        'fills in the mean of the rows that train, missing="indicator" also adds a column that says where'
    )
