"""The benchmarks' bookkeeping: who is left out and why, what a quick run says of itself, the figure of scaling."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fedkin import solve


@pytest.fixture
def benchmarks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "solvers"]:
        monkeypatch.delitem(sys.modules, name)


def test_names_that_benchmarks_and_examples_import_exist(repository: Path):
    for path in (path for folder in ("benchmarks", "examples") for path in (repository / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "fedkin":
                module = importlib.import_module(str(node.module))
                for name in (alias.name for alias in node.names):
                    known = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                    assert known, f"{path.name}: {node.module} has no {name}"


def test_what_does_not_apply_is_said_before_what_is_not_installed(benchmarks: None, monkeypatch: pytest.MonkeyPatch):
    from solvers import contenders
    from solvers.instances import grid, paper

    monkeypatch.setattr(contenders, "PEERS_PYTHON", sys.executable)  # which has neither of the two
    linear = paper("l2", 0.03, n_sites=10, n_features=3)
    total_variation = grid(8, 0.2)
    for package in ("prox_tv", "pycut-pursuit"):
        peer = contenders.External(package, ())
        assert peer.skip(linear) == "p = 1 and mean loss only"
        assert f"{package} is not installed" in str(peer.skip(total_variation))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "osqp" else found(name))
    osqp = contenders.Convex("OSQP", lambda eps: {})
    assert osqp.skip(linear) == "not a quadratic program"
    assert osqp.skip(paper("l1", 0.007, n_sites=10, n_features=3)) == "osqp is not installed"


def test_paths_are_measured_on_problems_that_know_nothing_yet(benchmarks: None, monkeypatch: pytest.MonkeyPatch):
    from solvers.instances import paper

    run = importlib.import_module("run")
    monkeypatch.delitem(sys.modules, "run")
    assert next(run.paths(quick=True))["work"] == "cold"
    problem = paper("l1", 0.007, n_sites=10, n_features=3).problem
    solve(problem)
    again = run.fresh(problem)
    assert problem.terms.shared and not again.terms.shared
    assert solve(again).objective == pytest.approx(solve(problem).objective, rel=1e-6)


def test_a_quick_run_says_so(benchmarks: None):
    from solvers import tables

    here = {"versions": {"fedkin": "0"}, "cpu": "some", "cores": 2, "load": 0.1, "python": "3"}
    large = {"section": "million", "n": 10_000, "p": 10, "loss": "mean", "penalty": "l2", "failed": "no memory"}
    quick, full = (tables.render([large | {"quick": quick}], here) for quick in (True, False))
    assert "A quick run: small instances" in quick and "### A million sites, made small: certified" in quick
    assert "quick" not in full.lower() and "### A million sites: certified" in full


def test_the_figure_of_scaling_can_be_read(benchmarks: None):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from solvers import tables

    sizes = {"|V|": (1e3, 1e4, 1e5), "|E|": (5e4, 1e5, 2e5, 4e5), "p": (2, 5, 10, 20, 40), "n": (20, 50, 100, 200, 400)}
    rows = [
        {"section": "scaling", "against": name, "value": x, "seconds": 0.3 * (x / values[0]) ** 0.5, "gigabytes": 0.3}
        for name, values in sizes.items()
        for x in values
    ]
    figure = tables.scaling_figure(rows)
    FigureCanvasAgg(figure).draw()
    for axis, values in zip(figure.axes, list(sizes.values()) * 2, strict=True):
        shown = [label for label in axis.get_xticklabels(which="both") if label.get_text()]
        assert len(shown) == len(values) and axis.get_yticklabels()
        boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.x0)
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    for axis in figure.axes[: len(sizes)]:
        measured, linear = (np.log(line.get_xydata()) for line in axis.get_lines())
        # slope 1, as far above the points as below
        np.testing.assert_allclose(np.diff(linear[:, 1]), np.diff(linear[:, 0]))
        assert (measured[:, 1] - linear[:, 1]).mean() == pytest.approx(0, abs=1e-9)
    (legend,) = figure.legends
    assert not any(legend.get_window_extent().overlaps(axis.get_tightbbox()) for axis in figure.axes)


def test_tables_are_measured_and_losses_are_shown(
    benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delitem(sys.modules, "tables", raising=False)
    import tables

    monkeypatch.delenv("FEDKIN_DATA", raising=False)
    words = ["--only", "melanoma", "--methods", "ridge,one,site,mixed,kin", "--splits", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["tables.py", *words])
    tables.main()
    shown = capsys.readouterr()
    assert "melanoma: a look-alike, since the folder of the public tables is unknown" in shown.err
    assert "### generated, like melanoma: 9 sites, 189 rows, 1 feature" in shown.out
    assert "| kin |" in shown.out or "| **kin** |" in shown.out
    assert re.search(r"^Not run: .*mixed model, statsmodels: least squares only", shown.out, re.MULTILINE)
    rows = (tmp_path / "tables.jsonl").read_text().splitlines()
    tables.main()
    assert "'table'" not in capsys.readouterr().err, "what is known is not measured again"
    assert (tmp_path / "tables.jsonl").read_text().splitlines() == rows
    for path, more in ((tmp_path / "short", ["--limit", "0.01"]), (tmp_path / "late", ["--minutes", "0"])):
        monkeypatch.setattr(sys, "argv", ["tables.py", *words[:2], "--methods", "kin,one", "--out", str(path), *more])
        if more[0] == "--minutes":
            tables.main()
            assert (path / "tables.jsonl").read_text() == ""
        else:
            tables.main()
            assert "melanoma, kin, split 0: not done after 0 s" in capsys.readouterr().err
    from table_pages import render

    rows = [
        {"table": "t", "method": method, "split": split, "error": error + 0.01 * split, "seconds": 1.0, "groups": 2}
        | {"generated": False, "sites": 3, "rows": 9, "features": 1, "date": "2026-01-01", "cpu": "some", "cores": 2}
        | {"load": 0.0, "versions": {"fedkin": "0"}}
        for method, error in (("ridge at each site, scikit-learn", 1.0), ("kin", 2.0))
        for split in (0, 1)
    ]
    text = render(rows)
    assert "- t: kin against ridge at each site, scikit-learn, +1.0000 (0.0000) worse" in text
    assert "| t (deviance, 2 splits) | - | - | - | - | - | - | **2.005** | - | +1.0000 (0.0000) worse |" in text


def test_the_sampler_has_the_posterior_that_numpyro_has(benchmarks: None):
    """NumPyro's numbers, as ``benchmarks/kin_posterior.py --write`` has left them, within both Monte Carlo errors."""
    from kin_posterior import by_fedkin, case

    theirs = json.loads((Path(__file__).parent / "kin_posterior.json").read_text())
    mine = by_fedkin(*case(), sweeps=6000)
    for name, bound in (("same", 0.04), ("groups", 0.04), ("share", 0.04), ("effects", 0.05)):
        assert np.abs(mine[name] - np.array(theirs[name])).max() < bound, name
    assert np.ptp(np.array(theirs["same"])) > 0.4
