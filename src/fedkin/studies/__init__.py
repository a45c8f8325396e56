"""The paper's studies, and a runner for custom ones.

In: a study, built in or from a TOML file. Out: a directory with rows (Parquet), figures, tables, claims, an HTML page.
Imports: most packages below, not `federate`, `fitting` or `losses`; only `cli` imports this one.

How a cell travels::

    TOML --config--> Study --> Cell (parameters, replications, seeds)
      --run--> worker process: task(replication) -> rows
      --rows--> one Parquet part file per cell, written atomically; a cell whose part exists is never run again
      --present--> figures, tables and one HTML page, from the rows alone

| part | what is in it |
|---|---|
| `config`, `entries` | a study as data: its file, checked; its cells; the functions that it names |
| `rows` | rows in Parquet files |
| `tasks` | what a replication computes; what is wrong with a study, said before it runs |
| `run`, `pool` | finished cells, processes, and the loop that joins them |
| `present` | what is shown: summaries, claims, figures, tables, the page |
| `launch`, `command` | ``fedkin study`` |

To add a figure: `studies/present` lists the files. To add a study: a TOML file in ``built_in``, and a task in `tasks`
if it computes something new.
"""

from __future__ import annotations

from fedkin.studies.command import study

__all__ = ["study"]
