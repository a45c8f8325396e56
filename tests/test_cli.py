"""The command line, used as a person would: right, wrong, and interrupted."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import fedkin
import fedkin.cli.models.fit_table
from fedkin.cli import main
from fedkin.errors import FedkinWarning, SolverError
from fedkin.fitting import FitOptions, compare, fit_federation
from processes import PATIENCE

HEADER = ["clinic", "age", "dose", "outcome"]
NORTH = ["Zürich", "Bern", "[red]Basel[/]"]
SOUTH = ["Lugano", "東京", "Como"]
FIT = ["--device", "clinic", "--target", "outcome", "--lam", "0.01"]


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


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with ``sites.csv``."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sites.csv", HEADER, clinic_rows())
    return tmp_path


def failing(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Run a command that has to fail with one line on standard error, and return the line."""
    assert main(list(arguments)) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    lines = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


# --- what goes well -------------------------------------------------------------------------------------------


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fedkin {fedkin.__version__}\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("fit", "predict", "inspect", "demo"))
    for command in ("fit", "predict", "inspect", "demo"):
        assert main([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_fit_shows_errors_groups_and_place(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--out", "model"]) == 0
    shown = capsys.readouterr()
    for words in ("Local", "Global", "Fedkin", "2 groups", "[red]Basel[/]", "東京", "lam", "gap", "model, fitted on"):
        assert words in shown.out
    model = fedkin.load(place / "model")
    assert {frozenset(group) for group in model.groups()} == {frozenset(NORTH), frozenset(SOUTH)}
    assert model.n_samples.tolist() == [24] * 6  # all rows, not the training part


def test_fit_as_json_agrees_with_the_library(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0.5", "--seed", "3", "--json", "--out", "model"]) == 0
    document = json.loads(capsys.readouterr().out)
    federation = fedkin.Federation.read("sites.csv", device="clinic", target="outcome")
    options = FitOptions(lam=0.01, seed=3)
    expected = compare(federation, None, options, test_size=0.5)
    assert document["comparison"] == json.loads(json.dumps(expected.plain()))
    model = fedkin.load(document["model"])
    assert model.comparison == document["comparison"]
    assert (document["lam"], document["gap"], document["n_groups"]) == (model.lam, model.gap, 2)
    assert sorted(map(len, document["groups"])) == [3, 3]
    assert document["selection"]["candidates"] == 15


def test_sites_that_a_graph_does_not_name_have_no_edges(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(place / "graph.csv", ["source", "target"], [["Bern", "Zürich"], ["Lugano", "Como"]])
    assert main(["fit", "sites.csv", *FIT, "--graph", "graph.csv", "--test-size", "0", "--out", "model"]) == 0
    assert "note: the graph does not name 2 devices" in capsys.readouterr().err
    model = fedkin.load(place / "model")
    degree = dict(zip(model.devices, model.graph.degree.tolist(), strict=True))
    assert degree == {"Bern": 1, "Zürich": 1, "Lugano": 1, "Como": 1, "[red]Basel[/]": 0, "東京": 0}


def test_fit_without_comparison(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparison"] is None
    assert (place / "fedkin-model" / "model.json").exists()


def test_lam_by_cross_validation(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT[:4], "--test-size", "0", "--one-se", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lam"] > 0


def test_a_graph_limits_who_can_be_kin(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(place / "graph.csv", ["source", "target"], [["Zürich", "Bern"], ["Bern", "Lugano"]])
    fit = ["fit", "sites.csv", *FIT, "--graph", "graph.csv", "--json", "--test-size", "0"]
    assert main(fit) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert sorted(groups[0]) == ["Bern", "Zürich"]
    assert len(groups) == 5
    assert main([*fit, "--select", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["edges"] == 2


def test_the_defaults_are_those_of_python(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["--device", "clinic", "--target", "outcome"]
    table = np.array([row[1:] for row in clinic_rows()], dtype=float)
    ids = [row[0] for row in clinic_rows()]
    federation = fedkin.Federation.read("sites.csv", device="clinic", target="outcome")
    for options, words in (
        ({"method": "fused"}, ["--select", "bonferroni"]),
        ({"select": "none"}, ["--select", "none"]),
        ({"select": None}, ["--select", "none"]),
        ({}, []),
    ):
        assert main(["fit", "sites.csv", *columns, *words]) == 0
        model = fedkin.load("fedkin-model")
        fitted = fit_federation(federation, None, FitOptions(**options))
        face = fedkin.FedADMMRegressor if options else fedkin.KinRegressor
        own = {name: value for name, value in options.items() if name != "method"}
        estimator = face(**own).fit(table[:, :2], table[:, 2], device=ids)
        for other in (fitted, estimator.model_):
            assert (model.devices, model.lam) == (other.devices, other.lam)
            np.testing.assert_array_equal(model.coef, other.coef)
            np.testing.assert_array_equal(model.intercept, other.intercept)
        assert model.graph.n_edges == (0 if not options else 6 if "method" in options else 15)


def test_every_option_of_a_fit_is_an_option_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from typer.main import get_command

    from fedkin.cli.app import make_app
    from fedkin.cli.shared.options import flag

    command = get_command(make_app(["fit"])).commands["fit"]
    known = {one.name: one for one in command.params}
    for item in fields(FitOptions):
        assert flag(item.name) in known[item.name].opts
        words = {"fuse_intercept": "yes", "ridge": "0.0"}  # where values are of several types
        if item.name != "cv_rule":  # a flag for one of two rules
            assert known[item.name].default == words.get(item.name, item.default)


def test_one_file_per_device(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "sites").mkdir()
    for clinic in NORTH[:2] + SOUTH[:2]:
        rows = [row[1:] for row in clinic_rows() if row[0] == clinic]
        write(place / "sites" / f"{clinic}.csv", HEADER[1:], rows)
    assert main(["fit", "sites", "--target", "outcome", "--lam", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_groups"] == 2
    assert main(["predict", "fedkin-model", "sites", "--json"]) == 0
    predictions = json.loads(capsys.readouterr().out)["predictions"]
    assert len(predictions) == 4 * 24
    assert {row[1] for row in predictions} == {*NORTH[:2], *SOUTH[:2]}


def test_predictions_are_in_the_order_of_the_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0"]) == 0
    rows = clinic_rows(n=3, seed=9)
    write(place / "new.csv", HEADER[:3], [row[:3] for row in rows])
    capsys.readouterr()
    assert main(["predict", "fedkin-model", "new.csv"]) == 0
    shown = capsys.readouterr().out
    assert main(["predict", "fedkin-model", "new.csv", "--out", "predictions.csv"]) == 0
    assert (place / "predictions.csv").read_text(encoding="utf-8") == shown
    table = list(csv.DictReader(shown.splitlines()))
    assert [line["clinic"] for line in table] == [row[0] for row in rows]
    model = fedkin.load("fedkin-model")
    for line, row in zip(table, rows, strict=True):
        coef = model.coef[model.index[row[0]], 0]
        expected = coef @ np.array(row[1:3], dtype=float) + model.intercept[model.index[row[0]], 0]
        assert float(line["prediction"]) == pytest.approx(float(expected))


def test_labels_make_a_classifier(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    ages = rng.normal(size=120).tolist()
    rows = [[k % 3, x, "ill" if x + rng.logistic() > 0 else "well"] for k, x in enumerate(ages)]
    write(place / "labels.csv", ["site", "x", "state"], rows)
    fit = ["fit", "labels.csv", "--device", "site", "--target", "state", "--lam", "0.1"]
    assert main([*fit, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["loss"], document["classes"]) == ("logistic", ["ill", "well"])
    assert "accuracy" in document["comparison"]["more"]
    assert main(["predict", "fedkin-model", "labels.csv"]) == 0
    table = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    for line in table:
        assert line["prediction"] == ("ill" if float(line["probability:ill"]) > 0.5 else "well")


def test_zero_one_targets_get_a_hint(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[k % 2, k % 7, (k * 5) % 3 % 2] for k in range(40)]
    write(place / "binary.csv", ["site", "x", "state"], rows)
    assert main(["fit", "binary.csv", "--device", "site", "--target", "state", "--lam", "0.1"]) == 0
    assert "--loss logistic" in capsys.readouterr().err


def test_degenerate_devices_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(2)
    ages = rng.normal(size=120).tolist()
    rows = [[f"s{k % 3}", x, "yes" if k % 3 == 2 or x + rng.logistic() > 0 else "no"] for k, x in enumerate(ages)]
    write(place / "one_class.csv", ["site", "x", "state"], rows)
    fit = ["fit", "one_class.csv", "--device", "site", "--target", "state", "--lam", "0.1", "--select", "holm"]
    assert main(fit) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert any("s2" in line for line in notes)
    assert len(notes) == len(set(notes)) == sum("s2" in line for line in notes)  # once, not for every fit
    assert main(["inspect", "fedkin-model"]) == 0
    assert "s2" in capsys.readouterr().out.partition("Notes")[2]


def test_notes_that_differ_in_numbers_share_a_line() -> None:
    from fedkin.cli.shared.model_words import note_lines

    notes = {"a": ("3 rows for 5 features",), "b": ("one class only",), "c": ("4 rows for 5 features",)}
    assert note_lines(notes) == ["a, c: 3 rows for 5 features (the numbers are those of a)", "b: one class only"]
    many = {f"d{k}": (f"reason {chr(97 + k)}",) for k in range(12)}
    assert len(note_lines(many)) == 9
    assert "4 more sites" in note_lines(many)[-1]


def test_counts_with_an_offset(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(3)
    exposure, dose = rng.uniform(1, 20, size=90), rng.normal(size=90)
    deaths = rng.poisson(exposure * np.exp(0.3 * dose))
    rows = [[k % 3, dose[k], np.log(exposure[k]), deaths[k]] for k in range(90)]
    write(place / "counts.csv", ["county", "uvb", "log_expected", "deaths"], rows)
    fit = ["fit", "counts.csv", "--device", "county", "--target", "deaths", "--loss", "poisson", "--lam", "0.01"]
    assert main([*fit, "--offset", "log_expected", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["offset"] == "log_expected"
    assert main(["predict", "fedkin-model", "counts.csv", "--json"]) == 0  # finds the offset by itself
    predicted = [row[2] for row in json.loads(capsys.readouterr().out)["predictions"]]
    model = fedkin.load("fedkin-model")
    county = np.arange(90) % 3
    assert model.devices == (0, 1, 2)
    rate = np.exp(model.intercept[county, 0] + model.coef[county, 0, 0] * dose)
    np.testing.assert_allclose(predicted, exposure * rate)


def test_means_need_no_target(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", "sites.csv", "--device", "clinic", "--loss", "mean", "--features", "age, dose", "--lam", "0.1"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["target"], document["features"]) == (None, ["age", "dose"])


def test_inspect(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0"]) == 0
    capsys.readouterr()
    assert main(["inspect", "fedkin-model"]) == 0
    shown = capsys.readouterr().out
    for words in ("2 groups", "6 of 15 edges kept", "(intercept)", "age", "[red]Basel[/]", "outcome"):
        assert words in shown
    assert main(["inspect", "fedkin-model", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["options"]["device_column"] == "clinic"
    assert document["n_rows"] == 144


def test_columns_are_left_out(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["fit", "sites.csv", *FIT, "--test-size", "0", "--json"]
    assert main([*fit, "--drop", "dose"]) == 0
    assert json.loads(capsys.readouterr().out)["features"] == ["age"]
    assert main(["predict", "fedkin-model", "sites.csv"]) == 0
    capsys.readouterr()
    assert "no column 'doze' to drop (did you mean 'dose'?)" in failing(capsys, *fit, "--drop", "doze")
    assert "'outcome' cannot be both the target and dropped" in failing(capsys, *fit, "--drop", "outcome")
    both = failing(capsys, *fit, "--features", "age,dose", "--drop", "dose")
    assert "'dose' cannot be both a feature and dropped" in both
    assert "unexpected 'dose': lists have commas" in failing(capsys, *fit, "--features", "age", "dose")


def test_a_model_that_is_replaced_is_told_of(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["fit", "sites.csv", *FIT, "--test-size", "0"]
    assert main(fit) == 0
    assert "replaces" not in capsys.readouterr().err
    assert main(fit) == 0
    assert "fedkin-model replaces the model of 6 sites that was there" in capsys.readouterr().err


def test_many_groups_and_features_are_summarised(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(4)
    rows = [[k // 20, *rng.normal(size=12).tolist(), 10.0 * (k // 20) + rng.normal()] for k in range(300)]
    write(place / "wide.csv", ["site", *(f"x{k}" for k in range(12)), "y"], rows)
    fit = ["fit", "wide.csv", "--device", "site", "--target", "y", "--lam", "0", "--select", "none", "--test-size", "0"]
    assert main(fit) == 0
    assert "groups  15 among 15 sites" in capsys.readouterr().out
    assert main(["inspect", "fedkin-model"]) == 0
    shown = capsys.readouterr().out
    assert "in 3 smaller groups" in shown
    assert "the intercept and the 10 largest of 12" in shown
    table = shown[shown.index("10 largest of 12") :].splitlines()
    sizes = [abs(float(line.split()[1])) for line in table if line.strip().startswith("x")]
    assert len(sizes) == 10
    assert sizes == sorted(sizes, reverse=True)
    assert "average" in shown
    assert "least" in shown


def test_without_edges_every_site_has_its_exact_solution(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """40 sites x 140 rows x 20 nearly collinear features, all edges dropped: as good as each site's least squares."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(40, 140, 1))
    X = common + 1e-6 * rng.normal(size=(40, 140, 20))
    # slopes so different that every edge is dropped
    y = common[:, :, 0] * np.arange(40)[:, None] + 0.1 * rng.normal(size=(40, 140))
    rows = [[f"s{u}", *x, z] for u in range(40) for x, z in zip(X[u].tolist(), y[u].tolist(), strict=True)]
    write(place / "wide.csv", ["site", *(f"x{k}" for k in range(20)), "y"], rows)
    assert main(["fit", "wide.csv", "--device", "site", "--target", "y", "--method", "fused", "--test-size", "0"]) == 0
    assert "0 of 780 edges kept" in capsys.readouterr().out
    model = fedkin.load("fedkin-model")
    for u in range(40):
        own = np.column_stack([np.ones(140), X[u]])
        best = y[u] - own @ np.linalg.lstsq(own, y[u], rcond=None)[0]
        ours = y[u] - model.predict(X[u], f"s{u}")
        assert (ours**2).mean() <= (1 + 1e-6) * (best**2).mean()


# --- what goes wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--target COL"]),
        (["--target", "outcome"], ["--device COL", "clinic, age, dose, outcome"]),
        (["--device", "Clinc", "--target", "outcome"], ["'Clinc'", "did you mean 'clinic'?"]),
        (["--device", "clinic", "--target", "outcom"], ["'outcom'", "did you mean 'outcome'?"]),
        ([*FIT, "--features", "age,doses"], ["'doses'", "did you mean 'dose'?"]),
        ([*FIT, "--features", "zzz"], ["'zzz'", "the table has"]),
        ([*FIT, "--lam", "much"], ["lam must be a number", "'cv'", "'much'"]),
        ([*FIT, "--lam", "-1"], ["lam", "-1"]),
        ([*FIT, "--level", "2"], ["level", "2"]),
        ([*FIT, "--test-size", "1"], ["--test-size", "got 1"]),
        ([*FIT, "--ridge", "-1"], ["ridge", "-1"]),
        ([*FIT, "--loss", "mean"], ["no target"]),
        ([*FIT, "--loss", "logistic"], ["outcome", "needs classes", "--loss linear"]),
        ([*FIT, "--loss", "poisson"], ["poisson", "counts"]),
        ([*FIT, "--graph", "nowhere.csv"], ["nowhere.csv"]),
        ([*FIT, "--out", "sites.csv"], ["sites.csv", "--out"]),
        ([*FIT, "--out", "."], ["not a Fedkin model", "--out"]),
    ],
)
def test_wrong_arguments(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    line = failing(capsys, "fit", "sites.csv", *arguments)
    assert all(word in line for word in words), line
    assert sorted(path.name for path in place.iterdir()) == ["sites.csv"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("clinic,age,outcome\nA,1,2\nA,,3\n", ["'age' in 1 (first in line 3)", "--missing mean"]),
        ("clinic,age,outcome\nA,1,2\n,2,3\n", ["'clinic' in 1 (first in line 3)", "--missing drop"]),
        (
            "clinic,age,name,outcome\n" + "".join(f"A,{k},Ann{k},2\n" for k in range(12)),
            ["name: text with 12 different values", "--drop", "--categories"],
        ),
        ("clinic,age,outcome\nA,1\n", ["line 2"]),
        ("", ["empty"]),
    ],
)
def test_wrong_tables(place: Path, capsys: pytest.CaptureFixture[str], content: str, words: list[str]) -> None:
    (place / "wrong.csv").write_text(content, encoding="utf-8")
    line = failing(capsys, "fit", "wrong.csv", *FIT)
    assert all(word in line for word in ["wrong.csv", *words]), line
    assert "features=" not in line  # Python's words are not the command line's


def test_missing_file_suggests_its_neighbour(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'sites.csv'?" in failing(capsys, "fit", "site.csv", *FIT)


def test_graph_with_a_stranger(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(place / "graph.csv", ["source", "target"], [["Zürich", "Genf"]])
    assert "'Genf'" in failing(capsys, "fit", "sites.csv", *FIT, "--graph", "graph.csv")


def test_wrong_predictions(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0"]) == 0
    capsys.readouterr()
    write(place / "stranger.csv", HEADER[:3], [["Genf", 1.0, 2.0]])
    assert "'Genf'" in failing(capsys, "predict", "fedkin-model", "stranger.csv")
    write(place / "narrow.csv", ["clinic", "age"], [["Bern", 1.0]])
    assert "dose: there is no such column" in failing(capsys, "predict", "fedkin-model", "narrow.csv")
    assert "clinics" in failing(capsys, "predict", "fedkin-model", "sites.csv", "--device", "clinics")
    assert "nowhere" in failing(capsys, "predict", "nowhere", "sites.csv")
    assert "no directory" in failing(capsys, "predict", "fedkin-model", "sites.csv", "--out", "no/where.csv")
    (place / "fedkin-model" / "coefficients.csv").write_text("device\n", encoding="utf-8")
    assert "coefficients.csv" in failing(capsys, "inspect", "fedkin-model")


def test_unknown_option_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "model", "--josn"]) == 2
    assert "--json" in capsys.readouterr().err
    assert main(["fti"]) == 2
    assert main(["fit", "x.csv", "--loss", "ols"]) == 2
    assert "huber" in capsys.readouterr().err


def test_solver_failures_have_their_own_exit_code(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SolverError("device 'Bern' runs away: add ridge=1e-3")

    monkeypatch.setattr(fedkin.cli.models.fit_table, "compare", fail)
    assert "'Bern' runs away" in failing(capsys, "fit", "sites.csv", *FIT, code=1)


def test_warnings_become_notes(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*arguments: object) -> object:
        for k in (0, 0, 1, 2, 3, 4):
            warnings.warn(f"something odd, {k}", FedkinWarning, stacklevel=2)
        return fit_federation(*arguments)

    monkeypatch.setattr(fedkin.cli.models.fit_table, "fit_federation", warn)
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0"]) == 0
    shown = capsys.readouterr().err
    assert shown.count("note: something odd") == 3
    assert shown.count("something odd, 0") == 1
    assert "2 more" in shown
    assert "FedkinWarning: " not in shown


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize(
    ("limit", "cure"), [(["--max-iter", "1"], "--max-iter"), (["--solver", "fedadmm", "--rounds", "2"], "--rounds")]
)
def test_a_fit_that_did_not_converge_is_a_failure_and_is_not_saved(
    place: Path, capsys: pytest.CaptureFixture[str], limit: list[str], cure: str, more: list[str]
) -> None:
    fit = ["fit", "sites.csv", *FIT, "--select", "none", "--tol", "1e-9", *more]
    line = failing(capsys, *fit, *limit, code=1)
    for words in ("did not converge", "no model was saved", "relative gap", "1.0e-09", cure, "--tol", "--ridge"):
        assert words in line
    assert sorted(path.name for path in place.iterdir()) == ["sites.csv"]
    assert main(fit) == 0  # the limit was the reason
    assert fedkin.load("fedkin-model").status == "converged"
    before = (place / "fedkin-model" / "model.json").read_bytes()
    capsys.readouterr()
    failing(capsys, *fit, *limit, code=1)
    assert (place / "fedkin-model" / "model.json").read_bytes() == before  # a good model is not replaced by a bad one


def test_a_comparison_that_did_not_converge_is_noted(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hasty(*arguments: object, **named: object) -> object:
        found = compare(*arguments, **named)
        stopped = replace(found.models[0]["Fedkin"], status="iteration_limit", gap=0.5)
        return replace(found, models=({**found.models[0], "Fedkin": stopped}, *found.models[1:]))

    monkeypatch.setattr(fedkin.cli.models.fit_table, "compare", hasty)
    assert main(["fit", "sites.csv", *FIT]) == 0
    assert "did not converge (relative gap 5.0e-01)" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["sites.csv/model", "sites.csv/deep/model", "/proc/no/model"])
def test_an_unwritable_place_is_noticed_before_the_fit(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("fitted first")

    if out.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    monkeypatch.setattr(fedkin.cli.models.fit_table, "compare", never)
    line = failing(capsys, "fit", "sites.csv", *FIT, "--out", out)
    assert "--out: cannot write the model to" in line
    assert out.rsplit("/", 1)[1] in line
    assert sorted(path.name for path in place.iterdir()) == ["sites.csv"]


def test_ctrl_c_ends_a_solver_that_would_go_on(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def solver(*_: object) -> None:
        for _ in range(3):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                continue  # as a path of many solutions does
        pytest.fail("Ctrl-C was swallowed")

    monkeypatch.setattr(fedkin.cli.models.fit_table, "fit_federation", solver)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0"]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "interrupted" in shown.err
    assert "Traceback" not in shown.err
    assert sorted(path.name for path in place.iterdir()) == ["sites.csv"]


def test_ctrl_c_in_a_process_of_its_own(place: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [[k % 60, *rng.normal(size=12).tolist(), rng.integers(2)] for k in range(6000)]
    write(place / "long.csv", ["site", *(f"x{k}" for k in range(12)), "y"], rows)
    command = "import sys; from fedkin.cli import main; print('up', flush=True); sys.exit(main(sys.argv[1:]))"
    fit = ["fit", "long.csv", "--device", "site", "--target", "y", "--loss", "logistic", "--select", "none"]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *fit], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    time.sleep(2.0)  # into the work; whenever it comes, the end must be the same
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert out == ""
    assert not (place / "fedkin-model").exists()


# --- the demonstration ----------------------------------------------------------------------------------------


def test_demo(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--devices", "20", "--rows", "40", "--features", "4"]
    assert main(["demo", *sizes, "--out", "report", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    error = document["estimation_error"]
    assert list(error) == ["Local", "Global", "Fed-ADMM", "Fed-ADMM-ES", "Kin", "Oracle"]
    assert error["Oracle"] <= error["Kin"] * 1.3 < error["Local"] < error["Global"]
    assert error["Kin"] < error["Fed-ADMM"]
    page = (place / "report" / "report.html").read_text(encoding="utf-8")
    assert document["summary"] in html.unescape(page)
    told = json.loads(re.findall(r'id="payload">(.*?)</script>', page, re.DOTALL)[0])
    assert [one["name"] for one in told["comparison"]["methods"]] == [
        "Local",
        "Global",
        "Graph as given",
        "Edges tested first",
        "Fedkin",
        "Oracle",
    ]
    assert told["sites"]["names"][:2] == ["site00", "site01"]
    assert told["reproduction"]["command"].startswith("fedkin demo --devices 20")
    held_out, each = document["held_out_error"]["Kin"], told["comparison"]["sites"]["Fedkin"]
    assert abs(sum(each) / 20 - held_out) < 1e-4
    fit = ["fit", "report/data.csv", "--device", "site", "--target", "y", "--graph", "report/graph.csv"]
    assert main([*fit, "--lam", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_devices"] == 20


def test_demo_in_words(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--devices", "10", "--rows", "30", "--features", "3"]
    assert main(["demo", *sizes, "--varrho", "0.1"]) == 0
    shown = capsys.readouterr().out
    wanted = (
        "Local",
        "Global",
        "Fed-ADMM-ES",
        "Kin",
        "Oracle",
        "kept its own 30 rows",
        "report.html",
        " fit demo-report",
    )
    for words in wanted:
        assert words in shown
    assert (place / "demo-report" / "picture.svg").read_text(encoding="utf-8").startswith("<svg")


def test_demo_with_too_few_sites(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--devices" in failing(capsys, "demo", "--devices", "2")
