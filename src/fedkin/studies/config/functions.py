"""Functions that a study's file names as "module:function"; their modules may lie beside the file."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

from fedkin.errors import ParameterError


@contextmanager
def modules_beside(folder: Path | None) -> Iterator[None]:
    """Within this context the modules in ``folder`` can be imported, also by processes that are started in it.

    Afterwards they are forgotten, so that the next study imports its own modules, and edited ones anew.
    """
    if folder is None:
        yield
        return
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and folder in Path(file).parents:
                del sys.modules[name]


def find_function(name: str, where: str) -> Callable[..., Any]:
    """Import the function called "module:function".

    Parameters
    ----------
    name : str
        As in the study's file.
    where : str
        The entry that names it, for messages.

    Raises
    ------
    ParameterError
        In one line, when the module cannot be imported or has no such function.
    """
    module, _, function = name.partition(":")
    try:
        home = import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ParameterError(
                f"{where}: there is no module {module!r}; put {module}.py beside the TOML file or install it"
            ) from None
        raise ParameterError(f"{where}: importing {module!r} failed: {_last_line(error)}; mend the module") from error
    file = getattr(home, "__file__", None)
    if file is None:
        raise ParameterError(
            f"{where}: the module {module!r} has no file of its own; name a function in a .py file beside the TOML file"
        )
    if not hasattr(home, function):
        raise ParameterError(f"{where}: {file} has no function {function!r}; define it there or mend the name")
    found: Callable[..., Any] = getattr(home, function)
    if not callable(found):
        raise ParameterError(f"{where}: {function!r} of {file} is a {type(found).__name__}, not a function")
    return found


def code_digest(name: str, where: str) -> str:
    """Digest of the file that holds "module:function", so that edited code is not mistaken for what was run."""
    find_function(name, where)
    return hashlib.sha256(Path(str(sys.modules[name.partition(":")[0]].__file__)).read_bytes()).hexdigest()


def _last_line(error: Exception) -> str:
    """File, line and words of an error, in one line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"{frame.filename}, line {frame.lineno}: {type(error).__name__}: {words}"
