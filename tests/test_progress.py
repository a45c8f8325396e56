"""Loops that tell how far they are: bars, lines, the log, Ctrl-C."""

from __future__ import annotations

import io
import signal
import threading

import pytest
from rich.console import Console

import fedkin
import fedkin.cli.fit
from fedkin._base import tracked
from fedkin.cli import main
from fedkin.fitting import fit
from processes import PATIENCE

pytestmark = pytest.mark.clocks

TABLE = "site,x,y\n" + "".join(
    f"{site},{k % 7},{(k % 7) * (1 if site < 'c' else -1) + (k * 31 % 5) / 5}\n" for site in "abcd" for k in range(24)
)
FIT = ["fit", "sites.csv", "--site", "site", "--target", "y", "--lam", "0.01", "--select", "none"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "sites.csv").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_terminal_there_are_lines_now_and_then():
    shown, told = io.StringIO(), threading.Event()

    class Heard(io.StringIO):
        def write(self, text: str) -> int:
            shown.write(text)
            if "folds, 1 of 3 (about" in text:
                told.set()
            return len(text)

    console = Console(file=Heard(), force_terminal=False)
    with fedkin.progress("choosing lam", console=console, every=0.01):
        for k in tracked(range(3), "folds"):
            if k == 1:
                assert told.wait(PATIENCE)
    assert "choosing lam; folds, 1 of 3 (about" in shown.getvalue()


def interrupted_fit(monkeypatch, turn):
    """A fit of all rows, or of a split, that Ctrl-C ends."""
    turns = []

    def interrupted(*arguments, **more):
        turns.append(1)
        if len(turns) == turn:
            signal.raise_signal(signal.SIGINT)
        return fit(*arguments, **more)

    monkeypatch.setattr("fedkin.fitting.comparison.fit", interrupted)
    monkeypatch.setattr(fedkin.cli.fit, "fit_model", interrupted)


def test_ctrl_c_keeps_the_best_if_asked(place, capsys, monkeypatch):
    interrupted_fit(monkeypatch, 3)
    assert main([*FIT, "--keep-best", "--repeats", "4", "--out", "two"]) == 0
    assert "2 splits" in capsys.readouterr().out
    assert fedkin.load("two").n_samples.sum() == 96
    interrupted_fit(monkeypatch, 3)
    assert main([*FIT, "--keep-best", "--repeats", "2", "--out", "last"]) == 0
    found = capsys.readouterr()
    assert "interrupted: the model is that of the last split, 72 rows" in found.err
    assert "fitted on 72 of 96 rows, those of the last split: the fit of all rows was interrupted" in found.out
    assert fedkin.load("last").n_samples.sum() == 72


def test_ctrl_c_ends_the_command_otherwise(place, capsys, monkeypatch):
    interrupted_fit(monkeypatch, 3)
    assert main([*FIT, "--repeats", "4"]) == 130
    interrupted_fit(monkeypatch, 1)
    capsys.readouterr()
    assert main([*FIT, "--keep-best"]) == 130
    found = capsys.readouterr().err
    assert "no split was done, so there is nothing to keep yet" in found and "nothing was left half-written" in found
    assert not (place / "fedkin-model").exists()
