"""Studies through processes that fail, are killed in between, and go on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedkin
from fedkin.errors import ParameterError
from fedkin.studies import Study, StudyError, launch, load_study, read_rows, run_study, write_rows
from fedkin.studies import run as running
from processes import PATIENCE
from small_studies import SMALL, UNDRAWN

pytestmark = pytest.mark.studies


def test_rows_carry_seed_versions_and_cpu_and_more_replications_only_add(small_study: Path, tmp_path: Path):
    run = run_study(load_study(small_study), tmp_path / "out", jobs=1)
    assert run.notes.startswith("12 cells computed in") and "found" not in run.notes
    assert len(run.rows) == 4 * 6 * 2
    row = run.rows[0]
    assert (row["fedkin"], row["numpy"]) == (fedkin.__version__, np.__version__) and row["cpu"]
    assert row["value"] == np.random.default_rng(row["seed"]).normal(loc=row["n"])
    again = run_study(load_study(small_study), tmp_path / "out", jobs=1)
    assert again.notes.startswith("12 cells found finished") and again.rows == run.rows
    small_study.write_text(SMALL.replace("replications = 6", "replications = 8"))
    more = run_study(load_study(small_study), tmp_path / "out", jobs=1)
    assert more.notes.startswith("4 cells computed in") and ", 12 cells found finished" in more.notes
    kept = [row for row in more.rows if row["replication"] < 6]
    assert sorted(map(str, kept)) == sorted(map(str, run.rows))


def test_a_failing_task_names_its_cell(small_study: Path, tmp_path: Path):
    small_study.write_text(SMALL.replace("own:task", "own:failing"))
    with pytest.raises(StudyError, match=r"n=10, kind=a, replications 0 to 1:\n(.*\n)*.*seven over nothing"):
        run_study(load_study(small_study), tmp_path / "out", jobs=1)


def _command(config: Path, out: Path, jobs: int = 2) -> list[str]:
    options = ["--config", str(config), "--out", str(out), "--jobs", str(jobs)]
    return [sys.executable, "-m", "fedkin", "study", *options]


def test_a_worker_that_is_killed_is_reported_and_the_study_goes_on(small_study: Path, tmp_path: Path):
    cured, out = tmp_path / "cured", tmp_path / "out"
    options = f"[options]\ncured = {json.dumps(str(cured))}\n"
    small_study.write_text(UNDRAWN.replace("own:task", "own:dying") + options)
    done = subprocess.run(_command(small_study, out), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "fewer --jobs" in done.stderr
    cured.touch()
    run = run_study(load_study(small_study), out, jobs=1)
    assert int(run.notes.split()[0]) >= 3 and "cells computed in" in run.notes and "all 12 took" in run.notes


def test_files_that_cannot_be_read_and_directories_that_cannot_be_made_are_named(tmp_path: Path, small_study: Path):
    broken = tmp_path / "abc.parquet"
    broken.write_bytes(b"not parquet")
    with pytest.raises(StudyError, match=r"abc\.parquet cannot be read .* remove it"):
        read_rows(broken)
    with pytest.raises(ParameterError, match=r"--out /proc/nope: .* cannot be made \(.*\); choose another"):
        run_study(load_study(small_study), Path("/proc/nope"))
    with pytest.raises(ParameterError, match=r"abc\.parquet: .* cannot be made \(.*\); choose another"):
        run_study(load_study(small_study), broken)


def test_rows_with_different_columns_and_lists_survive(tmp_path: Path):
    rows = [{"a": 1, "b": [1.0, 2.0], "c": None}, {"a": 2, "d": "ü"}]
    write_rows(tmp_path / "rows.parquet", rows)
    back = read_rows(tmp_path / "rows.parquet").rows
    assert back == [{"a": 1, "b": [1.0, 2.0], "c": None, "d": None}, {"a": 2, "b": None, "c": None, "d": "ü"}]


def test_the_page_of_the_paper_is_drawn_from_studies_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    def small(name: str, *, quick: bool = False) -> Study:
        study = load_study(name, quick=quick)
        design = {"n_features": 2, "n_clusters": 2, "varrho": 0.1}
        options = {**study.options, "design": design, "n_lams": 4, "rounds": 30, "batch_size": 5}
        options["methods"] = ["fedadmm-full", "printed-full", "gd"]
        points = ({"n_samples": 20, "n_sites": 8},)
        return replace(study, points=points, options=options, replications=20, block=1)

    monkeypatch.setattr(running, "load_study", small)
    monkeypatch.setattr(running, "PAPER", ("convergence",))
    launch("paper", out=tmp_path, jobs=1, replications=1)
    page = Path(capsys.readouterr().out.splitlines()[-1])
    assert page == tmp_path / "paper" / "index.html" and "<svg" not in page.read_text()
    text = (tmp_path / "paper" / "index.md").read_text()
    head, _, line = text.partition("| study |")[2].splitlines()[:3]
    assert [cell.strip() for cell in line.split("|")[1:5]] == ["convergence", "1", "20", "10"]  # asked for 20, seed 10
    assert "seed" in head and "(convergence.svg)" in text and "Section 5.3" in text and "too few replications" in text
    assert {"convergence.svg", "distance.svg", "convergence.csv"} <= {one.name for one in page.parent.iterdir()}
    launch("paper", out=tmp_path, jobs=1, replications=2)
    assert "1 cell computed" in capsys.readouterr().err
    with pytest.raises(ParameterError, match="--replications must be at least 1, got 0"):
        launch("paper", out=tmp_path, jobs=1, replications=0)
