"""Work in several processes that die with their parent and do not hear Ctrl-C.

Each process is a `ProcessPoolExecutor` of its own, with one worker. One executor with many workers (or joblib's) cannot
tell which item a worker had when it was killed, does not end its workers on Ctrl-C, and leaves them running when the
parent is killed; here the dead worker's item is known, workers are ended at once, and they watch their parent.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for_end
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from fedkin.errors import DataError, FedkinError, GraphError, MissingDependencyError, ParameterError

Item = TypeVar("Item")
Result = TypeVar("Result")

#: One thread per process: many processes are faster than threads here, and results do not depend on the cores.
ONE_THREAD = [f"{one}_NUM_THREADS" for one in ("OMP", "OPENBLAS", "MKL", "NUMBA")] + ["VECLIB_MAXIMUM_THREADS"]

#: Errors about what a worker was given: the message says it all, where in the code it was noticed does not matter.
_WRONG_INPUT = (ParameterError, DataError, GraphError, MissingDependencyError)


class WorkerError(FedkinError, RuntimeError):
    """A worker raised, or died, at ``item``; the message carries its traceback, unless the input was wrong."""

    def __init__(self, message: str, item: Any, *, wrong_input: bool = False) -> None:
        super().__init__(message)
        self.item, self.wrong_input = item, wrong_input


class _Worker:
    """One process behind an executor of its own."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)
        self._process: BaseProcess | None = None

    def submit(self, item: Any) -> Future[Any]:
        """Begin with an item; the first one starts the process."""
        before = set(multiprocessing.active_children())
        future = self._executor.submit(_answer, self._function, item)
        if self._process is None:
            self._process = next(iter(set(multiprocessing.active_children()) - before), None)
        return future

    def result(self, future: Future[Any], item: Any) -> Any:
        """What the function gave for the item."""
        try:
            good, value, wrong_input = future.result()
        except BrokenProcessPool:
            self._executor.shutdown()  # its thread asks for the exit code: two at a time may both miss it
            code = None if self._process is None else self._process.exitcode
            words = f"a worker process died (exit code {code}; -9 often means that memory ran out: use fewer jobs)"
            raise WorkerError(words, item) from None
        if not good:
            raise WorkerError(value, item, wrong_input=wrong_input)
        return value

    def end(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.terminate()
        self._executor.shutdown(cancel_futures=True)


def map_in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int
) -> Generator[tuple[Item, Result]]:
    """``(item, function(item))`` in the order in which they are finished.

    Items are taken one by one, as workers become free. When the function raises or a process dies, the other processes
    are ended and `WorkerError` is raised.
    """
    todo = iter(items)
    workers = [_Worker(function) for _ in range(jobs)]
    try:
        with _one_thread_each():
            running = {worker.submit(item): (worker, item) for worker, item in zip(workers, todo, strict=False)}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                worker, item = running.pop(future)
                result = worker.result(future, item)
                for following in todo:
                    running[worker.submit(following)] = worker, following
                    break
                yield item, result
    finally:
        for worker in workers:
            worker.end()


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and decides
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_end([parent.sentinel])
    os._exit(1)


def _answer(function: Callable[[Any], Any], item: Any) -> tuple[bool, Any, bool]:
    """Whether it went well, the result or the message, and whether the input was wrong; all of it can be pickled."""
    try:
        return True, function(item), False
    except _WRONG_INPUT as error:
        return False, str(error), True
    except Exception:
        return False, traceback.format_exc(), False


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started inside use one thread of linear algebra each."""
    before = {name: os.environ[name] for name in ONE_THREAD if name in os.environ}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name in ONE_THREAD:
            os.environ.pop(name, None)
        os.environ.update(before)
