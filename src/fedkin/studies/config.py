"""Read a study's TOML file into a checked `Study`, and its grid points into `Cell`s with derived seeds.

docs/studies.md describes the entries of the file.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import msgspec

import fedkin
from fedkin.errors import ParameterError
from fedkin.studies import election, election_page, figures, kin, tasks
from fedkin.studies.replications import GENERATORS, StudyTask, code_digest, find_function, generator_arguments

#: The studies that come with Fedkin, in the order in which ``fedkin study all`` runs them.
BUILT_IN = (
    *("estimation", "sensitivity", "convergence", "availability", "selection", "error-rates", "rate"),
    *("sparse", "kin", "coverage", "population", "election"),
)
TASKS = {**tasks.TASKS, **kin.TASKS, **election.TASKS}
#: Kinds of figures, and the functions that draw them.
FIGURES: Mapping[str, figures.Drawer] = {
    "lines": figures.line_panels,
    "scaling": figures.scaling,
    "state_map": election_page.state_map,
    "kin_map": election_page.kin_map,
    "accuracy": election_page.accuracy,
}
SUFFIX = "-quick"  # of the directory of a quick run


@dataclass(frozen=True)
class Cell:
    """Grid point with some of its replications: the unit of computation and caching.

    A seed depends only on the study's seed, the grid point (without its shared entries) and the replication; ``key`` is
    a digest of everything that the rows depend on.
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
        """Grid point as text: ``n_sites=20, varrho=0.1``."""
        return ", ".join(f"{name}={value}" for name, value in self.params.items())


@dataclass(frozen=True)
class Study:
    """Study described by its file."""

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
        """Name of the directory for its files; a quick run has its own, so it never replaces a full one."""
        return self.name + SUFFIX if self.quick else self.name

    def function(self, name: str, where: str) -> Callable[..., Any]:
        """Return the function "module:function", from a module next to the file or from an installed one."""
        return find_function(name, f"{self.source}, {where} = {name!r}", self.folder)

    def cells(self, fingerprint: str = "") -> list[Cell]:
        """Return all cells: the first block of every grid point, then the second block of every one, and so on.

        An interrupted study therefore has a similar number of replications at every grid point. ``fingerprint`` is the
        digest of the data that the task reads, if any.
        """
        named = [("[study]: task", self.task), ("[options]: generator", self.options.get("generator"))]
        named += [("[[grid]]: estimator", name) for name in dict.fromkeys(one.get("estimator") for one in self.points)]
        own = [(entry, name) for entry, name in named if isinstance(name, str) and ":" in name]
        code = [code_digest(self.function(name, one)) for one, name in own if not name.startswith("fedkin.")]
        stamp = {"fedkin": fedkin.__version__, "task": self.task, "options": dict(self.options)}
        stamp |= {"code": code, "data": fingerprint}
        cells = []
        for first in range(0, self.replications, self.block):
            numbers = tuple(range(first, min(first + self.block, self.replications)))
            for point in self.points:
                apart = {name: value for name, value in point.items() if name not in self.shared}
                seeds = tuple(replication_seed(self.seed, apart, number) for number in numbers)
                key = _digest({**stamp, "params": dict(point), "replications": numbers, "seeds": seeds})
                cells.append(Cell(self.name, self.task, point, self.options, numbers, seeds, key))
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


def load_study(source: str | Path, *, quick: bool = False) -> Study:
    """Load the built-in study of that name, or the one in a TOML file; ``quick`` applies its ``[quick]`` table."""
    if isinstance(source, str) and source in BUILT_IN:
        text = resources.files("fedkin.studies").joinpath(f"built_in/{source}.toml").read_text(encoding="utf-8")
        return parse_study(text, f"the built-in study {source!r}", quick=quick)
    path = Path(source)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        known = f"give the path of a study's TOML file, or one of {', '.join(BUILT_IN)}"
        raise ParameterError(f"there is no study {str(source)!r}: it {what}; {known}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read: {error}") from None
    return parse_study(text, str(path), quick=quick, folder=path.resolve().parent)


def parse_study(text: str, where: str, *, quick: bool = False, folder: Path | None = None) -> Study:
    """Parse and check a TOML text; ``where`` names it in messages, ``folder`` is the directory of its modules."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(f"{where} is not valid TOML: {error}") from None
    _check(raw, _FILE, where)
    grid, head, options, changes = raw.get("grid", [{}]), raw["study"], raw.get("options", {}), raw.get("quick", {})
    _check(head, _HEAD, f"{where}, [study]")
    _check(changes, _QUICK, f"{where}, [quick]")  # whether it is used or not
    list(_points(changes.get("grid", []), f"{where}, [quick]"))
    for what in ("figure", "table"):
        _check_drawings(what, raw.get(what, []), where)
    full = head.get("replications", Study.replications)
    if quick:
        grid = changes.pop("grid", grid)
        options.update(changes.pop("options", {}))
        head.update(changes)
    return Study(
        points=tuple(_points(grid, where)),
        options=options,
        figures=tuple(raw.get("figure", ())),
        tables=tuple(raw.get("table", ())),
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


def _entries(needed: Mapping[str, Any], **optional: Any) -> type[msgspec.Struct]:
    """Return the type of a table of the file from the types of its entries."""
    fields: list[Any] = [*needed.items(), *((name, kind, None) for name, kind in optional.items())]
    return msgspec.defstruct("table", fields, kw_only=True, forbid_unknown_fields=True)


_NAME = {"name": str}
_Table: TypeAlias = dict[str, Any]
_AT_LEAST_1, _SCALE = Annotated[int, msgspec.Meta(ge=1)], Literal["linear", "log", "symlog", "logit"]
_ANY = Annotated[list[Any], msgspec.Meta(min_length=1)]
_FILE = _entries({"study": _Table}, grid=Any, options=_Table, quick=_Table, figure=list[_Table], table=list[_Table])
_HEAD = _entries(
    {**_NAME, "task": str},
    **dict.fromkeys(("title", "about", "checks", "data"), str),
    **dict.fromkeys(("replications", "block"), _AT_LEAST_1),
    seed=Annotated[int, msgspec.Meta(ge=0)],
    shared=list[str],
)
_QUICK = _entries({}, replications=_AT_LEAST_1, block=_AT_LEAST_1, options=_Table, grid=Any)
_DRAWING = {"kind": str, "caption": str, "where": _Table}
_AXES = {**_DRAWING, **dict.fromkeys(("series", "x_label", "y_label", "series_label"), str)}
_LINES = _entries(
    {**_NAME, "x": str, "y": str},
    **_AXES,
    **dict.fromkeys(("rows", "columns", "diagonal"), str),
    **dict.fromkeys(("x_scale", "y_scale"), _SCALE),
    **dict.fromkeys(("share_x", "share_y", "markers"), bool),
    series_values=_ANY,
    x_ticks=Literal["values"],
    y_limits=tuple[float, float],
    interval=Literal["student", "wilson"],
    reference=list[_entries({"label": str}, column=str, y=float)],  # type: ignore[misc]
)
_SCALING = _entries({**_NAME, "x": str, "y": str, "points": list[str]}, **_AXES)
_MEANS = _entries(
    {**_NAME, "value": str, "columns": str, "rows": list[str]},
    **_DRAWING,
    at=_entries({"column": str, "values": _ANY}),
)


def _check(found: Mapping[str, Any], kind: type[msgspec.Struct], place: str) -> None:
    """Raise `ParameterError` unless a table of the file has the entries of ``kind``."""
    _check_names(found, kind.__struct_fields__, place)
    try:
        msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise ParameterError(f"{place}: {str(error).replace('$.', '')}") from None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name := found.get("name", "x")) or name.endswith(SUFFIX):
        words = f"use only letters, digits, - and _, begin with a letter or digit, and do not end in {SUFFIX}"
        raise ParameterError(f"{place}: name = {name!r} will be used in file names: {words}")


def _check_drawings(what: str, specs: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check that every ``[[figure]]`` (or ``[[table]]``) has the entries needed to draw it."""
    plain = _entries(_NAME, **_DRAWING)
    kinds: Mapping[Any, type[msgspec.Struct]] = {"": _MEANS}
    if what == "figure":
        kinds = {**dict.fromkeys(FIGURES, plain), "": _LINES, "lines": _LINES, "scaling": _SCALING}
    for number, spec in enumerate(specs, start=1):
        place, kind = f"{where}, [[{what}]] {spec.get('name', number)!r}", spec.get("kind", "")
        if isinstance(kind, str) and ":" in kind:  # the function knows its other entries itself
            _check({name: spec[name] for name in plain.__struct_fields__ if name in spec}, plain, place)
        elif kind in kinds:
            _check(spec, kinds[kind], place)
        else:
            choice = f"give one of {', '.join(FIGURES)}, or" if what == "figure" else "leave it out or give"
            raise ParameterError(f'{place}: unknown kind {kind!r}; {choice} "module:function"')
    names = [spec["name"] for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ParameterError(f"{where}: two [[{what}]] are called {twice!r}; give each its own name")


def _check_names(found: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if unknown := sorted(set(found) - set(known)):
        raise ParameterError(f"{where}: unknown entry {unknown[0]!r}; known ones are {', '.join(sorted(known))}")


# --- what can be known to be wrong before the first worker starts -----------------------------------------------------


def check_study(study: Study) -> None:
    """Raise `ParameterError`, in one line with the file, unless the study's functions can be called as intended."""
    if study.task not in TASKS:
        _check_function(study, "[study]", "task", study.task, ("replication",), TASKS)
    if study.checks is not None:
        _check_function(study, "[study]", "checks", study.checks, ("rows",))
    for what, specs, arguments in (("figure", study.figures, ("spec", "rows", "folder")), ("table", study.tables, ())):
        for spec in specs:
            if ":" in spec.get("kind", ""):
                _check_function(study, f"[[{what}]] {spec['name']!r}", "kind", spec["kind"], arguments)
    generator = study.options.get("generator", "paper")
    if study.task in TASKS:
        _check_options(study, TASKS[study.task][1])
    elif isinstance(generator, str) and ":" in generator:
        # a custom task does with its options what it likes, but the code of a function among them enters the cells
        _check_function(study, "[options]", "generator", generator, ())
    for point in study.points if study.task == "availability" else ():
        p = point.get("availability")
        if not isinstance(p, int | float) or isinstance(p, bool) or not 0 < p <= 1:
            words = "the task availability needs availability = [...], probabilities above 0 and at most 1"
            raise ParameterError(f"{study.source}, [[grid]]: {words}, got {p!r}")


def _check_function(
    study: Study,
    place: str,
    entry: str,
    name: Any,
    arguments: Sequence[str],
    known: Sequence[str] | Mapping[str, Any] = (),
) -> Callable[..., Any]:
    """Return the function "module:function" that an entry names; it must take ``arguments`` (() is any)."""
    where = f"{study.source}, {place}"
    if not isinstance(name, str) or not all(name.partition(":")):
        choice = f"one of {', '.join(known)}, or " if known else ""
        raise ParameterError(f'{where}: unknown {entry} {name!r}; give {choice}"module:function"')
    function = study.function(name, f"{place}: {entry}")
    try:
        if arguments:
            inspect.signature(function).bind(*arguments)
    except TypeError as error:
        called = f"it is called as {name.partition(':')[2]}({', '.join(arguments)})"
        raise ParameterError(f"{where}: {entry} = {name!r}: {called}, but {error}; fix its arguments") from None
    return function


def _check_options(study: Study, options: Mapping[str, Sequence[str]]) -> None:
    """Check the options of a built-in task: all are known, names are valid choices, and the generator fits."""
    where = f"{study.source}, [options]"
    _check_names(study.options, list(options), where)
    if "generator" in options:
        name = study.options.get("generator", "paper")
        known = GENERATORS.get(name, name)
        _check_generator(
            study, f"generator {name!r}", _check_function(study, "[options]", "generator", known, (), GENERATORS)
        )
    for entry, known in options.items():
        if not known or entry not in study.options:
            continue
        value = study.options[entry]
        if not isinstance(value, list) or not value:
            hint = f"; write {entry} = [{value!r}]" if isinstance(value, str) else ""
            raise ParameterError(f"{where}: {entry} must be a list of names, got {value!r}{hint}")
        for name in value:
            if name not in known:
                raise ParameterError(f"{where}: {entry} has an unknown name {name!r}; choose from {', '.join(known)}")
        if twice := next((name for name in value if value.count(name) > 1), None):
            raise ParameterError(f"{where}: {entry} has {twice!r} twice, which would count its rows twice")


def _check_generator(study: Study, generator: str, function: Callable[..., Any]) -> None:
    """Check that the generator can be called at every grid point with what the grid and ``design`` give it."""
    place, design = f"{study.source}, [options]: {generator}", study.options.get("design", {})
    signature, types = inspect.signature(function), get_type_hints(function)
    if not isinstance(design, Mapping):
        raise ParameterError(f"{study.source}, [options]: design must be a table, {{ name = value }}, got {design!r}")
    for point in study.points or ({},):
        arguments = generator_arguments(signature, design, point)
        try:
            signature.bind(seed=0, **arguments)
        except TypeError as error:
            raise ParameterError(
                f"{place}: {error}; it is called with seed, design and the [[grid]] entries it accepts"
            ) from None
        for name, value in arguments.items():
            try:
                msgspec.convert(value, types.get(name, Any))
            except msgspec.ValidationError as error:
                raise ParameterError(f"{place}: {name} = {value!r}: {error}") from None
