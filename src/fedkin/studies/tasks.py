"""What one replication does: a task takes a `Replication` and gives rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from fedkin.errors import ParameterError
from fedkin.solvers import compile_kernels
from fedkin.studies.config import Cell, put_on_path
from fedkin.studies.store import environment

Row = dict[str, Any]


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


Task = Callable[[Replication], Iterable[Row]]

#: Tasks by name.
BUILT_IN_TASKS = {
    "estimation": "fedkin.studies.estimation:estimation",
    "selection": "fedkin.studies.edge_selection:edge_selection",
    "convergence": "fedkin.studies.algorithms:convergence",
    "availability": "fedkin.studies.algorithms:availability",
    "election": "fedkin.studies.election:election",
}


@dataclass(frozen=True)
class Job:
    """A cell together with what a worker process needs to run it."""

    cell: Cell
    folder: Path | None = None
    data: Path | None = None


def run_job(job: Job) -> tuple[list[Row], float]:
    """The rows of a cell, each with seed, versions and CPU, and the seconds that it took."""
    put_on_path(job.folder)
    started = perf_counter()
    cell = job.cell
    task = find_function(BUILT_IN_TASKS.get(cell.task, cell.task), "task")
    where = environment()
    rows = []
    for number, seed in zip(cell.replications, cell.seeds, strict=True):
        replication = Replication(cell.params, cell.options, number, seed, job.data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = list(task(replication))
        # kept with the rows, not printed from some process in the middle of the progress bar
        notes = "; ".join(sorted({str(warning.message) for warning in caught}))
        head = {"study": cell.study, **cell.params, "replication": number, "seed": seed}
        rows += [{**head, **row, "warnings": notes, **where} for row in found]
    return rows, perf_counter() - started


def settle_backend() -> str:
    """Load the compiled kernels, so that every solve of this process uses the same backend.

    Left alone, the solver would begin with numpy and change when loading pays, and the last digits of a row would
    depend on what its process had done before.
    """
    compile_kernels()
    return "numba"


def find_function(name: str, what: str) -> Callable[..., Any]:
    """The function called "module:function"."""
    module, colon, function = name.partition(":")
    if not colon:
        raise ParameterError(f'unknown {what} {name!r}; give a built-in name or "module:function"')
    try:
        found = getattr(import_module(module), function)
    except ImportError as error:
        raise ParameterError(f"{what} {name!r}: {error}; put {module}.py beside the TOML file or install it") from error
    except AttributeError:
        raise ParameterError(f"{what} {name!r}: module {module!r} has no function {function!r}") from None
    if not callable(found):
        raise ParameterError(f"{what} {name!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]
