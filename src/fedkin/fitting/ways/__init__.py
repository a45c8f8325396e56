"""Ways to fit: from rows or from the summaries of sites, by kin or by the fused estimator.

In: a `Federation` (`fit_federation`) or `Summaries` (`fit_summaries`, message by message: `SummaryFit`), and
`FitOptions`, whose ``chosen`` says which estimator. Out: a `FittedModel`.
`federation` and `summaries` hold the fused estimator, `levels` its choice of ``lam``, `kin` the call of `find_kin`;
`after_kin` gives the fused estimator what kin found;
`asks` says what sites are asked in the next message, `history` how the fit came about, `naive` intervals of fused fits.
To add a way to fit: a module here, a word in `fedkin.fitting.options`, and a branch in `federation` and `summaries`.
Imports: `fitting.preparation`, `fitting.options`, `fitting.model`, and the rooms below `fitting`.
"""

from __future__ import annotations

from fedkin.fitting.ways.after_kin import fit_after_kin
from fedkin.fitting.ways.asks import Asks
from fedkin.fitting.ways.federation import fit_federation, fit_prepared, silent
from fedkin.fitting.ways.files import fit_files
from fedkin.fitting.ways.history import data_record, with_history
from fedkin.fitting.ways.kin import with_covariates
from fedkin.fitting.ways.naive import naive_confint
from fedkin.fitting.ways.summaries import SummaryFit, fit_summaries

__all__ = [
    "Asks",
    "SummaryFit",
    "data_record",
    "fit_after_kin",
    "fit_federation",
    "fit_files",
    "fit_prepared",
    "fit_summaries",
    "naive_confint",
    "silent",
    "with_covariates",
    "with_history",
]
