"""`Kin`: what was found about the sites, and what can be asked of it.

In: what the mixed model and the sampler found (`kin_of`). Out: a `Kin` of plain arrays (what it has `learned`), with
intervals, contrasts and predictions (`inference`, by way of `combine`), a summary in `text`, and models for new sites
(`join`).
To add a question that a fit can answer: a method in `inference`.
Imports: `kin.mixed`, `kin.display`, `kin.sources`, `kin.diagnostics` and below; not the sampler (but for types), so
that saved results need no compiler.
"""

from __future__ import annotations

from fedkin.kin.result.inference import Contrast, How, Kind, Predicted, Sites, predicted
from fedkin.kin.result.join import Joined
from fedkin.kin.result.kin import Diagnostics, Kin, Parts, kin_of
from fedkin.kin.result.learned import Learned, States

__all__ = [
    "Contrast",
    "Diagnostics",
    "How",
    "Joined",
    "Kin",
    "Kind",
    "Learned",
    "Parts",
    "Predicted",
    "Sites",
    "States",
    "kin_of",
    "predicted",
]
