"""A contract as a TOML file, as people write it: read with every mistake named, its place and what was likely meant."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from fedkin.data import Column, Schema
from fedkin.errors import FedkinError, ParameterError
from fedkin.federate.contract.contract import Contract, ContractError, EdgeTests, Rounds, Thresholds
from fedkin.losses import LOSS_NAMES, LOSSES, describe_loss, described_loss

_COLUMN_KEYS = tuple(item.name for item in fields(Column) if item.name != "name")
_OWN = tuple(name for name in Contract.__struct_fields__ if name not in ("schema", "loss"))
_KEYS = ("loss", "features", "target", "offset", "missing", *_OWN)
_WORDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list"}
_WORDS |= {"object": "a table", "null": "nothing"}


def read_text(path: str | PathLike[str]) -> str:
    """The text of a contract's file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ContractError(f"there is no file {path}: check the path") from None
    except IsADirectoryError:
        raise ContractError(f"{path} is a directory, expected the TOML file of a contract") from None
    except UnicodeDecodeError:
        raise ContractError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror or error}") from None


def contract_of(text: str, name: str) -> Contract:
    """The contract that a TOML text states."""
    try:
        entries = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ContractError(f"{name}: not valid TOML: {error}; check quotes, brackets and commas there") from None
    reading = _Reading(text)
    contract = reading.contract(entries)
    if reading.wrong or contract is None:
        raise ContractError(
            "\n  ".join([f"{name}:", *reading.wrong]) if len(reading.wrong) > 1 else f"{name}, {reading.wrong[0]}"
        )
    return contract


class _Reading:
    """A file on its way to a contract: what is wrong is collected, so that all of it can be said at once."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self.wrong: list[str] = []

    def contract(self, entries: Mapping[str, Any]) -> Contract | None:
        self._known(entries, _KEYS, ())
        for key in ("name", "loss", "features"):
            if key not in entries:
                self.wrong.append(f"{key} is missing" + _EXAMPLES[key])
        schema = self._schema(entries)
        own = {key: entries[key] for key in _OWN if key in entries}
        for key, struct in (("thresholds", Thresholds), ("rounds", Rounds)):
            if isinstance(own.get(key), dict):
                self._known(own[key], struct.__struct_fields__, (key,))
        rounds = own.get("rounds")
        if isinstance(rounds, dict) and isinstance(rounds.get("select"), dict):
            self._known(rounds["select"], EdgeTests.__struct_fields__, ("rounds", "select"))
        loss = self._loss(entries.get("loss"), schema)
        if self.wrong or schema is None or loss is None:
            return None
        try:
            made: Contract = msgspec.convert(
                {"format": Contract.__struct_config__.tag, **own, "schema": _SOME, "loss": loss}, Contract
            )
            return msgspec.structs.replace(made, schema=schema).checked()
        except msgspec.ValidationError as error:
            self._invalid(error, ())
        except ContractError as error:
            self.wrong.append(str(error).removeprefix("does not hold together: "))
        return None

    # --- parts ---

    def _schema(self, entries: Mapping[str, Any]) -> Schema | None:
        features = entries.get("features", {})
        if not isinstance(features, dict):
            self.wrong.append(self._at(("features",)) + "features must be a table with an entry for each column")
            return None
        columns = [self._column(name, given, ("features", name)) for name, given in features.items()]
        target = None
        if "target" in entries:
            given = entries["target"]
            if isinstance(given, dict) and isinstance(given.get("name"), str):
                rest = {key: value for key, value in given.items() if key != "name"}
                target = self._column(given["name"], rest, ("target",))
            else:
                self.wrong.append(self._at(("target",)) + 'target needs the name of a column: name = "days"')
        offset = entries.get("offset")
        if offset is not None and not isinstance(offset, str):
            self.wrong.append(self._at(("offset",)) + "offset must be the name of a column")
        if self.wrong or not features:
            if "features" in entries and not features:
                self.wrong.append("features is empty: name at least one column")
            return None
        try:
            missing = entries.get("missing", "refuse")
            return Schema(tuple(column for column in columns if column is not None), target, offset, missing)
        except ParameterError as error:
            self.wrong.append(str(error))
            return None

    def _column(self, name: str, given: Any, path: tuple[str, ...]) -> Column | None:
        if not isinstance(given, dict):
            words = 'a column is a table, such as {unit = "kg", low = 30, high = 250} or {levels = ["no", "yes"]}'
            self.wrong.append(self._at(path) + words)
            return None
        if not self._known(given, ("name", *_COLUMN_KEYS) if path == ("target",) else _COLUMN_KEYS, path):
            return None
        kind = given.get("kind", "category" if "levels" in given else "number")
        try:
            return msgspec.convert({**given, "name": name, "kind": kind}, Column)
        except msgspec.ValidationError as error:
            self._invalid(error, path)
        except FedkinError as error:
            self.wrong.append(self._at(path) + str(error))
        return None

    def _loss(self, given: Any, schema: Schema | None) -> dict[str, Any] | None:
        described = {"name": given} if isinstance(given, str) else given
        if not isinstance(described, dict) or described.get("name") not in LOSS_NAMES:
            if given is not None:
                name = described.get("name") if isinstance(described, dict) else given
                near = _near(str(name), LOSS_NAMES)
                self.wrong.append(
                    f"{self._at(('loss',))}unknown loss {name!r}{near}; choose one of {', '.join(LOSS_NAMES)}"
                )
            return None
        if schema is not None and schema.classes is not None:
            whole = describe_loss(LOSSES[described["name"]].from_classes(len(schema.classes)))
            described = {**whole, **described} if whole["name"] == described["name"] else described
        return _whole_loss(described)

    # --- words ---

    def _known(self, given: Mapping[str, Any], keys: Iterable[str], path: tuple[str, ...]) -> bool:
        unknown = [key for key in given if key not in keys]
        for key in unknown:
            section = f"in [{'.'.join(path)}]" if path else "at the top"
            near = _near(key, keys) or f"; known are {', '.join(keys)}"
            self.wrong.append(f"{self._at((*path, key))}unknown key {key!r} {section}{near}")
        return not unknown

    def _invalid(self, error: msgspec.ValidationError, path: tuple[str, ...]) -> None:
        match = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", str(error), re.DOTALL)
        assert match is not None
        words = re.sub(r"`([a-z |]+)`", lambda found: _type_words(found[1]), match[1])
        keys = (*path, *(part for part in re.split(r"\.|\[.*?\]", match[2] or "") if part))
        self.wrong.append(f"{self._at(keys)}{'.'.join(keys)}: {words[0].lower()}{words[1:]}")

    def _at(self, path: tuple[str, ...]) -> str:
        """``line 7: `` where the entry can be found in the text, else nothing."""
        line = _line_of(self._lines, path)
        return "" if line is None else f"line {line}: "


_EXAMPLES = {
    "name": ': name = "heart"',
    "loss": f': loss = "linear" (or {", ".join(LOSS_NAMES)})',
    "features": ": a table [features.NAME] for each column",
}
_SOME = {"features": [{"name": "x"}]}  # stands for the schema, which is made on its own


def _whole_loss(described: Mapping[str, Any]) -> dict[str, Any]:
    """The loss with all its parameters, so that a default and the same number given are one contract."""
    try:
        loss = described_loss(described)
    except FedkinError:
        return dict(described)  # `Contract.checked` says what is wrong
    defaults: dict[str, object] = {item.name: item.default for item in fields(loss)} if is_dataclass(loss) else {}
    return {
        key: float(value) if isinstance(defaults.get(key), float) else value
        for key, value in describe_loss(loss).items()
    }


def _type_words(types: str) -> str:
    names = [name for name in types.split(" | ") if name != "null"] or ["null"]
    return " or ".join(_WORDS.get(name, repr(name)) for name in names)


def _near(word: str, known: Iterable[str]) -> str:
    alike = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {alike[0]!r}?)" if alike else ""


def _line_of(lines: list[str], path: tuple[str, ...]) -> int | None:
    """The line of an entry: the key within its section, or the header of the section."""
    names = [rf"""["']?{re.escape(name)}["']?""" for name in path]
    found = None
    for depth in range(len(path), -1, -1):
        start = 0
        if depth:
            header = re.compile(r"\s*\[\s*" + r"\s*\.\s*".join(names[:depth]) + r"\s*\]")
            start = next((k + 1 for k, line in enumerate(lines) if header.match(line)), 0)
            if not start:
                continue
            found = found or start
        if depth == len(path):
            return start
        # the key, or its first part, before the next section
        for reach in range(len(path), depth, -1):
            key = re.compile(r"\s*" + r"\s*\.\s*".join(names[depth:reach]) + r"\s*[.=]")
            for k in range(start, len(lines)):
                if lines[k].lstrip().startswith("["):
                    break
                if key.match(lines[k]):
                    return k + 1
        if found:
            return found
    return found
