"""The commands: exit codes, files, JSON, and numbers that other libraries give too."""

from __future__ import annotations

from io import StringIO

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy.stats import norm
from sklearn.linear_model import LinearRegression

import fedkin as library
from blackbox.conftest import COLUMNS, clinic_table, read_coefficients, run

NO_COMPARISON = ["--test-size", "0"]
ALONE = ["--method", "fused", "--lam", "0", "--select", "none", "--tol", "1e-12", *NO_COMPARISON]


def least_squares(rows: pd.DataFrame, features: tuple[str, ...] = ("age", "dose"), target: str = "days"):
    """Return statsmodels' least squares with an intercept."""
    return sm.OLS(rows[target].to_numpy(), sm.add_constant(rows[list(features)].to_numpy())).fit()


def by_clinic(rows: pd.DataFrame, estimate) -> np.ndarray:
    """Return what a function estimates from the rows of each clinic, in alphabetical order."""
    return np.array([estimate(own) for _, own in rows.groupby("clinic")])


def predictions(text: str) -> pd.DataFrame:
    return pd.read_csv(StringIO(text))


# --- help ---------------------------------------------------------------------------------------------------------


def test_help_lists_the_commands_and_version_is_the_library_s(fedkin):
    shown = fedkin("--help", code=0).stdout
    for command in ("fit", "predict", "inspect", "report", "watch", "demo", "study", "federation", "site"):
        assert command in shown
    assert library.__version__ in fedkin("--version", code=0).stdout


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("fit", "--site --target --features --drop --offset --weight --time --missing --graph --loss --lam --json"),
        ("predict", "--new-site --rows --level --out --json"),
        ("inspect", "--site --group --contrast --level --own-rows --card --json"),
        ("report", "--out --coordinates --json"),
        ("demo", "--sites --rows --features --seed --out --json"),
        ("study", "--out --quick --config --jobs --redraw"),
        ("watch", "--port"),
        ("federation", "draft check new invite admit deliver status simulate"),
        ("site", "check join accept share answer settings run status stop"),
    ],
)
def test_help_of_every_command_lists_its_options(fedkin, command, words):
    shown = fedkin(command, "--help-all", code=0).stdout
    assert [word for word in words.split() if word not in shown] == []


# --- fit ----------------------------------------------------------------------------------------------------------


def test_fit_finds_the_two_groups_and_describes_the_model_in_json(fit):
    told = fit.outcome.json
    assert {frozenset(group) for group in told["groups"]} == {frozenset("abc"), frozenset("def")}
    assert (told["n_groups"], told["n_sites"], told["n_rows"]) == (2, 6, 240)
    assert (told["method"], told["loss"], told["status"], told["gap"]) == ("kin", "linear", "converged", None)
    assert (told["features"], told["target"], told["classes"]) == (["age", "dose"], "days", None)
    assert (told["model"], told["data"], told["graph"]) == ("model", "clinics.csv", None)
    assert told["kin"]["resolved"] is True
    assert all(group["probability"] > 0.9 for group in told["kin"]["groups"])
    assert sum(told["kin"]["n_groups"]) == pytest.approx(1.0)
    assert fit.page.is_file()


def test_kin_estimates_are_least_squares_of_each_group_where_groups_are_clear(fit, clinics):
    found = read_coefficients(fit.model)
    for group in ("abc", "def"):
        pooled = least_squares(clinics[clinics["clinic"].isin(list(group))])
        np.testing.assert_allclose(found.loc[list(group)], np.tile(pooled.params, (3, 1)), atol=0.02)


def test_fit_in_words_prints_results_to_stdout_and_writes_the_default_directory(fedkin, table, tmp_path):
    shown = fedkin("fit", table.name, *COLUMNS, "--repeats", "1", code=0)
    for word in ("Local", "Global", "Site intercepts", "Fedkin", "fedkin-model"):
        assert word in shown.stdout
    assert "error" not in shown.stderr
    assert (tmp_path / "fedkin-model" / "model.json").is_file()
    again = fedkin("fit", table.name, *COLUMNS, "--repeats", "1", code=0)  # replaced, and the user is told
    assert "fedkin-model" in again.stderr
    assert again.stdout == shown.stdout  # the same seed


def test_without_a_penalty_every_site_has_its_own_least_squares(fedkin, table, tmp_path, clinics):
    told = fedkin("fit", table.name, *COLUMNS, *ALONE, "--json", "--out", "m").json
    assert (told["method"], told["lam"], told["comparison"]) == ("fused", 0.0, None)
    expected = by_clinic(clinics, lambda own: least_squares(own).params)
    np.testing.assert_allclose(read_coefficients(tmp_path / "m"), expected, rtol=1e-5)


def test_a_huge_penalty_gives_least_squares_of_all_rows(fedkin, table, tmp_path, clinics):
    told = fedkin("fit", table.name, *COLUMNS, *ALONE, "--lam", "1000", "--json", "--out", "m").json
    expected = least_squares(clinics).params
    np.testing.assert_allclose(read_coefficients(tmp_path / "m"), np.tile(expected, (6, 1)), rtol=1e-4, atol=1e-5)
    assert told["n_groups"] == 1
    assert abs(told["gap"]) <= 1e-6


def test_labels_give_logistic_regression_at_every_site(fedkin, tmp_path):
    rows = clinic_table(1, 120)
    rng = np.random.default_rng(1)
    ill = rng.logistic(size=len(rows)) < rows["age"] - 0.5 * rows["dose"]
    rows = rows.drop(columns=["days", "time"]).assign(state=np.where(ill, "well", "ill"))
    rows.to_csv(tmp_path / "t.csv", index=False)
    told = fedkin("fit", "t.csv", "--site", "clinic", "--target", "state", *ALONE, "--json", "--out", "m").json
    assert (told["loss"], told["classes"]) == ("logistic", ["ill", "well"])

    def logit(own: pd.DataFrame) -> np.ndarray:
        X = sm.add_constant(own[["age", "dose"]].to_numpy())
        return sm.Logit((own["state"] == "well").to_numpy(float), X).fit(disp=0).params

    expected = by_clinic(rows, logit)
    np.testing.assert_allclose(read_coefficients(tmp_path / "m"), expected, rtol=1e-3, atol=1e-4)
    shown = predictions(fedkin("predict", "m", "t.csv", code=0).stdout)
    np.testing.assert_allclose(shown["probability:ill"] + shown["probability:well"], 1.0)
    likely = np.where(shown["probability:well"] > 0.5, "well", "ill")
    assert shown["prediction"].tolist() == likely.tolist()


def test_counts_with_an_offset_give_poisson_regression_at_every_site(fedkin, tmp_path):
    rng = np.random.default_rng(3)
    rows = clinic_table(2).drop(columns=["days", "time", "dose"])
    rows["log_expected"] = np.log(rng.uniform(1, 20, len(rows)))
    rows["deaths"] = rng.poisson(np.exp(rows["log_expected"] + 0.3 * rows["age"]))
    rows.to_csv(tmp_path / "t.csv", index=False)
    columns = ["--site", "clinic", "--target", "deaths", "--offset", "log_expected", "--loss", "poisson"]
    assert fedkin("fit", "t.csv", *columns, *ALONE, "--json", "--out", "m").json["offset"] == "log_expected"

    def glm(own: pd.DataFrame):
        X = sm.add_constant(own[["age"]].to_numpy())
        family = sm.families.Poisson()
        return sm.GLM(own["deaths"].to_numpy(), X, family=family, offset=own["log_expected"].to_numpy()).fit()

    expected = by_clinic(rows, lambda own: glm(own).params)
    np.testing.assert_allclose(read_coefficients(tmp_path / "m"), expected, rtol=1e-3, atol=1e-4)
    shown = predictions(fedkin("predict", "m", "t.csv", code=0).stdout)  # finds the offset by itself
    own = rows["clinic"] == "c"
    np.testing.assert_allclose(shown.loc[own, "prediction"], glm(rows[own]).fittedvalues, rtol=1e-3)


def test_the_mean_loss_needs_no_target_and_gives_the_means_of_every_site(fedkin, tmp_path, table, clinics):
    options = ["--site", "clinic", "--loss", "mean", "--features", "age,dose", *ALONE, "--json", "--out", "m"]
    assert fedkin("fit", table.name, *options).json["target"] is None
    found = read_coefficients(tmp_path / "m")[["age", "dose"]]
    np.testing.assert_allclose(found, clinics.groupby("clinic")[["age", "dose"]].mean(), atol=1e-6)


def test_one_site_is_fitted_and_inspected_as_statsmodels_does(fedkin, tmp_path, clinics):
    own = clinics[clinics["clinic"] == "a"]
    own.to_csv(tmp_path / "t.csv", index=False)
    ended = fedkin("fit", "t.csv", *COLUMNS, *NO_COMPARISON, "--out", "m", code=0)
    assert "'a'" in ended.stderr  # one site only: a note
    shown = fedkin("inspect", "m", "--site", "a", "--json").json["parameters"]
    theirs = least_squares(own)
    np.testing.assert_allclose([one["estimate"] for one in shown], theirs.params, rtol=0.01)
    np.testing.assert_allclose([one["standard_error"] for one in shown], theirs.bse, rtol=0.05)


def test_weights_count_as_repeated_rows(fedkin, tmp_path, clinics):
    weights = np.arange(len(clinics)) % 3
    clinics.assign(copies=weights).to_csv(tmp_path / "weighted.csv", index=False)
    clinics.loc[clinics.index.repeat(weights)].to_csv(tmp_path / "repeated.csv", index=False)
    fedkin("fit", "weighted.csv", *COLUMNS, *ALONE, "--weight", "copies", "--out", "weighted", code=0)
    fedkin("fit", "repeated.csv", *COLUMNS, *ALONE, "--out", "repeated", code=0)
    found = read_coefficients(tmp_path / "weighted")
    np.testing.assert_allclose(found, read_coefficients(tmp_path / "repeated"), rtol=1e-5)


def test_text_is_a_category_gaps_are_filled_by_means_and_columns_can_be_dropped(fedkin, tmp_path, clinics):
    rng = np.random.default_rng(5)
    rows = clinics.assign(ward=rng.choice(["A", "B", "C"], len(clinics)), note=rng.normal(size=len(clinics)))
    rows["days"] += 2.0 * (rows["ward"] == "B")
    rows.loc[[3, 20], "age"] = np.nan
    rows.to_csv(tmp_path / "t.csv", index=False)
    told = fedkin("fit", "t.csv", *COLUMNS, *ALONE, "--missing", "mean", "--drop", "note", "--json", "--out", "m").json
    assert told["features"] == ["age", "dose", "ward=B", "ward=C"]
    filled = rows.assign(age=rows["age"].fillna(rows["age"].mean()))
    filled = filled.assign(**{"ward=B": filled["ward"] == "B", "ward=C": filled["ward"] == "C"})
    filled[["ward=B", "ward=C"]] = filled[["ward=B", "ward=C"]].astype(float)
    expected = by_clinic(filled, lambda own: least_squares(own, tuple(told["features"])).params)
    np.testing.assert_allclose(read_coefficients(tmp_path / "m"), expected, rtol=1e-4, atol=1e-5)
    assert fedkin("fit", "t.csv", *COLUMNS, *ALONE, "--missing", "drop", "--json").json["n_rows"] == 238


def test_a_graph_file_limits_which_sites_are_fused(fedkin, tmp_path, table):
    (tmp_path / "graph.csv").write_text("source,target,weight\na,b,1\nb,c,2\nd,e,0.5\n")
    options = ["--graph", "graph.csv", "--method", "fused", "--lam", "1000", "--select", "none", *NO_COMPARISON]
    ended = fedkin("fit", table.name, *COLUMNS, *options, "--json", "--out", "m")
    told = ended.json
    assert (told["edges"], told["graph"]) == (3, "graph.csv")
    assert {frozenset(group) for group in told["groups"]} == {frozenset("abc"), frozenset("de"), frozenset("f")}
    assert "f" in ended.stderr  # a site without edges: a note
    edges = pd.read_csv(tmp_path / "m" / "edges.csv")
    kept = {
        (frozenset(ends), weight) for *ends, weight in edges[["source", "target", "weight"]].itertuples(index=False)
    }
    assert kept == {(frozenset("ab"), 1.0), (frozenset("bc"), 2.0), (frozenset("de"), 0.5)}


def test_edge_tests_drop_the_edges_between_groups(fedkin, table):
    told = fedkin("fit", table.name, *COLUMNS, "--method", "fused", "--lam", "0.01", *NO_COMPARISON, "--json").json
    assert told["selection"]["candidates"] == 15
    assert told["edges"] == 6
    assert {frozenset(group) for group in told["groups"]} == {frozenset("abc"), frozenset("def")}


# --- the comparison -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_time(tmp_path_factory):
    """A comparison on the last quarter of every clinic's rows, and both parts of the table."""
    folder = tmp_path_factory.mktemp("time")
    rows = clinic_table(4)
    rows.to_csv(folder / "all.csv", index=False)
    told = run(folder, "fit", "all.csv", *COLUMNS, "--time", "time", "--json", "--out", "all").json
    earlier, later = rows[rows["time"] < 30], rows[rows["time"] >= 30]
    return folder, told["comparison"], earlier.drop(columns="time"), later.drop(columns="time")


def test_the_error_of_fedkin_is_that_of_a_fit_of_the_earlier_rows(by_time):
    folder, comparison, earlier, later = by_time
    earlier.to_csv(folder / "earlier.csv", index=False)
    later.to_csv(folder / "later.csv", index=False)
    run(folder, "fit", "earlier.csv", *COLUMNS, *NO_COMPARISON, "--out", "earlier", code=0)
    predicted = predictions(run(folder, "predict", "earlier", "later.csv", code=0).stdout)["prediction"]
    errors = (predicted.to_numpy() - later["days"].to_numpy()) ** 2
    (own,) = [method for method in comparison["methods"] if method["name"] == "Fedkin"]
    assert own["mean"] == pytest.approx(errors.mean(), rel=0.01)
    each = {one["site"]: one["Fedkin"] for one in comparison["sites"]}
    expected = pd.Series(errors).groupby(later["clinic"].to_numpy()).mean()
    assert each == pytest.approx(expected.to_dict(), rel=0.01)


def test_the_errors_of_the_alternatives_are_those_of_scikit_learn_with_next_to_no_ridge(by_time):
    _, comparison, earlier, later = by_time
    names = ["age", "dose"]

    def error(train: pd.DataFrame, test: pd.DataFrame, columns: list[str]) -> np.ndarray:
        model = LinearRegression().fit(train[columns], train["days"])
        return (model.predict(test[columns]) - test["days"]).to_numpy() ** 2

    own = [error(earlier[earlier["clinic"] == c], later[later["clinic"] == c], names) for c in "abcdef"]
    dummies = [rows.join(pd.get_dummies(rows["clinic"], dtype=float)) for rows in (earlier, later)]
    expected = {
        "Local": np.concatenate(own).mean(),
        "Global": error(earlier, later, names).mean(),
        "Site intercepts": error(*dummies, [*names, *"abcdef"]).mean(),
    }
    found = {method["name"]: method["mean"] for method in comparison["methods"]}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0.05)


def test_the_parts_of_a_comparison_agree_with_each_other(fit, clinics):
    comparison = fit.outcome.json["comparison"]
    means = {method["name"]: method["mean"] for method in comparison["methods"]}
    assert list(means) == ["Local", "Global", "Site intercepts", "Fedkin"]
    assert (comparison["repeats"], comparison["test_size"], comparison["lower_is_better"]) == (3, 0.25, True)
    assert means["Fedkin"] < means["Site intercepts"] < means["Global"]
    for method in comparison["methods"]:
        assert method["difference"] == pytest.approx(method["mean"] - means["Fedkin"])
        assert method["standard_error"] > 0
        assert np.mean([one[method["name"]] for one in comparison["sites"]]) == pytest.approx(method["mean"])
    assert {one["site"]: one["rows"] for one in comparison["sites"]} == dict.fromkeys("abcdef", 40)
    assert isinstance(comparison["verdict"], str) and comparison["verdict"]


# --- rows in other places -----------------------------------------------------------------------------------------


def test_parquet_files_and_a_file_per_site_give_the_model_of_the_table(fedkin, tmp_path, fit, clinics):
    (tmp_path / "rows").mkdir()
    (tmp_path / "clinics").mkdir()
    clinics.iloc[:130].to_parquet(tmp_path / "rows" / "1.parquet", index=False)
    clinics.iloc[130:].to_parquet(tmp_path / "rows" / "2.parquet", index=False)
    for name, own in clinics.groupby("clinic"):
        own.drop(columns="clinic").to_csv(tmp_path / "clinics" / f"{name}.csv", index=False)
    told = fedkin("fit", "rows/*.parquet", *COLUMNS, *NO_COMPARISON, "--json", "--out", "parquet").json
    assert (told["n_rows"], told["features"]) == (240, ["age", "dose"])
    fedkin("fit", "clinics", "--target", "days", *NO_COMPARISON, "--out", "files", code=0)
    expected = read_coefficients(fit.model)
    for name in ("parquet", "files"):
        np.testing.assert_allclose(read_coefficients(tmp_path / name), expected, rtol=1e-9)


# --- predict ------------------------------------------------------------------------------------------------------


def test_predictions_are_in_the_order_of_the_rows_on_stdout_in_a_file_and_in_json(fedkin, tmp_path, fit, clinics):
    new = clinic_table(9, 3).drop(columns=["time", "days"])
    new.to_csv(tmp_path / "new.csv", index=False)
    shown = fedkin("predict", fit.model, "new.csv", code=0).stdout
    written = fedkin("predict", fit.model, "new.csv", "--out", "out.csv", code=0)
    assert (tmp_path / "out.csv").read_text(encoding="utf-8") == shown
    assert "prediction," not in written.stdout
    found = predictions(shown)
    assert found.columns.tolist() == ["row", "clinic", "prediction"]
    assert found["row"].tolist() == list(range(18))
    assert found["clinic"].tolist() == new["clinic"].tolist()
    own = read_coefficients(fit.model).loc[new["clinic"]]
    expected = own["intercept"].to_numpy() + (own[["age", "dose"]].to_numpy() * new[["age", "dose"]].to_numpy()).sum(1)
    np.testing.assert_allclose(found["prediction"], expected, rtol=1e-9)
    told = fedkin("predict", fit.model, "new.csv", "--json").json
    assert told["columns"] == found.columns.tolist()
    assert [row[2] for row in told["predictions"]] == found["prediction"].tolist()


def test_a_new_site_is_predicted_from_what_sites_have_in_common_or_from_its_own_rows(fedkin, tmp_path, fit):
    rows = clinic_table(9, 30).query("clinic == 'd'").drop(columns="time").assign(clinic="new")
    rows.drop(columns="days").to_csv(tmp_path / "new.csv", index=False)
    rows.to_csv(tmp_path / "labelled.csv", index=False)
    fedkin("predict", fit.model, "new.csv").refuses("'new'", "--new-site")
    common = predictions(fedkin("predict", fit.model, "new.csv", "--new-site", code=0).stdout)["prediction"]
    expected = sm.add_constant(rows[["age", "dose"]].to_numpy()) @ read_coefficients(fit.model).mean().to_numpy()
    np.testing.assert_allclose(common, expected, atol=0.1)  # the mean over sites
    ended = fedkin("predict", fit.model, "new.csv", "--new-site", "--rows", "labelled.csv", code=0)
    assert "new" in ended.stderr and "30" in ended.stderr  # a note on the new site and its rows
    like_d = predictions(ended.stdout)["prediction"]
    truth = 4.0 - 2.0 * rows["age"].to_numpy() + 3.0 * rows["dose"].to_numpy()
    assert np.abs(like_d - truth).max() < 0.3 < np.abs(common - truth).max()


# --- inspect ------------------------------------------------------------------------------------------------------


def test_inspect_repeats_what_fit_said(fedkin, fit):
    fitted, told = fit.outcome.json, fedkin("inspect", fit.model, "--json").json
    for key in (
        "groups",
        "n_groups",
        "n_rows",
        "n_sites",
        "features",
        "target",
        "method",
        "loss",
        "comparison",
        "kin",
    ):
        assert told[key] == fitted[key], key
    shown = fedkin("inspect", fit.model, code=0).stdout
    assert all(word in shown for word in ("(intercept)", "age", "dose", "days", "Local", "Global"))


def test_inspect_shows_a_site_a_group_and_a_contrast(fedkin, fit):
    found = read_coefficients(fit.model)
    own = fedkin("inspect", fit.model, "--site", "a", "--level", "0.9", "--json").json
    assert own["level"] == 0.9
    assert [one["name"] for one in own["parameters"]] == ["(intercept)", "age", "dose"]
    np.testing.assert_allclose([one["estimate"] for one in own["parameters"]], found.loc["a"], rtol=1e-9)
    for one in own["parameters"]:
        half = norm.ppf(0.95) * one["standard_error"]
        assert (one["low"], one["high"]) == pytest.approx((one["estimate"] - half, one["estimate"] + half), rel=0.01)
    contrast = fedkin("inspect", fit.model, "--contrast", "a", "d", "--json").json["parameters"]
    np.testing.assert_allclose([one["estimate"] for one in contrast], found.loc["a"] - found.loc["d"], rtol=1e-9)
    group = fedkin("inspect", fit.model, "--group", "1", "--json").json["parameters"]
    members = fit.outcome.json["groups"][0]
    np.testing.assert_allclose([one["estimate"] for one in group], found.loc[members].mean(), rtol=1e-6)
    fedkin("inspect", fit.model, "--site", "nowhere").refuses("nowhere")


def test_the_card_is_markdown_with_rows_features_and_errors(fedkin, fit):
    card = fedkin("inspect", fit.model, "--card", code=0).stdout
    assert card.startswith("# ")
    assert all(word in card for word in ("240", "`age`", "`dose`", "`days`", "| Local", "| Fedkin"))


# --- demo ---------------------------------------------------------------------------------------------------------


def test_demo_writes_its_files_and_a_table_that_can_be_fitted(fedkin, tmp_path):
    told = fedkin("demo", "--sites", "12", "--rows", "40", "--features", "3", "--out", "demo", "--json").json
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        "report.html",
        "picture.svg",
        "data.csv",
        "graph.csv",
    }
    errors = told["estimation_error"]
    assert errors["Oracle"] < errors["Local"] < errors["Global"]
    assert errors["Kin"] < errors["Local"]
    rows, edges = (pd.read_csv(tmp_path / "demo" / name) for name in ("data.csv", "graph.csv"))
    assert rows.groupby("site").size().tolist() == [80] * 12  # as many to test on
    assert {*edges["source"], *edges["target"].dropna()} <= {*rows["site"]}
    options = ["--site", "site", "--target", "y", "--graph", "demo/graph.csv", *NO_COMPARISON, "--json"]
    assert fedkin("fit", "demo/data.csv", *options).json["n_sites"] == 12
    fedkin("demo", "--sites", "2", "--out", "small").refuses("--sites")
    assert not (tmp_path / "small").exists()
