"""Tables whose columns are to be inferred, and the roles of their columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict

import numpy as np

from fedkin._base import AnyArray, listed, repeated
from fedkin.data.cells import RowName, frame_row, near_name
from fedkin.data.columns import RawColumns, columns_of
from fedkin.errors import DataError, ParameterError, argument

Missing = Literal["refuse", "drop", "mean", "indicator"]
#: Columns with nonlinear effects, optionally with the number of knots, or with the knots.
Spline = Sequence[str] | Mapping[str, int | Sequence[float]]
#: Rules that fill in missing cells; they need the rows of all sites.
FILLING = ("mean", "indicator")


def as_columns(columns: object) -> dict[str, AnyArray]:
    """Return a table as `RawColumns`; such tables are returned unchanged."""
    if isinstance(columns, dict) and all(isinstance(one, np.ndarray) for one in columns.values()):
        return columns
    return columns_of(columns)


class Table(Protocol):
    """Protocol of a table that is read in batches, any number of times."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all columns."""

    @property
    def at(self) -> RowName:
        """Function that names a row."""

    def batches(self, names: Sequence[str]) -> Iterator[RawColumns]:
        """Yield batches of some columns, always in the same order."""


@dataclass(frozen=True)
class TableInMemory:
    """Columns in memory as a `Table` of one batch."""

    columns: RawColumns
    at: RowName = frame_row

    @property
    def names(self) -> Sequence[str]:
        return list(self.columns)

    def batches(self, names: Sequence[str]) -> Iterator[RawColumns]:
        yield {name: self.columns[name] for name in names}


class TableOptions(TypedDict, total=False):
    """Options of reading a table, apart from its site and target columns; see `Federation.from_frame`."""

    features: Sequence[str] | None
    event: str | None
    offset: str | None
    exposure: str | None
    weight: str | None
    time: str | None
    missing: Missing
    categories: Sequence[str]
    spline: Spline
    drop: Sequence[str]


@dataclass(frozen=True)
class Roles:
    """The roles of the columns of a table, and the treatment of gaps: `TableOptions`, site and target."""

    site: str
    target: str | None = None
    features: Sequence[str] | None = None
    offset: str | None = None
    weight: str | None = None
    time: str | None = None
    missing: Missing = "refuse"
    categories: Sequence[str] = ()
    drop: Sequence[str] = ()
    exposure: str | None = None
    event: str | None = None
    spline: Spline = ()

    def __post_init__(self) -> None:
        if self.event is not None and self.target is None:
            raise ParameterError(f"{argument('event')} needs the column of times: {argument('target')}")
        if self.offset is not None and self.exposure is not None:
            both = f"{argument('offset')} and {argument('exposure')}"
            raise ParameterError(f"give one of {both}: an exposure is the exponential of an offset")
        for name in ("features", "categories", "drop", "spline"):  # a single word is a list of one
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))

    @property
    def named(self) -> list[tuple[str, str]]:
        """Columns that are not features, with their roles."""
        roles = ("site", "target", "event", "offset", "exposure", "weight", "time")
        return [(getattr(self, role), role) for role in roles if getattr(self, role) is not None]

    @property
    def taken(self) -> dict[str, str]:
        """{column: its role}."""
        return dict(self.named)

    def check(self, columns: Iterable[str]) -> None:
        """Raise one `DataError` with all columns that are missing, or named for two roles."""
        present = dict.fromkeys(columns)
        features, curves = [*(self.features or ())], [*self.spline]
        uses = [*((name, f"the {role}") for name, role in self.named), *((name, "the features") for name in features)]
        also = [*((name, "the categories") for name in self.categories), *((name, "the curves") for name in curves)]
        wanted = [(name, f"for {use}") for name, use in uses + also] + [(name, "to drop") for name in self.drop]
        if absent := [(name, use) for name, use in wanted if name not in present]:
            text = " and ".join(f"no column {name!r} {use}{near_name(name, present)}" for name, use in absent)
            raise DataError(f"there is {text}; the table has {listed(present, most=20)}")
        if twice := repeated(features):
            raise DataError(f"feature {twice[0]!r} is given twice")
        seen: dict[str, str] = {}
        for name, role in [*self.named, *((name, "a feature") for name in features)]:
            if name in seen:
                raise DataError(f"column {name!r} cannot be both {seen[name]} and {role}")
            seen[name] = role
        taken = {name: f"the {role}" for name, role in self.named} | dict.fromkeys(self.categories, "a category")
        for name in curves:
            if name in taken:
                raise DataError(f"column {name!r} cannot be both {taken[name]} and a curve")
        used = dict.fromkeys([*features, *self.categories, *curves], "a feature")
        used |= {name: f"the {role}" for name, role in self.named}
        for name in self.drop:
            if name in used:
                raise DataError(f"column {name!r} cannot be both {used[name]} and dropped")
