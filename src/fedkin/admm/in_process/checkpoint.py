"""The checkpoint of a run inside one process: a `Store`, bound to everything that the course of the run depends on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.admm.gradients import SiteRows
from fedkin.admm.plan import Settings
from fedkin.admm.store import Saved, Store
from fedkin.core import Problem
from fedkin.errors import ModelFileError, ParameterError


class Checkpoint:
    """The file that a run can be resumed from, bound to ``parts`` (`describe`).

    If ``fresh``, the first save replaces whatever is there.
    """

    def __init__(self, path: str | os.PathLike[str], parts: Iterable[object], *, fresh: bool) -> None:
        self._store, self._fresh = Store(path, fingerprint(parts)), fresh

    def save(self, done: int, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any]) -> None:
        """Replace the state by that after ``done`` rounds; a crash leaves the one before or this one."""
        if self._fresh:
            self._store.clear()
            self._fresh = False
        self._store.save(done, arrays, header, durable=True)

    def load(self) -> Saved:
        """The state that this run saved.

        Raises `ModelFileError` when there is none or the file is damaged, `ParameterError` when another run wrote it.
        """
        path = self._store.path
        if not path.exists():
            raise ModelFileError(f"{path}: there is no checkpoint to resume from; run once without resume")
        saved = self._store.load()
        if saved is None and self._store.others():
            raise ParameterError(
                f"{path}: was written by a run with other data, another graph or other settings; resume needs the same "
                "problem, batch size, steps, seed and availability (only rounds and shards may change)"
            )
        if saved is None:
            raise ModelFileError(f"{path}: cannot be read as a checkpoint: it holds no state")
        return saved

    def close(self) -> None:
        """Close the file."""
        self._store.close()


def fingerprint(parts: Iterable[object]) -> str:
    """A digest of arrays (their dtype, shape and bytes), numbers and strings, the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray) and part.dtype.kind != "O":
            digest.update(f"array:{part.dtype.str}:{part.shape};".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(f"{type(part).__name__}:{part!r};".encode())
    return digest.hexdigest()


def describe(problem: Problem, rows: SiteRows, settings: Settings) -> list[object]:
    """Everything that the course of a run depends on, for `fingerprint`."""
    objective = problem.fused
    kinds = {id(loss): loss for loss in problem.losses}
    numbers = {key: k for k, key in enumerate(kinds)}
    plain = [(type(loss).__name__, loss.name, sorted(_plain_parts(vars(loss)), key=str)) for loss in kinds.values()]
    return [
        *rows.data.arrays,
        *(rows.starts, rows.batch, rows.keys, rows.ridge),
        np.array([numbers[id(loss)] for loss in problem.losses]),
        plain,
        problem.graph.edges,
        objective.edge_radius,
        objective.penalty.name,
        objective.sparsity,
        problem.radius,
        (settings.rho, settings.step, settings.kappa, settings.average, settings.gradient, settings.seed),
    ]


def _plain_parts(parts: Mapping[str, Any]) -> Iterable[tuple[str, object]]:
    """What can be compared between processes: numbers, words, and the names of functions."""
    for name, value in parts.items():
        if callable(value):
            yield name, getattr(value, "__qualname__", type(value).__name__)
        elif isinstance(value, int | float | str):
            yield name, value
