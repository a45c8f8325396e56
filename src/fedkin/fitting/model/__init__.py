"""The fitted model: what every way of fitting returns, what it can be asked, and its directory of open files.

In: parameters per site (`model_from_theta`), models of single sites (`join_parts`), or a directory (`load`).
Out: a `FittedModel` in the units of the user's columns: `model`, with `kin_answers` for what only kin can answer,
`units` for the way from standardised columns to the user's, and `new_rows` for the rows it predicts.
To change what a model directory holds, files in this order:
1. `fitting/model/model`: a field of `FittedModel` with a default. A text, number or truth value that is never None is
   also named in `STORED`, and is then written to ``model.json`` and read; other entries go into
   `FittedModel._description`. What is about other sites is left out of a site's part in `FittedModel.part`. What
   `STORED` names must be there: models saved before are refused, so raise `FORMAT_VERSION` in `fitting/model/files`. An
   entry of `_description` may be missing, if `loading` reads it with ``meta.get``.
2. `fitting/model/files`: a new file. One that holds a mapping of plain values and may be missing is an entry of
   `OPTIONAL_FILES`, and no more; any other is made here (of kin in `fitting/model/kin_files`), named in `_MORE_FILES`
   and written by `FittedModel.save`.
3. `fitting/model/loading`: reads what is not in `STORED` or `OPTIONAL_FILES`.
4. Whoever knows the value passes it on: of fits `fitting/ways/federation` (`fused_model`), `fitting/ways/kin`
   (`model_of_kin`) and `fitting/ways/summaries` (`_model`), of rounds `cli/shared/contracts` (`**more`, from
   `cli/site_run`); of a command the modules of `cli/models`, by `replace`; `fitting/model/units`
   hands it to the model. A value of single sites: `FittedModel.part` picks it, `fitting/model/parts` joins it, and
   `join` in `fitting/model/kin_answers` replaces it (the model of a new site begins as the part of the first site).
5. `federate/messages`: admits names of files that travel, unless they are like ``a_b.json``, ``.csv``, ``.npz``.
6. docs/file-formats.md. ``tests/test_model.py`` lists files, fields and the version: `test_files_are_open`,
   `assert_same`, `test_other_versions_and_missing_models`.
Imports: `kin`, `core` and below; nothing else of `fitting`.
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
