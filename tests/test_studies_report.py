"""Studies: what is shown of the rows, and of the time while they come."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from fedkin.errors import ParameterError
from fedkin.studies.config import load_study
from fedkin.studies.launch import launch
from fedkin.studies.present import write_report
from fedkin.studies.present.report import Table, make_table, study_page
from fedkin.studies.present.summary import Sample, paired_difference
from fedkin.studies.rows import StudyError, read_part, write_rows
from fedkin.studies.run import duration, progress, run_study
from processes import PATIENCE
from small_studies import UNDRAWN

pytestmark = pytest.mark.studies


def test_everything_is_drawn_from_the_rows_alone(small_study: Path, tmp_path: Path):
    study = load_study(small_study)
    run = run_study(study, tmp_path / "out", jobs=1)
    write_report(study, run.folder, "made in a test")
    names = ["picture.svg", "picture.pdf", "picture.png", "means.md", "means.csv", "index.html"]
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "rows.parquet").write_bytes((run.folder / "rows.parquet").read_bytes())
    write_report(study, alone, "made in a test")
    for name in names:
        assert (alone / name).read_bytes() == (run.folder / name).read_bytes(), name
    page = (alone / "index.html").read_text()
    assert (
        "A small study" in page
        and "data:image/svg+xml;base64," in page
        and "http" not in page.replace("http://www.w3", "")
    )


def test_redraw_needs_the_rows_alone(small_study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    with pytest.raises(ParameterError, match=r"--redraw: there is no .*rows\.parquet; run the study first"):
        launch(None, config=small_study, out=out, redraw=True)
    launch(None, config=small_study, out=out, jobs=1)
    folder = out / "small"
    drawn = {name: (folder / name).read_bytes() for name in ("picture.svg", "means.md", "means.csv")}
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
    assert not (folder / "cells").exists()
    (folder / "rows.parquet").write_bytes(b"no rows")
    with pytest.raises(StudyError, match=r"rows\.parquet cannot be read"):
        launch(None, config=small_study, out=out, redraw=True)


def test_redraw_all_draws_what_is_there(small_study: Path, tmp_path: Path):
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


def test_a_page_drawn_again_still_tells_the_computing_time(small_study: Path, tmp_path: Path):
    small_study.write_text(UNDRAWN.replace("replications = 6", "replications = 2") + "[options]\nsleep = 0.2\n")
    (first,) = launch(None, config=small_study, out=tmp_path / "out", jobs=2)
    assert "4 cells computed in" in first.page.read_text()
    took = [read_part(path).seconds for path in (tmp_path / "out" / "small" / "cells").glob("*.parquet")]
    assert all(0.4 <= one < 10 for one in took)
    (again,) = launch(None, config=small_study, out=tmp_path / "out", jobs=2)
    page = again.page.read_text()
    assert f"4 cells found finished, all 4 took {duration(sum(took))} in total (each in one process)." in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_wide_tables_fit_the_window_and_the_paper(tmp_path: Path):
    """Eleven columns, as in the estimation study: none is hidden at 1200 pixels or on paper (718 pixels of A4)."""
    head = ["ϱ", "n", "|V|", "Local", "Global", "Oracle", "Fed-ADMM", "Fed-ADMM-ES", "Fed-ADMM-Local-ES"]
    line = ["0.1", "200", "100", "0.112 (0.000)", "3.639 (0.058)", "0.00856 (0.00014)", "0.0397 (0.0004)"]
    line += ["0.00858 (0.00014)"] * 3 + ["7.31e-04 (2e-05)"]
    names = [*head, "Pooled by true cluster", "Pooled along the true edges of G"]
    table = Table("t", names, [line], [], [])
    study = replace(load_study("estimation"), figures=())
    text = study_page(study, [], [], [table], "", tmp_path)
    measure = (
        "<script>onload = () => { const wide = document.querySelector('.wide');"
        "document.title = wide.scrollWidth <= wide.clientWidth ? 'all of it' : 'a part' }</script></body>"
    )
    # paper is measured on the screen, by the rules of print
    paper = text.replace("@media print", "@media screen")
    assert "@media print" in text
    for name, content, width in (("screen", text, 1200), ("paper", paper, 718), ("narrow", text, 718)):
        place = tmp_path / f"{name}.html"
        place.write_text(content.replace("</body>", measure))
        command = [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--window-size={width},900",
            "--dump-dom",
        ]
        done = subprocess.run([*command, place.as_uri()], capture_output=True, text=True, timeout=PATIENCE, check=True)
        assert f"<title>{'a part' if name == 'narrow' else 'all of it'}</title>" in done.stdout, name


def test_tables_are_means_with_standard_errors():
    rows = [{"n": 10, "kind": "a", "value": value} for value in (1.0, 2.0, 3.0)] + [
        {"n": 10, "kind": "b", "value": 5.0}
    ]
    table = make_table({"name": "t", "rows": ["n"], "columns": "kind", "value": "value"}, rows)
    assert table.head == ["n", "a", "b"] and table.text == [["10", "2.000 (0.577)", "5.000"]]
    assert table.exact[0] == [10, "a", 2.0, 1.0, pytest.approx(3**-0.5), 3]
    assert table.markdown().splitlines()[0] == "| n | a | b |"


@pytest.mark.parametrize(("panels", "series"), [(1, 2), (3, 6), (2, 4)])
def test_legends_do_not_cover_panels(panels: int, series: int):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from fedkin.studies.present.figures import line_panels

    rng = np.random.default_rng(0)
    rows = [
        {"x": x, "y": float(rng.random() + 0.1), "series": f"a rather long name {s}", "panel": panel}
        for x in (1, 2, 3)
        for s in range(series)
        for panel in range(panels)
        for _ in range(4)
    ]
    figure = line_panels(
        {"x": "x", "y": "y", "series": "series", "columns": "panel", "x_label": "x", "y_label": "y"}, rows
    )
    FigureCanvasAgg(figure).draw()
    legend = figure.legends[0].get_window_extent()
    whole = figure.bbox
    assert legend.x0 >= whole.x0 and legend.x1 <= whole.x1 and legend.y1 <= whole.y1
    for axis in figure.axes:
        assert not legend.overlaps(axis.get_tightbbox())


def test_availability_says_what_it_shows_and_the_label_fits():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from fedkin.studies.present.figures import line_panels

    study = load_study("availability")
    (spec,) = study.figures
    assert spec["y"] == "distance"
    assert all("squared distance" in text.lower() for text in (study.title, spec["y_label"], spec["caption"]))
    assert all("squared" in table["caption"] for table in study.tables)
    points = [(p, name) for p in (0.3, 1.0) for name in study.options["variants"]]
    figure = line_panels(spec, [{"availability": p, "variant": name, "distance": 1e-3 / p} for p, name in points])
    FigureCanvasAgg(figure).draw()
    (label,) = [text for text in figure.texts if text.get_text() == spec["y_label"]]
    extent = label.get_window_extent()
    assert extent.y0 >= 0 and extent.y1 <= figure.bbox.y1


def test_intervals_against_scipy_and_statsmodels():
    from scipy import stats
    from statsmodels.stats.proportion import proportion_confint

    x = np.random.default_rng(1).normal(size=12)
    summary = Sample.of(x)
    low, high = stats.t.interval(0.95, 11, loc=x.mean(), scale=stats.sem(x))
    assert (summary.mean - summary.half_width(), summary.mean + summary.half_width()) == pytest.approx((low, high))
    zeros = Sample.of([1.0] * 17 + [0.0] * 3)
    share = zeros.share_interval()
    assert (share.low, share.high) == pytest.approx(proportion_confint(17, 20, method="wilson"))
    y = x + np.random.default_rng(2).normal(size=12)
    rows = [{"replication": r, "m": m, "v": v[r]} for r in range(12) for m, v in (("x", x), ("y", y))]
    difference = paired_difference(rows, "m", ("x", "y"), "v")
    assert difference.mean / difference.error == pytest.approx(stats.ttest_rel(x, y).statistic)


def test_durations():
    assert [duration(seconds) for seconds in (0, 59.4, 61, 3600)] == ["0 s", "59 s", "1 min 1 s", "1 h 0 min"]


def test_a_bar_with_the_time_left_on_a_terminal_and_one_line_elsewhere(monkeypatch: pytest.MonkeyPatch):
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    for stream, wanted in ((StringIO(), ["slow: 3 cells, 1 found finished"]), (Terminal(), ["3/3", "left"])):
        monkeypatch.setattr("sys.stderr", stream)
        with progress("slow", 3, 1) as advance:
            advance()
            advance()
        lines = stream.getvalue().splitlines()
        assert all(any(words in line for line in lines) for words in wanted)
        assert stream.isatty() or len(lines) == 1


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
