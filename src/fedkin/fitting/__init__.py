"""One fit from rows to a model, for the scikit-learn face and for the command line alike.

Classes are encoded, an intercept column is added, features are standardised if asked for (`preparation`); edges are
selected, ``lam`` is chosen, the problem is solved (`fit`), with a light ridge where it would have no minimiser
(`well_posed`); and what comes out is a `FittedModel` in the units of the user's columns. `comparison` puts it beside
its two extremes on held-out rows.
"""

from __future__ import annotations

from fedkin.fitting.comparison import Comparison, compare
from fedkin.fitting.directory import MODEL_FILE
from fedkin.fitting.fitting import fit_federation
from fedkin.fitting.model import FittedModel, load
from fedkin.fitting.options import FitOptions

__all__ = ["MODEL_FILE", "Comparison", "FitOptions", "FittedModel", "compare", "fit_federation", "load"]
