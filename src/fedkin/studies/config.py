"""A study as data: a TOML file becomes a `Study`, a study becomes `Cell`s with derived seeds.

::

    [study]
    name = "estimation"                  # of its directory (with --quick: estimation-quick); letters, digits, - and _
    title = "Estimation error"
    task = "estimation"                  # what one replication does: a built-in name or "module:function"
    seed = 1
    replications = 100
    block = 5                            # replications per cell, the unit that is cached
    shared = ["level"]                   # grid entries that are compared on the same random numbers; optional

    [[grid]]                             # each [[grid]] is a product of lists; several are put one after the other
    n_devices = [20, 40]
    varrho = [0.1, 0.2]

    [options]                            # handed to the task as they are
    generator = "paper"                  # or "module:function"

    [quick]                              # what --quick changes
    replications = 2
    grid = [{n_devices = [20], varrho = [0.1]}]

    [[figure]]                           # see `fedkin.studies.figures`
    kind = "lines"
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fedkin
from fedkin.errors import ParameterError
from fedkin.studies.specs import (
    STUDY,
    check_drawings,
    check_names,
    check_quick_entries,
    check_shape,
    check_study_entries,
)

#: The studies that come with Fedkin, in the order in which ``fedkin study all`` runs them.
BUILT_IN = ("estimation", "sensitivity", "convergence", "availability", "selection", "rate", "election")

#: What the directory of a quick run has behind the study's name.
QUICK = "-quick"

_TABLES = {"study", "grid", "options", "quick", "figure", "table"}


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
    """One figure's worth of simulation; see the module for the file format.

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
        return self.name + QUICK if self.quick else self.name

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
            "code": [_code_digest(name) for name in self._foreign_functions()],
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

    def _foreign_functions(self) -> Iterator[str]:
        for name in (self.task, self.options.get("generator", "")):
            if isinstance(name, str) and ":" in name and not name.startswith("fedkin."):
                yield name


def replication_seed(seed: int, params: Mapping[str, Any], replication: int) -> int:
    """The seed of one replication, below 2**63: a digest of its arguments.

    Examples
    --------
    >>> replication_seed(1, {"n": 50}, 0) == replication_seed(1, {"n": 50}, 0) != replication_seed(1, {"n": 50}, 1)
    True
    """
    return int(_digest([seed, dict(params), replication])[:16], 16) >> 1


def load_study(source: str | Path, *, quick: bool = False) -> Study:
    """Read a study.

    Parameters
    ----------
    source : str or Path
        The name of a built-in study, or a TOML file.
    quick : bool
        Apply the changes of the file's ``[quick]`` table: fewer points and replications.

    Raises
    ------
    ParameterError
        If the file is missing, is not TOML or has entries that mean nothing.
    """
    if isinstance(source, str) and source in BUILT_IN:
        text = resources.files("fedkin.studies").joinpath(f"configs/{source}.toml").read_text(encoding="utf-8")
        return parse_study(text, f"the built-in study {source!r}", quick=quick)
    path = Path(source)
    if isinstance(source, Path) and not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ParameterError(f"--config: {path} {what}; give the path of a study's TOML file")
    if not path.is_file():
        raise ParameterError(
            f"there is no study {str(source)!r}: give one of {', '.join(BUILT_IN)}, or the path of a TOML file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read: {error}") from None
    return parse_study(text, str(path), quick=quick, folder=path.resolve().parent)


def parse_study(text: str, where: str, *, quick: bool = False, folder: Path | None = None) -> Study:
    """The study in a TOML text; ``where`` names it in messages, ``folder`` is where its modules may lie."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(f"{where} is not valid TOML: {error}") from None
    check_names(raw, _TABLES, where, "table")
    check_shape(raw, where)
    head = dict(raw.get("study", {}))
    check_names(head, list(STUDY), f"{where}, [study]", "entry")
    options = dict(raw.get("options", {}))
    grid = raw.get("grid", [{}])
    changes = dict(raw.get("quick", {}))
    check_names(changes, {"replications", "block", "grid", "options"}, f"{where}, [quick]", "entry")
    for needed in ("name", "task"):
        if not isinstance(head.get(needed), str) or not head[needed]:
            raise ParameterError(f'{where}: [study] needs {needed} = "..."')
    check_study_entries(head, where)
    check_quick_entries(changes, where)
    full = head.get("replications", Study.replications)
    if "grid" in changes:
        list(_points(changes["grid"], f"{where}, [quick]"))
    if quick:
        grid = changes.pop("grid", grid)
        options.update(changes.pop("options", {}))
        head.update(changes)
    figures, tables = tuple(raw.get("figure", ())), tuple(raw.get("table", ()))
    check_drawings(figures, tables, where)
    return Study(
        points=tuple(_points(grid, where)),
        options=options,
        figures=figures,
        tables=tables,
        quick=quick,
        folder=folder,
        source=where,
        full_replications=full,
        **head,
    )


def put_on_path(folder: Path | None) -> None:
    """Make the modules beside a study's file importable."""
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _points(grid: Any, where: str) -> Iterator[dict[str, Any]]:
    products = [grid] if isinstance(grid, Mapping) else grid
    if not isinstance(products, list) or not all(isinstance(one, Mapping) for one in products):
        raise ParameterError(f"{where}: grid must be tables of lists, [[grid]] with lines name = [...], got {grid!r}")
    seen = set()
    for product in products:
        lists = {name: values if isinstance(values, list) else [values] for name, values in product.items()}
        for name, values in lists.items():
            if not values or not all(isinstance(value, int | float | str | bool) for value in values):
                raise ParameterError(f"{where}: grid entry {name!r} must be a list of numbers or texts, got {values!r}")
            if len({isinstance(value, str) for value in values}) > 1:
                raise ParameterError(f"{where}: grid entry {name!r} has numbers and texts, {values!r}; give one kind")
        for chosen in itertools.product(*lists.values()):
            point = dict(zip(lists, chosen, strict=True))
            if (mark := json.dumps(point, sort_keys=True)) not in seen:
                seen.add(mark)
                yield point


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _code_digest(name: str) -> str:
    """Digest of the file that holds "module:function", so that edited code is not mistaken for what was run."""
    module = name.partition(":")[0]
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise ParameterError(
            f"the study names {name!r}, but there is no module {module!r}; put {module}.py beside the TOML file or "
            "install it"
        )
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
