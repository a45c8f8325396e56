"""Quality and time on public tables, next to what people would use instead, in one run.

    python benchmarks/tables.py --data FOLDER            # or FEDKIN_DATA; tables that are not there are generated
    python benchmarks/tables.py --only landmine --methods fused --splits 3
    python benchmarks/tables.py --minutes 25 --docs      # the tables go into docs/

Every method gets the same training rows of the same splits and is tuned on them alone. Rows go to
bench-out/tables.jsonl with versions, CPU and load; what is there already is not measured again (`--fresh` does), so an
interrupted run goes on where it ended. Splits come one after the other, each with all tables and methods, on one thread
per job. Processor time is compared with ridge fits at each site by scikit-learn, in the same split: read the ratios.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from joblib import Parallel, delayed, parallel_config

from fedkin.data import Federation
from fedkin.datasets import PublicTable, load_table, look_alike, table_names
from fedkin.errors import DataError
from fedkin.solvers import load_kernels
from measure import surroundings
from solvers.tables import insert
from table_methods import METHODS, Method, score
from table_pages import render
from table_sources import MORE, load_more

DOCS = Path(__file__).resolve().parent.parent / "docs"


class Task(NamedTuple):
    """One fit: which table from where, which split, which method; what is known of it is under `key`."""

    table: str
    folder: Path | None
    generated: bool
    split: int
    method: str

    @property
    def key(self) -> tuple[str, int, str]:
        return self.table, self.split, self.method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the public tables; FEDKIN_DATA by default")
    parser.add_argument("--generated", action="store_true", help="look-alikes even where the files are there")
    parser.add_argument("--only", default="", help="tables whose names contain one of these words, with commas")
    parser.add_argument("--methods", default="", help="methods whose names begin with one of these words, with commas")
    parser.add_argument("--splits", type=int, default=10, help="most splits; slow methods have fewer")
    parser.add_argument("--limit", type=float, default=120.0, help="processor seconds after which a fit is given up")
    parser.add_argument("--minutes", type=float, default=25.0, help="no fit begins later than this, by the clock")
    parser.add_argument("--jobs", type=int, default=1, help="fits at the same time, each on a core of its own")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have measured")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "tables.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    here = surroundings() | {"date": datetime.datetime.now(tz=datetime.UTC).date().isoformat()}
    with path.open("a") as file:
        for row in measured(wanted(options), rows, options):
            rows.append(row | here)
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            print({key: row[key] for key in row if key in BRIEF}, file=sys.stderr, flush=True)
    text = render(rows)
    print(text)
    for row in rows:
        if "not done" in row.get("failed", ""):
            print(f"{row['table']}, {row['method']}, split {row['split']}: {row['failed']}", file=sys.stderr)
    if options.docs:
        summary, _, details = text.partition("<details")
        insert(DOCS / "real-data.md", summary)
        insert(DOCS / "results" / "public-tables.md", details.partition("</summary>")[2].replace("</details>", ""))


BRIEF = ("table", "method", "split", "error", "seconds", "failed", "groups")


def wanted(options: argparse.Namespace) -> list[Task]:
    """All fits, split by split."""
    names = [name for name in (*table_names(), *MORE) if any(word in name for word in options.only.split(","))]
    methods = [one for one in METHODS if any(one.name.startswith(word) for word in options.methods.split(","))]
    return [
        Task(name, options.data, options.generated, split, method.name)
        for split in range(options.splits)
        for name in names
        for method in methods
        if split < method.splits
    ]


def measured(tasks: list[Task], known: list[dict[str, Any]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for every fit that nothing is known of yet, as they end; a method that failed on a table rests there."""
    done = {(row["table"], row["split"], row["method"]) for row in known}
    given_up = {(row["table"], row["method"]) for row in known if "failed" in row}
    until = time.monotonic() + 60 * options.minutes

    def rows_of(split: int) -> Iterator[Any]:
        for task in tasks:
            if task.split == split and task.key not in done and (task.table, task.method) not in given_up:
                yield delayed(one_row)(task, options.limit, until)

    load_kernels()  # workers find them in the cache
    with parallel_config(backend="loky", n_jobs=options.jobs, inner_max_num_threads=1 if options.jobs > 1 else None):
        parallel = Parallel(return_as="generator_unordered", pre_dispatch=options.jobs, batch_size=1)
    for split in range(options.splits):
        for row in parallel(rows_of(split)):
            if row is not None:
                if "failed" in row:
                    given_up.add((row["table"], row["method"]))
                yield row


@cache
def tables(name: str, folder: Path | None, generated: bool) -> PublicTable | None:
    if name in MORE:
        return None if generated else load_more(name, folder)
    if not generated:
        try:
            return load_table(name, folder)
        except DataError as error:
            print(f"{name}: a look-alike, since {error}", file=sys.stderr)
    return look_alike(name)


def one_row(task: Task, limit: float, until: float) -> dict[str, Any] | None:
    """What a fit gives, or why there is none; None when it would begin too late."""
    if time.monotonic() > until:
        return None
    load_kernels()
    table = tables(task.table, task.folder, task.generated)
    method = next(one for one in METHODS if one.name == task.method)
    if table is None:
        return {"failed": "the file is not there", "table": task.table, "method": task.method, "split": task.split}
    held_out = table.held_out(task.split)
    train, test = table.federation.take(~held_out), table.federation.take(held_out, allow_empty=True)
    if train.schema is not None:  # gaps get the means of the training rows, for all methods
        learned = train.schema.trained(train.X, train.weight)
        train, test = (some.replaced(X=learned.filled(some.X)) for some in (train, test))
    why = method.skip(table.loss, train)
    row = {"failed": why} if why is not None else one_fit(method, table, train, test, limit)
    row |= {"table": table.name, "generated": table.generated, "method": method.name, "split": task.split}
    return row | {"sites": train.n_sites, "rows": len(table.federation.X), "features": train.n_features}


def one_fit(method: Method, table: PublicTable, train: Federation, test: Federation, limit: float) -> dict[str, Any]:
    def give_up(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, limit)
    began = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = method.fit(train, table.loss)
        seconds = time.process_time() - began
        signal.setitimer(signal.ITIMER_PROF, 0)
        return score(fitted, table.loss, train, test) | {"seconds": seconds, "groups": fitted.groups}
    except TimeoutError:
        return {"failed": f"not done after {limit:.0f} s"}
    except Exception as error:  # a peer that breaks down is a result
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:200]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    main()
