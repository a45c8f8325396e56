"""What may stand in a study's file: checked as it is read, so that a typo costs no computing time.

By hand and not by a validation library: a message names the table, the entry, what came, and what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedkin.errors import ParameterError

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class Rule(NamedTuple):
    """What an entry must be: a test, the same in words, and an example."""

    test: Callable[[Any], bool]
    words: str
    example: str = '"..."'


class Entries(NamedTuple):
    """The entries that a table of the file may have, and those that it must have."""

    rules: Mapping[str, Rule]
    needed: Sequence[str] = ()


def _whole(least: int) -> Rule:
    return Rule(
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
        f"a whole number of at least {least}",
    )


def _one_of(*known: str) -> Rule:
    return Rule(lambda value: value in known, " or ".join(f'"{one}"' for one in known))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _two_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(one, int | float) for one in value)


def _references(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return False
    return all(_is_text(one.get("label")) and _is_text(one.get("column")) != ("y" in one) for one in value)


def _marks(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"column", "values"} and bool(value["values"])


_TEXT = Rule(_is_text, 'a text, "..."')
_NAME = Rule(lambda value: _is_text(value) and bool(value), 'a text, "..."')
_TEXTS = Rule(_texts, 'a list of texts, ["...", ...]', '["...", ...]')
_TABLE = Rule(lambda value: isinstance(value, Mapping), "a table, { name = value }")
_SWITCH = Rule(lambda value: isinstance(value, bool), "true or false")
_SCALE = _one_of("linear", "log", "symlog", "logit")
_ANYTHING = Rule(lambda value: True, "anything")

STUDY = Entries(
    {
        **dict.fromkeys(("name", "task"), _NAME),
        **dict.fromkeys(("title", "about", "checks", "data"), _TEXT),
        "seed": _whole(0),
        "replications": _whole(1),
        "block": _whole(1),
        "shared": _TEXTS._replace(test=lambda value: value == [] or _texts(value)),
    },
    ("name", "task"),
)
QUICK = Entries({"replications": _whole(1), "block": _whole(1), "options": _TABLE, "grid": _ANYTHING})

_ALL_KINDS: Mapping[str, Rule] = {**dict.fromkeys(("name", "kind", "caption"), _TEXT), "where": _TABLE}
_LABELS = dict.fromkeys(("x", "y", "series", "x_label", "y_label", "series_label"), _TEXT)
_LINES: Mapping[str, Rule] = {
    **_ALL_KINDS,
    **_LABELS,
    **dict.fromkeys(("rows", "columns", "diagonal"), _TEXT),
    **dict.fromkeys(("x_scale", "y_scale"), _SCALE),
    **dict.fromkeys(("share_x", "share_y", "markers"), _SWITCH),
    "series_values": Rule(lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "x_ticks": _one_of("values"),
    "y_limits": Rule(_two_numbers, "two numbers, [low, high]"),
    "interval": _one_of("student", "wilson"),
    "reference": Rule(_references, 'a list of { y = number, label = "..." } or { column = "...", label = "..." }'),
}
#: Entries of a ``[[figure]]`` by its kind.
FIGURES: Mapping[str, Entries] = {
    "lines": Entries(_LINES, ("name", "x", "y")),
    "scaling": Entries({**_ALL_KINDS, **_LABELS, "points": _TEXTS}, ("name", "x", "y", "series", "points")),
    **dict.fromkeys(("state_map", "kin_map"), Entries(_ALL_KINDS, ("name",))),
    "accuracy": Entries(_ALL_KINDS, ("name",)),
}
#: Entries of a ``[[table]]`` without a kind.
TABLE = Entries(
    {
        **_ALL_KINDS,
        **dict.fromkeys(("value", "columns"), _TEXT),
        "rows": _TEXTS,
        "at": Rule(_marks, '{ column = "...", values = [...] }'),
    },
    ("name", "value", "columns", "rows"),
)


def check_shape(raw: Mapping[str, Any], where: str) -> None:
    """Raise `ParameterError` unless the file has known tables only, each of the kind that it must be."""
    check_names(raw, ("study", "grid", "options", "quick", "figure", "table"), where, "table")
    for name in ("study", "options", "quick"):
        if not isinstance(raw.get(name, {}), Mapping):
            raise ParameterError(f"{where}: {name} must be a table; begin it with a line [{name}]")
    for name in ("figure", "table"):
        if not (isinstance(raw.get(name, []), list) and all(isinstance(one, Mapping) for one in raw.get(name, []))):
            raise ParameterError(f"{where}: begin each {name} with a line [[{name}]], with two brackets")


def check_entries(found: Mapping[str, Any], entries: Entries, place: str, *, others: bool = False) -> None:
    """Raise `ParameterError` unless a table of the file has what it must have, and each entry is what it must be.

    ``place`` names the table in messages; with ``others`` it may have other entries, too.
    """
    if not others:
        check_names(found, entries.rules, place, "entry")
    for name in entries.needed:
        if name not in found:
            raise ParameterError(f"{place}: {name} is missing; add {name} = {entries.rules[name].example}")
    for name, value in found.items():
        if name in entries.rules and not entries.rules[name].test(value):
            raise ParameterError(f"{place}: {name} must be {entries.rules[name].words}, got {value!r}")
    name = found.get("name", "x")
    if not _PLAIN.fullmatch(name):
        raise ParameterError(
            f"{place}: name = {name!r} will be the name of files: use only letters, digits, - and _, "
            "and begin with a letter or digit"
        )


def check_drawings(what: str, specs: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise `ParameterError` unless every ``[[figure]]`` (or ``[[table]]``) can be drawn from rows with its columns."""
    for number, spec in enumerate(specs, start=1):
        place = f"{where}, [[{what}]] {spec.get('name', number)!r}"
        kind = spec.get("kind", "lines" if what == "figure" else "")
        custom = isinstance(kind, str) and ":" in kind  # the function knows its other entries itself
        known = FIGURES if what == "figure" else {"": TABLE}
        if kind not in known and not custom:
            choice = f"give one of {', '.join(FIGURES)}, or" if what == "figure" else "leave it out or give"
            raise ParameterError(f'{place}: unknown kind {kind!r}; {choice} "module:function"')
        check_entries(spec, Entries(_ALL_KINDS, ("name",)) if custom else known[kind], place, others=custom)
    names = [spec["name"] for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ParameterError(f"{where}: two [[{what}]] are called {twice!r}; give each its own name")


def check_names(found: Iterable[str], known: Iterable[str], where: str, what: str) -> None:
    """Raise `ParameterError` at an entry that means nothing, with those that do."""
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ParameterError(f"{where}: unknown {what} {unknown[0]!r}; known ones are {', '.join(sorted(known))}")
