"""Site ids as plain Python values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from fedkin.errors import DataError


class HasSites:
    """What has sites in an order: a federation, a graph, a model."""

    sites: tuple[Hashable, ...]

    @cached_property
    def index(self) -> Mapping[Hashable, int]:
        """Position of each site in `sites`."""
        return {site: position for position, site in enumerate(self.sites)}

    @property
    def n_sites(self) -> int:
        """Number of sites V."""
        return len(self.sites)


def site_id(value: object) -> Hashable:
    """A site id as a plain Python value.

    Parameters
    ----------
    value : hashable
        numpy scalars become Python scalars; whole floats become ints, as a column of ids with a gap is read as floats.

    Raises
    ------
    DataError
        If the value is missing (None, NaN) or cannot be hashed.

    Examples
    --------
    >>> import numpy as np
    >>> site_id(np.float64(3.0)), site_id(np.str_("ward 7")), site_id((0, 1))
    (3, 'ward 7', (0, 1))
    """
    if isinstance(value, np.generic) and not isinstance(value, (np.datetime64, np.timedelta64)):
        value = value.item()
    if is_missing(value):
        raise DataError(f"a site id is missing ({value!r}): give every row and every edge a site")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        hash(value)
    except TypeError:
        raise DataError(
            f"site id {value!r} of type {type(value).__name__} cannot be hashed: use a text, a number or a tuple"
        ) from None
    return value


def site_ids(values: Iterable[object]) -> list[Hashable]:
    """`site_id` of every value; fast for arrays and for lists of plain ints and strings.

    Examples
    --------
    >>> import numpy as np
    >>> site_ids(np.array([1.0, 2.0]))
    [1, 2]
    """
    if isinstance(values, range):
        return list(values)
    values = unwrapped(values)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "biufUS":
        values = values.tolist()
    listed = list(values)
    if set(map(type, listed)) <= {int, str, bool}:
        return listed
    return [site_id(value) for value in listed]


def unwrapped(values: Any) -> Any:
    """A pandas or polars series as an array, a pyarrow array as a list; anything else as it is."""
    if hasattr(values, "to_pylist"):
        return values.to_pylist()
    return values.to_numpy() if hasattr(values, "to_numpy") else values


def is_missing(value: object) -> bool:
    if value is None:
        return True
    try:
        return bool(value != value)  # NaN and NaT
    except (TypeError, ValueError):  # pandas.NA has no truth value, neither have arrays
        return type(value).__name__ == "NAType"
