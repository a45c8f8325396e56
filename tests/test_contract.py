"""Contracts: read with every mistake named, the same bytes for the same agreement, thresholds that refuse."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("msgspec")
import msgspec

from fedkin.data import Column
from fedkin.federate import Contract, ContractError, EdgeTests, Rounds, Thresholds

HEART = """
name = "heart"
loss = "logistic"

[features.age]
unit = "years"
low = 18
high = 110

[features.ward]
levels = ["A", "B", "C"]

[target]
name = "death"
levels = ["no", "yes"]

[rounds]
lam = 0.01
"""


def read(text=HEART, **changed):
    for old, new in changed.values():
        assert old in text
        text = text.replace(old, new)
    return Contract.from_toml(text, "heart.toml")


def columns(n=60):
    rng = np.random.default_rng(1)
    return {
        "age": rng.uniform(20, 90, n),
        "ward": rng.choice(["A", "B", "C"], n).astype(object),
        "death": rng.choice(["no", "yes"], n).astype(object),
    }


def test_what_a_contract_says():
    contract = read()
    assert contract.parameter_names == ("(intercept)", "age", "ward=B", "ward=C")
    assert contract.n_params == 4
    assert contract.schema.classes == ("no", "yes")
    assert contract.loss_object().name == "logistic"
    assert contract.rounds.lam == 0.01
    assert contract.thresholds == Thresholds(rows=10, rows_per_parameter=3, cell=3)
    assert contract.radius == 1000
    rows = contract.prepare(columns())
    assert rows.X.shape == (60, 4)
    assert set(rows.y) == {0.0, 1.0}


def test_the_same_agreement_has_the_same_digest():
    other = read(
        numbers=("low = 18\nhigh = 110", "high = 110.0\nlow = 18.0"),
        loss=('loss = "logistic"', 'loss = {name = "logistic"}'),
    )
    assert other.to_bytes() == read().to_bytes()
    assert other.digest == read().digest
    assert read(lam=("0.01", "0.02")).digest != read().digest
    assert Contract.from_bytes(read().to_bytes()) == read()
    plain = 'name = "h"\nloss = {}\nfeatures.x = {{}}\ntarget.name = "y"'
    losses = ('{name = "huber", delta = 2}', '{name = "huber", delta = 2.0}', '"huber"')
    two, same, default = (Contract.from_toml(plain.format(loss)).digest for loss in losses)
    assert two == same != default


def test_more_than_two_classes():
    contract = read(loss=('"logistic"', '"multinomial"'), levels=('["no", "yes"]', '["none", "mild", "severe"]'))
    assert contract.n_params == 8
    assert contract.parameter_names[:5] == (
        "(intercept) [mild]",
        "age [mild]",
        "ward=B [mild]",
        "ward=C [mild]",
        "(intercept) [severe]",
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("high = 110", "hihg = 110", r"line 8: unknown key 'hihg' in \[features.age\] \(did you mean 'high'\?\)"),
        ("lam = 0.01", "lamda = 0.01", r"line 18: unknown key 'lamda' in \[rounds\] \(did you mean 'lam'\?\)"),
        ("low = 18", 'low = "18"', r"line 7: features.age.low: Expected `float.*got `str`"),
        ("lam = 0.01", "lam = -1", r"line 18: rounds.lam: Expected `float` >= 0"),
        ("low = 18", "low = 180", r"line 5: features.age: column 'age': low \(180\) must be less than high \(110\)"),
        ('"logistic"', '"logstic"', r"line 3: unknown loss 'logstic' \(did you mean 'logistic'\?\)"),
        ('name = "death"', "", "line 13: target needs the name of a column"),
        ('["no", "yes"]', '["no", "yes", "lost"]', "2 classes, but the target has 3"),
        ('"logistic"', '"linear"', "predicts numbers"),
        ('name = "heart"', 'name = "a b"', "line 2: name: Expected"),
        ("lam = 0.01", "batch_size = 4", "fewer than 10 rows"),
        ("lam = 0.01", 'placement = "central"\ngradient = "saga"', "keep no state"),
        ('name = "heart"', "name = heart", r"not valid TOML.*line 2"),
        ('name = "heart"', 'name = "heart"\nmethod = "fusd"', "method"),
        ('name = "heart"', 'name = "heart"\nridge = 0.1', 'ridge is of the fused.*set method = "fused"'),
    ],
)
def test_mistakes_are_named(old, new, message):
    with pytest.raises(ContractError, match=message) as caught:
        read(change=(old, new))
    assert str(caught.value).startswith("heart.toml")


def test_all_mistakes_are_said_at_once():
    with pytest.raises(ContractError) as caught:
        read(a=("high = 110", "hihg = 110"), b=("lam = 0.01", "lamda = 1"), c=("low = 18", "low = true"))
    assert "hihg" in str(caught.value)
    assert "lamda" in str(caught.value)


def test_too_few_rows_are_refused():
    assert read().check(columns()) == []
    (finding,) = read().check(columns(11))
    assert str(finding) == "11 rows, but at least 12 are needed (3 for each of 4 parameters)"
    (finding,) = read().check(columns(), Thresholds(rows=100))
    assert str(finding) == "60 rows, but at least 100 are needed"
    assert read().check(columns(11), Thresholds(rows=1, rows_per_parameter=0.0, cell=1))  # not laxer than the contract
    table = columns(8)
    table["age"][2] = 400.0
    del table["ward"]
    assert [one.column for one in read().check(table)] == ["age", "ward", ""]  # all at once


def test_rare_levels_are_refused():
    table = columns()
    table["ward"][:] = "A"
    assert [one.refuses for one in read().check(table)] == [False]  # a remark: nobody in B and C
    table["ward"][:2] = "B"
    table["death"][:] = "no"
    table["death"][5] = "yes"
    found = [str(one) for one in read().check(table)]
    assert found[0].startswith("ward: only 2 rows with 'B', but at least 3 (or none) are needed")
    assert found[1].startswith("death: only 1 row with 'yes'")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ContractError, match="No such file"):
        Contract.read(tmp_path / "heart.toml")
    with pytest.raises(ContractError, match="directory"):
        Contract.read(tmp_path)


def test_bytes_that_are_no_contract():
    text = read().to_bytes()
    with pytest.raises(ContractError):
        Contract.from_bytes(text[:-5])
    with pytest.raises(ContractError, match="high"):
        Contract.from_bytes(text.replace(b'"high":110.0', b'"high":10.0'))
    for inferred in (b'"agreed":false,', b'"fill":[1.0],', b'"indicators":["age"],'):
        with pytest.raises(ContractError, match=r"does not know|not agreed on"):
            Contract.from_bytes(text.replace(b'"schema":{', b'"schema":{' + inferred))
    with pytest.raises(ContractError, match="folds"):
        Contract.from_bytes(text.replace(b'"folds":5', b'"folds":1'))


def test_any_flipped_bit_is_noticed_or_changes_the_digest():
    text = read().to_bytes()
    for at in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[at // 8] ^= 1 << at % 8
        try:
            other = Contract.from_bytes(bytes(flipped))
        except ContractError:
            continue
        assert other.digest != read().digest


# --- the page ---------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "contract.md").read_text(encoding="utf-8")
STRUCTS = {
    "## Thresholds": Thresholds,
    "## Rounds": Rounds,
    "`[rounds.select]`:": EdgeTests,
    "## What is fitted": Contract,
}


def keys_of_section(title):
    section = PAGE.partition(f"\n{title}\n")[2]
    section = re.split(r"\n## |\n`\[rounds.select\]`:\n", section)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))


def test_the_example_of_the_page_has_every_key():
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert Contract.from_toml(text).n_params == 5
    entries = tomllib.loads(text)
    assert set(entries) == {*keys_of_section("## What is fitted"), "features", "target", "thresholds", "rounds"}
    assert set(entries["rounds"]) == set(Rounds.__struct_fields__)
    assert set(entries["rounds"]["select"]) == set(EdgeTests.__struct_fields__)
    assert set(entries["thresholds"]) == set(Thresholds.__struct_fields__)
    used = set().union(*entries["features"].values())
    assert used == set(keys_of_section("## Columns")) == {item.name for item in fields(Column)} - {"name"}


@pytest.mark.parametrize("title", STRUCTS)
def test_the_page_has_every_key_with_its_default(title):
    struct = STRUCTS[title]
    told = keys_of_section(title)
    known = {one.name: one for one in msgspec.structs.fields(struct)}
    if struct is Contract:
        for key in ("schema", "thresholds", "rounds"):
            del known[key]
        known |= {key: None for key in ("missing", "offset")}  # of the schema
    assert set(told) == set(known)
    for key, field in known.items():
        if field is not None and told[key].startswith("`") and " " not in told[key]:
            assert tomllib.loads(f"x = {told[key].strip('`')}")["x"] == field.default
        elif field is not None and told[key] == "none":
            assert field.default is None


def test_the_example_file_is_a_contract():
    path = Path(__file__).resolve().parent.parent / "examples" / "heart" / "heart.toml"
    assert Contract.read(path).parameter_names[-1] == "smoker=yes"
