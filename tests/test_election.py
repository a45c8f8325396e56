"""The election study: its files, its protocol (no look at test rows), its scores, its map."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedkin
from fedkin import datasets
from fedkin.datasets import (
    EARLIER,
    FACTS,
    RESULTS,
    Election,
    check_election,
    load_election,
)
from fedkin.errors import DataError
from fedkin.graph import Graph
from fedkin.studies import Replication, election_page, launch
from fedkin.studies.election import METHODS, ElectionProtocol, Split, election, penalised, scores, state_intercepts
from fedkin.studies.election_page import groups
from fedkin.studies.figures import draw

pytestmark = pytest.mark.studies

# --- a miniature of the files ---------------------------------------------------------------------------------


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """South Dakota with a renamed county, California, Alaska: 20 counties each, labels follow the first column."""
    rng = np.random.default_rng(3)
    facts: list[dict[str, object]] = [
        {"fips": 0, "area_name": "United States", "state_abbreviation": "", "A1": 5, "B2": 1}
    ]
    votes: list[dict[str, object]] = []
    earlier: list[dict[str, object]] = []
    for number, state in ((46, "SD"), (6, "CA"), (2, "AK")):
        facts.append({"fips": number * 1000, "area_name": state, "state_abbreviation": "", "A1": 5, "B2": 1})
        for k in range(20):
            fips = number * 1000 + (113 if number == 46 and k == 0 else 2 * k + 1)
            a, b = rng.normal(size=2)
            facts.append({"fips": fips, "area_name": f"{state} {k}", "state_abbreviation": state, "A1": a, "B2": b})
            now = 46102 if fips == 46113 else fips
            democratic = 100 + 50 * (a + 0.5 * rng.normal())
            votes.append({"county_fips": f"{now:05d}", "votes_gop": 100, "votes_dem": democratic})
            if number != 2:
                won = {"dem_2008": 60, "gop_2008": 50, "dem_2012": 60, "gop_2012": 50}
                lost = {"dem_2008": 50, "gop_2008": 60, "dem_2012": 50, "gop_2012": 60}
                earlier.append({"fips_code": f"{fips:05d}", **(won if state == "CA" else lost)})
    _write(tmp_path / FACTS, facts)
    _write(tmp_path / RESULTS, votes)
    _write(tmp_path / EARLIER, earlier)
    return tmp_path


def test_loading_recodes_joins_and_leaves_out(folder: Path):
    found = load_election(folder, more_than=19)
    assert found.federation.sites == ("CA", "SD")
    assert found.federation.n_samples.tolist() == [20, 20]  # with the renamed county
    assert found.federation.feature_names == ("A1", "B2")
    assert found.lean == {"CA": "blue", "SD": "red", "AK": "red"}
    with pytest.raises(DataError, match=r"no state .* more than 20 counties"):
        load_election(folder, more_than=20)


def test_missing_files_are_named_with_their_source(folder: Path):
    with pytest.raises(DataError, match="there is no directory"):
        load_election(folder / "nowhere")
    (folder / FACTS).unlink()
    (folder / EARLIER).unlink()
    with pytest.raises(DataError) as caught:
        load_election(folder)
    message = str(caught.value)
    assert "lacks 2 of the 3 files" in message and "kaggle.com" in message and EARLIER in message
    assert RESULTS not in message


OPTIONS = """
[study]
name = "mine"
task = "election"
data = "election"
replications = 1
[[grid]]
standardize = "pooled"
[options]
more_than = 19
methods = ["local"]
ridges = [0.1]
folds = 3
"""


def test_files_are_checked_before_a_worker_starts(folder: Path):
    (folder / "mine.toml").write_text(OPTIONS)
    out = folder / "out"
    with pytest.raises(DataError, match=r"0 states with more than 50 counties.*30 and 2710.*allow_incomplete = true"):
        launch(None, config=folder / "mine.toml", out=out, data=folder, jobs=1)
    assert not out.exists()
    (folder / "mine.toml").write_text(OPTIONS + "allow_incomplete = true\n")
    launch(None, config=folder / "mine.toml", out=out, data=folder, jobs=1)
    assert (out / "mine" / "rows.parquet").exists()


def test_rows_of_earlier_elections_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets, "COMPLETE", (0, 0))
    monkeypatch.setattr(datasets, "EARLIER_ROWS", 40)
    check_election(folder, 19)
    monkeypatch.setattr(datasets, "EARLIER_ROWS", 41)
    with pytest.raises(DataError, match=r"has 40 rows; the complete file has 41"):
        check_election(folder, 19)


# --- the protocol ---------------------------------------------------------------------------------------------


def _made_up(n_states: int = 5, n_rows: int = 60, seed: int = 1) -> Election:
    rng = np.random.default_rng(seed)
    data = {}
    for k in range(n_states):
        X = rng.normal(size=(n_rows, 3)) * [1.0, 5.0, 0.2] + [0.0, 3.0, 0.0]
        y = (X[:, 0] - 0.3 * X[:, 1] + 0.5 * k * X[:, 2] + rng.logistic(size=n_rows) > 0).astype(float)
        data[f"S{k}"] = (X, y)
    lean = {f"S{k}": "red" if k < 3 else "blue" for k in range(n_states)}
    return Election(fedkin.Federation(data), lean)


PROTOCOL = ElectionProtocol(
    lams=(1e-3, 1e-2), ridges=(1e-2, 1e-1), fed_ridges=(1e-3, 1e-2), folds=3, tol=1e-6, path_tol=1e-5
)


def test_nothing_is_learnt_from_test_rows():
    """Test rows replaced by nonsense change the scores, but no parameter, no choice and no graph."""
    made = _made_up()
    split = Split(made, PROTOCOL, seed=4)
    train, test = split.raw
    assert train.n_samples.tolist() == [40] * 5 and test.n_samples.tolist() == [20] * 5
    spoilt = made.federation.X.copy()
    target = made.federation.y.copy()
    rows = test.row_order
    spoilt[rows] = 1e3 * np.random.default_rng(0).normal(size=(len(rows), 3))
    target[rows] = 1 - target[rows]
    sites = [made.federation.sites[u] for u in made.federation.site_index]
    other = Split(replace(made, federation=fedkin.Federation.from_arrays(spoilt, target, sites)), PROTOCOL, seed=4)
    np.testing.assert_array_equal(other.raw[0].X, train.X)
    np.testing.assert_array_equal(other.train.X, split.train.X)

    for name in ("local", "global", "state-intercepts", "fed-loc", "fed-his", "kin"):
        here, there = (METHODS[name][1](one) for one in (split, other))
        assert here[1] == there[1]


def test_standards_come_from_training_rows():
    made = _made_up()
    pooled = Split(made, PROTOCOL, seed=4)
    np.testing.assert_allclose(pooled.train.X[:, 1:].mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(pooled.train.X[:, 1:].std(axis=0), 1)
    assert (pooled.train.X[:, 0] == 1).all()
    by_state = Split(made, replace(PROTOCOL, standardize="state", intercept=False), seed=4)
    for state in by_state.train.sites:
        np.testing.assert_allclose(by_state.train[state].X.mean(axis=0), 0, atol=1e-12)


@pytest.mark.parametrize("name", ["local", "global"])
def test_ridge_fits_against_scikit_learn(name: str):
    from sklearn.linear_model import LogisticRegression

    split = Split(_made_up(), replace(PROTOCOL, intercept=False), seed=4)
    found = METHODS[name][1](split)
    groups = [[state] for state in split.train.sites] if name == "local" else [list(split.train.sites)]
    expected = np.empty(len(split.test.X))
    for states in groups:
        rows = np.isin([split.train.sites[u] for u in split.train.site_index], states)
        of_test = np.isin([split.test.sites[u] for u in split.test.site_index], states)
        C = 1 / (found[1]["ridge"] * rows.sum())
        model = LogisticRegression(C=C, fit_intercept=False, tol=1e-10, max_iter=1000)
        model.fit(split.train.X[rows], split.train.y[rows])
        expected[of_test] = model.predict_proba(split.test.X[of_test])[:, 1]
    np.testing.assert_allclose(found[0], expected, atol=1e-4)


def test_scores_against_scikit_learn():
    from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss

    rng = np.random.default_rng(0)
    y, probability = (rng.random(200) < 0.2).astype(float), rng.random(200)
    found = scores(y, probability)
    assert found["accuracy"] == accuracy_score(y, probability > 0.5)
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, probability > 0.5))
    assert found["log_loss"] == pytest.approx(log_loss(y, probability))
    assert np.isfinite(scores(np.zeros(3), np.array([0.0, 1.0, 0.5]))["log_loss"])


def test_ridge_and_lam_are_the_best_of_the_inner_cross_validation():
    from sklearn.metrics import log_loss

    split = Split(_made_up(), PROTOCOL, seed=4)
    graph = Graph.complete(split.train.sites)
    found = penalised(split, graph)
    loss = {}
    for ridge in PROTOCOL.fed_ridges:
        for lam in PROTOCOL.lams:
            total = 0.0
            for fold in range(3):
                kept, held_out = split.train.take(split.fold != fold), split.train.take(split.fold == fold)
                vector = np.array([PROTOCOL.intercept_ridge, ridge, ridge, ridge])
                problem = fedkin.Problem(kept, graph, loss="logistic", lam=lam, ridge=vector)
                theta = fedkin.solve(problem, 1e-8).theta
                probability = 1 / (1 + np.exp(-(held_out.X * theta[held_out.site_index]).sum(axis=1)))
                total += log_loss(held_out.y, probability, normalize=False)
            loss[ridge, lam] = total
    assert (found[1]["ridge"], found[1]["lam"]) == min(loss, key=loss.get)


def test_the_task_gives_a_row_per_method(folder: Path):
    options = {"more_than": 19, "lams": [1e-3, 1e-2], "ridges": [1e-2, 1e-1], "fed_ridges": [1e-2], "folds": 3}
    rows = list(election(Replication({"standardize": "pooled", "intercept": True}, options, 0, 11, folder)))
    assert [row["method"] for row in rows] == list(METHODS)
    by_name = {row["method"]: row for row in rows}
    # the labels follow the first column: every model beats both floors
    floor = max(by_name[name]["accuracy"] for name in ("always-republican", "state-majority"))
    assert all(
        by_name[name]["accuracy"] > floor
        for name in ("local", "global", "state-intercepts", "fed-loc", "fed-his", "kin")
    )
    assert by_name["fed-loc"]["states"] == ["CA", "SD"] and len(by_name["fed-loc"]["group"]) == 2
    assert by_name["fed-his"]["kept_edges"] == 0  # one blue and one red state


# --- what is said about it ------------------------------------------------------------------------------------


def _rows(fed: float, groups: list[list[int]], states: Sequence[str] = "ABC") -> list[dict[str, object]]:
    rng, more = np.random.default_rng(0), np.random.default_rng(1)
    out = []
    accuracy = {"always-republican": 0.858, "state-majority": 0.861, "local": 0.934, "global": 0.936, "boosting": 0.948}
    accuracy.update({"fed-loc": fed, "fed-his": fed})
    for replication, group in enumerate(groups):
        noise = 0.002 * rng.normal()
        for name, value in {**accuracy, "state-intercepts": 0.946, "kin": 0.95}.items():
            graph = name.startswith("fed")
            own = (more if name in ("state-intercepts", "kin") else rng).normal()
            out.append(
                {
                    "standardize": "pooled",
                    "replication": replication,
                    "method": name,
                    "accuracy": value + noise + 0.0005 * own,
                    "balanced_accuracy": 0.8,
                    "log_loss": 1.1 - value - noise + 0.0005 * more.normal(),
                    "kept_edges": 2 if graph else None,
                    "lam": 1e-4 if graph else None,
                    "ridge": 1e-3,
                    "states": list(states),
                    "group": group if graph or name == "kin" else None,
                    "resolved": 1.0 if name == "kin" else None,
                    "distance": [0.1, 0.2, 0.3, 0.4][: len(states)] if name == "kin" else None,
                    "common_share": [1.0, 0.5, 0.75, 0.5][: len(states)] if graph else None,
                }
            )
    return out


def test_groups_are_what_most_splits_say():
    found = groups(_rows(0.94, [[0, 0, 1], [0, 0, 1], [0, 1, 1], [0, 0, 1]]))
    assert found.labels.tolist() == [0, 0, 1]
    assert found.together[0, 1] == 0.75 and found.together[0, 2] == 0.0 and found.together[1, 2] == 0.25
    # A: B is with it in 3 of 4 splits, C apart in all: (3/4 + 1) / 2
    np.testing.assert_allclose(found.stability, [0.875, 0.75, 0.875])


def test_claims_hold_and_fail():
    def holds(rows: list[dict[str, object]]) -> dict[str, bool | None]:
        return {check.claim: check.holds for check in election_page.checks(rows)}

    good, bad = holds(_rows(0.944, [[0, 0, 1]] * 10)), holds(_rows(0.934, [[0, 0, 0]] * 10))
    best = 'Section 6: "FedADMM with D_loc performs best" of the four of Table 1, by more than two standard errors'
    two = "Supplement, map: D_loc has two main groups of states"
    alone = "Supplement, map: some states are connected to no other"
    assert not bad[best] and not bad[two] and not good[two]
    assert holds(_rows(0.944, [[0, 0, 1, 1]] * 10, "ABCD"))[two]
    assert good[alone] and not bad[alone]
    par = next(one for one in good if "on par with local" in one)
    assert not good[par] and bad[par]
    assert not any(found for claim, found in good.items() if claim.startswith("Table 1"))
    near = [{**row, "accuracy": row["accuracy"] - 0.2} for row in _rows(0.944, [[0, 0, 1]] * 10)]
    assert [found for claim, found in holds(near).items() if claim.startswith("Table 1")] == [True, False, False, True]


def test_one_model_with_state_intercepts_against_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    # with one ridge for all slopes and intercepts, and almost none for the common intercept
    protocol = replace(PROTOCOL, ridges=(1e-2,), state_ridges=(1e-2,), intercept_ridge=1e-9)
    split = Split(_made_up(), protocol, seed=4)
    wide = [np.column_stack([rows.X[:, 1:], np.eye(5)[rows.site_index]]) for rows in (split.train, split.test)]
    model = LogisticRegression(C=1 / (1e-2 * len(wide[0])), tol=1e-10, max_iter=1000).fit(wide[0], split.train.y)
    found = state_intercepts(split)
    np.testing.assert_allclose(found[0], model.predict_proba(wide[1])[:, 1], atol=1e-4)
    without = replace(split, protocol=replace(protocol, intercept=False))
    np.testing.assert_allclose(state_intercepts(without)[0], found[0], atol=1e-9)


def test_maps_are_drawn(tmp_path: Path):
    rows = [{**row, "states": ["CA", "SD"]} for row in _rows(0.944, [[0, 1]] * 3)]
    for row in rows:
        for name in ("common_share", "distance"):
            row[name] = row[name][:2] if row[name] else None
    for kind, note in (("state_map", "in 0 of 3 splits the test keeps all 1 edges"), ("kin_map", "resolved in 3 of 3")):
        draw({"name": kind, "kind": "module:function", "where": {}}, rows, tmp_path, getattr(election_page, kind))
        assert (tmp_path / f"{kind}.svg").stat().st_size > 0
        assert note in groups(rows, "kin" if kind == "kin_map" else "fed-loc").note


@pytest.mark.realdata
def test_the_real_files(real_data: Path):
    folder = real_data / "election"
    check_election(folder)
    found = load_election(folder)
    federation = found.federation
    assert (federation.n_sites, len(federation.X), federation.n_features) == (30, 2710, 51)
    assert federation["SD"].n_samples == 66  # 65 without the recoding
    assert round(float(federation.y.mean()), 3) == 0.143
    assert federation["OK"].y.sum() == federation["WV"].y.sum() == 0
    with (folder / "state_lean.csv").open(newline="") as handle:
        expected = {row["state"]: row["lean_2000_2012"] for row in csv.DictReader(handle)}
    assert found.lean == expected
