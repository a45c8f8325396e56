"""`Asks`: what the organiser asks the sites next, and all that it has to remember until they have answered."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.core import INFINITE, Query, Reader
from fedkin.errors import UnknownSiteError
from fedkin.graph import Graph

#: Sparsity duals, and the best point so far: entries that may be missing.
_OPTIONAL = ("zeta", "best_theta")


@dataclass(frozen=True, eq=False)
class Asks:
    """A question to each site, and the state of the fit behind them.

    ``asks[site]`` is what the site gets; the rest stays with the organiser.

    Attributes
    ----------
    round : int
        Round of messages that the answers will make, from 2 on.
    questions : tuple of V Query
        In the units of the sites' columns.
    lam : float
    graph : Graph
        The edges that are used.
    theta : array (V, p)
        The point that is asked about, in the solver's units.
    alpha : array (E, p) or (V, p)
        Edge duals; of large cliques, their sums at each site.
    zeta : array (V, p), optional
        Sparsity duals.
    ridge : array (p,)
    give : array (V,)
        What it costs each site's ridge to be out of balance, so that its loss need not be.
    accuracy : float
        Relative gap to which the models are minimised.
    best_theta : array (V, p), optional
        The best point so far.
    best_value : float
        The objective there; infinite where there is none yet.
    gap : float
        Relative duality gap of the point before, infinite where it is not known.
    selection : mapping, optional
        Summary of the edge selection.
    notes : mapping {site: tuple of str}
    """

    round: int
    questions: tuple[Query, ...]
    lam: float
    graph: Graph
    theta: Array = field(repr=False)
    alpha: Array = field(repr=False)
    ridge: Array = field(repr=False)
    give: Array = field(repr=False)
    accuracy: float
    zeta: Array | None = field(default=None, repr=False)
    best_theta: Array | None = field(default=None, repr=False)
    best_value: float = np.inf
    gap: float = np.inf
    selection: Mapping[str, Any] | None = None
    notes: Mapping[Hashable, tuple[str, ...]] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[Hashable, ...]:
        return tuple(question.site for question in self.questions)

    def __getitem__(self, site: Hashable) -> Query:
        for question in self.questions:
            if question.site == site:
                return question
        raise UnknownSiteError(f"site {site!r} is not asked anything")

    def to_plain(self) -> dict[str, Any]:
        """Plain numbers and names, as a file holds them between two rounds; exact."""
        plain: dict[str, Any] = {
            "round": self.round,
            "questions": [question.to_plain() for question in self.questions],
            "lam": self.lam,
            "edges": [[int(i), int(j)] for i, j in self.graph.edges],
            "weights": self.graph.weights.tolist(),
            "theta": self.theta.tolist(),
            "alpha": self.alpha.tolist(),
            "ridge": self.ridge.tolist(),
            "give": self.give.tolist(),
            "accuracy": self.accuracy,
            "best_value": _finite(self.best_value),
            "gap": _finite(self.gap),
            "selection": None if self.selection is None else dict(self.selection),
            "notes": [[site, list(lines)] for site, lines in self.notes.items()],
        }
        return plain | {name: getattr(self, name).tolist() for name in _OPTIONAL if getattr(self, name) is not None}

    @classmethod
    def from_plain(cls, plain: object) -> Asks:
        """What `to_plain` wrote; raises `DataError` with what is wrong."""
        reader = Reader(plain, "the file of questions")
        questions = reader.take("questions")
        if not isinstance(questions, list) or not questions:
            reader.refuse("has no questions")
        asked = tuple(Query.from_plain(question) for question in questions)
        sites, p = tuple(question.site for question in asked), asked[0].theta.size
        weights = reader.take("weights")
        if not isinstance(weights, list):
            reader.refuse("has no list of weights")
        reader.left["weights"] = weights
        duals = reader.left.get("alpha", ())
        edges = reader.matrix("edges", len(weights), 2).astype(np.int64)
        shapes = {"zeta": len(asked), "best_theta": len(asked)}
        selection, notes = reader.take("selection"), reader.take("notes")
        made = cls(
            reader.whole("round", least=2),
            asked,
            reader.number("lam"),
            Graph.from_indices(sites, edges, reader.numbers("weights", len(weights))),
            reader.matrix("theta", len(asked), p),
            reader.matrix("alpha", len(duals) if len(duals) == len(asked) else len(weights), p),
            reader.numbers("ridge", p),
            reader.numbers("give", len(asked)),
            reader.number("accuracy"),
            **{name: reader.matrix(name, n, p) for name, n in shapes.items() if name in reader.left},
            best_value=reader.number("best_value", infinite=True),
            gap=reader.number("gap", infinite=True),
            selection=selection,
            notes={site: tuple(lines) for site, lines in notes},
        )
        reader.done()
        return made


def _finite(number: float) -> float | str:
    return float(number) if np.isfinite(number) else INFINITE
