"""The contract of a federation: what all sites agree on before anything is computed.

The organiser writes it as a TOML file without seeing a row; every site checks its own rows against it. It names no
sites and no edges, which the organiser keeps separately. All entries of a `Contract`, checked together.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fedkin._base import Array, count, hidden_text
from fedkin.admm import Average, GradientKind, StandIns, Wire
from fedkin.core import site_summary
from fedkin.data import INTERCEPT, Column, Finding, Rows, Schema, columns_of, level_text, parsed_numbers
from fedkin.errors import FedkinError
from fedkin.federate.algebra import curve_values
from fedkin.federate.disclosure import check_count, check_disclosure, check_point
from fedkin.federate.settings import Thresholds
from fedkin.federate.toml import Reading, to_toml
from fedkin.losses import LOSSES, Loss, described_loss, loss_for, loss_names

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
    messages: Annotated[int, Meta(ge=1, le=100)] = 12
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
            rows = self.prepare(columns)
            return [*findings, *(check_disclosure(self, rows, own) or self._check_estimate(rows, own))]
        n = len(next(iter(columns_of(columns).values()), ()))  # it cannot be prepared, but its rows can be counted
        return [*findings, *check_count(self, n, own)]

    def _check_estimate(self, rows: Rows, own: Thresholds | None) -> list[Finding]:
        """Return what forbids the first summary of the method kin: sums at the estimate from these rows alone."""
        loss = self.loss_object()
        if self.method != "kin" or loss.quadratic:  # rounds have checks of their own
            return []
        at = site_summary(self.name, rows, loss, feature_names=self.column_names, seed=self.seed).at
        where = "the sums at the estimate from these rows alone could single rows out"
        return [replace(one, text=f"{where}: {one.text}") for one in check_point(self, rows, at, own)]

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
        reading = Reading(text)
        contract: Contract | None = reading.contract(cls, entries)
        if contract is None:
            lines = reading.wrong
            raise ContractError("\n  ".join([f"{name}:", *lines]) if len(lines) > 1 else f"{name}: {lines[0]}")
        return contract

    def to_toml(self) -> str:
        """Return the contract as TOML with every entry, including those that the organiser's file omits."""
        return to_toml(self.to_bytes())

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

    def _wrong_method(self) -> Iterator[str]:
        """Yield what contradicts the method."""
        rounds, schema, names = self.rounds, self.schema, [column.name for column in self.schema.features]
        if not schema.agreed or schema.fill or schema.indicators:
            yield "its schema was inferred from rows, not agreed on"
        if unknown := [name for name in self.fixed if name not in names]:
            yield f"fixed names {unknown[0]!r}, which is not among [features]: correct the name, or leave it out"
        of_kin = [name for name in ("fixed", "within") if getattr(self, name)]
        if of_kin and self.method != "kin":
            yield f'{of_kin[0]} needs method "kin", but method is "fused": set method = "kin", or leave it out'
        if self.within in [column.name for column in schema.columns]:
            yield f"within names {self.within!r}, which is a feature or the target: leave it out of one of them"
        defaults = {one.name: one.default for one in msgspec.structs.fields(self)}
        of_fused = [name for name in ("penalty", "ridge", "sparsity") if getattr(self, name) != defaults[name]]
        if of_fused and self.method == "kin":
            yield f'{of_fused[0]} needs the fused estimator, but method is "kin": set method = "fused", or leave it out'
        if rounds.placement != "peer" and rounds.gradient != "plain":
            yield f'rounds.gradient is "{rounds.gradient}", but where sites come and go they keep no state: use "plain"'
        if rounds.placement != "peer" and rounds.select is not None:
            yield f'rounds.select is for placement "peer", not for "{rounds.placement}"'
        if rounds.placement != "peer" and rounds.lam == "cv":
            yield f'rounds.lam = "cv" is for placement "peer", not for "{rounds.placement}": set a number'
        batches = rounds.batch_size is not None or rounds.gradient != "plain"
        if batches and self.loss.get("name") in LOSSES and not self.loss_object().additive:
            yield f"rounds of the {self.loss['name']} loss use all rows: leave out batch_size and gradient"
        numbers = [rounds.lam, rounds.rho, rounds.radius, self.ridge, self.sparsity, self.thresholds.rows_per_parameter]
        finite = (math.isfinite(one) for one in (*numbers, *(rounds.levels or ())) if isinstance(one, float | int))
        if not all(finite):
            yield "a number is not finite"

    def _wrong_target(self) -> Iterator[str]:
        """Yield what contradicts the loss."""
        name, target, event = str(self.loss.get("name")), self.schema.target, self.schema.event
        try:
            loss = self.loss_object()
        except FedkinError as error:
            yield f"loss: {error}"
            return
        if self.intercept and (loss.target is None or not loss.takes_intercept):
            yield f"the {name} loss has no intercept: set intercept = false"
        if loss.target is None and target is not None:
            yield f"the {name} loss has no target: leave [target] out"
        elif loss.target is not None and target is None:
            yield f"the {name} loss needs a [target]"
        elif loss.target == "survival" and event is None:
            yield f"the {name} loss needs a column of events: event in [target]"
        elif loss.target != "survival" and event is not None:
            yield f'event = "{event}" is for {", ".join(loss_names("survival"))}'
        elif target is None:
            return
        elif loss.target == "class" and target.kind != "category":
            yield f'the {name} loss predicts classes, so target.kind must be "category", with levels'
        elif loss.target == "class" and (classes := loss.n_params(1) + 1) != (n := len(target.levels)):
            other = loss.from_classes(n).name
            hint = "" if other == name else f': set loss = "{other}"'
            yield f"the {name} loss has {classes} classes, but the target has {count(n, 'level')}{hint}"
        elif loss.target != "class" and target.kind == "category":
            other = loss_for("class", len(target.levels)).name
            yield f'the {name} loss predicts numbers, but the target is a category: set loss = "{other}"'
        elif loss.target == "count" and target.kind != "count":
            yield f'the {name} loss predicts counts, so target.kind must be "count"'


def _level_numbers(column: Column) -> Array:
    """Return a number for each level of a category: the number in its text, or one derived from the text."""
    texts = [level_text(one) for one in column.levels]
    known = parsed_numbers(np.array(texts, dtype=object)).values
    other = [float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")) for text in texts]
    return np.where(np.isfinite(known), known, other)


def _given(column: Column) -> dict[str, Any]:
    """Return the entries of a column that are not empty."""
    values = {one.name: getattr(column, one.name) for one in fields(column)}
    return {name: value for name, value in values.items() if value not in (None, "", ())}
