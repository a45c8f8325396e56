"""The simulation design of section 5; public tables, and tables like them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedkin import Problem, solve
from fedkin.datasets import load_table, look_alike, paper_design, table_names
from fedkin.errors import DataError, ParameterError


def test_the_draws_are_in_their_order() -> None:
    """Parameters, flips, features, noise from one generator, so that others can repeat it."""
    rng = np.random.default_rng(7)
    centres = rng.normal(scale=4**-0.25, size=(3, 4))
    labels = np.repeat([0, 1, 2], 4)
    flips = np.triu(rng.random((12, 12)) < 0.2, 1)
    present = (labels[:, None] == labels) & np.triu(np.ones((12, 12), dtype=bool), 1)
    X = rng.normal(size=(12, 9, 4))
    y = np.einsum("vnp,vp->vn", X, centres[labels]) + rng.normal(size=(12, 9))
    design = paper_design(12, 9, 4, 3, varrho=0.2, seed=7)
    np.testing.assert_array_equal(design.labels, labels)
    np.testing.assert_allclose(design.theta_star, centres[labels])
    expected = {(int(b), int(a)) for a, b in np.argwhere(present ^ flips)}
    assert set(map(tuple, design.graph.edges.tolist())) == expected
    np.testing.assert_allclose(design.federation.X, X.reshape(-1, 4))
    np.testing.assert_allclose(design.federation.y, y.ravel())


def test_the_error_of_local_and_oracle_fits() -> None:
    """p / (n - p - 1) without neighbours, about p / (n |V| / K0) with the true ones."""
    design = paper_design(40, 60, 10, 2, seed=2)
    assert design.error(design.theta_star) == 0.0
    assert design.error(design.theta_star + 1.0) == pytest.approx(10.0)
    local = solve(Problem(design.federation, design.graph)).theta
    assert design.error(local) == pytest.approx(10 / (60 - 10 - 1), rel=0.25)
    oracle = solve(Problem(design.federation, design.truth, penalty="l2", lam=1.0)).theta
    assert design.error(oracle) == pytest.approx(10 / (60 * 20), rel=0.6)


def test_files_that_are_not_there_are_named_with_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDKIN_DATA", raising=False)
    with pytest.raises(DataError, match=r"landmine/landmine.csv, or set FEDKIN_DATA"):
        load_table("landmine")
    monkeypatch.setenv("FEDKIN_DATA", str(tmp_path))
    for name in table_names():
        with pytest.raises(DataError, match=r"there is no file .*; it should contain .*(github|Rdatasets)"):
            load_table(name)
    for load in (load_table, look_alike):
        with pytest.raises(ParameterError, match="there is no table 'schools'"):
            load("schools")


def test_small_files_are_read(tmp_path: Path) -> None:
    for folder, name, text in (
        ("landmine", "landmine", "task,label,x1\n1,0,0.5\n1,1,0.7\n2,0,0.1\n"),
        ("melanoma", "melanoma", "nation,region,county,deaths,expected,uvb\nItaly,1,1,3,2.0,0.5\n"),
        ("computer_survey", "computer_survey", "person,profile,part,like,ram\n1,1,calibration,6,-1\n"),
        (
            "sacramento",
            "sacramento_real_estate",
            "street,zip,beds,baths,sq__ft,price\na,95838,2,1,800,59000\nb,95838,2,1,0,59000\nc,95838,2,1,800,4897\n",
        ),
        ("school", "school", "school,exam_score,female\n2,3,1\n1,4,0\n2,5,1\n"),
        ("school", "school_splits", "split1,split2\n1,0\n0,1\n1,1\n"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.csv").write_text(text)
    tables = {name: load_table(name, tmp_path) for name in table_names() if name != "election"}
    assert tables["landmine"].federation.n_samples.tolist() == [2, 1]
    assert tables["melanoma"].federation.offset == pytest.approx(np.log([2.0]))
    assert tables["computer survey"].federation.feature_names == ("ram",)
    assert tables["sacramento"].federation.y == pytest.approx(np.log([59000]))
    # rows are stacked by site, and the splits with them
    assert tables["school"].federation.y.tolist() == [3, 5, 4]
    assert tables["school"].held_out(0).tolist() == [False, False, True]
    assert tables["school"].held_out(1).tolist() == [True, False, False]
    (tmp_path / "school" / "school_splits.csv").write_text("split1\n1\n")
    with pytest.raises(DataError, match="download both again"):
        load_table("school", tmp_path)
