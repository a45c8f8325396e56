"""Represent graphs over sites, whose edges mark sites that may be alike."""

from __future__ import annotations

from fedkin.graph.edges import Cliques
from fedkin.graph.graph import Graph

__all__ = ["Cliques", "Graph"]
