"""The report of a model: what its page is told, and that it is one file that nothing can break out of."""

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
from fedkin.report import read_coordinates, report_page, report_payload
from fedkin.report.payload import (
    BLOCKS,
    MOST_ESTIMATES,
    MOST_PAIRED_SITES,
    display_order,
    nearest_kin,
    pair_matrix,
)

#: Bytes that a page may have.
LIMIT = 3_000_000
COMPARED = {
    "metric": "mean squared error",
    "lower_is_better": True,
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
    options = FitOptions(select="holm")
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
    assert told["headline"] == "12 sites form 2 groups." and told["lead"] == COMPARED["verdict"]
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
    assert told["trust"][0]["title"] == "The optimum is certified"


def test_the_matrix_of_a_fused_model_counts_equal_coefficients():
    fed = Federation({u: ([[1.0, 2.0], [2.0, 1.0], [0.0, 1.0]], [1.0, 2.0, float(u)]) for u in range(3)})
    model = fit(fed, None, FitOptions(lam=0.0, select="none", fit_intercept=False))
    coef = np.array([[[1.0, 5.0]], [[1.0, 6.0]], [[2.0, 7.0]]])
    values = unpacked(report_payload(replace(model, coef=coef))["matrix"]["values"], "u1") / 255
    np.testing.assert_allclose(values, [0.5, 0, 0], atol=1 / 255)  # pairs (1, 0), (2, 0), (2, 1)


def test_a_kin_model(kin):
    told = report_payload(kin)
    assert told["headline"] == "12 sites form 2 groups of kin."
    halves = unpacked(told["coefficients"]["halves"], "f4").reshape(12, 6)
    np.testing.assert_allclose(2 * halves, np.ptp(kin.kin.confint(0.95), axis=2), rtol=1e-6)
    values, (i, j) = unpacked(told["matrix"]["values"], "u1"), np.tril_indices(12, -1)
    np.testing.assert_allclose(values / 255, kin.kin.probability[i, j], atol=0.5 / 255 + 1e-9)
    groups = np.array(told["sites"]["groups"])[told["order"]]
    assert (np.diff(groups) >= 0).all(), "sites of a group stand together"
    titles = {line["title"] for line in told["trust"]}
    assert "How sure the groups are" in titles and any("sampler" in title for title in titles)


def test_no_groups_resolved():
    rng = np.random.default_rng(0)
    theta = rng.standard_normal((15, 3))
    X = rng.standard_normal((15, 30, 3))
    rows = {u: (X[u], X[u] @ theta[u] + rng.standard_normal(30)) for u in range(15)}
    model = fit(Federation(rows))
    told = report_payload(model)
    assert not told["resolved"] and set(told["sites"]["groups"]) == {0}
    assert told["headline"] == "No groups resolved: the 15 sites differ gradually, or too little for groups to show."
    assert any(line["title"] == "Why there are no groups" for line in told["trust"])


def test_a_model_of_one_site_and_one_without_groups():
    fed = Federation({"a": ([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])})
    assert report_payload(fit(fed))["headline"] == "A model for one site."
    many = Federation({u: [[float(u)]] for u in range(4)})
    apart = fit(many, None, FitOptions(loss="mean", lam=0.0, select="none"))
    assert report_payload(apart)["headline"] == "Each of the 4 sites has a model of its own."
    as_one = fit(many, None, FitOptions(loss="mean", lam=100.0, select="none"))
    assert report_payload(as_one)["headline"] == "All 4 sites belong together."


def test_several_classes_have_coefficients_of_each():
    rng = np.random.default_rng(1)
    rows = {u: (rng.standard_normal((30, 2)), rng.choice(["x", "y", "z"], 30)) for u in range(3)}
    model = fit(Federation(rows), None, FitOptions(lam=0.01, select="none"))
    names = report_payload(model)["coefficients"]["names"]
    assert names[0] == "(intercept) [y]" and names[3] == "(intercept) [z]" and len(names) == 6


# --- many sites -----------------------------------------------------------------------------------------------


def large(V: int, p: int) -> FittedModel:
    """A model of many sites, without the time to fit one."""
    rng = np.random.default_rng(0)
    small = fit(Federation({u: [[float(u)] * p] for u in range(2)}), None, FitOptions(loss="mean", lam=0.0))
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


def test_blocks_are_means_and_nearest_are_the_best():
    rng = np.random.default_rng(0)
    n = MOST_PAIRED_SITES + 203
    values = rng.random((n, n))
    values = (values + values.T) / 2
    order = rng.permutation(n)
    made = pair_matrix(values, order)
    starts, blocks = made["starts"], unpacked(made["values"], "u1").reshape(BLOCKS, BLOCKS)
    a, b = order[starts[5] : starts[6]], order[starts[9] : starts[10]]
    assert abs(blocks[5, 9] / 255 - values[np.ix_(a, b)].mean()) <= 0.5 / 255 + 1e-9
    near = nearest_kin(values, 3)
    others = np.delete(values[7], 7)
    found = unpacked(near["sites"], "i4").reshape(n, 3)[7]
    np.testing.assert_array_equal(values[7, found], np.sort(others)[::-1][:3])
    few = values[:20, :20].copy()
    np.fill_diagonal(few, 1.0)
    groups = rng.integers(0, 3, 20)
    assert (np.diff(groups[display_order(few, groups)]) >= 0).all()


# --- one file -------------------------------------------------------------------------------------------------

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028"


def test_nothing_that_a_site_is_called_becomes_part_of_the_page():
    fed = Federation({NASTY: ([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])}, feature_names=["<b>x</b>"])
    page = report_page(fit(fed))
    assert payload_of(page)["sites"]["names"] == [NASTY]
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page and "<b>" not in page and "\u2028" not in page


def test_without_its_script_the_page_has_numbers_that_can_be_read(kin):
    method = {"name": "Local", "mean": 11358800000.0, "standard_error": 1.5e9, "difference": 2.6e9}
    compared = {"metric": "mean squared error", "methods": [method | {"difference_error": 1.7e9}], "verdict": "."}
    page = report_page(replace(kin, comparison={**compared, "sites": [], "more": {}, "repeats": 3, "test_size": 0.25}))
    quiet = page[page.index("<noscript>") : page.index("</noscript>")]
    assert "<td>11 360 000 000</td>" in quiet
    assert "11358800000" not in quiet


def test_the_page_needs_nothing_else(kin):
    page = report_page(kin)
    assert "default-src 'none'" in page
    outside = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\((?!#)[^)]*\)|@import', page.split('<script type="appl')[0])
    assert outside == []
    assert {address for address in re.findall(r"https?://[^\"'`\s)]+", page)} <= {"http://www.w3.org/2000/svg"}


# --- places ---------------------------------------------------------------------------------------------------


def test_coordinates(tmp_path: Path):
    table = tmp_path / "places.csv"
    table.write_text("site,lon,lat\nb,2.5,50\na,1.5,40\n")
    assert read_coordinates(table, ["a", "b"]) == {"kind": "points", "globe": True, "x": [1.5, 2.5], "y": [40.0, 50.0]}
    with pytest.raises(DataError, match="no line for 'c'"):
        read_coordinates(table, ["a", "c"])
    table.write_text("site,longitude\na,1\n")
    with pytest.raises(DataError, match="expected site and x, y"):
        read_coordinates(table, ["a"])
    table.write_text("site,x,y\na,far,1\n")
    with pytest.raises(DataError, match="is no number"):
        read_coordinates(table, ["a"])


def test_states_are_recognised():
    rows = {name: [[1.0]] for name in ("Ohio", "New York", "texas", "DC")}
    model = fit(Federation(rows), None, FitOptions(loss="mean", lam=1.0, select="none"))
    assert report_payload(model)["places"]["codes"] == ["OH", "NY", "TX", "DC"]
    rows["Paris"] = [[1.0]]
    model = fit(Federation(rows), None, FitOptions(loss="mean", lam=1.0, select="none"))
    assert report_payload(model)["places"] is None


# --- the command ----------------------------------------------------------------------------------------------


def test_fit_and_report_write_the_same_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    design = paper_design(8, 30, 3, 2, seed=0)
    fed, table = design.federation, tmp_path / "my rows.csv"
    lines = [f"s{u},{y},{','.join(map(str, x))}" for u, y, x in zip(fed.site_index, fed.y, fed.X, strict=True)]
    table.write_text("\n".join(["site,y,a,b,c", *lines]))
    words = [str(table), "--site", "site", "--target", "y", "--select", "holm", "--test-size", "0"]
    words += ["--out", str(tmp_path / "model"), "--report", str(tmp_path / "one.html")]
    assert main(["fit", *words]) == 0
    assert main(["report", str(tmp_path / "model"), "--out", str(tmp_path / "two.html")]) == 0
    page = (tmp_path / "one.html").read_text()
    assert page == (tmp_path / "two.html").read_text()
    told = payload_of(page)["reproduction"]
    assert told["command"].startswith("fedkin fit '") and "my rows.csv' --site site" in told["command"]
    assert told["facts"]["SHA-256 of the data"] == hashlib.sha256(table.read_bytes()).hexdigest()
    assert told["facts"]["Fedkin"] == fedkin.__version__ and told["options"]["select"] == "holm"
    assert sorted(load(tmp_path / "model").history) == ["choice", "command", "data", "dropped", "path"]


def test_places_that_cannot_hold_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "is a directory, expected the name of a file" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "make it first" in capsys.readouterr().err.replace("\n", " ")
