"""Infer the columns of a table: kinds, levels, gaps, constants, copies of the target, and columns to leave out.

`SchemaScan` reads any `Table` in batches: columns in memory are one batch, files that stay on disk are many. The kind
of a column depends only on the counts of its cells (`infer_kind`), and statistics of numbers are sums.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np

from fedkin._base import AnyArray, Array, Index, Mask, check_choice, check_whole, count, listed
from fedkin.data.cells import (
    DATES,
    N_KNOTS,
    ColumnKind,
    Finding,
    Hints,
    Label,
    count_cells,
    is_row_number,
    kind_of_counts,
    level_text,
    looks_like_name,
    parsed_numbers,
    quantile_knots,
    raise_findings,
    target_kind,
    too_many_levels,
)
from fedkin.data.columns import RawColumns
from fedkin.data.redundant import ColumnSums
from fedkin.data.schema import Column, Schema, event_column, positive_findings
from fedkin.data.tables import FILLING, Missing, Roles, Spline, Table
from fedkin.errors import DataError, argument

#: Distinct cells of a column at which counting stops, since its kind is known.
_MOST_COUNTED = 100_000
_DATES = DATES + "; or, if the column puts rows in order, name it with {} (written like 2021-03-04)"


@dataclass(frozen=True, eq=False)
class InferredTable:
    """The result of a scan of a table."""

    schema: Schema
    notes: tuple[str, ...]  # columns left out, and remarks
    filled: str  # text on the number of cells to fill on request; "" for none
    kept: Index  # positions of the schema's encoded columns in the scan
    n_rows: int  # of the table, including rows that are left out


def with_curves(
    columns: Sequence[Column], wanted: Spline, values: Callable[[Sequence[str]], Mapping[str, Array]]
) -> tuple[Column, ...]:
    """Return the columns with knots for splines: given ones, or quantiles of the ``values`` of columns."""
    given: dict[str, Any] = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(wanted, N_KNOTS)
    numbers, argued = {column.name for column in columns if column.kind == "number"}, argument("spline")
    if words := [name for name in given if name not in numbers]:
        raise DataError(f"{words[0]!r} is not a column of numbers, so it has no curve: leave it out of {argued}")
    found = values([name for name, one in given.items() if isinstance(one, int)])
    for name, cells in found.items():
        check_whole(f"the number of knots of {name!r}", given[name], least=3)
        given[name] = quantile_knots(cells, given[name])
        if not given[name]:
            raise DataError(f"{name!r} has fewer than three distinct values: leave it out of {argued}")
    known = {name: tuple(map(float, knots)) for name, knots in given.items()}
    return tuple(replace(one, knots=known[one.name]) if one.name in known else one for one in columns)


def complete_batches(table: Table, schema: Schema, roles: Roles) -> Iterator[RawColumns]:
    """Yield the complete rows of each batch of a table with a known schema, without rows of weight 0."""
    for batch in table.batches([*roles.taken, *(column.name for column in schema.features)]):
        kept = ~np.any([*_all_gaps(batch, schema, roles).values()], axis=0) & _counts(batch, roles)
        if kept.any():
            yield batch if kept.all() else {name: cells[kept] for name, cells in batch.items()}


def _all_gaps(batch: RawColumns, schema: Schema, roles: Roles) -> dict[str, Mask]:
    """Return which cells of each column are missing."""
    features = {column.name: column.gaps(batch[column.name]) for column in schema.features}
    return {name: _gaps(batch[name]) for name in roles.taken} | features


def _counts(batch: RawColumns, roles: Roles) -> Mask | bool:
    """Return which rows have a weight above 0."""
    return True if roles.weight is None else parsed_numbers(batch[roles.weight]).values > 0


@dataclass
class _Seen:
    """Numbers of rows and gaps."""

    rows: int = 0
    kept: int = 0
    lost: int = 0  # with a gap
    incomplete: int = 0
    gaps: dict[str, tuple[int, str]] = field(default_factory=dict)  # number and first row by column
    filled: Counter[str] = field(default_factory=Counter)

    def merge(self, later: _Seen) -> None:
        self.rows, self.kept, self.lost = self.rows + later.rows, self.kept + later.kept, self.lost + later.lost
        self.incomplete += later.incomplete
        for name, (n, first) in later.gaps.items():
            before, earlier = self.gaps.get(name, (0, first))
            self.gaps[name] = before + n, earlier
        self.filled.update(later.filled)


class SchemaScan:
    """A scan that infers the schema of a table while its rows are read: iterate over `rows`, then call `result`.

    Columns of text are read first, for their levels. ``rules`` are the allowed treatments of missing cells. ``schema``
    has all possible features; that of `result` omits uninformative ones.
    """

    def __init__(self, table: Table, roles: Roles, rules: tuple[str, ...] = get_args(Missing)) -> None:
        check_choice("missing", roles.missing, rules)
        roles.check(table.names)
        self._table, self._roles, self._rules = table, roles, rules
        self._notes: list[str] = []
        self._findings: list[Finding] = []
        self._infer_columns()
        self._seen, self._sums = _Seen(), None
        if roles.features is None and roles.target is not None and self.schema.features:
            kept = ~np.any([_gaps(self._head[name]) for name in roles.taken], axis=0)
            self._sums = ColumnSums(self.schema, {name: cells[kept] for name, cells in self._head.items()})

    # --- kinds and levels

    def _infer_columns(self) -> None:
        roles, taken = self._roles, self._roles.taken
        left = [name for name in self._table.names if name not in taken and name not in roles.drop]
        chosen = left if roles.features is None else list(roles.features)
        wanted = list(dict.fromkeys([*chosen, *taken]))
        self._head = next(self._table.batches(wanted), {name: np.empty(0) for name in wanted})
        if roles.features is None:
            chosen = self._without_index(chosen)
        counted, n = self._count_text(chosen)
        features = [self._feature(name, counted.get(name), n) for name in chosen]
        target = None if roles.target is None else self._target(roles.target, counted.get(roles.target), n)
        sites = self._head[roles.site]
        if sites.dtype.kind == "O":
            self._note_case(
                dict.fromkeys(cell for cell in sites.tolist() if isinstance(cell, str)),
                "sites {} differ in case only, and are treated as different sites",
            )
        known = tuple(column for column in features if column is not None)
        if not self._findings:
            known = with_curves(known, roles.spline, self._values)
        offset, logs = roles.offset or roles.exposure, roles.exposure is not None
        if roles.event is not None and target is not None and target.kind != "number":
            self._refuse(target.name, f"times are numbers, but this is a {target.kind}")
        self.schema = Schema(known, target, offset, roles.missing, agreed=False, log_offset=logs, event=roles.event)

    def _values(self, names: Sequence[str]) -> dict[str, Array]:
        parts: dict[str, list[Array]] = {name: [np.empty(0)] for name in names}
        for batch in self._table.batches(names) if names else ():
            for name in names:
                parts[name].append(parsed_numbers(batch[name]).values)
        return {name: np.concatenate(some) for name, some in parts.items()}

    def _without_index(self, names: list[str]) -> list[str]:
        index = [name for name in names if is_row_number(name, self._head[name])]
        if index and len(index) < len(names):
            self._leave_out(index, "an index that counts the rows")
            names = [name for name in names if name not in index]
        if "" in names:
            text = f"a column has no name: give it one, or say which columns to use with {argument('features')}"
            self._refuse("", text)
            names.remove("")
        if not names and not self._findings:
            raise self._no_feature()
        return names

    def _no_feature(self) -> DataError:
        return DataError(f"no column is left for the features besides {listed(self._roles.taken)}")

    def _count_text(self, chosen: Sequence[str]) -> tuple[dict[str, Counter[Hashable]], int]:
        """Count rows, and the cells of columns that are not plain numbers, in one pass over these columns."""
        target = [] if self._roles.target is None else [self._roles.target]
        text = [name for name in chosen if self._is_text(name) or self._is_constant(name)]
        text += [name for name in target if self._is_text(name)]
        counted: dict[str, Counter[Hashable]] = {name: Counter() for name in text}
        n = 0
        for batch in self._table.batches(text) if text else ():
            n += len(batch[text[0]])
            for name, cells in batch.items():
                if len(counted[name]) < _MOST_COUNTED:
                    counted[name].update(count_cells(cells))
        return counted, n if text else len(self._head[self._roles.site])

    def _is_text(self, name: str) -> bool:
        cells = self._head[name]
        numbers = cells.dtype.kind == "b" or (cells.dtype.kind == "f" and (not cells.size or not np.isnan(cells).all()))
        return not numbers or name in self._roles.categories

    def _is_constant(self, name: str) -> bool:
        cells = self._head[name]
        return cells.dtype.kind == "f" and np.unique(cells[~np.isnan(cells)]).size == 1

    def _leave_out(self, names: Sequence[str], why: str) -> None:
        if names:
            self._notes.append(f"left out {listed(names, 10)}: {why}")

    def _note_case(self, names: Iterable[str], text: str) -> None:
        """Note the first two names that differ only in case."""
        lower: dict[str, str] = {}
        for name in names:
            if lower.setdefault(name.lower(), name) != name:
                self._notes.append(text.format(f"{lower[name.lower()]!r} and {name!r}"))
                return

    def _refuse(self, name: str, text: str) -> None:
        self._findings.append(Finding(name, text))

    def _feature(self, name: str, counted: Counter[Hashable] | None, n: int) -> Column | None:
        given, forced = self._roles.features is not None, name in self._roles.categories
        found = ColumnKind("number") if counted is None else kind_of_counts(counted, forced)
        levels = found.levels
        if counted is not None and len(counted) == 1 and counted.total() < n and found.kind != "date":
            return self._lone_level(name, level_text(next(iter(counted))))
        if found.kind == "number" or n == 0:
            return Column(name)
        if found.kind == "empty" and given:
            self._refuse(name, f"is empty in every row: leave it out of {argument('features')}")
        elif found.kind == "empty":
            self._leave_out([name], "empty in every row")
        elif found.kind == "date":
            self._refuse(name, _DATES.format(argument("time")))
        elif len(levels) == 1:
            if not given or n > 1:
                self._leave_out([name], f"{levels[0]!r} in every row")
        elif too_many_levels(len(levels), n) and not forced:
            how = f"of {argument('features')}" if given else f"with {argument('drop')}"
            self._refuse(
                name,
                f"text with {len(levels)} distinct values in {n} rows, such as {listed(levels[:2])}: a name or an "
                f"id? Leave it out {how} (or call it a category, {argument('categories')})",
            )
        else:
            self._note_case(levels, f"column {name!r} has {{}} as different levels")
            return Column(name, "category", levels=levels)
        return None

    def _lone_level(self, name: str, level: str) -> Column | None:
        """Return a column that is empty or has one value, as 0 and 1; None if rows with gaps are left out."""
        if self._roles.missing == "drop":
            self._leave_out([name], f"{level!r} wherever it is not empty")
            return None
        self._notes.append(f"{name!r} is {level!r} or empty: empty cells are a separate level")
        return Column(name, "category", levels=("", level))

    def _target(self, name: str, counted: Counter[Hashable] | None, n: int) -> Column | None:
        if counted is None:
            truth = self._head[name].dtype.kind == "b"
            return Column(name, "category", levels=(False, True)) if truth else Column(name)
        found = target_kind(counted, name in self._roles.categories)
        if found.kind == "number" or n == 0:
            return Column(name)
        if found.kind == "empty":
            self._refuse(name, "the target is empty in every row")
        elif found.kind == "date":
            self._refuse(name, _DATES.format(argument("time")))
        elif too_many_levels(len(found.levels), n):
            self._refuse(name, f"the target is text with {len(found.levels)} different values in {n} rows")
        self._note_case(found.levels, f"the target {name!r} has {{}} as different classes")
        levels: tuple[Label, ...] = found.levels
        if all(isinstance(cell, bool) for cell in counted):
            levels = (False, True)
        elif all(isinstance(cell, float) and cell.is_integer() for cell in counted):
            levels = tuple(int(level) for level in found.levels)
        return Column(name, "category", levels=levels) if len(levels) > 1 else None

    # --- rows

    def rows(self) -> Iterator[tuple[RawColumns, Index]]:
        """Yield the complete rows of each batch, and their positions in the table; raise on errors."""
        used = [*self._roles.taken, *(column.name for column in self.schema.features)]
        if self._findings:  # with errors of the first rows only
            self._check(self._head, 0)
            raise_findings(self._findings)
        for batch in self._table.batches(used):
            n, start = len(batch[self._roles.site]), self._seen.rows
            self._check(batch, start)
            raise_findings(self._findings)
            rows = np.flatnonzero(self._complete(batch, n)).astype(np.int64)
            self._seen.rows += n
            self._seen.kept += rows.size
            if rows.size < n:
                batch = {name: cells[rows] for name, cells in batch.items()}
            if rows.size and self._sums is not None:
                self._sums.add(batch)
            yield batch, rows + start

    def _check(self, batch: RawColumns, start: int) -> None:
        """Find cells that do not fit their column, in a batch that starts at some row."""

        def at(row: int) -> str:
            return self._table.at(start + row)

        refused = self._roles.missing == "refuse"
        drop = argument("missing", "drop") if refused else ""
        fill = f"{drop} or {argument('missing', 'mean')}" if refused else ""
        names = f"; if these are categories, add {argument('categories')}"
        checked = {c.name: Hints(empty=fill, names=names) for c in self.schema.features if c.kind == "number"}
        target = self.schema.target
        if target is not None and target.kind == "number":
            checked[target.name] = Hints(empty=drop, more="; if these are classes, give each a letter (c1, c2)")
        for role in ("offset", "exposure", "weight"):
            if getattr(self._roles, role) is not None:
                checked[getattr(self._roles, role)] = Hints(empty=drop, more=f" (it is the {role})")
        for name, hints in checked.items():
            self._findings += [one for one in Column(name).findings(batch[name], "fill", at, hints) if one.refuses]
        if self._roles.weight is not None:
            values = parsed_numbers(batch[self._roles.weight]).values
            for row in np.flatnonzero(values < 0)[:1].tolist():
                self._refuse(self._roles.weight, f"a weight must be at least 0, but is {values[row]:g} in {at(row)}")
        if self._roles.exposure is not None:
            self._findings += positive_findings(self._roles.exposure, "an exposure", batch[self._roles.exposure], at)
        if self._roles.event is not None and self._roles.target is not None:
            self._findings += positive_findings(self._roles.target, "a time", batch[self._roles.target], at)
            found = event_column(self._roles.event).findings(batch[self._roles.event], "fill", at, Hints(empty=drop))
            self._findings += [one for one in found if one.refuses]

    def _complete(self, batch: RawColumns, n: int) -> Mask:
        """Return which rows of a batch are used, and count the gaps."""
        gaps, seen = _all_gaps(batch, self.schema, self._roles), self._seen
        filled = gaps.keys() - self._roles.taken.keys() if self._roles.missing in FILLING else set()
        lost, incomplete = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        for name, mask in gaps.items():
            if mask.any():
                before, first = seen.gaps.get(name) or (0, self._table.at(seen.rows + int(mask.argmax())))
                seen.gaps[name] = before + int(mask.sum()), first
                incomplete |= mask
                lost |= mask & (name not in filled)
        seen.incomplete += int(incomplete.sum())
        seen.lost += int(lost.sum())
        kept = ~lost & _counts(batch, self._roles)
        seen.filled.update({name: int(gaps[name][kept].sum()) for name in filled})
        return kept

    # --- pieces

    def of_piece(self, table: Table) -> SchemaScan:
        """Return the scan of a piece of the table, whose rows may be read elsewhere."""
        self._check(self._head, 0)
        raise_findings(self._findings)
        made = copy.copy(self)
        made._table, made._head, made._seen = table, {}, _Seen()
        made._sums = None if self._sums is None else self._sums.like()
        return made

    def add(self, piece: SchemaScan) -> None:
        """Add the scan of a piece of the table after its rows were read; pieces are added in order."""
        self._seen.merge(piece._seen)
        if self._sums is not None and piece._sums is not None:
            self._sums.merge(piece._sums)

    # --- the end

    def result(self) -> InferredTable:
        """Return the result of the scan, once all rows were read."""
        self._settle_gaps()
        roles, schema = self._roles, self.schema
        out = set[str]()
        if self._sums is not None and self._seen.kept > 1:
            out, notes = self._sums.redundant(self._seen.kept, roles.spline)
            self._notes += notes
        known = tuple(column for column in schema.features if column.name not in out)
        if not known and roles.features is None:
            raise self._no_feature()
        self._remark_on_names([column.name for column in known if column.kind == "number"])
        names = {column.name for column in known}
        told = roles.missing == "indicator"
        indicators = tuple(column.name for column in known if told and self._seen.filled[column.name])
        encoded = [column.name for column in schema.features for _ in column.encoded]
        kept = np.array([k for k, name in enumerate(encoded) if name in names], dtype=np.int64)
        found = replace(schema, features=known, indicators=indicators)
        return InferredTable(found, tuple(self._notes), self._filled_text(known), kept, self._seen.rows)

    def _settle_gaps(self) -> None:
        roles, seen, n = self._roles, self._seen, self._seen.rows
        if roles.missing == "refuse" and seen.gaps:
            raise DataError(self._gaps_text())
        features = {column.name for column in self.schema.features}
        causes = [name for name in seen.gaps if not (roles.missing in FILLING and name in features)]
        if seen.lost:
            verb = "is" if len(causes) == 1 else "are"
            lost = count(seen.lost, "row")
            self._notes.append(f"{lost} of {n} left out, where {listed(causes, 10)} {verb} missing")
        if seen.kept:
            return
        if n and seen.lost == n:
            raise DataError("every row has a missing cell, so no row is left: fill some in")
        if n:
            raise DataError(f"the weight {roles.weight!r} is 0 in every row, so no row is left: check the column")
        raise DataError("there are no rows; at least one is needed")

    def _gaps_text(self) -> str:
        shown = sorted(self._seen.gaps.items(), key=lambda one: -one[1][0])
        parts = [f"{n} in {name!r} (first in {first})" for name, (n, first) in shown[:10]]
        more = f" and {len(shown) - 10} more columns" if len(shown) > 10 else ""
        text = f"cells are missing: {', '.join(parts)}{more}; the table has {count(self._seen.rows, 'row')}"
        if all(name in self._roles.taken for name in self._seen.gaps):
            return f"{text}. Fill them in, or leave such rows out with {argument('missing', 'drop')}"
        hints = {
            "drop": f"leaves out the {count(self._seen.incomplete, 'row')} with a gap",
            "mean": "fills in the mean of the training rows (for text, the shares of the levels)",
            "indicator": "also adds an indicator column",
        }
        told = [f"{argument('missing', rule)} {hints[rule]}" for rule in self._rules if rule in hints]
        return f"{text}. Choose one: {', '.join(told)}"

    def _remark_on_names(self, numbers: Sequence[str]) -> None:
        found = {name: looks_like_name(name, self._head[name]) for name in numbers}
        hints = {
            "id": f"if so, leave them out with {argument('drop')}",
            "code": f"if they are categories, add {argument('categories')}",
        }
        for kind, hint in hints.items():
            names = [name for name in numbers if found[name] == kind]
            if names and (kind == "code" or self._roles.features is None):
                self._notes.append(f"{listed(names, 10)}: numbers that look like {kind}s are used as amounts; {hint}")

    def _filled_text(self, known: Sequence[Column]) -> str:
        texts = []
        for words, one, several in (
            (False, "the mean of its column", "means of the training rows"),
            (True, "the shares of its levels", "the shares of their levels in the training rows"),
        ):
            parts = {one.name: self._seen.filled[one.name] for one in known if (one.kind == "category") == words}
            parts = {name: n for name, n in parts.items() if n}
            if total := sum(parts.values()):
                more = f" and {len(parts) - 10} more columns" if len(parts) > 10 else ""
                shown = ", ".join(f"{name!r} {n:,}" for name, n in list(parts.items())[:10])
                cells = count(total, "missing cell") + (" of text" if words else "")
                texts.append(f"{cells} filled by {one if total == 1 else several}: {shown}{more}")
        return "; ".join(texts)


def _gaps(cells: AnyArray) -> Mask:
    """Return which cells of a column that is not a feature are missing."""
    if cells.dtype.kind in "fb":
        return np.asarray(np.isnan(cells.astype(np.float64)))
    empty = (cells == np.array(one, dtype=object) for one in (None, ""))
    return np.asarray(np.any([*empty, cells != cells], axis=0))
