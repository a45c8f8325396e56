"""The built-in tasks by name; what can be known to be wrong with a study before its first worker starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from fedkin.errors import ParameterError
from fedkin.studies.config import Study, find_function, modules_beside
from fedkin.studies.entries import FIGURES, check_names
from fedkin.studies.tasks.designs import BUILT_IN_GENERATORS, Generator, Replication

Task = Callable[[Replication], Iterable[dict[str, Any]]]

#: The function of each; imported when it is asked for.
BUILT_IN_TASKS: Mapping[str, str] = {
    "estimation": "fedkin.studies.tasks.estimation:estimation",
    "selection": "fedkin.studies.tasks.estimation:edge_selection",
    "error-rates": "fedkin.studies.tasks.estimation:error_rates",
    "convergence": "fedkin.studies.tasks.algorithms:convergence",
    "availability": "fedkin.studies.tasks.algorithms:availability",
    "kin": "fedkin.studies.tasks.kin:kin",
    "election": "fedkin.studies.tasks.election:election",
}


def task_function(name: str) -> Task:
    """The task with a built-in name, or the function called "module:function"."""
    return find_function(BUILT_IN_TASKS.get(name, name), f"task {name!r}")


def task_options(name: str) -> Mapping[str, Sequence[str]]:
    """Options of a built-in task; those that are lists of names come with the names to choose from."""
    options: Mapping[str, Sequence[str]] = import_module(BUILT_IN_TASKS[name].partition(":")[0]).OPTIONS[name]
    return options


#: Annotations that say what a value must be: its types, and the same in words. A truth value is no number.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a text"),
}


def check_study(study: Study) -> None:
    """Raise `ParameterError`, in one line with the file, unless the study's functions can be called as they will be."""
    with modules_beside(study.folder):
        _check_functions(study)
        if study.task in BUILT_IN_TASKS:
            _check_options(study)
    if study.task == "availability":
        _check_availability(study)


def _check_functions(study: Study) -> None:
    _function(study, "[study]", "task", study.task, ("replication",), BUILT_IN_TASKS)
    if study.checks is not None:
        _function(study, "[study]", "checks", study.checks, ("rows",))
    for spec in study.figures:
        kind = spec.get("kind", "lines")
        _function(study, f"[[figure]] {spec['name']!r}", "kind", kind, ("spec", "rows", "folder"), FIGURES)
    for spec in study.tables:
        if "kind" in spec:
            _function(study, f"[[table]] {spec['name']!r}", "kind", spec["kind"], ("spec", "rows"))
    generator = study.options.get("generator")
    if study.task not in BUILT_IN_TASKS and isinstance(generator, str) and ":" in generator:
        # a custom task does with its options what it likes, but the code of a function among them enters the cells
        _function(study, "[options]", "generator", generator, ())


def _function(
    study: Study, place: str, entry: str, name: Any, arguments: Sequence[str], known: Iterable[str] = ()
) -> Callable[..., Any] | None:
    """The function that an entry names, None for a built-in one; it must take ``arguments`` (where () asks nothing)."""
    known, where = list(known), f"{study.source}, {place}"
    if name in known:
        return None
    if not isinstance(name, str) or not all(name.partition(":")):
        choice = f"one of {', '.join(known)}, or " if known else ""
        raise ParameterError(f'{where}: unknown {entry} {name!r}; give {choice}"module:function"')
    function = find_function(name, f"{where}: {entry} = {name!r}")
    try:
        if arguments:
            inspect.signature(function).bind(*arguments)
    except TypeError as error:
        called = f"it is called as {name.partition(':')[2]}({', '.join(arguments)})"
        raise ParameterError(f"{where}: {entry} = {name!r}: {called}, but {error}; mend its arguments") from None
    except ValueError:
        pass  # written in C: its arguments cannot be seen
    return function


def _check_options(study: Study) -> None:
    """The options of a built-in task: all of them known, names among those to choose from, a generator that fits."""
    where, options = f"{study.source}, [options]", task_options(study.task)
    check_names(study.options, options, where, "entry")
    if "generator" in options:
        name = study.options.get("generator", "paper")
        custom = _function(study, "[options]", "generator", name, (), BUILT_IN_GENERATORS)
        _check_generator(study, f"generator {name!r}", custom or BUILT_IN_GENERATORS[name])
    for entry, known in options.items():
        if known and entry in study.options:
            _check_choice(entry, study.options[entry], known, where)


def _check_choice(entry: str, value: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(value, list) or not value:
        hint = f"; write {entry} = [{value!r}]" if isinstance(value, str) else ""
        raise ParameterError(f"{where}: {entry} must be a list of names, got {value!r}{hint}")
    for name in value:
        if name not in known:
            raise ParameterError(f"{where}: {entry} has an unknown name {name!r}; choose from {', '.join(known)}")
    twice = next((name for name in value if value.count(name) > 1), None)
    if twice is not None:
        raise ParameterError(f"{where}: {entry} has {twice!r} twice, which would count its rows twice; leave one out")


def _check_generator(study: Study, generator: str, function: Generator) -> None:
    """The generator can be called at every grid point with what the grid and ``design`` give it."""
    place = f"{study.source}, [options]"
    design = study.options.get("design", {})
    if not isinstance(design, Mapping):
        raise ParameterError(f"{place}: design must be a table, {{ name = value }}, got {design!r}")
    given = {f"{place}, design": [design], f"{study.source}, [[grid]]": study.points or ({},)}
    for where, tables in given.items():
        if any("seed" in one for one in tables):
            raise ParameterError(f"{where}: leave out seed: every replication gets its own, derived from [study]'s")
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:
        return  # written in C: its arguments cannot be seen
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
        missing = sorted(needed - set(design) - set(point))
        if missing:
            raise ParameterError(
                f"{place}: {generator} needs {', '.join(missing)}: give it in every [[grid]] or in design = {{ ... }}"
            )
    for where, tables in given.items():
        for name, value in (entry for one in tables for entry in one.items() if entry[0] in parameters):
            _check_kind(name, value, parameters[name].annotation, f"{where}: {name} must be", generator)


def _check_kind(name: str, value: Any, annotation: Any, must_be: str, generator: str) -> None:
    types, words = _KINDS.get(getattr(annotation, "__name__", annotation), ((object,), ""))
    if not isinstance(value, types) or (isinstance(value, bool) and types != (object,)):
        raise ParameterError(f"{must_be} {words}, got {value!r} ({generator})")


def _check_availability(study: Study) -> None:
    for point in study.points:
        p = point.get("availability")
        if not isinstance(p, int | float) or isinstance(p, bool) or not 0 < p <= 1:
            raise ParameterError(
                f"{study.source}, [[grid]]: the task availability needs availability = [...], probabilities above 0 "
                f"and at most 1, got {p!r}"
            )
