"""What the black-box tests share: a runner of the command line, and small tables."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from fedkin.cli import main

COMMAND = [sys.executable, "-m", "fedkin"]
COLUMNS = ["--site", "clinic", "--target", "days"]


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The JSON document on standard output, which must hold nothing else."""
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)

    def refuses(self, *culprits: str, code: int = 2) -> None:
        """Assert that the command failed, printed no result and no traceback, and named the culprits."""
        assert self.code == code, self.stdout + self.stderr
        assert self.stdout == ""
        assert "Traceback" not in self.stderr
        words = " ".join(self.stderr.replace("│", " ").split())
        assert [culprit for culprit in culprits if culprit not in words] == [], words


def environment() -> dict[str, str]:
    """Return the environment of a command: wide lines without colour, one thread."""
    return {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def run(folder: Path, *arguments: object, code: int | None = None) -> Outcome:
    """Run ``fedkin`` in a folder, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, environment()),
        mock.patch.object(sys, "path", [*sys.path]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        ended = main([str(word) for word in arguments])
    outcome = Outcome(ended, out.getvalue(), err.getvalue())
    assert code is None or outcome.code == code, outcome
    return outcome


def clinic_table(seed: int = 0, rows: int = 40) -> pd.DataFrame:
    """Return six clinics in two groups (a, b, c and d, e, f); rows are in random order and have a day each."""
    rng = np.random.default_rng(seed)
    parts = []
    for clinic in "abcdef":
        X = rng.normal(size=(rows, 2))
        slopes, constant = ([1.0, -1.0], 1.0) if clinic in "abc" else ([-2.0, 3.0], 4.0)
        days = X @ slopes + constant + 0.3 * rng.normal(size=rows)
        parts.append(pd.DataFrame({"clinic": clinic, "age": X[:, 0], "dose": X[:, 1], "days": days}))
        parts[-1]["time"] = rng.permutation(rows)
    return pd.concat(parts).sample(frac=1.0, random_state=seed).reset_index(drop=True)


def read_coefficients(model: Path) -> pd.DataFrame:
    """Return the intercept and the coefficients of every site of a model directory, in alphabetical order."""
    table = pd.read_csv(model / "coefficients.csv", index_col=0).sort_index()
    return table.loc[:, "intercept":]  # type: ignore[misc]


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture
def fedkin(tmp_path: Path) -> Callable[..., Outcome]:
    """Run ``fedkin`` in the test's own folder; with ``code=`` its exit code is asserted."""

    def fedkin(*arguments: object, code: int | None = None) -> Outcome:
        return run(tmp_path, *arguments, code=code)

    return fedkin


@pytest.fixture(scope="session")
def clinics() -> pd.DataFrame:
    """The rows of six clinics, without the column of days."""
    return clinic_table().drop(columns="time")


@pytest.fixture
def table(tmp_path: Path, clinics: pd.DataFrame) -> Path:
    """``clinics.csv`` in the test's own folder."""
    clinics.to_csv(tmp_path / "clinics.csv", index=False)
    return tmp_path / "clinics.csv"


@dataclass(frozen=True)
class Fit:
    """A fit that several tests look at, and must not change."""

    folder: Path
    model: Path
    page: Path
    outcome: Outcome


@pytest.fixture(scope="session")
def fit(tmp_path_factory: pytest.TempPathFactory, clinics: pd.DataFrame) -> Fit:
    """The default fit of the clinics, with its report, in a folder of its own."""
    folder = tmp_path_factory.mktemp("fit")
    clinics.to_csv(folder / "clinics.csv", index=False)
    outcome = run(folder, "fit", "clinics.csv", *COLUMNS, "--json", "--out", "model", "--report", "page.html", code=0)
    return Fit(folder, folder / "model", folder / "page.html", outcome)
