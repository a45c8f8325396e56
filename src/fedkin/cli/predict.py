"""``fedkin predict``."""

from __future__ import annotations

import csv
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedkin._base import count
from fedkin.cli.console import messages, print_json
from fedkin.cli.options import Json, Model
from fedkin.cli.tables import read_federation
from fedkin.data import write_csv
from fedkin.fitting import FittedModel, load


def predict(
    model: Model,
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Rows to predict: a file, or a directory with one file per device.")
    ],
    device: Annotated[
        str | None, typer.Option(metavar="COL", help="Column of the devices; by default the one of the fit.")
    ] = None,
    offset: Annotated[
        str | None, typer.Option(metavar="COL", help="Column of the offset; by default the one of the fit.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="File for the predictions; by default standard output.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict rows of known devices with a fitted model."""
    fitted = load(model)
    column = device or fitted.options.get("device_column")
    federation = read_federation(
        data, device=column, features=fitted.feature_names, offset=offset or fitted.offset_name
    )
    rows = np.argsort(federation.row_order)  # back to the order of the file
    ids = _known_ids(fitted, federation.devices)
    devices = [ids[u] for u in federation.device_index[rows].tolist()]
    shift = None if federation.offset is None else federation.offset[rows]
    columns = _columns(fitted, federation.X[rows], devices, shift)
    header = ["row", column or "device", *columns]
    table: list[list[Any]] = [
        [number, *cells] for number, cells in enumerate(zip(devices, *columns.values(), strict=True))
    ]
    if out is not None:
        write_csv(out, header, table)
    if as_json:
        print_json(
            {
                "model": str(model),
                "data": str(data),
                "written": None if out is None else str(out),
                "columns": header,
                "predictions": table,
            }
        )
    elif out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows([header, *table])
    else:
        messages().print(f"{out}: {count(len(table), 'prediction')} for {count(len(set(devices)), 'device')}")


def _known_ids(model: FittedModel, found: tuple[Hashable, ...]) -> list[Hashable]:
    """Ids as the model has them: a file of whole numbers reads as ints what another file had as text."""
    by_text = {str(known): known for known in model.devices}
    return [device if device in model.index else by_text.get(str(device), device) for device in found]


def _columns(
    model: FittedModel, X: np.ndarray[Any, Any], devices: list[Hashable], shift: np.ndarray[Any, Any] | None
) -> dict[str, list[Any]]:
    predicted = model.predict(X, devices, shift)
    if predicted.ndim == 2:  # the means of the features
        return {name: predicted[:, k].tolist() for k, name in enumerate(model.feature_names)}
    columns = {"prediction": predicted.tolist()}
    if model.classes is not None:
        chances = model.predict_proba(X, devices, shift)
        columns.update({f"probability:{label}": chances[:, k].tolist() for k, label in enumerate(model.classes)})
    return columns
