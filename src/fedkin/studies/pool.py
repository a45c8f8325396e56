"""Work in several processes that die with their parent and do not hear Ctrl-C.

A worker gets one item at a time through its own pipe. When the parent is killed, the worker ends at once (it watches
the parent), so a study that is started again does not compete with the ghosts of the first run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

from fedkin.errors import DataError, FedkinError, GraphError, MissingDependencyError, ParameterError

Item = TypeVar("Item")
Result = TypeVar("Result")

#: One thread per process: many processes are faster than threads here, and results do not depend on the cores.
ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMBA_NUM_THREADS",
)


#: What was wrong with what a worker was given: the message says it, where in the code it was noticed does not matter.
_WRONG_INPUT = (ParameterError, DataError, GraphError, MissingDependencyError)


class WorkerError(FedkinError, RuntimeError):
    """A worker raised, or died; the message carries its traceback, unless the input was wrong.

    Attributes
    ----------
    item
        What it was working on.
    wrong_input : bool
        Whether the message is one about the input, without a traceback.
    """

    def __init__(self, message: str, item: Any, *, wrong_input: bool = False) -> None:
        super().__init__(message)
        self.item, self.wrong_input = item, wrong_input


@dataclass
class _Worker(Generic[Item]):
    process: SpawnProcess
    pipe: Connection
    item: Item


def map_in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int
) -> Iterator[tuple[Item, Result]]:
    """``(item, function(item))`` in the order in which they are finished.

    Parameters
    ----------
    function : callable
        At the top level of a module, as for every spawned process.
    items : iterable
        Taken one by one, as workers become free; None is not an item.
    jobs : int
        Number of processes.

    Raises
    ------
    WorkerError
        When the function raised or a process died. The other processes are ended.
    """
    todo = iter(items)
    workers: list[_Worker[Item]] = []
    with _one_thread_each():
        try:
            for _ in range(jobs):
                first = next(todo, None)
                if first is None:
                    break
                workers.append(_start(function, first))
            busy = list(workers)
            while busy:
                for pipe in wait([worker.pipe for worker in busy]):
                    worker = next(one for one in busy if one.pipe is pipe)
                    done, result = _take(worker)
                    following = next(todo, None)
                    if following is None:
                        worker.pipe.close()  # the worker reads the end and leaves
                        busy.remove(worker)
                    else:
                        _give(worker, following)
                    yield done, result
        finally:
            for worker in workers:
                if worker.process.is_alive() and not worker.pipe.closed:
                    worker.process.terminate()
            for worker in workers:
                worker.process.join(timeout=10)
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()


def _start(function: Callable[[Item], Any], item: Item) -> _Worker[Item]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, function), daemon=True)
    process.start()
    theirs.close()  # only the worker holds this end, so that its death is seen as the end of the pipe
    worker = _Worker(process, ours, item)
    _give(worker, item)
    return worker


def _give(worker: _Worker[Item], item: Item) -> None:
    worker.item = item
    with suppress(BrokenPipeError):  # a dead worker is noticed when its answer is read
        worker.pipe.send(item)


def _take(worker: _Worker[Item]) -> tuple[Item, Any]:
    item = worker.item
    try:
        good, value = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join(timeout=10)
        raise WorkerError(
            f"a worker process died (exit code {worker.process.exitcode}; -9 often means that memory ran out: "
            "use fewer jobs)",
            item,
        ) from None
    if not good:
        message, wrong_input = value
        raise WorkerError(message, item, wrong_input=wrong_input)
    return item, value


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """A worker's life: read an item, answer, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and decides
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    while True:
        try:
            item = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = (True, function(item))
        except _WRONG_INPUT as error:
            answer = (False, (str(error), True))
        except Exception:
            answer = (False, (traceback.format_exc(), False))
        with suppress(BrokenPipeError):
            pipe.send(answer)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started inside use one thread of linear algebra each."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
