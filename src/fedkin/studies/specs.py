"""What may stand in a study's file: checked as it is read, so that a typo costs no computing time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedkin.errors import ParameterError

SCALES = ("linear", "log", "symlog", "logit")

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _two_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(one, int | float) for one in value)


def _references(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return False
    return all(_text(one.get("label")) and (_text(one.get("column")) != ("y" in one)) for one in value)


def _marks(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"column", "values"} and bool(value["values"])


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _one_of(*known: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in known), " or ".join(f'"{one}"' for one in known)


#: What an entry must be: a test, and the same in words.
Rule = tuple[Callable[[Any], bool], str]

_TEXT: Rule = (_text, 'a text, "..."')
_TEXTS: Rule = (_texts, 'a list of texts, ["...", ...]')
_TABLE: Rule = (lambda value: isinstance(value, Mapping), "a table, { name = value }")
_SWITCH: Rule = (lambda value: isinstance(value, bool), "true or false")
_COUNT: Rule = (_whole(1), "a whole number of at least 1")

STUDY: Mapping[str, Rule] = {
    **dict.fromkeys(("name", "title", "about", "task", "checks", "data"), _TEXT),
    "seed": (_whole(0), "a whole number of at least 0"),
    "replications": _COUNT,
    "block": _COUNT,
    "shared": (lambda value: value == [] or _texts(value), _TEXTS[1]),
}
_ALL_KINDS: Mapping[str, Rule] = {**dict.fromkeys(("name", "kind", "caption"), _TEXT), "where": _TABLE}
_LABELS = dict.fromkeys(("x", "y", "series", "x_label", "y_label", "series_label"), _TEXT)
_LINES: Mapping[str, Rule] = {
    **_ALL_KINDS,
    **_LABELS,
    **dict.fromkeys(("rows", "columns"), _TEXT),
    **dict.fromkeys(("x_scale", "y_scale"), _one_of(*SCALES)),
    **dict.fromkeys(("share_x", "share_y", "markers"), _SWITCH),
    "series_values": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "x_ticks": _one_of("values"),
    "y_limits": (_two_numbers, "two numbers, [low, high]"),
    "interval": _one_of("student", "wilson"),
    "reference": (_references, 'a list of { y = number, label = "..." } or { column = "...", label = "..." }'),
}
#: Entries of a ``[[figure]]`` by its kind, and those that it cannot do without.
FIGURES: Mapping[str, tuple[Mapping[str, Rule], Sequence[str]]] = {
    "lines": (_LINES, ("name", "x", "y")),
    "scaling": ({**_ALL_KINDS, **_LABELS, "points": _TEXTS}, ("name", "x", "y", "series", "points")),
    "state_map": (_ALL_KINDS, ("name",)),
    "accuracy": (_ALL_KINDS, ("name",)),
}
#: The same of a ``[[table]]`` without a kind.
TABLE: tuple[Mapping[str, Rule], Sequence[str]] = (
    {
        **_ALL_KINDS,
        **dict.fromkeys(("value", "columns"), _TEXT),
        "rows": _TEXTS,
        "at": (_marks, '{ column = "...", values = [...] }'),
    },
    ("name", "value", "columns", "rows"),
)


def check_shape(raw: Mapping[str, Any], where: str) -> None:
    """Raise `ParameterError` unless the file's tables are of the kind that they must be."""
    for name in ("study", "options", "quick"):
        if not isinstance(raw.get(name, {}), Mapping):
            raise ParameterError(f"{where}: {name} must be a table; begin it with a line [{name}]")
    for name in ("figure", "table"):
        if not (isinstance(raw.get(name, []), list) and all(isinstance(one, Mapping) for one in raw.get(name, []))):
            raise ParameterError(f"{where}: begin each {name} with a line [[{name}]], with two brackets")


def check_study_entries(head: Mapping[str, Any], where: str) -> None:
    """Raise `ParameterError` unless the entries of ``[study]`` are what they must be."""
    for name, value in head.items():
        _check_value(name, value, STUDY[name], f"{where}, [study]")
    check_plain(head["name"], f"{where}, [study]")
    if head["name"].endswith("-quick"):
        raise ParameterError(
            f"{where}, [study]: name = {head['name']!r} ends in -quick, as directories of quick runs do"
        )


def check_quick_entries(changes: Mapping[str, Any], where: str) -> None:
    """Raise `ParameterError` unless the entries of ``[quick]`` are what they must be, whether they are used or not."""
    for name in ("replications", "block"):
        if name in changes:
            _check_value(name, changes[name], STUDY[name], f"{where}, [quick]")
    _check_value("options", changes.get("options", {}), _TABLE, f"{where}, [quick]")


def check_drawings(figures: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise `ParameterError` unless every ``[[figure]]`` and ``[[table]]`` can be drawn from rows with its columns."""
    for what, specs in (("figure", figures), ("table", tables)):
        names = []
        for number, spec in enumerate(specs, start=1):
            place = f"{where}, [[{what}]] {spec.get('name', number)!r}"
            _check_drawing(what, spec, place)
            check_plain(spec["name"], place)
            names.append(spec["name"])
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ParameterError(f"{where}: two [[{what}]] are called {twice!r}; give each its own name")


def check_plain(name: str, place: str) -> None:
    """Raise `ParameterError` unless a name can be that of a file: letters, digits, - and _."""
    if not _PLAIN.fullmatch(name):
        raise ParameterError(
            f"{place}: name = {name!r} will be the name of files: use only letters, digits, - and _, "
            "and begin with a letter or digit"
        )


def check_names(found: Mapping[str, Any], known: Sequence[str] | set[str], where: str, what: str) -> None:
    """Raise `ParameterError` at an entry that means nothing, with those that do."""
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ParameterError(f"{where}: unknown {what} {unknown[0]!r}; known ones are {', '.join(sorted(known))}")


def _check_drawing(what: str, spec: Mapping[str, Any], place: str) -> None:
    rules, needed = _entries(what, spec, place)
    for name in needed:
        if name not in spec:
            raise ParameterError(f"{place}: {name} is missing; add {name} = {_example(rules[name])}")
    for name, value in spec.items():
        if name in rules:
            _check_value(name, value, rules[name], place)


def _entries(what: str, spec: Mapping[str, Any], place: str) -> tuple[Mapping[str, Rule], Sequence[str]]:
    """The entries that a figure or table of this kind may have and must have."""
    kind = spec.get("kind", "lines" if what == "figure" else "")
    _check_value("kind", kind, _TEXT, place)
    if ":" in kind:
        return _ALL_KINDS, ("name",)  # a function of one's own knows the others itself
    if what == "figure" and kind not in FIGURES:
        raise ParameterError(f'{place}: unknown kind {kind!r}; give one of {", ".join(FIGURES)}, or "module:function"')
    if what == "table" and kind:
        raise ParameterError(f'{place}: unknown kind {kind!r}; leave it out or give "module:function"')
    rules, needed = FIGURES[kind] if what == "figure" else TABLE
    check_names(spec, list(rules), place, "entry")
    return rules, needed


def _check_value(name: str, value: Any, rule: Rule, place: str) -> None:
    test, words = rule
    if not test(value):
        raise ParameterError(f"{place}: {name} must be {words}, got {value!r}")


def _example(rule: Rule) -> str:
    return '["...", ...]' if rule is _TEXTS else '"..."'
