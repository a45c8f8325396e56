"""`Asks`: what the organiser asks the sites next, and all that it has to remember until they have answered."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec.structs
import numpy as np

from fedkin._base import Array, Index
from fedkin.core import Message, Query, check_shapes, decode, encode, refuse
from fedkin.errors import UnknownSiteError
from fedkin.graph import Graph


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
        others = {name: getattr(self, name) for name in _KEPT}
        questions = [question.to_plain() for question in self.questions]
        notes = [(str(site), tuple(lines)) for site, lines in self.notes.items()]
        edges, weights = self.graph.edges, self.graph.weights
        return encode(_State(questions=questions, edges=edges, weights=weights, notes=notes, **others))

    @classmethod
    def from_plain(cls, plain: object) -> Asks:
        """Read what `to_plain` wrote; raises `DataError` with what is wrong."""
        what = "the file of questions"
        state = decode(plain, _State, what)
        if not state.questions or state.round < 2:
            refuse(what, "has no questions of a second round")
        asked = tuple(Query.from_plain(question) for question in state.questions)
        sites, p, edges = tuple(question.site for question in asked), asked[0].theta.size, len(state.weights)
        duals = len(asked) if len(state.alpha) == len(asked) else edges
        shapes = {"edges": (edges, 2), "theta": (len(asked), p), "alpha": (duals, p), "ridge": (p,)}
        shapes |= {name: (len(asked), p) for name in ("zeta", "best_theta") if getattr(state, name) is not None}
        alpha, links = state.alpha.reshape(-1, p), state.edges.reshape(-1, 2)
        check_shapes(msgspec.structs.replace(state, alpha=alpha, edges=links), shapes | {"give": (len(asked),)}, what)
        return cls(
            questions=asked,
            graph=Graph.from_indices(sites, links, state.weights),
            notes=dict(state.notes),
            **{name: getattr(state, name) for name in _KEPT} | {"alpha": alpha},
        )


class _State(Message, frozen=True):
    """`Asks` as a file holds it."""

    round: int
    questions: list[dict[str, Any]]
    lam: float
    edges: Index
    weights: Array
    theta: Array
    alpha: Array
    ridge: Array
    give: Array
    accuracy: float
    notes: list[tuple[str, tuple[str, ...]]]
    best_value: float = np.inf
    gap: float = np.inf
    zeta: Array | None = None
    best_theta: Array | None = None
    selection: dict[str, Any] | None = None


#: What is in a file as it is in `Asks`.
_KEPT = tuple(set(_State.__struct_fields__) - {"questions", "edges", "weights", "notes"})
