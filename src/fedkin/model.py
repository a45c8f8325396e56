"""A fitted model: parameters for every device, predictions, and a directory of open files that keeps them.

A model directory holds three text files and nothing that can run code when it is read:

- ``model.json``: what was fitted and how, with the format version and the checksums of the other two;
- ``coefficients.csv``: a row per device (and per class but the first, for more than two classes);
- ``edges.csv``: the graph that was used. The ends are named by id and by row number of the device.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import date, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin import __version__
from fedkin.errors import DataError, FedkinWarning, ModelFileError, ParameterError, UnknownDeviceError
from fedkin.graph import Graph
from fedkin.losses import HuberLoss, Loss, MeanLoss, MultinomialLoss, RowLoss, UserLoss, make_loss
from fedkin.tables import columns_of, device_id, device_ids

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

FORMAT = "fedkin-model"
FORMAT_VERSION = 1
MODEL_FILE, COEFFICIENTS_FILE, EDGES_FILE = "model.json", "coefficients.csv", "edges.csv"
_FILES = (MODEL_FILE, COEFFICIENTS_FILE, EDGES_FILE)
_STALE_SECONDS = 3600.0


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
    clusters: IntArray
    n_samples: IntArray
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
        >>> fit_federation(fed, None, FitOptions(loss="mean", lam=0.02)).groups()
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
            columns[_column_name(name)] = self.coef[:, :, number].reshape(-1).tolist()
        return columns

    def __repr__(self) -> str:
        groups = "1 group" if self.n_clusters == 1 else f"{self.n_clusters} groups"
        devices = "1 device" if self.n_devices == 1 else f"{self.n_devices} devices"
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
        if isinstance(self.loss, RowLoss):
            return self.loss.response(self.linear_predictor(X, device, offset))
        rows, position, shift = self._checked_rows(X, device, offset)
        if self.fit_intercept:
            rows = np.column_stack([np.ones(len(rows)), rows])
        wide = isinstance(self.loss, MeanLoss)
        out = np.empty((len(rows), self.n_features) if wide else len(rows))
        for u in np.unique(position):
            own = position == u
            out[own] = self.loss.predict(self._theta(u), rows[own], None if shift is None else shift[own])
        return out

    def _theta(self, u: int) -> Array:
        """The parameter of device number u of a loss with one block of coefficients, intercept first."""
        return np.concatenate([self.intercept[u], self.coef[u, 0]]) if self.fit_intercept else self.coef[u, 0]

    def _checked_rows(
        self, X: object, device: object, offset: ArrayLike | None
    ) -> tuple[Array, IntArray, Array | None]:
        rows = self._matrix(X)
        position = self._positions(device, len(rows))
        if offset is None:
            if self.offset_name is not None:
                raise DataError(
                    "the model was fitted with an offset: give offset= for the rows to predict (zeros predict rates "
                    "for one unit of exposure)"
                )
            return rows, position, None
        shift = np.asarray(offset, dtype=np.float64)
        if shift.shape != (len(rows),):
            raise DataError(f"offset has shape {shift.shape}, expected ({len(rows)},), one value per row of X")
        if not np.isfinite(shift).all():
            row = int(np.flatnonzero(~np.isfinite(shift))[0])
            raise DataError(f"row {row}: the offset is {shift[row]}; fill or drop such rows")
        return rows, position, shift

    def _matrix(self, X: object) -> Array:
        if isinstance(X, Mapping) or hasattr(X, "columns") or hasattr(X, "column_names"):
            columns = columns_of(X)
            for name in self.feature_names:
                if name not in columns:
                    raise DataError(f"there is no column {name!r}; the model needs {_listed(self.feature_names, 20)}")
                if columns[name].dtype.kind not in "fb":
                    raise DataError(f"column {name!r} is not numeric, but the model needs numbers there")
            n = len(next(iter(columns.values()), ()))
            rows = (
                np.column_stack([columns[name] for name in self.feature_names])
                if self.feature_names
                else np.empty((n, 0))
            )
            rows = rows.astype(np.float64)
        else:
            if hasattr(X, "toarray"):
                raise DataError("X is a sparse matrix, expected a dense array: X.toarray()")
            rows = np.asarray(X, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != self.n_features:
            raise DataError(
                f"X has shape {rows.shape}, expected (n, {self.n_features}): {_listed(self.feature_names, 20)}"
            )
        if not np.isfinite(rows).all():
            row, column = (int(number) for number in np.argwhere(~np.isfinite(rows))[0])
            raise DataError(
                f"row {row}, feature {self.feature_names[column]!r} is {rows[row, column]}: fill or drop such values"
            )
        return rows

    def _positions(self, device: object, n: int) -> IntArray:
        if device is None:
            if self.n_devices == 1:
                return np.zeros(n, dtype=np.int64)
            raise DataError(
                f"the model has {self.n_devices} devices, so it must be told which one each row belongs to: "
                f"device= one of {_listed(self.devices)}, or a list with an id per row"
            )
        if isinstance(device, str | bytes | tuple) or not isinstance(device, Iterable):
            return np.full(n, self._position(device_id(device)))
        ids = device_ids(device)
        if len(ids) != n:
            raise DataError(f"device names {len(ids)} rows, but X has {n}: give one id per row, or one id for all")
        known = {one: self._position(one) for one in dict.fromkeys(ids)}
        return np.fromiter((known[one] for one in ids), dtype=np.int64, count=n)

    def _position(self, device: Hashable) -> int:
        if device in self.index:
            return self.index[device]
        alike = [known for known in self.devices if str(known) == str(device)]
        if alike:
            cure = f"did you mean {alike[0]!r} ({type(alike[0]).__name__} instead of {type(device).__name__})?"
        else:
            cure = "fit again with rows of this device, or predict with a device like it"
        raise UnknownDeviceError(
            f"device {device!r} was not part of the fit, so it has no model; the {self.n_devices} known devices are "
            f"{_listed(self.devices)}. {cure[0].upper()}{cure[1:]}"
        )

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
        A loss of one's own is saved by name only: see `load`.
        """
        _write_directory(Path(directory), self._file_contents())

    def _file_contents(self) -> dict[str, str]:
        written = {COEFFICIENTS_FILE: self._coefficients_csv(), EDGES_FILE: self._edges_csv()}
        meta = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "fedkin_version": self.fedkin_version,
            "loss": describe_loss(self.loss),
            "penalty": self.penalty,
            "lam": self.lam,
            "gap": self.gap,
            "n_iter": self.n_iter,
            "status": self.status,
            "n_devices": self.n_devices,
            "n_clusters": self.n_clusters,
            "target": self.target_name,
            "offset": self.offset_name,
            "features": list(self.feature_names),
            "fit_intercept": self.fit_intercept,
            "classes": None if self.classes is None else list(self.classes),
            "options": dict(self.options),
            "selection": None if self.selection is None else dict(self.selection),
            "notes": [[self.index[device], list(lines)] for device, lines in self.notes.items()],
            "checksums": {name: _checksum(text) for name, text in written.items()},
        }
        try:
            text = json.dumps(_plain(meta), indent=2, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ModelFileError(f"the model cannot be written as JSON: {error}") from None
        return {MODEL_FILE: text + "\n", **written}

    def _coefficients_csv(self) -> str:
        ids = [_id_cells(device) for device in self.devices]
        k = self.coef.shape[1]
        header = ["device", "device_type", "cluster", "n_samples", *(["class"] if k > 1 else []), "intercept"]
        rows: list[list[str]] = [[*header, *(_column_name(name) for name in self.feature_names)]]
        labels, counts = self.clusters.tolist(), self.n_samples.tolist()
        intercept, coef = self.intercept.tolist(), self.coef.tolist()
        for u, cells in enumerate(ids):
            for j in range(k):
                about = [] if k == 1 or self.classes is None else [str(self.classes[j + 1])]
                numbers = [repr(value) for value in (intercept[u][j], *coef[u][j])]
                rows.append([*cells, str(labels[u]), str(counts[u]), *about, *numbers])
        return _csv_text(rows)

    def _edges_csv(self) -> str:
        names = [_id_cells(device)[0] for device in self.devices]
        rows = [["source", "target", "weight", "source_row", "target_row"]]
        for (i, j), weight in zip(self.graph.edges.tolist(), self.graph.weights.tolist(), strict=True):
            rows.append([names[j], names[i], repr(weight), str(j), str(i)])
        return _csv_text(rows)


def load(directory: str | os.PathLike[str], *, loss: Loss | None = None) -> FittedModel:
    """Read a model that `FittedModel.save` (or ``fedkin fit --out``) wrote.

    Parameters
    ----------
    directory : path
        Where the model is.
    loss : Loss, optional
        The loss of one's own that the model was fitted with. Code is never stored, so without it such a model predicts
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
    folder = _standing(Path(directory))
    meta = _read_meta(folder)
    path = folder / MODEL_FILE
    texts = {name: _read_checked(folder / name, meta) for name in (COEFFICIENTS_FILE, EDGES_FILE)}
    try:
        features = tuple(str(name) for name in meta["features"])
        restored = _restore_loss(meta["loss"], loss, path)
        classes = None if meta["classes"] is None else tuple(meta["classes"])
        table = _read_coefficients(folder / COEFFICIENTS_FILE, texts[COEFFICIENTS_FILE], features, classes)
        if len(table.devices) != meta["n_devices"]:
            _damaged(folder / COEFFICIENTS_FILE, f"it has {len(table.devices)} devices, expected {meta['n_devices']}")
        return FittedModel(
            devices=table.devices,
            coef=table.coef,
            intercept=table.intercept,
            feature_names=features,
            clusters=table.clusters,
            n_samples=table.n_samples,
            loss=restored,
            penalty=str(meta["penalty"]),
            lam=float(meta["lam"]),
            gap=float(meta["gap"]),
            n_iter=int(meta["n_iter"]),
            status=str(meta["status"]),
            graph=_read_edges(folder / EDGES_FILE, texts[EDGES_FILE], table.devices),
            fit_intercept=bool(meta["fit_intercept"]),
            classes=classes,
            target_name=meta["target"],
            offset_name=meta["offset"],
            options=meta["options"],
            selection=meta["selection"],
            notes={table.devices[u]: tuple(lines) for u, lines in meta["notes"]},
            fedkin_version=str(meta["fedkin_version"]),
        )
    except KeyError as error:
        _damaged(path, f"the entry {error} is missing")
    except (TypeError, IndexError, ValueError, AttributeError) as error:
        if isinstance(error, ModelFileError):
            raise
        _damaged(path, f"an entry has the wrong type ({error})")


# --- losses by name -------------------------------------------------------------------------------------------


def describe_loss(loss: Loss) -> dict[str, Any]:
    """Name and parameters of a loss in plain values; of a loss of one's own, what is left of it without its code."""
    known: dict[str, Any] = {"name": loss.name}
    if isinstance(loss, HuberLoss | MultinomialLoss):
        return known | asdict(loss)
    if _has_known_name(loss):
        return known
    return known | {"own": True, "own_prediction": getattr(loss, "predict_fn", loss) is not None}


def _has_known_name(loss: Loss) -> bool:
    try:
        return type(make_loss(loss.name, np.zeros(1))) is type(loss)
    except ParameterError:
        return False


def _restore_loss(described: Mapping[str, Any], given: Loss | None, path: Path) -> Loss:
    name = described["name"]
    if described.get("own"):
        if given is not None:
            return given
        if described.get("own_prediction"):
            import warnings

            warnings.warn(
                f"{path}: the model was fitted with the loss {name!r}, which is not one of Fedkin's; its code is not "
                "stored, so predictions are linear predictors. Pass the loss to load(..., loss=...) to have its own",
                FedkinWarning,
                stacklevel=3,
            )
        return UserLoss(_no_code, _no_code, name=str(name))
    if given is not None and describe_loss(given) != dict(described):
        raise ModelFileError(
            f"{path}: the model has the loss {dict(described)}, not {describe_loss(given)}: leave loss= out"
        )
    if name == "huber":
        return HuberLoss(float(described["delta"]))
    if name == "multinomial":
        return MultinomialLoss(int(described["n_classes"]))
    try:
        return make_loss(str(name))
    except ParameterError as error:
        raise ModelFileError(f"{path}: {error}; was it written by a later version of Fedkin?") from None


def _no_code(*_: object) -> NoReturn:
    raise ParameterError(
        "this loss was loaded from a file, which holds its name only: pass the loss to load(..., loss=...)"
    )


# --- writing --------------------------------------------------------------------------------------------------


def _write_directory(target: Path, contents: Mapping[str, str]) -> None:
    """Write the files beside the target and rename: a reader sees the old model or the new one, never half of it."""
    target = target.resolve()
    _check_free(target)
    mark = secrets.token_hex(6)
    fresh, old = (target.with_name(f".{target.name}.{mark}.{kind}") for kind in ("new", "old"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh.mkdir()
        for name, text in contents.items():
            with (fresh / name).open("w", encoding="utf-8", newline="") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        replaced = target.exists()
        if replaced:
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if replaced:
                old.rename(target)
            raise
        _remove_leftovers(target)
    except OSError as error:
        raise ModelFileError(
            f"cannot write the model to {target}: {error.strerror or error}; choose another place"
        ) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Remove what this save, and saves that were killed, put beside the target."""
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


def _check_free(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ModelFileError(f"{target} is a file, expected a directory for the model: choose another name")
    held = sorted(entry.name for entry in target.iterdir())
    if not held:
        return
    if MODEL_FILE in held:
        _read_meta(target, any_version=True)
        foreign = [name for name in held if name not in _FILES]
        if not foreign:
            return
        raise ModelFileError(
            f"{target} holds a model, but also {_listed(foreign)}, which replacing the model would delete: "
            "move them away or choose another directory"
        )
    raise ModelFileError(
        f"{target} is not empty and not a Fedkin model (it holds {_listed(held)}): choose another directory"
    )


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


def _column_name(feature: str) -> str:
    taken = ("device", "device_type", "cluster", "n_samples", "class", "intercept")
    return f"feature:{feature}" if feature in taken else feature


def _csv_text(rows: Iterable[Sequence[str]]) -> str:
    return "".join(",".join(map(_csv_cell, row)) + "\n" for row in rows)


def _csv_cell(text: str) -> str:
    # the csv module leaves a carriage return alone when lines end in "\n", and then takes it for the end of a line
    quoted = any(mark in text for mark in ',"\r\n') or text != text.strip()
    return '"' + text.replace('"', '""') + '"' if quoted else text


def _checksum(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()


# --- reading --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CoefficientTable:
    devices: tuple[Hashable, ...]
    clusters: IntArray
    n_samples: IntArray
    intercept: Array
    coef: Array


def _damaged(path: Path, what: str) -> NoReturn:
    raise ModelFileError(f"{path}: {what}; the file is damaged, copy the model again or fit it again") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ModelFileError(
            f"{path} is missing: copy the whole model directory again or fit the model again"
        ) from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        _damaged(path, "it is not UTF-8 text")


def _read_meta(folder: Path, any_version: bool = False) -> dict[str, Any]:
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
        meta = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        _damaged(path, f"not valid JSON in line {error.lineno} ({error.msg})")
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ModelFileError(f'{path} is not the description of a Fedkin model: its "format" is not "{FORMAT}"')
    if meta.get("format_version") != FORMAT_VERSION and not any_version:
        raise ModelFileError(
            f"{path} has the format version {meta.get('format_version')!r}, but Fedkin {__version__} reads version "
            f"{FORMAT_VERSION}: install the Fedkin that wrote it ({meta.get('fedkin_version')})"
        )
    return meta


def _read_checked(path: Path, meta: Mapping[str, Any]) -> str:
    text = _read_text(path)
    sums = meta.get("checksums")
    expected = sums.get(path.name) if isinstance(sums, dict) else None
    if _checksum(text) != expected:
        _damaged(path, f"its content does not match the checksum in {MODEL_FILE}: it was cut off or changed")
    return text


def _read_coefficients(
    path: Path, text: str, features: tuple[str, ...], classes: tuple[Any, ...] | None
) -> _CoefficientTable:
    header, *rows = csv.reader(io.StringIO(text, newline=""))
    k = max(len(classes) - 1, 1) if classes is not None else 1
    first = header.index("intercept") if "intercept" in header else -1
    if header[first + 1 :] != [_column_name(name) for name in features]:
        _damaged(path, f"its columns do not match the features in {MODEL_FILE}")
    if not rows or len(rows) % k or any(len(row) != len(header) for row in rows):
        _damaged(path, f"it has {len(rows)} rows, which is not {k} for every device")
    heads = rows[::k]
    try:
        numbers = np.array([[float(cell) for cell in row[first:]] for row in rows]).reshape(-1, k, 1 + len(features))
        return _CoefficientTable(
            tuple(_id_from_cells(row[0], row[1]) for row in heads),
            np.array([int(row[2]) for row in heads], dtype=np.int64),
            np.array([int(row[3]) for row in heads], dtype=np.int64),
            numbers[:, :, 0],
            numbers[:, :, 1:],
        )
    except ValueError as error:
        _damaged(path, str(error))


def _read_edges(path: Path, text: str, devices: tuple[Hashable, ...]) -> Graph:
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))[1:]
        index = np.array([[int(row[3]), int(row[4])] for row in rows], dtype=np.int64).reshape(-1, 2)
        return Graph.from_indices(devices, index, [float(row[2]) for row in rows])
    except (IndexError, ValueError) as error:
        _damaged(path, str(error))


def _label_array(classes: tuple[Any, ...]) -> NDArray[Any]:
    made = np.array(classes)
    return made if made.dtype.kind in "biuf" else np.fromiter(classes, dtype=object, count=len(classes))


def _listed(names: Iterable[object], most: int = 5) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
