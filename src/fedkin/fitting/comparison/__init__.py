"""What a fit is worth: Fedkin beside simpler models, all tuned, on rows that none of them has seen.

In: a `Federation`, cut into train and test rows several times (`compare`), or the summaries of folds that sites have
sent (`compare_folds`). Out: a `Comparison` or a `FoldComparison`, with a verdict in one sentence (`verdict`).
`baselines` fits the simpler models, along `ridge_paths` and `smooth_paths`; `metrics` scores.
To add a baseline: `baselines`. To add a metric: `metrics`.
Imports: `fitting.ways` and what it stands on.
"""

from __future__ import annotations

from fedkin.fitting.comparison.baselines import baseline_models
from fedkin.fitting.comparison.comparison import REPEATS, Comparison, compare
from fedkin.fitting.comparison.folds import FoldComparison, compare_folds

__all__ = ["REPEATS", "Comparison", "FoldComparison", "baseline_models", "compare", "compare_folds"]
