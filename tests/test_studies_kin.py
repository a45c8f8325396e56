"""The kin studies: rivals that do what they are said to do, rows that tell the truth, claims that can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkin import find_kin, local_fit
from fedkin.datasets import paper_design
from fedkin.errors import ParameterError
from fedkin.studies import Replication, load_study, run_study, write_report
from fedkin.studies import kin as peers
from fedkin.studies.claims import error_rates as error_rate_claims
from fedkin.studies.config import task_function
from fedkin.studies.kin import checks, judged, ratio_table

GROUPS = paper_design(n_sites=12, n_samples=30, n_features=3, n_clusters=3, signal=4.0, seed=0)


def _same(labels: np.ndarray) -> list[list[bool]]:
    return (labels[:, None] == labels).tolist()


def test_pooled_sums_are_local_fits_and_the_oracle():
    sums = peers.least_squares(GROUPS.federation)
    local = local_fit(GROUPS.federation).theta
    np.testing.assert_allclose(peers.pooled(sums, np.arange(12)), local, rtol=1e-9)
    rows = [GROUPS.federation[u] for u in range(4)]
    X, y = np.concatenate([one.X for one in rows]), np.concatenate([one.y for one in rows])
    np.testing.assert_allclose(peers.pooled(sums, GROUPS.labels)[0], np.linalg.lstsq(X, y)[0], rtol=1e-9)


@pytest.mark.parametrize("graph", [None, GROUPS.graph])
def test_greedy_clustering_finds_groups_that_are_far_apart(graph):
    found = peers.clustering(peers.least_squares(GROUPS.federation), graph)
    assert _same(found) == _same(GROUPS.labels)



def test_a_graph_helps_clustering_and_an_inverted_one_as_much():
    for varrho in (0.05, 0.95):
        design = paper_design(n_sites=30, n_samples=20, n_features=4, n_clusters=3, varrho=varrho, signal=0.5, seed=0)
        sums = peers.least_squares(design.federation)
        assert _same(peers.clustering(sums)) != _same(design.labels)
        assert _same(peers.clustering(sums, design.graph)) == _same(design.labels)


def test_ifca_with_the_true_number_of_groups():
    sums = peers.least_squares(GROUPS.federation)
    assert _same(peers.ifca(sums, 3, seed=0)) == _same(GROUPS.labels)
    assert len(np.unique(peers.ifca(sums, 12, seed=0))) <= 12


def test_the_mixed_model_is_that_of_find_kin():
    # without groups find_kin is the mixed model, where it is plain that sites differ (else it is averaged with Global)
    design = paper_design(n_sites=3, n_samples=100, n_features=2, n_clusters=3, signal=8, seed=0)
    kin = find_kin(design.federation)
    assert kin.weight_mixed == 1.0
    np.testing.assert_allclose(peers.mixed(peers.least_squares(design.federation)), kin.theta, rtol=1e-6)


def test_the_limit_where_groups_are_certain_is_a_ridge_per_group():
    sums = peers.least_squares(GROUPS.federation)
    variance = 4.0**2 * 3**-0.5
    truth = peers.Truth(n_groups=3, variance=variance, noise=1.0, inside=0.9, between=0.1)
    found = peers.limit(GROUPS, sums, truth, seed=0, sweeps=20, burn=5)
    mine = GROUPS.labels == 1
    ridge = np.linalg.solve(sums.G[mine].sum(axis=0) + np.eye(3) / variance, sums.c[mine].sum(axis=0))
    np.testing.assert_allclose(found[mine], np.tile(ridge, (4, 1)), rtol=1e-9)


def test_the_limit_is_the_posterior_mean():
    # two sites, one parameter: the four groupings can be counted out
    design = paper_design(n_sites=2, n_samples=4, n_features=1, n_clusters=2, signal=1.0, seed=2)
    sums = peers.least_squares(design.federation)
    truth = peers.Truth(n_groups=2, variance=1.0, noise=1.0, inside=0.8, between=0.3)
    G, c, edge = sums.G[:, 0, 0], sums.c[:, 0], design.graph.n_edges == 1
    means, weights = [], []
    for together in (True, False):
        g, b = (np.array([G.sum()] * 2), np.array([c.sum()] * 2)) if together else (G, c)
        rate = truth.inside if together else truth.between
        each = 0.5 * b**2 / (g + 1) - 0.5 * np.log(g + 1)
        weights.append(np.exp(each.sum() / (2 if together else 1)) * (rate if edge else 1 - rate))
        means.append(b / (g + 1))
    exact = (weights[0] * means[0] + weights[1] * means[1]) / sum(weights)
    found = peers.limit(design, sums, truth, seed=0, sweeps=4000, burn=100)
    np.testing.assert_allclose(found[:, 0], exact, atol=0.02)
    assert np.abs(means[0] - means[1]).max() > 0.2  # else it would say nothing


def test_what_kin_says_of_itself_is_judged_by_the_truth():
    kin = find_kin(GROUPS.federation, GROUPS.graph)
    found = judged(GROUPS, kin)
    pairs = 12 * 11 / 2
    assert (sum(found["pairs"]), sum(found["true"])) == (pairs, 3 * 6)
    assert sum(found["stated"]) == pytest.approx(np.tril(kin.probability, -1).sum())
    assert (found["exact"], found["purity"], found["resolved"], found["shown_groups"]) == (1.0, 1.0, 1.0, 3)
    assert 0.8 < found["coverage"] <= 1
    wrong = replace(GROUPS, labels=np.arange(12), theta_star=GROUPS.theta_star + 100)
    found = judged(wrong, kin)
    assert (found["exact"], found["purity"], found["coverage"], found["coverage_site"]) == (0.0, 0.0, 0.0, 0.0)


def _rows(kin: float, truth: float, coverage: float, purity: float = 1.0) -> list[dict[str, object]]:
    """Rows of five estimators; pairs that are stated kin with probability 0.7 are so in the share ``truth``."""
    rng = np.random.default_rng(0)
    errors = {"pooled": 1.0, "local": 20.0, "es": 1.5, "limit": 0.9, "kin": kin}
    rows: list[dict[str, object]] = []
    for r in range(20):
        for name, error in errors.items():
            row = {"varrho": 0.1, "signal": 0.2, "estimator": name, "replication": r, "target": 1.2}
            noise = 0.01 * rng.normal()
            row |= {"error": error * (1 + noise), "coverage": coverage + noise / 10, "resolved": 1.0, "purity": purity}
            rows.append(row | {"pairs": [0.0, 10.0], "stated": [0.0, 7.0], "true": [0.0, 10 * truth + noise]})
    return rows


def test_claims_hold_and_fail():
    assert [one.holds for one in checks(_rows(1.2, 0.7, 0.95))] == [True, True, None, True, True, True]
    assert [one.holds for one in checks(_rows(1.3, 0.7, 0.95))] == [False, True, None, True, True, True]
    assert [one.holds for one in checks(_rows(1.6, 0.6, 0.9, 0.5))] == [False, False, None, False, False, False]


def test_the_table_shows_ratios_to_the_oracle():
    table = ratio_table({"name": "kin"}, _rows(1.2, 0.7, 0.95))
    assert table.head == ["ϱ", "s", "Local", "Fed-ADMM-ES", "Information limit", "kin", "kin's target"]
    assert [line[0] for line in table.text] == ["0.1"] and table.text[0][-1] == "1.20"
    assert {line[2]: round(line[3], 1) for line in table.exact} == {"local": 20.1, "es": 1.5, "limit": 0.9, "kin": 1.2}


def test_the_limit_of_another_design_is_not_known():
    one = Replication({"estimator": "limit", "truth": "none"}, {"generator": "differing"}, 0, 1)
    with pytest.raises(ParameterError, match='the limit is known for generator = "paper" alone'):
        list(task_function("kin")(one))


@pytest.mark.parametrize("truth", ["groups", "none", "continuous"])
@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_sites_differ_as_said(truth: str, loss: str):
    options = {"generator": "differing", "design": {"n_sites": 9, "n_features": 2, "n_samples": 40}}
    (row,) = task_function("kin")(Replication({"truth": truth, "loss": loss}, options, 0, 7))
    assert sum(row["true"]) == {"groups": 9, "none": 36, "continuous": 0}[truth]
    assert 0.3 < row["coverage"] <= 1


def test_an_unknown_way_to_differ_is_refused():
    with pytest.raises(ParameterError, match='truth must be "groups", "none" or "continuous", got \'all\''):
        list(task_function("kin")(Replication({"truth": "all"}, {"generator": "differing"}, 0, 7)))


@pytest.mark.studies
def test_a_small_kin_study_from_rows_to_page(tmp_path: Path):
    study = load_study("kin", quick=True)
    design = {"n_sites": 12, "n_samples": 20, "n_features": 3, "n_clusters": 2}
    points = tuple(one for one in study.points if one["varrho"] == 0.1 and one["signal"] == 0.6)
    study = replace(study, points=points, options={**study.options, "design": design})
    run = run_study(study, tmp_path, jobs=1)
    assert len(run.rows) == 10 * 2
    by_design = {row["replication"]: row["oracle_error"] for row in run.rows}
    assert len(set(by_design.values())) == 2
    assert all(row["oracle_error"] == by_design[row["replication"]] for row in run.rows)
    assert all(row["error"] == row["oracle_error"] for row in run.rows if row["estimator"] == "pooled")
    report = write_report(study, run.folder)
    assert [table.name for table in report.tables] == ["kin", "groups"] and len(report.checks) == 6
    assert {path.name for path in run.folder.glob("*.svg")} == {"kin.svg", "reliability.svg", "coverage.svg"}


def test_corrections_count_the_error_that_they_bound():
    options = {"design": {"n_sites": 12, "n_samples": 8, "n_features": 5, "varrho": 0.0}, "levels": [0.4, 0.9]}
    alike = [list(task_function("error-rates")(Replication({"n_clusters": 1}, options, 0, seed))) for seed in range(20)]
    for row in (row for rows in alike for row in rows):
        # every edge is true: whatever is dropped is wrong, and the two errors are the same
        assert row["observed"] == row["any_true_dropped"] == row["share_of_true_among_dropped"]
        assert row["power"] is None
    dropped = {(row["method"], row["level"]): 0.0 for row in alike[0]}
    for row in (row for rows in alike for row in rows):
        dropped[row["method"], row["level"]] += row["observed"]
    assert dropped["by", 0.9] < dropped["bonferroni", 0.9] <= dropped["holm", 0.9] <= dropped["bh", 0.9]
    (row,) = (
        row
        for row in task_function("error-rates")(Replication({"n_clusters": 4}, {**options, "levels": [0.9]}, 0, 1))
        if row["method"] == "bh"
    )
    assert 0 < row["observed"] == row["share_of_true_among_dropped"] < 1 and 0 < row["power"] <= 1


def test_error_rate_claims_hold_and_fail():
    def rows(share: float) -> list[dict[str, object]]:
        point = {"n_clusters": 1, "n_samples": 50, "method": "bh"}
        return [
            {**point, "level": level, "replication": r, "observed": float(r < 100 * share * level)}
            for level in (0.1, 0.4)
            for r in range(100)
        ]

    assert [one.holds for one in error_rate_claims(rows(1.0))] == [True]
    assert [one.holds for one in error_rate_claims(rows(2.0))] == [False]
