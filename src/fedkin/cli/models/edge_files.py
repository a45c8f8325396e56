"""The files that say who may be alike: a graph, or covariates of the sites, which are read as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedkin._base import in_file
from fedkin.cli.shared.console import note
from fedkin.cli.shared.kin_words import graph_use_words
from fedkin.cli.shared.model_words import graph_words
from fedkin.cli.shared.reading import check_exists
from fedkin.errors import DataError, ParameterError
from fedkin.fitting import FittedModel
from fedkin.graph import Graph
from fedkin.kin import Covariates, covariate_graph, covariate_remarks, read_covariates


@dataclass(frozen=True)
class EdgeFiles:
    """Paths as the command line has them; ``site`` is the column of the sites in the table of covariates."""

    graph: Path | None = None
    covariates: Path | None = None
    site: str | None = None

    def __post_init__(self) -> None:
        if self.graph is not None and self.covariates is not None:
            raise ParameterError("give --graph or --covariates, not both: covariates are read as a graph")

    @property
    def given(self) -> bool:
        """Whether there is a file."""
        return self.graph is not None or self.covariates is not None

    def read(self, sites: Sequence[Hashable]) -> tuple[Graph | None, Covariates | None]:
        """The graph for these sites, and the covariates that it was made of."""
        if self.covariates is None:
            return None if self.graph is None else Graph.read(self.graph, sites), None
        check_exists(self.covariates)
        if self.covariates.is_dir():
            raise ParameterError(
                f"--covariates: {self.covariates} is a directory, expected a file with a line for each site"
            )
        known = read_covariates(self.covariates, sites, self.site)
        for words in covariate_remarks(known):
            note(f"{self.covariates}: {words}")
        with in_file(self.covariates, DataError):
            return covariate_graph(known, sites), known

    def words(self, model: FittedModel, without: str = "all pairs of sites") -> dict[str, str]:
        """A line about them: what was made of the edges. Where there is no file, ``without`` is the fused one's."""
        path = self.graph or self.covariates
        if model.kin is None:
            name = "graph" if self.covariates is None else "covariates"
            return {name: f"{without if path is None else path}: {graph_words(model)}"}
        if path is None:
            return {}
        return {name: f"{path}: {words}" for name, words in graph_use_words(model).items()}
