"""A fitted model: parameters for every device, predictions, and a directory of open files that keeps them."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin import __version__
from fedkin._base import Array, Index, count, listed
from fedkin.data import columns_of, device_id, device_ids
from fedkin.errors import DataError, ModelFileError, ParameterError, UnknownDeviceError
from fedkin.fitting.model_files import (
    COEFFICIENTS_FILE,
    EDGES_FILE,
    MODEL_FILE,
    CoefficientTable,
    coefficients_csv,
    column_name,
    damaged,
    edges_csv,
    read_coefficients,
    read_directory,
    read_edges,
    write_directory,
)
from fedkin.graph import Graph
from fedkin.losses import Loss, describe_loss, restore_loss


@dataclass(frozen=True, eq=False, repr=False)
class FittedModel:
    """What a fit found: a model for every device, and the groups of devices that turned out to be alike.

    Attributes
    ----------
    devices : tuple of V ids
    coef : array (V, k, q)
        Coefficients in the units of the features. k is 1, or the number of classes less one for more than two classes
        (the first class is the reference). For the mean loss, the means.
    intercept : array (V, k)
        Zeros when the fit had none.
    feature_names : tuple of q str
    clusters : int array (V,)
        Group of each device, numbered by first appearance. With edge selection: devices joined by kept edges.
        Without it: devices joined by edges along which their parameters came out exactly equal.
    n_samples : int array (V,)
        Rows that each device was fitted on.
    loss : Loss
    penalty : str
    lam : float
        On the scale of the objective; with ``standardize`` it refers to standardised features.
    gap : float
        Relative duality gap: how far the objective can be from its minimum.
    n_iter : int
    status : "converged" | "iteration_limit" | "interrupted"
    graph : Graph
        The graph that was used, after edge selection if there was one.
    fit_intercept : bool
    classes : tuple or None
        Class labels in the order of the columns of `predict_proba`; None for regression.
    target_name, offset_name : str or None
        `offset_name` is None when the fit had no offset.
    options : mapping
        The options of the fit, in plain values.
    selection : mapping or None
        Summary of the edge selection.
    notes : mapping {device: tuple of str}
        What had to be done about single devices.
    fedkin_version : str

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit_federation
    >>> X = [[0.0], [1.0], [2.0]]
    >>> fed = fedkin.Federation({"a": (X, [1.0, 3.0, 5.0]), "b": (X, [0.0, 2.0, 4.0])})
    >>> model = fit_federation(fed, None, FitOptions(lam=0.0))
    >>> model.predict([[10.0]], "a").round(6)
    array([21.])
    """

    devices: tuple[Hashable, ...]
    coef: Array
    intercept: Array
    feature_names: tuple[str, ...]
    clusters: Index
    n_samples: Index
    loss: Loss
    penalty: str
    lam: float
    gap: float
    n_iter: int
    status: str
    graph: Graph
    fit_intercept: bool = True
    classes: tuple[Any, ...] | None = None
    target_name: str | None = None
    offset_name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    selection: Mapping[str, Any] | None = None
    notes: Mapping[Hashable, tuple[str, ...]] = field(default_factory=dict)
    fedkin_version: str = __version__

    # --- looking at it ----------------------------------------------------------------------------------------

    @cached_property
    def index(self) -> Mapping[Hashable, int]:
        """Position of each device in `devices`."""
        return {device: position for position, device in enumerate(self.devices)}

    @property
    def n_devices(self) -> int:
        """Number of devices V."""
        return len(self.devices)

    @property
    def n_features(self) -> int:
        """Number of features q."""
        return len(self.feature_names)

    @property
    def n_clusters(self) -> int:
        """Number of groups of devices."""
        return int(self.clusters.max()) + 1

    def groups(self) -> tuple[tuple[Hashable, ...], ...]:
        """The devices of each group, in the order of the group numbers.

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.fitting import FitOptions, fit_federation
        >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
        >>> fit_federation(fed, None, FitOptions(loss="mean", lam=0.02, select="none")).groups()
        ((0, 1), (2, 3))
        """
        members: list[list[Hashable]] = [[] for _ in range(self.n_clusters)]
        for device, label in zip(self.devices, self.clusters.tolist(), strict=True):
            members[label].append(device)
        return tuple(tuple(group) for group in members)

    def coefficients(self) -> dict[str, list[Any]]:
        """The coefficients as columns: device, cluster, class (with more than two), intercept, one column per feature.

        ``pandas.DataFrame(model.coefficients())`` makes a table of it. A feature that is called like one of the
        leading columns gets the prefix ``feature:``.
        """
        k = self.coef.shape[1]
        columns: dict[str, list[Any]] = {
            "device": [device for device in self.devices for _ in range(k)],
            "cluster": np.repeat(self.clusters, k).tolist(),
        }
        if k > 1:
            assert self.classes is not None
            columns["class"] = list(self.classes[1:]) * self.n_devices
        if self.fit_intercept:
            columns["intercept"] = self.intercept.reshape(-1).tolist()
        for number, name in enumerate(self.feature_names):
            columns[column_name(name)] = self.coef[:, :, number].reshape(-1).tolist()
        return columns

    def __repr__(self) -> str:
        groups, devices = count(self.n_clusters, "group"), count(self.n_devices, "device")
        return f"FittedModel({self.loss.name}, {devices} in {groups}, lam={self.lam:.4g}, gap={self.gap:.1e})"

    # --- predictions ------------------------------------------------------------------------------------------

    def predict(self, X: object, device: object = None, offset: ArrayLike | None = None) -> NDArray[Any]:
        """Predictions for rows of known devices.

        Parameters
        ----------
        X : array (n, q), or a table with the features among its columns
            Rows to predict.
        device : id, or list or array of n ids
            The device of all rows, or of each row. It may be left out when the model has one device only.
        offset : array (n,), optional
            Needed when, and only when, the fit had an offset.

        Returns
        -------
        array (n,)
            Mean responses, or class labels for the classification losses. For the mean loss, the means ``(n, q)``.

        Raises
        ------
        UnknownDeviceError
            For a device that was not part of the fit.
        """
        if self.classes is not None:
            chosen = self.predict_proba(X, device, offset).argmax(axis=1)
            return np.asarray(_label_array(self.classes)[chosen])
        return self._responses(X, device, offset)

    def predict_proba(self, X: object, device: object = None, offset: ArrayLike | None = None) -> Array:
        """Probabilities ``(n, C)`` of the classes, columns in the order of `classes`; arguments as in `predict`."""
        if self.classes is None:
            raise ParameterError(
                f"a model with the {self.loss.name} loss has no classes and so no probabilities: use predict"
            )
        mean = self._responses(X, device, offset)
        return np.column_stack([1.0 - mean, mean]) if mean.ndim == 1 else mean

    def linear_predictor(self, X: object, device: object = None, offset: ArrayLike | None = None) -> Array:
        """``X theta + offset``, shape ``(n, k)``; arguments as in `predict`."""
        rows, position, shift = self._checked_rows(X, device, offset)
        eta = np.einsum("nq,nkq->nk", rows, self.coef[position]) + self.intercept[position]
        return np.asarray(eta if shift is None else eta + shift[:, None])

    def _responses(self, X: object, device: object, offset: ArrayLike | None) -> Array:
        if self.loss.rowwise is not None:
            return self.loss.rowwise.response(self.linear_predictor(X, device, offset))
        rows, position, shift = self._checked_rows(X, device, offset)
        if self.fit_intercept:
            rows = np.column_stack([np.ones(len(rows)), rows])
        out = np.empty((len(rows), self.n_features) if self.loss.location else len(rows))
        for u in np.unique(position):
            own = position == u
            out[own] = self.loss.predict(self._theta(u), rows[own], None if shift is None else shift[own])
        return out

    def _theta(self, u: int) -> Array:
        """The parameter of device number u of a loss with one block of coefficients, intercept first."""
        return np.concatenate([self.intercept[u], self.coef[u, 0]]) if self.fit_intercept else self.coef[u, 0]

    def _checked_rows(self, X: object, device: object, offset: ArrayLike | None) -> tuple[Array, Index, Array | None]:
        rows = _feature_matrix(X, self.feature_names)
        position = _device_positions(device, len(rows), self.index)
        return rows, position, _offset_column(offset, len(rows), needed=self.offset_name is not None)

    # --- files ------------------------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the model to a directory in open formats (JSON and CSV); `load` reads it back to the bit.

        Parameters
        ----------
        directory : path
            Made if need be. A model that is there already is kept until the new one is whole (`load` finds the older
            one if a crash comes between the two renames); a directory that holds anything else is refused.

        Raises
        ------
        ModelFileError
            If the place is taken by something that is not a model, or cannot be written.

        Notes
        -----
        A custom loss is saved by name only: see `load`.
        """
        table = CoefficientTable(self.devices, self.clusters, self.n_samples, self.intercept, self.coef)
        tables = {
            COEFFICIENTS_FILE: coefficients_csv(table, self.feature_names, self.classes),
            EDGES_FILE: edges_csv(self.devices, self.graph),
        }
        write_directory(Path(directory), self._description(), tables)

    def _description(self) -> dict[str, Any]:
        """What `save` keeps beside the tables, and `load` reads back."""
        return {
            **{name: getattr(self, name) for name in _STORED},
            "loss": describe_loss(self.loss),
            "n_devices": self.n_devices,
            "n_clusters": self.n_clusters,
            "target": self.target_name,
            "offset": self.offset_name,
            "features": list(self.feature_names),
            "classes": None if self.classes is None else list(self.classes),
            "options": dict(self.options),
            "selection": None if self.selection is None else dict(self.selection),
            "notes": [[self.index[device], list(lines)] for device, lines in self.notes.items()],
        }


#: Entries of a model's file that have the name of an attribute, and their types.
_STORED = {
    "fedkin_version": str,
    "penalty": str,
    "lam": float,
    "gap": float,
    "n_iter": int,
    "status": str,
    "fit_intercept": bool,
}


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
    >>> model.devices, model.coef.shape
    (('a',), (1, 1, 1))
    """
    folder, meta, tables = read_directory(Path(directory))
    path, coefficients, edges = (folder / name for name in (MODEL_FILE, COEFFICIENTS_FILE, EDGES_FILE))
    try:
        features = tuple(str(name) for name in meta["features"])
        restored = restore_loss(meta["loss"], loss, path)
        classes = None if meta["classes"] is None else tuple(meta["classes"])
        table = read_coefficients(coefficients, tables[COEFFICIENTS_FILE], features, classes)
        if len(table.devices) != meta["n_devices"]:
            damaged(coefficients, f"it has {len(table.devices)} devices, expected {meta['n_devices']}")
        return FittedModel(
            **table._asdict(),
            feature_names=features,
            loss=restored,
            graph=read_edges(edges, tables[EDGES_FILE], table.devices),
            classes=classes,
            target_name=meta["target"],
            offset_name=meta["offset"],
            options=meta["options"],
            selection=meta["selection"],
            notes={table.devices[u]: tuple(lines) for u, lines in meta["notes"]},
            **{name: kind(meta[name]) for name, kind in _STORED.items()},
        )
    except KeyError as error:
        damaged(path, f"the entry {error} is missing")
    except (TypeError, IndexError, ValueError, AttributeError) as error:
        if isinstance(error, ModelFileError):
            raise
        damaged(path, f"an entry has the wrong type ({error})")


def _label_array(classes: tuple[Any, ...]) -> NDArray[Any]:
    made = np.array(classes)
    return made if made.dtype.kind in "biuf" else np.fromiter(classes, dtype=object, count=len(classes))


# --- rows to predict, checked against the model ------------------------------------------------------------------


def _feature_matrix(X: object, names: tuple[str, ...]) -> Array:
    """The features ``(n, q)`` of an array, or of a table that has them among its columns."""
    if isinstance(X, Mapping) or hasattr(X, "columns") or hasattr(X, "column_names"):
        rows = _from_table(X, names)
    elif hasattr(X, "toarray"):
        raise DataError("X is a sparse matrix, expected a dense array: X.toarray()")
    else:
        rows = np.asarray(X, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != len(names):
        raise DataError(f"X has shape {rows.shape}, expected (n, {len(names)}): {listed(names, 20)}")
    if not np.isfinite(rows).all():
        row, column = (int(number) for number in np.argwhere(~np.isfinite(rows))[0])
        raise DataError(f"row {row}, feature {names[column]!r} is {rows[row, column]}: fill or drop such values")
    return rows


def _from_table(X: object, names: tuple[str, ...]) -> Array:
    columns = columns_of(X)
    for name in names:
        if name not in columns:
            raise DataError(f"there is no column {name!r}; the model needs {listed(names, 20)}")
        if columns[name].dtype.kind not in "fb":
            raise DataError(f"column {name!r} is not numeric, but the model needs numbers there")
    n = len(next(iter(columns.values()), ()))
    rows = np.empty((n, len(names)))
    for k, name in enumerate(names):
        rows[:, k] = columns[name]
    return rows


def _device_positions(device: object, n: int, index: Mapping[Hashable, int]) -> Index:
    """The number of each row's device: ``device`` is one id, an id per row, or None where there is one device only."""
    if device is None:
        if len(index) == 1:
            return np.zeros(n, dtype=np.int64)
        raise DataError(
            f"the model has {len(index)} devices, so it must be told which one each row belongs to: "
            f"device= one of {listed(index)}, or a list with an id per row"
        )
    if isinstance(device, str | bytes | tuple) or not isinstance(device, Iterable):
        return np.full(n, _position(device_id(device), index))
    ids = device_ids(device)
    if len(ids) != n:
        raise DataError(f"device names {len(ids)} rows, but X has {n}: give one id per row, or one id for all")
    known = {one: _position(one, index) for one in dict.fromkeys(ids)}
    return np.fromiter((known[one] for one in ids), dtype=np.int64, count=n)


def _position(device: Hashable, index: Mapping[Hashable, int]) -> int:
    if device in index:
        return index[device]
    alike = [known for known in index if str(known) == str(device)]
    if alike:
        cure = f"Did you mean {alike[0]!r} ({type(alike[0]).__name__} instead of {type(device).__name__})?"
    else:
        cure = "Fit again with rows of this device, or predict with a device like it"
    raise UnknownDeviceError(
        f"device {device!r} was not part of the fit, so it has no model; the {len(index)} known devices are "
        f"{listed(index)}. {cure}"
    )


def _offset_column(offset: ArrayLike | None, n: int, *, needed: bool) -> Array | None:
    """The offset of each row, ``(n,)``."""
    if offset is None:
        if needed:
            raise DataError(
                "the model was fitted with an offset: give offset= for the rows to predict (zeros predict rates "
                "for one unit of exposure)"
            )
        return None
    shift = np.asarray(offset, dtype=np.float64)
    if shift.shape != (n,):
        raise DataError(f"offset has shape {shift.shape}, expected ({n},), one value per row of X")
    if not np.isfinite(shift).all():
        row = int(np.flatnonzero(~np.isfinite(shift))[0])
        raise DataError(f"row {row}: the offset is {shift[row]}; fill or drop such rows")
    return shift
