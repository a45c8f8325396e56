"""Schemas: what is wrong with a table in words, and rows prepared by what was agreed."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from decimal import Decimal

import numpy as np
import pytest

from fedkin.data import (
    Column,
    Federation,
    Roles,
    Schema,
    TableInMemory,
    columns_of,
    infer_schema,
    read_columns,
)
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


def test_a_table_that_fits():
    assert words(table()) == []


def test_rows_are_encoded_centred_and_scaled():
    rows = SCHEMA.rows(
        {"weight": [140, 250], "ward": ["C", "A"], "smoker": [True, 0.0], "outcome": ["dead", "alive"]}, True
    )
    assert SCHEMA.names == ("weight", "ward=B", "ward=C", "smoker=1")
    assert rows.X.tolist() == [[1, 0, 0, 1, 1], [1, 1, 0, 0, 0]]
    assert rows.y.tolist() == [1, 0]


def test_without_an_intercept_nothing_is_centred():
    schema = Schema((Column("x", mean=10.0, scale=2.0),), Column("y"))
    columns = {"x": [10.0, 14.0], "y": [1.0, 2.0]}
    assert schema.rows(columns, intercept=False).X.tolist() == [[5.0], [7.0]]
    assert schema.rows(columns, intercept=True).X.tolist() == [[1.0, 0.0], [1.0, 2.0]]
    assert schema.encode(columns).tolist() == [[10.0], [14.0]]


def test_prediction_needs_no_target():
    columns = table()
    del columns["outcome"]
    assert words(columns, target=False) == []
    assert SCHEMA.encode(columns).shape == (N, 4)


def test_everything_is_said_at_once():
    columns = table(weight=table()["weight"] * 1000, ward=["A"] * 58 + ["Z", None])
    columns["Outcome"] = columns.pop("outcome")
    with pytest.raises(DataError, match=r"4 findings") as caught:
        SCHEMA.rows(columns, intercept=True)
    for part in (
        "divided by 1000 they fit",
        "is missing in 1 of 60 rows, first in row 61",
        "unknown level 'Z' (1 row), first in row 60",
        "is 'Outcome' what is meant?",
    ):
        assert part in str(caught.value)


def test_a_column_in_another_unit_is_refused():
    found, *others = SCHEMA.check(table(weight=np.linspace(50_000, 110_000, N)))
    assert not others and found.refuses
    assert (found.column, found.code, found.rows[:2], len(found.rows)) == ("weight", "out_of_range", (0, 1), N)
    assert str(found) == "weight: 100% of values are above 250 kg; divided by 1000 they fit: another unit?"
    (found,) = words(table(weight=np.linspace(251, 299, N)))
    assert found.endswith("above 250 kg; first 251 in row 2: check unit and contract")


def test_some_values_out_of_range_name_the_first():
    weight = table()["weight"]
    weight[[3, 7]] = 20.0, 400.0
    (found,) = words(table(weight=weight))
    assert "1 of 60 values is below 30 kg, the lowest plausible value: 20 in row 5" in found
    assert "1 of 60 values is above 250 kg, the highest plausible value: 400 in row 9" in found


def test_codes_for_missing_values_are_recognised():
    weight = table()["weight"]
    weight[[3, 7, 9]] = 999.0
    (found,) = words(table(weight=weight))
    assert found.endswith("999 occurs 3 times: if it stands for a missing value, leave the cell empty")


@pytest.mark.parametrize(
    ("cell", "cure"),
    [
        ("70,5", "write decimal points, not commas"),
        ("2021-03-04", "turn dates into numbers"),
        ("<5", "a limit of detection is not a value"),
        ("70 kg", "leave units and remarks out of the cells"),
        ("unknown", "correct the cell, or leave it empty"),
    ],
)
def test_text_among_numbers_names_the_cell(cell, cure, tmp_path):
    path = tmp_path / "patients.csv"
    lines = [f"{60 + k}" for k in range(20)]
    lines[4] = f'"{cell}"'
    path.write_text("weight\n" + "\n".join(lines) + "\n")
    (found,) = words(read_columns(path), Schema(SCHEMA.features[:1]))
    assert found.startswith(f"weight: 1 of 20 cells is not a number: {cell!r} in row 6; {cure}")


def test_levels_are_compared_as_text(tmp_path):
    path = tmp_path / "patients.csv"
    path.write_text("smoker,sure\n0,TRUE\n1,FALSE\nNA,TRUE\n")
    schema = Schema((SCHEMA.features[2], Column("sure", "category", levels=(True, False))))
    assert words(read_columns(path), schema) == [
        "smoker: is missing in 1 of 3 rows, first in row 4; fill them in, or leave these rows out"
    ]


def test_a_level_in_other_letters():
    (found,) = words(table(outcome=["alive"] * 40 + ["Dead"] * 20))
    assert "unknown level 'Dead' (20 rows), first in row 42; the known ones are 'alive', 'dead'" in found
    assert found.endswith("is 'Dead' meant to be 'dead'?")


def test_constant_columns_are_remarks():
    findings = SCHEMA.check(table(weight=[70.0] * N, ward=["A"] * N))
    assert [(str(one), one.refuses) for one in findings] == [
        ("weight: is 70 in every row", False),
        ("ward: is 'A' in every row", False),
    ]
    assert SCHEMA.rows(table(weight=[70.0] * N), True).n_samples == N


def test_counts_are_whole_and_not_negative():
    schema = Schema((Column("x"),), Column("days", "count"), offset="log_time")
    columns = {"x": [1.0, 2.0, 3.0], "days": [1.0, 2.5, -1.0], "log_time": [0.0, 0.5, 0.0]}
    assert words(columns, schema) == [
        "days: 1 of 3 values is not whole, but counts are: 2.5 in row 3",
        "days: 1 of 3 values is below 0, the lowest plausible value: -1 in row 4",
    ]
    columns["days"] = [1.0, 2.0, 3.0]
    assert schema.rows(columns, True).offset.tolist() == [0, 0.5, 0]


def test_an_empty_table_is_refused():
    with pytest.raises(DataError, match="no rows"):
        Schema((Column("x"),)).rows({"x": []}, True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Column("x", low=2, high=1), "low"),
        (lambda: Column("x", scale=0.0), "scale"),
        (lambda: Column("x", levels=("a", "b")), "category"),
        (lambda: Column("x", "category", levels=("a",)), "at least two"),
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
    findings = schema.check(columns)
    assert [(one.column, one.refuses) for one in findings] == [("weight", False), ("ward", False), ("outcome", False)]
    assert str(findings[0]) == "weight: is missing in 1 of 60 rows, first in row 6; these rows are left out"
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
    gaps = np.arange(N) % 2 == 0
    with pytest.raises(DataError, match="no row is left"):
        schema.rows(table(weight=np.where(gaps, np.nan, 70.0), smoker=np.where(gaps, 1.0, np.nan)), True)


def test_a_table_of_several_sites():
    columns = table(hospital=["n", "s", "s"] * 20)
    fed = Federation.from_schema(columns, SCHEMA, site="hospital")
    assert fed.sites == ("n", "s")
    assert fed.feature_names == SCHEMA.names
    assert set(fed.y) == {"alive", "dead"}
    np.testing.assert_array_equal(fed.X[np.argsort(fed.row_order)], SCHEMA.encode(columns))
    with pytest.raises(DataError, match="hopital: there is no such column; is 'hospital' what is meant"):
        Federation.from_schema(columns, SCHEMA, site="hopital")
    columns["hospital"][3] = None
    with pytest.raises(DataError, match="belong to no site"):
        Federation.from_schema(columns, SCHEMA, site="hospital")


def test_cells_that_nobody_expects():
    schema = Schema((Column("x", low=0, high=100), Column("c", "category", levels=(0, 1))))
    fine = {"x": [Decimal("1.5"), "07", 3], "c": [True, False, True]}
    assert words(fine, schema) == []
    assert schema.encode(fine).tolist() == [[1.5, 1.0], [7.0, 0.0], [3.0, 1.0]]
    odd = {"x": [[1], {}, float("inf")], "c": [["a"], "1.0", date(2020, 1, 1)]}
    found = words(odd, schema)
    assert found[0].startswith("x: 3 of 3 cells are not numbers: [1] in row 2, {} in row 3, inf in row 4")
    assert found[1].startswith(
        "c: unknown level \"['a']\" (1 row), '1.0' (1 row), '2020-01-01' (1 row), first in row 2"
    )


class InBatches:
    """A table that is read seven rows at a time."""

    def __init__(self, columns):
        self.names, self._columns = list(columns), columns

    def batches(self, names):
        for start in range(0, N, 7):
            yield {name: self._columns[name][start : start + 7] for name in names}


@pytest.mark.parametrize("missing", ["drop", "mean", "indicator"])
def test_a_schema_inferred_in_batches_is_that_of_the_whole_table(missing):
    whole = columns_of(table(site=["a", "b"] * 30, one=np.ones(N), index=np.arange(N)))
    whole["dose"] = np.random.default_rng(1).normal(1e6, 1.0, N)
    whole["sum"] = whole["dose"] - 2.0 * whole["weight"]
    whole["weight"][[3, 40]], whole["ward"][55] = np.nan, None
    roles = Roles("site", "outcome", missing=missing)
    expected, found = infer_schema(TableInMemory(whole), roles), infer_schema(InBatches(whole), roles)
    assert found.schema == expected.schema and found.notes == expected.notes and found.filled == expected.filled
    assert found.kept.tolist() == expected.kept.tolist() and found.n_rows == N
    assert "one" not in found.schema.names and "index" not in found.schema.names
    assert ("sum" in found.schema.names) == (missing != "drop")  # means in gaps are no combination of the others
    with pytest.raises(DataError, match="column 'copy' is the target 'outcome' under another name"):
        infer_schema(InBatches({**whole, "copy": whole["outcome"]}), roles)
    words = {**whole, "dose": np.array([*whole["dose"][:-1], "oops"], dtype=object)}
    with pytest.raises(DataError, match=r"dose: 1 of \d+ cells is not a number: 'oops' in row 59 \(from 0\)"):
        infer_schema(InBatches(words), roles)
    with pytest.raises(DataError, match=r"cells are missing: 'weight' in 2 \(first in row 3 .*the 3 rows with a gap"):
        infer_schema(InBatches(whole), Roles("site", "outcome"))
