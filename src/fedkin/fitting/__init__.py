"""One fit from rows to a model, the same for Python, scikit-learn and the command line.

In: a `Federation` or the `Summaries` of its sites, a `Graph` or none, and `FitOptions`, the only place where options,
defaults and checks live.
On the way: `prepare_fit` encodes classes, adds the intercept and, for the fused estimator only, standardises (kin keeps
the user's units); then `find_kin` finds who is alike, or, for the fused estimator, edges are selected, ``lam`` is
chosen and the problem is solved, with a light ridge where it would have no minimiser.
Out: a `FittedModel` in the units of the user's columns, with its directory of open files (`model_from_theta` makes one
of parameters that were found elsewhere, on rows that a `Schema` prepared; `join_parts` one of the models of sites); a
`Comparison` with simpler models, tuned, on held-out rows.

| sub-room | what it does |
|---|---|
| `model` | the model, its directory of files, and what it can be asked |
| `ways` | the fit: from rows or from summaries, by kin or by the fused estimator |
| `comparison` | what the fit is worth beside simpler models |
| `estimators` | the scikit-learn face |

Between them: `options` (one type for all options), `preparation` (from the user's rows to those of the fit), and
`progress` (a bar for long fits).
To add an option of a fit: `options` (and its `SHARED`, if kin takes it too), and the constructors in `estimators`. The
command line reads it there; its place in ``--help`` is in `cli/shared/options`. To change what a model directory holds:
`model`. To add a baseline or a metric: `comparison`.

`fedkin.fitting.estimators` and `fedkin.fitting.progress` are imported by name, since they need scikit-learn and rich.
Imports: `admm`, `kin`, `solvers`, `core` and below.
"""

from __future__ import annotations

from fedkin.fitting.comparison import REPEATS, Comparison, FoldComparison, baseline_models, compare, compare_folds
from fedkin.fitting.model import (
    FittedModel,
    NewSite,
    check_model_place,
    join_parts,
    load,
    model_from_theta,
    near_groups,
    position_of,
)
from fedkin.fitting.options import DEFAULTS, DESCRIPTIONS, SHARED, FitOptions, choices
from fedkin.fitting.preparation import Prepared, prepare
from fedkin.fitting.ways import (
    Asks,
    SummaryFit,
    data_record,
    fit_after_kin,
    fit_federation,
    fit_files,
    fit_summaries,
    naive_confint,
    with_covariates,
    with_history,
)

__all__ = [
    "DEFAULTS",
    "DESCRIPTIONS",
    "REPEATS",
    "SHARED",
    "Asks",
    "Comparison",
    "FitOptions",
    "FittedModel",
    "FoldComparison",
    "NewSite",
    "Prepared",
    "SummaryFit",
    "baseline_models",
    "check_model_place",
    "choices",
    "compare",
    "compare_folds",
    "data_record",
    "fit_after_kin",
    "fit_federation",
    "fit_files",
    "fit_summaries",
    "join_parts",
    "load",
    "model_from_theta",
    "naive_confint",
    "near_groups",
    "position_of",
    "prepare",
    "with_covariates",
    "with_history",
]
