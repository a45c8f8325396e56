"""Studies: what is shown of the rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fedkin.errors import ParameterError
from fedkin.studies import StudyError, launch, load_study, run_study, write_report, write_rows
from fedkin.studies.figures import line_panels, make_table
from fedkin.studies.run import duration
from fedkin.studies.summary import Sample, paired_difference

pytestmark = pytest.mark.studies


def test_redraw_needs_the_rows_alone(small_study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    with pytest.raises(ParameterError, match=r"--redraw: there is no .*rows\.parquet; run the study first"):
        launch(None, config=small_study, out=out, redraw=True)
    launch(None, config=small_study, out=out, jobs=1)
    folder = out / "small"
    names = ("picture.svg", "picture.pdf", "picture.png", "means.md", "means.csv")
    drawn = {name: (folder / name).read_bytes() for name in names}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.name != "rows.parquet":
            path.rmdir() if path.is_dir() else path.unlink()
    small_study.with_name("own.py").unlink()  # nothing is run, so no task is needed
    capsys.readouterr()
    (report,) = launch(None, config=small_study, out=out, redraw=True)
    assert capsys.readouterr().out == f"{folder / 'index.html'}\n"
    assert {name: (folder / name).read_bytes() for name in drawn} == drawn
    page = report.page.read_text()
    assert "Drawn from the rows of an earlier run; its cells took" in page and "4 settings, 6 replications" in page
    assert "A small study" in page and "data:image/svg+xml;base64," in page
    assert "http" not in page.replace("http://www.w3", "")
    assert not (folder / "cells").exists()
    (folder / "rows.parquet").write_bytes(b"no rows")
    with pytest.raises(StudyError, match=r"rows\.parquet cannot be read"):
        launch(None, config=small_study, out=out, redraw=True)


def test_redraw_all_draws_what_is_there(tmp_path: Path):
    points = [(v, n, k) for v in ("bartlett", "model") for n in (30, 100) for k in (0.5, 1.0)]
    rows = [
        {"variance": v, "n_samples": n, "signal": k, "exact": 1.0, "no_true_edge_dropped": 1.0, "signal_ratio": k}
        for v, n, k in points
    ]
    folder = tmp_path / "selection-quick"
    folder.mkdir()
    write_rows(folder / "rows.parquet", [{**row, "replication": r, "seed": r} for r in range(3) for row in rows])
    (report,) = launch("all", out=tmp_path, quick=True, redraw=True)
    assert report.page == folder / "index.html"
    page = report.page.read_text()
    # three of three do not show that it is 95%
    assert page.count("too few replications to tell (1.00, between 0.") == 2
    assert "With 3 of the 200 replications of the full study" in page and "4 settings, 3 replications" in page


def test_tables_are_means_with_standard_errors():
    rows = [{"n": 10, "kind": "a", "value": value} for value in (1.0, 2.0, 3.0)]
    rows.append({"n": 10, "kind": "b", "value": 5.0})
    table = make_table({"name": "t", "rows": ["n"], "columns": "kind", "value": "value"}, rows)
    assert table.head == ["n", "a", "b"] and table.text == [["10", "2.000 (0.577)", "5.000"]]
    assert table.exact[0] == [10, "a", 2.0, 1.0, pytest.approx(3**-0.5), 3]
    assert table.markdown().splitlines()[0] == "| n | a | b |"


@pytest.mark.parametrize(("panels", "series"), [(1, 2), (3, 6), (2, 4)])
def test_legends_do_not_cover_panels(panels: int, series: int):
    rng = np.random.default_rng(0)
    rows = [
        {"x": x, "y": float(rng.random() + 0.1), "series": f"a rather long name {s}", "panel": panel}
        for x in (1, 2, 3)
        for s in range(series)
        for panel in range(panels)
        for _ in range(4)
    ]
    spec = {"x": "x", "y": "y", "series": "series", "columns": "panel", "x_label": "x", "y_label": "y"}
    figure = line_panels(spec, rows)
    FigureCanvasAgg(figure).draw()
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= figure.bbox.x0 and legend.x1 <= figure.bbox.x1 and legend.y1 <= figure.bbox.y1
    for axis in figure.axes:
        assert not legend.overlaps(axis.get_tightbbox())


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


def test_durations():
    assert [duration(seconds) for seconds in (0, 59.4, 61, 3600)] == ["0 s", "59 s", "1 min 1 s", "1 h 0 min"]


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
