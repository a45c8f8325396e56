"""What commands take: the options of a fit, made from `FitOptions`, and what several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from fedkin.cli.shared.console import note
from fedkin.fitting import DEFAULTS, DESCRIPTIONS, SHARED, FitOptions, choices

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model directory that fedkin fit wrote.")]

#: Options that the command line calls by another name.
_NAMES = {"fit_intercept": "intercept", "n_jobs": "jobs", "cv_folds": "folds", "cv_rule": "one_se"}
#: Options that are a number, or chosen by cross-validation.
_NUMBER_OR_CV = ("lam", "ridge")
_METAVARS = {"lam": "cv|X", "ridge": "cv|X", "n_jobs": "N", "batch_size": "B"}
_PANELS = {
    "Model": ("method", "loss", "fit_intercept", "messages"),
    "Fused estimator": ("penalty", "lam", "fuse_intercept", "debias", "refit", "standardize", "ridge", "sparsity"),
    "Edge tests": ("select", "level", "variance"),
    "Choice of lam": ("cv_folds", "cv_rule"),
    "Computation": ("solver", "tol", "max_iter", "rounds", "batch_size", "seed", "n_jobs"),
}


def flag(name: str) -> str:
    """How the command line spells an argument of Python's.

    Examples
    --------
    >>> flag("max_iter"), flag("n_jobs")
    ('--max-iter', '--jobs')
    """
    return "--" + _NAMES.get(name, name).replace("_", "-")


def takes_fit_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every option of `FitOptions`; it gets them together, as the dict ``options``.

    The command has a parameter ``context``, which knows what was written.
    """
    own = [one for one in signature(command, eval_str=True).parameters.values() if one.name != "options"]
    panels = {name: panel for panel, names in _PANELS.items() for name in names}
    panels |= {name: "More" for name in DEFAULTS if name not in panels}
    added = [_parameter(name, panel) for name, panel in panels.items()]

    def run(**given: Any) -> None:
        options = {name: _value(name, given.pop(name)) for name in DEFAULTS}
        if options["method"] == "auto":
            # an option that is given counts, even with the value that it has anyway
            context: typer.Context = given["context"]
            sources = {name: context.get_parameter_source(name) for name in DEFAULTS}
            written = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
            options["method"] = "auto" if written <= SHARED else "fused"
        command(**given, options=options)

    parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*own, *added)]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def with_contract(given: Mapping[str, Any], agreed: Mapping[str, Any]) -> FitOptions:
    """The options of the command line with what a contract settles; another method is taken where one asks for it."""
    asked = given.get("method", "auto")
    method = agreed["method"] if asked == "auto" else asked
    if method != agreed["method"]:
        note(f'the contract says method = "{agreed["method"]}"; this is fitted by {method}, as the options ask for')
    if method == "kin":
        shared = {name: agreed[name] for name in ("loss", "fit_intercept", "seed")}
        return FitOptions(**{**given, **shared, "method": "kin"})
    return FitOptions(**{**given, **agreed, "method": method})


def _parameter(name: str, panel: str) -> Parameter:
    kind, default, spelled = get_type_hints(FitOptions)[name], DEFAULTS[name], flag(name)
    if name in _NUMBER_OR_CV:
        kind, default = str, str(default)
    elif name == "fuse_intercept":
        kind, default = Literal["yes", "no", "auto"], "yes"
    elif name == "cv_rule":  # of two rules, one is a flag
        kind, default = bool, False
    elif choices(name):
        kind = Literal[choices(name)]
    if default is True:
        spelled = f"{spelled}/--no-{spelled[2:]}"
    words = "Take the largest lam within one standard error of the best." if name == "cv_rule" else DESCRIPTIONS[name]
    option = typer.Option(spelled, help=words, metavar=_METAVARS.get(name), rich_help_panel=panel)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _value(name: str, given: Any) -> Any:
    if name == "cv_rule":
        return "1se" if given else DEFAULTS[name]
    if name == "fuse_intercept":
        return {"yes": True, "no": False}.get(given, given)
    if name not in _NUMBER_OR_CV:
        return given
    try:
        return float(given)
    except ValueError:
        return given  # cv; FitOptions says what else is wrong
