"""Read a study's TOML file into a checked `Study`, and its grid points into `Cell`s with derived seeds.

docs/studies.md describes the entries of the file.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_type_hints

import msgspec

import fedkin
from fedkin.errors import ParameterError
from fedkin.studies import election, kin, tasks
from fedkin.studies.replications import GENERATORS, Replication, StudyTask, find_function, generator_arguments

#: The studies that come with Fedkin, in the order in which ``fedkin study all`` runs them.
BUILT_IN = (
    *("estimation", "sensitivity", "convergence", "availability", "selection", "error-rates", "rate"),
    *("sparse", "kin", "coverage", "population", "election"),
)
TASKS = {**tasks.TASKS, **kin.TASKS, **election.TASKS}
SUFFIX = "-quick"  # of the directory of a quick run

AtLeast1: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Table: TypeAlias = dict[str, Any]
Products: TypeAlias = Table | list[Table]


@dataclass(frozen=True)
class Cell:
    """Some replications at one grid point: the unit of computation and caching.

    A seed depends only on the study's seed, the grid point (without its shared entries) and the replication; ``key`` is
    a digest of everything that the rows depend on.
    """

    study: str
    task: str
    replications: tuple[Replication, ...]
    key: str

    def __str__(self) -> str:
        """Format as ``n_sites=20, varrho=0.1, replications 0 to 4``."""
        first, last = self.replications[0], self.replications[-1]
        point = "".join(f"{name}={value}, " for name, value in first.params.items())
        return f"{point}replications {first.number} to {last.number}"


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """The table ``[study]`` of a file."""

    name: str
    task: str
    title: str = ""
    about: str = ""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    replications: AtLeast1 = 100
    block: AtLeast1 = 5
    checks: str | None = None
    data: str | None = None
    shared: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Study(StudyTable):
    """Study described by its file."""

    points: tuple[Mapping[str, Any], ...]
    options: Table
    figures: Sequence[Table]
    tables: Sequence[Table]
    quick: bool
    folder: Path | None
    source: str
    full_replications: int

    @property
    def directory(self) -> str:
        """Name of the directory for its files; a quick run has its own, so it never replaces a full one."""
        return self.name + SUFFIX if self.quick else self.name

    def function(self, name: str, where: str) -> Callable[..., Any]:
        """Return the function "module:function", from a module next to the file or from an installed one."""
        return find_function(name, f"{self.source}, {where} = {name!r}", self.folder)

    def cells(self, data: Path | None = None, fingerprint: str = "") -> list[Cell]:
        """Return all cells: the first block of every grid point, then the second block of every one, and so on.

        An interrupted study therefore has a similar number of replications at every grid point. ``fingerprint`` is the
        digest of the ``data`` that the task reads, if any.
        """
        named = [self.task, self.options.get("generator"), *dict.fromkeys(one.get("estimator") for one in self.points)]
        own = [name for name in named if isinstance(name, str) and ":" in name and not name.startswith("fedkin.")]
        files = [sys.modules[self.function(name, "function").__module__].__file__ for name in own]
        code = [hashlib.sha256(Path(str(file)).read_bytes()).hexdigest() for file in files]
        stamp = {"fedkin": fedkin.__version__, "task": self.task, "options": self.options}
        stamp |= {"code": code, "data": fingerprint}
        cells = []
        for first in range(0, self.replications, self.block):
            numbers = range(first, min(first + self.block, self.replications))
            for point in self.points:
                apart = {name: value for name, value in point.items() if name not in self.shared}
                seeds = [replication_seed(self.seed, apart, number) for number in numbers]
                key = _digest({**stamp, "params": dict(point), "replications": list(numbers), "seeds": seeds})
                block = zip(numbers, seeds, strict=True)
                made = tuple(Replication(point, self.options, *each, data, self.folder) for each in block)
                cells.append(Cell(self.name, self.task, made, key))
        return cells


def task_function(name: str, folder: Path | None = None) -> StudyTask:
    """Return the task with a built-in name, or the function "module:function"."""
    return TASKS[name][0] if name in TASKS else find_function(name, f"task {name!r}", folder)


def replication_seed(seed: int, params: Mapping[str, Any], replication: int) -> int:
    """Return the seed of one replication, below 2**63: a digest of its arguments."""
    return int(_digest([seed, dict(params), replication])[:16], 16) >> 1


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


# --- reading the file -------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _File:
    study: Table
    grid: Products = field(default_factory=dict)
    options: Table = field(default_factory=dict)
    quick: Table = field(default_factory=dict)
    figure: list[Table] = field(default_factory=list)
    table: list[Table] = field(default_factory=list)


@dataclass(kw_only=True)
class _Quick:
    replications: AtLeast1 | None = None
    block: AtLeast1 | None = None
    options: Table = field(default_factory=dict)
    grid: Products = field(default_factory=list)


def load_study(source: str | Path, *, quick: bool = False) -> Study:
    """Load the built-in study of that name, or the one in a TOML file; ``quick`` applies its ``[quick]`` table."""
    if isinstance(source, str) and source in BUILT_IN:
        text = resources.files("fedkin.studies").joinpath(f"built_in/{source}.toml").read_text(encoding="utf-8")
        return parse_study(text, f"the built-in study {source!r}", quick=quick)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = f"give the path of a study's TOML file, or one of {', '.join(BUILT_IN)}"
        raise ParameterError(f"the study {str(source)!r} cannot be read ({error}); {known}") from None
    return parse_study(text, str(path), quick=quick, folder=path.resolve().parent)


def parse_study(text: str, where: str, *, quick: bool = False, folder: Path | None = None) -> Study:
    """Parse and check a TOML text; ``where`` names it in messages, ``folder`` is the directory of its modules."""
    try:
        file = _converted(tomllib.loads(text), _File, where)
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(f"{where} is not valid TOML: {error}") from None
    head = asdict(_converted(file.study, StudyTable, f"{where}, [study]"))
    changes = _converted(file.quick, _Quick, f"{where}, [quick]")
    points, fewer = tuple(_points(file.grid, where)), tuple(_points(changes.grid, f"{where}, [quick]"))
    own = {
        "options": file.options,
        "figures": _drawings("figure", file.figure, _Lines, where),
        "tables": _drawings("table", file.table, _Means, where),
        "full_replications": head["replications"],
    }
    if quick:
        points = fewer or points
        own["options"] = {**file.options, **changes.options}
        head |= {name: value for name, value in asdict(changes).items() if name in head and value is not None}
    return Study(**head, **own, points=points, quick=quick, folder=folder, source=where)


def _points(grid: Products, where: str) -> Iterator[Table]:
    """Yield the points of a union of products, each once."""
    seen = set()
    for product in [grid] if isinstance(grid, dict) else grid:
        lists = {name: values if isinstance(values, list) else [values] for name, values in product.items()}
        for name, values in lists.items():
            texts = {isinstance(value, str) for value in values}
            if len(texts) != 1 or not all(isinstance(value, int | float | str) for value in values):
                words = f"grid entry {name!r} must be a list of numbers, or a list of texts"
                raise ParameterError(f"{where}: {words}, got {values!r}")
        for chosen in itertools.product(*lists.values()):
            point = dict(zip(lists, chosen, strict=True))
            if (mark := json.dumps(point, sort_keys=True)) not in seen:
                seen.add(mark)
                yield point


@dataclass(kw_only=True)
class _Drawing:
    name: str
    kind: str = ""
    caption: str = ""
    where: Table = field(default_factory=dict)


@dataclass(kw_only=True)
class _Reference:
    label: str
    column: str | None = None
    y: float | None = None


@dataclass(kw_only=True)
class _Lines(_Drawing):
    x: str
    y: str
    points: list[str] | None = None  # columns that make a point, whose x is a mean; by default those with one x
    x_label: str = ""
    y_label: str = ""
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    x_ticks: Literal["values"] | None = None
    y_limits: tuple[float, float] | None = None
    series: str | None = None
    series_label: str = ""
    series_values: Annotated[list[Any], msgspec.Meta(min_length=1)] | None = None
    rows: str | None = None
    columns: str | None = None
    markers: bool = True
    interval: Literal["student", "wilson"] = "student"
    reference: list[_Reference] = field(default_factory=list)
    diagonal: str | None = None


@dataclass(kw_only=True)
class _At:
    column: str
    values: Annotated[list[Any], msgspec.Meta(min_length=1)]


@dataclass(kw_only=True)
class _Means(_Drawing):
    value: str
    columns: str
    rows: list[str]
    at: _At | None = None


Entries = TypeVar("Entries", StudyTable, _File, _Quick, _Drawing)


def _converted(found: Table, kind: type[Entries], place: str) -> Entries:
    """Return a table of the file as a dataclass; raise `ParameterError` unless it has its entries."""
    _check_names(found, [one.name for one in fields(kind)], place)
    try:
        made = msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise ParameterError(f"{place}: {str(error).replace('$.', '')}") from None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name := found.get("name", "x")) or name.endswith(SUFFIX):
        words = f"use only letters, digits, - and _, begin with a letter or digit, and do not end in {SUFFIX}"
        raise ParameterError(f"{place}: name = {name!r} will be used in file names: {words}")
    return made


def _drawings(what: str, specs: Sequence[Table], usual: type[_Drawing], where: str) -> list[Table]:
    """Return every ``[[figure]]`` (or ``[[table]]``) with the defaults of its entries filled in."""
    made: list[Table] = []
    for number, spec in enumerate(specs, start=1):
        place, kind = f"{where}, [[{what}]] {spec.get('name', number)!r}", str(spec.get("kind", ""))
        if kind and ":" not in kind:
            raise ParameterError(f'{place}: unknown kind {kind!r}; leave it out or give "module:function"')
        known = {one.name for one in fields(_Drawing)} if kind else set(spec)  # a function knows its other entries
        entries = {name: value for name, value in spec.items() if name in known}
        made.append({**spec, **asdict(_converted(entries, _Drawing if kind else usual, place))})
    names = [spec["name"] for spec in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ParameterError(f"{where}: two [[{what}]] are called {twice!r}; give each its own name")
    return made


def _check_names(found: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if unknown := sorted(set(found) - set(known)):
        raise ParameterError(f"{where}: unknown entry {unknown[0]!r}; known ones are {', '.join(sorted(known))}")


# --- what can be known to be wrong before the first worker starts -----------------------------------------------------


def check_study(study: Study) -> None:
    """Raise `ParameterError`, in one line with the file, unless the study's functions can be called as intended."""
    if study.task in TASKS:
        _check_options(study, TASKS[study.task][1])
    else:
        _check_function(study, "[study]: task", study.task, ("replication",), TASKS)
    if study.checks is not None:
        _check_function(study, "[study]: checks", study.checks, ("rows",))
    for what, specs, arguments in (("figure", study.figures, ("spec", "rows", "folder")), ("table", study.tables, ())):
        for spec in specs:
            if spec["kind"]:
                _check_function(study, f"[[{what}]] {spec['name']!r}: kind", spec["kind"], arguments)


def _check_function(
    study: Study, entry: str, name: Any, arguments: Sequence[str], known: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return the function "module:function" that an entry names; it must take ``arguments`` (() is any)."""
    if not isinstance(name, str) or not all(name.partition(":")):
        choice = f"one of {', '.join(known)}, or " if known else ""
        raise ParameterError(f'{study.source}, {entry}: unknown function {name!r}; give {choice}"module:function"')
    function = study.function(name, entry)
    try:
        if arguments:
            inspect.signature(function).bind(*arguments)
    except TypeError as error:
        called = f"it is called as {name.partition(':')[2]}({', '.join(arguments)})"
        raise ParameterError(f"{study.source}, {entry} = {name!r}: {called}, but {error}; fix its arguments") from None
    return function


def _check_options(study: Study, options: Mapping[str, Sequence[str]]) -> None:
    """Check the options of a built-in task: all are known, names are valid choices, and the generator fits."""
    where = f"{study.source}, [options]"
    _check_names(study.options, list(options), where)
    if "generator" in options:
        name = study.options.get("generator", "paper")
        known = GENERATORS.get(name, name)
        _check_generator(study, name, _check_function(study, "[options]: generator", known, (), GENERATORS))
    for entry, choices in options.items():
        if not choices or entry not in study.options:
            continue
        value = study.options[entry]
        if not isinstance(value, list) or not value:
            hint = f"; write {entry} = [{value!r}]" if isinstance(value, str) else ""
            raise ParameterError(f"{where}: {entry} must be a list of names, got {value!r}{hint}")
        for name in value:
            if name not in choices:
                raise ParameterError(f"{where}: {entry} has an unknown name {name!r}; choose from {', '.join(choices)}")
            if value.count(name) > 1:
                raise ParameterError(f"{where}: {entry} has {name!r} twice, which would count its rows twice")


def _check_generator(study: Study, name: str, function: Callable[..., Any]) -> None:
    """Check that the generator can be called at every grid point with what the grid and ``design`` give it."""
    place, types = f"{study.source}, [options]: generator {name!r}", get_type_hints(function)
    if not isinstance(design := study.options.get("design", {}), Mapping):
        raise ParameterError(f"{study.source}, [options]: design must be a table, {{ name = value }}, got {design!r}")
    for point in study.points:
        arguments = generator_arguments(function, study.options, point)
        try:
            inspect.signature(function).bind(seed=0, **arguments)
        except TypeError as error:
            words = "it is called with seed, design and the [[grid]] entries it accepts"
            raise ParameterError(f"{place}: {error}; {words}") from None
        for entry, value in arguments.items():
            try:
                msgspec.convert(value, types.get(entry, Any))
            except msgspec.ValidationError as error:
                raise ParameterError(f"{place}: {entry} = {value!r}: {error}") from None
