"""Running a study.

In: a `Study` and a directory. Out: the rows of all its cells, each cell computed once by one of several processes and
stored as soon as it is finished. Imports: `tasks`, `rows`, `config`.
"""

from __future__ import annotations

from fedkin.studies.run.progress import duration, say
from fedkin.studies.run.runner import StudyRun, run_study

__all__ = ["StudyRun", "duration", "run_study", "say"]
