"""Tables as people have them: what is accepted, what is refused, and which cells and columns a message names."""

import errno
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedkin
from fedkin.cli import main
from fedkin.data import Federation
from fedkin.errors import DataError, TableWarning
from fedkin.fitting import FitOptions, fit, prepare, reserved_place

OPTIONS = FitOptions(method="fused", lam=0.05, select="none")
ROW = np.arange(60)


def frame(n=60, sites=3, seed=0):
    """A table that is well: two numbers, a category, a target that depends on them."""
    rng = np.random.default_rng(seed)
    ward = rng.choice(["A", "B", "C"], n)
    table = {"site": np.array([f"{k % sites:03d}" for k in range(n)]), "age": rng.normal(50, 10, n).round(1)}
    table |= {"dose": rng.normal(size=n).round(3), "ward": ward}
    target = 0.1 * table["age"] + table["dose"] + 2.0 * (ward == "B") + 0.1 * rng.normal(size=n)
    return pd.DataFrame({**table, "days": target.round(3)})


def saved(tmp_path, table, name="table.csv", **more):
    path = tmp_path / name
    table.to_csv(path, index=False, **more)
    return path


def read(path, **more):
    return Federation.read(path, **{"site": "site", "target": "days", **more})


def refused(path, **more):
    with pytest.raises(DataError) as caught:
        read(path, **more)
    assert str(caught.value).startswith(f"{path}")
    return str(caught.value)


def with_cells(column, write):
    """The table with each cell of a column written by a function of its number and its row."""
    table = frame()
    return table.assign(**{column: [write(number, row) for row, number in enumerate(table[column])]})


def with_gaps(tmp_path):
    table = frame()
    table.loc[[3, 7, 20], "age"] = np.nan
    table.loc[[7, 9], "ward"] = None
    return saved(tmp_path, table), table


def test_rows_with_gaps_are_left_out(tmp_path):
    path, table = with_gaps(tmp_path)
    words = refused(path)
    assert all(part in words for part in ("3 in 'age' (first in line 5)", "2 in 'ward' (first in line 9)", "4 rows"))
    with pytest.warns(TableWarning, match="4 rows of 60 left out"):
        fed = read(path, missing="drop")
    kept = table.dropna()
    assert sorted(fed.row_order.tolist()) == kept.index.tolist()
    assert fed.X[np.argsort(fed.row_order), 0].tolist() == kept["age"].tolist()
    with pytest.raises(DataError, match="age: is missing"):
        fit(fed, None, OPTIONS).predict({"age": [None], "dose": [1.0], "ward": ["A"]}, "000")
    table.loc[5, "days"] = np.nan
    with pytest.warns(TableWarning, match="1 row of 60 left out, where 'days' is missing"):
        assert len(read(saved(tmp_path, table), missing="mean").X) == 59


@pytest.mark.parametrize("missing", ["mean", "indicator"])
def test_means_of_training_rows_fill_gaps(tmp_path, missing):
    path, table = with_gaps(tmp_path)
    fed = read(path, missing=missing)
    extra = ("age missing", "ward missing") if missing == "indicator" else ()
    assert fed.feature_names == ("age", "dose", "ward=B", "ward=C", *extra)
    train, test = fed.split(0.3, seed=1)
    model = fit(train, None, OPTIONS)
    rows = table.iloc[train.row_order]
    expected = [rows["age"].mean(), rows["dose"].mean()]
    expected += [(rows["ward"].dropna() == level).mean() for level in "BC"]
    assert np.allclose(model.schema.fill[:4], expected)
    assert not np.allclose(expected[0], table["age"].mean())
    # the table, its encoded rows and the file of the model predict alike
    model.save(tmp_path / "model")
    again = fedkin.load(tmp_path / "model")
    ids = [test.sites[u] for u in test.site_index]
    by_table = again.predict(table.iloc[test.row_order].drop(columns="days"), ids)
    assert np.array_equal(by_table, model.predict(test.X, ids))
    filled = test.X.copy()
    filled[:, :4] = np.where(np.isnan(filled[:, :4]), expected, filled[:, :4])
    assert np.allclose(by_table, model.predict(filled, ids))


def test_filling_agrees_with_scikit_learn(tmp_path):
    from sklearn.impute import SimpleImputer

    path, table = with_gaps(tmp_path)
    fed = read(path, missing="indicator", features=["age", "dose"])
    theirs = SimpleImputer(add_indicator=True).fit_transform(table[["age", "dose"]])
    ours = prepare(fed, FitOptions(standardize=False, fit_intercept=False)).rows.X
    assert np.allclose(ours[np.argsort(fed.row_order)], theirs)


DATES = ["4.3.2021", "3/4/21", "Wed May 21 00:00:00 EDT 2008", "May 21, 2008", "4-Mar-21", "Jan 2020"]
UNITS = ["%", " y", " kg/m²", " mmol/L"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (with_cells("age", lambda age, row: "unknown" if row == 11 else age), ["age: 1 of 60", "'unknown' in line 13"]),
        (with_cells("days", lambda days, row: "oops" if row == 2 else round(days)), ["days: 1 of 60", "line 4"]),
        (with_cells("age", lambda age, row: f"{age}".replace(".", ",")), ["age: 60 of 60", "decimal points"]),
        (with_cells("age", lambda age, row: f"{round(200 * age):,}"), ["thousands commas"]),
        (with_cells("age", lambda age, row: "9,990" if row else "9,5"), ["decimal points"]),
        (with_cells("age", lambda age, row: "0,125" if row else "0,250"), ["decimal points"]),
        *((with_cells("age", lambda age, row, u=u: f"{age}{u}"), ["age: 60 of 60", "leave units"]) for u in UNITS),
        (with_cells("days", lambda days, row: f"{days} d"), ["days: 60 of 60", "leave units"]),
        *((frame().assign(day=np.where(ROW == 3, "unknown", day)), ["day: these are dates"]) for day in DATES),
        (with_cells("age", lambda age, row: 1e160 if row == 4 else age), ["age: 1 of 60", "too large", "line 6"]),
        (with_cells("days", lambda days, row: 1e160 if row == 4 else days), ["days: 1 of 60", "too large", "line 6"]),
    ],
)
def test_cells_that_cannot_be_right_are_refused_by_line(tmp_path, table, words):
    said = refused(saved(tmp_path, table))
    assert all(part in said for part in words), said


def test_several_missing_columns_are_named_at_once(tmp_path):
    words = refused(saved(tmp_path, frame()), site="sit", target="dys", features=["aged", "dose"])
    assert all(f"'{name}'" in words for name in ("sit", "site", "dys", "days", "aged", "age"))


def test_decimal_commas_from_fit_to_predict(tmp_path, capsys):
    path, out = saved(tmp_path, frame(), "table.csv.gz", sep=";", decimal=","), str(tmp_path / "model")
    assert main(["fit", str(path), "--site", "site", "--target", "days", "--decimal", ",", "--out", out]) == 0
    model, points = fedkin.load(out), fit(read(saved(tmp_path, frame())), None, FitOptions())
    np.testing.assert_allclose(model.coef, points.coef)
    capsys.readouterr()
    assert main(["predict", out, str(path)]) == 0
    predicted = [float(line.split(",")[2]) for line in capsys.readouterr().out.splitlines()[1:]]
    np.testing.assert_allclose(predicted, model.predict(frame().drop(columns="days"), frame()["site"]))


@pytest.mark.parametrize("kind", [".html", ".npz"])
def test_a_full_disk_loses_no_result(tmp_path, capsys, monkeypatch, kind):
    path, out, page = saved(tmp_path, frame()), tmp_path / "model", tmp_path / "page.html"

    def full(file, content, write=Path.write_bytes):
        if file.suffix == kind:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    options = ["--site", "site", "--target", "days", "--out", str(out), "--report", str(page)]
    assert main(["fit", str(path), *options]) != 0
    said = capsys.readouterr()
    where = f"{page if kind == '.html' else out}: No space left on device, so it was not written; free some space"
    assert where in " ".join(said.err.split()) and said.err.count("choose") == 1
    assert "Local" in said.out and "opens in any browser" not in said.out  # the comparison is there
    assert ("saved" in said.out) == out.exists() == (kind == ".html") and not page.exists()


def test_two_fits_cannot_write_to_one_place_at_the_same_time(tmp_path, capsys):
    path, out = saved(tmp_path, frame()), tmp_path / "models" / "model"
    command = ["fit", str(path), "--site", "site", "--target", "days", "--out", str(out), "--test-size", "0"]
    with reserved_place(out):
        assert main(command) == 2
    assert f"another fit is about to write to {out}" in " ".join(capsys.readouterr().err.split())
    assert main(command) == 0 and [one.name for one in out.parent.iterdir()] == ["model"]


def test_an_exposure_in_the_place_of_its_logarithm_is_refused(tmp_path, capsys):
    rows = "".join(f"{site},{k},{k % 3},{100 + 50 * k}\n" for site in "ab" for k in range(8))
    (tmp_path / "table.csv").write_text(f"site,x,y,expected\n{rows}", encoding="utf-8")
    arguments = ["fit", str(tmp_path / "table.csv"), "--site", "site", "--target", "y", "--loss", "poisson"]
    assert main([*arguments, "--offset", "expected", "--out", str(tmp_path / "m")]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "the offset reaches 450" in words and "log exposure" in words


def test_text_becomes_levels_and_new_levels_are_averages(tmp_path):
    table = frame()
    fed = read(saved(tmp_path, table))
    assert fed.sites == ("000", "001", "002")  # ids stay text
    assert fed.feature_names == ("age", "dose", "ward=B", "ward=C")
    dummies = pd.get_dummies(table["ward"], drop_first=True).to_numpy(float)
    assert np.array_equal(fed.X[np.argsort(fed.row_order), 2:], dummies)
    model = fit(fed, None, OPTIONS)
    new = {"age": [50.0], "dose": [0.0]}
    known = [model.predict({**new, "ward": [level]}, "000")[0] for level in "ABC"]
    with pytest.warns(TableWarning, match="ward: unknown level 'D'"):
        found = model.predict({**new, "ward": ["D"]}, "000")[0]
    shares = [(table["ward"] == level).mean() for level in "ABC"]
    assert np.isclose(found, np.dot(shares, known))


@pytest.mark.parametrize(
    "levels",
    [
        ["0-9", "10-19", "65+"],
        ["1st", "2nd", "3rd"],
        ["5 stars", "4 stars"],
        ["0", "1", "2", "3+"],
        ["1", "2", "other"],
        *(["other", word] for word in ("May", "may", "Martin 4", "sun 12 dec", "Dec-2", "Apr 4 rooms 2021")),
    ],
)
def test_levels_with_digits_and_words_like_months_stay_names(tmp_path, levels):
    cells = np.resize(np.array(levels, dtype=object), 60)
    assert read(saved(tmp_path, frame().assign(ward=cells))).schema.features[2].levels == tuple(sorted(levels))
    assert set(read(saved(tmp_path, frame().assign(days=cells))).y) == set(levels)


@pytest.mark.parametrize("column", ["age", "zip"])
def test_columns_are_categories_if_told(tmp_path, column):
    table = frame().assign(zip=np.resize([95608, 95610, 95815], 60))
    table["age"] = np.where(ROW % 2, "70 y", "70")
    fed = read(saved(tmp_path, table), features=[column], categories=[column])
    assert fed.schema.features[0].kind == "category"


@pytest.mark.parametrize("labels", [["no", "yes"], ["N", "Y"], [False, True]])
def test_yes_and_no_are_classes(tmp_path, labels):
    table = frame()
    table["days"] = np.array(labels)[(table["days"] > table["days"].mean()).astype(int)]
    model = fit(read(saved(tmp_path, table)), None, FitOptions(method="fused", lam=0.05, select="none", ridge=0.1))
    assert model.loss.name == "logistic"
    assert model.classes == tuple(labels)


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ({"": ROW}, True),
        ({"Unnamed: 0": ROW}, True),
        ({"country": "CH"}, True),
        ({"year": 2021}, True),
        ({"remark": None}, True),
        ({"twice": 2 * frame()["age"]}, True),
        ({"sum": frame()["age"] + frame()["dose"]}, True),
        ({"zip": np.resize([95608, 95610, 95815], 60)}, False),
        ({"patient_id": np.random.default_rng(2).permutation(60) + 4000}, False),
        ({"recordId": np.random.default_rng(2).permutation(60) + 4000}, False),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_columns_that_tell_nothing_or_look_like_codes_are_named(tmp_path, more, left_out):
    (name,) = more
    with pytest.warns(TableWarning, match=f"'{name}'") as caught:
        fed = read(saved(tmp_path, frame().assign(**more)))
    assert [str(one.message) for one in caught] == list(fed.notes)
    assert (name in fed.feature_names) != left_out
    assert not fit(fed, None, OPTIONS).notes


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (with_cells("days", lambda days, row: "Yes" if row == 3 else "yes" if days > 5 else "no"), "'Yes' and 'yes'"),
        (with_cells("site", lambda site, row: "C1" if row == 3 else f"c{row % 3}"), "'c1' and 'C1'"),
    ],
)
def test_names_that_differ_in_case_only_are_told_of(tmp_path, table, words):
    with pytest.warns(TableWarning, match=words):
        read(saved(tmp_path, table))


@pytest.mark.parametrize(
    ("table", "copy"),
    [
        (frame().assign(twice=2 * frame()["days"] + 1), "twice"),
        (frame().assign(days=np.where(ROW % 3, "no", "yes"), died=(ROW % 3 == 0).astype(int)), "died"),
        (frame().assign(days=np.resize(["u", "v", "w"], 60), code=np.resize(["k3", "k1", "k2"], 60)), "code"),
    ],
)
def test_copies_of_the_target_in_other_units_or_words_are_refused(tmp_path, table, copy):
    path = saved(tmp_path, table)
    assert f"column '{copy}' is the target 'days' under another name or in other units" in refused(path)
    assert copy not in read(path, drop=[copy]).feature_names
    assert read(path, features=[copy]).schema.features[0].name == copy  # if that is meant


def test_a_target_that_others_add_up_to_is_told_of(tmp_path):
    table = frame().assign(rest=frame()["days"] - 2 * frame()["age"])
    with pytest.warns(TableWarning, match="the target 'days' is an exact combination of 'age', 'rest': leave out"):
        assert "rest" in read(saved(tmp_path, table)).feature_names


def test_intervals_of_observations_on_the_command_line(tmp_path, capsys):
    path, out = str(saved(tmp_path, frame())), str(tmp_path / "model")
    assert main(["fit", path, "--site", "site", "--target", "days", "--test-size", "0", "--out", out]) == 0
    rows, site, found = frame().drop(columns="days"), frame()["site"].tolist(), {}
    for target, options in {"mean": ["--level", "0.9"], "observation": ["--interval", "observation"]}.items():
        capsys.readouterr()
        assert main(["predict", out, path, *options]) == 0
        ends = np.array([line.split(",")[3:] for line in capsys.readouterr().out.splitlines()[1:]], dtype=float).T
        level = 0.9 if target == "mean" else 0.95
        expected = fedkin.load(out).predict_interval(rows, site, level=level, interval=target)
        np.testing.assert_allclose(ends, [expected.low, expected.high])
        found[target] = np.ptp(ends, axis=0)
    assert (found["observation"] > found["mean"]).all()


def test_levels_that_follow_from_other_columns_are_named(tmp_path):
    table = frame()
    renamed = table.assign(unit=table["ward"].map({"A": "k3", "B": "k1", "C": "k2"}))
    with pytest.warns(TableWarning, match="left out: 'unit' follows from 'ward'"):
        assert "unit=k2" not in read(saved(tmp_path, renamed)).feature_names
    finer = table.assign(unit=table["ward"].where((table["ward"] != "A") | (ROW % 2 == 0), "D"))
    with pytest.warns(TableWarning, match="'unit=C' follows from 'ward'"):
        assert "unit=D" in read(saved(tmp_path, finer)).feature_names


@pytest.mark.parametrize("missing", ["refuse", "mean", "indicator"])
@pytest.mark.parametrize("value", ["yes", 1.0, True])
def test_one_value_and_gaps_are_two_levels(tmp_path, value, missing):
    here = ROW % 4 == 0
    path = saved(tmp_path, frame().assign(toilet=np.where(here, value, None)))
    with pytest.warns(TableWarning, match="'toilet' is .* or empty: empty cells are a separate level"):
        fed = read(path, missing=missing)
    assert fed.feature_names[4].startswith("toilet=")
    np.testing.assert_array_equal(fed.X[np.argsort(fed.row_order), 4], here)
    model = fit(fed, None, OPTIONS)
    rows = {"age": [50.0] * 2, "dose": [0.0] * 2, "ward": ["A"] * 2, "toilet": [None, value]}
    empty, there = model.predict(rows, "000")
    assert there - empty == pytest.approx(model.coef[0, 0, 4])
    with pytest.warns(TableWarning, match="left out 'toilet': .* wherever it is not empty"):
        assert len(read(path, missing="drop").X) == 60


@pytest.mark.parametrize("make", [lambda rows: rows, lambda rows: rows[["day"]], lambda rows: rows.to_numpy()])
def test_dates_in_python_get_the_words_of_the_command_line(make):
    X = make(pd.DataFrame({"day": pd.date_range("2020-01-01", periods=60), "age": frame()["age"]}))
    y, site = frame()["days"], frame()["site"]
    for make in (lambda: fedkin.KinRegressor().fit(X, y, site=site), lambda: Federation.from_arrays(X, y, site)):
        with pytest.raises(DataError, match=r"column ('day'|0) of X: these are dates: turn them into numbers"):
            make()


def test_rows_that_occur_again_are_told_of(tmp_path):
    table = frame()
    with pytest.warns(TableWarning, match="every row occurs 3 times, the first copy in line 62"):
        assert len(read(saved(tmp_path, pd.concat([table] * 3))).X) == 180
    with pytest.warns(TableWarning, match="4 of 64 rows are copies of others, the first copy in line 62"):
        read(saved(tmp_path, pd.concat([table, table.iloc[[5, 5, 9, 11]]])))
    few = pd.DataFrame({"site": np.resize(["a", "b"], 60), "arm": ROW // 2 % 2, "days": ROW % 3})
    assert read(saved(tmp_path, few.assign(dose=ROW // 7 % 2))).notes == ()  # copies that must be
