"""Loops that tell how far they are: bars, lines, the log, Ctrl-C."""

from __future__ import annotations

import io
import logging
import signal
import threading
import time

import pytest
from rich.console import Console

import fedkin
import fedkin.cli.fit
from fedkin._base import listening, tracked
from fedkin.cli import main
from fedkin.datasets import paper_design
from fedkin.fitting import FitOptions, compare, fit
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


def test_a_bar_shows_loops_and_the_time_left():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with fedkin.progress("a long computation", console=console) as say:
        say("the second step")
        for _ in tracked(range(3), "folds"):
            for _ in tracked(range(2), "levels"):
                pass
    text = shown.getvalue()
    assert "the second step" in text


def test_time_left_in_words():
    from fedkin.fitting.progress import time_left

    now = time.monotonic()
    assert time_left(0.0, now, 0, 5) == time_left(0.0, now, 5, 5) == ""
    assert time_left(-1e9, now, 1, 2).endswith("min left")


def test_the_time_left_shrinks_while_a_turn_is_under_way(monkeypatch):
    """Two turns of ten seconds are done, two are left; the third takes longer than the others."""
    from fedkin.fitting import progress

    words = []
    for second in (0, 4, 8, 12, 19.5):
        monkeypatch.setattr(progress.time, "monotonic", lambda second=second: 120.0 + second)
        words.append(progress.time_left(100.0, 120.0, 2, 4))
    assert words == ["about 20 s left", "about 16 s left", "about 12 s left", "about 8 s left", "about 1 s left"]


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


def test_short_runs_are_silent(place, capsys):
    assert main([*FIT, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_the_log_is_called_fedkin(caplog):
    with caplog.at_level(logging.DEBUG, logger="fedkin"):
        list(tracked("ab", "letters"))
    assert [record.name for record in caplog.records] == ["fedkin"] * 3
    assert caplog.records[-1].getMessage().startswith("letters: 2 in ")


def test_cross_validation_and_splits_tell_how_far_they_are():
    heard = set()
    with listening(lambda words, done, total: heard.add((words, done == total))):
        design = paper_design(n_sites=6, n_samples=20, n_features=2, n_clusters=1)
        compare(design.federation, design.graph, FitOptions(select="none", cv_folds=2), repeats=1)
    for words in ("comparing on held-out rows", "cross-validation"):
        assert {(words, False), (words, True)} <= heard


def test_listeners_end_with_their_context():
    heard = []
    with listening(lambda *turn: heard.append(turn)):
        list(tracked("a", "one"))
    list(tracked("b", "two"))
    assert heard == [("one", 0, 1), ("one", 1, 1)]


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
