"""A study as data: its TOML file becomes a `Study`, its grid points become `Cell`s with derived seeds.

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
    n_sites = [20, 40]
    varrho = [0.1, 0.2]

    [options]                            # handed to the task as they are
    generator = "paper"                  # or "module:function"

    [quick]                              # what --quick changes
    replications = 2
    grid = [{n_sites = [20], varrho = [0.1]}]

    [[figure]]                           # see `fedkin.studies.present.figures`
    kind = "lines"

    [[table]]                            # see `fedkin.studies.present.report`
    name = "means"
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module, invalidate_caches, resources
from pathlib import Path
from typing import Any

import fedkin
from fedkin.errors import ParameterError
from fedkin.studies.entries import QUICK, STUDY, check_drawings, check_entries, check_shape


@contextmanager
def modules_beside(folder: Path | None) -> Iterator[None]:
    """Within this context the modules in ``folder`` can be imported, also by processes that are started in it.

    Afterwards they are forgotten, so that the next study imports its own modules, and edited ones anew.
    """
    if folder is None:
        yield
        return
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and folder in Path(file).parents:
                del sys.modules[name]


def find_function(name: str, where: str) -> Callable[..., Any]:
    """Import the function called "module:function"; ``where`` is the entry that names it, for one-line messages."""
    module, _, function = name.partition(":")
    try:
        home = import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ParameterError(
                f"{where}: there is no module {module!r}; put {module}.py beside the TOML file or install it"
            ) from None
        raise ParameterError(f"{where}: importing {module!r} failed: {_last_line(error)}; mend the module") from error
    file = getattr(home, "__file__", None)
    if file is None:
        raise ParameterError(
            f"{where}: the module {module!r} has no file of its own; name a function in a .py file beside the TOML file"
        )
    if not hasattr(home, function):
        raise ParameterError(f"{where}: {file} has no function {function!r}; define it there or mend the name")
    found: Callable[..., Any] = getattr(home, function)
    if not callable(found):
        raise ParameterError(f"{where}: {function!r} of {file} is a {type(found).__name__}, not a function")
    return found


def code_digest(name: str, where: str) -> str:
    """Digest of the file that holds "module:function", so that edited code is not mistaken for what was run."""
    find_function(name, where)
    return hashlib.sha256(Path(str(sys.modules[name.partition(":")[0]].__file__)).read_bytes()).hexdigest()


def _last_line(error: Exception) -> str:
    """File, line and words of an error, in one line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"{frame.filename}, line {frame.lineno}: {type(error).__name__}: {words}"


#: What the directory of a quick run has after the study's name.
SUFFIX = "-quick"


@dataclass(frozen=True)
class Cell:
    """A grid point and some of its replications: what one worker computes at a time, and what is cached.

    A seed depends on the study's seed, the grid point (but for its shared entries) and the replication, and on nothing
    else; ``key`` is a digest of everything that the rows depend on.
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
        """The grid point as text: ``n_sites=20, varrho=0.1``."""
        return ", ".join(f"{name}={value}" for name, value in self.params.items())


@dataclass(frozen=True)
class Study:
    """One figure's worth of simulation."""

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
        known well after the first round. ``fingerprint`` is the digest of the data that the task reads, if any.
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
    """The seed of one replication, below 2**63: a digest of its arguments."""
    return int(_digest([seed, dict(params), replication])[:16], 16) >> 1


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


#: The studies that come with Fedkin, in the order in which ``fedkin study all`` runs them.
BUILT_IN = (
    *("estimation", "sensitivity", "convergence", "availability", "selection", "error-rates", "rate"),
    *("kin", "coverage", "election"),
)


def load_study(source: str | Path, *, quick: bool = False) -> Study:
    """The built-in study of that name, or the one in a TOML file; ``quick`` applies its ``[quick]`` table."""
    if isinstance(source, str) and source in BUILT_IN:
        text = resources.files("fedkin.studies").joinpath(f"built_in/{source}.toml").read_text(encoding="utf-8")
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
    check_shape(raw, where)
    head, options, changes = (dict(raw.get(name, {})) for name in ("study", "options", "quick"))
    grid, figures, tables = raw.get("grid", [{}]), raw.get("figure", []), raw.get("table", [])
    check_entries(head, STUDY, f"{where}, [study]")
    if head["name"].endswith(SUFFIX):
        words = f"name = {head['name']!r} ends in {SUFFIX}, as directories of quick runs do; choose another"
        raise ParameterError(f"{where}, [study]: {words}")
    check_entries(changes, QUICK, f"{where}, [quick]")  # whether it is used or not
    list(_points(changes.get("grid", []), f"{where}, [quick]"))
    check_drawings("figure", figures, where)
    check_drawings("table", tables, where)
    full = head.get("replications", Study.replications)
    if quick:
        grid = changes.pop("grid", grid)
        options.update(changes.pop("options", {}))
        head.update(changes)
    return Study(
        points=tuple(_points(grid, where)),
        options=options,
        figures=tuple(figures),
        tables=tuple(tables),
        quick=quick,
        folder=folder,
        source=where,
        full_replications=full,
        **head,
    )


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
