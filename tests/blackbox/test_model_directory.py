"""The model directory: its files, their checksums, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from blackbox.conftest import COLUMNS, Fit, files_below, read_coefficients
from fedkin import load
from fedkin.errors import FedkinError

FILES = {"model.json", "coefficients.csv", "edges.csv", "kin.json", "kin.npz", "comparison.json", "history.json"}


@pytest.fixture
def copy(tmp_path: Path, fit: Fit) -> Path:
    """A copy of a model, to be damaged."""
    return Path(shutil.copytree(fit.model, tmp_path / "copy"))


def test_a_model_is_the_documented_files_with_their_checksums(fit):
    files = files_below(fit.model)
    assert set(files) == FILES
    told = json.loads(files["model.json"])
    sums = {name: "sha256:" + hashlib.sha256(files[name]).hexdigest() for name in FILES - {"model.json"}}
    assert told["checksums"] == sums
    assert told["format_version"] == 2
    assert (told["target"], told["features"], told["loss"]["name"]) == ("days", ["age", "dose"], "linear")
    assert json.loads(files["comparison.json"]) == fit.outcome.json["comparison"]


def test_coefficients_are_a_table_with_a_row_per_site(fit):
    table = pd.read_csv(fit.model / "coefficients.csv")
    assert table.columns[-3:].tolist() == ["intercept", "age", "dose"]
    assert sorted(table.iloc[:, 0]) == list("abcdef")
    assert table["n_samples"].tolist() == [40] * 6  # the model is fitted to all rows


def test_arrays_are_read_without_pickles_and_probabilities_are_symmetric(fit):
    with np.load(fit.model / "kin.npz", allow_pickle=False) as arrays:
        theta, covariance, probability = (arrays[name] for name in ("theta", "covariance", "probability"))
    assert theta.shape == (6, 3) and covariance.shape == (6, 3, 3) and probability.shape == (6, 6)
    np.testing.assert_allclose(probability, probability.T)
    assert probability.min() >= 0 and probability.max() <= 1 + 1e-12
    assert np.linalg.eigvalsh(covariance).min() > 0
    names = pd.read_csv(fit.model / "coefficients.csv").iloc[:, 0]
    np.testing.assert_allclose(theta[np.argsort(names)], read_coefficients(fit.model), rtol=1e-12)


def test_python_predicts_what_the_command_predicts(fedkin, fit, clinics):
    told = fedkin("predict", fit.model, fit.folder / "clinics.csv", "--json").json
    found = load(fit.model).predict(clinics[["age", "dose"]], clinics["clinic"].tolist())
    assert [row[2] for row in told["predictions"]] == found.tolist()


def test_a_model_that_is_loaded_and_saved_has_the_same_numbers(tmp_path, fit):
    load(fit.model).save(tmp_path / "again")
    before, after = files_below(fit.model), files_below(tmp_path / "again")
    assert set(after) == set(before)
    assert after["coefficients.csv"] == before["coefficients.csv"]
    assert after["edges.csv"] == before["edges.csv"]
    assert json.loads(after["comparison.json"]) == json.loads(before["comparison.json"])


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_damaged_or_missing_file_is_refused_and_named(copy, name):
    content = (copy / name).read_bytes()
    half = len(content) // 2
    for damaged in (content[:half], content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]):
        (copy / name).write_bytes(damaged)
        if name == "model.json" and damaged != content[:half]:
            continue  # it holds the checksums, and has none of its own
        with pytest.raises(FedkinError, match=name.replace(".", r"\.")):
            read_whole(copy)
    (copy / name).unlink()
    with pytest.raises(FedkinError, match=name.replace(".", r"\.")):
        read_whole(copy)


def read_whole(folder: Path) -> None:
    """Load a model with what is read only when something asks for it."""
    model = load(folder)
    assert model.kin.probability.shape == (6, 6)


def test_commands_refuse_a_damaged_model_and_write_nothing(fedkin, tmp_path, copy, table):
    path = copy / "coefficients.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("40", "41"), encoding="utf-8")
    before = files_below(tmp_path)
    fedkin("inspect", "copy").refuses("coefficients.csv")
    fedkin("predict", "copy", table.name, "--out", "out.csv").refuses("coefficients.csv")
    fedkin("report", "copy", "--out", "page.html").refuses("coefficients.csv")
    assert files_below(tmp_path) == before


def test_a_later_format_is_refused_with_its_number(copy):
    told = json.loads((copy / "model.json").read_text(encoding="utf-8"))
    (copy / "model.json").write_text(json.dumps({**told, "format_version": 77}), encoding="utf-8")
    with pytest.raises(FedkinError, match="77"):
        load(copy)


def test_a_directory_that_is_no_model_is_neither_read_nor_replaced(fedkin, tmp_path, table):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    before = files_below(tmp_path)
    fedkin("fit", table.name, *COLUMNS, "--out", "other").refuses("other", "--out")
    fedkin("inspect", "other").refuses("other")
    assert files_below(tmp_path) == before


def test_names_of_sites_survive_as_they_were_written(fedkin, tmp_path, clinics):
    names = dict(zip("abcdef", ["007", "12", "Zürich", "a,b", '"quoted"', "[red]x[/]"], strict=True))
    clinics.assign(clinic=clinics["clinic"].map(names)).to_csv(tmp_path / "t.csv", index=False)
    told = fedkin("fit", "t.csv", *COLUMNS, "--test-size", "0", "--json", "--out", "m").json
    assert {name for group in told["groups"] for name in group} == set(names.values())
    assert set(load(tmp_path / "m").sites) == set(names.values())
    predicted = fedkin("predict", "m", "t.csv", "--json").json["predictions"]
    assert {row[1] for row in predicted} == set(names.values())
