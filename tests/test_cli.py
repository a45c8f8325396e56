"""The command line, used as a person would: what goes well."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import fedkin
import fedkin.cli.models.fit_table
from clinics import FIT, HEADER, NORTH, SOUTH, clinic_rows, failing, write
from fedkin.cli import main
from fedkin.fitting import FitOptions, compare, fit


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
    assert {frozenset(group) for group in model.members()} == {frozenset(NORTH), frozenset(SOUTH)}
    assert model.n_samples.tolist() == [24] * 6  # all rows, not the training part


def test_fit_as_json_agrees_with_the_library(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0.5", "--seed", "3", "--json", "--out", "model"]) == 0
    document = json.loads(capsys.readouterr().out)
    federation = fedkin.Federation.read("sites.csv", site="clinic", target="outcome")
    options = FitOptions(lam=0.01, seed=3)
    expected = compare(federation, None, options, test_size=0.5)
    assert document["comparison"] == json.loads(json.dumps(expected.plain()))
    model = fedkin.load(document["model"])
    assert model.comparison == document["comparison"]
    assert (document["lam"], document["gap"], document["n_groups"]) == (model.fused.lam, model.fused.gap, 2)
    assert sorted(map(len, document["groups"])) == [3, 3]
    assert document["selection"]["candidates"] == 15


def test_sites_that_a_graph_does_not_name_have_no_edges(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(place / "graph.csv", ["source", "target"], [["Bern", "Zürich"], ["Lugano", "Como"]])
    assert main(["fit", "sites.csv", *FIT, "--graph", "graph.csv", "--test-size", "0", "--out", "model"]) == 0
    assert "note: the graph does not name 2 sites" in capsys.readouterr().err
    model = fedkin.load(place / "model")
    degree = dict(zip(model.sites, model.graph.degree.tolist(), strict=True))
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
    columns = ["--site", "clinic", "--target", "outcome"]
    table = np.array([row[1:] for row in clinic_rows()], dtype=float)
    ids = [row[0] for row in clinic_rows()]
    federation = fedkin.Federation.read("sites.csv", site="clinic", target="outcome")
    for options, words in (
        ({"method": "fused"}, ["--select", "bonferroni"]),
        ({"select": "none"}, ["--select", "none"]),
        ({"select": None}, ["--select", "none"]),
        ({}, []),
    ):
        assert main(["fit", "sites.csv", *columns, *words]) == 0
        model = fedkin.load("fedkin-model")
        fitted = fit(federation, None, FitOptions(**options))
        face = fedkin.FedADMMRegressor if options else fedkin.KinRegressor
        own = {name: value for name, value in options.items() if name != "method"}
        estimator = face(**own).fit(table[:, :2], table[:, 2], site=ids)
        for other in (fitted, estimator.model_):
            assert (model.sites, repr(model.fused)) == (other.sites, repr(other.fused))
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


def test_one_file_per_site(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    fit = ["fit", "labels.csv", "--site", "site", "--target", "state", "--lam", "0.1"]
    assert main([*fit, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["loss"], document["classes"]) == ("logistic", ["ill", "well"])
    assert "accuracy" in document["comparison"]["more"]
    assert main(["predict", "fedkin-model", "labels.csv"]) == 0
    table = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    for line in table:
        assert line["prediction"] == ("ill" if float(line["probability:ill"]) > 0.5 else "well")


def test_zero_one_targets_are_classes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[k % 2, k % 7, (k * 5) % 3 % 2] for k in range(40)]
    write(place / "binary.csv", ["site", "x", "state"], rows)
    assert main(["fit", "binary.csv", "--site", "site", "--target", "state", "--lam", "0.1"]) == 0
    shown = capsys.readouterr()
    assert "--loss linear fits numbers" in shown.err and "logistic loss, target state" in shown.out


def test_degenerate_sites_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(2)
    ages = rng.normal(size=120).tolist()
    rows = [[f"s{k % 3}", x, "yes" if k % 3 == 2 or x + rng.logistic() > 0 else "no"] for k, x in enumerate(ages)]
    write(place / "one_class.csv", ["site", "x", "state"], rows)
    fit = ["fit", "one_class.csv", "--site", "site", "--target", "state", "--lam", "0.1", "--select", "holm"]
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
    fit = ["fit", "counts.csv", "--site", "county", "--target", "deaths", "--loss", "poisson", "--lam", "0.01"]
    assert main([*fit, "--offset", "log_expected", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["offset"] == "log_expected"
    assert main(["predict", "fedkin-model", "counts.csv", "--json"]) == 0  # finds the offset by itself
    predicted = [row[2] for row in json.loads(capsys.readouterr().out)["predictions"]]
    model = fedkin.load("fedkin-model")
    county = np.arange(90) % 3
    assert model.sites == (0, 1, 2)
    rate = np.exp(model.intercept[county, 0] + model.coef[county, 0, 0] * dose)
    np.testing.assert_allclose(predicted, exposure * rate)


def test_means_need_no_target(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", "sites.csv", "--site", "clinic", "--loss", "mean", "--features", "age, dose", "--lam", "0.1"]
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
    assert document["options"]["site_column"] == "clinic"
    assert document["n_rows"] == 144


def test_columns_are_left_out(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["fit", "sites.csv", *FIT, "--test-size", "0", "--json"]
    assert main([*fit, "--drop", "dose"]) == 0
    assert json.loads(capsys.readouterr().out)["features"] == ["age"]
    assert main([*fit, "--features", "age", "--features", "dose"]) == 0  # one option for each, or commas
    assert json.loads(capsys.readouterr().out)["features"] == ["age", "dose"]
    assert main(["predict", "fedkin-model", "sites.csv"]) == 0
    capsys.readouterr()
    assert "no column 'doze' to drop (did you mean 'dose'?)" in failing(capsys, *fit, "--drop", "doze")
    assert "'outcome' cannot be both the target and dropped" in failing(capsys, *fit, "--drop", "outcome")
    both = failing(capsys, *fit, "--features", "age,dose", "--drop", "dose")
    assert "'dose' cannot be both a feature and dropped" in both
    assert "unexpected 'dose': lists have commas" in failing(capsys, *fit, "--features", "age", "dose")


def test_many_groups_and_features_are_summarised(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(4)
    rows = [[k // 20, *rng.normal(size=12).tolist(), 10.0 * (k // 20) + rng.normal()] for k in range(300)]
    write(place / "wide.csv", ["site", *(f"x{k}" for k in range(12)), "y"], rows)
    fit = ["fit", "wide.csv", "--site", "site", "--target", "y", "--lam", "0", "--select", "none", "--test-size", "0"]
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
    assert main(["fit", "wide.csv", "--site", "site", "--target", "y", "--method", "fused", "--test-size", "0"]) == 0
    assert "0 of 780 edges kept" in capsys.readouterr().out
    model = fedkin.load("fedkin-model")
    for u in range(40):
        own = np.column_stack([np.ones(140), X[u]])
        best = y[u] - own @ np.linalg.lstsq(own, y[u], rcond=None)[0]
        ours = y[u] - model.predict(X[u], f"s{u}")
        assert (ours**2).mean() <= (1 + 1e-6) * (best**2).mean()
