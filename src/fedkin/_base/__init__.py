"""Ground floor: what every room may use and what knows nothing of federated learning.

In: plain values and paths. Out: array types, checks of arguments, words for messages, cards for notebooks, cores and
threads, files written in one step, locks, waits, loops that tell how far they are. Imports: `fedkin.errors` only.
"""

from __future__ import annotations

from fedkin._base.arrays import AnyArray, Array, Index, Mask, frozen
from fedkin._base.checks import check_choice, check_level, check_nonnegative, check_positive, check_whole
from fedkin._base.cores import available_cores, available_threads, one_blas_thread
from fedkin._base.files import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    in_file,
    replacing,
    replacing_directory,
    write_arrays,
    write_file,
)
from fedkin._base.html import html_card, some_of
from fedkin._base.locks import is_locked, lock
from fedkin._base.progress import Say, listening, tracked
from fedkin._base.waiting import wait_until
from fedkin._base.words import count, listed

__all__ = [
    "PRIVATE_DIRECTORY",
    "PRIVATE_FILE",
    "AnyArray",
    "Array",
    "Index",
    "Mask",
    "Say",
    "available_cores",
    "available_threads",
    "check_choice",
    "check_level",
    "check_nonnegative",
    "check_positive",
    "check_whole",
    "count",
    "frozen",
    "html_card",
    "in_file",
    "is_locked",
    "listed",
    "listening",
    "lock",
    "one_blas_thread",
    "replacing",
    "replacing_directory",
    "some_of",
    "tracked",
    "wait_until",
    "write_arrays",
    "write_file",
]
