"""What sites say about their rows: it takes the place of rows wherever sums are enough.

In: the numbers of one message per site. Out: a `Summary` (of one site) and `Summaries` (of all), checked, from which a
`Problem`, a local fit or `find_kin` is made; an `Ask`, what a site may be asked next.
`plain` turns them into names and numbers and back, `curvature` makes a message short,
`telling` says what each number tells about rows, `privacy` is what
was promised about noise, and `repair` makes noisy sums usable.
To change what a site shares: `summary` and `telling` here, and `fedkin.stats.summarise`, which computes it.
Imports: `objective.sums`, `objective.terms` and below; not the problem.
"""

from __future__ import annotations

from fedkin.objective.summaries.curvature import Curvature
from fedkin.objective.summaries.plain import INFINITE, Reader
from fedkin.objective.summaries.privacy import Privacy
from fedkin.objective.summaries.summaries import Summaries, parameter_map
from fedkin.objective.summaries.summary import Ask, OwnEstimate, Summary
from fedkin.objective.summaries.telling import Told

__all__ = [
    "INFINITE",
    "Ask",
    "Curvature",
    "OwnEstimate",
    "Privacy",
    "Reader",
    "Summaries",
    "Summary",
    "Told",
    "parameter_map",
]
