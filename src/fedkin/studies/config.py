"""A study as data: its TOML file becomes a checked `Study`, its grid points become `Cell`s with derived seeds.

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

    [[figure]]                           # figures and tables: see `fedkin.studies.figures`
    kind = "lines"
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import fedkin
from fedkin.errors import ParameterError
from fedkin.studies import election, election_report, figures, kin, tasks
from fedkin.studies.tasks import GENERATORS, Task, code_digest, find_function

#: The studies that come with Fedkin, in the order in which ``fedkin study all`` runs them.
BUILT_IN = (
    *("estimation", "sensitivity", "convergence", "availability", "selection", "error-rates", "rate"),
    *("kin", "coverage", "election"),
)
TASKS = {**tasks.TASKS, **kin.TASKS, **election.TASKS}
#: Kinds of figures, and the functions that draw them.
FIGURES: Mapping[str, figures.Drawer] = {
    "lines": figures.line_panels,
    "scaling": figures.scaling,
    "state_map": election_report.state_map,
    "kin_map": election_report.kin_map,
    "accuracy": election_report.accuracy,
}
SUFFIX = "-quick"  # of the directory of a quick run


@dataclass(frozen=True)
class Cell:
    """A grid point and some of its replications: what one worker computes at a time, and what is cached.

    A seed depends on the study's seed, the grid point (without its shared entries) and the replication alone; ``key``
    is a digest of everything that the rows depend on.
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
    """A study as its file describes it."""

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

    def function(self, name: str, where: str) -> Callable[..., Any]:
        """Return the function "module:function", from a module next to the file or from an installed one."""
        return find_function(name, f"{self.source}, {where} = {name!r}", self.folder)

    def cells(self, fingerprint: str = "") -> list[Cell]:
        """Return all cells: the first block of every grid point, then the second block of every one, and so on.

        A study that is stopped half way has about the same number of replications everywhere. ``fingerprint`` is the
        digest of the data that the task reads, if any.
        """
        named = {"[study]: task": self.task, "[options]: generator": self.options.get("generator")}
        own = {entry: name for entry, name in named.items() if isinstance(name, str) and ":" in name}
        code = [code_digest(self.function(name, one)) for one, name in own.items() if not name.startswith("fedkin.")]
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


def task_function(name: str, folder: Path | None = None) -> Task:
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
    """Parse and check a TOML text; ``where`` names it in messages, ``folder`` is where its modules may lie."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(f"{where} is not valid TOML: {error}") from None
    _check_names(raw, ("study", "grid", "options", "quick", "figure", "table"), where, "table")
    for name in ("study", "options", "quick"):
        if not isinstance(raw.get(name, {}), Mapping):
            raise ParameterError(f"{where}: {name} must be a table; begin it with a line [{name}]")
    for name in ("figure", "table"):
        if not (isinstance(raw.get(name, []), list) and all(isinstance(one, Mapping) for one in raw.get(name, []))):
            raise ParameterError(f"{where}: begin each {name} with a line [[{name}]], with two brackets")
    head, options, changes = (dict(raw.get(name, {})) for name in ("study", "options", "quick"))
    grid, drawn, tables = raw.get("grid", [{}]), raw.get("figure", []), raw.get("table", [])
    _check_entries(head, _STUDY, ("name", "task"), f"{where}, [study]")
    if head["name"].endswith(SUFFIX):
        words = f"name = {head['name']!r} ends in {SUFFIX}, as directories of quick runs do; choose another"
        raise ParameterError(f"{where}, [study]: {words}")
    _check_entries(changes, _QUICK, (), f"{where}, [quick]")  # whether it is used or not
    list(_points(changes.get("grid", []), f"{where}, [quick]"))
    _check_drawings("figure", drawn, where)
    _check_drawings("table", tables, where)
    full = head.get("replications", Study.replications)
    if quick:
        grid = changes.pop("grid", grid)
        options.update(changes.pop("options", {}))
        head.update(changes)
    return Study(
        points=tuple(_points(grid, where)),
        options=options,
        figures=tuple(drawn),
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


#: What an entry must be, in words, and its test.
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    'a text, "..."': lambda value: isinstance(value, str),
    'a list of texts, ["...", ...]': lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value),
    "a table, { name = value }": lambda value: isinstance(value, Mapping),
    "true or false": lambda value: isinstance(value, bool),
    "a whole number of at least 0": lambda value: type(value) is int and value >= 0,
    "a whole number of at least 1": lambda value: type(value) is int and value >= 1,
    "a list of values": lambda value: isinstance(value, list) and bool(value),
    "two numbers, [low, high]": lambda value: (
        isinstance(value, list) and len(value) == 2 and all(isinstance(one, int | float) for one in value)
    ),
    'a list of { y = number, label = "..." } or { column = "...", label = "..." }': lambda value: (
        isinstance(value, list)
        and all(isinstance(one, Mapping) and "label" in one and ("column" in one) != ("y" in one) for one in value)
    ),
    '{ column = "...", values = [...] }': lambda value: (
        isinstance(value, Mapping) and set(value) == {"column", "values"} and bool(value["values"])
    ),
    '"linear" or "log" or "symlog" or "logit"': lambda value: value in ("linear", "log", "symlog", "logit"),
    '"values"': lambda value: value == "values",
    '"student" or "wilson"': lambda value: value in ("student", "wilson"),
    "anything": lambda value: True,
}
_TEXT, _TEXTS, _TABLE, _SWITCH, _LEAST_0, _LEAST_1, _LIST, _PAIR, _LINES, _MARKS, _SCALE, _TICKS, _INTERVAL, _ANY = (
    _KINDS
)
_STUDY = {
    **dict.fromkeys(("name", "task", "title", "about", "checks", "data"), _TEXT),
    "seed": _LEAST_0,
    **dict.fromkeys(("replications", "block"), _LEAST_1),
    "shared": _TEXTS,
}
_QUICK = {"replications": _LEAST_1, "block": _LEAST_1, "options": _TABLE, "grid": _ANY}
_DRAWING = {**dict.fromkeys(("name", "kind", "caption"), _TEXT), "where": _TABLE}
_AXES = {**_DRAWING, **dict.fromkeys(("x", "y", "series", "x_label", "y_label", "series_label"), _TEXT)}
_PANELS = {
    **_AXES,
    **dict.fromkeys(("rows", "columns", "diagonal"), _TEXT),
    **dict.fromkeys(("x_scale", "y_scale"), _SCALE),
    **dict.fromkeys(("share_x", "share_y", "markers"), _SWITCH),
    "series_values": _LIST,
    "x_ticks": _TICKS,
    "y_limits": _PAIR,
    "interval": _INTERVAL,
    "reference": _LINES,
}
_TABLES = {**_DRAWING, "value": _TEXT, "columns": _TEXT, "rows": _TEXTS, "at": _MARKS}
#: Entries of a ``[[figure]]`` by its kind (others have those of all), and those that it must have.
_FIGURES = {
    "lines": (_PANELS, ("name", "x", "y")),
    "scaling": ({**_AXES, "points": _TEXTS}, ("name", "x", "y", "series", "points")),
}


def _check_entries(
    found: Mapping[str, Any], kinds: Mapping[str, str], needed: Sequence[str], place: str, *, others: bool = False
) -> None:
    """Check a table of the file: known entries only (unless ``others``), none missing, each what it must be."""
    if not others:
        _check_names(found, kinds, place, "entry")
    for name in needed:
        if name not in found:
            example = '["...", ...]' if kinds[name] == _TEXTS else '"..."'
            raise ParameterError(f"{place}: {name} is missing; add {name} = {example}")
    for name, value in found.items():
        if name in kinds and not _KINDS[kinds[name]](value):
            raise ParameterError(f"{place}: {name} must be {kinds[name]}, got {value!r}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name := found.get("name", "x")):
        words = "use only letters, digits, - and _, and begin with a letter or digit"
        raise ParameterError(f"{place}: name = {name!r} will be the name of files: {words}")


def _check_drawings(what: str, specs: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check that every ``[[figure]]`` (or ``[[table]]``) has what drawing it takes."""
    for number, spec in enumerate(specs, start=1):
        place = f"{where}, [[{what}]] {spec.get('name', number)!r}"
        kind = spec.get("kind", "lines" if what == "figure" else "")
        custom = isinstance(kind, str) and ":" in kind  # the function knows its other entries itself
        if not custom and kind not in (FIGURES if what == "figure" else ("",)):
            choice = f"give one of {', '.join(FIGURES)}, or" if what == "figure" else "leave it out or give"
            raise ParameterError(f'{place}: unknown kind {kind!r}; {choice} "module:function"')
        kinds, needed = (
            (_TABLES, ("name", "value", "columns", "rows"))
            if what == "table" and not custom
            else _FIGURES.get(kind, (_DRAWING, ("name",)))
        )
        _check_entries(spec, kinds, needed, place, others=custom)
    names = [spec["name"] for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ParameterError(f"{where}: two [[{what}]] are called {twice!r}; give each its own name")


def _check_names(found: Iterable[str], known: Iterable[str], where: str, what: str) -> None:
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ParameterError(f"{where}: unknown {what} {unknown[0]!r}; known ones are {', '.join(sorted(known))}")


# --- what can be known to be wrong before the first worker starts -----------------------------------------------------


def check_study(study: Study) -> None:
    """Raise `ParameterError`, in one line with the file, unless the study's functions can be called as they will be."""
    _check_function(study, "[study]", "task", study.task, ("replication",), TASKS)
    if study.checks is not None:
        _check_function(study, "[study]", "checks", study.checks, ("rows",))
    for spec in study.figures:
        place = f"[[figure]] {spec['name']!r}"
        _check_function(study, place, "kind", spec.get("kind", "lines"), ("spec", "rows", "folder"), FIGURES)
    for spec in study.tables:
        if "kind" in spec:
            _check_function(study, f"[[table]] {spec['name']!r}", "kind", spec["kind"], ("spec", "rows"))
    generator = study.options.get("generator")
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
    study: Study, place: str, entry: str, name: Any, arguments: Sequence[str], known: Iterable[str] = ()
) -> Callable[..., Any] | None:
    """Return the function that an entry names, None for a built-in one; it must take ``arguments`` (() is any)."""
    known, where = list(known), f"{study.source}, {place}"
    if name in known:
        return None
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
    """Check the options of a built-in task: all known, names among those to choose from, a generator that fits."""
    where = f"{study.source}, [options]"
    _check_names(study.options, options, where, "entry")
    if "generator" in options:
        name = study.options.get("generator", "paper")
        custom = _check_function(study, "[options]", "generator", name, (), GENERATORS)
        _check_generator(study, f"generator {name!r}", custom or GENERATORS[name])
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


_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a text"),
}


def _check_generator(study: Study, generator: str, function: Callable[..., Any]) -> None:
    """Check that the generator can be called at every grid point with what the grid and ``design`` give it."""
    place = f"{study.source}, [options]"
    design = study.options.get("design", {})
    if not isinstance(design, Mapping):
        raise ParameterError(f"{place}: design must be a table, {{ name = value }}, got {design!r}")
    given = {f"{place}, design": [design], f"{study.source}, [[grid]]": study.points or ({},)}
    for where, tables in given.items():
        if any("seed" in one for one in tables):
            raise ParameterError(f"{where}: leave out seed: every replication gets its own, derived from [study]'s")
    parameters = dict(inspect.signature(function).parameters)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    unnamed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = {name: one for name, one in parameters.items() if one.kind not in unnamed}
    needed = {name for name, one in parameters.items() if one.default is one.empty} - {"seed"}
    if "seed" not in parameters and not takes_any:
        raise ParameterError(f"{place}: {generator} takes no seed; add seed to its arguments and draw with it")
    unknown = next((name for name in design if name not in parameters and not takes_any), None)
    if unknown is not None:
        names = ", ".join(name for name in parameters if name != "seed")
        raise ParameterError(f"{place}: {generator} takes no {unknown!r} (design); it takes {names}")
    for point in given[f"{study.source}, [[grid]]"]:
        if missing := sorted(needed - set(design) - set(point)):
            words = "give it in every [[grid]] or in design = { ... }"
            raise ParameterError(f"{place}: {generator} needs {', '.join(missing)}: {words}")
    for where, tables in given.items():
        for name, value in (entry for one in tables for entry in one.items() if entry[0] in parameters):
            annotation = parameters[name].annotation
            types, words = _TYPES.get(getattr(annotation, "__name__", annotation), ((object,), ""))
            if not isinstance(value, types) or (isinstance(value, bool) and types != (object,)):
                raise ParameterError(f"{where}: {name} must be {words}, got {value!r} ({generator})")
