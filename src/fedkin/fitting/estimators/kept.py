"""What an estimator keeps of the rows that it has seen, so that more can come: the rows, or sums of least squares."""

from __future__ import annotations

from collections.abc import Hashable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin._base import Array
from fedkin.core import RunningSums, Summaries
from fedkin.data import Federation
from fedkin.errors import DataError
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Prepared, prepare_fit


@dataclass(frozen=True, eq=False)
class KeptSums:
    """Sums of least squares over all rows so far, of features less ``shift (q,)``."""

    sums: RunningSums
    shift: Array
    names: tuple[str, ...]
    has_offset: bool

    @classmethod
    def of(cls, federation: Federation, options: FitOptions) -> KeptSums:
        """The sums of a federation."""
        # without an intercept a shift of the features would be another model
        centred = options.fit_intercept
        shift = np.average(federation.X, axis=0, weights=federation.weight) if centred else 0 * federation.X[0]
        empty = RunningSums(federation.n_features, _folds(options))
        return cls(empty, shift, federation.feature_names, federation.offset is not None).with_rows(federation)

    def with_rows(self, more: Federation) -> KeptSums:
        """The sums with more rows."""
        sums = deepcopy(self.sums)
        came = np.argsort(more.row_order)  # in the order in which the rows came
        assert more.y is not None
        y = more.y if more.offset is None else more.y - more.offset
        ids: list[Hashable] = [more.sites[u] for u in more.site_index[came].tolist()]
        sums.add(ids, more.X[came] - self.shift, y[came], None if more.weight is None else more.weight[came])
        return replace(self, sums=sums)

    @property
    def sites(self) -> tuple[Hashable, ...]:
        return self.sums.sites

    def prepared(self, options: FitOptions) -> Prepared:
        """The sums as ``options`` want them fitted."""
        summaries = self.sums.summaries(self.names, intercept=options.fit_intercept, seed=options.seed)
        made = prepare_fit(summaries, options)
        assert isinstance(made.federation, Summaries)
        offset = "offset" if self.has_offset else None
        return replace(made, units=replace(made.units, mean=made.units.mean + self.shift, offset_name=offset))


@dataclass(frozen=True, eq=False)
class KeptRows:
    """All rows so far."""

    rows: Federation

    def with_rows(self, more: Federation) -> KeptRows:
        """The rows of both, as if they had come in one table: the earlier ones first."""
        parts: dict[str, Any] = {}
        for name in ("X", "y", "offset", "weight"):
            first, second = getattr(self.rows, name), getattr(more, name)
            if name == "weight" and (first is None) != (second is None):
                first = np.ones(len(self.rows.X)) if first is None else first
                second = np.ones(len(more.X)) if second is None else second
            # in the order in which the rows came
            both = () if first is None else (_unstacked(self.rows, first), _unstacked(more, second))
            parts[name] = np.concatenate(both) if both else None
        ids = [one.sites[u] for one in (self.rows, more) for u in _unstacked(one, one.site_index).tolist()]
        features = parts.pop("X"), parts.pop("y")
        return KeptRows(Federation.from_arrays(*features, ids, **parts, feature_names=self.rows.feature_names))

    @property
    def sites(self) -> tuple[Hashable, ...]:
        return self.rows.sites

    @property
    def has_offset(self) -> bool:
        return self.rows.offset is not None

    def prepared(self, options: FitOptions) -> Prepared:
        """The rows as ``options`` want them fitted."""
        return prepare_fit(self.rows, options)


def kept_of(federation: Federation, options: FitOptions, *, quadratic: bool) -> KeptSums | KeptRows:
    """What to keep of a fit: sums where they say everything and take less room than the rows."""
    if not quadratic or options.solver != "exact":
        return KeptRows(federation)
    width = federation.n_features + 2
    if len(federation.X) <= federation.n_sites * _folds(options) * width:
        return KeptRows(federation)
    return KeptSums.of(federation, options)


def _folds(options: FitOptions) -> int:
    """Folds by which sums are kept apart; kin chooses nothing."""
    return options.cv_folds if options.chosen == "fused" else 1


def _unstacked(federation: Federation, stacked: NDArray[Any]) -> NDArray[Any]:
    """Values in the order in which the rows came."""
    return stacked[np.argsort(federation.row_order)]


def weighted(federation: Federation, sample_weight: ArrayLike) -> Federation:
    """The federation with weights, which are in the order in which rows came, and without rows of weight 0."""
    weight, n = np.asarray(sample_weight, dtype=np.float64), len(federation.X)
    if weight.shape != (n,):
        raise DataError(f"sample_weight has shape {weight.shape}, expected one number per row: ({n},)")
    wrong = np.flatnonzero(~(np.isfinite(weight) & (weight >= 0)))
    if wrong.size:
        raise DataError(f"row {wrong[0]}: the sample_weight is {weight[wrong[0]]:g}, expected a number of at least 0")
    weight = weight[federation.row_order]
    if not weight.any():
        raise DataError("sample_weight is zero in every row, so no row is left: give some of them a weight")
    if not weight.all():
        federation = federation.take(weight > 0, allow_empty=True)
        federation = federation.subset([u for u, n in zip(federation.sites, federation.n_samples, strict=True) if n])
        weight = weight[weight > 0]
    return federation.replaced(weight=weight)
