"""Short messages of many coefficients: second derivatives as diagonal plus low rank."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fedkin
from fedkin.core import Summaries, Summary
from fedkin.data import Federation
from fedkin.errors import DataError, ParameterError


def one_site(n: int, p: int, seed: int = 0, loss: str = "linear") -> Federation:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p)) * rng.uniform(0.1, 10.0, size=p)
    eta = X @ rng.normal(size=p) / 10
    y = eta + rng.normal(size=n) if loss == "linear" else (rng.random(n) < 1 / (1 + np.exp(-eta))).astype(float)
    return Federation({"a": (X, y)})


@pytest.mark.parametrize(("n", "p"), [(6, 15), (40, 8)])
def test_a_rank_as_large_as_rows_or_coefficients_is_exact(n, p):
    whole = fedkin.summarise(one_site(n, p))["a"]
    short = whole.short(min(n, p))
    size = np.abs(whole.hessian.sum(axis=0)).max()
    assert short.curvature.exact and short.curvature.factor.shape == (p, min(n, p))
    np.testing.assert_allclose(short.hessian[-1], whole.hessian.sum(axis=0), atol=1e-12 * size)
    assert not short.hessian[:-1].any() and short.n_samples == n
    assert short.gradient.sum(axis=0).tolist() == whole.gradient.sum(axis=0).tolist()
    # and more than that is no longer
    assert whole.short(50).curvature.rank == min(n, p)


def test_what_is_left_out_of_few_rows_are_rows_of_a_rotated_table():
    """Five of nine rows, after a rotation: their products with each other and with the target, and nothing else."""
    fed = one_site(9, 20)
    X, y = fed["a"].X, fed["a"].y
    size = np.sqrt((X**2).sum(axis=0))
    U, _, _ = np.linalg.svd(X / size, full_matrices=False)
    turned, target = U[:, :5].T @ X, U[:, :5].T @ y
    short = fedkin.summarise(fed, rank=5)["a"]
    np.testing.assert_allclose(short.hessian[-1], turned.T @ turned, atol=1e-9)
    np.testing.assert_allclose(-short.gradient[-1], turned.T @ target, atol=1e-9)
    assert 2 * short.value[-1] == pytest.approx(target @ target)
    assert short.curvature.left_out == 4 and not short.curvature.diagonal.any()


def test_a_short_message_is_short_and_comes_back_to_the_bit():
    whole = fedkin.summarise(one_site(30, 60))["a"]
    short = whole.short(5)
    plain = short.to_plain()
    assert len(json.dumps(plain)) < 0.1 * len(json.dumps(whole.to_plain()))
    back = Summary.from_plain(json.loads(json.dumps(plain)))
    for name in ("count", "value", "gradient", "hessian", "at"):
        assert np.array_equal(getattr(back, name), getattr(short, name))
    assert np.array_equal(back.curvature.factor, short.curvature.factor) and back.curvature.left_out == 25
    told = {one.name: one for one in short.described()}
    assert "25 directions are left out" in told["curvature"].what
    assert "rows follow from it up to a rotation" in told["curvature"].tells
    stacked = Summaries.stack([back])
    assert np.array_equal(stacked["a"].curvature.factor, short.curvature.factor)
    # a long one and a short one of two sites go together
    other = fedkin.summarise(Federation({"b": one_site(30, 60, seed=1)["a"]}))["b"]
    assert Summaries.stack([short, other]).curvature == (short.curvature, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one["curvature"]["diagonal"].__setitem__(0, -1.0), "below 0"),
        (lambda one: [line.pop() for line in one["curvature"]["factor"]], "'factor' of shape"),
        (lambda one: one["curvature"].update(left_out=-1), "left_out"),
        (lambda one: one["folds"].append(one["folds"][0]), "over all rows only"),
    ],
)
def test_damaged_short_messages_are_refused(change, words):
    plain = fedkin.summarise(one_site(20, 4), rank=2)["a"].to_plain()
    change(plain)
    with pytest.raises(DataError, match=words):
        Summary.from_plain(plain)


def test_what_cannot_be_shortened_is_said():
    summary = fedkin.summarise(one_site(20, 4))["a"]
    with pytest.raises(ParameterError, match="rank must be"):
        summary.short(0)
    with pytest.raises(ParameterError, match="short already"):
        summary.short(2).short(1)
    with pytest.raises(ParameterError, match="mean loss"):
        fedkin.summarise(Federation({"a": np.ones((5, 3))}), "mean", rank=1)


