"""The contract of a federation: what everybody agrees on before anything is computed.

The organiser writes it, as a TOML file (`fedkin.federate.contract.files`), without seeing a row; every site checks its
own rows against it. It names no sites and no edges: those are the organiser's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from os import PathLike
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fedkin._base import Array, count
from fedkin.admm import Average, GradientKind, StandIns, Wire
from fedkin.data import INTERCEPT, Finding, Rows, Schema, columns_of, level_text
from fedkin.errors import FedkinError
from fedkin.federate.contract.words import in_words
from fedkin.losses import Loss, described_loss, loss_for

FORMAT = "fedkin-contract-1"

Placement = Literal["peer"] | StandIns
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Nonnegative = Annotated[float, Meta(ge=0)]

#: A theta longer than this many times the target's size (1 for classes and counts) is nobody's estimate.
_BALL = 1000.0
#: The ball where nothing is known about the size of the target.
_WIDE_BALL = 1e9


class ContractError(FedkinError, ValueError):
    """A contract that cannot be read or does not hold together."""


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a site must have before anything is computed from its rows; a site may ask for more, never for less.

    ``rows_per_parameter`` and ``cell`` are DataSHIELD's defaults: nfilter.glm = 0.33 parameters per row, and
    nfilter.tab = 3 rows in every cell that is not empty. For ``rows`` its nfilter.subset is 3; here it is 10, which it
    names as where census offices are going (https://wiki.datashield.org/en/statdev/disclosure-checks).
    """

    rows: Count = 10
    rows_per_parameter: Nonnegative = 3.0
    cell: Count = 3

    def stricter(self, other: Thresholds) -> Thresholds:
        """The larger of both, one by one.

        Examples
        --------
        >>> from fedkin.federate import Thresholds
        >>> Thresholds(rows=20).stricter(Thresholds(cell=5))
        Thresholds(rows=20, rows_per_parameter=3.0, cell=5)
        """
        return Thresholds(
            rows=max(self.rows, other.rows),
            rows_per_parameter=max(self.rows_per_parameter, other.rows_per_parameter),
            cell=max(self.cell, other.cell),
        )


class EdgeTests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How neighbours test, before the rounds, whether they are kin."""

    level: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    variance: Literal["model", "sandwich", "bartlett"] = "model"


class Rounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How Fed-ADMM runs between sites.

    - ``lam``: None until the organiser orders one; ``rho``: None for the one that goes with scaled features.
    - ``radius``: of the ball in which every theta must lie; None for one that follows from the target.
    - ``batch_size``: rows per round, None for all; ``smallest_batch``: what batches may be as small as, by default the
      least number of rows of a site, since a theta from few rows gives them away.
    - ``compare_every``: rounds between comparisons of the two copies of an edge's dual, 0 for never.
    - ``placement``: who holds the state of an edge: its two ends, a central machine, or all of the component.
    - ``select``: how edges are tested before the rounds, None for keeping all.
    """

    lam: Nonnegative | None = None
    rho: Positive | None = None
    radius: Positive | None = None
    rounds: Count = 1000
    batch_size: Count | None = None
    smallest_batch: Count | None = None
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
    """What a federation computes, and from what.

    Attributes
    ----------
    name : str
    schema : Schema
        Features, target and offset.
    loss : dict
        Name and parameters, as `fedkin.losses.describe_loss` gives them.
    intercept : bool
    method : "kin" | "fused"
        Whether who is alike is found from one message, with probabilities, or edges are fused by a penalty. Only the
        second way has a penalty, rounds and a certified gap.
    penalty : "l1" | "l2" | "linf"
    ridge, sparsity : float
        Extra penalties of every site, on scaled features.
    folds, seed : int
        Of the sums by fold, from which ``lam`` is chosen.
    messages : int
        How often a site may say sums of its rows at most, the first time included: each answer tells more.
    thresholds : Thresholds
    rounds : Rounds

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

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z")]
    schema: Schema
    loss: dict[str, Any]
    intercept: bool = True
    method: Literal["kin", "fused"] = "kin"
    penalty: Literal["l1", "l2", "linf"] = "l1"
    ridge: Nonnegative = 0.0
    sparsity: Nonnegative = 0.0
    folds: Annotated[int, Meta(ge=2, le=60)] = 5
    seed: Whole = 0
    messages: Count = 12
    thresholds: Thresholds = Thresholds()
    rounds: Rounds = Rounds()

    # --- what is fitted ---------------------------------------------------------------------------------------

    def loss_object(self) -> Loss:
        """The loss."""
        return described_loss(self.loss)

    @property
    def n_features(self) -> int:
        """Columns of the prepared rows, the intercept among them."""
        return len(self.schema.names) + int(self.intercept)

    @property
    def n_params(self) -> int:
        """Length p of a site's theta."""
        return self.loss_object().n_params(self.n_features)

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """What each of the p parameters belongs to; with more than two classes, class after class but the first."""
        names = (INTERCEPT, *self.schema.names) if self.intercept else self.schema.names
        if self.n_params == len(names):
            return names
        assert self.schema.classes is not None
        return tuple(f"{name} [{level_text(label)}]" for label in self.schema.classes[1:] for name in names)

    def per_parameter(self, value: float) -> Array:
        """A level of ridge or sparsity for each parameter ``(p,)``, 0 for the intercept, as `Problem` takes it."""
        levels = np.full((self.n_params // self.n_features, self.n_features), value)
        if self.intercept:
            levels[:, 0] = 0.0
        return levels.reshape(-1)

    @property
    def radius(self) -> float:
        """Of the ball in which a theta must lie to count, in prepared units."""
        if self.rounds.radius is not None:
            return self.rounds.radius
        target = self.schema.target
        if target is None or target.kind != "number":
            return _BALL if target is not None else _WIDE_BALL
        if target.low is None or target.high is None:
            return _WIDE_BALL
        return _BALL * max(abs(target.low), abs(target.high))

    @property
    def smallest_batch(self) -> int:
        """The fewest rows that a round may be computed from."""
        return self.thresholds.rows if self.rounds.smallest_batch is None else self.rounds.smallest_batch

    def check_rounds(self, where: str) -> None:
        """Raise `ContractError` unless the method is one of rounds; ``where`` is the file or directory to name."""
        if self.method != "fused":
            raise ContractError(
                f'{where}: method = "{self.method}" takes one message of every site (fedkin site share) and no rounds; '
                'rounds find the fused estimate: let the organiser say method = "fused" in the contract'
            )

    # --- rows of a site ---------------------------------------------------------------------------------------

    def check(
        self,
        columns: Mapping[str, object],
        thresholds: Thresholds | None = None,
        at: Callable[[int], str] | None = None,
    ) -> list[Finding]:
        """Everything about a site's table that does not fit, in words; thresholds are the contract's or stricter.

        ``at`` says what a row, numbered from 0, is called (`fedkin.data.row_places` for those of a file).

        Examples
        --------
        >>> from fedkin.federate import Contract
        >>> contract = Contract.from_toml('name = "h"\\nloss = "linear"\\nfeatures.x = {}\\ntarget.name = "y"')
        >>> print(*contract.check({"x": [1.0, 2.0], "y": [1.0, 2.0]}), sep=chr(10))
        2 rows, but at least 10 are needed
        """
        from fedkin.federate.contract.disclosure import too_few

        findings = self.schema.check(columns) if at is None else self.schema.check(columns, at=at)
        if not any(finding.refuses for finding in findings):
            return [*findings, *self.disclosures(self.prepare(columns), thresholds)]
        n = len(next(iter(columns_of(columns).values()), ()))  # it cannot be prepared, but its rows can be counted
        return [*findings, *too_few(self, n, self._least(thresholds))]

    def prepare(self, columns: Mapping[str, object]) -> Rows:
        """A site's table as prepared rows; raises one `DataError` with all that does not fit the schema."""
        return self.schema.rows(columns, self.intercept)

    def disclosures(self, rows: Rows, thresholds: Thresholds | None = None) -> list[Finding]:
        """Why prepared rows are too few to compute anything from; [] when they are enough."""
        from fedkin.federate.contract.disclosure import disclosures

        return disclosures(self, rows, self._least(thresholds))

    def _least(self, own: Thresholds | None) -> Thresholds:
        return self.thresholds if own is None else self.thresholds.stricter(own)

    # --- files ------------------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `to_bytes`, in hexadecimal digits: two contracts are the same if and only if it is."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return msgspec.json.encode(self, order="sorted")

    @classmethod
    def from_bytes(cls, text: bytes) -> Contract:
        """The contract in ``text``, checked to hold together."""
        try:
            plain = msgspec.json.decode(text)
            made = msgspec.convert(plain, cls).checked()
        except (msgspec.MsgspecError, UnicodeDecodeError, FedkinError) as error:
            words = str(error) if isinstance(error, FedkinError) else in_words(error)
            raise ContractError(f"the contract {words}") from None
        if msgspec.json.decode(made.to_bytes()) != plain:
            raise ContractError("the contract has entries that this fedkin does not know, or lacks some")
        return made

    @classmethod
    def from_toml(cls, text: str, name: str = "the contract") -> Contract:
        """The contract that a TOML text states; ``name`` is the file to name in errors."""
        from fedkin.federate.contract.files import contract_of

        return contract_of(text, name)

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Contract:
        """The contract in a TOML file; raises `ContractError` with everything that is wrong."""
        from fedkin.federate.contract.files import read_text

        return cls.from_toml(read_text(path), str(path))

    def checked(self) -> Contract:
        """The contract itself; raises `ContractError` when two entries do not fit together."""
        wrong = self._wrong()
        if wrong:
            raise ContractError("does not hold together: " + "; ".join(wrong))
        return self

    def _wrong(self) -> list[str]:
        wrong = self._wrong_target()
        usual = {"penalty": "l1", "ridge": 0.0, "sparsity": 0.0}
        told = [name for name, default in usual.items() if getattr(self, name) != default]
        if self.method == "kin" and told:
            wrong.append(
                f'{told[0]} is of the fused estimator, but method is "kin": say method = "fused", or leave it out'
            )
        rounds = self.rounds
        if rounds.batch_size is not None and rounds.batch_size < self.smallest_batch:
            wrong.append(
                f"rounds.batch_size is {rounds.batch_size}, but a theta from fewer than {self.smallest_batch} rows can "
                f"give them away: take more, none for all rows, or state rounds.smallest_batch = {rounds.batch_size}"
            )
        if rounds.placement != "peer" and rounds.gradient != "plain":
            wrong.append(
                f'rounds.gradient is "{rounds.gradient}", but where sites come and go they keep no state: use "plain"'
            )
        if rounds.select is not None and rounds.placement != "peer":
            wrong.append(f'rounds.select is for placement "peer", not for "{rounds.placement}"')
        numbers = [rounds.lam, rounds.rho, rounds.radius, self.ridge, self.sparsity, self.thresholds.rows_per_parameter]
        if not all(number is None or math.isfinite(number) for number in numbers):
            wrong.append("a number is not finite")
        return wrong

    def _wrong_target(self) -> list[str]:
        name, target = str(self.loss.get("name")), self.schema.target
        try:
            loss = self.loss_object()
        except FedkinError as error:
            return [f"loss: {error}"]
        if not loss.needs_target:
            wrong = [] if target is None else [f"the {name} loss has no target: leave [target] out"]
            if self.intercept:
                wrong.append(f"the {name} loss has no intercept: say intercept = false")
            return wrong
        if target is None:
            return [f"the {name} loss needs a [target]"]
        if loss.needs_classes:
            if target.kind != "category":
                return [f'the {name} loss predicts classes, so target.kind must be "category", with levels']
            n = len(target.levels)
            if loss.n_params(1) != n - 1:
                other = loss.from_classes(n).name
                hint = "" if other == name else f': say loss = "{other}"'
                has = f"{loss.n_params(1) + 1} classes"
                return [f"the {name} loss has {has}, but the target has {count(n, 'level')}{hint}"]
        elif target.kind == "category":
            other = loss_for("class", len(target.levels)).name
            return [f'the {name} loss predicts numbers, but the target is a category: say loss = "{other}"']
        elif loss.target == "count" and target.kind != "count":
            return [f'the {name} loss predicts counts, so target.kind must be "count"']
        return []
