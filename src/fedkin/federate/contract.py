"""The contract of a federation: what all sites agree on before anything is computed.

The organiser writes it as a TOML file without seeing a row; every site checks its own rows against it. It names no
sites and no edges, which the organiser keeps separately. All entries of a `Contract`, checked together.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta, inspect

from fedkin._base import Array, count, hidden_text
from fedkin.admm import Average, GradientKind, StandIns, Wire
from fedkin.data import INTERCEPT, Column, Finding, Rows, Schema, columns_of, level_text, parsed_numbers
from fedkin.errors import FedkinError
from fedkin.federate.algebra import curve_values
from fedkin.federate.disclosure import check_count, check_disclosure
from fedkin.federate.settings import Thresholds
from fedkin.losses import LOSS_NAMES, LOSSES, Loss, describe_loss, described_loss, loss_for, loss_names

FORMAT = "fedkin-contract-1"

Placement = Literal["peer"] | StandIns
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Nonnegative = Annotated[float, Meta(ge=0)]

#: A theta longer than this many times the target's size (1 for classes and counts) is not a plausible estimate.
_BALL = 1000.0
#: Radius of the ball if nothing is known about the size of the target.
_WIDE_BALL = 1e9
#: Levels from which ``lam`` is chosen, and the largest, as a multiple of the target's size per edge.
_LEVELS, _TOP_LEVEL = 12, 2.0


class ContractError(FedkinError, ValueError):
    """A contract that cannot be read or contradicts itself."""


class EdgeTests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the tests by which neighbours decide before the rounds whether they are alike."""

    level: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    variance: Literal["model", "sandwich", "bartlett"] = "model"


class Rounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of Fed-ADMM between sites.

    - ``lam``: None until the organiser orders one; "cv" if sites choose it by held-out rows, among
      ``levels`` (None to derive them from target and graph), with ``level_rounds`` rounds for each;
      ``rho``: None for the default with scaled features.
    - ``radius``: of the ball in which every theta must lie; None to derive it from the target.
    - ``batch_size``: rows per round, None for all. Batches can reveal single rows, so a site takes part only if its
      custodian lifts the hard minima.
    - ``compare_every``: rounds between comparisons of the two copies of an edge's dual, 0 for never.
    - ``placement``: which machine holds the state of an edge: its two ends, a central one, or all of the component.
    - ``select``: how edges are tested before the rounds; None keeps all edges.
    """

    lam: Nonnegative | Literal["cv"] | None = None
    levels: tuple[Positive, ...] | None = None
    level_rounds: Count = 50
    rho: Positive | None = None
    radius: Positive | None = None
    rounds: Count = 1000
    batch_size: Count | None = None
    gradient: GradientKind = "plain"
    average: Average | None = None
    wire: Wire = "float64"
    checkpoint_every: Count = 100
    compare_every: Whole = 200
    placement: Placement = "peer"
    select: EdgeTests | None = None


class Contract(
    msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True, tag_field="format", tag=FORMAT
):
    """Agreement on what a federation computes, and from which data.

    - ``schema``: features, target and offset; ``loss``: name and parameters, as `fedkin.losses.describe_loss` gives
      them.
    - ``method``: "kin" finds similar sites from one summary of each, with probabilities; "fused" shrinks the
      differences along edges by a penalty, in rounds with a certified gap. ``penalty``, ``ridge`` and ``sparsity``
      (on scaled features) belong to "fused".
    - ``fixed``: columns with one effect at all sites, for the method "kin".
    - ``within``: a level above sites, such as "district", for the method "kin": each site names its own in its
      settings. In a table of all sites it is a column.
    - ``folds``, ``seed``: of the sums by fold, from which ``lam`` is chosen.
    - ``messages``: maximum number of messages with sums of its rows that a site may send, since each reveals more.

    Raises `ContractError` if two entries contradict each other.

    Examples
    --------
    >>> from fedkin.federate import Contract
    >>> contract = Contract.from_toml('''
    ... name = "heart"
    ... loss = "linear"
    ... [features]
    ... age = {unit = "years", low = 20, high = 100}
    ... ward = {levels = ["A", "B"]}
    ... [target]
    ... name = "days"
    ... ''')
    >>> contract.parameter_names
    ('(intercept)', 'age', 'ward=B')
    >>> Contract.from_bytes(contract.to_bytes()) == contract
    True
    """

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z", description="at most 40 letters, digits, _, . and -")
    ]
    schema: Schema
    loss: dict[str, Any]
    intercept: bool = True
    method: Literal["kin", "fused"] = "kin"
    penalty: Literal["l1", "l2", "linf"] = "l1"
    ridge: Nonnegative = 0.0
    sparsity: Nonnegative | Literal["cv", "cv-sites"] = 0.0
    fixed: tuple[str, ...] = ()
    within: str = ""
    folds: Annotated[int, Meta(ge=2, le=60)] = 5
    seed: Whole = 0
    messages: Count = 12
    thresholds: Thresholds = Thresholds()
    rounds: Rounds = Rounds()

    def __post_init__(self) -> None:
        if wrong := [*self._wrong_target(), *self._wrong_method()]:
            raise ContractError("; ".join(wrong))
        if (hidden := hidden_text(msgspec.json.decode(self.to_bytes()))) is not None:
            raise ContractError(f"{hidden!r} has characters that change what a terminal shows: remove them")

    def loss_object(self) -> Loss:
        """Return the loss."""
        return described_loss(self.loss)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Columns of the prepared rows, the intercept first if there is one."""
        return (INTERCEPT, *self.schema.names) if self.intercept else self.schema.names

    @property
    def n_params(self) -> int:
        """Length p of a site's theta."""
        return self.loss_object().n_params(len(self.column_names))

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the p parameters; with more than two classes, one block for each class except the first."""
        if self.n_params == len(self.column_names):
            return self.column_names
        assert self.schema.classes is not None
        return tuple(f"{name} [{level_text(one)}]" for one in self.schema.classes[1:] for name in self.column_names)

    def per_parameter(self, value: float) -> Array:
        """Return a level of ridge or sparsity for each parameter ``(p,)``, 0 for the intercept."""
        levels = np.full((self.n_params // len(self.column_names), len(self.column_names)), value)
        if self.intercept:
            levels[:, 0] = 0.0
        return levels.reshape(-1)

    @property
    def radius(self) -> float:
        """Radius of the ball in which every theta must lie, in prepared units."""
        if self.rounds.radius is not None:
            return self.rounds.radius
        target = self.schema.target
        if target is not None and target.kind != "number":
            return _BALL
        if target is None or target.low is None or target.high is None:
            return _WIDE_BALL
        return _BALL * max(abs(target.low), abs(target.high))

    def levels(self, n_edges: int) -> Array:
        """Return the levels ``(M,)`` from which ``lam`` is chosen, decreasing, for a graph with this many edges.

        By default they follow from the size of the target and the number of edges, not from rows. They range from a
        level at which the pull of the edges is about as large as the gradients of the losses down to a thousandth of
        it.
        """
        if self.rounds.levels is not None:
            return np.sort(np.array(self.rounds.levels, dtype=np.float64))[::-1].copy()
        target = self.schema.target
        size = 1.0 if target is None or target.kind != "number" else target.centre_and_scale[1]
        return np.asarray(_TOP_LEVEL * size / max(n_edges, 1) * np.logspace(0.0, -3.0, _LEVELS))

    @property
    def fixed_sparsity(self) -> float:
        """The sparsity of rounds, 0 if it is still to be chosen."""
        return 0.0 if isinstance(self.sparsity, str) else self.sparsity

    def check_rounds(self, where: str) -> None:
        """Raise `ContractError` unless the contract is for rounds; ``where`` is the file or directory to name."""
        if isinstance(self.sparsity, str):
            raise ContractError(
                f'{where}: sparsity = "{self.sparsity}" is chosen by cross-validation from summaries; rounds need a '
                "number: let the organiser set one in the contract"
            )
        if self.method != "fused":
            raise ContractError(
                f'{where}: method = "{self.method}" takes one summary of every site (fedkin site share) and no rounds; '
                'rounds find the fused estimate: let the organiser set method = "fused" in the contract'
            )

    def check(
        self, columns: Mapping[str, object], own: Thresholds | None = None, at: Callable[[int], str] | None = None
    ) -> list[Finding]:
        """Return everything in a site's table that does not fit; ``own`` are the site's stricter thresholds.

        ``at`` returns the name of a row, numbered from 0 (`fedkin.data.row_places` for rows of a file).
        """
        findings = self.schema.check(columns) if at is None else self.schema.check(columns, at=at)
        if not any(finding.refuses for finding in findings):
            return [*findings, *check_disclosure(self, self.prepare(columns), own)]
        n = len(next(iter(columns_of(columns).values()), ()))  # it cannot be prepared, but its rows can be counted
        return [*findings, *check_count(self, n, own)]

    def prepare(self, columns: Mapping[str, object]) -> Rows:
        """Return a site's table as prepared rows; raise one `DataError` with everything that does not fit."""
        return self.schema.rows(columns, self.intercept)

    def blocks(self, X: Array) -> Iterator[tuple[Column, Array]]:
        """Yield each feature with its columns of prepared rows."""
        at = int(self.intercept)
        for column in self.schema.features:
            yield column, X[:, at : (at := at + len(column.encoded))]

    def in_table_units(self, rows: Rows) -> dict[str, Array]:
        """Return the columns of prepared rows in the units of the table, whatever the ranges, scales, knots or levels.

        Numbers have 9 digits; levels are numbers derived from their text.
        """
        found, target = dict[str, Array](), self.schema.target
        for column, block in self.blocks(rows.X):
            centre, scale = column.centre_and_scale
            if column.kind == "category":
                found[column.name] = _level_numbers(column)[(block @ np.arange(1, block.shape[1] + 1)).astype(np.int64)]
            elif column.knots:
                found[column.name] = curve_values(column.knots, block)
            else:
                found[column.name] = block[:, 0] * scale + (centre if self.intercept else 0.0)
        if target is not None and rows.y is not None:
            known = target.kind == "category"
            found[target.name] = _level_numbers(target)[rows.y.astype(np.int64)] if known else rows.y
        if rows.offset is not None:
            found[f"offset {self.schema.offset}"] = rows.offset
        for name, cells in found.items():
            size = np.log10(np.abs(cells), out=np.zeros(len(cells)), where=cells != 0)
            unit = 10.0 ** (8 - np.floor(size))
            found[name] = np.round(cells * unit) / unit + 0.0
        return found

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `to_bytes`, in hexadecimal digits: equal if and only if two contracts are."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @cached_property
    def columns_digest(self) -> str:
        """SHA-256 of what is summed: the loss and the prepared columns, ignoring the scale, which does not matter for a
        quadratic loss.

        Sums under two contracts with the same digest reveal no more than those under one of them.
        """
        schema, scaled = self.schema, not self.loss_object().quadratic
        columns = [
            [
                one.name,
                sorted(map(level_text, one.levels)),
                one.knots,
                [one.levels, one.centre_and_scale] if scaled else 0,
            ]
            for one in schema.features
        ]
        target = None if schema.target is None else [schema.target.name, schema.target.levels]
        rest = [self.loss, target, schema.offset, schema.event, schema.log_offset, self.intercept if scaled else 0]
        told = [columns if scaled else sorted(columns, key=lambda one: str(one[0])), *rest]
        return hashlib.sha256(msgspec.json.encode(told, order="sorted")).hexdigest()

    def to_bytes(self) -> bytes:
        """Return canonical JSON, with only the agreed parts of the schema: nothing that is inferred from rows."""
        schema = self.schema
        agreed = {
            "features": [_given(column) for column in schema.features],
            "target": None if schema.target is None else _given(schema.target),
            "offset": schema.offset,
            **({} if schema.event is None else {"event": schema.event}),
            **({"log_offset": True} if schema.log_offset else {}),
            "missing": schema.missing,
        }
        plain = {**msgspec.structs.asdict(self), "format": FORMAT, "schema": agreed}
        return msgspec.json.encode(plain, order="sorted")

    @classmethod
    def from_bytes(cls, text: bytes) -> Contract:
        """Return the contract in JSON."""
        try:
            plain = msgspec.json.decode(text)
            made = msgspec.convert(plain, cls)
            same = msgspec.json.decode(made.to_bytes()) == plain
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, FedkinError) as error:
            raise ContractError(f"the contract cannot be used: {error}") from None
        if not same:
            raise ContractError("the contract has entries that this version of Fedkin does not know, or lacks some")
        return made

    @classmethod
    def from_toml(cls, text: str, name: str = "the contract") -> Contract:
        """Return the contract in a TOML text; errors name it ``name``."""
        try:
            entries = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ContractError(f"{name}: not valid TOML: {error}; check quotes, brackets and commas there") from None
        reading = _Reading(text)
        contract = reading.contract(entries)
        if contract is None:
            lines = reading.wrong
            raise ContractError("\n  ".join([f"{name}:", *lines]) if len(lines) > 1 else f"{name}: {lines[0]}")
        return contract

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Contract:
        """Read the contract in a TOML file; raise `ContractError` with everything that is wrong."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise ContractError(f"{path} is not UTF-8 text: save it as UTF-8") from None
        except OSError as error:
            raise ContractError(f"{path} cannot be read: {error.strerror}; give the TOML file of a contract") from None
        return cls.from_toml(text, str(path))

    def _wrong_method(self) -> list[str]:
        rounds = self.rounds
        inferred = not self.schema.agreed or self.schema.fill or self.schema.indicators
        wrong = ["its schema was inferred from rows, not agreed on"] if inferred else []
        unknown = [name for name in self.fixed if name not in [column.name for column in self.schema.features]]
        if unknown:
            wrong.append(
                f"fixed names {unknown[0]!r}, which is not among [features]: correct the name, or leave it out"
            )
        of_kin = [name for name in ("fixed", "within") if getattr(self, name)]
        if of_kin and self.method != "kin":
            wrong.append(f'{of_kin[0]} needs method "kin", but method is "fused": set method = "kin", or leave it out')
        if self.within in [column.name for column in self.schema.columns]:
            wrong.append(f"within names {self.within!r}, which is a feature or the target: leave it out of one of them")
        given = [name for name in ("penalty", "ridge", "sparsity") if getattr(self, name) not in ("l1", 0.0)]
        if self.method == "kin" and given:
            wrong.append(
                f'{given[0]} needs the fused estimator, but method is "kin": set method = "fused", or leave it out'
            )
        if rounds.placement != "peer" and rounds.gradient != "plain":
            wrong.append(
                f'rounds.gradient is "{rounds.gradient}", but where sites come and go they keep no state: use "plain"'
            )
        if rounds.select is not None and rounds.placement != "peer":
            wrong.append(f'rounds.select is for placement "peer", not for "{rounds.placement}"')
        if rounds.lam == "cv" and rounds.placement != "peer":
            wrong.append(f'rounds.lam = "cv" is for placement "peer", not for "{rounds.placement}": set a number')
        numbers = [rounds.lam, rounds.rho, rounds.radius, self.ridge, self.sparsity, self.thresholds.rows_per_parameter]
        numbers += rounds.levels or ()
        batches = rounds.batch_size is not None or rounds.gradient != "plain"
        if batches and self.loss.get("name") in LOSSES and not self.loss_object().additive:
            wrong.append(f"rounds of the {self.loss['name']} loss use all rows: leave out batch_size and gradient")
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float | int)):
            wrong.append("a number is not finite")
        return wrong

    def _wrong_target(self) -> list[str]:
        name, target = str(self.loss.get("name")), self.schema.target
        try:
            loss = self.loss_object()
        except FedkinError as error:
            return [f"loss: {error}"]
        if loss.target is None:
            wrong = [] if target is None else [f"the {name} loss has no target: leave [target] out"]
            return [*wrong, f"the {name} loss has no intercept: set intercept = false"] if self.intercept else wrong
        if target is None:
            return [f"the {name} loss needs a [target]"]
        if (loss.target == "survival") != (self.schema.event is not None):
            has = f'event = "{self.schema.event}" is for {", ".join(loss_names("survival"))}'
            return [
                f"the {name} loss needs a column of events: event in [target]" if self.schema.event is None else has
            ]
        if self.intercept and not loss.takes_intercept:
            return [f"the {name} loss has no intercept: set intercept = false"]
        if loss.target == "class":
            if target.kind != "category":
                return [f'the {name} loss predicts classes, so target.kind must be "category", with levels']
            classes, n = loss.n_params(1) + 1, len(target.levels)
            if classes != n:
                other = loss.from_classes(n).name
                hint = "" if other == name else f': set loss = "{other}"'
                return [f"the {name} loss has {classes} classes, but the target has {count(n, 'level')}{hint}"]
        elif target.kind == "category":
            other = loss_for("class", len(target.levels)).name
            return [f'the {name} loss predicts numbers, but the target is a category: set loss = "{other}"']
        elif loss.target == "count" and target.kind != "count":
            return [f'the {name} loss predicts counts, so target.kind must be "count"']
        return []


_OF_SCHEMA = ("features", "target", "offset", "exposure", "missing")
_TABLES = {"thresholds": Thresholds, "rounds": Rounds, "select": EdgeTests}
_EXAMPLES = {
    "name": 'name = "heart"',
    "loss": f'loss = "linear" (or {", ".join(LOSS_NAMES)})',
    "features": "a table [features.NAME] for each column",
}
_COLUMN = 'a column is a table, such as {unit = "kg", low = 30, high = 250} or {levels = ["no", "yes"]}'


_KINDS = {
    inspect.FloatType: "a number",
    inspect.IntType: "a whole number",
    inspect.StrType: "text",
    inspect.BoolType: "true or false",
}
_LIMITS = (("ge", "of at least"), ("gt", "above"), ("le", "and at most"), ("lt", "and below"))


class _Reading:
    """A TOML file that is read into a contract; all mistakes are collected and reported together."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self.wrong: list[str] = []

    def contract(self, entries: Mapping[str, Any]) -> Contract | None:
        self.wrong += [f"{key} is missing: {words}" for key, words in _EXAMPLES.items() if key not in entries]
        own = {key: value for key, value in entries.items() if key not in (*_OF_SCHEMA, "loss")}
        made = self._entries(Contract, own, (), without="schema", more=(*_OF_SCHEMA, "loss"))
        schema = self._schema(entries)
        loss = self._loss(entries["loss"], schema) if "loss" in entries else None
        with self._noting():
            if not self.wrong and schema is not None and loss is not None:
                return Contract(schema=schema, loss=loss, **made)
        return None

    def _entries(
        self, form: type, given: Mapping[str, Any], path: tuple[str, ...], without: str = "", more: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Convert the entries of a table one by one, so that every mistake is found."""
        hints, made = get_type_hints(form, include_extras=True), {}
        known = sorted({*hints, *more} - {without})
        for key, value in given.items():
            place = (*path, key)
            if key not in known:
                section = f"in [{'.'.join(path)}]" if path else "at the top"
                near = _near(key, known) or f"; known are {', '.join(known)}"
                self._mistake(place, f"unknown key {key!r} {section}{near}")
            elif key in _TABLES and isinstance(value, dict):
                made[key] = _TABLES[key](**self._entries(_TABLES[key], value, place))
            elif isinstance(value, str) and (words := _literals(hints[key])) and value not in words:
                numbers = "" if get_origin(hints[key]) is Literal else " or a number"
                allowed = " or ".join(f'"{word}"' for word in words)
                self._mistake(place, f'{".".join(place)} must be {allowed}{numbers}, got "{value}"')
            else:
                try:
                    made[key] = msgspec.convert(value, hints[key])
                except msgspec.ValidationError:
                    self._mistake(place, f"{'.'.join(place)} must be {_allowed(hints[key])}, got {value!r}")
        return made

    def _schema(self, entries: Mapping[str, Any]) -> Schema | None:
        features, target = entries.get("features", {}), entries.get("target")
        offset, exposure = entries.get("offset"), entries.get("exposure")
        before, predicted, event = len(self.wrong), None, None
        if not isinstance(features, dict) or ("features" in entries and not features):
            self._mistake(("features",), "features must be a table with an entry for each column")
            return None
        columns = [self._column(name, given, ("features", name)) for name, given in features.items()]
        if isinstance(target, dict) and isinstance(target.get("name"), str):
            rest = {key: value for key, value in target.items() if key not in ("name", "event")}
            if "event" in target and not isinstance(event := target["event"], str):
                self._mistake(("target", "event"), "event must be the name of a column")
            predicted = self._column(target["name"], rest, ("target",))
        elif target is not None:
            self._mistake(("target",), 'target needs the name of a column: name = "days"')
        for key, given in (("offset", offset), ("exposure", exposure)):
            if given is not None and not isinstance(given, str):
                self._mistake((key,), f"{key} must be the name of a column")
        if offset is not None and exposure is not None:
            self._mistake(("exposure",), "give offset or exposure: an exposure is the exponential of an offset")
        with self._noting():
            if len(self.wrong) == before and columns:
                missing, logs = entries.get("missing", "refuse"), exposure is not None
                how: dict[str, Any] = {"log_offset": logs, "event": event}
                return Schema(tuple(filter(None, columns)), predicted, offset or exposure, missing, **how)
        return None

    def _column(self, name: str, given: Any, path: tuple[str, ...]) -> Column | None:
        if not isinstance(given, dict):
            self._mistake(path, _COLUMN)
            return None
        before, made = len(self.wrong), self._entries(Column, given, path, without="name")
        with self._noting(*path):
            if len(self.wrong) == before:
                return Column(**{"kind": "category" if "levels" in made else "number", **made, "name": name})
        return None

    def _loss(self, given: Any, schema: Schema | None) -> dict[str, Any] | None:
        """Return a loss with all its parameters, so that stating a default gives the same contract as omitting it."""
        described = dict(given) if isinstance(given, dict) else {"name": given}
        if (name := described.get("name")) not in LOSS_NAMES:
            near = _near(str(name), LOSS_NAMES)
            self._mistake(("loss",), f"unknown loss {name!r}{near}; choose one of {', '.join(LOSS_NAMES)}")
            return None
        if schema is not None and schema.classes is not None:
            whole = describe_loss(LOSSES[name].from_classes(len(schema.classes)))
            described = {**whole, **described} if whole["name"] == name else described
        with self._noting("loss"):
            loss = described_loss(described)
            floats = {one.name for one in fields(loss) if isinstance(one.default, float)} if is_dataclass(loss) else ()
            return {key: float(value) if key in floats else value for key, value in describe_loss(loss).items()}
        return None

    @contextmanager
    def _noting(self, *path: str) -> Iterator[None]:
        """Record a mistake within this context, with its place."""
        try:
            yield
        except FedkinError as error:
            self._mistake(path, f"{'.'.join(path)}: {error}" if path else str(error))

    def _mistake(self, path: tuple[str, ...], words: str) -> None:
        line = _line_of(self._lines, path) if path else None
        self.wrong.append(words if line is None else f"line {line}: {words}")


def _level_numbers(column: Column) -> Array:
    """Return a number for each level of a category: the number in its text, or one derived from the text."""
    texts = [level_text(one) for one in column.levels]
    known = parsed_numbers(np.array(texts, dtype=object)).values
    other = [float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")) for text in texts]
    return np.where(np.isfinite(known), known, other)


def _literals(kind: Any) -> list[str]:
    """Return the words that a type allows; none if any text is allowed."""
    if get_origin(kind) is Literal:
        return [word for word in get_args(kind) if isinstance(word, str)]
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    return [] if str in parts else [word for part in parts for word in _literals(part)]


def _allowed(hint: Any) -> str:
    """Describe the values that a type allows."""
    kind, parts = inspect.type_info(hint), [f'"{word}"' for word in _literals(hint)]
    if isinstance(kind, inspect.Metadata):
        return str((kind.extra_json_schema or {})["description"])
    for one in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        limits = [f"{words} {getattr(one, name):g}" for name, words in _LIMITS if getattr(one, name, None) is not None]
        if not isinstance(one, inspect.NoneType | inspect.LiteralType):
            parts.append(" ".join([_KINDS.get(type(one), "a list"), *limits]))
    return " or ".join(parts)


def _given(column: Column) -> dict[str, Any]:
    """Return the entries of a column that are not empty."""
    values = {one.name: getattr(column, one.name) for one in fields(column)}
    return {name: value for name, value in values.items() if value not in (None, "", ())}


def _near(word: str, known: Iterable[str]) -> str:
    alike = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {alike[0]!r}?)" if alike else ""


def _line_of(lines: list[str], path: tuple[str, ...]) -> int | None:
    """Return the line of an entry: that of its key in the section, or of the section's header."""
    names = [rf"""["']?{re.escape(name)}["']?""" for name in path]
    for depth in range(len(path), -1, -1):
        header = re.compile(r"\s*\[\s*" + r"\s*\.\s*".join(names[:depth]) + r"\s*\]")
        start = next((k + 1 for k, line in enumerate(lines) if header.match(line)), 0) if depth else 0
        if depth and not start:
            continue
        if depth == len(path):
            return start
        # the key, or its first part, before the next section
        for reach in range(len(path), depth, -1):
            key = re.compile(r"\s*" + r"\s*\.\s*".join(names[depth:reach]) + r"\s*[.=]")
            for k in range(start, len(lines)):
                if lines[k].lstrip().startswith("["):
                    break
                if key.match(lines[k]):
                    return k + 1
        if start:
            return start
    return None
