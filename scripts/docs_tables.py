"""Generate the tables that the pages use: docs/tables/*.csv, always the same."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

TARGET = Path(__file__).resolve().parent.parent / "docs" / "tables"


def visits(rng: np.random.Generator) -> dict[str, Iterable[Any]]:
    """Days in hospital, 12 clinics: a dose helps in five of them and does nothing in the others."""
    clinic = np.repeat(np.arange(12), 40)
    age, dose = rng.normal(60, 12, 480).round(), rng.uniform(0, 4, 480).round(1)
    ward = rng.choice(["A", "B", "C"], 480)
    helps = clinic < 5
    days = np.where(helps, 12 - 1.6 * dose, 9 - 0.1 * dose) + np.where(helps, 0.1, 0.02) * (age - 60)
    days += 1.0 * (ward == "C") + rng.normal(0, 1.2, 480)
    names = ["Ash", "Bay", "Cove", "Dale", "Elm", "Fen", "Glen", "Hill", "Isle", "Kirk", "Lea", "Moor"]
    return {
        "clinic": [names[u] for u in clinic],
        "age": age.astype(int),
        "ward": ward,
        "dose": dose,
        "days": np.maximum(days, 0.5).round(1),
    }


def trial(rng: np.random.Generator) -> dict[str, Iterable[Any]]:
    """Months until death or the end of follow-up in six hospitals."""
    hospital = np.repeat(np.arange(6), 70)
    age, stage = rng.normal(63, 9, 420).round(), rng.integers(1, 4, 420)
    hazard = np.exp(-4 + rng.normal(0, 0.3, 6)[hospital] + 0.02 * (age - 63) + 0.6 * (stage - 2))
    time, end = rng.exponential(1 / hazard), rng.uniform(12, 60, 420)
    return {
        "hospital": [("north", "south", "east", "west", "city", "coast")[u] for u in hospital],
        "age": age.astype(int),
        "stage": stage,
        "months": np.maximum(np.minimum(time, end), 0.1).round(1),
        "died": (time <= end).astype(int),
    }


def admissions(rng: np.random.Generator) -> dict[str, Iterable[Any]]:
    """Admissions for asthma by town and month in ten regions, with person-years."""
    region = np.repeat(np.arange(10), 24)
    years = rng.uniform(200, 3000, 240).round()
    pollen, smoke = rng.gamma(2, 1, 240).round(2), rng.normal(12, 3, 240).round(1)
    rate = np.exp(-5.0 + rng.normal(0, 0.3, 10)[region] + (0.15 + rng.normal(0, 0.08, 10)[region]) * pollen)
    rate *= np.exp(0.04 * (smoke - 12))
    return {
        "region": [f"R{u:02d}" for u in region],
        "pollen": pollen,
        "smoke": smoke,
        "person_years": years.astype(int),
        "admissions": rng.poisson(rate * years * rng.gamma(8, 1 / 8, 240)),
    }


def pupils(rng: np.random.Generator) -> dict[str, Iterable[Any]]:
    """Scores of pupils in schools in districts; the size of the school is the same for all its pupils."""
    school = np.repeat(np.arange(48), 15)
    district = school // 4
    before = rng.normal(0, 1, 720).round(2)
    size = rng.integers(3, 13, 48)[school] * 100
    slope = 4 + rng.normal(0, 1, 12)[district] + rng.normal(0, 0.7, 48)[school]
    level = 50 + rng.normal(0, 3, 12)[district] + rng.normal(0, 2, 48)[school] - 0.004 * (size - 700)
    return {
        "district": [f"D{u:02d}" for u in district],
        "school": [f"S{u:02d}" for u in school],
        "before": before,
        "size": size,
        "score": (level + slope * before + rng.normal(0, 6, 720)).round(1),
    }


def write(name: str, columns: Mapping[str, Iterable[Any]]) -> None:
    """Write one table."""
    with (TARGET / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))


def main() -> None:
    """Write all of them."""
    TARGET.mkdir(exist_ok=True)
    for seed, make in enumerate((visits, trial, admissions, pupils)):
        write(make.__name__, make(np.random.default_rng(seed)))


if __name__ == "__main__":
    main()
