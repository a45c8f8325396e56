"""Generate tables to try a federation: patients of twelve hospitals of two kinds.

    python examples/heart/make_tables.py DIR

writes DIR/all.csv with the rows of all hospitals, DIR/sites/NAME.csv with those of one, and DIR/graph.csv with edges
between them. All patients are invented.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

HOSPITALS = (
    *("north", "hill", "lake", "forest", "castle", "bridge"),  # where days depend on age and ward
    *("south", "harbour", "market", "river", "garden", "station"),  # where they depend on pressure
)
HEADER = ("hospital", "age", "weight", "pressure", "ward", "smoker", "days", "died", "visits")


def patients(hospital: str, n: int, seed: int = 0) -> list[tuple[object, ...]]:
    """Rows of one hospital."""
    number = HOSPITALS.index(hospital)
    rng = np.random.default_rng([seed, number])
    age = rng.normal(62, 12, n).clip(20, 98).round()
    weight = rng.normal(78, 14, n).clip(40, 180).round(1)
    pressure = rng.normal(132, 16, n).clip(80, 220).round()
    ward = rng.choice(["A", "B", "C"], n, p=[0.5, 0.3, 0.2])
    smoker = rng.random(n) < 0.3
    south = number >= len(HOSPITALS) // 2
    score = 0.05 * (pressure - 130) if south else 0.08 * (age - 60) + 2.0 * (ward == "C")
    days = (8 + 1.0 * smoker + score + 0.8 * rng.normal(size=n)).clip(0.1, 55).round(1)
    died = rng.random(n) < 1 / (1 + np.exp(1.5 - 0.7 * score))
    visits = rng.poisson(np.exp(0.4 + 0.2 * score))
    yes = np.array(["no", "yes"])
    columns = (age, weight, pressure, ward, yes[smoker.astype(int)], days, yes[died.astype(int)], visits)
    return [(hospital, *row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def main(folder: Path, n: int = 200) -> None:
    """Write all tables."""
    (folder / "sites").mkdir(parents=True, exist_ok=True)
    tables = {hospital: patients(hospital, n + 5 * k) for k, hospital in enumerate(HOSPITALS)}
    _write(folder / "all.csv", HEADER, [row for rows in tables.values() for row in rows])
    for hospital, rows in tables.items():
        _write(folder / "sites" / f"{hospital}.csv", HEADER[1:], [row[1:] for row in rows])
    ring = [(one, HOSPITALS[(k + step) % 12]) for k, one in enumerate(HOSPITALS) for step in (1, 2, 3)]
    _write(folder / "graph.csv", ("source", "target"), ring)


def _write(path: Path, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
