"""Fed-ADMM (Algorithms 1 and 2 of the paper): decentralised stochastic ADMM, with sites that may come and go."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from numpy.typing import ArrayLike

from fedkin.admm.availability import Availability
from fedkin.admm.gradients import GradientKind
from fedkin.admm.in_process.backend import Backend
from fedkin.admm.in_process.session import Recording, RunSetup, Session
from fedkin.admm.in_process.trace import Callback, Trace
from fedkin.admm.plan import BatchSize, Settings
from fedkin.admm.shard import Average
from fedkin.core import Problem, Solution


class RunOptions(TypedDict, total=False):
    """What may be said about a run beside the arguments that `fed_admm` names; it explains all of them."""

    rho: float | Literal["auto"]
    step: float | Literal["auto", "literal"]
    kappa: float | None
    average: Average | None
    gradient: GradientKind
    seed: int
    callbacks: Sequence[Callback]
    record_every: int | None
    checkpoint: str | os.PathLike[str] | None
    checkpoint_every: int | None
    resume: bool
    fuse: bool
    shards: int | Sequence[int]
    backend: Backend


def fed_admm(
    problem: Problem,
    rounds: int = 1000,
    batch_size: BatchSize = None,
    *,
    availability: Availability | None = None,
    streams: Mapping[Any, Iterable[Any]] | None = None,
    tol: float | None = None,
    reference: Solution | ArrayLike | None = None,
    warm_start: Solution | None = None,
    **others: Unpack[RunOptions],
) -> Solution:
    """Minimise the objective of ``problem`` by Fed-ADMM: each round, a site looks at a batch and tells its
    neighbours its theta.

    Parameters
    ----------
    problem : Problem
        What is solved.
    rounds : int
        Rounds to do, counted from the very first one also when resuming.
    batch_size : int, sequence of V ints or None
        Rows that a site draws in each round, without replacement; None for all its rows.
    availability : Availability, optional
        Sites that come and go (Algorithm 2).
    streams : mapping {site: iterable of samples}, optional
        These sites see new samples ``(x, y)`` in every round; their stored rows serve for the curvature and the
        reported objective only.
    tol : float, optional
        Stop when the relative duality gap is at most this; it is computed for every line of the trace.
    reference : Solution or array (V, p), optional
        For the column ``distance`` of the trace.
    warm_start : Solution, optional
        Where theta and the edge duals start; at 0 by default.

    Other Parameters
    ----------------
    rho : float or "auto"
        Penalty of the augmented Lagrangian. By default ``mean curvature / mean degree``, times 4 where noise does not
        force the steps to shrink.
    step : "auto", float or "literal"
        "auto": proximal steps chosen by each site from its own curvature. A number kappa: proximal steps
        ``eta_i(t) = e / (1 + rho |N_i| e)`` with ``e(t) = kappa / t``. "literal": ``eta(t) = kappa / t`` as printed
        in the paper, which explodes easily.
    kappa : float, optional
        For ``step="literal"``; by default from the curvature.
    average : "tail", "paper", "last" or None
        What is returned: an average in which round t weighs like t^3 and so forgets the beginning, the plain average of
        theta(0), ..., theta(T-1) that the theorem is about, or the last theta. By default "last" where nothing is
        random or ``gradient`` removes the variance, "tail" otherwise.
    gradient : "plain", "saga" or "svrg"
        The paper's mini-batch gradient, or one whose variance vanishes: linear convergence on strongly convex losses.
        SAGA remembers a number per row, SVRG passes over all rows now and then.
    seed : int
        Of the batches and of the availability.
    callbacks : sequence of callables
        Called with a `Progress` whenever a line is recorded; a true result ends the run.
    record_every : int, optional
        Rounds between lines of the trace; by default they grow by a fifth.
    checkpoint : path, optional
        SQLite file to write the state to: every ``checkpoint_every`` rounds, at the end and at Ctrl-C.
    checkpoint_every : int, optional
        By default whenever a line is recorded.
    resume : bool
        Go on from the checkpoint; the result is that of a run without the break, to the bit.
    fuse : bool
        Make sites equal to the bit whose edges the duals show to be fused (for `Solution.clusters`), unless that
        makes the gap worse.
    shards : int or sequence of V ints
        Number of shards inside this process, or the shard of each site. It does not change a bit of the result.
    backend : "auto", "numpy" or "numba"
        "numpy" is the reference, with the same bits in every engine; "numba" is faster and agrees to 1e-10; "auto"
        compiles when the work pays.

    Returns
    -------
    Solution
        ``trace`` has the columns ``n_iter``, ``objective``, ``dual_residual`` (of the returned parameters: root mean
        square over sites of gradient plus duals), ``primal_residual`` (root mean square over edges of theta -
        beta), ``distance`` (``||theta - reference||_F^2 / |V|``), ``vectors`` and ``bytes`` (that would have
        travelled up to then), ``rows`` (looked at up to then), ``available`` (share of sites in that round) and
        ``gap`` (with ``tol``).

    Raises
    ------
    ParameterError
        When an argument is out of range.
    SolverError
        When the run diverges with the steps that were asked for.

    Notes
    -----
    docs/fed-admm.md follows a row through a round and derives the form that is computed. The gap is certified by the
    edge duals, which stay inside their balls in every round, and so do their averages.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=10, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> problem = fedkin.Problem(design.federation, design.graph, lam=0.01)
    >>> exact = fedkin.solve(problem, 1e-10)
    >>> solution = fedkin.fed_admm(problem, rounds=300, batch_size=5, gradient="saga", reference=exact)
    >>> bool(solution.trace["distance"][-1] < 1e-10)
    True
    """
    rest: dict[str, Any] = dict(others)
    recording = Recording(tol, **_taken(rest, Recording))
    settings = Settings(batch_size, **_taken(rest, Settings))
    setup = RunSetup(settings, rounds, availability, streams, warm_start, **rest)
    return Session(problem, setup).run(Trace(problem, reference), recording)


def _taken(rest: dict[str, Any], kind: type) -> dict[str, Any]:
    """Take out of ``rest`` what a dataclass has fields for."""
    return {name: rest.pop(name) for name in kind.__dataclass_fields__ if name in rest}  # type: ignore[attr-defined]
