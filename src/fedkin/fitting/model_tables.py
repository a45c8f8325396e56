"""The two tables of a model directory as text: the devices' coefficients, and the edges between them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import Array, Index
from fedkin.errors import ModelFileError
from fedkin.fitting.directory import MODEL_FILE, damaged
from fedkin.graph import Graph


@dataclass(frozen=True, eq=False)
class CoefficientTable:
    """A row for every device and, with more than two classes, every class but the first.

    Attributes
    ----------
    devices : tuple of V ids
    clusters, n_samples : int array (V,)
    intercept : array (V, k)
    coef : array (V, k, q)
    """

    devices: tuple[Hashable, ...]
    clusters: Index
    n_samples: Index
    intercept: Array
    coef: Array


# --- coefficients ---------------------------------------------------------------------------------------------


def coefficients_csv(table: CoefficientTable, features: tuple[str, ...], classes: tuple[Any, ...] | None) -> str:
    """The table as CSV; numbers are written so that they come back to the bit."""
    ids = [_id_cells(device) for device in table.devices]
    k = table.coef.shape[1]
    header = ["device", "device_type", "cluster", "n_samples", *(["class"] if k > 1 else []), "intercept"]
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
        damaged(path, f"it has {len(rows)} rows, which is not {k} for every device")
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
    taken = ("device", "device_type", "cluster", "n_samples", "class", "intercept")
    return f"feature:{feature}" if feature in taken else feature


# --- edges ----------------------------------------------------------------------------------------------------


def edges_csv(devices: tuple[Hashable, ...], graph: Graph) -> str:
    """The edges as CSV, their ends named by id and by row number of the device."""
    names = [_id_cells(device)[0] for device in devices]
    rows = [["source", "target", "weight", "source_row", "target_row"]]
    for (i, j), weight in zip(graph.edges.tolist(), graph.weights.tolist(), strict=True):
        rows.append([names[j], names[i], repr(weight), str(j), str(i)])
    return _csv_text(rows)


def read_edges(path: Path, text: str, devices: tuple[Hashable, ...]) -> Graph:
    """What `edges_csv` wrote; ``path`` is the file to name in errors."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))[1:]
        index = np.array([[int(row[3]), int(row[4])] for row in rows], dtype=np.int64).reshape(-1, 2)
        return Graph.from_indices(devices, index, [float(row[2]) for row in rows])
    except (IndexError, ValueError) as error:
        damaged(path, str(error))


# --- cells ----------------------------------------------------------------------------------------------------


def _id_cells(device: Hashable) -> tuple[str, str]:
    """A device id as text, and the type that makes the text an id again."""
    if isinstance(device, bool):
        return str(device), "bool"
    if isinstance(device, str):
        return device, "str"
    if isinstance(device, int | float):
        return repr(device), type(device).__name__
    if isinstance(device, datetime):
        return device.isoformat(), "datetime"
    if isinstance(device, date):
        return device.isoformat(), "date"
    if isinstance(device, tuple):
        try:
            text = json.dumps(device, ensure_ascii=False)
            if _as_tuple(json.loads(text)) == device:
                return text, "tuple"
        except (TypeError, ValueError):
            pass
    raise ModelFileError(
        f"device id {device!r} of type {type(device).__name__} cannot be written to a file: use text, numbers, dates "
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
    raise ValueError(f"device {text!r} has the unknown type {kind!r}")


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def _csv_text(rows: Iterable[Sequence[str]]) -> str:
    return "".join(",".join(map(_csv_cell, row)) + "\n" for row in rows)


def _csv_cell(text: str) -> str:
    # the csv module leaves a carriage return alone when lines end in "\n", and then takes it for the end of a line
    quoted = any(mark in text for mark in ',"\r\n') or text != text.strip()
    return '"' + text.replace('"', '""') + '"' if quoted else text
