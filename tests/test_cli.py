"""The command line: defaults, refusals, Ctrl-C, and files that must not be replaced."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import fedkin
import fedkin.cli.fit
from clinics import FIT, clinic_rows, failing, write
from fedkin.cli import main
from fedkin.cli.console import flag
from fedkin.fitting import FitOptions, fit


def test_the_defaults_are_those_of_python(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["--site", "clinic", "--target", "outcome"]
    table = np.array([row[1:] for row in clinic_rows()], dtype=float)
    ids = [row[0] for row in clinic_rows()]
    federation = fedkin.Federation.read("sites.csv", site="clinic", target="outcome")
    for options, words in (
        ({"method": "fused"}, ["--method", "fused", "--select", "bonferroni"]),
        ({"method": "fused", "select": "none"}, ["--method", "fused", "--select", "none"]),
        ({"method": "fused", "select": None}, ["--method", "fused", "--select", "none"]),
        ({}, []),
    ):
        assert main(["fit", "sites.csv", *columns, *words]) == 0
        model = fedkin.load("fedkin-model")
        fitted = fit(federation, None, FitOptions(**options))
        face = fedkin.FedADMMRegressor if options else fedkin.KinRegressor
        own = {name: value for name, value in options.items() if name != "method"}
        estimator = face(**own).fit(table[:, :2], table[:, 2], site=ids)
        for other in (fitted, estimator.model_):
            assert model.sites == other.sites
            np.testing.assert_array_equal(model.coef, other.coef)
            np.testing.assert_array_equal(model.intercept, other.intercept)
        assert model.graph.n_edges == (0 if not options else 15 if "select" in options else 6)


def test_every_option_of_a_fit_is_an_option_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from typer.main import get_command

    from fedkin.cli.console import make_app

    command = get_command(make_app(["fit"])).commands["fit"]
    known = {one.name: one for one in command.params}
    for item in fields(FitOptions):
        assert flag(item.name) in known[item.name].opts
        words = {"fuse_intercept": "yes", "ridge": "0.0", "sparsity": "0.0", "fixed": None}  # several types
        if item.name != "cv_rule":  # a flag for one of two rules
            assert known[item.name].default == words.get(item.name, item.default)


def test_degenerate_sites_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(2)
    ages = rng.normal(size=120).tolist()
    rows = [[f"s{k % 3}", x, "yes" if k % 3 == 2 or x + rng.logistic() > 0 else "no"] for k, x in enumerate(ages)]
    write(place / "one_class.csv", ["site", "x", "state"], rows)
    options = ["--target", "state", "--method", "fused", "--lam", "0.1", "--select", "holm"]
    assert main(["fit", "one_class.csv", "--site", "site", *options]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert any("s2" in line for line in notes)
    assert len(notes) == len(set(notes)) == sum("s2" in line for line in notes)  # once, not for every fit
    assert main(["inspect", "fedkin-model"]) == 0
    assert "s2" in capsys.readouterr().out.partition("Notes")[2]


def test_without_edges_every_site_has_its_exact_solution(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """40 sites x 140 rows x 20 nearly collinear features, all edges dropped: as good as each site's least squares."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(40, 140, 1))
    X = common + 1e-6 * rng.normal(size=(40, 140, 20))
    # slopes so different that every edge is dropped
    y = common[:, :, 0] * np.arange(40)[:, None] + 0.1 * rng.normal(size=(40, 140))
    rows = [[f"s{u}", *x, z] for u in range(40) for x, z in zip(X[u].tolist(), y[u].tolist(), strict=True)]
    write(place / "wide.csv", ["site", *(f"x{k}" for k in range(20)), "y"], rows)
    assert main(["fit", "wide.csv", "--site", "site", "--target", "y", "--method", "fused", "--test-size", "0"]) == 0
    assert "0 of 780 edges kept" in capsys.readouterr().out
    model = fedkin.load("fedkin-model")
    for u in range(40):
        own = np.column_stack([np.ones(140), X[u]])
        best = y[u] - own @ np.linalg.lstsq(own, y[u], rcond=None)[0]
        ours = y[u] - model.predict(X[u], f"s{u}")
        assert (ours**2).mean() <= (1 + 1e-6) * (best**2).mean()


def test_files_that_do_not_fit_into_memory_are_fitted_where_they_are(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    pandas.read_csv("sites.csv").to_parquet("sites.parquet")
    columns = ["--site", "clinic", "--target", "outcome"]
    assert main(["fit", "sites.parquet", *columns, "--test-size", "0", "--out", "whole"]) == 0
    assert "stay in their files" not in capsys.readouterr().err
    monkeypatch.setattr("fedkin.cli.reading.free_memory", lambda: 20_000.0)
    assert main(["fit", "sites.parquet", *columns, "--json", "--out", "streamed", "--report", "page.html"]) == 0
    shown = capsys.readouterr()
    assert "rows stay in their files, read in one pass" in shown.err
    assert json.loads(shown.out)["comparison"]["kind"] == "folds"
    whole, streamed = fedkin.load("whole"), fedkin.load("streamed")
    order = [whole.index[site] for site in streamed.sites]
    np.testing.assert_allclose(streamed.coef, whole.coef[order], atol=1e-8)
    for more in (["--time", "age"], ["--repeats", "3"], ["--keep-best"]):
        assert more[0] in failing(capsys, "fit", "sites.parquet", *columns, *more)
    monkeypatch.setattr("fedkin.cli.reading.free_memory", lambda: 5_000.0)
    assert "--method kin" in failing(capsys, "fit", "sites.parquet", *columns, "--loss", "huber", "--method", "fused")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--target COL"]),
        ([*FIT[:4], "--select", "bonferroni"], ["--select", "not for kin", "--method fused"]),
        ([*FIT, "--level", "2"], ["level", "2"]),
        ([*FIT, "--test-size", "1"], ["--test-size", "got 1"]),
        ([*FIT, "--ridge", "-1"], ["ridge", "-1"]),
        ([*FIT, "--loss", "mean"], ["no target"]),
        ([*FIT, "--out", "."], ["not a Fedkin model", "--out"]),
    ],
)
def test_wrong_arguments(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    line = failing(capsys, "fit", "sites.csv", *arguments)
    assert all(word in line for word in words), line
    assert sorted(path.name for path in place.iterdir()) == ["sites.csv"]


def test_rounds_of_the_command_are_those_of_python(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fused = [*FIT, "--test-size", "0", "--method", "fused", "--solver", "fedadmm"]
    rounds = [*fused, "--rounds", "40", "--batch-size", "5", "--fedadmm"]
    assert main(["fit", "sites.csv", *rounds, "step=literal,kappa=0.5,average=paper", "--fedadmm", "stop=rounds"]) == 0
    assert "all 40 rounds were run" in capsys.readouterr().err
    federation = fedkin.Federation.read("sites.csv", site="clinic", target="outcome")
    own = {"step": "literal", "kappa": 0.5, "average": "paper", "stop": "rounds"}
    options = FitOptions(method="fused", lam=0.01, solver="fedadmm", rounds=40, batch_size=5, fedadmm=own)
    model = fedkin.load("fedkin-model")
    np.testing.assert_array_equal(model.coef, fit(federation, None, options).coef)
    assert model.options["fedadmm"] == own
    (place / "fedkin-model").rename(place / "kept")
    # batches are not turned into SAGA's without a word: the gap is out of reach, and the message says what helps
    line = failing(capsys, "fit", "sites.csv", *fused, "--rounds", "40", "--batch-size", "5", code=1)
    assert "did not converge" in line and "--fedadmm gradient=saga" in line
    assert "KEY=VALUE" in failing(capsys, "fit", "sites.csv", *rounds, "literal")
    assert "--batch-size is for --solver fedadmm" in failing(capsys, "fit", "sites.csv", *FIT, "--batch-size", "5")


def test_ctrl_c_ends_a_solver_that_would_go_on(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def solver(*_: object, **__: object) -> None:
        for _ in range(3):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                continue  # as a path of many solutions does
        pytest.fail("Ctrl-C was swallowed")

    monkeypatch.setattr(fedkin.cli.fit, "fit_model", solver)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0"]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "interrupted" in shown.err
    assert "Traceback" not in shown.err
    assert sorted(path.name for path in place.iterdir()) == ["sites.csv"]


TARGET = ["--site", "site", "--target", "y", "--test-size", "0"]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that writes ``rows.csv`` of five sites; its argument changes the target of a site's row."""
    monkeypatch.chdir(tmp_path)

    def write(change=lambda site, row, y: y) -> str:
        rng = np.random.default_rng(0)
        lines = ["site,x,y"]
        for site in range(5):
            for row in range(14):
                y = int(rng.random() < 0.5)
                lines.append(f"s{site},{rng.normal():.3f},{change(site, row, y)}")
        Path("rows.csv").write_text("\n".join(lines) + "\n")
        return "rows.csv"

    return write


def said(capsys, *words: str) -> str:
    main([str(word) for word in words])
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


def test_outputs_never_replace_what_a_command_reads(table, capsys):
    path = Path(table())
    assert main(["fit", str(path), *TARGET]) == 0
    folder, link = Path("parts"), Path("link.csv")
    folder.mkdir()
    (folder / "s0.csv").write_text("x,y\n1,0\n")
    link.symlink_to(path)
    Path("sites.csv").write_text("site,beds\n" + "".join(f"s{k},{k}\n" for k in range(5)))
    model = Path("fedkin-model/model.json")
    before = {file: file.read_bytes() for file in (path, Path("sites.csv"), folder / "s0.csv", model)}
    capsys.readouterr()
    fit = ["fit", str(path), *TARGET, "--report"]
    for command in (
        ["predict", "fedkin-model", "rows.csv", "--out", "link.csv"],
        ["predict", "fedkin-model", "rows.csv", "--out", "../" + Path.cwd().name + "/rows.csv"],
        ["predict", "fedkin-model", "row*.csv", "--out", "rows.csv"],
        ["predict", "fedkin-model", "parts", "--out", "parts/s0.csv"],
        [*fit, "sites.csv", "--covariates", "sites.csv"],
        [*fit, "sites.csv", "--graph", "sites.csv"],
        ["report", "fedkin-model", "--out", "sites.csv", "--coordinates", "sites.csv"],
    ):
        assert "is an input of this command and would be overwritten" in said(capsys, *command), command
    assert all(file.read_bytes() == content for file, content in before.items())
    found = said(capsys, *fit, "fedkin-model/model.json")  # of the model that it will write
    assert "lies in the model directory" in found
    assert model.read_bytes() == before[model]
    assert main(["predict", "fedkin-model", "rows.csv", "--out", "new.csv"]) == 0


def test_the_place_of_a_report_is_tried_before_the_fit(table, capsys):
    found = said(capsys, "fit", table(), *TARGET, "--report", "/proc/page.html")
    assert "error: /proc/page.html cannot be written" in found and not Path("fedkin-model").exists()


def test_numbers_that_are_not_finite_are_shown(table, capsys):
    assert main(["fit", table(), "--site", "site", "--target", "y", "--repeats", "1"]) == 0
    model = fedkin.load("fedkin-model")
    assert model.comparison is not None
    methods = [{**one, "mean": math.inf, "difference": math.nan} for one in model.comparison["methods"]]
    replace(model, comparison={**model.comparison, "methods": methods}).save("odd")
    capsys.readouterr()
    assert main(["inspect", "odd"]) == 0
    assert re.search(r"Local +∞ ", capsys.readouterr().out)
    assert "| Local | ∞ |" in said(capsys, "inspect", "odd", "--card")
    assert main(["report", "odd", "--out", "page.html"]) == 0


def test_groups_count_from_1(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", "--site", "clinic", "--target", "outcome", "--test-size", "0"]) == 0
    for wrong in ("0", "3"):
        assert f"no group {wrong}: groups are 1 to 2" in said(capsys, "inspect", "fedkin-model", "--group", wrong)
    assert "Group 2" in said(capsys, "inspect", "fedkin-model", "--group", "2")


def test_a_model_is_said_to_be_replaced_once_the_input_is_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0"]) == 0
    assert "replaced" not in said(capsys, "fit", "sites.csv", *FIT[:-1], "0.1", "--features", "zzz")
    assert "will be replaced" in said(capsys, "fit", "sites.csv", *FIT, "--test-size", "0")


def test_population_effects_come_with_intervals_and_tests(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["fit", "sites.csv", "--site", "clinic", "--target", "outcome", "--test-size", "0"]) == 0
    capsys.readouterr()
    assert main(["inspect", "fedkin-model"]) == 0
    shown, kin = capsys.readouterr().out, fedkin.load("fedkin-model").kin
    assert kin is not None
    for head in ("std err", "interval", "df", " p "):
        assert head in shown
    line = next(line for line in shown.splitlines() if re.search(rf"{re.escape(kin.names[1])} .* to ", line))
    numbers = [float(cell) for cell in re.findall(r"-?\d+\.\d+", line)]
    error = float(np.sqrt(kin.mean_covariance[1, 1]))
    expected = kin.mean[1], error, *stats.t.interval(0.95, kin.degrees[1], kin.mean[1], error), kin.degrees[1]
    assert numbers[:5] == pytest.approx(expected, rel=0.05)
    p = 2 * stats.t.sf(abs(kin.mean[1] / error), kin.degrees[1])
    assert ("<0.001" in line) if p < 0.001 else numbers[5] == pytest.approx(p, abs=6e-4)
