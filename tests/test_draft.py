"""Drafts of contracts: readable, fitting the example, and silent about its single rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec")
from fedkin.data import columns_of
from fedkin.errors import DataError
from fedkin.federate import Contract, draft_contract


def example(n=200, seed=0):
    rng = np.random.default_rng(seed)
    return columns_of(
        {
            "hospital": rng.choice(["a", "b"], n),
            "patient_id": np.arange(n),
            "age": rng.normal(60, 10, n).round(),
            "blood pressure": rng.normal(130, 10, n),
            "sex": rng.choice(["m", "f"], n),
            "ward": ["x"] * (n - 100) + ["y"] * 98 + ["z"] * 2,
            "admitted": ["2021-03-04"] * n,
            "smoker": rng.random(n) < 0.3,
            "remark": [f"patient {k}" for k in range(n)],
            "empty": [None] * n,
            "same": [1.0] * n,
            "visits": rng.poisson(2, n),
            "outcome": rng.choice(["dead", "alive"], n),
        }
    )


def test_what_is_guessed():
    draft = draft_contract(example(), "heart")
    contract = Contract.from_toml(draft.text)
    assert (draft.target, draft.site_column) == ("outcome", "hospital")
    assert contract.loss == {"name": "logistic"}
    assert contract.schema.classes == ("alive", "dead")
    assert contract.schema.names == ("age", "blood pressure", "sex=m", "ward=y", "smoker=true", "visits")
    assert set(draft.left_out) == {"patient_id", "admitted", "remark", "empty", "same"}


@pytest.mark.parametrize(("target", "loss"), [("visits", "poisson"), ("age", "linear"), ("sex", "logistic")])
def test_the_loss_goes_with_the_target(target, loss):
    assert Contract.from_toml(draft_contract(example(), "heart", target).text).loss["name"] == loss


def test_scales_are_those_of_the_example_roughly():
    table = example()
    del table["ward"]
    contract = Contract.from_toml(draft_contract(table, "heart").text)
    rows = contract.prepare(table)
    assert np.abs(rows.X[:, 1:3].mean(axis=0)).max() < 1
    spread = rows.X[:, 1:3].std(axis=0)
    assert spread.max() <= 1 and spread.min() > 0.4  # scales are rounded up
    few = {name: column[:20] for name, column in table.items()}
    assert "mean" not in "".join(line for line in draft_contract(few, "h").text.splitlines() if line[0:1] != "#")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=12, max_size=40), st.integers(0, 3))
def test_the_example_fits_its_own_draft(values, seed):
    rng = np.random.default_rng(seed)
    n = len(values)
    table = columns_of({"x": values, "group": ["a", "b", "c"] * 4 + ["a"] * (n - 12), "y": rng.normal(size=n)})
    contract = Contract.from_toml(draft_contract(table, "trial", "y").text)
    assert [one for one in contract.schema.check(table) if one.refuses] == []


def test_names_that_toml_must_quote():
    table = columns_of({'a "b" \\ c': np.arange(20.0), "ä.ö": ["n", "y"] * 10, "y": np.arange(20.0)})
    assert Contract.from_toml(draft_contract(table, "x").text).schema.names == ('a "b" \\ c', "ä.ö=y")


def test_what_cannot_be_drafted():
    with pytest.raises(DataError, match="no column 'nope'"):
        draft_contract(example(), "heart", "nope")
    with pytest.raises(DataError, match="at least one feature"):
        draft_contract(columns_of({"y": [1.0, 2.0]}), "heart")
