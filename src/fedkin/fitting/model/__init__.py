"""The fitted model: what every way of fitting returns, what it can be asked, and its directory of open files.

In: parameters per site (`model_from_theta`), models of single sites (`join_parts`), or a directory (`load`).
Out: a `FittedModel` in the units of the user's columns: `model`, with `kin_answers` for what only kin can answer,
`units` for the way from standardised columns to the user's, and `new_rows` for the rows it predicts.
To add an entry to ``model.json``: a field of `FittedModel`, in `model.STORED` if it is a plain value, else in
`FittedModel._description` and in `loading`; `units` sets it, and `parts` joins it if sites differ in it. To add a file:
one of plain values that may be missing is an entry of `files.OPTIONAL_FILES`, and no more; any other is written by
`FittedModel.save` (made in `files`, of kin in `kin_files`), named in `files._MORE_FILES` and read by `loading`. Names
like ``a_b.json``, ``.csv`` and ``.npz`` may travel; others must be admitted in `federate/sharing/models`. What is about
other sites must not be in a site's part: `FittedModel.part`. docs/file-formats.md describes all of them.
Imports: `kin`, `objective` and below; nothing else of `fitting`.
"""

from __future__ import annotations

from fedkin.fitting.model.files import check_model_place
from fedkin.fitting.model.kin_answers import NewSite
from fedkin.fitting.model.loading import load
from fedkin.fitting.model.model import FittedModel
from fedkin.fitting.model.new_rows import class_numbers, position_of
from fedkin.fitting.model.parts import join_parts, near_groups
from fedkin.fitting.model.units import ColumnUnits, model_from_theta

__all__ = [
    "ColumnUnits",
    "FittedModel",
    "NewSite",
    "check_model_place",
    "class_numbers",
    "join_parts",
    "load",
    "model_from_theta",
    "near_groups",
    "position_of",
]
