"""What notebooks show: cards in HTML that take nothing for markup, and figures on given axes."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import re
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection

import fedkin
from fedkin import Federation, Graph, KinSurvival
from fedkin._base import Array
from fedkin.datasets import paper_design
from fedkin.errors import ParameterError
from fedkin.fitting import FitOptions, FittedModel, compare, fit, with_history
from fedkin.report import plot_coefficients, plot_comparison, plot_gains, plot_kin, plot_path, plot_survival

NASTY = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def fused() -> FittedModel:
    design = paper_design(12, 60, 4, 2, varrho=0.2, signal=2, seed=0)
    options = FitOptions(method="fused", select="holm")
    return with_history(fit(design.federation, design.graph, options), design.federation, design.graph, options)


@pytest.fixture(scope="module")
def kin() -> FittedModel:
    design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
    return fit(design.federation, None, FitOptions(method="kin"))


@pytest.fixture(autouse=True)
def figures_closed():
    yield
    plt.close("all")


def test_cards_are_small_and_take_nothing_for_markup(kin: FittedModel) -> None:
    fed = Federation({f"{NASTY}{u}": ([[0.0], [1.0], [2.0 + u]], [1.0, 3.0, 5.0]) for u in range(3)})
    graph = Graph.complete(fed.sites)
    problem = fedkin.Problem(fed, graph, lam=0.1)
    model = fit(fed, graph, FitOptions(method="fused", lam=0.1))
    for one in (fed, graph, problem, fedkin.solve(problem), model, kin, kin.kin):
        card = one._repr_html_()
        assert type(one).__name__ in card and "<script" not in card and len(card) < 8_000
        for tag in ("div", "table", "tr", "td", "th"):
            assert len(re.findall(f"<{tag}[ >]", card)) == card.count(f"</{tag}>")
    assert "&lt;script&gt;" in fed._repr_html_() and "&lt;script&gt;" in graph._repr_html_()
    assert "2 groups" in kin.kin._repr_html_() and "12 sites, 480 rows" in kin.kin._repr_html_()


def test_the_matrix_is_ordered_and_has_the_probabilities(kin: FittedModel) -> None:
    shown = plot_kin(kin).images[0].get_array()
    found = np.sort(np.asarray(kin.kin.probability).ravel())
    np.testing.assert_allclose(np.sort(np.asarray(shown).ravel()), found)
    half = int((kin.kin.groups == 0).sum())
    assert shown[:half, :half].mean() > 0.9 > 0.1 > shown[:half, half:].mean()


def test_the_forest_has_estimates_and_intervals(kin: FittedModel, fused: FittedModel) -> None:
    axes = plot_coefficients(kin, kin.feature_names[2])
    points, bars = drawn(axes), axes.collections[0].get_segments()
    np.testing.assert_allclose(np.sort(points[:, 0]), np.sort(kin.coef[:, 0, 2]))
    widths = np.sort([np.ptp(bar[:, 0]) for bar in bars])
    np.testing.assert_allclose(widths, np.sort(np.ptp(kin.kin.confint(0.95), axis=2)[:, 3]))
    assert axes.get_xlabel() == f"{kin.feature_names[2]}: effect on the target" and axes.get_ylabel() == "site"
    assert not hasattr(plot_coefficients(fused).collections[0], "get_segments"), "a fused model has no intervals"
    few = plot_coefficients(kin, 0, most=5)
    assert len(drawn(few)) == 5 and few.get_title("left") == "5 of 12 sites shown"
    with pytest.raises(ParameterError, match="no feature 'age'"):
        plot_coefficients(kin, "age")


def drawn(axes: Axes) -> Array:
    """Return the places of all marks."""
    return np.concatenate([one.get_offsets() for one in axes.collections if isinstance(one, PathCollection)])


def test_gains_and_errors_of_methods_are_those_of_the_comparison(kin: FittedModel) -> None:
    design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
    compared = compare(design.federation, options=FitOptions(method="kin"), repeats=2)
    found = compared.plain()
    card = compared._repr_html_()
    assert card.count("<tr") == 2 + len(compared.errors) and compared.verdict.split(":")[0] in card
    assert repr(compared).startswith("Comparison(mean squared error of 12 sites: Local ")
    model = replace(kin, comparison=found)
    gains = np.sort([line["gain"] for line in found["sites"]])
    np.testing.assert_allclose(drawn(plot_gains(model))[:, 0], gains)
    few = plot_gains(model, most=3)
    np.testing.assert_allclose(drawn(few)[[0, 2], 0], gains[[0, -1]])
    assert few.get_title("left") == "3 of 12 sites shown" and "mean squared error" in few.get_xlabel()
    long = replace(model, sites=tuple(f"University Hospital of the City, Ward {u}" for u in range(12)))
    ticks = [tick.get_text() for tick in plot_coefficients(long).get_yticklabels()]
    assert len(set(ticks)) == 12 and max(map(len, ticks)) == 24, "long names are cut in their middle, and differ"
    axes = plot_comparison(model)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [line["name"] for line in found["methods"]][::-1]
    means = [line.get_xdata()[0] for line in axes.lines]
    np.testing.assert_allclose(means, [line["mean"] for line in found["methods"]][::-1])
    halves = [np.ptp(lines.get_segments()[0][:, 0]) / 2 for lines in axes.collections]
    paired = [line["difference_error"] for line in found["methods"] if line["name"] != "Fedkin"]
    np.testing.assert_allclose(halves, paired[::-1])
    with pytest.raises(ParameterError, match="no comparison"):
        plot_gains(kin)


def test_survival_curves_are_those_that_are_predicted(fused: FittedModel) -> None:
    rng = np.random.default_rng(0)
    X, site = rng.normal(size=(200, 2)), np.repeat(["north", "south"], 100)
    y = np.column_stack([rng.random(200) < 0.7, rng.exponential(np.exp(-X[:, 0]))])
    model = KinSurvival().fit(X, y, site=site).model_
    axes = plot_survival(model, X[0])
    for line, name in zip(axes.lines, ["north", "south", "never seen"], strict=True):
        times, curve = line.get_data()
        unseen = "population" if name == "never seen" else "raise"
        np.testing.assert_allclose(curve, model.predict_survival(X[:1], name, times, unseen=unseen)[0])
    assert len(plot_survival(model, sites=["south"]).lines) == 1
    with pytest.raises(ParameterError, match="no baseline hazards"):
        plot_survival(fused)


def test_the_path_ends_in_groups(fused: FittedModel) -> None:
    lines = plot_path(fused).lines[:-1]
    assert len(lines) == fused.n_sites
    at_top = {round(float(line.get_ydata()[0]), 6) for line in lines}
    at_bottom = {round(float(line.get_ydata()[-1]), 6) for line in lines}
    assert len(at_top) <= fused.n_groups < len(at_bottom)
    with pytest.raises(ParameterError, match="no path"):
        plot_path(fit(Federation({"a": [[0.0]], "b": [[1.0]]}), None, FitOptions(method="fused", loss="mean", lam=0.1)))
