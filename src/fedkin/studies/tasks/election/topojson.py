"""Shapes from a quantised TopoJSON file, without a geographic library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import DataError

#: The rings of a shape: closed lines of points, shape ``(k, 2)`` each.
Rings = tuple[NDArray[np.float64], ...]


def read_shapes(path: Path, name: str | None = None) -> dict[str, Rings]:
    """The polygons of a TopoJSON object, by the ``id`` of each shape.

    Parameters
    ----------
    path : Path
        The file.
    name : str, optional
        Of the object; by default the file must have just one.

    Returns
    -------
    dict id -> tuple of arrays (k, 2)
        Outer rings and holes alike, in the file's projected units.

    Notes
    -----
    Arcs are lines shared by neighbours, stored as differences of whole numbers; a ring is a chain of arc numbers, where
    ``~i`` means arc i backwards, and consecutive arcs share the point at which they meet.
    """
    try:
        topology = json.loads(Path(path).read_text(encoding="utf-8"))
        objects = topology["objects"]
        chosen = objects[name] if name is not None else _only(objects, path)
        arcs = _decoded_arcs(topology)
        return {str(shape["id"]): _rings(shape, arcs) for shape in chosen["geometries"]}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is not a TopoJSON file of polygons with ids ({problem})") from error


def _only(objects: Mapping[str, Any], path: Path) -> Any:
    if len(objects) != 1:
        raise DataError(f"{path} has the objects {', '.join(objects)}; name the one to read")
    return next(iter(objects.values()))


def _decoded_arcs(topology: Mapping[str, Any]) -> list[NDArray[np.float64]]:
    arcs = [np.asarray(arc, dtype=np.float64)[:, :2] for arc in topology["arcs"]]
    transform = topology.get("transform")
    if transform is None:
        return arcs
    scale, shift = np.asarray(transform["scale"]), np.asarray(transform["translate"])
    return [np.cumsum(arc, axis=0) * scale + shift for arc in arcs]


def _rings(shape: Mapping[str, Any], arcs: list[NDArray[np.float64]]) -> Rings:
    if shape["type"] == "Polygon":
        chains = shape["arcs"]
    elif shape["type"] == "MultiPolygon":
        chains = [ring for polygon in shape["arcs"] for ring in polygon]
    else:
        raise DataError(f"shape {shape.get('id')!r} is a {shape['type']}, a Polygon or MultiPolygon is expected")
    return tuple(_chained(chain, arcs) for chain in chains)


def _chained(chain: list[int], arcs: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    parts = [arcs[number] if number >= 0 else arcs[~number][::-1] for number in chain]
    return np.concatenate([part if k == 0 else part[1:] for k, part in enumerate(parts)])
