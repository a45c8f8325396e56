"""Infer the columns of a table: kinds, levels, gaps, constants, copies of the target, and columns to leave out.

`SchemaScan` reads any `Table` in batches: columns in memory are one batch, files that stay on disk are many. The kind
of a column depends only on the counts of its cells (`infer_kind`), and statistics of numbers are sums.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np

from fedkin._base import AnyArray, Array, Index, Mask, check_choice, check_whole, count, listed, some_of
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
from fedkin.data.schema import FILLING, Column, Missing, Roles, Schema, Spline, Table, event_column, positive_findings
from fedkin.errors import DataError, argument

#: With fewer rows than this, columns can be equal by chance.
_ENOUGH_ROWS = 10
#: Up to this many encoded columns all are compared with each other; beyond it, numbers only.
_MOST_COMPARED = 500
#: Standardised weight from which a column is named as part of a combination.
_SHARE_NAMED = 1e-6
#: A column is a combination of others if at most this share of its variance is unexplained.
_OWN_SHARE = 1e-13
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
        masks = [column.gaps(batch[column.name]) for column in schema.features]
        kept = ~np.any([*masks, *(_gaps(batch[name]) for name in roles.taken)], axis=0)
        if roles.weight is not None:
            kept &= parsed_numbers(batch[roles.weight]).values > 0
        if kept.any():
            yield batch if kept.all() else {name: cells[kept] for name, cells in batch.items()}


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
        self._n_rows = self._n_kept = self._n_lost = self._incomplete = 0
        self._gaps: dict[str, tuple[int, str]] = {}  # how many, and the first row
        self._filled: Counter[str] = Counter()
        self._start_comparing()

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
        how: dict[str, Any] = {"agreed": False, "log_offset": logs, "event": roles.event}
        self.schema = Schema(known, target, offset, roles.missing, **how)

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
            n, start = len(batch[self._roles.site]), self._n_rows
            self._check(batch, start)
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
        features = {column.name: column.gaps(batch[column.name]) for column in self.schema.features}
        roles = {name: _gaps(batch[name]) for name in self._roles.taken}
        fills = self._roles.missing in FILLING
        lost, incomplete = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        for name, mask in (roles | features).items():
            if mask.any():
                before, first = self._gaps.get(name, (0, ""))
                first = first or self._table.at(self._n_rows + int(np.flatnonzero(mask)[0]))
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

    # --- columns that tell nothing

    def _start_comparing(self) -> None:
        free = self._roles.features is None and self._roles.target is not None
        compared = self.schema.features if free else ()
        if sum(len(column.encoded) for column in compared) > _MOST_COMPARED:
            compared = tuple(column for column in compared if column.kind == "number")
        self._compared = compared
        q = sum(len(column.encoded) for column in compared) + 1  # the target comes last
        self._low, self._high = np.full(q, np.inf), np.full(q, -np.inf)
        self._sums, self._squares = np.zeros(q), np.zeros((q, q))

    def _notice(self, batch: RawColumns) -> None:
        """Add up sums that detect constant columns, copies of the target, and combinations of columns."""
        if not self._compared:
            return
        X = self._compared_columns(batch)
        gaps = np.isnan(X)
        has_gaps = bool(gaps.any())
        low, high = (np.fmin.reduce(X, 1), np.fmax.reduce(X, 1)) if has_gaps else (X.min(axis=1), X.max(axis=1))
        self._low, self._high = np.fmin(self._low, low), np.fmax(self._high, high)
        X -= self._centre[:, None]
        if has_gaps:
            X[gaps] = 0.0
        # not in place: a scan from another process has read-only arrays
        self._sums, self._squares = self._sums + X.sum(axis=1), self._squares + X @ X.T

    def _compared_columns(self, batch: RawColumns) -> Array:
        """Return the encoded columns that are compared, and the target, as rows ``(q, n)``: contiguous columns."""
        y = self.schema.target_of(batch)
        y = np.zeros(len(batch[self._roles.site])) if y is None else y
        y = y if self.schema.event is None else np.abs(y)
        return np.concatenate([*(column.encode(batch[column.name]).T for column in self._compared), y[None]])

    @cached_property
    def _centre(self) -> Array:
        """Approximate means of these columns, used as shifts to keep digits of squares."""
        kept = ~np.any([_gaps(self._head[name]) for name in self._roles.taken], axis=0)
        X = self._compared_columns({name: cells[kept] for name, cells in self._head.items()})
        gaps = np.isnan(X)
        return np.asarray(np.where(gaps, 0.0, X).sum(axis=1) / np.maximum((~gaps).sum(axis=1), 1))

    def of_piece(self, table: Table) -> SchemaScan:
        """Return the scan of a piece of the table, whose rows may be read elsewhere."""
        self._check(self._head, 0)
        raise_findings(self._findings)
        if self._compared:
            _ = self._centre  # is that of all pieces
        made = copy.copy(self)
        made._table, made._n_rows, made._n_kept, made._n_lost, made._incomplete = table, 0, 0, 0, 0
        made._gaps, made._filled, made._head = {}, Counter(), {}
        made._start_comparing()
        return made

    def add(self, piece: SchemaScan) -> None:
        """Add the scan of a piece of the table after its rows were read; pieces are added in order."""
        self._n_rows += piece._n_rows
        self._n_kept += piece._n_kept
        self._n_lost += piece._n_lost
        self._incomplete += piece._incomplete
        for name, (n, row) in piece._gaps.items():
            before, earlier = self._gaps.get(name, (0, row))
            self._gaps[name] = before + n, earlier
        self._filled.update(piece._filled)
        self._low, self._high = np.fmin(self._low, piece._low), np.fmax(self._high, piece._high)
        self._sums, self._squares = self._sums + piece._sums, self._squares + piece._squares

    def _informative_columns(self) -> tuple[Column, ...]:
        """Return the columns without constant or redundant ones; raise for a copy of the target."""
        known, n = self.schema.features, self._n_kept
        if not self._compared or n < 2:
            return known
        owner = [column.name for column in self._compared for _ in column.encoded]
        names = [name for column in self._compared for name in column.encoded]
        varies = self._low < self._high
        flat = {name for name in owner if not varies[:-1][[other == name for other in owner]].any()}
        if len(flat) == len(known):
            return known
        self._leave_out([column.name for column in known if column.name in flat], "the same in every row")
        scatter = self._squares - np.outer(self._sums, self._sums) / n
        varies &= np.diag(scatter) > 0
        size = np.sqrt(np.where(varies, np.diag(scatter), 1.0))
        used, gram = np.flatnonzero(varies[:-1]).tolist(), scatter / np.outer(size, size)
        if varies[-1] and n >= _ENOUGH_ROWS:
            self._refuse_copies(gram, {name: [k for k in used if owner[k] == name] for name in owner})
        if n < max(_ENOUGH_ROWS, 2 * len(used)):
            return tuple(column for column in known if column.name not in flat)
        made = dependent_columns(gram[np.ix_(used, used)])
        alone, reasons = [used[k] for k in range(len(used)) if k not in made], []
        made = [used[k] for k in made]
        whole = [name for name in dict.fromkeys(owner) if name not in flat]
        whole = [name for name in whole if all(k in made for k in used if owner[k] == name)]
        for k in made:
            share = np.linalg.lstsq(gram[np.ix_(alone, alone)], gram[alone, k], rcond=None)[0]
            parts = dict.fromkeys(owner[other] for other, w in zip(alone, share, strict=True) if abs(w) > _SHARE_NAMED)
            name = owner[k] if owner[k] in whole else names[k]
            reasons.append((owner[k] in whole, f"{name!r} follows from {listed(parts)}"))
        share = np.linalg.lstsq(gram[np.ix_(alone, alone)], gram[alone, -1], rcond=None)[0]
        if varies[-1] and len(alone) < n - 1 and 1 - share @ gram[alone, -1] <= _OWN_SHARE:
            parts = dict.fromkeys(owner[k] for k, w in zip(alone, share, strict=True) if abs(w) > _SHARE_NAMED)
            text = f"the target {self._roles.target!r} is an exact combination of {listed(parts)}"
            self._notes.append(f"{text}: leave out what was computed from it with {argument('drop')}")
        for out, verb in ((True, "left out: "), (False, "")):
            if texts := list(dict.fromkeys(text for left, text in reasons if left == out)):
                self._notes.append(verb + some_of(texts, 10))
        return tuple(column for column in known if column.name not in {*flat, *whole})

    def _refuse_copies(self, gram: Array, blocks: Mapping[str, list[int]]) -> None:
        """Raise for columns that equal the target, in other units, or with other names for its classes."""
        classes = self.schema.classes
        copies = []
        for name, block in blocks.items():
            same = classes is not None and len(block) == len(classes) - 1 > 0
            if len(block) == 1 or same or name in self._roles.spline:
                share = np.linalg.lstsq(gram[np.ix_(block, block)], gram[block, -1], rcond=None)[0]
                if 1 - share @ gram[block, -1] <= _OWN_SHARE:
                    copies.append(name)
        if copies:
            which = f"column {copies[0]!r} is" if len(copies) == 1 else f"columns {listed(copies)} are"
            raise DataError(
                f"{which} the target {self._roles.target!r} under another name or in other units, so the model would "
                f"have nothing to learn: leave it out with {argument('drop')}, or name all features with "
                f"{argument('features')}"
            )

    # --- the end

    def result(self) -> InferredTable:
        """Return the result of the scan, once all rows were read."""
        self._settle_gaps()
        roles, schema = self._roles, self.schema
        known = self._informative_columns()
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
        raise DataError("there are no rows; at least one is needed")

    def _gaps_text(self) -> str:
        shown = sorted(self._gaps, key=lambda name: -self._gaps[name][0])
        parts = [f"{self._gaps[name][0]} in {name!r} (first in {self._gaps[name][1]})" for name in shown[:10]]
        more = f" and {len(shown) - 10} more columns" if len(shown) > 10 else ""
        text = f"cells are missing: {', '.join(parts)}{more}; the table has {count(self._n_rows, 'row')}"
        if all(name in self._roles.taken for name in self._gaps):
            return f"{text}. Fill them in, or leave such rows out with {argument('missing', 'drop')}"
        hints = {
            "drop": f"leaves out the {count(self._incomplete, 'row')} with a gap",
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
            parts = {one.name: self._filled[one.name] for one in known if (one.kind == "category") == words}
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


def dependent_columns(gram: Array, share: float = _OWN_SHARE) -> list[int]:
    """Return the columns that are combinations of earlier ones, from inner products ``(q, q)`` of unit columns."""
    left, out = gram.copy(), []
    # Cholesky by columns: the remaining diagonal is each column's unexplained share
    for k in range(len(left)):
        if left[k, k] <= share:
            out.append(k)
            continue
        row = left[k, k + 1 :] / left[k, k]
        left[k + 1 :, k + 1 :] -= np.outer(left[k + 1 :, k], row)
    return out
