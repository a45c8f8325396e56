"""The report of a model: the data of its page and its size, places of sites, and the model card."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedkin
from fedkin import Federation, Graph
from fedkin.cli import main
from fedkin.datasets import paper_design
from fedkin.errors import DataError
from fedkin.fitting import FitOptions, FittedModel, fit, load, with_history
from fedkin.report import model_card, read_coordinates, report_page, report_payload
from fedkin.report.payload import BLOCKS, MOST_ESTIMATES
from fedkin.report.text import headline, statements

#: Bytes that a page may have.
LIMIT = 3_000_000
COMPARED = {
    "metric": "mean squared error",
    "repeats": 3,
    "test_size": 0.25,
    "verdict": "Fedkin is better than each site alone.",
    "methods": [
        {"name": "Local", "mean": 2.0, "standard_error": 0.1, "difference": 1.0, "difference_error": 0.1},
        {"name": "Fedkin", "mean": 1.0, "standard_error": 0.1, "difference": 0.0, "difference_error": float("nan")},
    ],
    "sites": [{"site": 1, "rows": 4, "Local": 3.0, "Fedkin": 1.5}, {"site": "gone", "Local": 1.0}],
    "more": {"explained variance": {"Local": 0.5, "Fedkin": 0.8}},
}


@pytest.fixture(scope="module")
def fused() -> FittedModel:
    design = paper_design(12, 60, 4, 2, varrho=0.2, signal=2, seed=0)
    options = FitOptions(method="fused", select="holm")
    model = fit(design.federation, design.graph, options)
    return with_history(model, design.federation, design.graph, options)


@pytest.fixture(scope="module")
def kin() -> FittedModel:
    design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
    return fit(design.federation)


def unpacked(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=np.dtype(kind).newbyteorder("<"))


def payload_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="payload">(.*?)</script>', page, re.S)
    return json.loads(text)


# --- what the page is told ------------------------------------------------------------------------------------


def test_differences_are_those_of_contrasts(kin, monkeypatch):
    told = report_payload(kin)["coefficients"]
    halves = unpacked(told["halves"], "f4").reshape(12, -1)
    ratio = 4.0 * (unpacked(told["differences"], "u1").reshape(66, -1) / 255.0) ** 2
    for number, (i, j) in enumerate(zip(*np.tril_indices(12, -1), strict=True)):
        shown = ratio[number] * np.hypot(halves[i], halves[j])
        exact = np.ptp(kin.contrast(kin.sites[i], kin.sites[j]).confint(0.95), axis=1) / 2
        np.testing.assert_allclose(shown, exact, rtol=0.05)
    assert ratio.min() < 0.5, "kin differ by less than independent sites would"
    monkeypatch.setattr("fedkin.report.payload.MOST_DIFFERENCES", 66 * halves.shape[1] - 1)
    assert report_payload(kin)["coefficients"]["differences"] is None


def test_a_fused_model(fused):
    told = report_payload(replace(fused, comparison=COMPARED))
    assert told["headline"] == COMPARED["verdict"] and " groups" in told["lead"]
    assert told["method"] == "fused" and told["resolved"]
    estimates = unpacked(told["coefficients"]["estimates"], "f4").reshape(12, 5)
    np.testing.assert_allclose(estimates, np.c_[fused.intercept, fused.coef[:, 0]], rtol=1e-6)
    assert told["coefficients"]["halves"] is None
    assert told["coefficients"]["names"] == ["(intercept)", *fused.feature_names]
    kept, dropped = (unpacked(told["edges"][name], "i4").reshape(-1, 2) for name in ("kept", "dropped"))
    assert kept.tolist() == fused.graph.edges.tolist()
    assert len(kept) + len(dropped) == told["edges"]["n_candidates"] == fused.fused.selection["candidates"]
    assert not {tuple(edge) for edge in kept.tolist()} & {tuple(edge) for edge in dropped.tolist()}
    assert told["comparison"]["sites"]["Local"] == [None, 3.0, *[None] * 10]
    assert told["comparison"]["methods"][1]["difference_error"] is None
    path = told["path"]
    assert path["choice"]["lams"] == path["groups"]["lams"]  # levels that were clearly worse are not in it
    assert len(path["groups"]["counts"]) == len(path["choice"]["lams"]) >= 3
    at_top, at_bottom = path["groups"]["counts"][0], path["groups"]["counts"][-1]
    assert at_top <= 2 < at_bottom, "groups fuse as lam grows"


def test_the_matrix_of_a_fused_model_counts_equal_coefficients():
    fed = Federation({u: ([[1.0, 2.0], [2.0, 1.0], [0.0, 1.0]], [1.0, 2.0, float(u)]) for u in range(3)})
    model = fit(fed, None, FitOptions(method="fused", lam=0.0, select="none", fit_intercept=False))
    coef = np.array([[[1.0, 5.0]], [[1.0, 6.0]], [[2.0, 7.0]]])
    values = unpacked(report_payload(replace(model, coef=coef))["matrix"]["values"], "u1") / 255
    np.testing.assert_allclose(values, [0.5, 0, 0], atol=1 / 255)  # pairs (1, 0), (2, 0), (2, 1)


def test_a_kin_model(kin):
    told = report_payload(kin)
    halves = unpacked(told["coefficients"]["halves"], "f4").reshape(12, 6)
    np.testing.assert_allclose(2 * halves, np.ptp(kin.kin.confint(0.95), axis=2), rtol=1e-6)
    values, (i, j) = unpacked(told["matrix"]["values"], "u1"), np.tril_indices(12, -1)
    np.testing.assert_allclose(values / 255, kin.kin.probability[i, j], atol=0.5 / 255 + 1e-9)
    groups = np.array(told["sites"]["groups"])[told["order"]]
    assert (np.diff(groups) >= 0).all(), "sites of a group stand together"
    theta, group = unpacked(told["coefficients"]["estimates"], "f4").reshape(12, 6), told["sites"]["groups"]
    apart = [np.std([line[np.equal(group, k)].mean() for k in group]) for line in theta.T] / halves.mean(axis=0)
    assert told["coefficients"]["first"] == 1 + np.argmax(apart[1:]), "all but the intercept compete"
    assert told["coefficients"]["unlike"] is None


# --- many sites -----------------------------------------------------------------------------------------------


def large(V: int, p: int) -> FittedModel:
    """A model of many sites, without the time to fit one."""
    rng = np.random.default_rng(0)
    small = fit(
        Federation({u: [[float(u)] * p] for u in range(2)}), None, FitOptions(method="fused", loss="mean", lam=0.0)
    )
    sites = tuple(f"site {u:05d}" for u in range(V))
    return replace(
        small,
        sites=sites,
        coef=rng.standard_normal((V, 1, p)),
        intercept=np.zeros((V, 1)),
        groups=rng.integers(0, 8, V),
        n_samples=np.full(V, 30),
        graph=Graph.empty(sites),
        notes={},
    )


@pytest.mark.exhaustive
def test_five_thousand_sites_fit_into_a_page():
    model = large(5000, 30)
    page = report_page(model)
    told = payload_of(page)
    assert len(page.encode()) < LIMIT
    assert told["matrix"]["kind"] == "blocks" and len(unpacked(told["matrix"]["values"], "u1")) == BLOCKS**2
    assert told["coefficients"]["left_out"] == 30 - MOST_ESTIMATES // 5000
    assert len(unpacked(told["nearest"]["sites"], "i4")) == 5000 * told["nearest"]["each"]


def test_more_sites_than_all_pairs_can_be_looked_at():
    told = payload_of(report_page(large(7000, 3)))
    starts = told["matrix"]["starts"]
    assert told["nearest"] is None and starts[0] == 0 and starts[-1] == 7000 and starts == sorted(starts)
    assert sorted(told["order"]) == list(range(7000))


# --- places ---------------------------------------------------------------------------------------------------


def test_coordinates(tmp_path: Path):
    table = tmp_path / "places.csv"
    table.write_text("site,lon,lat\nb,2.5,50\na,1.5,40\n")
    assert read_coordinates(table, ["a", "b"]) == {"kind": "points", "globe": True, "x": [1.5, 2.5], "y": [40.0, 50.0]}
    with pytest.raises(DataError, match="no line for site 'c'"):
        read_coordinates(table, ["a", "c"])
    table.write_text("site,longitude\na,1\n")
    with pytest.raises(DataError, match="expected site and x, y"):
        read_coordinates(table, ["a"])
    table.write_text("site,x,y\na,far,1\n")
    with pytest.raises(DataError, match="is not a number"):
        read_coordinates(table, ["a"])


# --- the command ----------------------------------------------------------------------------------------------


def test_fit_and_report_write_the_same_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    design = paper_design(8, 30, 3, 2, seed=0)
    fed, table = design.federation, tmp_path / "my rows.csv"
    lines = [f"s{u},{y},{','.join(map(str, x))}" for u, y, x in zip(fed.site_index, fed.y, fed.X, strict=True)]
    table.write_text("\n".join(["site,y,a,b,c", *lines]))
    words = [str(table), "--site", "site", "--target", "y", "--method", "fused", "--select", "holm", "--test-size", "0"]
    words += ["--out", str(tmp_path / "model"), "--report", str(tmp_path / "one.html")]
    assert main(["fit", *words]) == 0
    assert main(["report", str(tmp_path / "model"), "--out", str(tmp_path / "two.html")]) == 0
    page = (tmp_path / "one.html").read_text()
    assert page == (tmp_path / "two.html").read_text()
    told = payload_of(page)["reproduction"]
    assert told["command"].startswith("fedkin fit 'my rows.csv' --site site")
    assert str(tmp_path) not in page, "a page that is passed on does not tell where the owner keeps files"
    assert told["facts"]["SHA-256 of the data"] == hashlib.sha256(table.read_bytes()).hexdigest()
    assert told["facts"]["Fedkin"] == fedkin.__version__ and told["options"]["select"] == "holm"
    assert sorted(load(tmp_path / "model").history) == ["choice", "command", "data", "deviations", "dropped", "path"]
    assert main(["fit", *words[:5], "--test-size", "0", "--out", str(tmp_path / "kin")]) == 0
    deviations = payload_of(report_page(load(tmp_path / "kin")))["coefficients"]["deviations"]
    assert deviations[0] is None and deviations[1:] == pytest.approx(fed.X.std(axis=0)), "effects per sd, for kin too"


def test_a_card_says_what_was_promised_about_privacy(fused: FittedModel) -> None:
    promised = {"epsilon": 2.0, "delta": 1e-6, "sites": 6}
    private = replace(fused, origin={"from": "summaries", "rounds": 1, "privacy": promised})
    assert "epsilon at most 2 and delta at most 1e-06, at 6 sites" in model_card(private)
    plain = replace(fused, origin={"from": "summaries", "rounds": 1})
    assert "Differential privacy was not requested." in model_card(plain)
    assert "round by round" in model_card(replace(fused, origin={"from": "rounds", "rounds": 9}))


@pytest.mark.parametrize(
    ("size", "n_groups", "title", "ending"),
    [
        (150.0, [0.0, 0.4, 0.6], "The sampler has mixed", "an effective sample size of 150."),
        (4.0, [0.0, 0.03, 0.97], "The sampler has mixed", "is 2 with probability 0.97, and hardly varies."),
        (4.0, [0.0, 0.4, 0.6], "The sampler has mixed for estimates, but not for the number of groups", "imprecise."),
    ],
)
def test_a_small_sample_of_the_number_of_groups_is_not_called_mixed(size, n_groups, title, ending):
    design = paper_design(n_sites=8, n_samples=30, n_features=2, n_clusters=2, seed=0)
    model = fit(design.federation)
    kin = model.kin
    found = replace(
        kin.diagnostics,
        rhat={**kin.diagnostics.rhat, "parameters, worst": 1.0, "parameters, median": 1.0},
        size={**kin.diagnostics.size, "number of groups": size},
    )
    model = replace(model, kin=replace(kin, diagnostics=found, n_groups=np.array(n_groups)))
    (about,) = [one for one in statements(model) if one.topic == "sampler"]
    assert about.title == title
    assert about.text.endswith("R-hat of the parameters is <= 1.01.") and "averaged analytically" in about.detail
    assert about.detail.endswith(ending)


def test_only_sites_with_models_of_their_own_are_said_to_borrow_strength() -> None:
    rows, lines = np.random.default_rng(0).normal(size=(10, 2)), []
    for n_sites, method in ((4, {"method": "fused", "lam": 10.0, "select": None}), (1, {}), (4, {})):
        fed = Federation({u: (rows[:, :1], rows[:, 1]) for u in range(n_sites)})
        lines.append(headline(fit(fed, None, FitOptions(**method))))
    (fused, single, kin) = lines
    assert fused == ("All 4 sites form one group.", "Sites of one group share information; each keeps its own rows.")
    assert single == ("A model for one site.", "")
    assert kin[1] == "Every site has its own model, and borrows strength from similar sites."


def test_sites_in_districts_are_not_said_to_have_no_groups() -> None:
    rng = np.random.default_rng(0)
    rows = {f"s{u}": (rng.normal(size=(12, 1)), u // 3 + rng.normal(size=12)) for u in range(9)}
    within = {f"s{u}": f"d{u // 3}" for u in range(9)}
    payload = report_payload(fit(Federation(rows), None, FitOptions(method="kin", within=within)))
    assert payload["sites"]["districts"] == list(within.values())
    unlike = payload["coefficients"]["unlike"]
    assert min(unlike) == 0 and max(unlike) == 1 and len(unlike) == 9
    assert payload["headline"] == "9 sites in 3 districts share information; groups were not sought."


def test_the_report_of_a_table_with_filled_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard deviations of columns were those of the rows before gaps were filled, and no page was written."""
    table = tmp_path / "rows.csv"
    rng = np.random.default_rng(0)
    lines = [f"{'abcd'[k % 4]},{'' if k == 5 else rng.normal()},{rng.normal()}" for k in range(80)]
    table.write_text("site,x,y\n" + "\n".join(lines) + "\n")
    page = tmp_path / "page.html"
    words = ["--site", "site", "--target", "y", "--missing", "mean", "--test-size", "0", "--report", str(page)]
    assert main(["fit", str(table), *words, "--out", str(tmp_path / "model")]) == 0
    assert "x" in page.read_text() and "error" not in capsys.readouterr().err
