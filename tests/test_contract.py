"""Contracts: read with every mistake named, drafted, and fitted by; the same bytes for the same agreement."""

from __future__ import annotations

import re
import runpy
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec")
import msgspec

import fedkin
from fedkin.cli import main
from fedkin.data import Column, columns_of, read_columns
from fedkin.federate import Contract, ContractError, EdgeTests, Rounds, Thresholds, draft_contract
from fedkin.federate.draft import roughly
from fedkin.fitting import FitOptions

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
    assert contract.per_parameter(2.0).tolist() == [0, 2, 2, 2]  # the intercept has no ridge
    assert contract.thresholds == Thresholds(rows=10, rows_per_parameter=3, cell=3)
    rows = contract.prepare(columns())
    assert rows.X.shape == (60, 4)
    assert set(rows.y) == {0.0, 1.0}
    graded = read(loss=('"logistic"', '"multinomial"'), levels=('["no", "yes"]', '["none", "mild", "severe"]'))
    assert graded.parameter_names[3:5] == ("ward=C [mild]", "(intercept) [severe]")
    assert graded.per_parameter(1.0).tolist() == 2 * [0, 1, 1, 1]


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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lam = 0.01", "lamda = 0.01", r"line 18: unknown key 'lamda' in \[rounds\] \(did you mean 'lam'\?\)"),
        ("low = 18", 'low = "18"', r"line 7: features.age.low must be a number, got"),
        ("lam = 0.01", "lam = -1", r'line 18: rounds.lam must be "cv" or a number of at least 0, got -1'),
        ("lam = 0.01", 'lam = "auto"', 'line 18: rounds.lam must be "cv" or a number, got "auto"'),
        ('name = "death"', "", "line 13: target needs the name of a column"),
        ('["no", "yes"]', '["no", "yes", "lost"]', "2 classes, but the target has 3"),
        ('"logistic"', '"linear"', "predicts numbers"),
        ('"logistic"', '{name = "huber", delta = inf}', "delta of the huber loss must be a positive number"),
        ('name = "heart"', 'name = "a b"', "line 2: name must be at most 40 letters"),
        ("lam = 0.01", "batch_size = 0", "line 18: rounds.batch_size must be a whole number of at least 1, got 0"),
        ("lam = 0.01", 'placement = "central"\ngradient = "saga"', "keep no state"),
        ('name = "heart"', "name = heart", r"not valid TOML.*line 2"),
        ('name = "heart"', 'name = "heart"\nmethod = "fusd"', 'method must be "kin" or "fused", got "fusd"'),
        ('name = "heart"', 'name = "heart"\nridge = 0.1', 'ridge needs the fused.*set method = "fused"'),
        ('"no"', '"n\\u001b[2J"', "'n.*' has characters that change what a terminal shows"),
        ('name = "death"', 'name = "d\\u202e"', "'d.*' has characters that change what a terminal shows"),
    ],
)
def test_mistakes_are_named(old, new, message):
    with pytest.raises(ContractError, match=message) as caught:
        read(change=(old, new))
    assert str(caught.value).startswith("heart.toml")


def test_too_few_rows_and_rare_levels_are_refused():
    assert read().check(columns()) == []
    (finding,) = read().check(columns(11))
    assert "11 rows" in str(finding) and "12" in str(finding)  # 3 for each of 4 parameters
    (finding,) = read().check(columns(), Thresholds(rows=100))
    assert "60 rows" in str(finding) and "100" in str(finding)
    assert read().check(columns(11), Thresholds(rows=1, rows_per_parameter=0.0, cell=1))  # not laxer than the contract
    table = columns(8)
    table["age"][2] = 400.0
    del table["ward"]
    assert [one.column for one in read().check(table)] == ["age", "ward", ""]  # all at once
    table = columns()
    table["ward"][:] = "A"
    assert [one.refuses for one in read().check(table)] == [False]  # a remark: nobody in B and C
    table["ward"][:2] = "B"
    table["death"][:] = "no"
    table["death"][5] = "yes"
    assert [(one.column, one.refuses) for one in read().check(table)] == [("ward", True), ("death", True)]


def test_findings_of_all_sites_are_shown_and_those_of_every_site_once(tmp_path, capsys):
    table = columns()
    lines = ["site,age,ward,death"]
    lines += [f"{'nsw'[k // 20]},{a},{w},{d}" for k, (a, w, d) in enumerate(zip(*table.values(), strict=True))]
    lines[5], lines[30] = "n,17,A,no", "s,50,Z,no"
    (tmp_path / "heart.toml").write_text(HEART)
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    check = ["federation", "check", str(tmp_path / "heart.toml"), "--data", str(tmp_path / "all.csv")]
    assert main([*check, "--site", "site", "--json"]) == 2
    found = msgspec.json.decode(capsys.readouterr().out)["findings"]
    assert {(one["site"], one["column"]) for one in found if "line" in one["words"]} == {("n", "age"), ("s", "ward")}
    assert "line 6" in next(one["words"] for one in found if one["site"] == "n" and one["column"] == "age")
    (tmp_path / "all.csv").write_text((tmp_path / "all.csv").read_text().replace("age", "years"))
    assert main([*check, "--site", "site", "--json"]) == 2
    found = msgspec.json.decode(capsys.readouterr().out)["findings"]
    assert [one["site"] for one in found if one["column"] == "age"] == [None]


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


@pytest.mark.parametrize(
    "text",
    [
        HEART,
        HEART.replace('"logistic"', '{name = "huber", delta = 2.5}').replace('levels = ["no", "yes"]', ""),
        HEART.replace("lam = 0.01", "select = {level = 0.01}").replace("[features.age]", "[features.'a \"b\"']"),
        'name = "t"\nloss = "cox"\nintercept=false\nexposure = "a"\nfeatures.x = {}\ntarget = {name="t", event="d"}',
        'name = "m"\nloss = "mean"\nintercept = false\nfeatures.x = {}',
    ],
)  # fmt: skip
def test_a_contract_is_written_with_every_entry(text):
    contract = Contract.from_toml(text)
    assert Contract.from_toml(contract.to_toml()) == contract
    assert {"rounds", "thresholds", "missing", "folds"} <= set(tomllib.loads(contract.to_toml()))


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
    assert Contract.from_toml(text).n_params == 7
    entries = tomllib.loads(text)
    keys = set(keys_of_section("## What is fitted")) - {"exposure"}  # which stands in place of the offset
    assert set(entries) == {*keys, "features", "target", "thresholds", "rounds"}
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
        known |= {key: None for key in ("missing", "offset", "exposure")}  # of the schema
    assert set(told) == set(known)
    for key, field in known.items():
        if field is not None and told[key].startswith("`") and " " not in told[key]:
            assert tomllib.loads(f"x = {told[key].strip('`')}")["x"] == field.default
        elif field is not None and told[key] == "none":
            assert field.default is None


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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=12, max_size=40), st.integers(0, 3))
def test_the_example_fits_its_own_draft(values, seed):
    rng = np.random.default_rng(seed)
    n = len(values)
    table = columns_of({"x": values, "group": ["a", "b", "c"] * 4 + ["a"] * (n - 12), "y": rng.normal(size=n)})
    contract = Contract.from_toml(draft_contract(table, "trial", "y").text)
    assert [one for one in contract.schema.check(table) if one.refuses] == []


@pytest.mark.parametrize(("sd", "scale"), [(21.7, 20.0), (0.0149, 0.01), (9.7, 10.0)])
def test_a_drafted_scale_is_the_standard_deviation_with_one_digit(sd, scale):
    assert roughly(np.array([-sd, sd]))[1] == scale


def test_names_that_toml_must_quote():
    table = columns_of({'a "b" \\ c': np.arange(20.0), "ä.ö": ["n", "y"] * 10, "y": np.arange(20.0)})
    assert Contract.from_toml(draft_contract(table, "x").text).schema.names == ('a "b" \\ c', "ä.ö=y")


EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "heart"


def test_the_pooled_fit_prepares_rows_as_the_contract_says(tmp_path):
    runpy.run_path(str(EXAMPLE / "make_tables.py"))["main"](tmp_path, 40)
    tables = tmp_path
    options = f"--contract {EXAMPLE}/heart.toml --site hospital --out {tmp_path}/model --graph {tables}/graph.csv"
    assert main(["fit", f"{tables}/all.csv", *f"{options} --test-size 0 --lam 0.01 --select none".split()]) == 0
    model = fedkin.load(tmp_path / "model")
    contract = Contract.read(EXAMPLE / "heart.toml")
    columns = read_columns(tables / "all.csv")
    rows = contract.prepare(columns)
    prepared = fedkin.Federation.from_arrays(rows.X, rows.y, columns["hospital"])
    how = FitOptions(method="fused", lam=0.01, select="none", fit_intercept=False, standardize=False)
    same = fedkin.fit(prepared, fedkin.Graph.read(tables / "graph.csv", prepared.sites), how)
    ids = columns["hospital"].tolist()
    np.testing.assert_allclose(model.predict(columns, ids), same.predict(rows.X, ids), atol=1e-6)
    assert model.schema == contract.schema
    assert model.groups.tolist() == same.groups.tolist()
    assert model.options["site_column"] == "hospital"


@pytest.mark.parametrize(
    ("typed", "says", "asks"),
    [("--sparsity 0.5", "sparsity = 0.0", "0.5"), ("--ridge 2", "ridge = 0.0", "2.0"), ("--seed 9", "seed = 0", "9")],
)
def test_typed_options_that_differ_from_the_contract_are_refused(tmp_path, capsys, typed, says, asks):
    runpy.run_path(str(EXAMPLE / "make_tables.py"))["main"](tmp_path, 40)
    options = f"--contract {EXAMPLE}/heart.toml --site hospital --out {tmp_path}/model {typed}".split()
    assert main(["fit", f"{tmp_path}/all.csv", *options]) == 2
    found, name = " ".join(capsys.readouterr().err.split()), typed.split()[0]
    assert f"it says {says}, but {name} asks for {asks}: leave {name} out" in found
    assert not (tmp_path / "model").exists()
