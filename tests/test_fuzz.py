"""What others send: damaged or hostile bytes end in an error of Fedkin, in little time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pyarrow import array, parquet, table

import fedkin
import fuzzing
from builders import federation
from fedkin.data import read_columns
from fedkin.errors import DataError, ModelFileError
from fedkin.federate import SecurityError, read_invite
from fedkin.fitting import FitOptions, fit


@pytest.mark.exhaustive
def test_readers_of_foreign_bytes_raise_nothing_but_errors_of_fedkin() -> None:
    """The exit code also says that the process stayed below `fuzzing.MEGABYTES`; make fuzz tries a million inputs."""
    done = subprocess.run([sys.executable, fuzzing.__file__, "3000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3,000 inputs, 0 kinds of failures" in done.stdout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    fit(federation("linear", (20, 20), 2), options=FitOptions(seed=0)).save(tmp_path / "model")
    return tmp_path / "model"


def test_an_archive_that_unpacks_to_more_than_its_size_is_not_read(model: Path) -> None:
    with zipfile.ZipFile(model / "kin.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("more.npy", bytes(10**7))
    fuzzing.write_checksum(model, "kin.npz")
    with pytest.raises(ModelFileError, match="its arrays are larger than the file"):
        fedkin.load(model)


@pytest.mark.parametrize("loss", [{"name": ["linear"]}, {"name": {}}, {}, {"own": True}])
def test_a_loss_without_a_name_is_refused(model: Path, loss: dict) -> None:
    about = json.loads((model / "model.json").read_bytes())
    (model / "model.json").write_text(json.dumps(about | {"loss": loss}))
    with pytest.raises(ModelFileError, match="its loss has no name"):
        fedkin.load(model)


@pytest.mark.parametrize("within", [True, 3, ["a"], [["a", "b", "c"]]])
def test_districts_that_are_not_pairs_are_refused(model: Path, within: object) -> None:
    about = json.loads((model / "kin.json").read_bytes())
    (model / "kin.json").write_text(json.dumps(about | {"within": within}))
    fuzzing.write_checksum(model, "kin.json")
    with pytest.raises(ModelFileError, match=r"kin\.json.* its districts are not pairs"):
        fedkin.load(model)


def test_what_is_no_file_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    (model / "coefficients.csv").unlink()
    os.mkfifo(model / "coefficients.csv")
    with pytest.raises(ModelFileError, match="is not a file"):
        fedkin.load(model)
    os.mkfifo(tmp_path / "north.invite")
    with pytest.raises(SecurityError, match="is not a file"):
        read_invite(tmp_path / "north.invite")


def test_text_in_parquet_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    parquet.write_table(table({"ward": array([b"\xff", b"A"]).view("string")}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet is not a complete Parquet file"):
        read_columns(tmp_path / "t.parquet")


@pytest.mark.parametrize("classes", [[], ["one"]])
def test_a_model_with_another_number_of_classes_is_refused(model: Path, classes: list[str]) -> None:
    about = json.loads((model / "model.json").read_bytes())
    (model / "model.json").write_text(json.dumps(about | {"classes": classes}))
    with pytest.raises(ModelFileError, match="classes, expected 2"):
        fedkin.load(model)
