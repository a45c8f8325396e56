"""Reading what the user named, and the tables that commands print."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedkin._base import AnyArray, Array, count
from fedkin.cli.shared.console import as_options, note, output
from fedkin.data import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    Federation,
    Schema,
    TableSchema,
    device_ids,
    near_name,
    raise_findings,
    read_columns,
    read_directory,
)
from fedkin.errors import DataError, FedkinError, TableWarning
from fedkin.fitting import FittedModel

MOST_GROUPS = 12  # groups that are listed with their members
_MOST_NOTES = 8
_ROOM = 72  # characters for the members of a group


def read_federation(path: Path, **asked: Any) -> Federation:
    """`Federation.read` with these arguments; what it remarks on comes as notes."""
    check_exists(path)
    if asked.get("device") is None and path.is_file():
        raise DataError(f"say which column of {path} holds the devices: --device COL{_has(_column_names(path))}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # they are the federation's notes
        federation = Federation.read(path, **asked)
    for words in federation.notes:
        note(words)
    return federation


def check_exists(path: Path) -> None:
    """Raise unless there is a file or directory of that name, or the name is a pattern such as rows/*.parquet."""
    if not path.exists() and not has_magic(str(path)):
        near = near_name(path.name, _siblings(path), 0.8)
        raise DataError(f"there is no file or directory {path}{near}: check the path")


def agreed_federation(path: Path, device: str | None, schema: Schema) -> Federation:
    """The rows of all sites, checked and encoded as the schema says."""
    columns, site = _agreed_columns(path, device, schema, target=True)
    if site is None:
        raise DataError(f"say which column of {path} holds the sites: --device COL{_has(list(columns))}")
    with naming(path):
        return schema.federation(columns, site)


def agreed_rows(
    path: Path, device: str | None, model: FittedModel, offset: str | None = None
) -> tuple[list[Hashable], dict[str, AnyArray], Array | None]:
    """Rows to predict with a model that has a schema, the device of each, and the offset if another column has it.

    With one device it need not be named.
    """
    schema = model.schema
    assert schema is not None
    needed = schema if offset is None else replace(schema, offset=offset)
    columns, site = _agreed_columns(path, device, needed, target=False)
    asked = model.n_devices > 1 or device != model.options.get("device_column")
    if device is not None and device not in columns and asked:
        raise DataError(
            f"{path}: there is no column {device!r} for the device{near_name(device, columns)}{_has([*columns])}"
        )
    if site is not None and site in columns:
        ids = device_ids(columns[site])
    elif model.n_devices == 1:
        ids = [model.devices[0]] * len(next(iter(columns.values()), ()))
    else:
        raise DataError(
            f"say which column of {path} holds the sites: --device COL{_has(list(columns))}; the model has "
            f"{model.n_devices} of them"
        )
    with naming(path):
        raise_findings(needed.check(columns, target=False))
    return ids, columns, None if offset is None else needed.offset_of(columns)


def _agreed_columns(
    path: Path, device: str | None, schema: Schema, target: bool
) -> tuple[dict[str, AnyArray], str | None]:
    check_exists(path)
    if not path.is_dir():
        return read_columns(path), device
    names = [column.name for column in (schema.columns if target else schema.features)]
    return read_directory(path, device, [*names, *([schema.offset] if schema.offset else [])])


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within this context, errors about data begin with the file."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def schema_table(schema: Schema) -> Table:
    """The columns of a schema, in words; centre and scale where they were agreed on."""
    learned = isinstance(schema, TableSchema)
    heads = ("column", "what it is") if learned else ("column", "what it must be", "centre", "scale")
    table = plain_table(*heads, numbers_from=2)
    for column in schema.columns:
        centre, scale = column.centre_and_scale
        scaled = column.kind != "category" and column is not schema.target
        numbers = (f"{centre:g}", f"{scale:g}") if scaled else ("", "")
        words = column.words + (" (target)" if column is schema.target else "")
        add_row(table, column.name, words, *(() if learned else numbers))
    if schema.offset is not None:
        add_row(table, schema.offset, "number (offset)", *(() if learned else ("", "")))
    return table


def _column_names(path: Path) -> list[str]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if file.suffix.lower() in CSV_SUFFIXES + PARQUET_SUFFIXES:
            try:
                return list(read_columns(file))
            except FedkinError:
                return []
    return []


def _has(columns: Sequence[str]) -> str:
    return f"; it has {', '.join(columns[:20])}{', ...' if len(columns) > 20 else ''}" if columns else ""


def _siblings(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []


def plain_table(*columns: str, numbers_from: int = 1) -> Table:
    """A table without much ink; columns from `numbers_from` on are aligned to the right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(Text(name), justify="right" if number >= numbers_from else "left", no_wrap=number == 0)
    return table


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """A row of plain text: ids are never taken for markup."""
    table.add_row(*(Text(cell, style=style) for cell in cells))


def members(group: Sequence[Hashable], room: int = _ROOM) -> str:
    """The ids of a group, as many as there is room for."""
    words = [str(device) for device in group]
    shown: list[str] = []
    for word in words:
        if shown and len(", ".join([*shown, word])) > room:
            return ", ".join(shown) + f" and {len(words) - len(shown)} more"
        shown.append(word)
    return ", ".join(shown)


def groups_table(model: FittedModel) -> Table:
    """The largest groups and their members."""
    groups = sorted(model.groups(), key=len, reverse=True)
    table = plain_table("group", "devices", "members", numbers_from=9)
    for number, group in enumerate(groups[:MOST_GROUPS], start=1):
        add_row(table, str(number), str(len(group)), members(group))
    rest = groups[MOST_GROUPS:]
    if rest:
        add_row(table, "...", str(sum(map(len, rest))), f"in {count(len(rest), 'smaller group')}")
    return table


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values, a line each. Lines are never broken: paths stay whole."""
    width = max(map(len, facts))
    for name, value in facts.items():
        output().print(Text.assemble((f"{name:<{width}}  ", "bold"), value), soft_wrap=True)


def note_lines(notes: Mapping[Hashable, Sequence[str]]) -> list[str]:
    """Notes on devices; devices whose notes are the same but for numbers share a line."""
    alike: dict[str, list[Hashable]] = {}
    for device, lines in notes.items():
        alike.setdefault(re.sub(r"[0-9.e+-]*[0-9]", "#", "; ".join(lines)), []).append(device)
    shown = []
    for devices in list(alike.values())[:_MOST_NOTES]:
        differ = any(notes[device] != notes[devices[0]] for device in devices)
        whose = f" (the numbers are those of {devices[0]})" if differ else ""
        shown.append(as_options(f"{members(devices, 40)}: {'; '.join(notes[devices[0]])}{whose}"))
    left = list(alike.values())[_MOST_NOTES:]
    if left:
        shown.append(f"and notes on {count(sum(map(len, left)), 'more device')}: fedkin inspect shows them with --json")
    return shown


def n_distinct(model: FittedModel) -> int:
    """How many different models the devices hold; more than groups where a group is joined, but not fused."""
    stacked = np.concatenate([model.intercept[:, :, None], model.coef], axis=2).reshape(model.n_devices, -1)
    return len(np.unique(stacked, axis=0))


def group_words(model: FittedModel) -> str:
    """The number of groups, and of models where a group holds more than one."""
    words = f"{model.n_clusters} among {count(model.n_devices, 'device')}"
    distinct = n_distinct(model)
    return words if distinct == model.n_clusters else f"{words}, holding {count(distinct, 'different model')}"


def gap_words(model: FittedModel) -> str:
    """The certificate, and how the solver ended."""
    if math.isnan(model.gap):
        rounds = model.origin is not None and model.origin.get("from") == "rounds"
        return "not certified: that takes the rows of all sites in one place" if rounds else "none"
    return f"{model.gap:.1e} ({model.status.replace('_', ' ')})"


def graph_words(model: FittedModel) -> str:
    """What happened to the edges, in words."""
    if model.selection is None:
        return count(model.graph.n_edges, "edge")
    kept, tested = model.selection.get("kept"), model.selection.get("candidates")
    words = f"{kept} of {tested} edges kept ({model.selection.get('method')})"
    return words if "level" not in model.selection else f"{words[:-1]}, level {model.selection['level']:g})"


def origin_words(model: FittedModel) -> str:
    """Where a model comes from, and what was promised about it."""
    origin = model.origin
    if origin is not None and origin.get("from") == "rounds":
        return f"{count(int(origin['rounds']), 'round')} of Fed-ADMM between sites"
    if origin is None or origin.get("from") != "summaries":
        return "rows"
    words = f"summaries of sites, {count(int(origin['rounds']), 'message')} of each"
    promised = origin.get("privacy")
    if promised is not None:
        words += f"; differentially private: epsilon {promised['epsilon']:g}, delta {promised['delta']:g} at most"
    return words


def model_document(model: FittedModel) -> dict[str, Any]:
    """What there is to say about a model, for ``--json``."""
    return {
        "method": "fused" if model.kin is None else "kin",
        "loss": model.loss.name,
        "penalty": model.penalty,
        "lam": model.lam,
        "gap": None if np.isnan(model.gap) else model.gap,
        "n_iter": model.n_iter,
        "status": model.status,
        "target": model.target_name,
        "offset": model.offset_name,
        "features": list(model.feature_names),
        "classes": None if model.classes is None else list(model.classes),
        "n_devices": model.n_devices,
        "n_rows": int(model.n_samples.sum()),
        "n_groups": model.n_clusters,
        "n_distinct_models": n_distinct(model),
        "groups": [list(group) for group in sorted(model.groups(), key=len, reverse=True)],
        "edges": model.graph.n_edges,
        "selection": None if model.selection is None else dict(model.selection),
        "origin": None if model.origin is None else dict(model.origin),
        "notes": [{"device": device, "notes": list(lines)} for device, lines in model.notes.items()],
    }
