"""The paper's studies, and a runner for studies of one's own.

The way one cell takes::

    TOML --config--> Study --cells--> Cell (parameters, replications, seeds)
      --pool--> worker process: task(replication) -> rows
      --store--> one Parquet part file per cell, written atomically; a cell whose part exists is never run again
      --report--> figures, tables and one HTML page, from the rows alone

| module | what is in it |
|---|---|
| `config` | a study as data: TOML -> `Study` -> `Cell` |
| `specs`, `preflight` | what a file may say, and whether the functions that it names are there |
| `pool`, `store`, `runner` | processes, part files, and the loop that joins them |
| `designs`, `estimators`, `tasks` | what a cell computes |
| `election`, `election_data`, `topojson` | section 6 of the paper |
| `checks` | the claims that a study puts to the test |
| `figures`, `tables`, `page`, `report` | what is shown |
| `command` | ``fedkin study`` |
"""
