"""Ground floor: what every room may use and what knows nothing of federated learning.

In: plain values and paths. Out: types of arrays, checks of arguments, cores and threads, locks. Imports:
`fedkin.errors` only.
"""

from __future__ import annotations

from fedkin._base.arrays import Array, Index, Mask
from fedkin._base.checks import check_choice, check_nonnegative, check_positive, check_whole
from fedkin._base.cores import available_cores, available_threads
from fedkin._base.locks import is_locked, lock

__all__ = [
    "Array",
    "Index",
    "Mask",
    "available_cores",
    "available_threads",
    "check_choice",
    "check_nonnegative",
    "check_positive",
    "check_whole",
    "is_locked",
    "lock",
]
