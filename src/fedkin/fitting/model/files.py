"""The directory of a model: written as a whole or not at all, and read with its version and checksums verified.

It holds nothing that can run code when it is read:

- ``model.json``: what was fitted and how, with the format version and the checksums of the others;
- ``coefficients.csv``: a row per site (and per class but the first, for more than two classes);
- ``edges.csv``: the graph that was used. The ends are named by id and by row number of the site;
- ``kin.json`` and ``kin.npz``, with the method kin: probabilities, spreads, covariances (see `kin_files`);
- ``comparison.json``, where there was one: how the other methods did on held-out rows;
- ``history.json``, where it is known: how the fit came about, for its report.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fedkin import __version__
from fedkin._base import Array, Index, listed, replacing_directory
from fedkin.errors import ModelFileError
from fedkin.graph import Graph

FORMAT = "fedkin-model"
FORMAT_VERSION = 1
MODEL_FILE, COEFFICIENTS_FILE, EDGES_FILE = "model.json", "coefficients.csv", "edges.csv"
#: Files of plain values that a model need not have, by the attribute that they hold.
OPTIONAL_FILES = {"comparison": "comparison.json", "history": "history.json"}
KIN_FILE, KIN_ARRAYS_FILE = "kin.json", "kin.npz"
_MORE_FILES = (KIN_FILE, KIN_ARRAYS_FILE, *OPTIONAL_FILES.values())
_FILES = (MODEL_FILE, COEFFICIENTS_FILE, EDGES_FILE, *_MORE_FILES)
_STALE_SECONDS = 3600.0


Content = str | bytes


def write_directory(target: Path, description: Mapping[str, Any], others: Mapping[str, Content]) -> None:
    """Write a model: the entries of ``model.json`` (format, version and checksums are added) and {file name: content}.

    What the directory holds already is replaced if it is a model, and refused otherwise.
    """
    whole = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **description,
        "checksums": {name: _checksum(_bytes(content)) for name, content in others.items()},
    }
    _replace_directory(target, {MODEL_FILE: json_text(whole, indent=2), **others})


def json_text(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Plain values, arrays, tuples and dataclasses as the text of a JSON file."""
    try:
        return json.dumps(_plain(values), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"the model cannot be written as JSON: {error}") from None


def read_optional(folder: Path, tables: Mapping[str, str]) -> dict[str, Any]:
    """What the files that a model need not have hold, by attribute."""
    found = {}
    for attribute, name in OPTIONAL_FILES.items():
        if name in tables:
            try:
                values = json.loads(tables[name])
            except json.JSONDecodeError as error:
                damaged(folder / name, f"not valid JSON in line {error.lineno} ({error.msg})")
            if not isinstance(values, dict):
                damaged(folder / name, "it does not hold a mapping")
            found[attribute] = values
    return found


def read_model_files(directory: Path) -> tuple[Path, dict[str, Any], dict[str, bytes]]:
    """The folder read, the content of ``model.json``, and the other files {name: content}.

    `ModelFileError` if anything is missing, changed or from another version.
    """
    folder = _standing(directory)
    description = _read_description(folder)
    sums = description.get("checksums")
    more = [name for name in _MORE_FILES if isinstance(sums, dict) and name in sums]
    others = {name: _read_checked(folder / name, description) for name in (COEFFICIENTS_FILE, EDGES_FILE, *more)}
    return folder, description, others


def damaged(path: Path, what: str) -> NoReturn:
    """Raise the error of a file that is not as it was written."""
    raise ModelFileError(f"{path}: {what}; the file is damaged, copy the model again or fit it again") from None


def check_model_place(target: str | os.PathLike[str]) -> int | None:
    """Raise `ModelFileError` unless a model could be written to this directory: before the long work, not after it.

    Returns
    -------
    int or None
        How many sites the model has that is there, and would be replaced; None where there is none.
    """
    target = Path(target).resolve()
    replaced = None
    if target.is_dir():
        replaced = _check_replaceable(target)
    elif target.exists():
        raise ModelFileError(f"{target} is a file, expected a directory for the model: choose another name")
    parent = next(place for place in target.parents if os.path.lexists(place))
    try:
        Path(tempfile.mkdtemp(dir=parent, prefix=".fedkin-")).rmdir()
    except OSError as error:
        _unwritable(target, error)
    return replaced


def _check_replaceable(target: Path) -> int | None:
    held = sorted(entry.name for entry in target.iterdir())
    if held and MODEL_FILE not in held:
        raise ModelFileError(
            f"{target} is not empty and not a Fedkin model (it holds {listed(held)}): choose another directory"
        )
    sites = _read_description(target, any_version=True).get("n_sites") if held else None
    foreign = [name for name in held if name not in _FILES]
    if foreign:
        raise ModelFileError(
            f"{target} holds a model, but also {listed(foreign)}, which replacing the model would delete: "
            "move them away or choose another directory"
        )
    return sites if isinstance(sites, int) else None


def _unwritable(target: Path, error: OSError) -> NoReturn:
    raise ModelFileError(
        f"cannot write the model to {target}: {error.strerror or error}; choose another directory"
    ) from None


# --- writing --------------------------------------------------------------------------------------------------


def _replace_directory(target: Path, contents: Mapping[str, Content]) -> None:
    target = target.resolve()
    check_model_place(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing_directory(target) as fresh:
            for name, content in contents.items():
                (fresh / name).write_bytes(_bytes(content))
        _remove_leftovers(target)
    except OSError as error:
        _unwritable(target, error)


def _remove_leftovers(target: Path) -> None:
    """Remove what saves that were killed left beside the target (see `replacing_directory`)."""
    for old in _leftovers(target, "old"):
        shutil.rmtree(old, ignore_errors=True)
    for fresh in _leftovers(target, "new"):
        # a younger one may belong to somebody who is saving right now
        if time.time() - fresh.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(fresh, ignore_errors=True)


def _leftovers(target: Path, kind: str) -> list[Path]:
    return sorted(target.absolute().parent.glob(f".{glob.escape(target.name)}.*.{kind}"))


def _standing(folder: Path) -> Path:
    """The directory to read: after a crash between the two renames of a save, the older model beside it."""
    if folder.exists():
        return folder
    older = _leftovers(folder, "old")
    return max(older, key=lambda path: path.stat().st_mtime) if older else folder


def _plain(value: Any) -> Any:
    """Numpy values, tuples and values that are not finite, as JSON can hold them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # float() reads it back
    return value


def _bytes(content: Content) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content


def _checksum(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


# --- reading --------------------------------------------------------------------------------------------------


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelFileError(
            f"{path} is missing: copy the whole model directory again or fit the model again"
        ) from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None


def text_of(path: Path, content: bytes) -> str:
    """The text of a file; ``path`` is to be named in errors."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        damaged(path, "it is not UTF-8 text")


def _read_description(folder: Path, any_version: bool = False) -> dict[str, Any]:
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ModelFileError(f"{folder} {kind}, expected the directory of a model: check the path")
    path = folder / MODEL_FILE
    if not path.exists():
        raise ModelFileError(
            f"{folder} is not a Fedkin model: it has no {MODEL_FILE}. Give the directory that `fedkin fit --out` or "
            "FittedModel.save wrote"
        )
    try:
        description = json.loads(text_of(path, _read_bytes(path)))
    except json.JSONDecodeError as error:
        damaged(path, f"not valid JSON in line {error.lineno} ({error.msg})")
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ModelFileError(f'{path} is not the description of a Fedkin model: its "format" is not "{FORMAT}"')
    if description.get("format_version") != FORMAT_VERSION and not any_version:
        raise ModelFileError(
            f"{path} has the format version {description.get('format_version')!r}, but Fedkin {__version__} reads "
            f"version {FORMAT_VERSION}: install the Fedkin that wrote it ({description.get('fedkin_version')})"
        )
    return description


def _read_checked(path: Path, description: Mapping[str, Any]) -> bytes:
    content = _read_bytes(path)
    sums = description.get("checksums")
    expected = sums.get(path.name) if isinstance(sums, dict) else None
    if _checksum(content) != expected:
        damaged(path, f"its content does not match the checksum in {MODEL_FILE}: it was cut off or changed")
    return content


# --- coefficients ---------------------------------------------------------------------------------------------


class CoefficientTable(NamedTuple):
    """A row for every site and, with more than two classes, every class but the first."""

    sites: tuple[Hashable, ...]
    clusters: Index
    n_samples: Index
    intercept: Array  # (V, k)
    coef: Array  # (V, k, q)


def coefficients_csv(table: CoefficientTable, features: tuple[str, ...], classes: tuple[Any, ...] | None) -> str:
    """The table as CSV; numbers are written so that they come back to the bit."""
    ids = [_id_cells(site) for site in table.sites]
    k = table.coef.shape[1]
    header = ["site", "site_type", "cluster", "n_samples", *(["class"] if k > 1 else []), "intercept"]
    rows: list[list[str]] = [[*header, *(column_name(name) for name in features)]]
    labels, counts = table.clusters.tolist(), table.n_samples.tolist()
    intercept, coef = table.intercept.tolist(), table.coef.tolist()
    for u, cells in enumerate(ids):
        for j in range(k):
            about = [] if k == 1 or classes is None else [str(classes[j + 1])]
            numbers = [repr(value) for value in (intercept[u][j], *coef[u][j])]
            rows.append([*cells, str(labels[u]), str(counts[u]), *about, *numbers])
    return _csv_text(rows)


def read_coefficients(
    path: Path, text: str, features: tuple[str, ...], classes: tuple[Any, ...] | None
) -> CoefficientTable:
    """What `coefficients_csv` wrote; ``path`` is the file to name in errors."""
    header, *rows = csv.reader(io.StringIO(text, newline=""))
    k = max(len(classes) - 1, 1) if classes is not None else 1
    first = header.index("intercept") if "intercept" in header else -1
    if header[first + 1 :] != [column_name(name) for name in features]:
        damaged(path, f"its columns do not match the features in {MODEL_FILE}")
    if not rows or len(rows) % k or any(len(row) != len(header) for row in rows):
        damaged(path, f"it has {len(rows)} rows, which is not {k} for every site")
    heads = rows[::k]
    try:
        numbers = np.array([[float(cell) for cell in row[first:]] for row in rows]).reshape(-1, k, 1 + len(features))
        return CoefficientTable(
            tuple(_id_from_cells(row[0], row[1]) for row in heads),
            np.array([int(row[2]) for row in heads], dtype=np.int64),
            np.array([int(row[3]) for row in heads], dtype=np.int64),
            numbers[:, :, 0],
            numbers[:, :, 1:],
        )
    except ValueError as error:
        damaged(path, str(error))


def column_name(feature: str) -> str:
    """The column of a feature: its name, or ``feature:name`` where that is one of the leading columns."""
    taken = ("site", "site_type", "cluster", "n_samples", "class", "intercept")
    return f"feature:{feature}" if feature in taken else feature


# --- edges ----------------------------------------------------------------------------------------------------


def edges_csv(sites: tuple[Hashable, ...], graph: Graph) -> str:
    """The edges as CSV, their ends named by id and by row number of the site."""
    names = [_id_cells(site)[0] for site in sites]
    rows = [["source", "target", "weight", "source_row", "target_row"]]
    for (i, j), weight in zip(graph.edges.tolist(), graph.weights.tolist(), strict=True):
        rows.append([names[j], names[i], repr(weight), str(j), str(i)])
    return _csv_text(rows)


def read_edges(path: Path, text: str, sites: tuple[Hashable, ...]) -> Graph:
    """What `edges_csv` wrote; ``path`` is the file to name in errors."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))[1:]
        index = np.array([[int(row[3]), int(row[4])] for row in rows], dtype=np.int64).reshape(-1, 2)
        return Graph.from_indices(sites, index, [float(row[2]) for row in rows])
    except (IndexError, ValueError) as error:
        damaged(path, str(error))


# --- cells ----------------------------------------------------------------------------------------------------


def _id_cells(site: Hashable) -> tuple[str, str]:
    """A site id as text, and the type that makes the text an id again."""
    if isinstance(site, bool):
        return str(site), "bool"
    if isinstance(site, str):
        return site, "str"
    if isinstance(site, int | float):
        return repr(site), type(site).__name__
    if isinstance(site, datetime):
        return site.isoformat(), "datetime"
    if isinstance(site, date):
        return site.isoformat(), "date"
    if isinstance(site, tuple):
        try:
            text = json.dumps(site, ensure_ascii=False)
            if _as_tuple(json.loads(text)) == site:
                return text, "tuple"
        except (TypeError, ValueError):
            pass
    raise ModelFileError(
        f"site id {site!r} of type {type(site).__name__} cannot be written to a file: use text, numbers, dates "
        "or tuples of text and numbers as ids"
    )


def _id_from_cells(text: str, kind: str) -> Hashable:
    if kind == "str":
        return text
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "bool" and text in ("True", "False"):
        return text == "True"
    if kind == "datetime":
        return datetime.fromisoformat(text)
    if kind == "date":
        return date.fromisoformat(text)
    if kind == "tuple":
        value: Hashable = _as_tuple(json.loads(text))
        return value
    raise ValueError(f"site {text!r} has the unknown type {kind!r}")


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def _csv_text(rows: Iterable[Sequence[str]]) -> str:
    return "".join(",".join(map(_csv_cell, row)) + "\n" for row in rows)


def _csv_cell(text: str) -> str:
    # the csv module leaves a carriage return alone when lines end in "\n", and then takes it for the end of a line
    quoted = any(mark in text for mark in ',"\r\n') or text != text.strip()
    return '"' + text.replace('"', '""') + '"' if quoted else text
