"""What all tests share."""

# ruff: noqa: E402

from __future__ import annotations

import os

# Before numpy is imported: tests run side by side, and a pool of threads in each of them would slow all down.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import atexit
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from browser import chromium
from builders import DATA
from fedkin._base import wait_until
from processes import child_processes, end_processes, processes_on
from small_studies import OWN, SMALL

# A busy machine is no reason to fail: slow examples are caught by the time-out of the test. Examples are the same in
# every run, so that a change is not blamed for bad luck; HYPOTHESIS_PROFILE=explore looks at others.
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fedkin", derandomize=True, **_PATIENT)
settings.register_profile("explore", **_PATIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fedkin"))

# Tests interrupt themselves and their children, also when they were started in the background or by nohup, which ignore
# these signals, and after code that installed handlers for the rest of its process, as a site's process does.
_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


def _reset_signals() -> None:
    for number, handler in _HANDLERS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


_reset_signals()


@pytest.fixture(autouse=True)
def default_signals() -> None:
    """Start every test with Python's own handlers of signals, whatever ran before."""
    _reset_signals()


os.environ["FEDKIN_LEDGERS"] = tempfile.mkdtemp()
atexit.register(shutil.rmtree, os.environ["FEDKIN_LEDGERS"], ignore_errors=True)

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how to repeat the random order of a run that failed."""
    if terminalreporter.stats.keys() & {"failed", "error"}:
        seed = config.getoption("randomly_seed", None)
        terminalreporter.write_line(f"tests ran in random order; the same order again: --randomly-seed={seed}")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory of public data sets; the test is skipped where it does not exist."""
    if not DATA.is_dir():
        pytest.skip(f"no data in {DATA}: set FEDKIN_DATA to the directory that has them")
    return DATA


@pytest.fixture(autouse=True, scope="module")
def ledgers_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Larger fixtures of one module have ledgers apart from those of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDKIN_LEDGERS", str(tmp_path_factory.mktemp("ledgers")))
        yield


@pytest.fixture(autouse=True)
def own_ledgers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has ledgers of its own; those of larger fixtures are in the folder of their module."""
    monkeypatch.setenv("FEDKIN_LEDGERS", str(tmp_path_factory.mktemp("ledgers")))


@pytest.fixture(autouse=True)
def nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a process behind fails itself, instead of one that comes after it."""
    before = child_processes()
    folder = None
    if any(map(request.node.get_closest_marker, ("processes", "studies"))) and "tmp_path" in request.fixturenames:
        folder = request.getfixturevalue("tmp_path")
    yield

    def left() -> set[int]:
        return child_processes() - before | (processes_on(folder) if folder else set())

    if not wait_until(lambda: not left(), 60.0):  # what was told to end may take a moment, on a busy machine a long one
        pytest.fail("processes were left behind:\n" + "\n".join(end_processes(left())))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, which the tests of a file share."""
    with chromium() as one:
        yield one


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in a folder of its own; gives its output, both streams."""
    from fedkin.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, code: int = 0) -> str:
        ended = main(list(arguments))
        said = capsys.readouterr()
        assert ended == code, said
        assert "Traceback" not in said.err
        return said.out + said.err

    return run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with ``sites.csv``, a table of clinics."""
    from clinics import HEADER, clinic_rows, write

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sites.csv", HEADER, clinic_rows())
    return tmp_path


@pytest.fixture
def small_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study with its own task, as a user would write it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own", raising=False)  # of another test's folder
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path
