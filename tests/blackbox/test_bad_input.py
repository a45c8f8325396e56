"""Wrong input: exit code 2, the culprit named, nothing written."""

from __future__ import annotations

import os
import signal
import subprocess

import numpy as np
import pandas as pd
import pytest

from blackbox.conftest import COLUMNS, COMMAND, environment, files_below
from processes import PATIENCE


def with_cell(rows: pd.DataFrame, column: str, value: object) -> pd.DataFrame:
    """Return the rows with another value in line 7 of the file."""
    changed = rows.astype({column: object})
    changed.loc[5, column] = value
    return changed


def doubled(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.set_axis(["clinic", "age", "age", "days"], axis=1)


@pytest.mark.parametrize(
    ("change", "culprits"),
    [
        (lambda rows: with_cell(rows, "age", "old"), ["age", "'old'", "line 7"]),
        (lambda rows: with_cell(rows, "days", "long"), ["days", "'long'", "line 7"]),
        (lambda rows: with_cell(rows, "dose", "inf"), ["dose", "inf", "line 7"]),
        (lambda rows: with_cell(rows, "dose", ""), ["'dose'", "line 7", "--missing"]),
        (lambda rows: with_cell(rows, "clinic", ""), ["'clinic'", "line 7", "--missing drop"]),
        (doubled, ["'age'", "line 1"]),
        (lambda rows: rows.assign(days=7.0), ["'days'", "7", "--target"]),
        (lambda rows: rows.assign(days="yes"), ["'days'", "yes", "--target"]),
        (lambda rows: rows.assign(copy=rows["days"]), ["'copy'", "'days'", "--drop"]),
        (lambda rows: rows.iloc[:0], ["no rows"]),
    ],
    ids=["word", "label", "infinite", "gap", "no-site", "doubled", "constant", "one-class", "copy", "no-rows"],
)
def test_a_table_that_cannot_be_fitted_is_refused(fedkin, tmp_path, clinics, change, culprits):
    change(clinics).to_csv(tmp_path / "bad.csv", index=False)
    fedkin("fit", "bad.csv", *COLUMNS, "--report", "page.html").refuses(*culprits)
    assert set(files_below(tmp_path)) == {"bad.csv"}


def test_the_file_is_named_with_the_line(fedkin, tmp_path, clinics):
    with_cell(clinics, "age", "old").to_csv(tmp_path / "bad.csv", index=False)
    fedkin("fit", "bad.csv", *COLUMNS).refuses("bad.csv", "line 7")
    with_cell(clinics, "age", "old").drop(columns="days").to_csv(tmp_path / "new.csv", index=False)
    clinics.to_csv(tmp_path / "good.csv", index=False)
    fedkin("fit", "good.csv", *COLUMNS, "--test-size", "0", code=0)
    fedkin("predict", "fedkin-model", "new.csv", "--out", "out.csv").refuses("new.csv", "age", "line 7")
    clinics.drop(columns=["days", "dose"]).to_csv(tmp_path / "narrow.csv", index=False)
    fedkin("predict", "fedkin-model", "narrow.csv", "--out", "out.csv").refuses("dose")
    fedkin("predict", "fedkin-model", "good.csv", "--out", "nowhere/out.csv").refuses("nowhere")
    assert not (tmp_path / "out.csv").exists()


def test_an_empty_a_ragged_and_an_absent_file_are_refused(fedkin, tmp_path):
    (tmp_path / "empty.csv").touch()
    (tmp_path / "ragged.csv").write_text("clinic,age,days\na,1,2\na,1\n")
    fedkin("fit", "empty.csv", *COLUMNS).refuses("empty.csv")
    fedkin("fit", "ragged.csv", *COLUMNS).refuses("ragged.csv", "line 3")
    fedkin("fit", "raged.csv", *COLUMNS).refuses("raged.csv", "'ragged.csv'")
    assert set(files_below(tmp_path)) == {"empty.csv", "ragged.csv"}


@pytest.mark.parametrize(
    ("options", "culprits"),
    [
        (["--site", "clinik", "--target", "days"], ["'clinik'", "'clinic'"]),
        (["--site", "clinic", "--target", "day"], ["'day'", "'days'"]),
        (["--target", "days"], ["--site"]),
        ([*COLUMNS, "--features", "age,doze"], ["'doze'", "'dose'"]),
        ([*COLUMNS, "--loss", "ols"], ["--loss", "'ols'", "huber"]),
        ([*COLUMNS, "--loss", "poisson"], ["poisson"]),
        ([*COLUMNS, "--lam", "much"], ["lam", "'much'"]),
        ([*COLUMNS, "--method", "kin", "--lam", "1"], ["--lam", "kin"]),
        ([*COLUMNS, "--repeets", "1"], ["--repeets", "--repeats"]),
        ([*COLUMNS, "--out", "clinics.csv"], ["clinics.csv", "--out"]),
        ([*COLUMNS, "--out", "clinics.csv/model"], ["clinics.csv/model", "--out"]),
        ([*COLUMNS, "--report", "clinics.csv"], ["clinics.csv"]),
        ([*COLUMNS, "--report", "nowhere/page.html"], ["nowhere", "page.html"]),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_written(fedkin, tmp_path, table, options, culprits):
    before = files_below(tmp_path)
    fedkin("fit", "clinics.csv", *options).refuses(*culprits)
    assert files_below(tmp_path) == before


def test_a_graph_with_an_unknown_site_or_a_negative_weight_is_refused(fedkin, tmp_path, table):
    (tmp_path / "graph.csv").write_text("source,target\na,stranger\n")
    fedkin("fit", "clinics.csv", *COLUMNS, "--graph", "graph.csv").refuses("'stranger'")
    (tmp_path / "graph.csv").write_text("source,target,weight\na,b,-1\n")
    fedkin("fit", "clinics.csv", *COLUMNS, "--graph", "graph.csv").refuses("graph.csv", "-1")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(fedkin, tmp_path, table):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    fedkin("fit", "clinics.csv", *COLUMNS, "--out", "closed/model").refuses("closed", "--out")


def test_a_fit_that_does_not_converge_ends_with_code_1_and_keeps_the_old_model(fedkin, tmp_path, table):
    options = [*COLUMNS, "--method", "fused", "--lam", "0.1", "--select", "none", "--tol", "1e-9", "--test-size", "0"]
    fedkin("fit", "clinics.csv", *options, "--max-iter", "1").refuses("--max-iter", "--tol", code=1)
    assert set(files_below(tmp_path)) == {"clinics.csv"}
    fedkin("fit", "clinics.csv", *options, code=0)
    before = files_below(tmp_path)
    assert fedkin("fit", "clinics.csv", *options, "--max-iter", "1").code == 1
    assert files_below(tmp_path) == before


@pytest.mark.processes
def test_an_interrupted_fit_ends_with_code_130_and_leaves_no_model(tmp_path):
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(rng.normal(size=(3000, 6)), columns=[f"x{k}" for k in range(6)])
    rows.assign(clinic=np.arange(3000) % 60, days=rng.integers(2, size=3000)).to_csv(tmp_path / "long.csv", index=False)
    fit = [*COMMAND, "fit", "long.csv", *COLUMNS, "--loss", "logistic", "--repeats", "5000", "--report", "page.html"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    process = subprocess.Popen(fit, cwd=tmp_path, env=environment(), **pipes)
    try:
        assert process.stderr is not None
        process.stderr.readline()  # the first line of progress: the comparison is under way, and takes far longer
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert set(files_below(tmp_path)) == {"long.csv"}
