"""Contracts as TOML: read with all mistakes at once, and their lines; written for people to read."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

from fedkin.data import Column, Schema
from fedkin.errors import FedkinError
from fedkin.losses import LOSS_NAMES, LOSSES, describe_loss, described_loss

_OF_SCHEMA = ("features", "target", "offset", "exposure", "missing")
_EXAMPLES = {
    "name": 'name = "heart"',
    "loss": f'loss = "linear" (or {", ".join(LOSS_NAMES)})',
    "features": "a table [features.NAME] for each column",
}
_COLUMN = 'a column is a table, such as {unit = "kg", low = 30, high = 250} or {levels = ["no", "yes"]}'


_KINDS = {
    inspect.FloatType: "a number",
    inspect.IntType: "a whole number",
    inspect.StrType: "text",
    inspect.BoolType: "true or false",
}
_PART = r"""[\w-]+|"[^"]*"|'[^']*'"""
_KEYS = re.compile(rf"\s*(\[?)\s*((?:{_PART})(?:\s*\.\s*(?:{_PART}))*)\s*[\]=]")
_LIMITS = (("ge", "of at least"), ("gt", "above"), ("le", "and at most"), ("lt", "and below"))


class Reading:
    """A TOML file that is read into a contract; all mistakes are collected and reported together."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self.wrong: list[str] = []

    def contract(self, form: type[Any], entries: Mapping[str, Any]) -> Any:
        """Return the contract with these entries; None if anything is ``wrong``."""
        self.wrong += [f"{key} is missing: {words}" for key, words in _EXAMPLES.items() if key not in entries]
        own = {key: value for key, value in entries.items() if key not in (*_OF_SCHEMA, "loss")}
        made = self._entries(form, own, (), without="schema", more=(*_OF_SCHEMA, "loss"))
        schema = self._schema(entries)
        loss = self._loss(entries["loss"], schema) if "loss" in entries else None
        with self._noting():
            if not self.wrong and schema is not None and loss is not None:
                return form(schema=schema, loss=loss, **made)
        return None

    def _entries(
        self, form: type, given: Mapping[str, Any], path: tuple[str, ...], without: str = "", more: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Convert the entries of a table one by one, so that every mistake is found."""
        hints, made = get_type_hints(form, include_extras=True), {}
        known = sorted({*hints, *more} - {without})
        for key, value in given.items():
            place = (*path, key)
            if key not in known:
                section = f"in [{'.'.join(path)}]" if path else "at the top"
                near = _near(key, known) or f"; known are {', '.join(known)}"
                self._mistake(place, f"unknown key {key!r} {section}{near}")
            elif isinstance(value, dict) and (table := _table(hints[key])) is not None:
                made[key] = table(**self._entries(table, value, place))
            elif isinstance(value, str) and (words := _literals(hints[key])) and value not in words:
                numbers = "" if get_origin(hints[key]) is Literal else " or a number"
                allowed = " or ".join(f'"{word}"' for word in words)
                self._mistake(place, f'{".".join(place)} must be {allowed}{numbers}, got "{value}"')
            else:
                try:
                    made[key] = msgspec.convert(value, hints[key])
                except msgspec.ValidationError:
                    self._mistake(place, f"{'.'.join(place)} must be {_allowed(hints[key])}, got {value!r}")
        return made

    def _schema(self, entries: Mapping[str, Any]) -> Schema | None:
        features, target = entries.get("features", {}), entries.get("target")
        offset, exposure = entries.get("offset"), entries.get("exposure")
        before, predicted, event = len(self.wrong), None, None
        if not isinstance(features, dict) or ("features" in entries and not features):
            self._mistake(("features",), "features must be a table with an entry for each column")
            return None
        columns = [self._column(name, given, ("features", name)) for name, given in features.items()]
        if isinstance(target, dict) and isinstance(target.get("name"), str):
            rest = {key: value for key, value in target.items() if key not in ("name", "event")}
            if "event" in target and not isinstance(event := target["event"], str):
                self._mistake(("target", "event"), "event must be the name of a column")
            predicted = self._column(target["name"], rest, ("target",))
        elif target is not None:
            self._mistake(("target",), 'target needs the name of a column: name = "days"')
        for key, given in (("offset", offset), ("exposure", exposure)):
            if given is not None and not isinstance(given, str):
                self._mistake((key,), f"{key} must be the name of a column")
        if offset is not None and exposure is not None:
            self._mistake(("exposure",), "give offset or exposure: an exposure is the exponential of an offset")
        with self._noting():
            if len(self.wrong) == before and columns:
                return Schema(
                    tuple(filter(None, columns)),
                    predicted,
                    offset or exposure,
                    entries.get("missing", "refuse"),
                    log_offset=exposure is not None,
                    event=event,
                )
        return None

    def _column(self, name: str, given: Any, path: tuple[str, ...]) -> Column | None:
        if not isinstance(given, dict):
            self._mistake(path, _COLUMN)
            return None
        before, made = len(self.wrong), self._entries(Column, given, path, without="name")
        with self._noting(*path):
            if len(self.wrong) == before:
                return Column(**{"kind": "category" if "levels" in made else "number", **made, "name": name})
        return None

    def _loss(self, given: Any, schema: Schema | None) -> dict[str, Any] | None:
        """Return a loss with all its parameters, so that stating a default gives the same contract as omitting it."""
        described = dict(given) if isinstance(given, dict) else {"name": given}
        if (name := described.get("name")) not in LOSS_NAMES:
            near = _near(str(name), LOSS_NAMES)
            self._mistake(("loss",), f"unknown loss {name!r}{near}; choose one of {', '.join(LOSS_NAMES)}")
            return None
        if schema is not None and schema.classes is not None:
            whole = describe_loss(LOSSES[name].from_classes(len(schema.classes)))
            described = {**whole, **described} if whole["name"] == name else described
        with self._noting("loss"):
            loss = described_loss(described)
            floats = {one.name for one in fields(loss) if isinstance(one.default, float)} if is_dataclass(loss) else ()
            return {key: float(value) if key in floats else value for key, value in describe_loss(loss).items()}
        return None

    @contextmanager
    def _noting(self, *path: str) -> Iterator[None]:
        """Record a mistake within this context, with its place."""
        try:
            yield
        except FedkinError as error:
            self._mistake(path, f"{'.'.join(path)}: {error}" if path else str(error))

    def _mistake(self, path: tuple[str, ...], words: str) -> None:
        line = _line_of(self._lines, path) if path else None
        self.wrong.append(words if line is None else f"line {line}: {words}")


def _table(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a type allows, if any."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)


def _literals(kind: Any) -> list[str]:
    """Return the words that a type allows; none if any text is allowed."""
    if get_origin(kind) is Literal:
        return [word for word in get_args(kind) if isinstance(word, str)]
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    return [] if str in parts else [word for part in parts for word in _literals(part)]


def _allowed(hint: Any) -> str:
    """Describe the values that a type allows."""
    kind, parts = inspect.type_info(hint), [f'"{word}"' for word in _literals(hint)]
    if isinstance(kind, inspect.Metadata):
        return str((kind.extra_json_schema or {})["description"])
    for one in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        limits = [f"{words} {getattr(one, name):g}" for name, words in _LIMITS if getattr(one, name, None) is not None]
        if not isinstance(one, inspect.NoneType | inspect.LiteralType):
            parts.append(" ".join([_KINDS.get(type(one), "a list"), *limits]))
    return " or ".join(parts)


def _near(word: str, known: Iterable[str]) -> str:
    alike = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {alike[0]!r}?)" if alike else ""


def _line_of(lines: list[str], path: tuple[str, ...]) -> int | None:
    """Return the line of an entry, or else of the innermost table around it."""
    section: tuple[str, ...] = ()
    depth, line = 0, None
    for k, text in enumerate(lines):
        if (found := _KEYS.match(text)) is None:
            continue
        keys = tuple(part.strip("\"'") for part in re.findall(_PART, found[2]))
        if found[1]:
            section = here = keys
        else:
            here = (*section, *keys)
        same = len(here) if here == path[: len(here)] else len(path) * (path == here[: len(path)])
        if same > depth:
            depth, line = same, k + 1
    return line


def to_toml(contract: bytes) -> str:
    """Return a contract's JSON as TOML with all its entries."""
    plain = {key: value for key, value in msgspec.json.decode(contract).items() if key != "format"}
    schema = plain.pop("schema")
    shift = "exposure" if schema.get("log_offset") else "offset"
    target = (schema["target"] or {}) | {"event": schema.get("event")}
    tables = {name: plain.pop(name) for name in ("thresholds", "rounds")}
    tables = {"features": {one.pop("name"): one for one in schema["features"]}, "target": target, **tables}
    lines = list(_lines(plain | {"missing": schema["missing"], shift: schema["offset"]}))
    for name, entries in tables.items():
        lines += ["", f"[{name}]", *_lines(entries)] if any(one is not None for one in entries.values()) else []
    return "\n".join(lines) + "\n"


def _lines(entries: Mapping[str, Any]) -> Iterator[str]:
    for key, value in entries.items():
        if value is not None:
            yield f"{toml_key(key)} = {_inline(value)}"


def _inline(value: Any) -> str:
    return f"{{{', '.join(_lines(value))}}}" if isinstance(value, dict) else toml_text(value)


def toml_key(name: str) -> str:
    """Return a key in TOML, in quotes if it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_text(name)


def toml_text(value: Any) -> str:
    """Return text, a number, a truth value or a list of these in TOML."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
