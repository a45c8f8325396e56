"""What can be known to be wrong with a study before its first worker starts: functions and names that are not there."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from fedkin.errors import ParameterError
from fedkin.studies.calls import Signature, check_call
from fedkin.studies.config import Study, put_on_path
from fedkin.studies.specs import FIGURES, check_names
from fedkin.studies.tasks import BUILT_IN_TASKS


def check_study(study: Study) -> None:
    """Raise `ParameterError`, in one line with the file, when a function, estimator or method is not there."""
    put_on_path(study.folder)
    for place, entry, name in _functions(study):
        check_function(name, f"{study.source}, {place}: {entry} = {name!r}")
    where, options = f"{study.source}, [options]", _options(study.task)
    if options is not None:
        check_names(study.options, set(options), where, "entry")
        for entry, known in options.items():
            if known and entry in study.options:
                _check_choice(entry, study.options[entry], known, where)
        if "generator" in options:
            check_call(study, _signature(study.options.get("generator", "paper")))
    if study.task == "availability":
        _check_availability(study)


def check_function(name: str, where: str) -> None:
    """Raise `ParameterError` unless "module:function" can be found; the module is read, not run."""
    module, _, function = name.partition(":")
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ParameterError(
            f"{where}: there is no module {module!r}; put {module}.py beside the TOML file or install it"
        )
    if spec.origin is None or not spec.has_location:
        raise ParameterError(
            f"{where}: the module {module!r} has no file of its own; name a function in a .py file beside the TOML file"
        )
    if not spec.origin.endswith(".py"):
        return  # a compiled module: nothing to be seen from outside
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ParameterError(f"{where}: {spec.origin}, line {line}: {error}; mend the module") from None
    names = set(_defined(tree))
    if function not in names and not names & {"*", "__getattr__"}:
        raise ParameterError(f"{where}: {spec.origin} has no function {function!r}; define it there or mend the name")


def _signature(name: str) -> Signature | None:
    """What a generator that was found can be called with, None where that cannot be seen from outside."""
    from fedkin.studies.designs import BUILT_IN_GENERATORS

    if name in BUILT_IN_GENERATORS:
        return Signature.of(BUILT_IN_GENERATORS[name])
    module, _, function = name.partition(":")
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Signature.in_source(ast.parse(Path(spec.origin).read_bytes()), function)


def _check_availability(study: Study) -> None:
    for point in study.points:
        p = point.get("availability")
        if not isinstance(p, int | float) or isinstance(p, bool) or not 0 < p <= 1:
            raise ParameterError(
                f"{study.source}, [[grid]]: the task availability needs availability = [...], probabilities above 0 "
                f"and at most 1, got {p!r}"
            )


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def _functions(study: Study) -> Iterator[tuple[str, str, str]]:
    """Place, entry and name of every "module:function" in a study."""
    from fedkin.studies.designs import BUILT_IN_GENERATORS

    yield from _named("[study]", "task", study.task, BUILT_IN_TASKS, study.source)
    if study.checks is not None:
        yield from _named("[study]", "checks", study.checks, (), study.source)
    generator = study.options.get("generator", "paper")
    # the options of one's own task are its own affair, but the code of a function among them enters the cells
    if study.task in BUILT_IN_TASKS or (isinstance(generator, str) and ":" in generator):
        yield from _named("[options]", "generator", generator, BUILT_IN_GENERATORS, study.source)
    for what, specs, known in (("figure", study.figures, tuple(FIGURES)), ("table", study.tables, ())):
        for spec in specs:
            if "kind" in spec:
                yield from _named(f"[[{what}]] {spec['name']!r}", "kind", spec["kind"], known, study.source)


def _named(place: str, entry: str, name: Any, known: Iterable[str], source: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(name, str) and name in (known := list(known)):
        return
    module, _, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not module or not function:
        choice = f"one of {', '.join(known)}, or " if known else ""
        raise ParameterError(f'{source}, {place}: unknown {entry} {name!r}; give {choice}"module:function"')
    yield place, entry, name


def _options(task: str) -> Mapping[str, Sequence[str]] | None:
    """Options of a built-in task, with the names to choose from where they are lists of names; None for other tasks."""
    if task == "election":
        from fedkin.studies.election import LABELS as METHODS_OF_ELECTION
        from fedkin.studies.election import Protocol

        free = ["allow_incomplete", *Protocol.__dataclass_fields__]
        return dict.fromkeys(free, ()) | {"methods": list(METHODS_OF_ELECTION)}
    design = ["generator", "design"]
    if task == "selection":
        from fedkin.stats import Variance

        return dict.fromkeys([*design, "level"], ()) | {"variances": list(get_args(Variance))}
    from fedkin.studies.estimators import LABELS, Settings

    tuned = [*design, *Settings.__dataclass_fields__]
    if task == "estimation":
        return dict.fromkeys(tuned, ()) | {"estimators": list(LABELS)}
    if task in ("convergence", "availability"):
        from fedkin.studies.algorithms import METHODS, VARIANTS

        choice = {"methods": list(METHODS)} if task == "convergence" else {"variants": list(VARIANTS)}
        return dict.fromkeys([*tuned, "rounds", "batch_size"], ()) | choice
    return None


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
