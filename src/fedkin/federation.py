"""The rows of all devices, stacked in device order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkin.errors import DataError, ParameterError, UnknownDeviceError
from fedkin.tables import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    Columns,
    as_column,
    columns_of,
    device_ids,
    read_columns,
    unwrapped,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]

INTERCEPT = "(intercept)"


@dataclass(frozen=True, eq=False)
class DeviceData:
    """The rows of one device.

    Parameters
    ----------
    X : array of shape (n, q)
        Features; for the mean loss, the samples themselves.
    y : array of shape (n,), optional
        Target: numbers or class labels.
    offset : array of shape (n,), optional
        Known part of the linear predictor.

    Examples
    --------
    >>> fed = Federation({"a": ([[1.0], [2.0]], [0.5, 1.5])})
    >>> fed["a"].n_samples
    2
    """

    X: FloatArray
    y: AnyArray | None = None
    offset: FloatArray | None = None

    @property
    def n_samples(self) -> int:
        """Number of rows n."""
        return int(self.X.shape[0])


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Federation:
    """Devices and their rows. Immutable: every method that changes something returns another federation.

    Parameters
    ----------
    data : mapping of device id to ``(X, y)``, ``(X, y, offset)``, `DeviceData` or ``X`` alone
        X of shape (n_u, q), y and offset of shape (n_u,). ``X`` alone is for the mean loss. Device ids are any
        hashable values. Numbers in y become float64; bool and text labels stay what they are.
    feature_names : sequence of q str, optional
        By default ``x0, x1, ...``.

    Attributes
    ----------
    devices : tuple of V ids
    X : array of shape (N, q)
        Rows of all devices, device after device; read only, as all arrays here.
    y : array of shape (N,) or None
        float64 for numbers, bool or object (str) for labels.
    offset : array of shape (N,) or None
    starts : int64 array of shape (V + 1,)
        The rows of device number u are ``starts[u]:starts[u + 1]``.
    row_order : int64 array of shape (N,)
        Position of each stacked row in the arrays or file that the federation came from.
    feature_names : tuple of q str
    target_name : str or None

    Raises
    ------
    DataError
        If rows are missing, not finite, not numeric or do not match; the message names the device, row and column.

    Examples
    --------
    >>> fed = Federation({"north": ([[0.0], [1.0]], [1.0, 3.0]), "south": ([[2.0]], [4.0])})
    >>> fed
    Federation(2 devices, 3 rows, 1 feature)
    >>> fed.n_samples
    array([2, 1])
    >>> fed["south"].X
    array([[2.]])
    """

    devices: tuple[Hashable, ...]
    X: FloatArray
    y: AnyArray | None
    offset: FloatArray | None
    starts: IntArray
    row_order: IntArray
    feature_names: tuple[str, ...]
    target_name: str | None

    def __init__(
        self,
        data: Mapping[Any, Any],
        feature_names: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(data, Mapping):
            raise DataError(
                f"Federation takes a mapping {{device: (X, y)}}, got {type(data).__name__}; "
                "for stacked arrays use Federation.from_arrays(X, y, device)"
            )
        if not data:
            raise DataError("a federation needs at least one device, got an empty mapping")
        devices = _distinct_ids(data)
        parts = [_device_data(device, value) for device, value in zip(devices, data.values(), strict=True)]
        for device, part in zip(devices, parts, strict=True):
            if part.n_samples == 0:
                raise DataError(f"device {device!r} has no rows: leave it out or give it data")
            if part.X.shape[1] != parts[0].X.shape[1]:
                raise DataError(
                    f"device {device!r} has {part.X.shape[1]} features, but device {devices[0]!r} has "
                    f"{parts[0].X.shape[1]}: all devices need the same features"
                )
        counts = np.array([part.n_samples for part in parts], dtype=np.int64)
        names = _feature_names(feature_names, parts[0].X.shape[1])
        rows = _RowNames(devices, np.repeat(np.arange(len(devices)), counts), counts)
        X = np.concatenate([part.X for part in parts])
        _check_finite(X, names, rows)
        y = _stacked_targets(devices, [part.y for part in parts], rows)
        offset = _stacked_offsets(devices, [part.offset for part in parts], rows)
        self._set(devices, counts, X, y, offset, np.arange(len(X)), names, None)

    def _set(
        self,
        devices: tuple[Hashable, ...],
        counts: IntArray,
        X: FloatArray,
        y: AnyArray | None,
        offset: FloatArray | None,
        row_order: npt.NDArray[np.integer],
        feature_names: tuple[str, ...],
        target_name: str | None,
    ) -> None:
        fields = {
            "devices": devices,
            "X": np.ascontiguousarray(X),
            "y": y,
            "offset": offset,
            "starts": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            "row_order": row_order.astype(np.int64),
            "feature_names": feature_names,
            "target_name": target_name,
        }
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(self, name, value)

    @classmethod
    def _of(cls, *fields: Any) -> Federation:
        """A federation from parts that have been checked already."""
        made = object.__new__(cls)
        made._set(*fields)
        return made

    # --- other ways to make one -------------------------------------------------------------------------------

    @classmethod
    def from_arrays(
        cls,
        X: npt.ArrayLike,
        y: npt.ArrayLike | None,
        device: Iterable[Hashable],
        *,
        offset: npt.ArrayLike | None = None,
        feature_names: Sequence[str] | None = None,
    ) -> Federation:
        """A federation from stacked rows in any order.

        Parameters
        ----------
        X : array of shape (N, q)
            Features.
        y : array of shape (N,), or None
            Target; None for the mean loss.
        device : iterable of N ids
            The device of each row. Devices are ordered by their first appearance, rows of a device keep their order.
        offset : array of shape (N,), optional
            Known part of the linear predictor.
        feature_names : sequence of q str, optional
            By default ``x0, x1, ...``.

        Examples
        --------
        >>> fed = Federation.from_arrays([[1.0], [2.0], [3.0]], [1, 2, 3], ["b", "a", "b"])
        >>> fed.devices, fed.X[:, 0], fed.row_order
        (('b', 'a'), array([1., 3., 2.]), array([0, 2, 1]))
        """
        return cls._from_rows(_matrix(X, ""), y, device, offset, feature_names, None)

    @classmethod
    def _from_rows(
        cls,
        X: FloatArray,
        y: npt.ArrayLike | None,
        device: Iterable[Hashable],
        offset: npt.ArrayLike | None,
        feature_names: Sequence[str] | None,
        target_name: str | None,
    ) -> Federation:
        names = _feature_names(feature_names, X.shape[1])
        devices, codes = _grouped(device)
        if len(codes) != len(X):
            raise DataError(f"X has {len(X)} rows, but device has {len(codes)}: give every row its device")
        if not devices:
            raise DataError("a federation needs at least one row, got none")
        rows = _RowNames(devices, codes, None)
        _check_finite(X, names, rows)
        target = None if y is None else _target(y, len(X), "")
        if target is not None:
            _check_labels(target, "target", rows)
        shift = None if offset is None else _offset(offset, len(X), "")
        if shift is not None:
            _check_labels(shift, "offset", rows)
        order = np.argsort(codes, kind="stable")
        return cls._of(
            devices,
            np.bincount(codes, minlength=len(devices)),
            X[order],
            None if target is None else target[order],
            None if shift is None else shift[order],
            order,
            names,
            target_name,
        )

    @classmethod
    def from_frame(
        cls,
        frame: object,
        *,
        device: str,
        target: str | None = None,
        features: Sequence[str] | None = None,
        offset: str | None = None,
    ) -> Federation:
        """A federation from a table with one row per sample.

        Parameters
        ----------
        frame : pandas, polars or pyarrow table, or dict of columns
            All columns have N rows.
        device : str
            Column of device ids.
        target : str, optional
            Column of the target; None for the mean loss, whose samples are the features.
        features : sequence of str, optional
            Columns of features, numeric or bool. By default all other columns, which then have to be numeric.
        offset : str, optional
            Column of offsets.

        Examples
        --------
        >>> table = {"site": ["a", "a", "b"], "age": [40, 50, 60], "score": [1.0, 2.0, 3.0]}
        >>> Federation.from_frame(table, device="site", target="score").feature_names
        ('age',)
        """
        return cls._from_columns(columns_of(frame), device, target, features, offset)

    @classmethod
    def _from_columns(
        cls,
        columns: Columns,
        device: str,
        target: str | None,
        features: Sequence[str] | None,
        offset: str | None,
    ) -> Federation:
        names = _chosen_features(columns, device, target, features, offset)
        for name in names:
            if columns[name].dtype.kind not in "fb":
                cell = next((cell for cell in columns[name] if cell is not None), None)
                raise DataError(
                    f"feature {name!r} is not numeric (it has {cell!r}): encode it as numbers, for example as 0/1 "
                    "columns"
                )
        ids = columns[device]
        for row, cell in enumerate(ids):
            if cell is None or cell != cell:
                raise DataError(
                    f"row {row}: column {device!r} is empty, so the row has no device; fill it or drop the row"
                )
        X = np.column_stack([columns[name] for name in names]) if names else np.empty((len(ids), 0))
        return cls._from_rows(
            X.astype(np.float64, copy=False),
            None if target is None else columns[target],
            ids,
            None if offset is None else columns[offset],
            names,
            target,
        )

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | None = None,
        target: str | None = None,
        features: Sequence[str] | None = None,
        offset: str | None = None,
    ) -> Federation:
        """A federation from one CSV or Parquet file, or from a directory with one file per device.

        Parameters
        ----------
        path : path
            A file with a column of device ids, or a directory of files with the same columns.
        device : str, optional
            Column of device ids. For a directory the default is the name of the file without its suffix.
        target, features, offset
            As in `from_frame`.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for site in ("north", "south"):
        ...         _ = pathlib.Path(folder, f"{site}.csv").write_text("x,y\\n1,2\\n3,4\\n")
        ...     Federation.read(folder, target="y").devices
        ('north', 'south')
        """
        path = Path(path)
        features = [features] if isinstance(features, str) else features
        try:
            if path.is_dir():
                columns, device = _directory_columns(path, device, target, features, offset)
            else:
                columns = read_columns(path)
                if device is None:
                    raise DataError(f"say which column holds the devices, device=...; it has {_listed(columns)}")
            return cls._from_columns(columns, device, target, features, offset)
        except DataError as error:
            message = str(error)
            raise DataError(message if str(path) in message else f"{path}: {message}") from None

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
        return int(self.X.shape[1])

    @cached_property
    def n_samples(self) -> IntArray:
        """Rows of each device, int64 array of shape (V,)."""
        return _frozen(np.diff(self.starts))

    @cached_property
    def device_index(self) -> IntArray:
        """Position of the device of each stacked row, int64 array of shape (N,)."""
        return _frozen(np.repeat(np.arange(self.n_devices, dtype=np.int64), self.n_samples))

    def __getitem__(self, device: Hashable) -> DeviceData:
        u = self._position(device)
        rows = slice(int(self.starts[u]), int(self.starts[u + 1]))
        return DeviceData(
            self.X[rows],
            None if self.y is None else self.y[rows],
            None if self.offset is None else self.offset[rows],
        )

    def _position(self, device: Hashable) -> int:
        try:
            return self.index[device]
        except (KeyError, TypeError):
            raise UnknownDeviceError(
                f"device {device!r} is not among the {self.n_devices} devices of the federation "
                f"({_listed(self.devices)})"
            ) from None

    def __len__(self) -> int:
        return len(self.devices)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.devices)

    def __contains__(self, device: object) -> bool:
        try:
            return device in self.index
        except TypeError:
            return False

    def __repr__(self) -> str:
        counts = [(self.n_devices, "device"), (len(self.X), "row"), (self.n_features, "feature")]
        inside = ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)
        return f"Federation({inside})"

    # --- making another one -----------------------------------------------------------------------------------

    def take(self, rows: npt.ArrayLike, *, allow_empty: bool = False) -> Federation:
        """The federation restricted to some stacked rows, with all devices in the same order.

        Parameters
        ----------
        rows : bool array of shape (N,), or int array of stacked row numbers
            Rows of a device keep the order of `rows`.
        allow_empty : bool
            Whether a device may be left without rows.

        Examples
        --------
        >>> fed = Federation.from_arrays([[1.0], [2.0], [3.0]], None, ["a", "a", "b"])
        >>> fed.take([True, False, True]).X[:, 0]
        array([1., 3.])
        """
        chosen = _row_numbers(rows, len(self.X))
        codes = self.device_index[chosen]
        chosen = chosen[np.argsort(codes, kind="stable")]
        counts = np.bincount(codes, minlength=self.n_devices)
        if not allow_empty and not counts.all():
            empty = [self.devices[u] for u in np.flatnonzero(counts == 0)]
            raise DataError(
                f"no rows would be left for {_listed(empty)}: keep at least one row of each device, "
                "or say allow_empty=True"
            )
        return self._with_rows(self.devices, counts, chosen)

    def subset(self, devices: Iterable[Hashable]) -> Federation:
        """The federation of some devices, in the order given.

        Parameters
        ----------
        devices : iterable of ids
            Each at most once.

        Examples
        --------
        >>> fed = Federation.from_arrays([[1.0], [2.0], [3.0]], None, ["a", "b", "c"])
        >>> fed.subset(["c", "a"]).devices
        ('c', 'a')
        """
        chosen = list(devices)
        positions = [self._position(device) for device in chosen]
        if not positions:
            raise DataError("a federation needs at least one device, got none")
        kept = _distinct_ids(self.devices[u] for u in positions)
        rows = np.concatenate([np.arange(self.starts[u], self.starts[u + 1]) for u in positions])
        return self._with_rows(kept, self.n_samples[positions], rows)

    def _with_rows(self, devices: tuple[Hashable, ...], counts: IntArray, rows: IntArray) -> Federation:
        return Federation._of(
            devices,
            counts,
            self.X[rows],
            None if self.y is None else self.y[rows],
            None if self.offset is None else self.offset[rows],
            self.row_order[rows],
            self.feature_names,
            self.target_name,
        )

    def split(self, test_size: float = 0.25, seed: int = 0) -> tuple[Federation, Federation]:
        """Cut every device into training and test rows.

        Parameters
        ----------
        test_size : float in (0, 1)
            Device u gives ``round(test_size * n_u)`` rows to the test, and at least one to each side. A device with a
            single row keeps it for training and has no row in the test.
        seed : int
            The cut of a device depends on the seed, its id and its number of rows, not on the other devices.

        Returns
        -------
        train, test : Federation
            Both with all devices in the same order.

        Examples
        --------
        >>> fed = Federation.from_arrays([[float(k)] for k in range(10)], None, ["a"] * 6 + ["b"] * 4)
        >>> train, test = fed.split(test_size=0.5)
        >>> train.n_samples, test.n_samples
        (array([3, 2]), array([3, 2]))
        """
        if not 0 < test_size < 1:
            raise ParameterError(f"test_size must be between 0 and 1, got {test_size!r}")
        ranks = self._shuffled_ranks(seed, "split")
        n = self.n_samples
        held_out = np.where(n >= 2, np.clip(np.rint(test_size * n), 1, np.maximum(n - 1, 1)), 0)
        is_test = ranks < held_out[self.device_index]
        return self.take(~is_test, allow_empty=True), self.take(is_test, allow_empty=True)

    def folds(self, k: int = 5, seed: int = 0) -> IntArray:
        """Fold numbers 0..k-1, cut within each device.

        Parameters
        ----------
        k : int
            Number of folds, from 2 to the number of rows N.
        seed : int
            The order in which the rows of a device are dealt depends on the seed and its id.

        Returns
        -------
        int64 array of shape (N,)
            Fold of each stacked row. Shuffled rows are dealt like cards, device after device: fold sizes differ by at
            most one, within each device and in all, so a device with n_u >= k gives rows to every fold.

        Examples
        --------
        >>> fed = Federation.from_arrays([[float(k)] for k in range(6)], None, ["a"] * 4 + ["b"] * 2)
        >>> sorted(fed.folds(2)[:4].tolist())
        [0, 0, 1, 1]
        """
        if not 2 <= k <= len(self.X):
            raise ParameterError(f"the number of folds must be from 2 to the {len(self.X)} rows, got {k!r}")
        return (self.starts[self.device_index] + self._shuffled_ranks(seed, "folds")) % k

    def _shuffled_ranks(self, seed: int, purpose: str) -> IntArray:
        """For each stacked row its place 0..n_u-1 in a shuffle of its device's rows."""
        shuffles = (
            np.random.default_rng([seed, _stable_hash(purpose, device)]).permutation(n)
            for device, n in zip(self.devices, self.n_samples.tolist(), strict=True)
        )
        return np.concatenate(list(shuffles)).astype(np.int64)

    def with_intercept(self) -> Federation:
        """The federation with a leading column of ones, named ``(intercept)``.

        Examples
        --------
        >>> Federation({"a": [[3.0]]}).with_intercept().X
        array([[1., 3.]])
        """
        if INTERCEPT in self.feature_names:
            raise DataError(f"there is a feature called {INTERCEPT!r} already")
        X = np.column_stack([np.ones(len(self.X)), self.X])
        return self._with_features(X, (INTERCEPT, *self.feature_names))

    def standardized(self) -> tuple[Federation, FloatArray, FloatArray]:
        """The federation with features of mean 0 and standard deviation 1 over the rows of all devices.

        Returns
        -------
        federation : Federation
            With ``(X - mean) / scale``.
        mean : array of shape (q,)
            Pooled means.
        scale : array of shape (q,)
            Pooled standard deviations (divisor N); 1 for constant columns.

        Notes
        -----
        Do it before `with_intercept`: a constant column becomes zero.

        Examples
        --------
        >>> fed, mean, scale = Federation({"a": [[1.0, 5.0]], "b": [[3.0, 5.0]]}).standardized()
        >>> fed.X, mean, scale
        (array([[-1.,  0.],
               [ 1.,  0.]]), array([2., 5.]), array([1., 1.]))
        """
        if len(self.X) == 0:
            raise DataError("the federation has no rows, so there is no mean and no standard deviation")
        constant = self.X.min(axis=0) == self.X.max(axis=0)
        mean = np.where(constant, self.X[0], self.X.mean(axis=0))  # a rounded mean would leave a tiny deviation
        centred = self.X - mean
        scale = np.sqrt(np.mean(centred**2, axis=0))
        scale[scale == 0] = 1.0
        return self._with_features(centred / scale, self.feature_names), mean, scale

    def _with_features(self, X: FloatArray, names: tuple[str, ...]) -> Federation:
        return Federation._of(
            self.devices, self.n_samples, X, self.y, self.offset, self.row_order, names, self.target_name
        )


# --- checks of what came in -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RowNames:
    """How to name a stacked row in a message."""

    devices: tuple[Hashable, ...]
    codes: npt.NDArray[np.integer]
    counts: IntArray | None  # given when rows are counted within devices

    def __call__(self, row: int) -> str:
        u = int(self.codes[row])
        if self.counts is None:
            return f"row {row} (device {self.devices[u]!r})"
        return f"device {self.devices[u]!r}, row {row - int(self.counts[:u].sum())}"


def _frozen(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array


def _listed(names: Iterable[object], most: int = 5) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def _distinct_ids(values: Iterable[object]) -> tuple[Hashable, ...]:
    ids = tuple(device_ids(values))
    seen: set[Hashable] = set()
    for device in ids:
        if device in seen:
            raise DataError(f"device {device!r} is given twice: every device must be named once")
        seen.add(device)
    return ids


def _device_data(device: Hashable, value: Any) -> DeviceData:
    where = f"device {device!r}: "
    if isinstance(value, DeviceData):
        value = (value.X, value.y, value.offset)
    if not isinstance(value, tuple):
        value = (value,)
    if not 1 <= len(value) <= 3:
        raise DataError(f"{where}expected X, (X, y) or (X, y, offset), got a tuple of {len(value)}")
    X, y, offset = (*value, None, None)[:3]
    matrix = _matrix(X, where)
    return DeviceData(
        matrix,
        None if y is None else _target(y, len(matrix), where),
        None if offset is None else _offset(offset, len(matrix), where),
    )


def _matrix(X: Any, where: str) -> FloatArray:
    """X as float64 of shape (n, q); ``where`` says whose it is."""
    if hasattr(X, "toarray"):
        raise DataError(f"{where}X is a sparse matrix, expected a dense array: X.toarray()")
    try:
        raw = np.asarray(X)
    except ValueError:
        raise DataError(f"{where}the rows of X have different lengths, expected an array of shape (n, q)") from None
    if raw.ndim != 2:
        cure = "; for one feature use X.reshape(-1, 1)" if raw.ndim == 1 else ""
        raise DataError(f"{where}X has shape {raw.shape}, expected two dimensions (n, q){cure}")
    if raw.dtype.kind == "c":
        raise DataError(f"{where}X is complex, expected real numbers")
    if raw.dtype.kind not in "biufOUS":
        raise DataError(f"{where}X is not numeric: it has the type {raw.dtype}; turn it into numbers")
    if raw.dtype.kind in "OUS":
        for (row, column), cell in np.ndenumerate(raw.astype(object)):
            if cell is not None and not isinstance(cell, (int, float, np.number, np.bool_)):
                raise DataError(
                    f"{where}X is not numeric: row {row}, column {column} is {cell!r}; "
                    "encode text as numbers, fill gaps"
                )
    return np.array(raw, dtype=np.float64)


def _feature_names(names: Sequence[str] | None, q: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"x{k}" for k in range(q))
    given = tuple(str(name) for name in names)
    if len(given) != q:
        raise DataError(f"{len(given)} feature names for {q} features")
    for name in given:
        if given.count(name) > 1:
            raise DataError(f"feature name {name!r} is given twice")
    return given


def _check_finite(X: FloatArray, names: tuple[str, ...], rows: _RowNames) -> None:
    if np.isfinite(X).all():
        return
    row, column = (int(k) for k in np.argwhere(~np.isfinite(X))[0])
    raise DataError(
        f"{rows(row)}, feature {names[column]!r} is {X[row, column]}: fill or drop such values "
        f"({int((~np.isfinite(X)).any(axis=1).sum())} of {len(X)} rows have one)"
    )


def _vector(values: Any, n: int, name: str, where: str) -> AnyArray:
    try:
        raw = np.asarray(values)
    except ValueError:
        raise DataError(f"{where}{name} has nested values of different lengths, expected {n} values") from None
    if raw.ndim != 1:
        raise DataError(f"{where}{name} has shape {raw.shape}, expected ({n},)")
    if len(raw) != n:
        raise DataError(f"{where}{name} has {len(raw)} values, but X has {n} rows")
    return raw


def _target(y: Any, n: int, where: str) -> AnyArray:
    """y as float64, bool or object (text)."""
    raw = _vector(y, n, "y", where)
    if raw.dtype.kind == "c":
        raise DataError(f"{where}y is complex, expected numbers or class labels")
    if not isinstance(y, np.ndarray) and raw.dtype.kind == "U":
        raw = np.fromiter(y, dtype=object, count=n)  # [1, "a"] must not become ["1", "a"]
    column = as_column(raw)
    if column.dtype.kind == "O":
        kinds = {type(cell).__name__ for cell in column if cell is not None}
        if kinds == {"int"}:  # beyond 2**53
            return column.astype(np.float64)
        if len(kinds) > 1:
            raise DataError(f"{where}y mixes {' and '.join(sorted(kinds))}: use labels of one type")
    return column


def _offset(offset: Any, n: int, where: str) -> FloatArray:
    column = as_column(_vector(offset, n, "offset", where))
    if column.dtype.kind not in "fb":
        raise DataError(f"{where}offset is not numeric, expected {n} numbers")
    return column.astype(np.float64)


def _check_labels(values: AnyArray, name: str, rows: _RowNames) -> None:
    """No missing or infinite value in a target or offset."""
    if values.dtype.kind == "O":
        bad = np.fromiter((cell is None for cell in values), dtype=bool, count=len(values))
    else:
        bad = ~np.isfinite(values)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise DataError(
            f"{rows(row)}: the {name} is {values[row]}; fill or drop such rows ({int(bad.sum())} of {len(values)})"
        )


def _all_or_none(devices: tuple[Hashable, ...], parts: list[Any], name: str) -> bool:
    absent = [device for device, part in zip(devices, parts, strict=True) if part is None]
    if absent and len(absent) < len(devices):
        raise DataError(f"{_listed(absent)} came without {name}, other devices with one: give it to all or to none")
    return not absent


def _stacked_targets(devices: tuple[Hashable, ...], parts: list[AnyArray | None], rows: _RowNames) -> AnyArray | None:
    if not _all_or_none(devices, parts, "y"):
        return None
    words = {"f": "numbers", "b": "truth values", "O": "labels"}
    kinds = [words[part.dtype.kind] for part in parts if part is not None]
    for device, kind in zip(devices, kinds, strict=True):
        if kind != kinds[0]:
            raise DataError(
                f"y of device {device!r} is made of {kind}, but that of device {devices[0]!r} of {kinds[0]}: "
                "use one type for all devices"
            )
    stacked: AnyArray = np.concatenate([part for part in parts if part is not None])
    _check_labels(stacked, "target", rows)
    return stacked


def _stacked_offsets(
    devices: tuple[Hashable, ...], parts: list[FloatArray | None], rows: _RowNames
) -> FloatArray | None:
    if not _all_or_none(devices, parts, "offset"):
        return None
    stacked = np.concatenate([part for part in parts if part is not None])
    _check_labels(stacked, "offset", rows)
    return stacked


def _grouped(device: Any) -> tuple[tuple[Hashable, ...], IntArray]:
    """Device ids in order of first appearance, and the number of the device of each row."""
    if isinstance(device, (str, bytes)) or not isinstance(device, Iterable):
        raise DataError(f"device must hold one id per row, got {device!r}")
    device = unwrapped(device)
    if isinstance(device, np.ndarray):
        if device.ndim != 1:
            raise DataError(f"device has shape {device.shape}, expected one id per row")
        if device.dtype.kind in "biufUS":
            values, first, codes = np.unique(device, return_index=True, return_inverse=True)
            by_appearance = np.argsort(first)
            number = np.empty(len(values), dtype=np.int64)
            number[by_appearance] = np.arange(len(values))
            return tuple(device_ids(values[by_appearance])), number[codes]
    numbers: dict[Hashable, int] = {}
    row_codes = [numbers.setdefault(value, len(numbers)) for value in device_ids(device)]
    return tuple(numbers), np.array(row_codes, dtype=np.int64)


def _row_numbers(rows: npt.ArrayLike, n: int) -> IntArray:
    chosen = np.asarray(rows)
    if chosen.size == 0 and chosen.dtype.kind == "f":  # np.asarray([])
        chosen = chosen.astype(np.int64)
    if chosen.ndim != 1 or chosen.dtype.kind not in "biu":
        raise DataError(
            f"rows must be a bool array of shape ({n},) or an array of row numbers, got {chosen.dtype} {chosen.shape}"
        )
    if chosen.dtype.kind == "b":
        if len(chosen) != n:
            raise DataError(f"the mask has {len(chosen)} values, but the federation has {n} rows")
        return np.flatnonzero(chosen).astype(np.int64)
    outside = (chosen < 0) | (chosen >= n)
    if outside.any():
        raise DataError(f"row {int(chosen[outside][0])} is outside 0..{n - 1}")
    return chosen.astype(np.int64)


def _stable_hash(purpose: str, device: Hashable) -> int:
    """The same in every process, unlike hash()."""
    text = f"{purpose}:{type(device).__name__}:{device!r}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


# --- columns and files ----------------------------------------------------------------------------------------


def _chosen_features(
    columns: Columns, device: str, target: str | None, features: Sequence[str] | None, offset: str | None
) -> list[str]:
    roles = {"device": device, "target": target, "offset": offset}
    taken: dict[str, str] = {}
    for role, name in roles.items():
        if name is None:
            continue
        _check_present(columns, name, role)
        if name in taken:
            raise DataError(f"column {name!r} cannot be both {taken[name]} and {role}")
        taken[name] = role
    if features is None:
        rest = [name for name in columns if name not in taken]
        text = [name for name in rest if columns[name].dtype.kind == "O"]
        if text:
            raise DataError(
                f"not numeric: {_listed(text)}; say which columns to use with features=, or encode them as numbers"
            )
        if "" in rest:
            raise DataError(
                "a column has no name (row numbers that were written along?): remove it, or say which columns to use "
                "with features="
            )
        if not rest:
            raise DataError(f"no column is left for the features beside {_listed(taken)}")
        return rest
    chosen = [features] if isinstance(features, str) else list(features)
    for name in chosen:
        _check_present(columns, name, "feature")
        if name in taken:
            raise DataError(f"column {name!r} cannot be both {taken[name]} and a feature")
        if chosen.count(name) > 1:
            raise DataError(f"feature {name!r} is given twice")
    return chosen


def _check_present(columns: Columns, name: str, role: str) -> None:
    if name not in columns:
        raise DataError(f"there is no column {name!r} for the {role}; the table has {_listed(columns, most=20)}")


def _directory_columns(
    folder: Path, device: str | None, target: str | None, features: Sequence[str] | None, offset: str | None
) -> tuple[Columns, str]:
    """The files of a directory as one table, and the name of its device column."""
    suffixes = CSV_SUFFIXES + PARQUET_SUFFIXES
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix.lower() in suffixes and not file.name.startswith(".")
    )
    if not files:
        raise DataError(f"the directory {folder} has no file that ends in {', '.join(suffixes)}")
    tables = [read_columns(file) for file in files]
    wanted = set(tables[0]) if features is None else {device, target, offset, *features} - {None}
    for file, table in zip(files, tables, strict=True):
        different = wanted.symmetric_difference(table) if features is None else wanted.difference(table)
        if different:
            missing = [name for name in different if name not in table]
            extra = [name for name in different if name in table]
            raise DataError(
                f"{file}: "
                + "; ".join(
                    part
                    for part in (
                        f"there is no column {_listed(missing)}" if missing else "",
                        f"there is a column {_listed(extra)} that {files[0].name} does not have" if extra else "",
                    )
                    if part
                )
            )
    stacked = {name: _stacked_column(name, files, tables) for name in tables[0] if name in wanted}
    if device is not None:
        return stacked, device
    stems = [file.stem for file in files]
    for file, table in zip(files, tables, strict=True):
        if stems.count(file.stem) > 1:
            raise DataError(f"{file}: another file of the directory also stands for device {file.stem!r}")
        if all(len(column) == 0 for column in table.values()):
            raise DataError(f"{file}: device {file.stem!r} has no rows; remove the file or give it data")
    lengths = [len(next(iter(table.values()))) for table in tables]
    ids = np.repeat(np.array(stems, dtype=object), lengths)
    name = "(file)"
    return {name: ids, **stacked}, name


def _stacked_column(name: str, files: list[Path], tables: list[Columns]) -> AnyArray:
    parts = [table[name] for table in tables]
    if any(part.dtype.kind == "O" for part in parts):
        for k, (file, part) in enumerate(zip(files, parts, strict=True)):
            if part.dtype.kind == "O":
                continue
            if part.dtype.kind == "f" and np.isnan(part).all():  # an empty column has no type of its own
                parts[k] = np.full(len(part), None, dtype=object)
                continue
            other = next(f for f, p in zip(files, parts, strict=True) if p.dtype.kind == "O")
            raise DataError(f"{file}: column {name!r} is numeric, but text in {other.name}: write it in one way")
    return np.concatenate(parts)
