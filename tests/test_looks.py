"""What notebooks show: cards in HTML that take nothing for markup, and figures on given axes."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import re

import matplotlib.pyplot as plt
import numpy as np
import pytest

import fedkin
from fedkin import Federation, Graph
from fedkin.datasets import paper_design
from fedkin.errors import ParameterError
from fedkin.fitting import FitOptions, FittedModel, fit, with_history
from fedkin.report import plot_coefficients, plot_kin, plot_path

NASTY = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def fused() -> FittedModel:
    design = paper_design(12, 60, 4, 2, varrho=0.2, signal=2, seed=0)
    options = FitOptions(select="holm")
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
    model = fit(fed, graph, FitOptions(lam=0.1))
    for one in (fed, graph, problem, fedkin.solve(problem), model, kin, kin.kin):
        card = one._repr_html_()
        assert type(one).__name__ in card and "<script" not in card and len(card) < 8_000
        for tag in ("div", "table", "tr", "td", "th"):
            assert len(re.findall(f"<{tag}[ >]", card)) == card.count(f"</{tag}>")
    assert "&lt;script&gt;" in fed._repr_html_() and "&lt;script&gt;" in graph._repr_html_()
    assert "2 groups" in kin.kin._repr_html_()


def test_the_matrix_is_ordered_and_has_the_probabilities(kin: FittedModel) -> None:
    shown = plot_kin(kin).images[0].get_array()
    found = np.sort(np.asarray(kin.kin.probability).ravel())
    np.testing.assert_allclose(np.sort(np.asarray(shown).ravel()), found)
    half = int((kin.kin.groups == 0).sum())
    assert shown[:half, :half].mean() > 0.9 > 0.1 > shown[:half, half:].mean()


def test_the_forest_has_estimates_and_intervals(kin: FittedModel, fused: FittedModel) -> None:
    axes = plot_coefficients(kin, kin.feature_names[2])
    points, bars = axes.collections[1].get_offsets(), axes.collections[0].get_segments()
    np.testing.assert_allclose(np.sort(points[:, 0]), np.sort(kin.coef[:, 0, 2]))
    widths = np.sort([np.ptp(bar[:, 0]) for bar in bars])
    np.testing.assert_allclose(widths, np.sort(np.ptp(kin.kin.confint(0.95), axis=2)[:, 3]))
    assert len(plot_coefficients(fused).collections) == 1, "a fused model has no intervals"
    assert len(plot_coefficients(kin, 0, most=5).collections[1].get_offsets()) == 5
    with pytest.raises(ParameterError, match="no feature 'age'"):
        plot_coefficients(kin, "age")


def test_the_path_ends_in_groups(fused: FittedModel) -> None:
    lines = plot_path(fused).lines[:-1]
    assert len(lines) == fused.n_sites
    at_top = {round(float(line.get_ydata()[0]), 6) for line in lines}
    at_bottom = {round(float(line.get_ydata()[-1]), 6) for line in lines}
    assert len(at_top) <= fused.n_groups < len(at_bottom)
    with pytest.raises(ParameterError, match="no path"):
        plot_path(fit(Federation({"a": [[0.0]], "b": [[1.0]]}), None, FitOptions(loss="mean", lam=0.1)))
