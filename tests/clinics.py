"""A table of clinics, and a command that has to fail: what the tests of the command line share."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from fedkin.cli import main

HEADER = ["clinic", "age", "dose", "outcome"]
NORTH = ["Zürich", "Bern", "[red]Basel[/]"]
SOUTH = ["Lugano", "東京", "Como"]
FIT = ["--site", "clinic", "--target", "outcome", "--method", "fused", "--lam", "0.01"]


def write(path: Path, header: list[str], rows: list[list[object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


def clinic_rows(n: int = 24, seed: int = 0) -> list[list[object]]:
    """Two kinds of clinics, rows in random order."""
    rng = np.random.default_rng(seed)
    rows: list[list[object]] = []
    for clinic in NORTH + SOUTH:
        slope = np.array([2.0, -1.0]) if clinic in NORTH else np.array([-2.0, 1.0])
        for x in rng.normal(size=(n, 2)):
            rows.append([clinic, *x.tolist(), float(x @ slope + 0.3 * rng.normal())])
    return [rows[k] for k in rng.permutation(len(rows))]


def failing(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Run a command that has to fail with one line on standard error, and return the line."""
    assert main(list(arguments)) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    lines = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]
