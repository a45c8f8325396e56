"""Four tables that the package does not load: pupils, births and the effects of class size (R package mlmRev)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.data import Federation, read_columns
from fedkin.datasets import PublicTable
from fedkin.errors import TableWarning


def _exam(columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    return columns, {"site": "school", "target": "normexam"}, "linear"


def _guprenat(columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    columns["prenat"] = (columns["prenat"] == "Modern").astype(float)
    return columns, {"site": "cluster", "target": "prenat", "missing": "indicator"}, "logistic"


def _star(columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    known = ~np.isnan(columns["math"])
    kept = {name: cells[known] for name, cells in columns.items() if name not in ("id", "tch", "read", "birthq")}
    return kept, {"site": "sch", "target": "math", "missing": "indicator"}, "linear"


def _chem97(columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    about = {"site": "school", "target": "score", "features": ["gcsescore", "age", "gender"]}
    return columns, about, "linear"


MORE: Mapping[str, Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any], str]]] = {
    "exam": _exam,
    "guprenat": _guprenat,
    "star": _star,
    "chem97": _chem97,
}


def load_more(name: str, folder: Path | None) -> PublicTable | None:
    """Return one of these tables, with a quarter of each site's rows held out; None where its file is not there."""
    given = os.environ.get("FEDKIN_DATA") if folder is None else folder
    path = None if given is None else Path(given) / name / f"{name}.csv"
    if path is None or not path.is_file():
        return None
    columns, about, loss = MORE[name](dict(read_columns(path)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)
        return PublicTable(name, Federation.from_frame(columns, **about), loss, 0.25)
