"""The ledger of a site, and what it refuses: rows that changed, exact numbers after noise, fresh noise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import beta, norm

import heart
from fedkin.admm import Store
from fedkin.cli import main
from fedkin.core import Budget, Query, composed_epsilon, private_summary
from fedkin.data import Rows
from fedkin.errors import DataError
from fedkin.federate import Site, change_settings, sharing
from fedkin.federate.program import main as run_site
from fedkin.losses import LinearLoss

FUSED = heart.CONTRACT.replace("[features]", 'method = "fused"\n[features]') + "[rounds]\nlam = 0.1\nrounds = 3\n"


def add_row(place: Path, row: str = "44.5,A,9\n") -> Path:
    table = place.parent / "more.csv"
    table.write_text((place.parent / f"{place.name}.csv").read_text() + row)
    return table


def test_another_directory_or_lost_files_do_not_allow_sums_of_other_rows(tmp_path: Path) -> None:
    """The difference of two sums was the patient that had been added."""
    made = heart.organiser(tmp_path)
    north = heart.admitted(made, "north")
    sharing.share(north)
    other, _ = Site.join(heart.invite_of(made, "north"), add_row(north), tmp_path / "other")
    other.accept(made.admit(other.request, again=True).path)
    with pytest.raises(DataError, match="the difference would give away the rows that changed"):
        sharing.share(other.directory)
    shutil.rmtree(north / "sent")
    (north / "ledger.jsonl").unlink()
    Site.join(heart.invite_of(made, "north"), tmp_path / "more.csv", north)
    with pytest.raises(DataError, match="the difference would give away the rows that changed"):
        sharing.share(other.directory)
    assert main(["site", "ledger", str(other.directory), "--withdrawn", "the organiser has deleted it"]) == 0
    sharing.share(other.directory)


def test_answers_and_folds_are_counted_by_the_ledger_and_not_by_a_directory(tmp_path: Path) -> None:
    """The copy of a site in another directory has no answers, and counted from the beginning."""
    text = heart.CONTRACT.replace('"linear"', '"logistic"').split("[target]")[0]
    made = heart.organiser(tmp_path, f'messages = 3\n{text}[target]\nname = "died"\nlevels = ["no", "yes"]\n')
    rng = np.random.default_rng(0)
    lines = [f"{rng.uniform(30, 90):.2f},{'ABC'[k % 3]},{'no' if rng.random() < 0.5 else 'yes'}" for k in range(100)]
    (tmp_path / "t.csv").write_text("age,ward,died\n" + "\n".join(lines) + "\n")
    for place in ("north", "again"):
        site, _ = Site.join(heart.invite_of(made, "north"), tmp_path / "t.csv", tmp_path / place)
        site.accept(made.admit(site.request, again=True).path)
        start = sharing.share(site.directory).summary.at
        for number in (2, 3):
            path = made.directory / "asks" / f"north@{number}.ask"
            shift = 0.1 * number if place == "north" else 0.05 * number
            made.write_queries([Query("north", number, start + shift, np.zeros(4))], {})
            if place == "north":
                assert sharing.answer(site.directory, path).path is not None
            else:
                with pytest.raises(DataError, match=r"north@\d\.ask: 3 messages have left this site"):
                    sharing.answer(site.directory, path)
    shutil.rmtree(tmp_path / "again" / "sent")
    with pytest.raises(DataError, match="in 5 folds of north, seed 0 were shared before"):
        sharing.share(tmp_path / "again", folds=3)
    assert sharing.share(tmp_path / "again").summary.count[:5].all()  # the same folds tell nothing new


def test_a_table_with_one_more_row_is_refused_in_another_federation(tmp_path: Path) -> None:
    """The organisers of both, or one who runs both, would have had the patient as a difference."""
    north = heart.admitted(heart.organiser(tmp_path), "north")
    sharing.share(north)
    made = heart.organiser(tmp_path / "other")
    tables = {"south": add_row(north), "east": heart.write_table(tmp_path / "east.csv", seed=7)}
    sites = {}
    for name, table in tables.items():
        site, _ = Site.join(heart.invite_of(made, name), table, tmp_path / "other" / name)
        site.accept(made.admit(site.request).path)
        sites[name] = site.directory
    with pytest.raises(DataError, match=r"differs from this one in 1 row have left before \(as north"):
        sharing.share(sites["south"])
    sharing.share(sites["east"])  # other patients
    assert main(["site", "ledger", str(north), "--withdrawn", "the organiser has deleted it"]) == 0
    sharing.share(sites["south"])


def test_the_ledger_says_what_left_and_a_changed_line_is_refused(tmp_path: Path, capsys) -> None:
    made = heart.organiser(tmp_path)
    north = heart.admitted(made, "north")
    assert main(["site", "ledger", str(north)]) == 0 and "Nothing has left" in capsys.readouterr().out
    sharing.share(north, dry_run=True)
    assert Site.read(north).ledger.entries() == []
    sharing.share(north)
    made.write_queries([Query("north", 2, np.zeros(4), np.zeros(4), 10.0)], {})
    sharing.answer(north, made.directory / "asks" / "north@2.ask")
    change_settings(north, below_minima=True)
    assert main(["site", "ledger", str(north)]) == 0
    said = capsys.readouterr().out
    assert [word in said for word in ("share", "message 1", "answer", "message 2", "lifts the hard minima")] == [
        True
    ] * 5
    path = north / "ledger.jsonl"
    lines = path.read_text().splitlines()
    assert json.loads(lines[1])["before"] == json.loads(lines[0])["digest"]
    for changed in ([lines[0].replace("message 1", "message 7"), *lines[1:]], lines[1:], [lines[1], lines[0]]):
        path.write_text("\n".join(changed) + "\n")
        with pytest.raises(DataError, match=r"ledger\.jsonl, line 1: damaged, or changed"):
            sharing.share(north)


def test_rows_that_change_in_the_middle_of_a_run_are_refused(tmp_path: Path, capfd) -> None:
    made = heart.organiser(tmp_path, FUSED, names=("north", "south"))
    north = heart.admitted(made, "north")
    words = [str(north), "--give-up", "0.1", "--linger", "0"]
    assert run_site(None, words) == 4  # it waits for south
    store = Store(north / "state.db", made.charter.run)
    store.save(1, {}, {"site": "north", "rows": "other"}, durable=True)
    store.close()
    assert run_site(None, words) == 2 and "computed from other rows" in capfd.readouterr().err
    (north / "state.db").unlink()
    Site.join(heart.invite_of(made, "north"), add_row(north), north)
    assert run_site(None, words) == 2 and "rows that changed" in capfd.readouterr().err


# --- differential privacy -----------------------------------------------------------------------------------------


def test_after_noise_nothing_exact_leaves_and_no_fresh_noise(tmp_path: Path, capfd) -> None:
    pytest.importorskip("dp_accounting")
    made = heart.organiser(tmp_path, FUSED, names=("north", "south"))
    north = heart.admitted(made, "north", n=100)
    first = sharing.share(north, epsilon=1.0).path.read_bytes()
    (north / "model").mkdir()
    change_settings(north, share_result=True)
    with pytest.raises(DataError, match=r"sums with noise \(epsilon 1\).*Publish would tell more"):
        Site.read(north).publish()
    assert run_site(None, [str(north), "--give-up", "0.1"]) == 2
    assert "Run would tell more than was promised" in capfd.readouterr().err
    made.write_queries([Query("north", 2, np.zeros(4), np.zeros(4), 10.0)], {})
    with pytest.raises(DataError, match="Answer would tell more"):
        sharing.answer(north, made.directory / "asks" / "north@2.ask")
    # another draw of the noise would let the organiser average
    shutil.rmtree(north / "sent")
    for epsilon in (1.0, None):
        with pytest.raises(DataError, match=r"north\.summary again if it was lost"):
            sharing.share(north, epsilon=epsilon)
    (north / "ledger.jsonl").unlink()
    with pytest.raises(DataError, match="sums with noise"):
        sharing.share(north, epsilon=1.0)
    # the same rows under another name, in another federation
    other = heart.organiser(tmp_path / "other")
    table = north.parent / "north.csv"
    twin, _ = Site.join(heart.invite_of(other, "south"), table, tmp_path / "other" / "south")
    twin.accept(other.admit(twin.request).path)
    with pytest.raises(DataError, match="sums with noise"):
        sharing.share(twin.directory)
    assert first


def test_shape_and_refusals_of_private_sums_depend_on_no_row(tmp_path: Path) -> None:
    """Two tables that differ in one row were told apart by the number of folds, or by a refusal, at any epsilon."""
    pytest.importorskip("dp_accounting")
    made = heart.organiser(tmp_path)
    shapes = []
    for k, name in enumerate(heart.SITES[:2]):
        place = heart.admitted(made, name, n=100)
        rows = Site.read(place).rows()
        if k:  # one patient in another ward leaves two, or fewer in a fold than a cell must have
            rows.X[:, 2:] = 0.0
            rows.X[:2, 2] = 1.0
            rows.save(place / "rows.npz")
        shared = sharing.share(place, epsilon=0.5)
        shapes.append((shared.summary.count > 0).tolist())
    assert shapes[0] == shapes[1] == [True] * 5 + [False]


def audited_epsilon(epsilon: float, messages: int, noise: float = 1.0, times: int = 4000) -> float:
    """Return a lower bound of epsilon (99.9%), assuming Gaussian noise: a linear test, tables with an extreme row."""
    delta, rng = 1e-5, np.random.default_rng(0)
    X, y = np.column_stack([np.ones(20), rng.uniform(-1, 1, 20)]), rng.uniform(-1, 1, 20)
    budget, how = Budget(epsilon, delta), {"feature_names": ("(intercept)", "x"), "by_fold": False}

    def scores(sign: float) -> np.ndarray:
        rows = Rows(X.copy(), y.copy())
        rows.X[0, 1], rows.y[0] = sign, 1.0
        generator = SmallerNoise(np.random.default_rng(int(sign) + 7), noise)
        drawn = [private_summary("a", rows, LinearLoss(), budget, rng=generator, **how)
                 for _ in range(times * messages)]  # fmt: skip
        one = np.array([one.hessian[-1, 0, 1] - one.gradient[-1, 1] for one in drawn])
        return one.reshape(times, messages).sum(axis=1)

    here, there = scores(1.0), scores(-1.0)
    best = 0.0
    for cut in np.quantile(np.concatenate([here, there]), np.linspace(0.05, 0.95, 19)):
        hits, false = int((here > cut).sum()), int((there > cut).sum())
        # Clopper-Pearson bounds of both probabilities, for 19 cuts
        least = beta.ppf(0.001 / 38, hits, times - hits + 1) if hits else 0.0
        most = beta.ppf(1 - 0.001 / 38, false + 1, times - false)
        best = max(best, float(norm.ppf(least) - norm.ppf(most)))

    def excess(epsilon: float) -> float:  # of a Gaussian mechanism whose two outcomes are `best` apart
        return norm.cdf(best / 2 - epsilon / best) - np.exp(epsilon) * norm.cdf(-best / 2 - epsilon / best) - delta

    return float(brentq(excess, 0.0, 60.0)) if best > 1e-3 else 0.0


class SmallerNoise:
    """Draws normal numbers of another standard deviation than 1."""

    def __init__(self, rng: np.random.Generator, size: float) -> None:
        self.rng, self.size = rng, size

    def standard_normal(self, n: int) -> np.ndarray:
        return self.size * self.rng.standard_normal(n)


@pytest.mark.parametrize("epsilon", [2.0, 8.0])
def test_an_audit_finds_no_more_than_the_stated_epsilon_and_finds_noise_that_is_too_small(epsilon: float) -> None:
    pytest.importorskip("dp_accounting")
    assert 0.0 < audited_epsilon(epsilon, 1) < epsilon  # the test has power, and the promise holds
    assert epsilon < 8.0 or audited_epsilon(epsilon, 1, noise=0.5) > epsilon  # less is too little for 4000 tries


def test_an_audit_of_three_messages_finds_no_more_than_their_composed_epsilon() -> None:
    pytest.importorskip("dp_accounting")
    together, found = composed_epsilon([(4.0, 1e-5)] * 3), audited_epsilon(4.0, 3)
    assert 4.0 < together < 12.0  # less than their sum
    assert 0.0 < found < together
    assert audited_epsilon(4.0, 3, noise=0.5) > together


def test_messages_with_noise_are_added_up_to_the_budget_of_the_site(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    made = heart.organiser(tmp_path)
    north = heart.admitted(made, "north", n=100)
    change_settings(north, epsilon=2.0)
    with pytest.raises(DataError, match="epsilon is 3, but this site may spend 2 at most"):
        sharing.share(north, epsilon=3.0)
    first = sharing.share(north, epsilon=1.0).summary
    second = sharing.share(north, epsilon=1.0).summary
    assert not np.array_equal(first.hessian, second.hessian)
    assert 1.0 < composed_epsilon([(1.0, 1e-5)] * 2) < 2.0 < composed_epsilon([(1.0, 1e-5)] * 4)
    with pytest.raises(DataError, match=r"epsilon .* together, and at most 2 may be spent"):
        for _ in range(2):
            sharing.share(north, epsilon=1.0)
    with pytest.raises(DataError, match="would tell more"):
        sharing.share(north)
