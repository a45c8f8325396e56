"""The disclosure gate: attacks on what leaves a site, which work without it and fail with it.

Where each finding of the hostile trial is tested:

- D1 crafted queries: `test_a_thousand_crafted_queries...`, `test_a_crafted_query_is_refused...`, `test_gradients_of...`
- D2 lost keys: test_hostile_links.py, test_trust.py
- D3 privacy: test_ledger.py, `test_after_noise_nothing_exact_leaves...`, `test_shape_and_refusals...`, the audits
- D4 impossible summaries: test_received.py
- D5 hard minima: `test_no_contract_lowers_the_hard_minima...`
- D6 combinations of columns: `test_two_columns_that_differ_in_one_row...`
- D7 one gate: `test_pairs_of_categories_are_cells_and_rounds_ask_the_same_gate`
- D8 rows that change: test_ledger.py, `test_another_directory_or_lost_files...`
- D9 neighbours in rounds: test_privacy.py, `test_a_neighbour_learns_the_products...` (stated, not prevented)
- D10 rows that change in a run: test_ledger.py, `test_rows_that_change_in_the_middle_of_a_run_are_refused`
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest

import heart
from fedkin.cli import main
from fedkin.core import Query, local_fit
from fedkin.data import Federation, Rows
from fedkin.errors import DataError
from fedkin.federate import Contract, ContractError, Site, SiteSettings, sharing, site_plan
from fedkin.federate.disclosure import check_disclosure, check_point, check_query

N, Q = 80, 5
FEATURES = """\
intercept = true
[features]
age = {low = 20, high = 100, mean = 60, scale = 15}
pressure = {low = 60, high = 240, mean = 140, scale = 20}
weight = {low = 30, high = 250, mean = 80, scale = 15}
height = {low = 100, high = 250, mean = 170, scale = 10}
"""
TARGETS = {
    "logistic": '[target]\nname = "y"\nlevels = ["no", "yes"]\n',
    "poisson": '[target]\nname = "y"\nkind = "count"\n',
    "huber": '[target]\nname = "y"\n',
    "multinomial": '[target]\nname = "y"\nlevels = ["a", "b", "c"]\n',
    "negbinomial": '[target]\nname = "y"\nkind = "count"\n',
    "gamma": '[target]\nname = "y"\n',
    "cox": '[target]\nname = "y"\nevent = "died"\n',
}


def patients(loss: str, seed: int = 0) -> tuple[Contract, Rows]:
    """A contract, and the prepared rows of a site that fit it."""
    features = FEATURES if loss != "cox" else FEATURES.replace("= true", "= false")
    contract = Contract.from_toml(f'name = "heart"\nloss = "{loss}"\n' + features + TARGETS[loss])
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(N), rng.normal(size=(N, Q - 1)).round(3)])
    eta = X @ [0.2, 0.5, -0.4, 0.3, 0.0]
    y = {
        "logistic": (rng.random(N) < 1 / (1 + np.exp(-eta))).astype(float),
        "poisson": rng.poisson(np.exp(eta)).astype(float),
        "huber": eta + rng.normal(size=N),
        "multinomial": rng.integers(0, 3, N).astype(float),
        "negbinomial": rng.poisson(np.exp(eta) * rng.gamma(2.0, 0.5, N)).astype(float),
        "gamma": np.exp(eta) * rng.gamma(2.0, 0.5, N),
        "cox": rng.exponential(np.exp(-eta)) * np.where(rng.random(N) < 0.6, 1.0, -1.0),
    }[loss]
    return contract, Rows(X if contract.intercept else X[:, 1:], y)


def estimate(contract: Contract, rows: Rows) -> np.ndarray:
    return local_fit(Federation({0: rows}), contract.loss_object()).theta[0]


def attacks(loss: str, rows: Rows, rng: np.random.Generator, targeted: bool) -> np.ndarray:
    """A point at which few rows have weight: steep in one column, at a value that is guessed, or known to be there."""
    slope = 10.0 ** rng.uniform(0.5, 6.0)
    if loss == "cox":  # somebody has nearly all of the hazard
        return slope ** rng.uniform(0.0, 0.3) * (rows.X[rng.integers(N)] if targeted else rng.normal(size=Q - 1))
    k = rng.integers(1, Q)
    value = rows.X[rng.integers(N), k] if targeted else rng.normal()
    theta = np.zeros(Q)
    theta[k], theta[0] = slope, -slope * value
    if loss in ("poisson", "negbinomial", "gamma"):
        theta[k], theta[0] = np.sign(value) * slope, -slope * abs(value)
        return theta * 10.0 ** -rng.uniform(0, 5)
    return theta if loss != "multinomial" else np.concatenate([theta, rng.choice([-1.0, 0.0, 1.0]) * theta])


def recovered(rows: Rows, sums: list[np.ndarray]) -> set[int]:
    """The rows that are some answer's first line, or the difference of two, to 1% of each column's spread.

    Without an intercept those whose difference from another row is the only direction of an answer, to 1%: where two
    rows have all the hazard, so it is for the Cox loss.
    """
    newest, *earlier = sums
    found: set[int] = set()
    if rows.X.shape[1] < Q:
        values, vectors = np.linalg.eigh(newest)
        if values[-1] > 0.999 * values.sum() > 0:
            apart = rows.X[:, None] - rows.X
            along = apart @ vectors[:, -1]
            near = np.linalg.norm(apart - along[:, :, None] * vectors[:, -1], axis=2) < 0.01 * np.abs(along)
            found |= set(np.flatnonzero(near.any(axis=1)).tolist())
        return found
    for matrix in (newest, *(newest - one for one in earlier)):
        for start in range(0, len(matrix), Q):
            line = matrix[start, start : start + Q]
            if abs(line[0]) > 0:
                found |= set(np.flatnonzero((np.abs(rows.X - line / line[0]) < 0.01).all(axis=1)).tolist())
    return found


@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("loss", list(TARGETS))
def test_a_thousand_crafted_queries_recover_no_row(loss: str, targeted: bool) -> None:
    contract, rows = patients(loss)
    function, own, rng = contract.loss_object(), estimate(contract, rows), np.random.default_rng(1)
    leaked: set[int] = set()
    kept: set[int] = set()
    for _ in range(1000 // 11):
        known, sums = [own], [function.hessian(own, *rows.arrays)]
        for _ in range(11):  # as many as the contract allows
            theta = attacks(loss, rows, rng, targeted)
            with np.errstate(all="ignore"):
                matrix = function.hessian(theta, *rows.arrays)
            if np.isfinite(matrix).all():
                leaked |= recovered(rows, [matrix, *sums])
            if not check_query(contract, rows, theta, known):
                kept |= recovered(rows, [matrix, *sums])
                known.append(theta)
                sums.append(matrix)
    assert len(leaked) >= 5  # the attack works where nothing is checked
    assert kept == set()


@pytest.mark.parametrize("loss", [loss for loss in TARGETS if loss != "huber"])
def test_queries_of_an_honest_fit_are_answered(loss: str) -> None:
    """As an organiser asks them: around the estimate, ever closer, and at the estimate of another site."""
    contract, rows = patients(loss)
    own, rng = estimate(contract, rows), np.random.default_rng(2)
    other = estimate(*patients(loss, seed=5))
    known = [own]
    for step in (None, 0.5, 0.1, 1e-2, 1e-4, 1e-6, 1e-9):
        theta = other if step is None else other + step * rng.normal(size=own.size)
        assert check_query(contract, rows, theta, known) == []
        known.append(theta)


def test_sums_of_folds_and_many_answers_count_in_what_was_sent_before() -> None:
    contract, rows = patients("logistic")
    own, rng = estimate(contract, rows), np.random.default_rng(3)
    alone = (np.arange(N) > 0).astype(np.int64)  # a fold of one row: what is left of it in a difference
    assert check_query(contract, rows, own + 0.1, [own]) == []
    (found,) = check_query(contract, rows, own + 0.1, [own], fold_of=alone)
    assert found.code == "query_difference"
    known = [own, *(own + 0.3 * rng.normal(size=Q) for _ in range(30))]
    (found,) = check_query(contract, rows, own + 0.1, known)
    assert found.code == "query_many" and "rows have only 400" in str(found)


def test_gradients_of_several_answers_single_nobody_out() -> None:
    """Who knows all ages asks along age alone, and combines gradients, whose weights he can work out, to one row's."""
    contract, rows = patients("logistic")
    own, loss, rng = estimate(contract, rows), contract.loss_object().rowwise, np.random.default_rng(0)
    assert loss is not None

    def recovered_from(asked: list[np.ndarray]) -> int:
        expected = np.stack([loss.response(loss.predictors(one, rows.X)) for one in asked], axis=1)
        weights = np.hstack([expected[:, 1:] - expected[:, :1], expected * (1 - expected)])  # y is not known
        sums = weights.T @ rows.X
        guesses = [np.linalg.lstsq(weights, alone, rcond=None)[0] @ sums for alone in np.eye(N)]
        return sum(bool((np.abs(guess - row) < 0.01).all()) for guess, row in zip(guesses, rows.X, strict=True))

    found = np.zeros(3, dtype=np.int64)
    for _ in range(4):
        known, alone = [own], [own]  # what is answered, and what would be if each answer were the first
        while len(alone) < 12:
            at, slope = rng.uniform(-3.5, 2.5), rng.uniform(1.0, 9.0)
            theta = np.array([-slope * at, slope, 0.0, 0.0, 0.0])
            if not check_query(contract, rows, theta, [own]):
                alone.append(theta)
                if not check_query(contract, rows, theta, known):
                    known.append(theta)
        found += len(known) - 1, recovered_from(alone[1:]), recovered_from(known[1:])
    answered, leaked, kept = found.tolist()
    assert answered > 12 and leaked > 0 == kept


def test_sums_over_few_events_and_risk_sets_of_few_rows_are_refused() -> None:
    contract, rows = patients("cox")
    assert check_disclosure(contract, rows) == []
    assert rows.y is not None
    time = np.abs(rows.y)
    few = Rows(rows.X, np.where(np.arange(N) < 9, time, -time))
    (found,) = check_disclosure(contract, few)
    assert found.code == "few_events" and "only 9 events" in str(found)
    (found, *_) = check_disclosure(contract, rows, site="a", folds=8)
    assert "in fold" in str(found)
    # all but three are gone before the first event, and one of these is the last
    late = Rows(rows.X, np.where(np.arange(N) < 3, 10.0 + np.arange(N), -time))
    (found,) = check_point(contract, late, np.zeros(Q - 1))
    assert found.code == "concentrated" and "rows in effect" in str(found)


def test_an_estimate_at_which_one_row_has_the_weight_is_not_shared() -> None:
    """Nearly separable classes: at the estimate only the rows at the border say anything."""
    contract, rows = patients("logistic")
    theta, fold_of = np.array([0.0, 1.0, 0.0, 0.0, 0.0]), np.arange(N) % 4
    assert check_point(contract, rows, theta, fold_of=fold_of) == []
    assert [one.code for one in check_point(contract, rows, 3e4 * theta)] == ["concentrated"]
    assert check_point(contract, rows, 8.0 * theta) == []
    assert "in fold" in str(check_point(contract, rows, 8.0 * theta, fold_of=fold_of)[0])


# --- rows that sums single out ------------------------------------------------------------------------------------


LINEAR = 'name = "heart"\nloss = "linear"\n' + FEATURES + '[target]\nname = "y"\n'


def table(n: int = 60, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    columns = {name: (mean + scale * rng.normal(size=n)).round(2) for name, mean, scale in
               (("age", 60, 8), ("pressure", 140, 15), ("weight", 80, 10), ("height", 170, 8))}  # fmt: skip
    return {**columns, "y": rng.normal(size=n).round(3)}


def refusals(columns: dict[str, np.ndarray], thresholds: str = "", own: SiteSettings | None = None) -> str:
    text = LINEAR + thresholds
    contract = Contract.from_toml(text)
    return "\n".join(map(str, check_disclosure(contract, contract.prepare(columns), own)))


def test_no_contract_lowers_the_hard_minima_and_a_custodian_does_it_by_name() -> None:
    """Three rows, from which the organiser could work out seven numbers, were shared where a contract said so."""
    lax = "[thresholds]\nrows = 1\nrows_per_parameter = 0\ncell = 1\neffective_rows = 1\n"
    few = {name: cells[:3] for name, cells in table().items()}
    assert "3 rows, but at least 10 are needed (2 for each of 5 parameters)" in refusals(few, lax)
    contract = Contract.from_toml(LINEAR + lax)
    assert not refusals(few, lax, SiteSettings.from_contract(contract, below_minima=True))


def test_two_columns_that_differ_in_one_row_and_a_column_that_few_rows_have_are_refused() -> None:
    assert refusals(table()) == ""
    twins = table()
    twins["pressure"] = 2 * twins["weight"]
    twins["pressure"][7] += 3.0  # pressure - 2 weight is this patient's, and nobody else's
    assert re.search("one row makes up .* along .*(pressure|weight)", refusals(twins))
    rare = table()
    rare["height"] = np.full(60, 170.0)
    rare["height"][[3, 9]] = 171.0, 172.0
    assert re.search("only 2 rows make up .* along .*height", refusals(rare))
    giant = table()
    giant["weight"] = np.full(60, 80.0) + np.random.default_rng(0).normal(size=60).round(2) * 0.01
    giant["weight"][5] = 240.0
    assert "one row makes up" in refusals(giant)


RARE = FEATURES.replace("intercept = true\n", "")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ('"linear"\noffset = "flag"', "along the offset"),
        ('"poisson"', "along the target"),
        ('"negbinomial"', "along the target"),
        ('{name = "huber", delta = 0.1}', "of a difference of sums"),
    ],
)
def test_a_flag_that_one_patient_has_is_no_offset_and_no_target(loss: str, words: str, tmp_path: Path) -> None:
    """The first gradient (of an offset), or less the first line of the Hessian, was the patient's row."""
    target = "nothing" if "linear" in loss else "flag"
    kind = 'kind = "count"\n' if target == "flag" and "huber" not in loss else ""
    made = heart.organiser(tmp_path, f'name = "heart"\nloss = {loss}\n{RARE}[target]\nname = "{target}"\n{kind}')
    rng = np.random.default_rng(0)
    lines = [",".join(map(str, [*rng.uniform([30, 90, 50, 150], [90, 150, 100, 200]).round(2), int(k == 7), 0]))
             for k in range(100)]  # fmt: skip
    (tmp_path / "t.csv").write_text("age,pressure,weight,height,flag,nothing\n" + "\n".join(lines) + "\n")
    with pytest.raises(DataError, match=words):
        done, _ = Site.join(heart.invite_of(made, "north"), tmp_path / "t.csv", tmp_path / "north")
        done.accept(made.admit(done.request).path)
        sharing.share(done.directory)


def curved(knots: list[float], older: int = 1) -> str:
    """What the gate says of a table in which ``older`` patients are 63, one of them in ward B."""
    text = heart.CONTRACT.replace('age = {unit = "years",', f"age = {{knots = {knots},")
    rng = np.random.default_rng(0)
    age = rng.permutation(np.repeat(np.delete(np.arange(40, 90), 23), 3)).astype(float)
    ward = np.array(["A", "B", "C"])[np.arange(age.size) % 3]
    age[3 * np.arange(older)], ward[0] = 63.0, "B"
    contract = Contract.from_toml(text)
    rows = contract.prepare({"age": age, "ward": ward, "days": rng.uniform(1, 20, age.size)})
    return "\n".join(map(str, check_disclosure(contract, rows)))


@pytest.mark.parametrize("apart", [0.3, 1e-4, 1e-8])
def test_knots_about_one_age_single_nobody_out(apart: float) -> None:
    """With 1e-8 the gate took the direction for rounding, and products of columns gave six digits of the row."""
    narrow = [63 + apart * k for k in range(-2, 3)]
    assert "only 1 row with '63'" in curved(narrow)
    assert "only 1 row with '63' and ward 'B'" in curved(narrow, 5)
    step = [62.1 + 0.8 * apart * k for k in range(4)]
    assert "at most" not in curved(step)  # both sides have many rows of every ward
    assert "with 'at most 40'" in curved([40.1 + 0.8 * apart * k for k in range(4)])
    assert curved([45, 55, 65, 75, 85]) == curved([45, 65, 85]) == ""


@pytest.mark.parametrize("knots", [[-1e300, 0.0, 1e300], [0.0, 1e-300, 2e-300], [1.0, 1 + 1e-12, 2.0], range(101)])
def test_absurd_knots_are_refused_with_the_contract(knots: list[float]) -> None:
    with pytest.raises(ContractError, match=r"too large, or nearer|101 knots, expected 100 at most"):
        curved([float(knot) for knot in knots])


def test_pairs_of_categories_are_cells_and_rounds_ask_the_same_gate(tmp_path: Path) -> None:
    text = heart.CONTRACT.replace('"C"]}', '"C"]}\nsmoker = {levels = ["no", "yes"]}')
    made = heart.organiser(
        tmp_path,
        text.replace("[features]", 'method = "fused"\n[features]') + "[thresholds]\npair = 3\n[rounds]\nlam = 0.1\n",
    )
    rng = np.random.default_rng(0)
    lines = [f"{rng.uniform(30, 90):.2f},{'ABC'[k % 3]},{'no' if k % 2 else 'yes'},{rng.uniform(1, 9):.2f}" for k in
             range(60)]  # fmt: skip
    (tmp_path / "t.csv").write_text("age,ward,smoker,days\n" + "\n".join(lines) + "\n")
    done, _ = Site.join(heart.invite_of(made, "north"), tmp_path / "t.csv", tmp_path / "north")
    done.accept(made.admit(done.request).path)
    rows = done.rows()
    smokes_in_b = np.flatnonzero((rows.X[:, 2] == 1) & (rows.X[:, 4] == 1))
    kept = np.setdiff1d(np.arange(60), smokes_in_b[1:])  # one smoker in ward B is left
    rows.take(kept).save(done.directory / "rows.npz")
    words = "only 1 row with 'B' and smoker 'yes'"
    with pytest.raises(DataError, match=f"(?s)nothing is shared.*{words}"):
        sharing.share(done.directory)
    with pytest.raises(DataError, match=f"(?s)no rounds.*{words}"):
        site_plan(done.directory)


# --- queries --------------------------------------------------------------------------------------------------------


LOGISTIC = heart.CONTRACT.replace('"linear"', '"logistic"').split("[target]")[0] + (
    '[target]\nname = "died"\nlevels = ["no", "yes"]\n'
)


def test_a_crafted_query_is_refused_by_name_and_an_answer_has_no_folds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = heart.organiser(tmp_path, LOGISTIC)
    rng = np.random.default_rng(0)
    lines = [f"{age:.2f},{'ABC'[k % 3]},{'no' if rng.random() < 0.5 else 'yes'}" for k, age in
             enumerate(rng.uniform(30, 90, 100))]  # fmt: skip
    (tmp_path / "t.csv").write_text("age,ward,died\n" + "\n".join(lines) + "\n")
    done, _ = Site.join(heart.invite_of(made, "north"), tmp_path / "t.csv", tmp_path / "north")
    done.accept(made.admit(done.request).path)
    shared = sharing.share(done.directory)
    assert (shared.summary.count[:-1] > 0).any()
    age = Site.read(done.directory).rows().X[7, 1]
    path = made.directory / "asks" / "north@2.ask"
    for slope, words in ((3e6, "outside the contract's ball"), (900.0, "mean loss"), (30.0, "mean loss|in effect")):
        made.write_queries([Query("north", 2, np.array([-slope * age, slope, 0, 0]), np.zeros(4))], {})
        with pytest.raises(DataError, match=rf"(?s)north@2\.ask is not answered.*({words})"):
            sharing.answer(done.directory, path)
    assert not (done.directory / "sent" / "north@2.summary").exists()
    made.write_queries([Query("north", 2, shared.summary.at + 0.1, np.zeros(4))], {})
    sent = done.directory / "sent" / "north@2.summary"
    for word, code in (("n\n", 1), ("y\n", 0)):
        monkeypatch.setattr("sys.stdin", io.StringIO(word))
        assert main(["site", "answer", str(done.directory), str(path)]) == code
        assert sent.exists() == (code == 0)
    answer = sharing.answer(done.directory, path).summary
    assert answer.count.tolist() == [0] * 5 + [100]
