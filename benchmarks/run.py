"""The exact solver and its peers, side by side. ``make bench`` runs this.

    python benchmarks/run.py --quick        # small instances, a minute: does everything work?
    python benchmarks/run.py                # everything but the million sites
    python benchmarks/run.py --million      # these too: 4 GB and a few minutes
    python benchmarks/run.py --only paper   # instances and sections whose names contain a word
    python benchmarks/run.py --only grid --keep     # add to the rows of earlier runs, or replace them

Rows go to bench-out/rows.jsonl with seed, versions, CPU and load; tables go to the screen and, with --docs, into
docs/results/exact-solver.md between its markers. prox_tv and pycut-pursuit need numpy < 2: name a Python that has them
in FEDKIN_BENCH_PEERS. Times are comparable within one run on a quiet machine only: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import fedkin
from fedkin._base import available_threads
from fedkin.core import QuadraticTerms
from fedkin.solvers import lam_grid, load_kernels, solve_fused
from measure import in_turns, surroundings
from solvers import tables
from solvers.contenders import everyone
from solvers.duel import Row, duel
from solvers.instances import CATALOGUE, SEED, build

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "results" / "exact-solver.md"
FIGURE = HERE.parent / "docs" / "figures" / "scaling.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small instances")
    parser.add_argument("--million", action="store_true", help="also 10^6 sites and 5*10^6 edges")
    parser.add_argument("--only", default="", help="instances and sections whose names contain this")
    parser.add_argument("--contenders", default="", help="words, with commas: only contenders whose names contain one")
    parser.add_argument("--repeats", type=int, default=0, help="0: as many as there are contenders")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--keep", action="store_true", help="keep rows of earlier runs that are not measured again")
    parser.add_argument("--docs", action="store_true", help="put tables and figure into docs/")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    here = surroundings()
    path = options.out / "rows.jsonl"
    with path.open("a" if options.keep else "w") as file:
        for row in measurements(options):
            file.write(json.dumps(row | here | {"quick": options.quick}) + "\n")
            file.flush()
            print(_brief(row), file=sys.stderr, flush=True)
    rows = latest([json.loads(line) for line in path.read_text().splitlines()])
    text = tables.render(rows, here)
    (options.out / "tables.md").write_text(text)
    print(text)
    figure = FIGURE if options.docs else options.out / "scaling.svg"
    tables.draw_scaling(rows, figure)
    if options.docs:
        tables.insert(DOCS, text)
    print(f"rows: {options.out / 'rows.jsonl'}; figure: {figure}")


def measurements(options: argparse.Namespace) -> Iterator[Row]:
    wanted, words = options.only.lower(), options.contenders.lower().split(",")
    contenders = [one for one in everyone(available_threads()) if any(word in one.name.lower() for word in words)]
    repeats = options.repeats or (2 if options.quick else 5)
    for name in (name for name in CATALOGUE if wanted in name.lower()):
        instance = f"{name}, made small" if options.quick else name
        for row in duel(build(name, options.quick), contenders, [1e-4, 1e-6], repeats):
            yield row | {"section": "duel", "instance": instance}
    sections = {"path": paths, "start": starts, "scaling": scaling, "million": million}
    for name, section in sections.items():
        if wanted in name and (name != "million" or options.million):
            for row in section(options.quick):
                yield row | {"section": name, "seed": SEED}


def latest(rows: list[Row]) -> list[Row]:
    """The rows of the last run that measured each subject."""
    last = {(row["section"], row.get("instance")): row["started"] for row in rows}
    return [row for row in rows if row["started"] == last[row["section"], row.get("instance")]]


def paths(quick: bool) -> Iterator[Row]:
    """One cold solve, a path of 20 levels and a 5-fold cross-validation over it."""
    load_kernels()
    for name in ("paper linear l1", "paper linear l2"):
        works = path_works(build(name, quick).problem)
        in_turns(works, 1)
        for work, seconds in in_turns(works, 2 if quick else 7).items():
            for repeat, each in enumerate(seconds):
                yield {"instance": name, "work": work, "repeat": repeat, "seconds": each}


def path_works(problem: fedkin.Problem) -> dict[str, Callable[[], object]]:
    """What is timed; each begins with a problem that knows nothing yet."""
    lams = fedkin.lam_max(problem, tol=0.01) * np.geomspace(1.0, 1e-3, 20)

    def cold(strength: float) -> None:
        solve_fused(replace(fresh(problem).fused, strength=strength), 1e-6)

    def path(threads: int) -> None:
        os.environ["NUMBA_NUM_THREADS"] = str(threads)
        fedkin.lam_path(fresh(problem), lams, tol=1e-6)
        del os.environ["NUMBA_NUM_THREADS"]

    cores = available_threads()
    return {
        "cold": lambda: cold(problem.fused.strength),
        "20 levels cold": lambda: [cold(float(strength)) for strength in lams * problem.n_sites],
        "path, 1 core": lambda: path(1),
        f"path, {cores} cores": lambda: path(cores),
        "cross-validation, gap 1e-4": lambda: fedkin.cross_validate_lam(fresh(problem), lams),
        "cross-validation, gap 1e-6": lambda: fedkin.cross_validate_lam(fresh(problem), lams, tol=1e-6),
        "grid of levels": lambda: lam_grid(fresh(problem)),
    }


def fresh(problem: fedkin.Problem) -> fedkin.Problem:
    """The problem with its Gram statistics, but without anything that earlier solves left behind."""
    made, terms = replace(problem), problem.terms
    assert isinstance(terms, QuadraticTerms)
    vars(made)["terms"] = QuadraticTerms(terms.A, terms.b, terms.c)
    return made


def starts(quick: bool) -> Iterator[Row]:
    """What the first fit of a fresh installation takes, and compiling the kernels."""
    with tempfile.TemporaryDirectory() as cache:
        for name, work in (("first fit", "first_fit"), ("compiling", "compiling"), ("loading", "compiling")):
            if work == "compiling" and quick:
                continue
            yield {"work": name} | alone(work, {}, {"NUMBA_CACHE_DIR": cache})


def scaling(quick: bool) -> Iterator[Row]:
    """Time and memory against |V|, |E|, p and n."""
    usual = {"n": 1_000 if quick else 20_000, "p": 5 if quick else 10, "penalty": "l2", "loss": "linear"}
    n = usual["n"]
    cases = [("|V|", size, usual | {"n": size}) for size in ((n, 2 * n) if quick else (1_000, 10_000, 100_000))]
    cases += [("|E|", d * n, usual | {"edges_per_site": d}) for d in (2.5, 5.0, 10.0, 20.0)[: 2 if quick else 4]]
    cases += [("p", p, usual | {"p": p}) for p in ((2, 5) if quick else (2, 5, 10, 20, 40))]
    for against, value, case in cases:
        yield {"against": against, "value": value} | case | alone("large", case)
    for rows in (20, 50) if quick else (20, 50, 100, 200, 400, 800):
        yield {"against": "n", "value": rows} | alone("rows", {"n_rows": rows})


def million(quick: bool) -> Iterator[Row]:
    """10^6 sites and 5 * 10^6 edges."""
    n = 10_000 if quick else 1_000_000
    for case in (
        {"p": 10, "penalty": "l2", "loss": "linear"},
        {"p": 10, "penalty": "l1", "loss": "linear"},
        {"p": 10, "penalty": "l2", "loss": "mean"},
        {"p": 10, "penalty": "l2", "loss": "mean", "scrambled": True},
    ):
        yield {"n": n} | case | alone("large", {"n": n} | case)


def alone(work: str, arguments: dict[str, object], variables: dict[str, str] | None = None) -> Row:
    """The measurement ``work`` in a process of its own."""
    command = [sys.executable, "-m", "solvers.single", work, json.dumps(arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | (variables or {})
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode != 0:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout)


def _brief(row: Row) -> str:
    shown = ("section", "instance", "contender", "target", "work", "against", "value", "n", "p", "penalty", "loss")
    parts = [str(row[key]) for key in shown if key in row]
    if "seconds" in row:
        parts.append(f"{row['seconds']:.4g} s")
    parts += [str(row[key]) for key in ("skipped", "failed") if key in row]
    return " | ".join(parts)


if __name__ == "__main__":
    main()
