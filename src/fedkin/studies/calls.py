"""Whether a generator can be called with what a study gives it, seen before anything runs."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedkin.errors import ParameterError
from fedkin.studies.config import Study

#: Annotations that say what a value must be: a test, and the same in words.
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "float": (lambda value: isinstance(value, int | float) and not isinstance(value, bool), "a number"),
    "str": (lambda value: isinstance(value, str), "a text"),
}


@dataclass(frozen=True)
class Signature:
    """What a function can be called with, by name.

    Attributes
    ----------
    kinds : mapping name -> str
        Its parameters with their annotations ("" where there is none).
    needed : frozenset of str
        Those without a default.
    takes_any : bool
        Whether it takes any other name, too.
    """

    kinds: Mapping[str, str]
    needed: frozenset[str]
    takes_any: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """The signature of a function."""
        parameters = inspect.signature(function).parameters.values()
        named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        return cls(
            {one.name: "" if one.annotation is one.empty else str(one.annotation) for one in named},
            frozenset(one.name for one in named if one.default is one.empty),
            any(one.kind is one.VAR_KEYWORD for one in parameters),
        )

    @classmethod
    def in_source(cls, tree: ast.Module, name: str) -> Signature | None:
        """The signature of a plain function in a module's source, which is not run; None where it cannot be seen."""
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        if not found or found[-1].decorator_list or found[-1].args.posonlyargs:
            return None
        arguments = found[-1].args
        first_default = len(arguments.args) - len(arguments.defaults)
        needed = {one.arg for one in arguments.args[:first_default]}
        needed |= {
            one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
        }
        kinds = {
            one.arg: "" if one.annotation is None else ast.unparse(one.annotation)
            for one in (*arguments.args, *arguments.kwonlyargs)
        }
        return cls(kinds, frozenset(needed), arguments.kwarg is not None)


def check_call(study: Study, signature: Signature | None) -> None:
    """Raise `ParameterError` unless the study's generator can be called at every grid point.

    Parameters
    ----------
    study : Study
        Its options name the generator and have the fixed arguments, ``design``.
    signature : Signature or None
        Of the generator; None where it cannot be seen, and only the table ``design`` is checked.
    """
    place, generator = f"{study.source}, [options]", f"generator {study.options.get('generator', 'paper')!r}"
    design = study.options.get("design", {})
    if not isinstance(design, Mapping):
        raise ParameterError(f"{place}: design must be a table, {{ name = value }}, got {design!r}")
    _check_seed(design, f"{place}, design")
    for point in study.points:
        _check_seed(point, f"{study.source}, [[grid]]")
    if signature is None:
        return
    names = ", ".join(name for name in signature.kinds if name != "seed")
    if not signature.takes_any:
        if "seed" not in signature.kinds:
            raise ParameterError(f"{place}: {generator} takes no seed; add seed to its arguments and draw with it")
        unknown = next((name for name in design if name not in signature.kinds), None)
        if unknown is not None:
            raise ParameterError(f"{place}: {generator} takes no {unknown!r} (design); it takes {names}")
    _check_kinds(design, signature, f"{place}, design", generator)
    for point in study.points or ({},):
        missing = sorted(signature.needed - set(design) - set(point) - {"seed"})
        if missing:
            raise ParameterError(
                f"{place}: {generator} needs {', '.join(missing)}: give it in every [[grid]] or in design = {{ ... }}"
            )
        _check_kinds(point, signature, f"{study.source}, [[grid]]", generator)


def _check_seed(given: Mapping[str, Any], place: str) -> None:
    if "seed" in given:
        raise ParameterError(f"{place}: leave out seed: every replication gets its own, derived from that of [study]")


def _check_kinds(given: Mapping[str, Any], signature: Signature, place: str, generator: str) -> None:
    for name, value in given.items():
        test, words = _KINDS.get(signature.kinds.get(name, ""), (None, ""))
        if test is not None and not test(value):
            raise ParameterError(f"{place}: {name} must be {words}, got {value!r} ({generator})")
