"""Groups by the coefficients that vary, and what fixed coefficients and districts add to estimates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkin._base import Array, Mask
from fedkin.kin.chains import Sampling
from fedkin.kin.groups import Grouped, find_groups
from fedkin.kin.likelihoods import apply
from fedkin.kin.mixed import MixedModel, OneModel, Population
from fedkin.kin.partitions import Neighbours


def groups_of(
    model: MixedModel, slopes: Mask, neighbours: Neighbours, seed: int, sampling: Sampling, *, guard: bool = True
) -> Grouped:
    """Find groups by the coefficients that vary, and return the estimates of all; of nested sites as they are."""
    if model.nested is not None:
        degrees, none = float(model.degrees.sum()), np.zeros((len(model.mean), 0))
        return Grouped(model.theta, model.covariance, degrees, model.variance, model.mean_covariance, none)
    fixed, varying = model.fixed, ~model.fixed
    found = find_groups(model.given_fixed(), slopes[varying], neighbours, seed, sampling, guard=guard)
    if not fixed.any():
        return found
    given, lean = np.zeros((1 + len(model.theta), len(fixed), len(fixed))), model.lean()
    given[:, varying[:, None] & varying] = np.concatenate([found.mean_covariance[None], found.covariance]).reshape(
        len(given), -1
    )
    # how everything leans on the fixed ones
    border = np.zeros((len(given), len(fixed), int(fixed.sum())))
    border[:, varying], border[:, fixed] = lean, np.eye(int(fixed.sum()))
    more = border @ model.mean_covariance[np.ix_(fixed, fixed)] @ np.swapaxes(border, 1, 2)
    theta, variance, F = model.theta.copy(), model.variance.copy(), np.zeros((len(fixed), found.F.shape[1]))
    theta[:, varying], variance[varying], F[varying] = found.theta, found.variance, found.F
    return replace(
        found,
        theta=theta,
        covariance=given[1:] + more[1:],
        degrees=found.degrees + float(np.vdot(model.precision, more[1:])),
        variance=variance,
        mean_covariance=given[0] + more[0],
        F=F,
    )


def with_population(found: Grouped, model: MixedModel, population: Population) -> tuple[Grouped, MixedModel]:
    """Return both with the population's fixed coefficients, and others as these let them be."""
    fixed = model.fixed
    if not fixed.any():
        return found, model
    square = np.ix_(fixed, fixed)
    C = population.covariance[square]

    def leaning(theta: Array, covariance: Array) -> tuple[Array, Array]:
        own = covariance[:, fixed][:, :, fixed]
        lean = covariance[:, :, fixed] @ np.linalg.pinv(own, hermitian=True)
        moved = theta + apply(lean, population.mean[fixed] - theta[:, fixed])
        moved[:, fixed] = population.mean[fixed]
        return moved, covariance + lean @ (C - own) @ np.swapaxes(lean, 1, 2)

    theta, covariance = leaning(found.theta, found.covariance)
    mean, mean_covariance = leaning(model.mean[None], found.mean_covariance[None])
    found = replace(found, theta=theta, covariance=covariance, mean_covariance=mean_covariance[0])
    if model.nested is not None:
        means = leaning(model.nested.mean, model.nested.covariance(model.mean_covariance))[0]
        model = replace(model, nested=replace(model.nested, mean=means))
    if (one := found.common) is not None:
        one_mean, one_covariance = leaning(one.mean[None], one.covariance[None])
        found = replace(found, common=OneModel(one.log_odds, one_mean[0], one_covariance[0]))
    return found, replace(model, mean=mean[0])
