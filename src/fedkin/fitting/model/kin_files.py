"""What a model directory keeps of a `Kin`: words and single numbers in JSON, arrays in NumPy's open format.

``kin.json`` can be read by anything; ``kin.npz`` is a zip of ``.npy`` files, which hold numbers and their shape and
nothing that could run. Both come back to the bit.
"""

from __future__ import annotations

import io
import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fedkin.fitting.model.files import KIN_ARRAYS_FILE, KIN_FILE, damaged, json_text
from fedkin.kin import Diagnostics, Kin, Learned, Pairs, States, Units
from fedkin.losses import Loss

#: Arrays of a `Kin` by attribute, and what is in JSON.
_ARRAYS = (
    "n_samples",
    "mean",
    "mean_covariance",
    "sd",
    "theta",
    "covariance",
    "noise",
    "n_groups",
    "groups",
)
_WORDS = ("names", "resolved", "weight_mixed", "graph_use", "rates", "sure")
_LEARNED_ARRAYS = (
    "mean",
    "mean_covariance",
    "variance",
    "precision",
    "score",
    "F",
    "scales",
    "one_mean",
    "one_covariance",
)
_LEARNED_WORDS = ("noise", "weight", "one", "whole")


def kin_files(kin: Kin) -> dict[str, str | bytes]:
    """The files of a result {name: content}."""
    learned, found = kin.learned, kin.diagnostics
    arrays = {name: getattr(kin, name) for name in _ARRAYS}
    if isinstance(kin.probability, Pairs):
        arrays |= {
            f"probability.{item.name}": np.asarray(getattr(kin.probability, item.name)) for item in fields(Pairs)
        }
    else:
        arrays["probability"] = kin.probability
    arrays |= {f"learned.{name}": getattr(learned, name) for name in _LEARNED_ARRAYS}
    arrays |= {"learned.units.A": learned.units.A, "learned.units.shift": learned.units.shift}
    if learned.states is not None:
        arrays |= {f"learned.states.{item.name}": getattr(learned.states, item.name) for item in fields(States)}
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **arrays)
    words = {name: getattr(kin, name) for name in _WORDS}
    words["learned"] = {name: getattr(learned, name) for name in _LEARNED_WORDS} | {"target": learned.units.target}
    words["diagnostics"] = found
    return {KIN_FILE: json_text(words, indent=2), KIN_ARRAYS_FILE: packed.getvalue()}


@dataclass(frozen=True, eq=False)
class StoredKin:
    """The files of a `Kin`, checked to be as they were written; `kin` reads them when it is asked for."""

    folder: Path
    words: str
    arrays: bytes
    sites: tuple[Hashable, ...]
    loss: Loss

    @cached_property
    def kin(self) -> Kin:
        """The result."""
        try:
            words: Mapping[str, Any] = json.loads(self.words)
            with np.load(io.BytesIO(self.arrays), allow_pickle=False) as packed:
                arrays = {name: packed[name] for name in packed.files}
            return _assembled(words, arrays, self.sites, self.loss)
        except (KeyError, TypeError, ValueError, BadZipFile) as error:
            damaged(self.folder / KIN_FILE, f"it does not go with {KIN_ARRAYS_FILE} ({error})")


class KinField:
    """The attribute ``kin`` of a model: it takes a `Kin` or the files that hold one, and gives a `Kin`."""

    def __get__(self, model: object, owner: object = None) -> Kin | None:
        held = None if model is None else vars(model).get("_kin")
        return held.kin if isinstance(held, StoredKin) else held

    def __set__(self, model: object, value: Kin | StoredKin | None) -> None:
        vars(model)["_kin"] = value


def _assembled(words: Mapping[str, Any], arrays: Mapping[str, Any], sites: tuple[Hashable, ...], loss: Loss) -> Kin:
    learned, found, rates = words["learned"], words["diagnostics"], words["rates"]
    states = [f"learned.states.{item.name}" for item in fields(States)]
    rest = {name: words[name] for name in ("resolved", "weight_mixed", "graph_use")}
    return Kin(
        sites=sites,
        names=tuple(words["names"]),
        loss=loss,
        rates=None if rates is None else (rates[0], rates[1]),
        sure={name: float(value) for name, value in words["sure"].items()},
        diagnostics=None
        if found is None
        else Diagnostics(
            np.array(found["weights"]),
            tuple(found["starts"]),
            found["draws"],
            *({name: float(value) for name, value in found[part].items()} for part in ("rhat", "size")),
        ),
        learned=Learned(
            units=Units(arrays["learned.units.A"], arrays["learned.units.shift"], learned["target"]),
            **{name: learned[name] for name in _LEARNED_WORDS},
            **{name: arrays[f"learned.{name}"] for name in _LEARNED_ARRAYS},
            states=States(*(arrays[name] for name in states)) if states[0] in arrays else None,
        ),
        probability=arrays["probability"]
        if "probability" in arrays
        else Pairs(arrays["probability.labels"], arrays["probability.chance"], float(arrays["probability.base"])),
        **{name: arrays[name] for name in _ARRAYS},
        **rest,
    )
