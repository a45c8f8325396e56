"""Names of array types, for annotations."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]  #: numbers
Index = NDArray[np.int64]  #: positions and counts
Mask = NDArray[np.bool_]  #: which ones
AnyArray = NDArray[Any]  #: numbers, labels or ids

_T = TypeVar("_T", bound=np.generic)


def frozen(array: NDArray[_T]) -> NDArray[_T]:
    """The same array, read only from now on."""
    array.flags.writeable = False
    return array
