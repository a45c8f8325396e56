"""Define the options of a fit: defaults, checks and descriptions, for Python and the command line."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from itertools import chain
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from fedkin._base import (
    check_choice,
    check_level,
    check_nonnegative,
    check_positive,
    check_whole,
)
from fedkin.admm import check_steps
from fedkin.core import Correction, Variance
from fedkin.errors import ParameterError, argument
from fedkin.losses import LOSS_NAMES, Loss, describe_loss

PenaltyName = Literal["l1", "l2", "linf"]
CvRule = Literal["min", "1se"]
Debiasing = Literal["none", "mcp", "adaptive"]
Solver = Literal["exact", "fedadmm"]
Sparsity = Literal["cv", "cv-sites"]
FitMethod = Literal["kin", "fused"]

#: The loss that depends on the target.
AUTO = "auto"
#: Topics of options, in the order of the help.
_TOPICS = MODEL, FUSED, TESTS, LEVEL, HOW = "Model", "Fused estimator", "Edge tests", "Choice of lam", "Computation"
#: Keys of the option ``fedadmm``: arguments of `fedkin.fed_admm`, and others.
STEP_OPTIONS = ("step", "kappa", "rho", "average", "gradient")
ROUND_OPTIONS = (*STEP_OPTIONS, "availability", "weighting", "fuse", "stop")
#: Options of both methods, and of kin; all others belong to the fused estimator.
_KIN = ("messages", "fixed", "within")
SHARED = frozenset({*_KIN, "method", "loss", "boost", "fit_intercept", "standardize", "seed", "n_jobs"})
KIN_ONLY = frozenset(_KIN)
NOT_KIN = "is for the fused estimator, not for kin: leave it out, or use"


@dataclass(eq=False, repr=False)
class SharedOptions:
    """The options that `FitOptions` and the estimators of the paper share; each has a type, a text and a topic."""

    loss: Annotated[
        str | Loss,
        "Loss of a site's rows; auto uses linear for numbers, and logistic or multinomial for labels.",
        MODEL,
    ] = AUTO
    _: KW_ONLY
    boost: Annotated[
        bool, "Add a column for nonlinear effects: the cross-fitted prediction of a boosting model of all rows.", MODEL
    ] = False
    penalty: Annotated[
        PenaltyName,
        "Norm of the difference between two neighbours: l1 fuses single coefficients, l2 and linf whole sites.",
        FUSED,
    ] = "l1"
    lam: Annotated[
        float | Literal["cv"],
        "Strength of the penalty: a number, or cv to choose it by cross-validation within sites.",
        FUSED,
    ] = "cv"
    select: Annotated[
        Correction | Literal["none"] | None,
        "Test every edge first and drop those between sites that differ; none keeps all edges.",
        TESTS,
    ] = "bonferroni"
    level: Annotated[float, "Significance level of the edge tests, and of the tests in refit.", TESTS] = 0.05
    variance: Annotated[Variance, "Variance estimate used in the tests.", TESTS] = "model"
    debias: Annotated[
        Debiasing,
        "Solve again with weaker edges between sites that differ, so that groups are shrunk less towards each "
        "other: mcp, or adaptive weights.",
        FUSED,
    ] = "none"
    refit: Annotated[
        bool, "Pool neighbours that do not differ significantly, and fit each such group without the penalty.", FUSED
    ] = False
    fit_intercept: Annotated[bool, "Add a constant; it is fused like the coefficients, but not shrunk.", MODEL] = True
    fuse_intercept: Annotated[
        bool | Literal["auto"],
        "Whether intercepts are fused, too; if not, sites that share slopes keep their own intercepts. auto "
        "decides by cross-validation.",
        FUSED,
    ] = True
    standardize: Annotated[
        bool,
        "Fit on features of mean 0 and standard deviation 1; coefficients stay in the units of the features.",
        FUSED,
    ] = True
    ridge: Annotated[
        float | Literal["cv"],
        "Extra quadratic penalty on every site, for separable classes or collinear features: a number, or cv to "
        "choose it together with lam.",
        FUSED,
    ] = 0.0
    sparsity: Annotated[
        float | Sparsity,
        "Extra l1 penalty on the coefficients of every site: a number, cv to choose it together with lam, or "
        "cv-sites to choose one per site.",
        FUSED,
    ] = 0.0
    radius: Annotated[float | None, "Upper bound on the norm of each site's parameters; none by default.", FUSED] = None
    cv_folds: Annotated[int, "Folds of the cross-validation.", LEVEL] = 5
    cv_rule: Annotated[
        CvRule,
        "Which lam cross-validation chooses: the best, or the largest within one standard error (1se).",
        LEVEL,
    ] = "min"
    tol: Annotated[float, "Relative duality gap at which the solver stops.", HOW] = 1e-6
    max_iter: Annotated[int, "Maximum number of iterations of the exact solver.", HOW] = 20_000
    n_jobs: Annotated[
        int | None, "Folds to run at the same time; by default one, or with kernels one per core.", HOW
    ] = None
    solver: Annotated[Solver, "Solve directly, or by the rounds that sites would run between themselves.", HOW] = (
        "exact"
    )
    rounds: Annotated[int, "Maximum number of rounds of fedadmm.", HOW] = 1000
    batch_size: Annotated[int | None, "Rows that each site samples in a round of fedadmm; all by default.", HOW] = None
    fedadmm: Annotated[
        dict[str, Any] | None,
        "Settings of the rounds of fedadmm: step, kappa, rho, average and gradient as in `fedkin.fed_admm`; "
        "availability, a probability or a recorded file, with weighting; fuse; stop at the gap, or after all "
        "rounds.",
        HOW,
    ] = None


@dataclass
class FitOptions(SharedOptions):
    """Options of a fit, with the same names and defaults as in the estimators and ``fedkin fit``.

    Parameters
    ----------
    <options>

    Notes
    -----
    *Method.* "kin" is `fedkin.find_kin`: partial pooling with groups, each site's parameters with their uncertainty,
    and nothing to tune; it has the lower error on almost every table and takes seconds. "fused" is the paper's
    estimator: edges are tested, ``lam`` is chosen, and the objective is minimised with a certificate. Options of the
    other method are refused. Both have ``loss``, ``fit_intercept`` and ``seed``; ``standardize`` makes no difference to
    kin, whose result does not depend on units.

    With ``standardize``, ``lam``, ``ridge``, ``sparsity`` and ``radius`` refer to the standardised features. The
    additional terms are ``(1/|V|) sum_u ridge ||theta_u||^2 / 2`` and ``(1/|V|) sum_u sparsity ||theta_u||_1``;
    ``radius`` bounds ``||theta_u||_2`` with the intercept, in edge tests, folds, solutions and refits alike.

    ``refit`` joins neighbours into groups, the most similar estimates first, until a test at ``level`` rejects that all
    sites of the group are equal. ``lam`` is chosen with exact solutions, whatever the solver. The printed Algorithm 1
    is ``solver="fedadmm"`` with ``fedadmm={"step": "literal", "average": "paper", "fuse": False, "stop": "rounds"}``.
    ``select`` may also be None, which means "none".

    Examples
    --------
    >>> FitOptions(method="fused", lam=0.1).select
    'bonferroni'
    """

    method: Annotated[
        FitMethod,
        "kin: partial pooling with groups, and intervals; fused: the paper's estimator, with edges and lam.",
        MODEL,
    ] = "kin"
    messages: Annotated[
        int, "Messages per site when kin is fitted from summaries of a loss that is not quadratic.", MODEL
    ] = 2
    fixed: Annotated[
        tuple[str, ...],
        "Columns with one effect for all sites (a population effect). Columns that are constant within nearly all "
        "sites are added automatically.",
        MODEL,
    ] = ()
    within: Annotated[
        dict[Any, Any] | None,
        "The district of each site, for sites nested in districts: variances at both levels, and no groups.",
        MODEL,
    ] = None
    seed: Annotated[int, "Seed of all random draws: folds, batches, held-out rows.", HOW] = 0

    def __post_init__(self) -> None:
        if self.select == "none":
            self.select = None
        for name, words in (("lam", ("cv",)), ("ridge", ("cv",)), ("sparsity", get_args(Sparsity))):
            value = getattr(self, name)
            if not isinstance(value, str):
                check_nonnegative(name, value)
            elif value not in words:
                known = " or ".join(map(repr, words))
                raise ParameterError(f"{name} must be a number of at least 0 or {known}, got {value!r}")
            elif self.lam != "cv":
                either = f"leave {argument('lam')} out, or give a number as {argument(name)}"
                raise ParameterError(f"{argument(name, value)} is chosen together with lam: {either}")
        if isinstance(self.ridge, str) and isinstance(self.sparsity, str):
            raise ParameterError("ridge and sparsity cannot be chosen together: give a number for one of them")
        for name in ("method", "penalty", "select", "variance", "cv_rule", "solver", "debias"):
            allowed: tuple[object, ...] = (*choices(name), *((None,) if name == "select" else ()))
            check_choice(name, getattr(self, name), allowed)
        check_level(self.level)
        check_positive("tol", self.tol)
        if self.radius is not None:
            check_positive("radius", self.radius)
        for name, least in (("cv_folds", 2), ("max_iter", 1), ("rounds", 1), ("messages", 1)):
            check_whole(name, getattr(self, name), least=least)
        if self.fuse_intercept not in (True, False, AUTO):
            raise ParameterError(f"fuse_intercept must be True, False or 'auto', got {self.fuse_intercept!r}")
        alone = self.fuse_intercept is not True
        if alone and self.refit:
            either = f"{argument('refit')} or {argument('fuse_intercept')}"
            raise ParameterError(f"refit pools intercepts within groups: leave out {either}")
        if alone and self.radius is not None:
            either = f"{argument('radius')} or {argument('fuse_intercept')}"
            raise ParameterError(f"the ball holds intercepts and slopes together: leave out {either}")
        if self.solver == "fedadmm":
            _check_rounds(self.fedadmm or {})
        else:
            for name in ("rounds", "batch_size", "fedadmm"):
                if getattr(self, name) != DEFAULTS[name]:
                    rounds = argument("solver", "fedadmm")
                    raise ParameterError(f"{argument(name)} is for {rounds}: leave it out, or give {rounds}")
        for name, given in (("fuse_intercept", alone), ("debias", self.debias != "none")):
            if given and self.solver != "exact":
                exact = argument("solver", "exact")
                raise ParameterError(f"{argument(name)} is for {exact}, not for {self.solver!r}: leave one of them out")
        if isinstance(self.fixed, str) or not all(isinstance(name, str) for name in self.fixed):
            raise ParameterError(f"fixed must be a list of column names, got {self.fixed!r}")
        self.fixed = tuple(self.fixed)
        for name in ("fixed", "within"):
            if getattr(self, name) and self.method == "fused":
                what = f"{argument(name)} is for kin; the fused estimator has no such effects"
                raise ParameterError(f"{what}: leave it out, or take {argument('method', 'kin')}")
        if self.method == "kin":
            for item in fields(self):
                if item.name not in SHARED and getattr(self, item.name) != item.default:
                    raise ParameterError(f"{argument(item.name)} {NOT_KIN} {argument('method', 'fused')}")

    @property
    def least_ridge(self) -> float:
        """Lower bound of the ridge: the given number, or 0 if it is to be chosen."""
        return 0.0 if isinstance(self.ridge, str) else self.ridge

    @property
    def least_sparsity(self) -> float:
        """Lower bound of the sparsity, as `least_ridge`."""
        return 0.0 if isinstance(self.sparsity, str) else self.sparsity

    def plain(self) -> dict[str, Any]:
        """Return the options in use as plain values, for model files."""
        kin = self.method == "kin"
        left_out = {"within"} if kin else KIN_ONLY - {"messages"}  # districts are part of the result
        kept = [item.name for item in fields(self) if (not kin or item.name in SHARED) and item.name not in left_out]
        made: dict[str, Any] = {name: getattr(self, name) for name in kept}
        made["loss"] = self.loss if isinstance(self.loss, str) else describe_loss(self.loss)
        return made


def _check_rounds(given: Mapping[str, Any]) -> None:
    """Raise `ParameterError` unless these are options of the rounds of Fed-ADMM."""
    for name in given:
        check_choice(f"a key of {argument('fedadmm')}", name, ROUND_OPTIONS)
    check_steps(**{name: given[name] for name in STEP_OPTIONS if name in given})
    check_choice("weighting", given.get("weighting", "known"), ("known", "estimated"))
    check_choice("fuse", given.get("fuse", True), (True, False))
    check_choice("stop", given.get("stop", "gap"), ("gap", "rounds"))
    if "weighting" in given and "availability" not in given:
        raise ParameterError("weighting is for sites that are not always available: give availability, or leave it out")


_TYPES = get_type_hints(FitOptions, include_extras=True)
#: {option: (type, description, topic)}, by topic, the method first.
DESCRIBED: dict[str, tuple[Any, str, str]] = dict(
    sorted(
        ((item.name, get_args(_TYPES[item.name])) for item in fields(FitOptions)),
        key=lambda one: (_TOPICS.index(one[1][2]), one[0] != "method"),
    )
)
#: {option: default}, in the same order.
DEFAULTS: dict[str, Any] = {name: getattr(FitOptions, name) for name in DESCRIBED}


def choices(name: str) -> tuple[str, ...]:
    """Return the named values of an option; () if it has none."""
    if name == "loss":
        return (AUTO, *LOSS_NAMES)
    kind = DESCRIBED[name][0]
    parts = [kind] if get_origin(kind) is Literal else [part for part in get_args(kind) if part is not NoneType]
    return tuple(chain(*map(get_args, parts))) if all(get_origin(part) is Literal for part in parts) else ()


def documented(doc: str | None, names: Mapping[str, str] | None = None, losses: tuple[str, ...] = LOSS_NAMES) -> str:
    """Return a docstring with its line ``<options>`` replaced by the parameters of `FitOptions`.

    ``names`` are {option: name} for options with another name in the estimator; ``losses`` are the losses it accepts.
    """
    lines, loss = [], f"{' | '.join(map(repr, (AUTO, *losses)))} | Loss"
    for name, (kind, description, _) in DESCRIBED.items():
        if names is None or name not in KIN_ONLY | {"method"}:
            words = loss if name == "loss" else _format_type(kind)
            called = (names or {}).get(name, name)
            lines.append(f"    {called} : {words}, default {DEFAULTS[name]!r}\n        {description}")
    return (doc or "").replace("    <options>", "\n".join(lines))


def _format_type(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"tuple of {_format_type(get_args(kind)[0])}"
    if get_origin(kind) is Literal:
        return " | ".join(map(repr, get_args(kind)))
    if kind is NoneType:
        return "None"
    if get_origin(kind) is dict:
        return "dict"
    return " | ".join(map(_format_type, get_args(kind))) or str(kind.__name__)


FitOptions.__doc__ = documented(FitOptions.__doc__)
