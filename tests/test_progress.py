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
FIT = ["fit", "sites.csv", "--site", "site", "--target", "y", "--method", "fused", "--lam", "0.01", "--select", "none"]


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
    for turn, told in ((4, "2 splits"), (2, "fitted on all 96 rows")):  # the fit of all rows comes first
        interrupted_fit(monkeypatch, turn)
        assert main([*FIT, "--keep-best", "--repeats", "4"]) == 0
        found = capsys.readouterr()
        assert told in found.out
        assert ("there is no comparison" in found.err) == (turn == 2)
        assert fedkin.load("fedkin-model").n_samples.sum() == 96


def test_ctrl_c_ends_the_command_otherwise(place, capsys, monkeypatch):
    interrupted_fit(monkeypatch, 3)
    assert main([*FIT, "--repeats", "4"]) == 130
    interrupted_fit(monkeypatch, 1)
    capsys.readouterr()
    assert main([*FIT, "--keep-best"]) == 130
    assert "no incomplete files were left" in capsys.readouterr().err
    assert not (place / "fedkin-model").exists()
