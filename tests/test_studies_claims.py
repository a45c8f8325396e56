"""Studies: claims hold and fail when they should; rivals of kin do what they are said to do."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedkin import find_kin, local_fit
from fedkin.datasets import paper_design
from fedkin.errors import ParameterError
from fedkin.studies import Replication, claims, load_study, run_study, write_study_report
from fedkin.studies.claims import Check
from fedkin.studies.config import task_function
from fedkin.studies.kin import checks, judged
from fedkin.studies.replications import paired_ratios


def _paper_rows(fed: float, es: float, growth: float = -0.5, **changed: float) -> list[dict[str, object]]:
    """Rows of section 5 by estimator: ``fed`` is Fed-ADMM over Local; errors (not Local, Global) grow as |V|^growth.

    Local-ES has a slope ``local_es_slope`` in ϱ.
    """
    rng = np.random.default_rng(0)
    local = changed.get("local", 20 / 79)
    errors = {"local": local, "global": 3.5, "fedadmm": fed * local, "fedadmm-printed": 1.01 * fed * local}
    errors |= {"es": es, "es-printed": es, "oracle": 0.05, "attainable": 0.05, "pooled": 0.05, "fedadmm-scaled": 4.0}
    rows: list[dict[str, object]] = []
    for varrho in (0.1, 0.2, 0.3):
        for n_sites in (20, 40):
            for r in range(20):
                point = {"varrho": varrho, "n_samples": 100, "n_sites": n_sites, "replication": r}
                noise = 1 + 0.002 * rng.normal()
                for name, error in errors.items():
                    size = 1.0 if name in ("local", "global") else (n_sites / 20) ** growth
                    own = 1 + 0.001 * rng.normal()
                    wrong = (varrho / 0.1) ** 0.3 if name.startswith("fedadmm") else 1.0
                    rows.append({**point, "estimator": name, "error": error * size * noise * own * wrong})
                slope = changed.get("local_es_slope", 0.0) * varrho
                rows.append({**point, "estimator": "local-es", "error": 1.02 * es + slope + 0.0001 * rng.normal()})
    return rows


def _holds(found: list[Check], words: str) -> list[bool | None]:
    picked = [check for check in found if words in check.claim]
    assert picked, words
    assert all(check.reason for check in picked if check.holds is False and "worse than Local" in check.claim)
    return [check.holds for check in picked]


def test_estimation_claims_hold_and_fail():
    good = claims.estimation(_paper_rows(0.5, 0.05))
    for words in (
        "not depend on |V|",
        "Oracle is decreasing",
        "smaller errors than Local",
        "non-vanishing",
        "outperforms",
    ):
        assert set(_holds(good, words)) == {True}, words
    assert _holds(good, "does not decrease as |V|") == _holds(good, "is worse than Local") == [False, False]
    assert set(_holds(good, "Ours: ")) == set(_holds(good, "indistinguishable")) == {True}
    assert (
        "with one such factor too many, the ratio is up to 21.9"
        in next(c for c in good if "is worse than" in c.claim).reason
    )
    # what the paper saw
    theirs = claims.estimation(_paper_rows(1.2, 0.06, growth=0.0, local=0.3))
    assert _holds(theirs, "does not decrease as |V|") == _holds(theirs, "is worse than Local") == [True, True]
    assert not any(_holds(theirs, "smaller errors than Local") + _holds(theirs, "Ours: "))
    assert _holds(theirs, "Oracle is decreasing") == _holds(theirs, "indistinguishable") == [False]


def test_sensitivity_claims_hold_and_fail():
    good = claims.sensitivity(_paper_rows(0.5, 0.05))
    assert _holds(good, "exceeds Local from") == [False, False] and _holds(good, "increases with ϱ") == [True, True]
    for words in ("more robust", "better than Local even", "does not depend on ϱ"):
        assert set(_holds(good, words)) == {True}, words
    assert _holds(good, "where ϱ is small") == [True] and _holds(good, "otherwise") == [False]
    bad = claims.sensitivity(_paper_rows(1.2, 0.5, local_es_slope=0.05))
    assert _holds(bad, "exceeds Local from") == [True, True]
    assert not any(_holds(bad, "more robust") + _holds(bad, "better than Local even") + _holds(bad, "not depend on ϱ"))


def test_convergence_claims_hold_and_fail():
    def rows(printed: float) -> list[dict[str, object]]:
        rng = np.random.default_rng(0)
        distance = {"gd": 1.0, "sgd": 1.0, "fedadmm-full": 0.1, "fedadmm-batch": 0.5}
        distance |= dict.fromkeys(("printed-full", "printed-batch", "unprojected-batch"), printed)
        return [
            {"n_samples": 50, "n_sites": 40, "round": round_, "replication": r, "method": name, "diverged": 1.0}
            | {"distance": value * (1 + 0.01 * rng.normal()) * (20 if round_ == 1 and name != "gd" else 1)}
            for name, value in distance.items()
            for round_ in (1, 10, 100)
            for r in range(5)
        ]

    found = claims.convergence(rows(3.0))
    assert _holds(found, '"Our steps, all samples"') == [False, True]
    assert _holds(found, '"Our steps, batches of 10"') == [True, True]
    assert not any(_holds(found, '"Algorithm 1 as printed'))
    assert all(_holds(claims.convergence(rows(0.5)), '"Algorithm 1 as printed, batches'))
    assert "n = 50: 5 of 5" in next(check.observed for check in found if "diverge without" in check.claim)


def test_rate_claims_hold_and_fail():
    def rows(power: float) -> list[dict[str, object]]:
        rng = np.random.default_rng(0)
        falling = {"varied": "n", "n_sites": 40, "n_clusters": 5, "false_edges": 20}
        growing = {"varied": "|S|", "n_sites": 40, "n_clusters": 5, "n_samples": 100}
        out: list[dict[str, object]] = []
        for x in (50, 100, 200):
            for _ in range(10):
                noise = 1 + 0.02 * rng.normal()
                out.append({**falling, "n_samples": x, "rate": 1 / x, "error": x**-power * noise})
                out.append({**growing, "false_edges": x, "rate": 1.0 * x, "error": x**power * noise})
        return out

    assert [check.holds for check in claims.rate(rows(1.0))] == [True, True]
    assert [check.holds for check in claims.rate(rows(1.5))] == [True, False]  # falling faster is no harm
    assert [check.holds for check in claims.rate(rows(0.5))] == [False, True]


def test_availability_claims_hold_and_fail():
    def rows(estimated: float, replicas: float) -> list[dict[str, object]]:
        rng = np.random.default_rng(0)
        out = []
        for p in (0.5, 1.0):
            for r in range(10):
                known = (1 + 0.1 * rng.normal()) / p
                for weighting, factor in (("known", 1.0), ("estimated", estimated)):
                    for placement, shift in (("central", 0.0), ("replicas", replicas)):
                        distance = known * factor + shift
                        out.append(
                            {
                                "availability": p,
                                "replication": r,
                                "variant": f"{weighting}-{placement}",
                                "weighting": weighting,
                                "placement": placement,
                                "distance": distance,
                            }
                        )
        return out

    assert [check.holds for check in claims.availability(rows(1.01, 0.0))] == [True, True, True]
    assert [check.holds for check in claims.availability(rows(1.5, 1e-12))] == [False, False, True]


# --- with few replications ------------------------------------------------------------------------------------


def test_noise_of_few_replications_is_no_refutation():
    def rows(ratio: float, noise: float, n: int) -> list[dict[str, object]]:
        # errors of es scatter around the ratio; everything else is exact
        rng = np.random.default_rng(1)
        scatter = rng.normal(size=n)
        scatter = noise * (scatter - scatter.mean()) / scatter.std(ddof=1)
        point = {"varrho": 0.2, "n_samples": 100, "n_sites": 20}
        exact = {"local": 20 / 79 * 1.001, "oracle": 0.05, "attainable": 0.06, "pooled": 0.05}
        out = [{**point, "replication": r, "estimator": "es", "error": 0.05 * (ratio + scatter[r])} for r in range(n)]
        return out + [
            {**point, "replication": r, "estimator": name, "error": value}
            for name, value in exact.items()
            for r in range(n)
        ]

    def oracle(*arguments: float) -> Check:
        found = claims.estimation(rows(*arguments))  # type: ignore[arg-type]
        return next(check for check in found if "indistinguishable" in check.claim)

    close = oracle(1.07, 0.06, 4)
    assert close.holds is False and close.reason  # the claim's own criterion does not change
    # Student's, with three degrees of freedom: 3.18 * 0.06 / 2
    left_open = close.from_few_replications()
    assert left_open.verdict == "too few replications to tell (1.070 ± 0.095)" and not left_open.reason
    assert oracle(1.3, 0.06, 4).from_few_replications().verdict == "does not hold"
    lucky = oracle(1.02, 0.06, 4)
    assert lucky.holds is True and lucky.from_few_replications().verdict.startswith("too few replications to tell")


def test_ratios_are_paired_and_cover():
    """Two series with common noise: intervals of their ratio hold as often as they say (and would not unpaired)."""
    rng = np.random.default_rng(5)
    hits, widths = 0, []
    for _ in range(400):
        common = rng.normal(loc=1.0, scale=0.2, size=6)
        own = common * (1.2 + 0.02 * rng.normal(size=6))
        rows = [{"replication": r, "m": m, "x": v[r]} for r in range(6) for m, v in (("a", own), ("b", common))]
        interval = paired_ratios(rows, [], "m", ("a", "b"), "x")[()].interval()
        hits += interval.low <= 1.2 <= interval.high
        widths.append(interval.high - interval.low)
    assert 0.92 <= hits / 400 <= 0.98
    assert np.median(widths) < 0.06  # unpaired: about 0.5


@pytest.fixture
def rivals(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of rivals next to their study."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks/rivals"))
    return import_module("rivals")


GROUPS = paper_design(n_sites=12, n_samples=30, n_features=3, n_clusters=3, signal=4.0, seed=0)


def _same(labels: np.ndarray) -> list[list[bool]]:
    return (labels[:, None] == labels).tolist()


def test_pooled_sums_are_local_fits_and_the_oracle(rivals: ModuleType):
    sums = rivals.least_squares(GROUPS.federation)
    local = local_fit(GROUPS.federation).theta
    np.testing.assert_allclose(rivals.pooled_fits(sums, np.arange(12)), local, rtol=1e-9)
    rows = [GROUPS.federation[u] for u in range(4)]
    X, y = np.concatenate([one.X for one in rows]), np.concatenate([one.y for one in rows])
    np.testing.assert_allclose(rivals.pooled_fits(sums, GROUPS.labels)[0], np.linalg.lstsq(X, y)[0], rtol=1e-9)


@pytest.mark.parametrize("graph", [None, GROUPS.graph])
def test_greedy_clustering_finds_groups_that_are_far_apart(graph, rivals: ModuleType):
    found = rivals.greedy_groups(rivals.least_squares(GROUPS.federation), graph)
    assert _same(found) == _same(GROUPS.labels)


def test_the_mixed_model_is_that_of_find_kin(rivals: ModuleType):
    # without groups find_kin is the mixed model, where it is plain that sites differ (else it is averaged with Global)
    design = paper_design(n_sites=3, n_samples=100, n_features=2, n_clusters=3, signal=8, seed=0)
    kin = find_kin(design.federation)
    assert kin.weight_mixed == 1.0
    # it averages over the variances, which three sites leave uncertain
    sd = np.sqrt(np.einsum("upp->up", kin.covariance))
    assert (np.abs(rivals.mixed_model(rivals.least_squares(design.federation)) - kin.theta) < 1e-3 * sd).all()


def test_the_limit_where_groups_are_certain_is_a_ridge_per_group(rivals: ModuleType):
    sums = rivals.least_squares(GROUPS.federation)
    variance = 4.0**2 * 3**-0.5
    found = rivals.posterior_means(GROUPS, sums, 0, variance=variance, noise=1.0, rates=(0.9, 0.1), sweeps=20, burn=5)
    mine = GROUPS.labels == 1
    ridge = np.linalg.solve(sums.G[mine].sum(axis=0) + np.eye(3) / variance, sums.c[mine].sum(axis=0))
    np.testing.assert_allclose(found[mine], np.tile(ridge, (4, 1)), rtol=1e-9)


def test_the_limit_is_the_posterior_mean(rivals: ModuleType):
    # two sites, one parameter: the four groupings can be counted out
    design = paper_design(n_sites=2, n_samples=4, n_features=1, n_clusters=2, signal=1.0, seed=2)
    sums = rivals.least_squares(design.federation)
    G, c, edge = sums.G[:, 0, 0], sums.c[:, 0], design.graph.n_edges == 1
    means, weights = [], []
    for together in (True, False):
        g, b = (np.array([G.sum()] * 2), np.array([c.sum()] * 2)) if together else (G, c)
        rate = 0.8 if together else 0.3
        each = 0.5 * b**2 / (g + 1) - 0.5 * np.log(g + 1)
        weights.append(np.exp(each.sum() / (2 if together else 1)) * (rate if edge else 1 - rate))
        means.append(b / (g + 1))
    exact = (weights[0] * means[0] + weights[1] * means[1]) / sum(weights)
    found = rivals.posterior_means(design, sums, 0, variance=1.0, noise=1.0, rates=(0.8, 0.3), sweeps=4000, burn=100)
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
    errors = {"pooled": 1.0, "local": 20.0, "es": 1.5, "rivals:limit": 0.9, "kin": kin}
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


def test_the_limit_of_another_design_is_not_known(rivals: ModuleType):
    one = Replication({"estimator": "rivals:limit", "truth": "none"}, {"generator": "differing"}, 0, 1)
    with pytest.raises(ParameterError, match='the limit is known for generator = "paper" alone'):
        list(task_function("kin")(one))


@pytest.mark.parametrize("truth", ["groups", "none", "continuous"])
@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_sites_differ_as_said(truth: str, loss: str):
    options = {"generator": "differing", "design": {"n_sites": 9, "n_features": 2, "n_samples": 40}}
    (row,) = task_function("kin")(Replication({"truth": truth, "loss": loss}, options, 0, 7))
    assert sum(row["true"]) == {"groups": 9, "none": 36, "continuous": 0}[truth]
    assert 0.3 < row["coverage"] <= 1


@pytest.mark.studies
@pytest.mark.parametrize("name", ["kin", "benchmarks/rivals/kin.toml"])
def test_a_small_kin_study_from_rows_to_page(tmp_path: Path, repository: Path, name: str):
    study = load_study("kin" if name == "kin" else repository / name, quick=True)
    design = {"n_sites": 12, "n_samples": 20, "n_features": 3, "n_clusters": 2}
    points = tuple(one for one in study.points if one["varrho"] == 0.1 and one["signal"] == 0.6)
    study = replace(study, points=points, options={**study.options, "design": design})
    run = run_study(study, tmp_path, jobs=1)
    assert len(run.rows) == (6 if name == "kin" else 10) * 2
    by_design = {row["replication"]: row["oracle_error"] for row in run.rows}
    assert len(set(by_design.values())) == 2
    assert all(row["oracle_error"] == by_design[row["replication"]] for row in run.rows)
    assert all(row["error"] == row["oracle_error"] for row in run.rows if row["estimator"] == "pooled")
    report = write_study_report(study, run.folder)
    assert len(report.checks) == (5 if name == "kin" else 6)
    tables, figures = [table.name for table in report.tables], {path.stem for path in run.folder.glob("*.svg")}
    assert (tables, figures) == (
        (["kin", "groups"], {"kin", "reliability", "coverage"}) if name == "kin" else (["kin"], {"kin"})
    )


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

    assert [one.holds for one in claims.error_rates(rows(1.0))] == [True]
    assert [one.holds for one in claims.error_rates(rows(2.0))] == [False]


def test_sparse_claims_hold_and_fail():
    def rows(error: float, found: float) -> list[dict[str, object]]:
        errors = {"local-lasso": 3.0, "fused": 1.0, "told-levels": 0.5, "sparse-fused": error}
        point = {"n_features": 60, "n_samples": 20, "found": found, "false": 1 - found}
        return [
            {**point, "estimator": name, "replication": r, "error": value * (1 + 0.01 * r)}
            for name, value in errors.items()
            for r in range(3)
        ]

    assert [one.holds for one in claims.sparse(rows(0.52, 0.97))] == [True] * 5
    assert [one.holds for one in claims.sparse(rows(4.0, 0.4))] == [False] * 5
