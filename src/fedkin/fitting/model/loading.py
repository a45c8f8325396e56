"""Reading the directory of a model back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedkin.data import Schema
from fedkin.errors import ModelFileError, ParameterError
from fedkin.fitting.model.files import (
    COEFFICIENTS_FILE,
    EDGES_FILE,
    KIN_ARRAYS_FILE,
    KIN_FILE,
    MODEL_FILE,
    damaged,
    read_coefficients,
    read_edges,
    read_model_files,
    read_optional,
    text_of,
)
from fedkin.fitting.model.kin_files import StoredKin
from fedkin.fitting.model.model import STORED, FittedModel
from fedkin.losses import Loss, restore_loss


def load(directory: str | os.PathLike[str], *, loss: Loss | None = None) -> FittedModel:
    """Read a model that `FittedModel.save` (or ``fedkin fit --out``) wrote.

    Parameters
    ----------
    directory : path
        Where the model is.
    loss : Loss, optional
        The custom loss that the model was fitted with. Code is never stored, so without it such a model predicts
        the linear predictor, and says so with a warning.

    Returns
    -------
    FittedModel

    Raises
    ------
    ModelFileError
        If the directory is not a model, or one of its files is missing, damaged or from another version.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit_federation
    >>> fed = fedkin.Federation({"a": ([[0.0], [1.0]], [1.0, 3.0])})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fit_federation(fed, None, FitOptions()).save(pathlib.Path(folder, "model"))
    ...     model = fedkin.load(pathlib.Path(folder, "model"))
    >>> model.sites, model.coef.shape
    (('a',), (1, 1, 1))
    """
    folder, meta, others = read_model_files(Path(directory))
    path, coefficients, edges = (folder / name for name in (MODEL_FILE, COEFFICIENTS_FILE, EDGES_FILE))
    tables = {name: text_of(folder / name, content) for name, content in others.items() if name != KIN_ARRAYS_FILE}
    try:
        features = tuple(str(name) for name in meta["features"])
        restored = restore_loss(meta["loss"], loss, path)
        classes = None if meta["classes"] is None else tuple(meta["classes"])
        table = read_coefficients(coefficients, tables[COEFFICIENTS_FILE], features, classes)
        if len(table.sites) != meta["n_sites"]:
            damaged(coefficients, f"it has {len(table.sites)} sites, expected {meta['n_sites']}")
        return FittedModel(
            **table._asdict(),
            feature_names=features,
            loss=restored,
            graph=read_edges(edges, tables[EDGES_FILE], table.sites),
            classes=classes,
            target_name=meta["target"],
            offset_name=meta["offset"],
            options=meta["options"],
            selection=meta["selection"],
            notes={table.sites[u]: tuple(lines) for u, lines in meta["notes"]},
            origin=meta.get("origin"),
            schema=_read_schema(path, meta.get("schema"), features),
            kin=StoredKin(folder, tables[KIN_FILE], others[KIN_ARRAYS_FILE], table.sites, restored)
            if KIN_FILE in tables
            else None,
            **read_optional(folder, tables),
            **{name: kind(meta[name]) for name, kind in STORED.items()},
        )
    except KeyError as error:
        damaged(path, f"the entry {error} is missing")
    except (TypeError, IndexError, ValueError, AttributeError) as error:
        if isinstance(error, ModelFileError):
            raise
        damaged(path, f"an entry has the wrong type ({error})")


def _read_schema(path: Path, plain: Any, features: tuple[str, ...]) -> Schema | None:
    if plain is None:
        return None
    try:
        schema = Schema.from_plain(plain)
    except ParameterError as error:
        damaged(path, f"its schema does not hold together: {error}")
    if schema.names != features:
        damaged(path, "its schema does not match its features")
    return schema
