"""The command line, used as a person would: wrong, and interrupted."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import fedkin
import fedkin.cli.fit
from clinics import FIT, HEADER, failing, write
from fedkin.cli import main
from fedkin.errors import FedkinWarning, SolverError
from fedkin.fitting import compare, fit


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--target COL"]),
        (["--target", "outcome"], ["--site COL", "clinic, age, dose, outcome"]),
        (["--site", "Clinc", "--target", "outcome"], ["'Clinc'", "did you mean 'clinic'?"]),
        (["--site", "clinic", "--target", "outcom"], ["'outcom'", "did you mean 'outcome'?"]),
        ([*FIT, "--features", "age,doses"], ["'doses'", "did you mean 'dose'?"]),
        ([*FIT, "--features", "zzz"], ["'zzz'", "the table has"]),
        ([*FIT, "--lam", "much"], ["lam must be a number", "'cv'", "'much'"]),
        ([*FIT, "--lam", "-1"], ["lam", "-1"]),
        ([*FIT, "--level", "2"], ["level", "2"]),
        ([*FIT, "--test-size", "1"], ["--test-size", "got 1"]),
        ([*FIT, "--ridge", "-1"], ["ridge", "-1"]),
        ([*FIT, "--loss", "mean"], ["no target"]),
        ([*FIT, "--loss", "logistic"], ["outcome", "needs classes", "--loss linear"]),
        ([*FIT, "--loss", "poisson"], ["poisson", "counts"]),
        ([*FIT, "--graph", "nowhere.csv"], ["nowhere.csv"]),
        ([*FIT, "--out", "sites.csv"], ["sites.csv", "--out"]),
        ([*FIT, "--out", "."], ["not a Fedkin model", "--out"]),
    ],
)
def test_wrong_arguments(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    line = failing(capsys, "fit", "sites.csv", *arguments)
    assert all(word in line for word in words), line
    assert sorted(path.name for path in place.iterdir()) == ["sites.csv"]


def test_missing_file_suggests_its_neighbour(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'sites.csv'?" in failing(capsys, "fit", "site.csv", *FIT)



def test_wrong_predictions(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0"]) == 0
    capsys.readouterr()
    write(place / "stranger.csv", HEADER[:3], [["Genf", 1.0, 2.0]])
    assert "'Genf'" in failing(capsys, "predict", "fedkin-model", "stranger.csv")
    write(place / "narrow.csv", ["clinic", "age"], [["Bern", 1.0]])
    assert "dose: there is no such column" in failing(capsys, "predict", "fedkin-model", "narrow.csv")
    assert "clinics" in failing(capsys, "predict", "fedkin-model", "sites.csv", "--site", "clinics")
    assert "nowhere" in failing(capsys, "predict", "nowhere", "sites.csv")
    assert "no directory" in failing(capsys, "predict", "fedkin-model", "sites.csv", "--out", "no/where.csv")
    (place / "fedkin-model" / "coefficients.csv").write_text("site\n", encoding="utf-8")
    assert "coefficients.csv" in failing(capsys, "inspect", "fedkin-model")


def test_unknown_option_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "model", "--josn"]) == 2
    assert "--json" in capsys.readouterr().err
    assert main(["fti"]) == 2
    assert main(["fit", "x.csv", "--loss", "ols"]) == 2
    assert "huber" in capsys.readouterr().err


def test_solver_failures_have_their_own_exit_code(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SolverError("site 'Bern' runs away: add ridge=1e-3")

    monkeypatch.setattr(fedkin.cli.fit, "compare", fail)
    assert "'Bern' runs away" in failing(capsys, "fit", "sites.csv", *FIT, code=1)


def test_warnings_become_notes(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*arguments: object) -> object:
        for k in (0, 0, 1, 2, 3, 4):
            warnings.warn(f"something odd, {k}", FedkinWarning, stacklevel=2)
        return fit(*arguments)

    monkeypatch.setattr(fedkin.cli.fit, "fit_model", warn)
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0"]) == 0
    shown = capsys.readouterr().err
    assert shown.count("note: something odd") == 3
    assert shown.count("something odd, 0") == 1
    assert "2 more" in shown
    assert "FedkinWarning: " not in shown


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize(
    ("limit", "cure"), [(["--max-iter", "1"], "--max-iter"), (["--solver", "fedadmm", "--rounds", "2"], "--rounds")]
)
def test_a_fit_that_did_not_converge_is_a_failure_and_is_not_saved(
    place: Path, capsys: pytest.CaptureFixture[str], limit: list[str], cure: str, more: list[str]
) -> None:
    fit = ["fit", "sites.csv", *FIT, "--select", "none", "--tol", "1e-9", *more]
    line = failing(capsys, *fit, *limit, code=1)
    for words in ("did not converge", "no model was saved", "relative gap", "1.0e-09", cure, "--tol", "--ridge"):
        assert words in line
    assert sorted(path.name for path in place.iterdir()) == ["sites.csv"]
    assert main(fit) == 0  # the limit was the reason
    assert fedkin.load("fedkin-model").status == "converged"
    before = (place / "fedkin-model" / "model.json").read_bytes()
    capsys.readouterr()
    failing(capsys, *fit, *limit, code=1)
    assert (place / "fedkin-model" / "model.json").read_bytes() == before  # a good model is not replaced by a bad one


def test_a_comparison_that_did_not_converge_is_noted(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hasty(*arguments: object, **named: object) -> object:
        found = compare(*arguments, **named)
        first = found.models[0]["Fedkin"]
        stopped = replace(first, fused=replace(first.fused, status="iteration_limit", gap=0.5))
        return replace(found, models=({**found.models[0], "Fedkin": stopped}, *found.models[1:]))

    monkeypatch.setattr(fedkin.cli.fit, "compare", hasty)
    assert main(["fit", "sites.csv", *FIT]) == 0
    assert "did not converge in every split" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["sites.csv/model", "sites.csv/deep/model", "/proc/no/model"])
def test_an_unwritable_place_is_noticed_before_the_fit(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("fitted first")

    if out.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    monkeypatch.setattr(fedkin.cli.fit, "compare", never)
    line = failing(capsys, "fit", "sites.csv", *FIT, "--out", out)
    assert "--out: cannot write the model to" in line
    assert out.rsplit("/", 1)[1] in line
    assert sorted(path.name for path in place.iterdir()) == ["sites.csv"]


def test_ctrl_c_ends_a_solver_that_would_go_on(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def solver(*_: object) -> None:
        for _ in range(3):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                continue  # as a path of many solutions does
        pytest.fail("Ctrl-C was swallowed")

    monkeypatch.setattr(fedkin.cli.fit, "fit_model", solver)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0"]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "interrupted" in shown.err
    assert "Traceback" not in shown.err
    assert sorted(path.name for path in place.iterdir()) == ["sites.csv"]
