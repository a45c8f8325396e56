"""How fast Fed-ADMM converges: the rates of the theorem, variance reduction, absence, and the order of section 5.3.

    python benchmarks/fedadmm_convergence.py rates reduction absence order

Distances are ``||theta - minimiser||_F^2 / |V|``, the theorem's quantity; the minimiser comes from `fedkin.solve`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from fedkin.availability import Availability
from fedkin.datasets import Design, paper_design
from fedkin.problem import Problem, Solution
from fedkin.solvers.exact import solve
from fedkin.solvers.fedadmm import fed_admm
from fedkin.solvers.gradient import subgradient_descent
from fedkin.tuning import cross_validate_lam

#: lam * |V|, near the smallest estimation error of the paper's design.
STRENGTH = {"linear": 0.01, "logistic": 0.003}


def the_paper(loss: str, V: int = 100, n: int = 100) -> tuple[Design, Problem]:
    design = paper_design(n_devices=V, n_samples=n, loss=loss, seed=0)
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
        size = (exact.theta**2).sum() / problem.n_devices
        rounds = {
            "linear": {"plain": 1000, "saga": 1000, "svrg": 400},
            "logistic": {"plain": 4000, "saga": 4000, "svrg": 1600},
        }
        for gradient, count in rounds[loss].items():
            run = fed_admm(problem, count, 10, gradient=gradient, reference=exact)  # type: ignore[arg-type]
            rows = run.trace["rows"][-1] / problem.n_devices
            print(
                f"| {loss} | {gradient} | {count} | {rows:.0f} per device | {at(run, count) / size:.1e} |", flush=True
            )


def absence(rounds: int, repeats: int) -> None:
    print("\n| loss | p | weighting | error / error without absence | 1 / p |\n|---|---|---|---|---|")
    for loss in ("linear", "logistic"):
        _, problem = the_paper(loss, V=40)
        exact = solve(problem, 1e-10)

        def error(availability: Availability | None, problem: Problem = problem, exact: Solution = exact) -> float:
            runs = (
                fed_admm(problem, rounds, 10, seed=k, availability=availability, reference=exact)
                for k in range(repeats)
            )
            return float(np.mean([at(run, rounds) for run in runs]))

        base = error(None)
        for p in (0.9, 0.7, 0.4):
            for weighting in ("known", "estimated"):
                ratio = error(Availability.bernoulli(p, weighting=weighting)) / base  # type: ignore[arg-type]
                print(f"| {loss} | {p} | {weighting} | {ratio:.2f} | {1 / p:.2f} |", flush=True)


def order(rounds: int) -> None:
    """Fed-ADMM without tuning against SGD and GD, each with its best constant, average and kind of step from a grid."""
    print(
        "\n| n, V | batch | method | 100 | 300 | 1000 | last | behind after round |\n|---|---|---|---|---|---|---|---|"
    )
    for n in (50, 100):
        for V in (40, 60, 80):
            design = paper_design(n_devices=V, n_samples=n, seed=0)
            problem = Problem(design.federation, design.graph)
            problem = problem.with_lam(cross_validate_lam(problem).lam)
            exact = solve(problem, 1e-10)
            for batch in (10, None):
                ours = fed_admm(problem, rounds, batch, reference=exact)
                show(f"{n}, {V}", batch, "Fed-ADMM", ours, None, rounds)
                for decay, constants in ((0.5, (0.03, 0.06, 0.12, 0.25, 0.5)), (1.0, (0.5, 1.0, 1.5, 2.0, 3.0))):
                    best = tuned(problem, rounds, batch, decay, constants, exact)
                    show(f"{n}, {V}", batch, f"{'SGD' if batch else 'GD'}, c/t^{decay:g}", best, ours, rounds)


def tuned(
    problem: Problem, rounds: int, batch: int | None, decay: float, constants: tuple[float, ...], exact: Solution
) -> Solution:
    """The run whose last distance is smallest."""
    runs = [
        subgradient_descent(problem, rounds, batch, step=c, decay=decay, average=average, reference=exact)
        for c in constants
        for average in ("last", "tail")
    ]
    return min(runs, key=lambda run: at(run, rounds))


def show(setting: str, batch: int | None, method: str, run: Solution, ours: Solution | None, rounds: int) -> None:
    shown = " | ".join(f"{at(run, t):.1e}" for t in (100, 300, 1000, rounds))
    behind = ""
    if ours is not None:
        ahead = run.trace["distance"] <= ours.trace["distance"]
        late = run.trace["n_iter"][ahead & (run.trace["n_iter"] > 100)]
        behind = "100 (always)" if late.size == 0 else f"ahead at {late.size} records, last at {late[-1]:.0f}"
    print(f"| {setting} | {batch or 'all'} | {method} | {shown} | {behind} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["rates", "reduction", "absence", "order"])
    parser.add_argument("--rounds", type=int, default=100_000, help="of the rates")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "rates": lambda: rates(arguments.rounds),
        "reduction": reduction,
        "absence": lambda: absence(3000, 8),
        "order": lambda: order(3000),
    }
    for part in arguments.parts:
        parts[part]()


if __name__ == "__main__":
    main()
