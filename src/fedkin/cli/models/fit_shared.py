"""``fedkin fit DIR`` where sites have put their summaries: a model at once, or the next questions to the sites."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkin import __version__
from fedkin._base import Say, count, listed
from fedkin.cli.models.edge_files import EdgeFiles
from fedkin.cli.models.results import check_converged, method_words, print_comparison, print_document
from fedkin.cli.shared.console import note, output, print_json, working
from fedkin.cli.shared.kin_words import graph_use_words
from fedkin.cli.shared.options import flag, with_contract
from fedkin.cli.shared.tables import print_facts
from fedkin.core import Summaries
from fedkin.errors import ConvergenceWarning, DataError, DegenerateSiteWarning, ParameterError, SolverError
from fedkin.fitting import (
    Comparison,
    FittedModel,
    Queries,
    compare,
    data_record,
    fit,
    with_covariates,
    with_history,
)
from fedkin.graph import Graph
from fedkin.kin import Covariates

if TYPE_CHECKING:
    from fedkin.federate import Contract, Organiser
    from fedkin.federate.sharing import Collected


def folder_of_summaries(path: Path) -> Path | None:
    """The folder with the summaries: ``heart/summaries``, which may be called ``heart``; None for other data."""
    for folder in (path, path / "summaries"):
        if folder.is_dir() and next(folder.glob("*.summary"), None) is not None:
            return folder
    # none has arrived, which is for the reader of summaries to say
    for folder in (path, path / "summaries"):
        if folder.is_dir() and folder.name == "summaries" and (folder.absolute().parent / "federation.json").exists():
            return folder
    return None


@dataclass(frozen=True, eq=False)
class Asked:
    """What to fit from: the folder, the edges, where the organiser's federation.json is, and how; the command."""

    data: Path
    files: EdgeFiles = field(default_factory=EdgeFiles)
    federation: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """What came of the summaries that are there: a model, or questions to the sites."""

    collected: Collected
    edges: Graph | None
    model: FittedModel | None = None
    comparison: Comparison | None = None
    asks: Queries | None = None
    questions: Sequence[Path] = ()


def fit_shared(asked: Asked, out: Path, as_json: bool) -> FittedModel | None:
    """Fit what the sites have shared; gives the model, which is saved in ``out``, or None when sites are asked."""
    with working(f"reading {asked.data}") as say:
        step = shared_step(asked, out, say)
    if as_json:
        _print_document(asked, out, step)
    elif step.asks is not None:
        _print_asks(step.asks, step.questions)
    else:
        print_step(asked, step)
    return step.model


def shared_step(asked: Asked, out: Path, say: Say) -> Step:
    """Fit what the sites have shared, and save the model in ``out``; or write what the sites are to be asked next."""
    from fedkin.cli.shared.contracts import fit_options
    from fedkin.federate import Organiser, sharing

    data, federation = asked.data, asked.federation
    collected = sharing.read_summaries(data, federation)
    summaries = Summaries.stack(collected.summaries.values())
    contract = collected.contract
    how = with_contract(asked.options, fit_options(contract))
    place = next((one for one in _places(data, federation) if (one / "sites.csv").exists()), None)
    organiser = None if place is None else Organiser.read(place)
    asks = _last_questions(organiser, collected, summaries)
    edges, known = _edges(asked.files, organiser, summaries)
    with warnings.catch_warnings():
        # both are said by the model: by its status, and by its notes
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DegenerateSiteWarning)
        found = fit(summaries, edges, how, say, contract.schema, queries=asks)
    if isinstance(found, Queries):
        return Step(collected, edges, asks=found, questions=_ask(found, organiser, contract))
    check_converged(found, how)
    say("comparing with Local and Global, every fold held out in turn")
    comparison = None
    try:
        comparison = compare(summaries, edges, how, model=found, schema=contract.schema)
    except DataError as error:
        note(f"no comparison: {error}")
    found = with_history(with_covariates(found, known), summaries, edges, how, contract.schema)
    record = {"data": data_record(data, int(found.n_samples.sum()))}
    found = replace(
        found,
        comparison=None if comparison is None else comparison.plain(),
        history={**(found.history or {}), **record, **({} if asked.command is None else {"command": asked.command})},
    )
    say(f"writing {out}")
    found.save(out)
    for name in collected.missing:
        note(f"{name} has sent no summary, so it has no model")
    return Step(collected, edges, found, comparison)


def print_step(asked: Asked, step: Step) -> None:
    """What a model was fitted from, and how well it predicts."""
    found, contract = step.model, step.collected.contract
    if found is None:
        return
    rows = int(found.n_samples.sum())
    given = "all pairs of sites" if step.edges is None else "the organiser's graph"
    about = asked.files.words(found, given) or (graph_use_words(found) if found.kin is not None else {})
    print_facts(
        {
            "data": f"{asked.data}: summaries of {count(found.n_sites, 'site')}, {rows} rows, which stayed there",
            "contract": f"{contract.name}: {found.loss.name} loss",
            "method": method_words(found),
            "messages": f"{step.collected.round} of every site",
            **about,
        }
    )
    if step.comparison is not None:
        print_comparison(step.comparison, found.fused is not None)


def _places(data: Path, federation: Path | None) -> list[Path]:
    if federation is not None:
        return [federation if federation.is_dir() else federation.parent]
    return [data, data.absolute().parent]


def _edges(
    files: EdgeFiles, organiser: Organiser | None, summaries: Summaries
) -> tuple[Graph | None, Covariates | None]:
    """The candidate edges between the sites that have sent summaries (None for all pairs), and their covariates."""
    if files.given:
        return files.read(summaries.sites)
    if organiser is None or organiser.graph.n_edges == 0:
        return None, None
    place = np.array([summaries.index.get(str(site), -1) for site in organiser.graph.sites])
    ends = place[organiser.graph.edges]
    here = (ends >= 0).all(axis=1)
    return Graph.from_indices(summaries.sites, ends[here], organiser.graph.weights[here]), None


def _last_questions(organiser: Organiser | None, collected: Collected, summaries: Summaries) -> Queries | None:
    """What was asked last, checked to be what the newest files answer."""

    if summaries.loss.quadratic:
        return None
    state = None if organiser is None else organiser.read_state()
    asks = None if state is None else Queries.from_plain(state)
    asked = 1 if asks is None else asks.round
    if collected.round < asked:
        raise DataError(
            f"the sites were asked question {asked}, but no answer is here yet: wait for the files of "
            f"{listed(collected.summaries, 8)}"
        )
    if collected.round > asked:
        raise DataError(
            f"the answers are to question {collected.round}, but the organiser's folder asks does not know it: fit "
            "in the organiser's directory, where the question came from"
        )
    return asks


def _ask(asks: Queries, organiser: Organiser | None, contract: Contract) -> list[Path]:
    """Write the questions."""

    if organiser is None:
        raise ParameterError(
            f"the {contract.loss['name']} loss needs more than one message per site, and only the organiser can ask "
            "for more: fit in its directory"
        )
    if asks.round > contract.messages:
        raise SolverError(
            f"the contract allows {count(contract.messages, 'message')} of a site, after which the relative gap is "
            f"{asks.gap:.1e}: accept it with a larger {flag('tol')}, or agree on a contract with more messages"
        )
    return organiser.write_queries(asks.questions, asks.to_plain())


def _print_asks(asks: Queries, questions: Sequence[Path]) -> None:
    """What to do with the questions."""
    console = output()
    if np.isfinite(asks.gap):
        console.print(f"After {count(asks.round - 1, 'message')} of every site the relative gap is {asks.gap:.1e}.")
    console.print(f"No model yet: one more message of every site is needed (number {asks.round}).")
    folder = questions[0].parent
    console.print(f"1. Send each site its question in {folder}:")
    for path in questions:
        console.print(f"     {path.name}")
    console.print("2. There: fedkin site answer DIR FILE, and send back what it writes")
    console.print(f"3. Put the answers into {folder.parent / 'summaries'}, and run this command again")


def _print_document(asked: Asked, out: Path, step: Step) -> None:
    if step.asks is not None:
        gap = None if not np.isfinite(step.asks.gap) else step.asks.gap
        question = {"round": step.asks.round, "gap": gap, "asks": [str(path) for path in step.questions]}
        print_json({"fedkin_version": __version__, "model": None, **question})
    if step.model is not None:
        print_document(asked.data, asked.files, out, step.model, step.comparison)
