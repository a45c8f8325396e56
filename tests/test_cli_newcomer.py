"""What people meet who try the command line on a table of their own: remarks, hints, and numbers that agree."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedkin
from fedkin.cli import main
from fedkin.cli.console import add_row, output, plain_table
from fedkin.datasets import paper_design
from fedkin.errors import DataError, ParameterError
from fedkin.kin import covariate_graph, covariate_remarks, predicted

FIT = ["--site", "site", "--target", "y", "--test-size", "0"]


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


def test_a_model_that_will_be_replaced_is_told_of_first(table, capsys):
    assert "it will be replaced" not in said(capsys, "fit", table(), *FIT)
    assert main(["fit", table(), *FIT]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "note: fedkin-model has a model of 5 sites: it will be replaced (--out DIR keeps both)"


def test_a_site_with_one_class_is_named(table, capsys):
    found = said(capsys, "fit", table(lambda site, row, y: 0 if site == 1 else y), *FIT)
    assert "has one class only at site 's1'" in found
    found = said(capsys, "fit", table(lambda site, row, y: "no" if site == 1 else ("yes" if y else "no")), *FIT)
    assert "has one class only at site 's1'" in found


def test_a_stray_value_beside_zeros_and_ones_is_pointed_at(table, capsys):
    found = said(capsys, "fit", table(lambda site, row, y: 2 if (site, row) == (3, 5) else y), *FIT)
    assert "is 0 or 1 except in 1 of 70 rows (2 at site 's3'): a typing error?" in found
    # values that are not rare are no errors
    assert "a typing error" not in said(capsys, "fit", table(lambda site, row, y: 2 if row == 5 else y), *FIT)



def test_places_and_levels_of_predictions_are_checked_first(table, capsys, tmp_path):
    assert main(["fit", table(), *FIT]) == 0
    capsys.readouterr()
    Path("folder").mkdir()
    found = said(capsys, "predict", "fedkin-model", "rows.csv", "--out", "folder")
    assert "folder is a directory, expected the name of a file: folder/predictions.csv, for example" in found
    assert "there is no directory" in said(capsys, "predict", "fedkin-model", "rows.csv", "--out", "no/rows.csv")
    for command in (["predict", "fedkin-model", "rows.csv"], ["inspect", "fedkin-model", "--site", "s0"]):
        assert "level must lie between 0 and 1, got 95: say 0.95 for 95%" in said(capsys, *command, "--level", "95")


def test_remarks_on_covariates(table, capsys):
    Path("sites.csv").write_text("site,beds,country\ns0,10,DE\ns1,20,DE\ns2,twelve,DE\ns3,30,DE\ns4,10,DE\n")
    found = said(capsys, "fit", table(), *FIT, "--covariates", "sites.csv")
    assert "sites.csv: 'beds' is read as labels, since 'twelve' (site 's2') is no number" in found
    assert "sites.csv: 'country' is the same for all sites and tells nothing" in found
    if "ignored" in found:
        assert "edges:" not in found
    found = said(capsys, "fit", table(), *FIT, "--covariates", ".")
    assert "--covariates: . is a directory, expected a file: a line per site" in found
    assert covariate_remarks({"a": {"n": 1.0, "t": "x"}, "b": {"n": 2.0, "t": "x"}, "c": {"n": 2.0, "t": "y"}}) == []
    with pytest.raises(DataError, match="covariates have 1 row, and there are 3 sites: give one row for each site"):
        covariate_graph(np.ones((1, 2)), ("a", "b", "c"))


def test_the_same_numbers_in_fit_and_inspect(table, capsys):
    """Differences of hundreds are written out, in both places alike."""
    rng = np.random.default_rng(1)
    path = table(lambda site, row, y: round(float(100 * rng.normal() + 300 * site), 1))
    fitted = said(capsys, "fit", path, "--site", "site", "--target", "y", "--repeats", "2")
    shown = said(capsys, "inspect", "fedkin-model")
    for name in ("Local", "Global", "Site intercepts"):
        one, other = (re.findall(rf"{name} (-?\d\S* \S+ [-+]\S+ \S+)", text) for text in (fitted, shown))
        assert len(one) == len(other) == 1
        assert one == other
        assert "e+0" not in one[0]



@pytest.mark.parametrize("level", [0.05, 0.5, 0.95])
def test_intervals_of_probabilities_hold_the_mean_and_what_they_promise(level):
    """Small probabilities are skewed: their mean may lie beyond either end of an interval with equal tails."""
    design = paper_design(n_sites=4, n_samples=30, n_features=2, n_clusters=1, seed=0, loss="logistic")
    kin = fedkin.find_kin(design.federation, loss="logistic")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 2)) * np.linspace(0, 40, 400)[:, None]
    theta, covariance = np.array([1.0, 0.5]), np.array([[0.3, 0.1], [0.1, 0.4]])
    found = predicted(kin, X, theta, covariance, 1.0, level=level, target="mean")
    assert (found.low <= found.mean).all() and (found.mean <= found.high).all()
    plain = predicted(kin, X[:5], theta, 1e-6 * covariance, 1.0, level=level, target="mean")
    error = np.sqrt(np.einsum("np,pq,nq->n", X[:5], 1e-6 * covariance, X[:5]))
    draws = X[:5] @ theta + error * rng.normal(size=(20_000, 5))
    inside = ((1 / (1 + np.exp(-draws)) >= plain.low) & (1 / (1 + np.exp(-draws)) <= plain.high)).mean(axis=0)
    np.testing.assert_allclose(inside[1:], level, atol=0.02)
    # where equal tails would leave the mean out, too
    wide = slice(20, 60)
    error = np.sqrt(np.einsum("np,pq,nq->n", X[wide], covariance, X[wide]))
    draws = 1 / (1 + np.exp(-(X[wide] @ theta + error * rng.normal(size=(20_000, 40)))))
    inside = ((draws >= found.low[wide]) & (draws <= found.high[wide])).mean(axis=0)
    np.testing.assert_allclose(inside, level, atol=0.02)
    with pytest.raises(ParameterError, match=r"say 0\.9 for 90%"):
        predicted(kin, X, theta, covariance, 1.0, level=90, target="mean")



@pytest.mark.parametrize("width", [80, 66, 120])
def test_numbers_in_tables_are_never_cut(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    heads = ("method", "mean squared error", "s.e.", "difference from Fedkin", "s.e. of that", "explained variance")
    numbers = ("0.003045", "0.00012", "+0.000345", "0.00023", "0.9876")
    table = plain_table(*heads)
    add_row(table, "Site intercepts", *numbers)
    add_row(table, "Local", *numbers)
    output().print(table)
    found = capsys.readouterr().out
    assert "…" not in found and max(map(len, found.splitlines())) <= width
    assert all(found.count(f" {number}") == 2 for number in numbers)
    assert all(word in found for head in heads for word in head.split())



def test_outputs_never_replace_what_a_command_reads(table, capsys):
    path = Path(table())
    assert main(["fit", str(path), *FIT]) == 0
    folder, link = Path("parts"), Path("link.csv")
    folder.mkdir()
    (folder / "s0.csv").write_text("x,y\n1,0\n")
    link.symlink_to(path)
    Path("sites.csv").write_text("site,beds\n" + "".join(f"s{k},{k}\n" for k in range(5)))
    model = Path("fedkin-model/model.json")
    before = {file: file.read_bytes() for file in (path, Path("sites.csv"), folder / "s0.csv", model)}
    capsys.readouterr()
    fit = ["fit", str(path), *FIT, "--report"]
    for command in (
        ["predict", "fedkin-model", "rows.csv", "--out", "rows.csv"],
        ["predict", "fedkin-model", "rows.csv", "--out", "link.csv"],
        ["predict", "fedkin-model", "rows.csv", "--out", "../" + Path.cwd().name + "/rows.csv"],
        ["predict", "fedkin-model", "row*.csv", "--out", "rows.csv"],
        ["predict", "fedkin-model", "parts", "--out", "parts/s0.csv"],
        ["predict", "fedkin-model", "rows.csv", "--out", "fedkin-model/model.json"],
        [*fit, "rows.csv"],
        [*fit, "sites.csv", "--covariates", "sites.csv"],
        [*fit, "sites.csv", "--graph", "sites.csv"],
        ["report", "fedkin-model", "--out", "sites.csv", "--coordinates", "sites.csv"],
    ):
        assert "is what this command reads, and would be lost" in said(capsys, *command), command
    assert all(file.read_bytes() == content for file, content in before.items())
    found = said(capsys, *fit, "fedkin-model/model.json")  # of the model that it will write
    assert "lies in the model directory" in found
    assert model.read_bytes() == before[model]
    assert main(["predict", "fedkin-model", "rows.csv", "--out", "new.csv"]) == 0


def test_the_place_of_a_report_is_tried_before_the_fit(table, capsys):
    found = said(capsys, "fit", table(), *FIT, "--report", "/proc/page.html")
    assert "error: /proc/page.html cannot be written" in found and not Path("fedkin-model").exists()


def test_tables_with_one_site_or_one_row_each_name_the_cure(table, capsys):
    lines = Path(table()).read_text().splitlines()
    Path("single.csv").write_text(
        "\n".join([lines[0], *(f"r{k}{line[2:]}" for k, line in enumerate(lines[1:]))]) + "\n"
    )
    found = said(capsys, "fit", "single.csv", "--site", "site", "--target", "y")
    assert "every site has one row only, so that none can be held out: is --site the right column?" in found
    assert "--test-size 0 fits without a comparison" in found and not Path("fedkin-model").exists()
    Path("one.csv").write_text("\n".join(lines[:15]) + "\n")
    assert "there is one site only, 's0': kin needs several sites" in said(capsys, "fit", "one.csv", *FIT)


def test_weights_that_leave_no_row(table, capsys):
    lines = Path(table()).read_text().splitlines()
    Path("rows.csv").write_text("\n".join([f"{lines[0]},w", *(f"{line},0" for line in lines[1:])]) + "\n")
    found = said(capsys, "fit", "rows.csv", *FIT, "--weight", "w")
    assert "error: rows.csv: the weight 'w' is 0 in every row, so no row is left" in found


def test_rows_to_predict_are_named_by_their_lines(table, capsys):
    lines = Path(table()).read_text().splitlines()
    levels = [f"{line},{'AB'[k % 2]}" for k, line in enumerate(lines[1:])]
    Path("rows.csv").write_text("\n".join([f"{lines[0]},ward", *levels]) + "\n")
    assert main(["fit", "rows.csv", *FIT]) == 0
    Path("new.csv").write_text("site,x,ward\n\ns0,1,A\ns1,2,Z\n")
    found = said(capsys, "predict", "fedkin-model", "new.csv")
    assert found.count("unknown level 'Z' (1 row), first in line 4") == found.count("unknown level") == 1
    Path("new.csv").write_text("site,x,ward\n\ns0,1,A\n,2,B\n")
    found = said(capsys, "predict", "fedkin-model", "new.csv", "--out", "out.csv")
    assert "error: new.csv, line 4: the site is missing (column 'site')" in found


def test_numbers_that_are_not_finite_are_shown(table, capsys):
    assert main(["fit", table(), "--site", "site", "--target", "y", "--repeats", "1"]) == 0
    model = fedkin.load("fedkin-model")
    assert model.comparison is not None
    methods = [{**one, "mean": math.inf, "difference": math.nan} for one in model.comparison["methods"]]
    replace(model, comparison={**model.comparison, "methods": methods}).save("odd")
    capsys.readouterr()
    assert main(["inspect", "odd"]) == 0
    assert re.search(r"Local +∞ ", capsys.readouterr().out)
    assert "| Local | - |" in said(capsys, "inspect", "odd", "--card")
    assert main(["report", "odd", "--out", "page.html"]) == 0
