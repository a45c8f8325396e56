"""Studies: the claims that are checked on the rows hold, and fail when they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedkin.studies import claims as checks
from fedkin.studies import load_study, write_report, write_rows
from fedkin.studies.summary import Check, paired_ratios


def _estimation_rows(es: float, local: float = 20 / 79) -> list[dict[str, object]]:
    point = {"varrho": 0.1, "n_samples": 100, "n_sites": 20}
    errors = {"local": local, "oracle": 0.05, "es": es, "attainable": 0.05, "pooled": 0.05}
    return [
        {**point, "replication": r, "estimator": name, "error": error * (1 + 0.01 * r)}
        for name, error in errors.items()
        for r in (-1, 0, 1)
    ]


def test_estimation_claims_hold_and_fail():
    assert [check.holds for check in checks.estimation(_estimation_rows(0.052))] == [True, True, True]
    assert [check.holds for check in checks.estimation(_estimation_rows(0.06))] == [False, False, True]
    assert [check.holds for check in checks.estimation(_estimation_rows(0.05, local=0.3))] == [True, True, False]


def _sensitivity_rows(slope: float, es: float) -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    errors = {"local": 0.7, "es": es, "local-es": 0.1}
    return [
        {
            "n_samples": 50,
            "n_sites": 40,
            "varrho": varrho,
            "replication": r,
            "estimator": name,
            "error": error + (slope * varrho if name == "local-es" else 0) + 0.01 * rng.normal(),
        }
        for varrho in (0.0, 0.3, 0.6, 0.9)
        for name, error in errors.items()
        for r in range(20)
    ]


def test_sensitivity_claims_hold_and_fail():
    assert [check.holds for check in checks.sensitivity(_sensitivity_rows(0.0, 0.2))] == [True, True]
    assert [check.holds for check in checks.sensitivity(_sensitivity_rows(0.05, 0.8))] == [False, False]


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

    assert [check.holds for check in checks.rate(rows(1.0))] == [True, True]
    assert [check.holds for check in checks.rate(rows(1.5))] == [True, False]  # falling faster is no harm
    assert [check.holds for check in checks.rate(rows(0.5))] == [False, True]


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

    assert [check.holds for check in checks.availability(rows(1.01, 0.0))] == [True, True, True]
    assert [check.holds for check in checks.availability(rows(1.5, 1e-12))] == [False, False, True]


# --- with few replications ------------------------------------------------------------------------------------


def _verdicts(found: list[Check]) -> list[str]:
    return [check.from_few_replications().verdict for check in found]


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

    close = checks.estimation(rows(1.07, 0.06, 4))
    assert [check.holds for check in close] == [False, True, True]  # the claim's own criterion does not change
    # Student's, with three degrees of freedom: 3.18 * 0.06 / 2
    assert _verdicts(close)[0] == "too few replications to tell (1.070 ± 0.095)"
    far = checks.estimation(rows(1.3, 0.06, 4))
    assert _verdicts(far)[0] == "does not hold"
    good = checks.estimation(rows(0.9, 0.06, 4))
    assert _verdicts(good) == ["holds", "holds", "holds"]
    lucky = checks.estimation(rows(1.02, 0.06, 4))
    assert lucky[0].holds is True and _verdicts(lucky)[0].startswith("too few replications to tell (1.020 ± ")
    single = checks.estimation([row for row in rows(1.0, 0.0, 4) if row["replication"] == 0])
    assert _verdicts(single)[0] == "too few replications to tell (1.000, without an interval)"




def test_slopes_of_few_replications():
    rows = _sensitivity_rows(0.05, 0.2)
    found = checks.sensitivity(rows)
    assert [check.holds for check in found] == [True, False] and _verdicts(found) == ["holds", "does not hold"]
    few = checks.sensitivity([row for row in rows if row["replication"] < 3])
    assert few[1].holds is False and _verdicts(few)[1].startswith("too few replications to tell (+")



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


@pytest.mark.studies
@pytest.mark.parametrize(("n", "verdict"), [(4, "too few replications to tell (-6."), (100, "does not hold")])
def test_the_page_says_how_verdicts_come_about(tmp_path, n: int, verdict: str):
    """The same deviation of Local: noise with the replications of a quick run, a verdict with those of the full one."""
    rng = np.random.default_rng(2)
    scatter = rng.normal(size=n)
    scatter = 0.2 * (scatter - scatter.mean()) / scatter.std(ddof=1)
    # two settings at least for a table; Local is 6% off, by little over one standard error with four replications
    rows = [
        {
            "study": "estimation",
            "varrho": varrho,
            "n_samples": 100,
            "n_sites": sites,
            "replication": r,
            "seed": r,
            "estimator": name,
            "error": 20 / 79 * (0.94 + scatter[r]) if name == "local" else 0.05,
        }
        for varrho in (0.1, 0.2)
        for sites in (20, 60)
        for name in ("local", "global", "oracle", "fedadmm", "es", "local-es", "pooled", "attainable")
        for r in range(n)
    ]
    write_rows(tmp_path / "rows.parquet", rows)
    study = load_study("estimation", quick=n < 100)
    if n == 100:
        study = replace(study, figures=())  # drawn once is enough
    report = write_report(study, tmp_path)
    (local,) = [check for check in report.checks if check.claim.startswith("Local")]
    assert local.verdict.startswith(verdict) and "the largest deviation is -6.0%" in local.observed
    page = report.page.read_text()
    assert (f"With {n} of the 100 replications of the full study" in page) == (n < 100)
    assert ("The rows have all 100 replications of the study" in page) == (n == 100)
