"""A study as data: a `Study` with its grid points becomes `Cell`s with derived seeds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fedkin
from fedkin.studies.config.functions import code_digest, modules_beside

#: What the directory of a quick run has after the study's name.
SUFFIX = "-quick"


@dataclass(frozen=True)
class Cell:
    """A grid point and some of its replications: what one worker computes at a time, and what is cached.

    Attributes
    ----------
    study : str
    task : str
        A built-in name or "module:function".
    params : mapping name -> number, str or bool
        The grid point.
    options : mapping
        The same for all cells of a study.
    replications : tuple of int
    seeds : tuple of int
        One per replication; they depend on the study's seed, the grid point (but for its shared entries) and the
        replication, and on nothing else.
    key : str
        Digest of everything that the rows depend on.
    """

    study: str
    task: str
    params: Mapping[str, Any]
    options: Mapping[str, Any]
    replications: tuple[int, ...]
    seeds: tuple[int, ...]
    key: str

    @property
    def point(self) -> str:
        """The grid point as text: ``n_devices=20, varrho=0.1``."""
        return ", ".join(f"{name}={value}" for name, value in self.params.items())


@dataclass(frozen=True)
class Study:
    """One figure's worth of simulation; `fedkin.studies.config.read` has the format of its file.

    Examples
    --------
    >>> from fedkin.studies.config import load_study
    >>> study = load_study("estimation")
    >>> len(study.points), study.replications
    (30, 100)
    >>> len(load_study("estimation", quick=True).points) < 30
    True
    """

    name: str
    task: str
    points: tuple[Mapping[str, Any], ...]
    title: str = ""
    about: str = ""
    seed: int = 0
    replications: int = 100
    block: int = 5
    checks: str | None = None
    data: str | None = None
    shared: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    figures: tuple[Mapping[str, Any], ...] = ()
    tables: tuple[Mapping[str, Any], ...] = ()
    quick: bool = False
    folder: Path | None = None
    source: str = "the study"
    full_replications: int = 100

    @property
    def directory(self) -> str:
        """Name of the directory for its files: a quick run has its own, so that it never replaces a full one."""
        return self.name + SUFFIX if self.quick else self.name

    def cells(self, fingerprint: str = "") -> list[Cell]:
        """All cells: the first block of every grid point, then the second block of every one, and so on.

        A study that is stopped half way has about the same number of replications everywhere, and the time left is
        known well after the first round.

        Parameters
        ----------
        fingerprint : str
            Digest of the data that the task reads, where it reads any.
        """
        stamp = {
            "fedkin": fedkin.__version__,
            "task": self.task,
            "options": dict(self.options),
            "code": self._code(),
            "data": fingerprint,
        }
        cells = []
        for first in range(0, self.replications, self.block):
            numbers = tuple(range(first, min(first + self.block, self.replications)))
            for point in self.points:
                own = {name: value for name, value in point.items() if name not in self.shared}
                seeds = tuple(replication_seed(self.seed, own, number) for number in numbers)
                key = _digest({**stamp, "params": dict(point), "replications": numbers, "seeds": seeds})
                cells.append(Cell(self.name, self.task, point, self.options, numbers, seeds, key))
        return cells

    def _code(self) -> list[str]:
        """Digests of the user's functions that decide about the rows."""
        named = {"[study]: task": self.task, "[options]: generator": self.options.get("generator")}
        with modules_beside(self.folder):
            return [
                code_digest(name, f"{self.source}, {entry} = {name!r}")
                for entry, name in named.items()
                if isinstance(name, str) and ":" in name and not name.startswith("fedkin.")
            ]


def replication_seed(seed: int, params: Mapping[str, Any], replication: int) -> int:
    """The seed of one replication, below 2**63: a digest of its arguments.

    Examples
    --------
    >>> replication_seed(1, {"n": 50}, 0) == replication_seed(1, {"n": 50}, 0) != replication_seed(1, {"n": 50}, 1)
    True
    """
    return int(_digest([seed, dict(params), replication])[:16], 16) >> 1


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
