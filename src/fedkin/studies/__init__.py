"""The paper's studies, and a runner for custom ones.

A study is a TOML file (`config`). Its grid points become cells, which `run` computes in processes and stores one by one
as Parquet; figures, tables, claims and one HTML page are made from the rows alone. What a replication computes is in
`tasks`, `kin` and `election`; a new study is a file in ``built_in``, and a task where it computes something new.
"""

from __future__ import annotations

from fedkin.studies.config import BUILT_IN, Cell, Study, check_study, load_study, parse_study
from fedkin.studies.run import StudyError, launch, read_rows, run_study, write_rows, write_study_report
from fedkin.studies.tasks import Replication

__all__ = [
    "BUILT_IN",
    "Cell",
    "Replication",
    "Study",
    "StudyError",
    "check_study",
    "launch",
    "load_study",
    "parse_study",
    "read_rows",
    "run_study",
    "write_rows",
    "write_study_report",
]
