"""Section 6 of the paper: the 2020 presidential election by county, a model per state.

In: the directory of the public files (``--data``), a protocol, a seed. Out: a row per method on one split.
Imports: `tasks.replication`, and the library below `fedkin.studies`.
"""

from __future__ import annotations

from fedkin.studies.tasks.election.methods import LABELS, OPTIONS, election
from fedkin.studies.tasks.election.split import Protocol

__all__ = ["LABELS", "OPTIONS", "Protocol", "election"]
