"""The model card: what it says of models of rows, of summaries and of rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedkin.cli import main
from fedkin.datasets import paper_design
from fedkin.fitting import FitOptions, FittedModel, fit
from fedkin.report import model_card


@pytest.fixture(scope="module")
def model() -> FittedModel:
    design = paper_design(n_sites=6, n_samples=30, n_features=3, n_clusters=2, signal=2, seed=0)
    return fit(design.federation, design.truth, FitOptions(lam=0.1, select="none"))


def test_a_card_says_what_a_model_is(model: FittedModel) -> None:
    text = model_card(model)
    assert text.startswith("# Model card\n\n6 sites form 2 groups.")
    assert "180 rows, 30 to 30 at a site" in text and "the fused estimator (linear loss)" in text
    assert "The fit has read all rows in one place." in text and "The optimum is certified" in text


def test_a_card_says_what_was_promised_about_privacy(model: FittedModel) -> None:
    promised = {"epsilon": 2.0, "delta": 1e-6, "sites": 6}
    private = replace(model, origin={"from": "summaries", "rounds": 1, "privacy": promised})
    assert "epsilon 2 and delta 1e-06 at most, at 6 sites" in model_card(private)
    plain = replace(model, origin={"from": "summaries", "rounds": 1})
    assert "No differential privacy was asked for." in model_card(plain)
    assert "round by round" in model_card(replace(model, origin={"from": "rounds", "rounds": 9}))


def test_a_card_has_the_comparison(model: FittedModel) -> None:
    methods = [
        {"name": "Local", "mean": 2.0, "standard_error": 0.25},
        {"name": "Fedkin", "mean": 1.5, "standard_error": 0.2},
    ]
    found = {
        "metric": "mean squared error",
        "lower_is_better": True,
        "repeats": 3,
        "verdict": "So.",
        "methods": methods,
    }
    text = model_card(replace(model, comparison=found))
    assert "| Fedkin | 1.5 | 0.2 |" in text and "3 splits; lower is better" in text and "So." in text


def test_the_command_prints_the_card(model: FittedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.save(tmp_path / "model")
    assert main(["inspect", str(tmp_path / "model"), "--card"]) == 0
    assert capsys.readouterr().out == model_card(model)
