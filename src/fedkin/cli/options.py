"""Options that commands share: those of a fit, described by `FitOptions`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import typer

from fedkin.cli.console import flag
from fedkin.fitting import DEFAULTS, DESCRIPTIONS, SHARED, choices

_HELP = {**DESCRIPTIONS, "cv_rule": "Take the largest lam within one standard error of the best."}
#: {option: default}, typed for the signature of a command.
DEFAULT: Mapping[str, Any] = DEFAULTS

if TYPE_CHECKING:
    Loss: TypeAlias = str
    Selection: TypeAlias = str
else:  # the names are known at run time
    Loss, Selection = Literal[choices("loss")], Literal[choices("select")]


def fit_option(name: str, panel: str, metavar: str | None = None) -> Any:
    """Return the typer option of a field of `FitOptions`."""
    spelled = flag(name)
    if DEFAULTS[name] is True and name != "fuse_intercept":
        spelled = f"{spelled}/--no-{spelled[2:]}"
    return typer.Option(spelled, help=_HELP[name], metavar=metavar, rich_help_panel=panel)


def given_options(context: typer.Context) -> dict[str, Any]:
    """Return the options of a fit as `FitOptions` takes them, from those of the command."""
    options = {name: context.params[name] for name in DEFAULTS}
    options["cv_rule"] = "1se" if options["cv_rule"] else DEFAULTS["cv_rule"]
    options["fuse_intercept"] = {"yes": True, "no": False}.get(options["fuse_intercept"], "auto")
    for name in ("lam", "ridge"):
        with suppress(ValueError):  # cv; FitOptions says what else is wrong
            options[name] = float(options[name])
    if options["method"] == "auto" and not {name for name in DEFAULTS if written(context, name)} <= SHARED:
        options["method"] = "fused"  # an option of the fused estimator that is given counts, whatever its value
    return options


def written(context: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
