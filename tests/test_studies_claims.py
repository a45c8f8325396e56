"""Studies: the claims that are checked on the rows hold, and fail when they should."""

from __future__ import annotations

import numpy as np

from fedkin.studies import checks


def _estimation_rows(es: float, local: float = 20 / 79) -> list[dict[str, object]]:
    point = {"varrho": 0.1, "n_samples": 100, "n_devices": 20}
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
            "n_devices": 40,
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
        falling = {"varied": "n", "n_devices": 40, "n_clusters": 5, "false_edges": 20}
        growing = {"varied": "|S|", "n_devices": 40, "n_clusters": 5, "n_samples": 100}
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
