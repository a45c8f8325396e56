"""``fedkin site select DIR``: edge selection between sites.

Each site fits its own rows and sends its neighbours the estimate, its covariance and what the test needs to know
about them (``p^2 + 2 p + 5`` numbers). Both ends of an edge can then test it; the end with the smaller position decides
and tells the other, so that rounding cannot make them disagree. The Bonferroni threshold ``level / |E|`` needs no one
else.

What differs from `fedkin.select_edges`, which sees all sites at once: noise variances are moderated across the two
ends only, and a site without an estimate of its own takes the scale of its prior from its own rows.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import numpy as np

from fedkin._base import Array
from fedkin.core import LocalFit, bonferroni, local_fit, wald_tests
from fedkin.data import Federation
from fedkin.errors import DegenerateSiteWarning, ParameterError
from fedkin.federate.endpoint import Action, Endpoint
from fedkin.federate.frames import Kind
from fedkin.federate.inbox import Patience
from fedkin.federate.journal import Journal
from fedkin.federate.plan import SitePlan
from fedkin.federate.program import Program, parse, run_program
from fedkin.federate.records import SELECTION, Selection, write_record
from fedkin.federate.transports import Transport


def summary(plan: SitePlan) -> Array:
    """Return what a site tells about its own fit: theta, covariance, prior precision, and five facts."""
    assert plan.select is not None and plan.rows is not None
    rows = plan.rows.of(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateSiteWarning)  # `rescued` travels, and the log says so
        fit = local_fit(Federation({0: rows}), plan.rows.losses[0], plan.select.variance)
    dof = fit.residual_dof[0] if np.isfinite(fit.residual_dof[0]) else -1.0
    facts = [fit.n_samples[0], fit.dispersion[0], dof, fit.matrix_estimated[0], fit.rescued[0]]
    parts = [fit.theta[0], fit.covariance[0].ravel(), fit.prior_precision[0], np.array(facts, dtype=float)]
    return np.concatenate(parts)


def _pair(plan: SitePlan, first: Array, second: Array) -> LocalFit:
    """Return a `LocalFit` of two sites from their summaries."""
    assert plan.select is not None
    p, both = plan.n_params, np.stack([first, second])
    samples, dispersion, dof, whole, rescued = both[:, -5:].T
    return LocalFit(
        sites=(0, 1),
        theta=both[:, :p],
        hessian=np.zeros((2, p, p)),
        covariance=both[:, p : p + p * p].reshape(2, p, p),
        n_samples=samples.astype(np.int64),
        dispersion=dispersion,
        residual_dof=np.where(dof < 0, np.inf, dof),
        matrix_estimated=whole > 0.5,
        prior_precision=both[:, p + p * p : 2 * p + p * p],
        rescued=rescued > 0.5,
        notes={},
        variance=plan.select.variance,
        losses=(str(plan.loss["name"]),) * 2,
    )


def select(
    plan: SitePlan, transport: Transport, journal: Journal, patience: Patience, *, tick: Action | None = None
) -> Selection:
    """Exchange summaries and verdicts with the neighbours, and say whose edge is dropped.

    ``tick`` is called several times a second while waiting.
    """
    if plan.select is None:
        raise ParameterError("this federation tests no edges: its contract has no [rounds.select]")
    here, own = plan.here, summary(plan)
    if own[-1]:
        journal.write("warning", "no estimate of its own: a ridge fit stands in")
    end = Endpoint(plan, transport, journal, patience=patience, tick=tick)
    lengths = {Kind.SUMMARY: own.size, Kind.VERDICT: 1, Kind.CHOSEN: 0}
    end.open(lambda v: [end.expected(kind, v, lengths[kind], 0, 0) for kind in plan.kinds(v, here) if kind in lengths])
    end.send(Kind.SUMMARY, 0, own)
    end.wait_for(Kind.SUMMARY, end.partners, 0)
    p_values = {}
    for v in end.partners:
        other = end.inbox.values(Kind.SUMMARY, v, 0)
        lower, upper = (own, other) if here < v else (other, own)
        p_values[v] = float(wald_tests(_pair(plan, lower, upper), np.array([[1, 0]]))[1][0])
        if here < v:
            end.send(Kind.VERDICT, 0, np.array([p_values[v]]), v)
    # the smaller end decides
    smaller = [v for v in end.partners if v < here]
    end.wait_for(Kind.VERDICT, smaller, 0)
    p_values |= {v: float(end.inbox.values(Kind.VERDICT, v, 0)[0]) for v in smaller}
    end.linger(Kind.CHOSEN, 0)
    threshold = bonferroni(plan.select.level, plan.n_edges)
    dropped = [plan.name(v) for v in sorted(p_values) if p_values[v] < threshold]
    journal.write("info", "edges selected", kept=len(p_values) - len(dropped), of=len(p_values))
    told = {plan.name(v): p_values[v] for v in sorted(p_values)}
    return Selection(plan.run, plan.revision, threshold, told, dropped)


def run(program: Program, patience: Patience) -> None:
    """Test the edges of a site and write its ``selection.json``."""
    program.status.status.state = "testing edges"
    with program.linked() as transport:
        chosen = select(program.plan, transport, program.journal, patience, tick=program.tick)
        write_record(program.place / SELECTION, chosen)
        program.status.end("selected")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments and test the edges of one site."""
    place, patience, given = parse("site select", "Test the edges of one site.", Patience(linger=60.0), arguments)
    return run_program(place, lambda program: run(program, patience), **given)


if __name__ == "__main__":
    sys.exit(main())
