"""Quality and time on public tables, beside what people would use instead, in one run.

    python benchmarks/tables.py --data FOLDER            # or FEDKIN_DATA; tables that are not there are generated
    python benchmarks/tables.py --only landmine --splits 10 --keep
    python benchmarks/tables.py --docs                   # the table goes into docs/real-data.md

Every method gets the same training rows of the same splits and is tuned on them alone. Rows go to
bench-out/tables.jsonl with versions, CPU and load. Processor time is compared with ridge fits at each site by
scikit-learn, in the same split: read the ratios.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fedkin.data import Federation
from fedkin.datasets import PublicTable, load_table, look_alike, table_names
from fedkin.errors import DataError
from solvers.measure import surroundings
from solvers.tables import insert
from table_methods import METHODS, Method, score
from table_pages import render

DOCS = Path(__file__).resolve().parent.parent / "docs" / "real-data.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the public tables; FEDKIN_DATA by default")
    parser.add_argument("--generated", action="store_true", help="look-alikes even where the files are there")
    parser.add_argument("--only", default="", help="tables whose names contain one of these words, with commas")
    parser.add_argument("--methods", default="", help="methods whose names begin with one of these words, with commas")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120.0, help="processor seconds after which a fit is given up")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--keep", action="store_true", help="keep rows of earlier runs that are not measured again")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/real-data.md")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "tables.jsonl"
    here = surroundings() | {"date": datetime.datetime.now(tz=datetime.UTC).date().isoformat()}
    with path.open("a" if options.keep else "w") as file:
        for name in table_names():
            if any(word in name for word in options.only.split(",")):
                for row in measured(tables(name, options), options):
                    file.write(json.dumps(row | here) + "\n")
                    file.flush()
    text = render([json.loads(line) for line in path.read_text().splitlines()])
    print(text)
    if options.docs:
        insert(DOCS, text)


def tables(name: str, options: argparse.Namespace) -> PublicTable:
    if not options.generated:
        try:
            return load_table(name, options.data)
        except DataError as error:
            print(f"{name}: a look-alike, since {error}", file=sys.stderr)
    return look_alike(name)


def measured(table: PublicTable, options: argparse.Namespace) -> Any:
    """A row for every split and method."""
    wanted = [one for one in METHODS if any(one.name.startswith(word) for word in options.methods.split(","))]
    given_up: set[str] = set()
    for number in range(options.splits):
        held_out = table.held_out(number)
        train, test = table.federation.take(~held_out), table.federation.take(held_out, allow_empty=True)
        for method in wanted:
            why = method.skip(table.loss, train)
            if why is None and method.name not in given_up:
                row = one_fit(method, table, train, test, options.limit)
                if "failed" in row:
                    given_up.add(method.name)
            elif why is not None:
                row = {"failed": why}
            else:
                continue
            row |= {"table": table.name, "generated": table.generated, "method": method.name, "split": number}
            row |= {"sites": train.n_devices, "rows": len(table.federation.X), "features": train.n_features}
            print({key: row[key] for key in row if key in BRIEF}, file=sys.stderr, flush=True)
            yield row


BRIEF = ("table", "method", "split", "error", "seconds", "failed", "groups")


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
