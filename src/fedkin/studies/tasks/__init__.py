"""What one replication computes.

In: a `Replication` (grid point, options, seed). Out: rows, dictionaries whose entries become columns. A task is a
function; ``OPTIONS`` of the module of a built-in one are the entries of ``[options]`` that it knows.
Imports: `config`, and the library below `fedkin.studies`.
"""

from __future__ import annotations

from fedkin.studies.tasks.designs import Replication
from fedkin.studies.tasks.preflight import check_study, task_function

__all__ = ["Replication", "check_study", "task_function"]
