"""What leaves a device when ``lam`` is chosen: its held-out losses, if its owner shares them; and the choice itself.

The rule is that of `fedkin.cross_validate_lam`: the level with the smallest held-out mean loss, each device weighted
alike, or the largest one within one standard error of it. For the first, one number per level leaves a device (the mean
over its folds) and the number of its folds that hold rows; for the second, one number per level and fold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, write_file
from fedkin.errors import DataError
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.setup.directory import DEVICES, why_not_shared
from fedkin.solvers import best_level, mean_and_error

CURVE = "tuning.json"
#: Levels of different components closer than this share of themselves are the same.
SAME_LEVEL = 1e-9


@dataclass(frozen=True, eq=False)
class Curve:
    """Held-out losses of one device at levels ``lams (m,)``, which decrease.

    A device without neighbours has none. ``mean (m,)`` is over the ``folds`` in which it has rows, nan where it has
    none to hold out; ``by_fold (folds, m)`` has each fold apart, nan where it has no rows.
    """

    lams: Array
    mean: Array
    folds: int
    by_fold: Array | None = None


@dataclass(frozen=True, eq=False)
class Choice:
    """The level that was chosen, and what for: held-out ``mean (m,)`` losses at decreasing levels ``lams (m,)``.

    ``error (m,)`` are standard errors over folds, where folds were shared; ``devices`` is how many curves were used,
    ``reasons`` say by position why the others were not.
    """

    lam: float
    lams: Array
    mean: Array
    error: Array | None
    devices: int
    reasons: Mapping[int, str]

    @property
    def at_the_end(self) -> bool:
        """Whether the best level is the first or last of several."""
        return self.lams.size > 1 and self.lam in (self.lams[0], self.lams[-1])


def write_curve(place: Path, run: bytes, lams: Array, losses: Array, *, by_fold: bool) -> None:
    """Write exactly what may leave the device, readable by its owner only; each fold apart if ``by_fold``.

    ``losses (folds, m)`` are nan where a fold has no rows; ``run`` is from `TuneSettings.run_bytes`.
    """
    held = np.asarray(~np.isnan(losses).any(axis=1))
    content: dict[str, Any] = {"run": run.hex(), "lams": lams.tolist(), "folds": int(held.sum())}
    if by_fold:
        content["by_fold"] = [line.tolist() if here else None for line, here in zip(losses, held, strict=True)]
    else:
        content["curve"] = losses[held].mean(axis=0).tolist() if held.any() else None
    write_file(place / CURVE, json.dumps(content, indent=1) + "\n", private=True)


def read_curve(place: Path, run: bytes, *, by_fold: bool) -> Curve | None:
    """The curve in a device's directory; None when there is none of this tuning."""
    try:
        content = json.loads((place / CURVE).read_bytes())
        if content["run"] != run.hex() or ("by_fold" in content) != by_fold:
            return None
        lams = np.array(content["lams"], dtype=np.float64)
        folds = int(content["folds"])
        if by_fold:
            empty = [np.nan] * lams.size
            each = np.array([empty if line is None else line for line in content["by_fold"]], dtype=np.float64)
            each = each.reshape(-1, lams.size)
            mean = each[~np.isnan(each).any(axis=1)].mean(axis=0) if folds else np.full(lams.size, np.nan)
            curve = Curve(lams, mean, folds, each)
        else:
            given = content["curve"]
            curve = Curve(lams, np.full(lams.size, np.nan) if given is None else np.array(given, dtype=float), folds)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{place / CURVE} cannot be read: {error!r}; remove it and tune again") from None
    if curve.mean.shape != lams.shape or (folds and not np.isfinite(curve.mean).all()):
        raise DataError(f"{place / CURVE} does not hold a number for each level; remove it and tune again")
    return curve


def shared_curves(
    directory: Path, manifest: Manifest, run: bytes, *, by_fold: bool
) -> tuple[dict[int, Curve], dict[int, str]]:
    """Curves that owners share, by position, and for the other devices why there is none."""
    found: dict[int, Curve] = {}
    reasons: dict[int, str] = {}
    for position, member in enumerate(manifest.members):
        place = directory / DEVICES / member.name
        if (refused := why_not_shared(place, "its curve")) is not None:
            reasons[position] = refused
            continue
        curve = read_curve(place, run, by_fold=by_fold)
        if curve is None:
            reasons[position] = "it has not finished"
        else:
            found[position] = curve
    return found, reasons


def choose(curves: Mapping[int, Curve], reasons: Mapping[int, str], *, one_se: bool) -> Choice:
    """Add up the curves and choose a level.

    Levels above a device's grid count like its largest one: there its component is fused. Levels below the grid of
    any device are left out.
    """
    linked = [curve for _, curve in sorted(curves.items()) if curve.lams.size and curve.folds]
    if not linked:
        raise DataError('no device shares a curve: an owner does by "share_result": true in device.json')
    lowest = max(float(curve.lams[-1]) for curve in linked)
    levels = sorted({float(lam) for curve in linked for lam in curve.lams}, reverse=True)
    lams = np.array(
        [
            lam
            for k, lam in enumerate(levels)
            if lam >= lowest * (1.0 - SAME_LEVEL) and (k == 0 or lam < levels[k - 1] * (1.0 - SAME_LEVEL))
        ]
    )
    columns = [_columns(curve.lams, lams) for curve in linked]
    error = None
    if one_se:
        each = np.stack([curve.by_fold[:, at] for curve, at in zip(linked, columns, strict=True)])  # type: ignore[index]
        there = ~np.isnan(each).any(axis=2)
        scores = np.stack([each[there[:, f], f].mean(axis=0) for f in range(each.shape[1]) if there[:, f].any()])
        mean, error = mean_and_error(scores)
    else:
        weight = np.array([curve.folds for curve in linked], dtype=np.float64)
        values = np.stack([curve.mean[at] for curve, at in zip(linked, columns, strict=True)])
        mean = np.asarray((weight[:, None] * values).sum(axis=0) / weight.sum())
    return Choice(float(lams[best_level(mean, error)]), lams, mean, error, len(curves), dict(reasons))


def _columns(own: Array, lams: Array) -> NDArray[np.int64]:
    """For each level the column of a device's curve: its nearest own level, which is its largest above its grid."""
    return np.asarray(np.abs(np.log(own)[None, :] - np.log(lams)[:, None]).argmin(axis=1), dtype=np.int64)
