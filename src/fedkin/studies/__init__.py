"""Run the paper's studies and custom ones.

A study is a TOML file (`config`). Its grid points become cells, which `run` computes in parallel and stores one by one
as Parquet; figures, tables, claims and the HTML page are made from these rows alone. Replications are computed in
`tasks`, `kin` and `election`. A new study is a file in ``built_in``, plus a task if it computes something new.
"""

from __future__ import annotations

from fedkin.studies.config import BUILT_IN, Cell, Study, check_study, load_study, parse_study
from fedkin.studies.replications import Replication
from fedkin.studies.run import StudyError, launch, read_rows, run_study, write_rows, write_study_report

__all__ = [
    "BUILT_IN", "Cell", "Replication", "Study", "StudyError", "check_study", "launch", "load_study", "parse_study",
    "read_rows", "run_study", "write_rows", "write_study_report",
]  # fmt: skip
