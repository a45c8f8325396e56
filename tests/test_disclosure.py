"""The disclosure gate: attacks on what leaves a site, which work without it and fail with it.

Where each finding of the hostile trial is tested:

- D1 crafted queries: `test_a_thousand_crafted...`, `test_a_crafted_query_...`, `..._three_patients_...`
- D2 lost keys: test_engine_peer_intruders.py, test_trust.py
- D3 privacy: test_ledger.py, `test_after_noise_nothing_exact_leaves...`, `test_shape_and_refusals...`, the audits
- D4 impossible summaries: test_received.py
- D5 hard minima: `test_no_contract_lowers_the_hard_minima...`
- D6 combinations of columns: `test_two_columns_that_differ_in_one_row...`
- D7 one gate: `test_pairs_of_categories_are_cells_and_rounds_ask_the_same_gate`
- D8 rows that change: test_ledger.py, `test_another_directory_or_lost_files...`
- D9 neighbours in rounds: test_privacy.py, `test_a_neighbour_learns_the_products...` (stated, not prevented)
- D10 rows that change in a run: test_ledger.py, `test_rows_that_change_in_the_middle_of_a_run_are_refused`
- invites and expulsion: test_enrol.py, `test_at_a_terminal_...`; test_engine_peer_intruders.py, `test_an_expelled_...`
- model directories: test_fuzz.py

And those of a second trial: sums of small levels (`..._three_patients_...`), decoding by lattice reduction
(`test_knots_about_one_age_...`, `test_values_of_a_number_...`, `test_few_rows_in_which_...`), the gap of an answer
(test_summaries.py, `test_a_gap_...`), other exports and orders of a table (test_ledger.py, `test_tables_whose_...`,
`test_the_same_patients_in_another_order_...`), earlier keys and addresses (test_enrol.py).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest

import heart
from fedkin.cli import main
from fedkin.core import Query, local_fit
from fedkin.data import Federation, Rows
from fedkin.errors import DataError
from fedkin.federate import Contract, ContractError, Site, SiteSettings, check_disclosure, sharing, site_plan
from fedkin.federate.disclosure import check_point, check_query
from fedkin.losses import LOSSES

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


def test_every_loss_whose_organiser_asks_queries_is_attacked() -> None:
    assert set(TARGETS) == {name for name, kind in LOSSES.items() if not kind.quadratic}


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


@pytest.mark.exhaustive
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
    assert found.code == "query_many" and "rows have only 320" in str(found)


def test_no_more_numbers_leave_than_the_features_have_values() -> None:
    """Of the constant column nothing is unknown: 150 numbers determined all 120 values of 40 rows."""
    text = 'name = "h"\nloss = "logistic"\n[features]\n' + "".join(f"x{j} = {{low = -3, high = 3}}\n" for j in range(3))
    contract = Contract.from_toml(text + TARGETS["logistic"])
    rng = np.random.default_rng(0)
    X = np.column_stack([np.ones(40), rng.uniform(-1, 1, (40, 3))])
    rows = Rows(X, (rng.random(40) < 0.5).astype(float))
    own, folds = estimate(contract, rows), np.arange(40) % 4
    known = [own, *(own + rng.normal(size=4) for _ in range(5))]
    codes = [
        [one.code for one in check_query(contract, rows, own + rng.normal(size=4), known[:k], fold_of=folds)]
        for k in (2, 6)
    ]
    assert codes == [[], ["query_many"]]


def test_differences_of_huber_answers_over_few_rows_are_refused() -> None:
    """Weights are 0 or 1: between two answers four rows crossed the threshold, and their products were solved."""
    contract, rows = patients("huber")
    own, loss = estimate(contract, rows), contract.loss_object().rowwise
    assert loss is not None and rows.y is not None

    def inside(theta: np.ndarray) -> np.ndarray:
        return np.asarray(loss.curvature_at(loss.predictors(theta, rows.X), rows.y)[:, 0, 0] > 0)

    shifts = np.linspace(0.01, 1.5, 100)[:, None] * np.eye(Q)[0]
    crossed = np.array([int((inside(own + shift) != inside(own)).sum()) for shift in shifts])
    few = shifts[(crossed > 2) & (crossed < 10)]
    assert len(few) > 0
    for shift in few:
        assert [one.code for one in check_query(contract, rows, own + shift, [own])] == ["query_few"]
    assert any(check_query(contract, rows, own + shift, [own]) == [] for shift in shifts[crossed >= 10])


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


def test_questions_at_nearly_the_same_point_single_nobody_out() -> None:
    """Sums have 16 digits: points 1e-5 apart tell of third derivatives, in which an unusual patient stands out."""
    contract, rows = patients("logistic")
    rows.X[7, 1:] = [4.0, -3.0, 3.5, -3.0]
    loss, own = contract.loss_object().rowwise, estimate(contract, rows)
    assert loss is not None
    points = [own, *(own + 1e-4 * move for move in np.vstack([np.eye(Q), -np.eye(Q)]))]
    expected = np.stack([loss.response(loss.predictors(one, rows.X)) for one in points], axis=1)
    weights = np.hstack([np.ones((N, 1)), expected[:, 1:] - expected[:, :1], expected * (1 - expected)])
    alone = np.linalg.lstsq(weights, np.eye(N)[7], rcond=1e-9)[0]
    assert np.abs(alone @ (weights.T @ rows.X) - rows.X[7]).max() < 0.05
    known = [own]
    for one in points[1:]:
        if not check_query(contract, rows, one, known):
            known.append(one)
    assert len(known) < 11


def test_sums_over_few_events_and_risk_sets_of_few_rows_are_refused() -> None:
    contract, rows = patients("cox")
    assert check_disclosure(contract, rows) == []
    assert rows.y is not None
    time = np.abs(rows.y)
    few = Rows(rows.X, np.where(np.arange(N) < 9, time, -time))
    (found,) = check_disclosure(contract, few)
    assert found.code == "few_events" and "only 9 events" in str(found)
    (found, *_) = check_disclosure(contract, rows, site="a", folds=8)
    assert "of 8 folds" in str(found)
    # all but three are gone before the first event, and one of these is the last
    late = Rows(rows.X, np.where(np.arange(N) < 3, 10.0 + np.arange(N), -time))
    (found,) = check_point(contract, late, np.zeros(Q - 1))
    assert found.code == "concentrated" and "rows in effect" in str(found)


def test_ranks_of_survival_times_in_a_small_ward_are_not_in_an_answer() -> None:
    """Each patient adds a sum of 1 / (number at risk) to the gradient, and of 85,320 triples of ranks one fits."""
    _, rows = patients("cox")
    assert rows.y is not None
    text = f'name = "heart"\nloss = "cox"\n{FEATURES.replace("= true", "= false")}ward = {{levels = ["A", "D"]}}\n'
    contract = Contract.from_toml(text + TARGETS["cox"])

    def with_ward(n: int) -> Rows:
        return Rows(np.column_stack([rows.X, np.arange(N) < n]), np.abs(rows.y))

    three = with_ward(3)
    told = N * contract.loss_object().gradient(np.zeros(Q), *three.arrays)[-1]
    ranks = np.argsort(np.argsort(np.abs(rows.y)))[:3]
    expected = np.cumsum(1.0 / (N - np.arange(N)))
    triples = np.array(list(combinations_with_replacement(range(N), 3)))
    fitting = triples[np.isclose(expected[triples].sum(axis=1) - 3, told, rtol=1e-12)]
    assert fitting.tolist() == [sorted(ranks.tolist())]
    (found,) = check_disclosure(contract, three)
    assert found.code == "few_ranks" and "ward: only 3 rows with 'D', but with survival times at least 10" in str(found)
    assert check_disclosure(contract, with_ward(9)) and check_disclosure(contract, with_ward(10)) == []


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
    lax = "[thresholds]\nrows = 1\nrows_per_parameter = 0\ncell = 1\npair = 1\neffective_rows = 1\n"
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
    rare["height"][[3, 9]], rare["height"][20:30] = (171.0, 172.0), 170.001
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
        done = heart.enrolled(made, "north", tmp_path / "t.csv", tmp_path / "north")
        sharing.share(done)


def curved(knots: list[float], older: int = 1, unit: float = 1.0, youngest: int = 12) -> str:
    """What the gate says of a table in which ``older`` patients are 63 units old, one of them in ward B."""
    text = heart.CONTRACT.replace('age = {unit = "years",', f"age = {{knots = {knots},")
    rng = np.random.default_rng(0)
    age = np.repeat(np.delete(np.arange(40.0, 90.0), 23), 12)[12 - youngest :]
    ward = np.array(["A", "B", "C"])[np.arange(age.size) % 3]
    age[3 * np.arange(older)], ward[0] = 63.0, "B"
    contract = Contract.from_toml(text)
    rows = contract.prepare({"age": unit * age, "ward": ward, "days": rng.uniform(1, 20, age.size)})
    return "\n".join(map(str, check_disclosure(contract, rows)))


@pytest.mark.parametrize("apart", [0.3, 1e-4, 1e-8])
def test_knots_about_one_age_single_nobody_out(apart: float) -> None:
    """With 1e-8 the gate took the direction for rounding, and products of columns gave six digits of the row."""
    narrow = [63 + apart * k for k in range(-2, 3)]
    assert "only 1 row with '63'" in curved(narrow)
    assert "only 1 row with '63' and ward 'B'" in curved(narrow, 5)
    assert "only 1 row with '63'" in curved([62.4, 62.5, 62.6, 63.6])  # a product of two curves
    assert "only 1 row with 'B' and age '63'" in curved([45, 65, 85], 5)  # and within a ward
    step = [62.1 + 0.8 * apart * k for k in range(4)]
    assert "at most" not in curved(step)  # both sides have many rows of every ward
    step = [40.1 + 0.8 * apart * k for k in range(4)]
    assert "with '40' (and so few with 1 other value)" in curved(step, 0, youngest=2)  # at most 40
    assert curved([45, 55, 65, 75, 85], 0) == curved([45, 65, 85], 0) == ""
    assert "only 1 row with '63'" in curved([45, 65, 85])  # sums of 53 bits are decoded to how many rows have each age
    for unit in (0.5, 2 / 3):  # on a grid as with whole numbers
        assert "only 1 row with '" in curved([unit * knot for knot in (62.4, 62.5, 62.6, 63.6)], unit=unit)


@pytest.mark.parametrize("knots", [[-1e300, 0.0, 1e300], [0.0, 1e-300, 2e-300], [1.0, 1 + 1e-12, 2.0], range(101)])
def test_absurd_knots_are_refused_with_the_contract(knots: list[float]) -> None:
    with pytest.raises(ContractError, match=r"too large, or closer|101 knots, expected 100 at most"):
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
    done = heart.enrolled(made, "north", tmp_path / "t.csv", tmp_path / "north")
    rows = Site.read(done).rows()
    smokes_in_b = np.flatnonzero((rows.X[:, 2] == 1) & (rows.X[:, 4] == 1))
    kept = np.setdiff1d(np.arange(60), smokes_in_b[1:])  # one smoker in ward B is left
    rows.take(kept).save(done / "rows.npz")
    words = "only 1 row with 'B' and smoker 'yes'"
    with pytest.raises(DataError, match=f"(?s)nothing is shared.*{words}"):
        sharing.share(done)
    with pytest.raises(DataError, match=f"(?s)no rounds.*{words}"):
        site_plan(done)


THREE = """\
name = "heart"
loss = "logistic"
[features]
smoker = {levels = ["no", "yes"]}
sex = {levels = ["f", "m"]}
ward = {levels = ["A", "B"]}
[target]
name = "died"
levels = ["no", "yes"]
"""


def test_cells_of_three_categories_that_weighted_sums_count_have_enough_rows() -> None:
    """Eight cells, eleven sums: weighted and plain products together tell how many rows each cell has."""
    contract, rng = Contract.from_toml(THREE), np.random.default_rng(0)
    cells = np.array([[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)] * 12)

    def prepared(alone: int) -> tuple[Rows, np.ndarray]:
        kept = np.concatenate([cells[(cells.sum(axis=1) < 3)], np.ones((alone, 3), dtype=int)])
        X = np.column_stack([np.ones(len(kept)), kept])
        rows = Rows(X, (rng.random(len(kept)) < 1 / (1 + np.exp(0.5 - X @ [0, 0.9, -0.7, 0.4]))).astype(float))
        return rows, estimate(contract, rows)

    rows, own = prepared(alone=1)
    assert check_disclosure(contract, rows) == []  # every pair has enough
    loss, cube = contract.loss_object(), np.unique(rows.X, axis=0)
    expected = 1 / (1 + np.exp(-cube @ own))
    weight = expected * (1 - expected)
    pairs = np.triu_indices(4)
    told = np.vstack([cube.T, weight * np.array([cube[:, a] * cube[:, b] for a, b in zip(*pairs, strict=True)])])
    sums = np.concatenate([rows.X.sum(axis=0), rows.n_samples * loss.hessian(own, *rows.arrays)[pairs]])
    found = np.linalg.lstsq(told, sums, rcond=None)[0]
    np.testing.assert_allclose(found, [12.0] * 7 + [1.0], atol=1e-6)  # what the organiser works out
    (refused,) = check_point(contract, rows, own)
    assert "depend on smoker and sex and ward only, and some values have only 1 row" in str(refused)
    assert check_point(contract, *prepared(alone=5)) == []


def test_weights_of_few_possible_predictors_are_refused_with_offsets_sums_and_odd_values() -> None:
    """Lattice reduction decodes predictors, not columns: one odd age, an exposure of a year, age + pressure."""
    ages = np.random.default_rng(0).integers(40, 81, (2, N)) / 15

    def alike(odd: float = 0.0, offset: np.ndarray | None = None, second: float = 0.0) -> str:
        contract, rows = patients("logistic")
        rows.X[:, 1:3] = ages.T
        rows.X[7, 1] += odd
        rows = Rows(rows.X, rows.y, offset)
        return "\n".join(map(str, check_point(contract, rows, np.array([0.0, 0.5, second, 0.0, 0.0]))))

    assert "depend on age only" in alike() and "depend on age only" in alike(odd=0.0082)
    assert "depend on age only" in alike(offset=np.zeros(N))
    years = np.random.default_rng(1).integers(1, 5, N) / 4
    assert "depend on age and the offset only" in alike(offset=np.log(years)) and "the offset" in alike(offset=years)
    assert "depend on age and pressure only" in alike(second=0.5)
    assert alike(offset=np.random.default_rng(2).normal(size=N)) == ""
    finer = np.random.default_rng(3).integers(0, 70, N) * 0.0112345
    assert alike(offset=finer) == ""  # 41 times 70 values


def test_pairs_of_values_of_two_curves_have_enough_rows() -> None:
    """Products of two curves, each with three rows of every value, told which patient has which pair."""
    columns, rng = table(120), np.random.default_rng(0)
    columns["age"], columns["pressure"] = (
        rng.choice(np.arange(30, 91, 10.0), 120),
        rng.choice(np.arange(100, 181, 10.0), 120),
    )
    curves = (
        "age = {low = 20, high = 100, knots = [35, 55, 85]}\npressure = {low = 60, high = 240, knots = [105, 145, 175]}"
    )
    names = "weight = {low = 30, high = 250}\nheight = {low = 100, high = 250}"
    contract = Contract.from_toml(
        f'name = "heart"\nloss = "linear"\n[features]\n{curves}\n{names}\n[target]\nname = "y"\n'
    )
    assert "and pressure '" in "\n".join(map(str, check_disclosure(contract, contract.prepare(columns))))
    columns["pressure"] = rng.choice([110.0, 140.0, 170.0], 120)
    columns["age"] = np.where(columns["age"] > 60, 70.0, columns["age"] - columns["age"] % 20 + 10)
    assert check_disclosure(contract, contract.prepare(columns)) == []


def test_levels_have_more_rows_than_a_curve_has_columns() -> None:
    """Products with a curve of four columns are four equations in the ages of a ward: three were solved for exactly."""
    text = LINEAR.replace("mean = 60, scale = 15", "knots = [45, 53, 60, 66, 75]").replace("[target]", "WARD\n[target]")
    contract = Contract.from_toml(text.replace("WARD", 'ward = {levels = ["A", "D"]}'))
    columns = {**table(120), "ward": np.where(np.arange(120) < 7, "D", "A")}
    assert check_disclosure(contract, contract.prepare(columns)) == []
    columns["ward"][6] = "A"
    (found,) = check_disclosure(contract, contract.prepare(columns))
    words = "with 4 functions of one column, such as a curve or a square, at least 7 (or none) are needed"
    assert f"only 6 rows with 'D', but {words}" in str(found)


@pytest.mark.parametrize("function", [np.square, np.log, np.reciprocal, np.exp])
def test_a_column_and_its_square_do_not_give_the_ages_in_a_small_ward(function: Callable[..., np.ndarray]) -> None:
    """Sums of ages and of their squares over three patients are two equations, and ages are whole numbers."""
    text = LINEAR.replace("[target]", 'ward = {levels = ["A", "D"]}\n[target]').replace("mean = 140, scale = 20", "")
    contract, rng = Contract.from_toml(re.sub(r"low = 60, high = 240,\s*", "", text)), np.random.default_rng(0)
    columns, ages = {**table(120), "ward": np.where(np.arange(120) < 3, "D", "A")}, np.arange(40, 81)
    assert check_disclosure(contract, contract.prepare(columns)) == []
    columns["age"] = rng.choice(ages, 120).astype(float)
    columns["age"][:3], columns["pressure"] = [47, 59, 78], 0.0
    columns["pressure"] = function(columns["age"] / 40)
    rows = contract.prepare(columns)
    told = rows.X.T @ rows.X[:, 5] @ np.eye(6)[:, 1:3] * [15, 1] + [3 * 60, 0]  # in the units of the table
    three = np.array(list(combinations_with_replacement(ages, 3)))
    sums = np.stack([three.sum(axis=1), function(three / 40).sum(axis=1)], axis=1)
    assert three[np.isclose(sums, told, rtol=1e-12).all(axis=1)].tolist() == [[47, 59, 78]]
    (found,) = check_disclosure(contract, rows)
    assert found.code == "few_in_cell" and "only 3 rows with 'D', but with 2 functions of one column" in str(found)
    columns["ward"][:5] = "D"
    assert check_disclosure(contract, contract.prepare(columns)) == []


def test_few_rows_in_which_a_column_is_not_constant_or_not_another_are_refused() -> None:
    """Their doses are whole numbers: sums of doses and squares gave the doses, and sums of products the rows."""
    columns = table()
    columns["height"], few = np.full(60, 170.0), [3, 30, 31]
    columns["height"][few] = [171.25, 188.5, 190.75]
    assert re.search("only 3 rows make up .* along height", refusals(columns))
    columns["height"][few] = 171.25
    assert refusals(columns) == ""  # a cell of three
    columns = table()
    columns["height"] = columns["pressure"] + 30
    columns["height"][few] += [1, 2, 4]
    assert re.search("only 3 rows make up .* along (height|pressure)", refusals(columns))
    columns["height"] = columns["pressure"] + 0.8 * columns["weight"] - 40
    columns["height"][few] += [1, 2, 4]
    assert "only 3 rows make up" in refusals(columns)
    columns = {**table(), "y": np.zeros(60)}
    columns["y"][few] = [1250.0, 8100.0, 9075.0]
    assert re.search("only 3 rows make up .* along the target", refusals(columns))
    contract, columns = Contract.from_toml(LINEAR), table(200)
    columns["height"] = np.full(200, 170.0)
    columns["height"][:14] += np.arange(14)
    rows = contract.prepare(columns)
    assert check_disclosure(contract, rows) == []
    assert "of 4 folds" in str(check_disclosure(contract, rows, site="north", folds=4)[0])


def test_a_number_of_three_values_is_counted_like_a_category() -> None:
    """Number of rows, sum and sum of squares tell how many rows have each of three values."""
    columns = table()
    columns["height"] = 170.0 + np.arange(60) % 3
    assert refusals(columns) == ""
    columns["height"][np.flatnonzero(columns["height"] == 172)[1:]] = 170.0
    assert "only 1 row with '172'" in refusals(columns)
    columns = {**table(), "height": 170.0 + np.arange(60) % 3, "weight": 80.0 + np.arange(60) // 3 % 2}
    columns["weight"][np.flatnonzero((columns["height"] == 172) & (columns["weight"] == 81))[1:]] = 80.0
    assert re.search("only 1 row with '8?1?7?2?1?' and", refusals(columns))
    columns = {**table(), "y": (np.arange(60) % 2).astype(float)}
    columns["y"][7] = 2.0
    assert "y: only 1 row with '2'" in refusals(columns)


def test_values_of_a_number_that_the_contracts_messages_count_have_enough_rows() -> None:
    """Weighted by five functions of one column, sums tell of each of its five values: two rows were recovered."""
    contract, rows = patients("poisson")
    rows.X[:, 1] = np.arange(N) % 4 / 4
    rows.X[[7, 19], 1] = 1.0
    loss, own, values = contract.loss_object(), estimate(contract, rows), np.arange(5) / 4
    known = [own]
    for start, slope in ((0.6, 0.15), (0.8, 0.6), (0.2, -0.8), (0.6, 0.35), (0.4, -0.4)):
        theta = np.array([start, slope, 0.0, 0.0, 0.0])
        assert [one.code for one in check_query(contract, rows, theta, known[:1])] == ["alike"]
        known.append(theta)
    weights = np.exp([at[0] + at[1] * values for at in known[1:]])
    sums = np.array([rows.n_samples * loss.hessian(at, *rows.arrays) for at in known[1:]]).reshape(5, -1)
    two = rows.X[[7, 19]]
    np.testing.assert_allclose(np.linalg.solve(weights, sums)[4].reshape(Q, Q), two.T @ two, atol=1e-3)
    (found,) = check_disclosure(contract, rows)
    assert "only 2 rows with" in str(found) and found.code == "few_in_cell"
    rows.X[30, 1] = 1.0
    assert check_disclosure(contract, rows) == check_query(contract, rows, theta, known[:1]) == []
    linear = Contract.from_toml(LINEAR)
    assert check_disclosure(linear, rows.take(np.arange(N) != 30)) == []  # three sums, five unknowns


# --- queries --------------------------------------------------------------------------------------------------------


def test_sums_over_three_patients_of_a_ward_at_several_points_are_not_solved_for_their_rows() -> None:
    """Second derivatives of the ward's column are sums over its patients: ages by search, the rest by elimination."""
    text = FEATURES.replace("intercept = true", 'name = "heart"\nloss = "logistic"\nintercept = true')
    contract = Contract.from_toml(text + 'ward = {levels = ["A", "D"]}\n' + TARGETS["logistic"])
    _, rows = patients("logistic")
    ages, few = np.sort(np.random.default_rng(5).normal(size=41)), np.arange(N) < 3  # all that occur, on no grid
    rows.X[:, 1] = np.random.default_rng(4).choice(ages, N)
    rows = Rows(np.column_stack([rows.X, few.astype(float)]), rows.y)
    loss, own = contract.loss_object(), np.array([0.2, 0.5, -0.4, 0.3, 0.0, 0.1])
    known, sums = [own], []
    for start, slope in ((-1, 2), (1, 2), (-1.5, -1), (0, 3)):
        theta = np.array([start, slope, 0.0, 0.0, 0.0, 0.0])
        assert check_query(contract, rows, theta, [own, theta])  # already with the same point asked again
        sums.append(N * loss.hessian(theta, *rows.arrays)[5])
        known.append(theta)
    told, eta = np.array(sums), np.array([at[0] + at[1] * ages for at in known[1:]])
    weights = 1 / (2 + np.exp(eta) + np.exp(-eta))
    three = np.stack(np.meshgrid(*[np.arange(41)] * 3, indexing="ij")).reshape(3, -1)
    best = three[:, np.abs(weights[:, three].sum(axis=1) - told[:, :1]).max(axis=0).argmin()]
    others = np.linalg.lstsq(weights[:, best], told[:, 1:5], rcond=None)[0]
    np.testing.assert_allclose(others[np.argsort(best)], rows.X[:3, 1:5][np.argsort(rows.X[:3, 1])], atol=1e-9)
    assert [one.code for one in check_query(contract, rows, known[2], known[:2])] == ["solvable"]
    (found,) = check_query(contract, rows, known[3], known[:3])
    assert found.code == "solvable" and "values of the 3 rows with ward 'D' could be solved for" in str(found)
    many = Rows(np.column_stack([rows.X[:, :5], np.arange(N) % 2]), rows.y)
    assert check_query(contract, many, known[2], known[:2]) == check_point(contract, rows, own) == []


def test_a_crafted_query_is_refused_by_name_and_an_answer_has_no_folds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = heart.organiser(tmp_path, heart.LOGISTIC)
    done = heart.enrolled(made, "north", heart.write_deaths(tmp_path / "t.csv"), tmp_path / "north")
    shared = sharing.share(done)
    assert (shared.summary.count[:-1] > 0).any()
    age = Site.read(done).rows().X[7, 1]
    path = made.directory / "asks" / "north@2.ask"
    for slope, words in ((3e6, "outside the contract's ball"), (900.0, "mean loss"), (30.0, "mean loss|in effect")):
        made.write_queries([Query("north", 2, np.array([-slope * age, slope, 0, 0]), np.zeros(4))], {})
        with pytest.raises(DataError, match=rf"(?s)north@2\.ask is not answered.*({words})"):
            sharing.answer(done, path)
    assert not (done / "sent" / "north@2.summary").exists()
    # refusals tell of rows: they are messages, but for the first, outside the ball
    assert [one.what for one in Site.read(done).ledger.entries()].count("refused") == 2
    made.write_queries([Query("north", 2, shared.summary.at + 0.1, np.zeros(4))], {})
    sent = done / "sent" / "north@2.summary"
    for word, code in (("n\n", 1), ("y\n", 0)):
        monkeypatch.setattr("sys.stdin", terminal := io.StringIO(word))
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        assert main(["site", "answer", str(done), str(path)]) == code
        assert sent.exists() == (code == 0)
    answer = sharing.answer(done, path).summary
    assert answer.count.tolist() == [0] * 5 + [100]
    for slope in np.linspace(31.0, 60.0, 9).tolist():
        made.write_queries([Query("north", 3, np.array([-slope * age, slope, 0, 0]), np.zeros(4))], {})
        with pytest.raises(DataError) as refused:
            sharing.answer(done, made.directory / "asks" / "north@3.ask")
    assert "12 messages have left this site, refusals included" in str(refused.value)
