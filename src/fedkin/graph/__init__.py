"""Graphs over sites: edges that say which sites may be alike."""

from __future__ import annotations

from fedkin.graph.edges import Cliques
from fedkin.graph.graph import Graph

__all__ = ["Cliques", "Graph"]
