"""Studies: what is shown of the rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedkin.studies import load_study, run_study, write_study_report
from fedkin.studies.figures import ResultTable, make_table
from fedkin.studies.replications import Sample, paired_difference

pytestmark = pytest.mark.studies


def test_tables_are_means_with_standard_errors(tmp_path: Path):
    rows = [{"n": 10, "kind": "a", "value": value} for value in (1.0, 2.0, 3.0)]
    rows.append({"n": 10, "kind": "b", "value": 5.0})
    table = make_table(
        {"name": "t", "rows": ["n"], "columns": "kind", "value": "value", "at": None, "where": {}, "caption": ""}, rows
    )
    assert table.head == ["n", "a", "b"] and table.text == [["10", "2.000 (0.577)", "5.000"]]
    table.write(tmp_path)
    assert (tmp_path / "t.md").read_text().splitlines()[0] == "| n | a | b |"
    head, first, _ = (tmp_path / "t.csv").read_text().splitlines()
    assert head == "n,kind,mean,sd,standard_error,replications"  # no name twice, also where a grid has an n
    assert [float(cell) for cell in first.replace("a", "0").split(",")] == [10, 0, 2, 1, pytest.approx(3**-0.5), 3]


def test_a_table_of_samples_has_a_column_for_each_of_their_numbers(tmp_path: Path):
    cells = [["x", Sample.from_values([1.0, 3.0])], ["y", None]]
    ResultTable("t", ["name", "log-loss (nats)"], cells, brackets="sd").write(tmp_path)
    assert (tmp_path / "t.md").read_text().splitlines()[2:] == ["| x | 2.000 (1.414) |", "| y |  |"]
    head, first, second = (tmp_path / "t.csv").read_text().splitlines()
    assert head.split(",") == ["name", *(f"log_loss_nats_{part}" for part in ("mean", "sd", "standard_error", "n"))]
    assert first.startswith("x,2.0,1.4142") and first.endswith(",2") and second == "y,,,,"


def test_intervals_against_scipy_and_statsmodels():
    from scipy import stats
    from statsmodels.stats.proportion import proportion_confint

    x = np.random.default_rng(1).normal(size=12)
    summary = Sample.from_values(x)
    low, high = stats.t.interval(0.95, 11, loc=x.mean(), scale=stats.sem(x))
    assert (summary.interval().low, summary.interval().high) == pytest.approx((low, high))
    share = Sample.from_values([1.0] * 17 + [0.0] * 3).share_interval()
    assert (share.low, share.high) == pytest.approx(proportion_confint(17, 20, method="wilson"))
    y = x + np.random.default_rng(2).normal(size=12)
    rows = [{"replication": r, "m": m, "v": v[r]} for r in range(12) for m, v in (("x", x), ("y", y))]
    difference = paired_difference(rows, "m", ("x", "y"), "v")
    assert difference.mean / difference.error == pytest.approx(stats.ttest_rel(x, y).statistic)


def test_the_example_of_the_documentation(repository: Path, tmp_path: Path):
    text = (repository / "docs" / "studies.md").read_text(encoding="utf-8")
    for language, name in (("python", "chains.py"), ("toml", "chains.toml")):
        block = text.partition(f"```{language}\n# {name}\n")[2].partition("```")[0]
        assert block
        (tmp_path / name).write_text(block)
    study = load_study(tmp_path / "chains.toml", quick=True)
    run = run_study(study, tmp_path / "out", jobs=1)
    assert len(run.rows) == 4 * 3 * 5
    report = write_study_report(study, run.folder)
    assert report.page.exists() and len(report.tables[0].text) == 4
    # two groups of sites that differ by much: the chain knows, one model for all does not
    far = [row for row in run.rows if row["jump"] == 2.0]
    error = {name: np.mean([row["error"] for row in far if row["estimator"] == name]) for name in ("global", "fedadmm")}
    assert error["fedadmm"] < 0.2 * error["global"]
