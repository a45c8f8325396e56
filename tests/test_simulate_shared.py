"""``fedkin federation simulate --by share``: one message of every site, or a few, each from another process."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import heart
from fedkin.cli import main
from fedkin.fitting import load

pytestmark = pytest.mark.processes

CONTRACT = """name = "ward"
loss = "linear"
{penalty}
[features]
age = {{unit = "years", low = 18, high = 110, mean = 60, scale = 10}}
dose = {{mean = 0, scale = 1}}
[target]
{target}
"""
FUSED = 'method = "fused"\npenalty = "l2"'
DAYS = 'name = "days"'
DIED = 'name = "died"\nkind = "category"\nlevels = ["no", "yes"]'


def write_tables(folder: Path, rows: int = 120) -> None:
    """Two kinds of sites, which answer to ``dose`` in two ways, in one table."""
    rng = np.random.default_rng(3)
    lines = ["site,age,dose,days,died"]
    for k, name in enumerate(heart.SITES):
        age, dose = rng.uniform(30, 90, rows).round(2), rng.normal(size=rows).round(4)
        eta = 0.03 * (age - 60) + (1.5 if k < 2 else -1.5) * dose
        died = np.where(rng.random(rows) < 1 / (1 + np.exp(-eta)), "yes", "no")
        days = (20 + 2 * eta + rng.normal(size=rows)).round(4)
        lines += [f"{name},{a},{d},{y},{c}" for a, d, y, c in zip(age, dose, days, died, strict=True)]
    (folder / "all.csv").write_text("\n".join(lines) + "\n")


def simulate(folder: Path, contract: str, *more: str) -> int:
    (folder / "ward.toml").write_text(contract)
    table, out = str(folder / "all.csv"), str(folder / "trial")
    words = ["federation", "simulate", str(folder / "ward.toml"), "--data", table, "--site", "site", "--out", out]
    return main([*words, *more])


def test_one_message_ends_with_a_model_at_each_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(tmp_path)
    contract = CONTRACT.format(penalty="", target=DAYS)
    assert simulate(tmp_path, contract) == 0
    said = capsys.readouterr().out
    for words in (
        "summaries of 4 sites, 480 rows that stayed there",
        "messages  1 of every site",
        "2 groups",
        "Local",
    ):
        assert words in said
    trial = tmp_path / "trial"
    whole = load(trial / "model")
    assert sorted(whole.members()) == sorted([tuple(heart.SITES[:2]), tuple(heart.SITES[2:])])
    row = np.array([[70.0, 1.0]])
    for name in heart.SITES:
        own = load(trial / "sites" / name / "model")
        assert own.sites == (name,)
        assert own.predict(row, [name]) == pytest.approx(whole.predict(row, [name]), rel=1e-12)
    # nothing of the table stays but what each site holds, and the organiser holds no rows
    assert not list(trial.rglob("*.csv.tmp")) and not list((trial / "sites").glob("*.csv"))
    assert not list((trial / "organiser").rglob("rows*"))
    # the fit of pooled rows is the same
    arguments = ["--contract", str(tmp_path / "ward.toml"), "--site", "site", "--test-size", "0"]
    assert main(["fit", str(tmp_path / "all.csv"), *arguments, "--out", str(tmp_path / "pooled")]) == 0
    np.testing.assert_allclose(whole.coef, load(tmp_path / "pooled").coef, atol=1e-8)
    # cut short before the models were delivered, the same command continues: no site shares again
    sent = {path: path.stat().st_mtime_ns for path in trial.rglob("*.summary")}
    shutil.rmtree(trial / "sites" / heart.SITES[0] / "model")
    assert simulate(tmp_path, contract) == 0
    assert {path: path.stat().st_mtime_ns for path in trial.rglob("*.summary")} == sent and len(sent) == 8
    assert (trial / "sites" / heart.SITES[0] / "model").is_dir()


def test_questions_are_asked_until_the_gap_is_certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(tmp_path)
    contract = CONTRACT.format(penalty=FUSED, target=DIED).replace('"linear"', '"logistic"')
    assert simulate(tmp_path, contract) == 0
    said = capsys.readouterr().out
    asked = [int(number) for number in re.findall(r"4 sites answered question (\d+)", said)]
    assert asked == list(range(2, asked[-1] + 1)) and f"messages  {asked[-1]} of every site" in said
    assert "No model yet" not in said
    model = load(tmp_path / "trial" / "model")
    assert model.status == "converged" and model.fused.gap < 1e-6
    assert len(list((tmp_path / "trial" / "organiser" / "summaries").iterdir())) == 4 * asked[-1]


def test_what_goes_wrong_at_a_site_is_said_in_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(tmp_path, rows=30)
    contract = CONTRACT.format(penalty="", target=DAYS)
    assert simulate(tmp_path, contract, "--lam", "0.1") == 2
    assert "--lam is for rounds" in capsys.readouterr().err
    assert simulate(tmp_path, contract.replace("high = 110", "high = 40")) == 2
    said = capsys.readouterr().err
    assert f"the rows of '{heart.SITES[0]}'" in said and "age" in said and "Traceback" not in said
    assert not (tmp_path / "trial").exists()
