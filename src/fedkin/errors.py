"""The exceptions of Fedkin, in one tree.

::

    FedkinError
    ├── DataError            (ValueError)    rows, columns, targets, files of data
    │   └── UnknownSiteError (KeyError)      a site that the federation or model does not have
    ├── GraphError           (ValueError)    edges, weights, files of graphs
    ├── ParameterError       (ValueError)    an argument outside its range
    ├── ModelFileError       (ValueError)    a model directory that cannot be read
    ├── SolverError          (RuntimeError)  no finite minimiser, or a run that diverges
    └── MissingDependencyError (ImportError) an optional package is needed

    FedkinWarning            (UserWarning)
    ├── ConvergenceWarning                   an iteration limit was reached
    ├── GraphWarning                         repeated edges, sites that a graph does not name
    ├── DegenerateSiteWarning                a site without a local estimate of its own
    ├── ChangeWarning                        rows of a stream that follow other parameters
    └── TableWarning                         a column left out of a table, a level not in the training rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class FedkinError(Exception):
    """Base of every exception that Fedkin raises on purpose."""


class DataError(FedkinError, ValueError):
    """Rows, columns, targets or data files that cannot be used."""


class UnknownSiteError(DataError, KeyError):
    """A site that the federation or the model does not have."""

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return str(self.args[0]) if self.args else ""


class GraphError(FedkinError, ValueError):
    """Edges, weights or graph files that cannot be used."""


class ParameterError(FedkinError, ValueError):
    """An argument outside its range."""


class ModelFileError(FedkinError, ValueError):
    """A model directory that is missing, truncated or of another kind."""


class SolverError(FedkinError, RuntimeError):
    """The problem has no finite minimiser, or a run diverged."""


class MissingDependencyError(FedkinError, ImportError):
    """An optional package is needed."""


class FedkinWarning(UserWarning):
    """Base of Fedkin's warnings."""


class ConvergenceWarning(FedkinWarning):
    """A solver stopped at its iteration limit."""


class GraphWarning(FedkinWarning):
    """Edges that were merged, or sites without edges because the graph does not name them."""


class DegenerateSiteWarning(FedkinWarning):
    """A site has no local estimate of its own, and a stated rule was used instead."""


class ChangeWarning(FedkinWarning):
    """The rows of a stream start to follow different parameters."""


class TableWarning(FedkinWarning):
    """A stated rule was applied to a table: a column was left out, or a level was not in the training rows."""


def missing_dependency(package: str, purpose: str, extra: str) -> MissingDependencyError:
    """Return the error to raise when ``import package`` fails for ``purpose``."""
    return MissingDependencyError(f"{purpose} needs {package}: pip install 'fedkin[{extra}]'")


def _as_in_python(name: str, value: object) -> str:
    if value is None:
        return f"{name}="
    return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}"


_spelling: list[Callable[[str, object], str]] = [_as_in_python]


def argument(name: str, value: object = None) -> str:
    """Spell an argument in a message for the interface in use: Python or the command line."""
    return _spelling[-1](name, value)


@contextmanager
def spelled(spelling: Callable[[str, object], str]) -> Iterator[None]:
    """Spell arguments as ``spelling(name, value)`` within this context; value is None for the name alone."""
    _spelling.append(spelling)
    try:
        yield
    finally:
        _spelling.pop()
