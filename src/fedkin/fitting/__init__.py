"""One fit from rows to a model, the same for Python, scikit-learn and the command line.

In: a `Federation` or the `Summaries` of its sites, a `Graph` or none, and `FitOptions`, the only place where options,
defaults and checks live.
On the way: `prepare` encodes classes, adds the intercept, standardises; then `find_kin` finds who is alike, or, for the
fused estimator, edges are selected, ``lam`` is chosen and the problem is solved, with a light ridge where it would have
no minimiser.
Out: a `FittedModel` in the units of the user's columns, with its directory of open files (`model_from_theta` makes one
of parameters that were found elsewhere, on rows that a `Schema` prepared; `join_parts` one of the models of sites); a
`Comparison` with simpler models, tuned, on held-out rows.

| modules | what they do |
|---|---|
| `options`, `preparation`, `fitting`, `kin`, `messages`, `asks`, `units` | the fit: from rows, or from summaries |
| `model`, `model_files`, `kin_files`, `loading`, `history`, `parts` | the model and its files |
| `new_rows`, `kin_answers`, `naive` | what it can be asked |
| `comparison`, `fold_comparison`, `baselines`, `ridge_paths`, `smooth_paths`, `metrics`, `progress` | the comparison |
| `estimators`, `kin_estimators`, `per_device`, `scoring` | the scikit-learn face |

`fedkin.fitting.estimators`, `fedkin.fitting.kin_estimators` and `fedkin.fitting.scoring` are imported by name, since
they need scikit-learn. Imports: `admm`, `kin`, `solvers`, `stats` and below.
"""

from __future__ import annotations

from fedkin.fitting.asks import Asks
from fedkin.fitting.baselines import baseline_models
from fedkin.fitting.comparison import REPEATS, Comparison, compare
from fedkin.fitting.fitting import fit_federation
from fedkin.fitting.fold_comparison import FoldComparison, compare_folds
from fedkin.fitting.history import data_record, with_history
from fedkin.fitting.kin_answers import NewSite
from fedkin.fitting.loading import load
from fedkin.fitting.messages import SummaryFit, fit_summaries
from fedkin.fitting.model import FittedModel
from fedkin.fitting.model_files import check_model_place
from fedkin.fitting.naive import naive_confint
from fedkin.fitting.options import DEFAULTS, DESCRIPTIONS, SHARED, FitOptions, choices
from fedkin.fitting.parts import join_parts, near_groups
from fedkin.fitting.preparation import Prepared, prepare
from fedkin.fitting.units import model_from_theta

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
    "fit_federation",
    "fit_summaries",
    "join_parts",
    "load",
    "model_from_theta",
    "naive_confint",
    "near_groups",
    "prepare",
    "with_history",
]
