"""How fast Fed-ADMM converges: the rates of the theorem, variance reduction, and the order of section 5.3.

    python benchmarks/fedadmm_convergence.py rates reduction order

Distances are ``||theta - minimiser||_F^2 / |V|``, the theorem's quantity; the minimiser comes from `fedkin.solve`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from fedkin.admm import Average
from fedkin.admm.algorithm import fed_admm
from fedkin.admm.trace import subgradient_descent
from fedkin.core import Problem, Solution
from fedkin.datasets import Design, paper_design
from fedkin.solvers import cross_validate_lam, solve

#: lam * |V|, near the smallest estimation error of the paper's design.
STRENGTH = {"linear": 0.01, "logistic": 0.003}


def the_paper(loss: str, V: int = 100, n: int = 100) -> tuple[Design, Problem]:
    design = paper_design(n_sites=V, n_samples=n, loss=loss, seed=0)
    return design, Problem(design.federation, design.graph, loss=loss, lam=STRENGTH[loss] / V)


def at(solution: Solution, rounds: int, column: str = "distance") -> float:
    return float(solution.trace[column][np.searchsorted(solution.trace["n_iter"], rounds)])


def slope(solution: Solution, first: int) -> float:
    n, distance = solution.trace["n_iter"], solution.trace["distance"]
    return float(np.polyfit(np.log(n[n >= first]), np.log(distance[n >= first]), 1)[0])


def rates(rounds: int) -> None:
    print(f"\n| loss | average | T=10^3 | 10^4 | {rounds:g} | slope from 10^3 on |\n|---|---|---|---|---|---|")
    for loss in ("linear", "logistic"):
        _, problem = the_paper(loss)
        exact = solve(problem, 1e-10)
        for average in ("tail", "paper", "last"):
            run = fed_admm(problem, rounds, 10, average=average, reference=exact)
            shown = " | ".join(f"{at(run, t):.1e}" for t in (1000, 10_000, rounds))
            print(f"| {loss} | {average} | {shown} | {slope(run, 1000):.2f} |", flush=True)


def reduction() -> None:
    print("\n| loss | gradient | rounds | rows looked at | relative distance (squared) |\n|---|---|---|---|---|")
    for loss in ("linear", "logistic"):
        _, problem = the_paper(loss)
        exact = solve(problem, 1e-13)
        size = (exact.theta**2).sum() / problem.n_sites
        rounds = {
            "linear": {"plain": 1000, "saga": 1000, "svrg": 400},
            "logistic": {"plain": 4000, "saga": 4000, "svrg": 1600},
        }
        for gradient, count in rounds[loss].items():
            run = fed_admm(problem, count, 10, gradient=gradient, reference=exact)  # type: ignore[arg-type]
            rows = run.trace["rows"][-1] / problem.n_sites
            print(f"| {loss} | {gradient} | {count} | {rows:.0f} per site | {at(run, count) / size:.1e} |", flush=True)


def order(rounds: int, seed: int) -> None:
    """Fed-ADMM without tuning against SGD and GD on a grid of constants, for two kinds of steps and two averages.

    The grid's best run is the one with the smallest last distance. The last two columns say how often, among the
    records after round 100, that run is ahead of Fed-ADMM, and how often any run of the grid is, and by how much.
    """
    print(f"\nseed {seed}\n| n, V | batch | method | 100 | 300 | 1000 | {rounds} | best is ahead | any is ahead |")
    print("|---|---|---|---|---|---|---|---|---|")
    rooted, plain = (0.03, 0.06, 0.12, 0.18, 0.25, 0.35, 0.5), (0.5, 1.0, 1.5, 2.0, 3.0)
    families: list[tuple[float, tuple[float, ...], Average]] = [
        (0.5, rooted, "last"),
        (0.5, rooted, "tail"),
        (1.0, plain, "last"),
        (1.0, plain, "tail"),
    ]
    for n in (50, 100):
        for V in (40, 60, 80):
            design = paper_design(n_sites=V, n_samples=n, seed=seed)
            problem = Problem(design.federation, design.graph)
            problem = problem.with_lam(cross_validate_lam(problem).lam)
            exact = solve(problem, 1e-10)
            for batch in (10, None):
                ours = fed_admm(problem, rounds, batch, reference=exact)
                show(f"{n}, {V}", batch, "Fed-ADMM", ours, [], ours)
                for decay, constants, average in families:
                    given = {"decay": decay, "average": average, "reference": exact}
                    runs = [subgradient_descent(problem, rounds, batch, step=c, **given) for c in constants]
                    best = min(runs, key=lambda run: at(run, rounds))
                    show(f"{n}, {V}", batch, f"{'SGD' if batch else 'GD'} c/t^{decay:g}, {average}", best, runs, ours)


def show(setting: str, batch: int | None, method: str, run: Solution, runs: list[Solution], ours: Solution) -> None:
    late = ours.trace["n_iter"] > 100
    shown = " | ".join(f"{at(run, t):.1e}" for t in (100, 300, 1000, run.n_iter))
    ahead = anyone = ""
    if runs:
        factors = np.array([ours.trace["distance"][late] / one.trace["distance"][late] for one in runs])
        count, most = int((factors >= 1).any(axis=0).sum()), factors.max()
        ahead = str(int((factors[runs.index(run)] >= 1).sum()))
        anyone = f"{count}, by {most:.2f}" if count else "0"
    print(f"| {setting} | {batch or 'all'} | {method} | {shown} | {ahead} | {anyone} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["rates", "reduction", "order"])
    parser.add_argument("--rounds", type=int, default=100_000, help="of the rates")
    parser.add_argument("--seed", type=int, default=0, help="of the designs on which the order is compared")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "rates": lambda: rates(arguments.rounds),
        "reduction": reduction,
        "order": lambda: order(3000, arguments.seed),
    }
    for part in arguments.parts:
        parts[part]()


if __name__ == "__main__":
    main()
