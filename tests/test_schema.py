"""Schemas: what is wrong with a table in words, and rows prepared by what was agreed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedkin.data import Column, Federation, Roles, Schema, SchemaScan, TableInMemory, columns_of
from fedkin.data.cells import frame_row
from fedkin.errors import DataError, ParameterError

N = 60
SCHEMA = Schema(
    (
        Column("weight", unit="kg", low=30, high=250),
        Column("ward", "category", levels=("A", "B", "C")),
        Column("smoker", "category", levels=(0, 1)),
    ),
    Column("outcome", "category", levels=("alive", "dead")),
)


def table(**changed):
    rng = np.random.default_rng(0)
    whole = {
        "weight": rng.uniform(50, 110, N),
        "ward": rng.choice(["A", "B", "C"], N).astype(object),
        "smoker": rng.integers(0, 2, N),
        "outcome": rng.choice(["alive", "dead"], N).astype(object),
    }
    return whole | changed


def words(columns, schema=SCHEMA, **how):
    return [str(finding) for finding in schema.check(columns, **how)]


def test_rows_are_encoded_centred_and_scaled():
    rows = SCHEMA.rows(
        {"weight": [140, 250], "ward": ["C", "A"], "smoker": [True, 0.0], "outcome": ["dead", "alive"]}, True
    )
    assert SCHEMA.names == ("weight", "ward=B", "ward=C", "smoker=1")
    assert rows.X.tolist() == [[1, 0, 0, 1, 1], [1, 1, 0, 0, 0]]
    assert rows.y.tolist() == [1, 0]
    schema, columns = Schema((Column("x", mean=10.0, scale=2.0),), Column("y")), {"x": [10.0, 14.0], "y": [1.0, 2.0]}
    assert schema.rows(columns, intercept=False).X.tolist() == [[5.0], [7.0]]  # nothing is centred
    assert schema.rows(columns, intercept=True).X.tolist() == [[1.0, 0.0], [1.0, 2.0]]


WEIGHT, ROW = table()["weight"], np.arange(N)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"weight": WEIGHT * 1000}, ["weight", "100%", "250 kg", "check unit"]),
        ({"weight": np.linspace(251, 299, N)}, ["weight", "100%", "250 kg", "row 2"]),
        ({"weight": np.where(ROW == 3, 20, WEIGHT)}, ["weight: 1 of 60", "30 kg", "20 in row 5"]),
        ({"weight": np.where(ROW == 7, 400, WEIGHT)}, ["weight: 1 of 60", "250 kg", "400 in row 9"]),
        ({"weight": np.where(ROW < 3, 999, WEIGHT)}, ["999 occurs 3 times", "missing value"]),
        ({"weight": np.where(ROW == 4, np.nan, WEIGHT)}, ["weight", "missing in 1 of 60 rows", "row 6"]),
        ({"ward": ["A", "B"] * 29 + ["A", "Z"]}, ["ward: unknown level 'Z' (1 row), first in row 61"]),
        ({"outcome": ["alive"] * 40 + ["Dead"] * 20}, ["'Dead' (20 rows), first in row 42", "'dead'"]),
        *(
            (
                {"weight": np.where(ROW == 4, cell, WEIGHT.astype(object))},
                ["weight: 1 of 60", f"{cell!r} in row 6", cure],
            )
            for cell, cure in (("70,5", "points"), ("2021-03-04", "dates"), ("<5", "limit"), ("70 kg", "units"))
        ),
    ],
)
def test_what_does_not_fit_is_named_with_its_row(changed, said):
    found = SCHEMA.check(table(**changed))
    assert len(found) == bool(said) and all(one.refuses for one in found)
    assert all(part in str(found[0]) for part in said)


def test_everything_is_said_at_once():
    columns = table(weight=WEIGHT * 1000, ward=["A"] * 58 + ["Z", None])
    columns["Outcome"] = columns.pop("outcome")
    with pytest.raises(DataError, match="4 findings") as caught:
        SCHEMA.rows(columns, intercept=True)
    assert all(part in str(caught.value) for part in ("weight", "1 of 60 rows", "'Z'", "'Outcome'"))
    del columns["Outcome"]
    assert SCHEMA.encode(columns | {"weight": WEIGHT, "ward": ["A"] * N}).shape == (N, 4)  # no target to predict
    with pytest.raises(DataError, match="no rows"):
        Schema((Column("x"),)).rows({"x": []}, True)


def test_counts_are_whole_and_not_negative_and_offsets_are_kept():
    schema = Schema((Column("x"),), Column("days", "count"), offset="log_time")
    columns = {"x": [1.0, 2.0, 3.0], "days": [1.0, 2.5, -1.0], "log_time": [0.0, 0.5, 0.0]}
    assert [one.split(": ")[-1] for one in words(columns, schema)] == ["2.5 in row 3", "-1 in row 4"]
    assert schema.rows(columns | {"days": [1.0, 2.0, 3.0]}, True).offset.tolist() == [0, 0.5, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Column("x", low=2, high=1), "low"),
        (lambda: Column("x", scale=0.0), "scale"),
        (lambda: Column("x", levels=("a", "b")), "category"),
        (lambda: Column("x", "category", levels=("TRUE", "true")), "twice"),
        (lambda: Column("x", "category", levels=("a", 1)), "several types"),
        (lambda: Column("x", "category", levels=("a", "b"), low=1), "no low"),
        (lambda: Column("x", "word"), "kind"),
        (lambda: Schema((Column("x"), Column("x"))), "twice"),
        (lambda: Schema((Column("x=b"), Column("x", "category", levels=("a", "b")))), "rename"),
        (lambda: Schema(()), "at least one"),
        (lambda: Schema((Column("x", "count"),)), "feature"),
    ],
)
def test_schemas_that_do_not_hold_together(make, message):
    with pytest.raises(ParameterError, match=message):
        make()


def test_rows_with_missing_cells_can_be_left_out():
    schema = replace(SCHEMA, missing="drop")
    columns = table()
    columns["weight"][4], columns["ward"][7], columns["outcome"][7] = np.nan, None, "NA"
    assert [(one.column, one.refuses) for one in schema.check(columns)] == [
        (name, False) for name in ("weight", "ward", "outcome")
    ]
    kept = [row for row in range(N) if row not in (4, 7)]
    expected = SCHEMA.rows({name: column[kept] for name, column in columns.items()}, True)
    rows = schema.rows(columns, True)
    np.testing.assert_array_equal(rows.X, expected.X)
    np.testing.assert_array_equal(rows.y, expected.y)
    columns["site"] = np.array(["a", "b"] * 30, dtype=object)
    assert Federation.from_schema(columns, schema, site="site").n_samples.tolist() == [29, 29]
    with pytest.raises(DataError, match="weight: is missing in 1 of 60 rows"):
        schema.encode(columns)  # nobody wants fewer predictions than rows
    with pytest.raises(DataError, match="is missing in every row"):
        schema.rows(table(weight=[np.nan] * N), True)


def test_a_table_of_several_sites():
    columns = table(hospital=["n", "s", "s"] * 20)
    fed = Federation.from_schema(columns, SCHEMA, site="hospital")
    assert fed.sites == ("n", "s")
    assert fed.feature_names == SCHEMA.names
    assert set(fed.y) == {"alive", "dead"}
    np.testing.assert_array_equal(fed.X[np.argsort(fed.row_order)], SCHEMA.encode(columns))
    columns["hospital"][3] = None
    with pytest.raises(DataError, match="belong to no site"):
        Federation.from_schema(columns, SCHEMA, site="hospital")


class InBatches:
    """A table that is read seven rows at a time."""

    def __init__(self, columns):
        self.names, self._columns, self.at = list(columns), columns, frame_row

    def batches(self, names):
        for start in range(0, N, 7):
            yield {name: self._columns[name][start : start + 7] for name in names}


def inferred(columns, roles):
    scan = SchemaScan(columns, roles)
    assert sum(rows.size for _, rows in scan.rows()) <= N
    return scan.result()


@pytest.mark.parametrize("missing", ["drop", "mean", "indicator"])
def test_a_schema_inferred_in_batches_is_that_of_the_whole_table(missing):
    whole = columns_of(table(site=["a", "b"] * 30, one=np.ones(N), index=np.arange(N)))
    whole["dose"] = np.random.default_rng(1).normal(1e6, 1.0, N)
    whole["sum"] = whole["dose"] - 2.0 * whole["weight"]
    whole["weight"][[3, 40]], whole["ward"][55] = np.nan, None
    roles = Roles("site", "outcome", missing=missing)
    expected, found = inferred(TableInMemory(whole), roles), inferred(InBatches(whole), roles)
    assert found.schema == expected.schema and found.notes == expected.notes and found.filled == expected.filled
    assert found.kept.tolist() == expected.kept.tolist() and found.n_rows == N
    assert "one" not in found.schema.names and "index" not in found.schema.names
    assert ("sum" in found.schema.names) == (missing != "drop")  # means in gaps are no combination of the others
    with pytest.raises(DataError, match="column 'copy' is the target 'outcome' under another name"):
        inferred(InBatches({**whole, "copy": whole["outcome"]}), roles)
    with pytest.raises(DataError, match=r"'oops' in row 59 \(from 0\)"):
        inferred(InBatches({**whole, "dose": np.array([*whole["dose"][:-1], "oops"], dtype=object)}), roles)
