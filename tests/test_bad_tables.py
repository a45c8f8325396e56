"""Tables as people have them: what is accepted, what is said about it, and what a message says about the rest."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedkin
from fedkin.cli import main
from fedkin.data import Federation
from fedkin.errors import DataError, TableWarning
from fedkin.fitting import FitOptions, fit
from fedkin.fitting.preparation import prepare

OPTIONS = FitOptions(lam=0.05, select="none")


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
    message = str(caught.value)
    assert message.startswith(f"{path}")
    return message.removeprefix(f"{path}: ")


# --- missing values -------------------------------------------------------------------------------------------


def with_gaps(tmp_path):
    table = frame()
    table.loc[[3, 7, 20], "age"] = np.nan
    table.loc[[7, 9], "ward"] = None
    return saved(tmp_path, table), table


def test_missing_values_are_refused_with_counts_and_the_cure(tmp_path):
    path, _ = with_gaps(tmp_path)
    assert refused(path) == (
        "cells are missing: 'age' in 3 (first in line 5), 'ward' in 2 (first in line 9), of 60 rows. Say what to do: "
        'missing="drop" leaves out the 4 rows with a gap, missing="mean" fills in the mean of the rows that train, '
        'missing="indicator" also adds a column that says where'
    )


def test_rows_with_gaps_are_left_out(tmp_path):
    path, table = with_gaps(tmp_path)
    with pytest.warns(TableWarning, match="4 rows of 60 left out, where 'age', 'ward' are missing"):
        fed = read(path, missing="drop")
    kept = table.dropna()
    assert sorted(fed.row_order.tolist()) == kept.index.tolist()
    assert fed.X[np.argsort(fed.row_order), 0].tolist() == kept["age"].tolist()
    model = fit(fed, None, OPTIONS)
    with pytest.raises(DataError, match="age: is missing in 1 of 1 row, first in row 2; fill them in"):
        model.predict({"age": [None], "dose": [1.0], "ward": ["A"]}, "000")


@pytest.mark.parametrize("missing", ["mean", "indicator"])
def test_means_of_training_rows_fill_gaps(tmp_path, missing):
    path, table = with_gaps(tmp_path)
    fed = read(path, missing=missing)
    assert fed.notes == ("5 missing cells filled by means of the rows that train: 'age' 3, 'ward' 2",)
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
    if missing == "indicator":
        assert fed.X[:, 4].sum() == 3 and fed.X[:, 5].sum() == 2


def test_filling_agrees_with_scikit_learn(tmp_path):
    from sklearn.impute import SimpleImputer

    path, table = with_gaps(tmp_path)
    fed = read(path, missing="indicator", features=["age", "dose"])
    theirs = SimpleImputer(add_indicator=True).fit_transform(table[["age", "dose"]])
    ours = prepare(fed, FitOptions(standardize=False, fit_intercept=False)).rows.X
    assert np.allclose(ours[np.argsort(fed.row_order)], theirs)


def test_rows_without_a_target_do_not_train(tmp_path):
    table = frame()
    table.loc[5, "days"] = np.nan
    path = saved(tmp_path, table)
    assert refused(path) == (
        "cells are missing: 'days' in 1 (first in line 7), of 60 rows. Fill them in, or leave such rows out with "
        'missing="drop"'
    )
    with pytest.warns(TableWarning, match="1 row of 60 left out, where 'days' is missing"):
        assert len(read(path, missing="mean").X) == 59


def test_missing_values_on_the_command_line(tmp_path, capsys, monkeypatch):
    path, table = with_gaps(tmp_path)
    monkeypatch.chdir(tmp_path)
    asked = ["fit", path.name, "--site", "site", "--target", "days", "--test-size", "0"]
    assert main(asked) == 2
    assert "--missing mean" in capsys.readouterr().err
    table.dropna().to_csv("whole.csv", index=False)
    assert main([asked[0], "whole.csv", *asked[2:]]) == 0
    capsys.readouterr()
    assert main(["predict", "fedkin-model", path.name]) == 2
    said = capsys.readouterr().err
    assert re.search(r"first in line \d+; .* or fit with --missing mean: such a model fills them in itself", said)
    (tmp_path / "folder").mkdir()
    for site, own in table.groupby("site"):
        own.drop(columns="site").to_csv(tmp_path / "folder" / f"{site}.csv", index=False)
    assert main(["predict", "fedkin-model", "folder"]) == 2
    assert re.search(r"first in \w+\.csv, line \d+", capsys.readouterr().err)
    assert main([*asked, "--missing", "indicator"]) == 0
    assert main(["predict", "fedkin-model", path.name, "--out", "out.csv"]) == 0
    assert len(pd.read_csv(tmp_path / "out.csv")) == len(table)


# --- categories -------------------------------------------------------------------------------------------------


def test_text_becomes_levels_and_new_levels_are_averages(tmp_path):
    table = frame()
    fed = read(saved(tmp_path, table))
    assert fed.feature_names == ("age", "dose", "ward=B", "ward=C")
    dummies = pd.get_dummies(table["ward"], drop_first=True).to_numpy(float)
    assert np.array_equal(fed.X[np.argsort(fed.row_order), 2:], dummies)
    model = fit(fed, None, OPTIONS)
    new = {"age": [50.0], "dose": [0.0]}
    known = [model.predict({**new, "ward": [level]}, "000")[0] for level in "ABC"]
    with pytest.warns(TableWarning, match=r"ward: unknown level 'D' \(1 row\), first in row 2; .* as an average"):
        found = model.predict({**new, "ward": ["D"]}, "000")[0]
    shares = [(table["ward"] == level).mean() for level in "ABC"]
    assert np.isclose(found, np.dot(shares, known))


def test_codes_are_asked_about_and_taken_as_categories_if_told(tmp_path):
    table = frame()
    table["zip"] = np.random.default_rng(1).choice([95608, 95610, 95815], 60)
    path = saved(tmp_path, table)
    with pytest.warns(TableWarning, match=r"'zip' looks like a code, but .* say so with categories="):
        assert "zip" in read(path).feature_names
    assert read(path, categories=["zip"]).feature_names[-2:] == ("zip=95610", "zip=95815")


DATES = [
    "4.3.2021",
    "3/4/21",
    "Wed May 21 00:00:00 EDT 2008",
    "May 21, 2008",
    "4-Mar-21",
    "21st of March 2021",
    "Jan 2020",
]


@pytest.mark.parametrize("day", [*DATES, "Jan 2020", "2021-03-04 15:30:00"])
def test_dates_are_known_however_they_are_written(tmp_path, day):
    table = frame()
    table["sale_date"] = day
    table.loc[3, "sale_date"] = "unknown"
    assert "sale_date: these are dates" in refused(saved(tmp_path, table))


@pytest.mark.parametrize("word", ["May", "may", "Martin 4", "sun 12 dec", "Dec-2", "Apr 4 rooms 2021"])
def test_words_are_no_dates(tmp_path, word):
    table = frame()
    table["ward"] = np.where(np.arange(60) % 2, word, "other")
    assert len(read(saved(tmp_path, table)).feature_names) == 3


@pytest.mark.parametrize("name", ["patient_id", "recordId", "number"])
def test_ids_that_would_be_amounts_are_remarked_on(tmp_path, name):
    table = frame()
    table[name] = np.random.default_rng(2).permutation(60) + 4000
    path = saved(tmp_path, table)
    with pytest.warns(TableWarning, match=f"'{name}' looks like an id, .*; leave it out with drop="):
        assert name in read(path).feature_names
    read(path, features=["age", name])  # who names it means it


def test_ids_stay_text(tmp_path):
    fed = read(saved(tmp_path, frame()))
    assert fed.sites == ("000", "001", "002")
    (tmp_path / "files").mkdir()
    saved(tmp_path / "files", frame(6).assign(site="007"), "a.csv")
    saved(tmp_path / "files", frame(6).assign(site="12"), "b.csv")
    assert read(tmp_path / "files").sites == ("007", "12")


# --- the list of bad tables -------------------------------------------------------------------------------------


def test_a_word_in_a_numeric_column(tmp_path):
    table = frame().astype({"age": object})
    table.loc[11, "age"] = "unknown"
    assert refused(saved(tmp_path, table)) == (
        "the table does not fit: age: 1 of 60 cells is not a number: 'unknown' in line 13; correct the cell, or leave "
        'it empty and add missing="drop" or missing="mean"'
    )
    assert refused(saved(tmp_path, table), missing="mean").endswith("correct the cell, or leave it empty")


@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("amounts", [[17.5, 18, 21, 19], [17, 18, 21, 19]])
def test_a_word_among_few_numbers_of_the_target(tmp_path, n, amounts, capsys):
    table = frame(n, 2).assign(days=np.resize(amounts, n)).astype({"days": object})
    table.loc[2, "days"] = "oops"
    path = saved(tmp_path, table[["site", "dose", "days"]])
    assert refused(path) == (
        f"the table does not fit: days: 1 of {n} cells is not a number: 'oops' in line 4; correct the cell, or leave "
        'it empty and add missing="drop"; if these are classes, give each a letter (c1, c2)'
    )
    assert main(["fit", str(path), "--site", "site", "--target", "days", "--out", str(tmp_path / "m")]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "line 4; correct the cell, or leave it empty and add --missing drop; if" in words
    table.loc[2, "days"] = None
    with pytest.warns(TableWarning, match="1 row of"):
        assert read(saved(tmp_path, table), missing="drop").y.dtype.kind == "f"


@pytest.mark.parametrize(
    "labels", [["0", "1", "2", "3+"], ["1", "2", "other"], ["c1", "c2", "c3"], ["1", "2", "3", "a", "b", "c", "d"]]
)
def test_labels_with_digits_are_classes(tmp_path, labels):
    table = frame(28, 2).assign(days=np.resize(np.array(labels, dtype=object), 28))
    assert set(read(saved(tmp_path, table)).y) == set(labels)


def test_a_word_among_few_amounts_of_a_feature(tmp_path):
    table = frame(8, 2).astype({"age": object})
    table.loc[[2, 5], "age"] = "none"
    path = saved(tmp_path, table)
    words = refused(path)
    assert "age: 2 of 8 cells are not numbers: 'none' in line 4, 'none' in line 7; correct the cell" in words
    assert words.endswith("if these are names, say so with categories=")
    assert "age=none" in read(path, categories=["age"]).feature_names


def test_decimal_commas(tmp_path):
    words = refused(saved(tmp_path, frame(), sep=";", decimal=","))
    assert words.startswith("the table does not fit (3 findings):\n  age: 60 of 60 cells are not numbers: '")
    assert words.count("write decimal points, not commas") == 3


def test_several_missing_columns_are_named_at_once(tmp_path):
    words = refused(saved(tmp_path, frame()), site="sit", target="dys", features=["aged", "dose"])
    assert words == (
        "there is no column 'sit' for the site (did you mean 'site'?) and no column 'dys' for the target (did you "
        "mean 'days'?) and no column 'aged' for the features (did you mean 'age'?); the table has 'site', 'age', "
        "'dose', 'ward', 'days'"
    )


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "index"])
def test_an_index_that_was_saved_along(tmp_path, name):
    table = frame()
    table.insert(0, name, range(60))
    with pytest.warns(TableWarning, match=f"column '{name}' counts the rows .*: left out"):
        fed = read(saved(tmp_path, table))
    assert fed.feature_names[0] == "age"


@pytest.mark.parametrize("labels", [["no", "yes"], ["N", "Y"], [False, True]])
def test_yes_and_no_are_classes(tmp_path, labels):
    table = frame()
    table["days"] = np.array(labels)[(table["days"] > table["days"].mean()).astype(int)]
    model = fit(read(saved(tmp_path, table)), None, FitOptions(lam=0.05, select="none", ridge=0.1))
    assert model.loss.name == "logistic"
    assert model.classes == tuple(labels)


def test_a_column_that_equals_the_target(tmp_path):
    table = frame()
    table["outcome"] = table["days"]
    path = saved(tmp_path, table)
    assert refused(path) == (
        "column 'outcome' is the target 'days' under another name, so the model would have nothing to learn: leave it "
        "out with drop="
    )
    assert read(path, features=["age", "outcome"]).n_features == 2


def test_constant_and_collinear_columns_are_left_out_with_one_note_each(tmp_path):
    table = frame()
    table["country"], table["year"], table["twice"], table["sum"] = "CH", 2021, 2 * table["age"], 0.0
    table["sum"] = table["age"] + table["dose"]
    with pytest.warns(TableWarning) as caught:
        fed = read(saved(tmp_path, table))
    assert [str(one.message) for one in caught] == list(fed.notes)
    assert fed.notes == (
        "column 'country' is 'CH' in every row: left out",
        "column 'year' is the same in every row: left out",
        "columns 'twice', 'sum' follow from the columns before them: left out",
    )
    assert fed.feature_names == ("age", "dose", "ward=B", "ward=C")
    assert not fit(fed, None, OPTIONS).notes


def test_an_empty_column_is_left_out(tmp_path):
    with pytest.warns(TableWarning, match="column 'remark' is empty in every row: left out"):
        assert "remark" not in read(saved(tmp_path, frame().assign(remark=None))).feature_names


def test_a_target_that_is_constant_at_one_site_and_a_site_with_one_row(tmp_path):
    table = frame()
    table["days"] = np.where(table["site"] == "001", 1.0, table["days"])
    table.loc[60] = ["999", 50.0, 0.0, "A", 5.0]
    fed = read(saved(tmp_path, table))
    assert fed.n_samples.tolist() == [20, 20, 20, 1]
    model = fit(fed, None, OPTIONS)
    assert np.isfinite(model.coef).all()
    labels = read(saved(tmp_path, table.assign(days=np.where(table["days"] > 4, "long", "short"))))
    with pytest.warns(fedkin.errors.DegenerateSiteWarning, match="a ridge of 1/25 of a row was added"):
        model = fit(labels, None, FitOptions(lam=0.0, select="none"))
    assert np.isfinite(model.coef).all()
    assert any("1/25 of a row" in line for line in model.notes["001"])


def test_the_page_on_tables_shows_messages_that_exist():
    root = Path(__file__).parent.parent
    page = (root / "docs" / "tables.md").read_text(encoding="utf-8")
    package = root / "src" / "fedkin"
    sources = [*(package / "data").rglob("*.py"), *(package / "fitting").glob("*.py")]
    text = " ".join(path.read_text(encoding="utf-8") for path in sources)
    section = page.partition("## Messages and their cure")[2].partition("\n## ")[0]
    shown = [
        words
        for line in section.splitlines()
        if line.startswith("| `")
        for words in re.findall("`([^`]+)`", line.split("|")[1])
    ]
    assert len(shown) > 8
    for words in shown:
        pattern = r"[\s\"f]*".join(map(re.escape, words.replace("looks like", "looks").split()))
        assert re.search(pattern, text) or words == "for the target", words


def test_a_target_that_never_changes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{site},{k},3\n" for site in "ab" for k in range(6))
    (tmp_path / "table.csv").write_text(f"site,x,y\n{rows}", encoding="utf-8")
    arguments = ["fit", str(tmp_path / "table.csv"), "--site", "site", "--target", "y", "--out", str(tmp_path / "m")]
    assert main(arguments) == 2
    assert "the target 'y' is 3 in all 12 rows: there is nothing to predict" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_an_exposure_in_the_place_of_its_logarithm_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{site},{k},{k % 3},{100 + 50 * k}\n" for site in "ab" for k in range(8))
    (tmp_path / "table.csv").write_text(f"site,x,y,expected\n{rows}", encoding="utf-8")
    arguments = ["fit", str(tmp_path / "table.csv"), "--site", "site", "--target", "y", "--loss", "poisson"]
    assert main([*arguments, "--offset", "expected", "--out", str(tmp_path / "m")]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "the offset reaches 450" in words and "logarithm of the exposure" in words


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("count", "if it holds counts of events, add --loss poisson"),
        ("class", "--loss linear fits numbers"),
        ("year", ""),
        ("none", ""),
    ],
)
def test_a_loss_that_may_suit_better_is_hinted_at(tmp_path, capsys, target, hint):
    table = frame()
    rng = np.random.default_rng(0)
    days = {"count": rng.poisson(2, 60), "class": rng.integers(0, 2, 60), "year": rng.integers(1990, 2020, 60)}
    table["days"] = days.get(target, table["days"])
    path = saved(tmp_path, table)
    asked = ["fit", str(path), "--site", "site", "--target", "days", "--test-size", "0", "--out", str(tmp_path / "m")]
    assert main([*asked, "--lam", "0.1"]) == 0
    words = " ".join(capsys.readouterr().err.split())
    assert ("--loss" in words) == bool(hint) and hint in words
    assert main([*asked, "--lam", "0.1", "--loss", "linear"]) == 0
    assert "--loss" not in capsys.readouterr().err


# --- the command line on targets of zeros and ones ------------------------------------------------------------


def fitted(tmp_path, capsys, table, *more):
    path = saved(tmp_path, table)
    assert main(["fit", str(path), "--site", "site", "--target", "days", "--out", str(tmp_path / "m"), *more]) == 0
    shown = capsys.readouterr()
    return fedkin.load(tmp_path / "m"), shown.err


def test_numbers_that_are_0_or_1_are_probabilities_unless_told_otherwise(tmp_path, capsys):
    table = frame(90).assign(days=lambda one: (one["days"] > one["days"].median()).astype(int))
    model, said = fitted(tmp_path, capsys, table, "--test-size", "0")
    assert model.loss.name == "logistic"
    assert model.classes == (0, 1)
    assert "the target 'days' is 0 or 1 everywhere: its probabilities are modelled; --loss linear fits numbers" in said
    model, said = fitted(tmp_path, capsys, table, "--test-size", "0", "--loss", "linear")
    assert model.loss.name == "linear"
    assert "0 or 1" not in said
    assert fit(read(tmp_path / "table.csv")).loss.name == "linear"  # in Python numbers stay numbers


def test_sites_with_one_row_and_targets_that_never_change_are_named(tmp_path, capsys):
    table = frame(60)
    table.loc[0, "site"], table.loc[1, "site"] = "alone", "too"
    table.loc[table["site"] == "002", "days"] = 5.0
    _, said = fitted(tmp_path, capsys, table, "--test-size", "0")
    said = " ".join(said.split())
    assert "one row only at 2 sites ('alone', 'too'): it is never held out, and the model there rests on" in said
    assert "the target 'days' never changes at site '002': check that it was recorded there" in said
    _, said = fitted(tmp_path, capsys, frame(60), "--test-size", "0")
    assert "one row only" not in said and "never changes" not in said


# --- what newcomers have in cells -----------------------------------------------------------------------------


def with_cells(tmp_path, write, column="age"):
    """The table with each cell of a column written by a function of its number and its row."""
    table = frame()
    table[column] = [write(number, row) for row, number in enumerate(table[column])]
    return saved(tmp_path, table)


def test_commas_between_thousands_are_to_be_removed(tmp_path):
    cure = "thousands commas: remove them (if they are decimal commas, write points)"
    assert cure in refused(with_cells(tmp_path, lambda age, row: f"{round(200 * age):,}"))
    found = refused(with_cells(tmp_path, lambda age, row: f"{round(200_000 * age):,}"))
    assert cure in found and "such as" not in found
    # one comma that parts no thousands tells that none does
    path = with_cells(tmp_path, lambda age, row: "9,990" if row else "9,5")
    assert "write decimal points, not commas" in refused(path)
    path = with_cells(tmp_path, lambda age, row: "0,125" if row else "0,250")
    assert "write decimal points, not commas" in refused(path)


@pytest.mark.parametrize("unit", ["%", " y", " kg/m2".replace("2", "²"), " mmol/L"])
def test_numbers_with_a_unit_are_no_categories(tmp_path, unit):
    found = refused(with_cells(tmp_path, lambda age, row: f"{age}{unit}"))
    assert re.match(rf"the table does not fit: age: 60 of 60 cells are not numbers: '[\d.]+{unit}' in line 2", found)
    assert found.endswith("leave units and remarks out of the cells; if these are names, say so with categories=")
    path = with_cells(tmp_path, lambda age, row: f"{round(age)}{unit}" if row % 2 else round(age))
    assert "30 of 60 cells are not numbers" in refused(path)
    assert read(path, categories=["age"]).schema.features[0].kind == "category"
    found = refused(with_cells(tmp_path, lambda days, row: f"{days}{unit}", "days"))
    assert "days: 60 of 60 cells are not numbers" in found and "leave units" in found


@pytest.mark.parametrize("levels", [["0-9", "10-19", "65+"], ["1st", "2nd", "3rd"], ["5 stars", "4 stars"]])
def test_levels_that_begin_with_a_digit_stay_categories(tmp_path, levels):
    path = with_cells(tmp_path, lambda age, row: levels[row % len(levels)])
    assert read(path).schema.features[0].levels == tuple(sorted(levels))


def test_names_that_differ_in_case_only_are_told_of(tmp_path):
    path = with_cells(tmp_path, lambda days, row: "Yes" if row == 3 else "yes" if days > 5 else "no", "days")
    with pytest.warns(TableWarning, match="the target 'days' has 'Yes' and 'yes' as different classes"):
        read(path)
    path = with_cells(tmp_path, lambda site, row: "C1" if row == 3 else f"c{row % 3}", "site")
    with pytest.warns(TableWarning, match="sites 'c1' and 'C1' differ in case only, and are taken for different ones"):
        read(path)


@pytest.mark.parametrize("column", ["age", "days"])
def test_numbers_that_cannot_be_right(tmp_path, column):
    found = refused(with_cells(tmp_path, lambda age, row: 1e160 if row == 4 else age, column))
    assert f"{column}: 1 of 60 values is too large to compute with: 1e+160 in line 6; correct the cell" in found
