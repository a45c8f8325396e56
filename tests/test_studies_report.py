"""Studies: what is shown of the rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedkin.studies import load_study, run_study, write_report
from fedkin.studies.figures import make_table
from fedkin.studies.summary import Sample, paired_difference

pytestmark = pytest.mark.studies


def test_tables_are_means_with_standard_errors():
    rows = [{"n": 10, "kind": "a", "value": value} for value in (1.0, 2.0, 3.0)]
    rows.append({"n": 10, "kind": "b", "value": 5.0})
    table = make_table({"name": "t", "rows": ["n"], "columns": "kind", "value": "value"}, rows)
    assert table.head == ["n", "a", "b"] and table.text == [["10", "2.000 (0.577)", "5.000"]]
    assert table.exact[0] == [10, "a", 2.0, 1.0, pytest.approx(3**-0.5), 3]
    assert table.markdown().splitlines()[0] == "| n | a | b |"


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
    text = (repository / "docs" / "running-studies.md").read_text(encoding="utf-8")
    for language, name in (("python", "chains.py"), ("toml", "chains.toml")):
        block = text.partition(f"```{language}\n# {name}\n")[2].partition("```")[0]
        assert block
        (tmp_path / name).write_text(block)
    study = load_study(tmp_path / "chains.toml", quick=True)
    run = run_study(study, tmp_path / "out", jobs=1)
    assert len(run.rows) == 4 * 3 * 5
    report = write_report(study, run.folder)
    assert report.page.exists() and len(report.tables[0].text) == 4
    # two groups of sites that differ by much: the chain knows, one model for all does not
    far = [row for row in run.rows if row["jump"] == 2.0]
    error = {name: np.mean([row["error"] for row in far if row["estimator"] == name]) for name in ("global", "fedadmm")}
    assert error["fedadmm"] < 0.2 * error["global"]
