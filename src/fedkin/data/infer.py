"""Infer what the columns of a table are: kinds, levels, gaps, constants, copies of the target, and what to leave out.

`infer_schema` reads any `Table` in batches: columns in memory are one batch, files that stay on disk are many. The kind
of a column depends on the counts of its cells alone (`infer_kind`), and all that is known of numbers adds up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from fedkin._base import AnyArray, Array, Index, Mask, check_choice, count, listed
from fedkin.data.cells import (
    COMMA_NUMBER,
    NUMBERS_PER_WORD,
    ColumnKind,
    Label,
    count_cells,
    is_row_number,
    kind_of_counts,
    looks_like_name,
    parsed_numbers,
    target_kind,
    too_many_levels,
)
from fedkin.data.columns import Columns
from fedkin.data.findings import Finding, RowName, frame_row, raise_findings
from fedkin.data.schema import FILLING, Column, Missing, Schema
from fedkin.data.tables import Roles, Table
from fedkin.errors import DataError, argument

#: Fewer rows than this say nothing about columns that are alike by chance.
_ENOUGH_ROWS = 5
#: A column is a combination of others when no more than this share of its variance is its own.
_OWN_SHARE = 1e-13
#: Different cells of a column from which on no more are counted: its kind is known.
_MOST_COUNTED = 100_000
_DATES = (
    "these are dates: turn them into numbers, such as days since a start; or, if the column puts rows in order, name "
    "it with {} (written like 2021-03-04)"
)


@dataclass(frozen=True, eq=False)
class InferredTable:
    """What a table turned out to be."""

    schema: Schema
    notes: tuple[str, ...]  # what was left out, and what its owner may want to know
    filled: str  # how many cells are to be filled because that was asked for; "" for none
    kept: Index  # positions of the schema's encoded columns among those of the scan's
    n_rows: int  # of the table, those that are left out included


def infer_schema(table: Table, roles: Roles, at: RowName = frame_row) -> InferredTable:
    """Infer what the columns of a table are."""
    scan = SchemaScan(table, roles, at)
    for _ in scan.rows():
        pass
    return scan.result()


def complete_batches(table: Table, schema: Schema, roles: Roles) -> Iterator[Columns]:
    """Yield the complete rows of each batch of a table whose schema is known, those of weight 0 left out."""
    for batch in table.batches([*roles.taken, *(column.name for column in schema.features)]):
        masks = [column.gaps(batch[column.name]) for column in schema.features]
        kept = ~np.any([*masks, *(_gaps(batch[name]) for name in roles.taken)], axis=0)
        if roles.weight is not None:
            kept &= parsed_numbers(batch[roles.weight]).values > 0
        if kept.any():
            yield batch if kept.all() else {name: cells[kept] for name, cells in batch.items()}


class SchemaScan:
    """The inference of `infer_schema` for those who need the rows, too: in the same pass.

    Columns of text are read first, for their levels. ``rules`` are what may be done with missing cells. ``schema`` has
    all columns that can be features; that of `result` goes without those that tell nothing.
    """

    def __init__(
        self, table: Table, roles: Roles, at: RowName = frame_row, rules: tuple[str, ...] = get_args(Missing)
    ) -> None:
        check_choice("missing", roles.missing, rules)
        roles.check(table.names)
        self._table, self._roles, self._at, self._rules = table, roles, at, rules
        self._notes: list[str] = []
        self._findings: list[Finding] = []
        self._infer_columns()
        self._n_rows = self._n_kept = self._n_lost = self._incomplete = 0
        self._gaps: dict[str, tuple[int, int]] = {}  # how many, and the first row
        self._filled: Counter[str] = Counter()
        features, free = self.schema.features, roles.features is None
        wanted = free and roles.target is not None
        self._numbers = [column.name for column in features if column.kind == "number" and wanted]
        self._low, self._high = np.full(len(self._numbers), np.inf), np.full(len(self._numbers), -np.inf)
        self._centre: Array | None = None
        self._sums, self._squares = np.zeros(len(self._numbers)), np.zeros((len(self._numbers),) * 2)
        self._copies = {column.name for column in features if free}

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
                "sites {} differ in case only, and are taken for different ones",
            )
        known = tuple(column for column in features if column is not None)
        self.schema = Schema(known, target, roles.offset, roles.missing, agreed=False)

    def _without_index(self, names: list[str]) -> list[str]:
        index = [name for name in names if is_row_number(name, self._head[name])]
        if index and len(index) < len(names):
            self._leave_out(index, "counts the rows (an index that was saved along)", "count the rows")
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
        """Count the cells of columns that are not plain numbers, and rows, in a pass over these columns alone."""
        target = [] if self._roles.target is None else [self._roles.target]
        text = [name for name in (*chosen, *target) if self._is_text(name)]
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

    def _leave_out(self, names: Sequence[str], one: str, several: str = "") -> None:
        if names:
            text = f"column {names[0]!r} {one}" if len(names) == 1 else f"columns {listed(names, 10)} {several}"
            self._notes.append(f"{text}: left out")

    def _note_case(self, names: Iterable[str], text: str) -> None:
        """Remark on the first two names that are the same but for capital letters."""
        lower: dict[str, str] = {}
        for name in names:
            if lower.setdefault(name.lower(), name) != name:
                self._notes.append(text.format(f"{lower[name.lower()]!r} and {name!r}"))
                return

    def _refuse(self, name: str, text: str) -> None:
        self._findings.append(Finding.from_text(name, text))

    def _feature(self, name: str, counted: Counter[Hashable] | None, n: int) -> Column | None:
        given, forced = self._roles.features is not None, name in self._roles.categories
        found = ColumnKind("number") if counted is None else kind_of_counts(counted, forced)
        levels = found.levels
        if found.kind == "number" or n == 0:
            return Column(name)
        if found.kind == "empty" and given:
            self._refuse(name, f"is empty in every row: leave it out of {argument('features')}")
        elif found.kind == "empty":
            self._leave_out([name], "is empty in every row")
        elif found.kind == "date":
            self._refuse(name, _DATES.format(argument("time")))
        elif len(levels) == 1:
            if not given or n > 1:
                self._leave_out([name], f"is {levels[0]!r} in every row")
        elif too_many_levels(len(levels), n) and not forced:
            how = f"of {argument('features')}" if given else f"with {argument('drop')}"
            self._refuse(
                name,
                f"text with {len(levels)} different values in {n} rows, such as {listed(levels[:2])}: a name or an "
                f"id? Leave it out {how} (or call it a category, {argument('categories')})",
            )
        else:
            self._note_case(levels, f"column {name!r} has {{}} as different levels")
            return Column(name, "category", levels=levels)
        return None

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

    def rows(self) -> Iterator[tuple[Columns, Index]]:
        """Yield the complete rows of each batch, and their numbers in the table; raise what stands in the way."""
        used = [*self._roles.taken, *(column.name for column in self.schema.features)]
        if self._findings:  # with what is wrong with the first rows, but no further
            self._check(self._head, self._at)
            raise_findings(self._findings)
        for batch in self._table.batches(used):
            n, start = len(batch[self._roles.site]), self._n_rows
            self._check(batch, lambda row, start=start: self._at(start + row))  # type: ignore[misc]
            raise_findings(self._findings)
            kept = self._complete(batch, n)
            self._n_rows += n
            rows = np.flatnonzero(kept).astype(np.int64)
            self._n_kept += rows.size
            if rows.size < n:
                batch = {name: cells[rows] for name, cells in batch.items()}
            if rows.size:
                self._notice(batch)
            yield batch, rows + start

    def _check(self, batch: Columns, at: RowName) -> None:
        """Find cells that are not what their column needs."""
        drop = argument("missing", "drop")
        fill = f"{drop} or {argument('missing', 'mean')}"
        target = self.schema.target
        checked = [(column.name, fill, "") for column in self.schema.features if column.kind == "number"]
        if target is not None and target.kind == "number":
            checked.append((target.name, drop, "; if these are classes, give each a letter (c1, c2)"))
        for role in ("offset", "weight"):
            if getattr(self._roles, role) is not None:
                checked.append((getattr(self._roles, role), drop, f" (it is the {role})"))
        for name, option, more in checked:
            empty = option if self._roles.missing == "refuse" else None
            for one in Column(name).findings(batch[name], "fill", at):
                if one.refuses:
                    self._findings.append(one.hinted(empty=empty, more=more or _names_hint(one)))
        if self._roles.weight is not None:
            values = parsed_numbers(batch[self._roles.weight]).values
            for row in np.flatnonzero(values < 0)[:1].tolist():
                self._refuse(self._roles.weight, f"a weight is at least 0, but it is {values[row]:g} in {at(row)}")

    def _complete(self, batch: Columns, n: int) -> Mask:
        """Return which rows of a batch are used, and count the gaps."""
        features = {column.name: column.gaps(batch[column.name]) for column in self.schema.features}
        roles = {name: _gaps(batch[name]) for name in self._roles.taken}
        fills = self._roles.missing in FILLING
        lost, incomplete = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        for name, mask in (roles | features).items():
            if mask.any():
                before, first = self._gaps.get(name, (0, self._n_rows + int(np.flatnonzero(mask)[0])))
                self._gaps[name] = before + int(mask.sum()), first
                incomplete |= mask
                lost |= False if fills and name in features else mask
        self._incomplete += int(incomplete.sum())
        self._n_lost += int(lost.sum())
        kept = ~lost
        if self._roles.weight is not None:
            kept &= parsed_numbers(batch[self._roles.weight]).values > 0
        if fills:
            self._filled.update({name: int(mask[kept].sum()) for name, mask in features.items()})
        return kept

    def _notice(self, batch: Columns) -> None:
        """Add up what tells constant columns, copies of the target, and columns that follow from others."""
        if self._roles.target is None:
            return
        target = batch[self._roles.target]
        for name in list(self._copies):
            cells = batch[name]
            if target.dtype.kind in "fb":
                same = name in self._numbers and np.array_equal(parsed_numbers(cells).values, target.astype(np.float64))
            else:
                same = cells.dtype.kind == "O" and bool((cells == target).all())
            if not same:
                self._copies.discard(name)
        if not self._numbers:
            return
        X = np.column_stack([parsed_numbers(batch[name]).values for name in self._numbers])
        there = ~np.isnan(X)
        self._low = np.minimum(self._low, np.where(there, X, np.inf).min(axis=0))
        self._high = np.maximum(self._high, np.where(there, X, -np.inf).max(axis=0))
        if self._centre is None:  # close to the mean, so that no digits are lost
            self._centre = np.where(there, X, 0.0).sum(axis=0) / np.maximum(there.sum(axis=0), 1)
        X = np.where(there, X - self._centre, 0.0)
        self._sums += X.sum(axis=0)
        self._squares += X.T @ X

    # --- the end

    def result(self) -> InferredTable:
        """Return what the table turned out to be, once all rows were read."""
        self._settle_gaps()
        roles, schema = self._roles, self.schema
        known = self._telling(schema.features)
        if not known and roles.features is None:
            raise self._no_feature()
        self._remark_on_names([column.name for column in known if column.kind == "number"])
        names = {column.name for column in known}
        told = roles.missing == "indicator"
        indicators = tuple(column.name for column in known if told and self._filled[column.name])
        encoded = [column.name for column in schema.features for _ in column.encoded]
        kept = np.array([k for k, name in enumerate(encoded) if name in names], dtype=np.int64)
        found = replace(schema, features=known, indicators=indicators)
        return InferredTable(found, tuple(self._notes), self._filled_text(known), kept, self._n_rows)

    def _settle_gaps(self) -> None:
        roles, n = self._roles, self._n_rows
        if roles.missing == "refuse" and self._gaps:
            raise DataError(self._gaps_text())
        features = {column.name for column in self.schema.features}
        causes = [name for name in self._gaps if not (roles.missing in FILLING and name in features)]
        if self._n_lost:
            verb = "is" if len(causes) == 1 else "are"
            lost = count(self._n_lost, "row")
            self._notes.append(f"{lost} of {n} left out, where {listed(causes, 10)} {verb} missing")
        if self._n_kept:
            return
        if n and self._n_lost == n:
            raise DataError("every row has a missing cell, so no row is left: fill some in")
        if n:
            raise DataError(f"the weight {roles.weight!r} is 0 in every row, so no row is left: check the column")
        raise DataError("there are no rows, at least one row is needed")

    def _gaps_text(self) -> str:
        shown = sorted(self._gaps, key=lambda name: -self._gaps[name][0])
        parts = [f"{name!r} in {self._gaps[name][0]} (first in {self._at(self._gaps[name][1])})" for name in shown[:10]]
        more = f" and {len(shown) - 10} more columns" if len(shown) > 10 else ""
        text = f"cells are missing: {', '.join(parts)}{more}, of {count(self._n_rows, 'row')}"
        if all(name in self._roles.taken for name in self._gaps):
            return f"{text}. Fill them in, or leave such rows out with {argument('missing', 'drop')}"
        hints = {
            "drop": f"leaves out the {count(self._incomplete, 'row')} with a gap",
            "mean": "fills in the mean of the rows that train",
            "indicator": "also adds a column that says where",
        }
        told = [f"{argument('missing', rule)} {hints[rule]}" for rule in self._rules if rule in hints]
        return f"{text}. Say what to do: {', '.join(told)}"

    def _telling(self, known: tuple[Column, ...]) -> tuple[Column, ...]:
        """Return the columns without those that are constant or follow from others; raise for a copy of the target."""
        constant = {name: low == high for name, low, high in zip(self._numbers, self._low, self._high, strict=True)}
        copies = [column.name for column in known if column.name in self._copies and not constant.get(column.name)]
        if copies and self._n_kept >= _ENOUGH_ROWS and self._roles.target is not None:
            which = f"column {copies[0]!r} is" if len(copies) == 1 else f"columns {listed(copies)} are"
            raise DataError(
                f"{which} the target {self._roles.target!r} under another name, so the model would have nothing to "
                f"learn: leave it out with {argument('drop')}"
            )
        flat = [name for name in self._numbers if constant[name]] if self._n_kept > 1 else []
        if not self._numbers or len(flat) == len(known):
            return known
        self._leave_out(flat, "is the same in every row", "are the same in every row")
        rest = [k for k, name in enumerate(self._numbers) if name not in flat]
        made = []
        if self._n_kept >= max(_ENOUGH_ROWS, 2 * len(rest)) and len(rest) > 1:
            scatter = (self._squares - np.outer(self._sums, self._sums) / self._n_kept)[np.ix_(rest, rest)]
            size = np.sqrt(np.diag(scatter))
            made = [self._numbers[rest[k]] for k in dependent_columns(scatter / np.outer(size, size))]
            self._leave_out(made, "follows from the columns before it", "follow from the columns before them")
        return tuple(column for column in known if column.name not in {*flat, *made})

    def _remark_on_names(self, numbers: Sequence[str]) -> None:
        found = {name: looks_like_name(name, self._head[name]) for name in numbers}
        hints = {
            "id": f"leave {{}} out with {argument('drop')} if so",
            "code": f"if they are names, say so with {argument('categories')}",
        }
        for kind, hint in hints.items():
            names = [name for name in numbers if found[name] == kind]
            if not names or (kind == "id" and self._roles.features is not None):
                continue
            several = len(names) > 1
            verb, what, its = ("look", f"{kind}s", "their") if several else ("looks", kind, "its")
            article = "" if several else "an " if kind == "id" else "a "
            self._notes.append(
                f"{listed(names, 10)} {verb} like {article}{what}, but {its} numbers are used as amounts; "
                + hint.format("them" if several else "it")
            )

    def _filled_text(self, known: Sequence[Column]) -> str:
        parts = {column.name: self._filled[column.name] for column in known if self._filled[column.name]}
        if not parts:
            return ""
        total = sum(parts.values())
        more = f" and {len(parts) - 10} more columns" if len(parts) > 10 else ""
        means = "the mean of its column" if total == 1 else "means of the rows that train"
        shown = ", ".join(f"{name!r} {n}" for name, n in list(parts.items())[:10])
        return f"{count(total, 'missing cell')} filled by {means}: {shown}{more}"


def _names_hint(finding: Finding) -> str:
    """Return what else cells that are not numbers may be, where they are many."""
    wrong = [str(cell).strip() for cell in finding.values.get("cells", ())]
    many = NUMBERS_PER_WORD * len(wrong) > finding.values["total"] and not all(map(COMMA_NUMBER.fullmatch, wrong))
    return f"; if these are names, say so with {argument('categories')}" if many else ""


def _gaps(cells: AnyArray) -> Mask:
    """Return which cells of a column that is not a feature are missing."""
    if cells.dtype.kind in "fb":
        return np.asarray(np.isnan(cells.astype(np.float64)))
    return np.fromiter((cell is None or cell != cell or cell == "" for cell in cells), dtype=bool, count=len(cells))


def dependent_columns(gram: Array, share: float = _OWN_SHARE) -> list[int]:
    """Return the columns that follow from those before them, by inner products ``(q, q)`` of columns of length 1."""
    left, out = gram.copy(), []
    # Cholesky, column after column: what is left of the diagonal is each column's own share
    for k in range(len(left)):
        if left[k, k] <= share:
            out.append(k)
            continue
        row = left[k, k + 1 :] / left[k, k]
        left[k + 1 :, k + 1 :] -= np.outer(left[k + 1 :, k], row)
    return out
