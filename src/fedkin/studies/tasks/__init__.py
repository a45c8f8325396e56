"""What one replication computes.

In: a `Replication` (grid point, options, seed). Out: rows, dictionaries whose entries become columns. A task is a
function; the built-in ones have a module each, and its ``OPTIONS`` are the entries of ``[options]`` that it knows.
Imports: `config`, and the library below `fedkin.studies`.
"""

from __future__ import annotations

from fedkin.studies.tasks.preflight import check_study
from fedkin.studies.tasks.registry import task_function
from fedkin.studies.tasks.replication import Replication

__all__ = ["Replication", "check_study", "task_function"]
