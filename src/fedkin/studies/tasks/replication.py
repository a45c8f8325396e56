"""What a task is given: one replication at one grid point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkin.solvers import compile_kernels


@dataclass(frozen=True)
class Replication:
    """One repetition at one grid point.

    Attributes
    ----------
    params : mapping
        The grid point.
    options : mapping
        The study's ``[options]``.
    number : int
        0, 1, ...
    seed : int
        For everything random in it.
    data : Path or None
        The directory given as ``--data``.
    """

    params: Mapping[str, Any]
    options: Mapping[str, Any]
    number: int
    seed: int
    data: Path | None = None


def settle_backend() -> str:
    """Load the compiled kernels, so that every solve of this process uses the same backend.

    Left alone, the solver would begin with numpy and change when loading pays, and the last digits of a row would
    depend on what its process had done before.
    """
    compile_kernels()
    return "numba"
