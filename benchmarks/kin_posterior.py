"""The posterior that `find_kin` samples, from NumPyro, on a case small enough to add up all partitions.

    python benchmarks/kin_posterior.py [--draws N] [--write FILE]

Five sites, two coefficients, no graph. NUTS moves the groups' common mean and widths; partitions, the share of the
spread inside groups, typical width and shape are summed out, each with the plain density of what the sites say (a
normal of V p dimensions), not with the sampler's algebra. Prints what both say: probabilities of sharing a group, of
the number of groups and of the share, and means of effects. ``--write`` keeps NumPyro's numbers, which a test of the
sampler reads; NumPyro itself is no dependency.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from fedkin.kin.partitions import SHARES, Neighbours, SiteLikelihoods, log_partitions, log_prior
from fedkin.kin.sampler import MEAN_PRECISION, SHAPES, TYPICAL_WIDTH, Chain, Record, State

V, P = 5, 2


def partitions(n: int) -> list[tuple[int, ...]]:
    """All partitions of n sites, as labels in order of first appearance."""
    if n == 1:
        return [(0,)]
    return [(*z, k) for z in partitions(n - 1) for k in range(max(z) + 2)]


def case() -> tuple[np.ndarray, np.ndarray]:
    """What sites say about their effects, ``W (V, p, p)`` and ``c (V, p)``: two pairs, and one between them."""
    rng = np.random.default_rng(5)
    roots = rng.normal(size=(V, P, 6))
    W = roots @ np.swapaxes(roots, 1, 2)
    b = np.array([[1.2, -0.4], [1.2, -0.4], [-0.8, 0.9], [-0.8, 0.9], [0.3, 0.2]])
    noise = np.linalg.cholesky(W) @ rng.normal(size=(V, P, 1))
    return W, (W @ b[:, :, None] + noise)[:, :, 0]


def by_fedkin(W: np.ndarray, c: np.ndarray, sweeps: int, seed: int = 1) -> dict[str, np.ndarray]:
    """The sampler's answer."""
    nobody = Neighbours.from_edges(V, np.zeros((0, 2), dtype=np.int64), None)
    state = State(np.zeros(V, dtype=np.int64), 0, np.zeros(P), np.ones(P), 1.0, 2.0, (0.5, 0.5))
    record = Record(V, P, sweeps)
    Chain(SiteLikelihoods.from_effects(W, c, nobody), state, np.random.default_rng(seed)).run(500, record)
    groups, share = record.trace[:, 1].astype(int), record.trace[:, 2].astype(int)
    return {
        "same": np.mean([z[:, None] == z for z in record.z], axis=0),
        "groups": np.bincount(groups, minlength=V + 1)[1:] / sweeps,
        "share": np.bincount(share, minlength=len(SHARES)) / sweeps,
        "effects": record.b / sweeps,
    }


def by_numpyro(W: np.ndarray, c: np.ndarray, draws: int) -> dict[str, np.ndarray]:
    """NumPyro's, with all partitions and shares summed out."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from jax.scipy.special import logsumexp

    jax.config.update("jax_enable_x64", True)
    every = [np.array(z) for z in partitions(V)]
    same = jnp.array([z[:, None] == z for z in every], dtype=float)
    prior = jnp.array([log_prior(log_partitions(V, V), np.bincount(z)) for z in every])
    log_share = jnp.log(jnp.array([0.5] + [0.5 / (len(SHARES) - 1)] * (len(SHARES) - 1)))
    whole = jax.scipy.linalg.block_diag(*map(jnp.array, W))
    said = jnp.array(c).reshape(-1)
    shapes, typical = (jnp.array(a).reshape(-1) for a in np.meshgrid(SHAPES, TYPICAL_WIDTH, indexing="ij"))

    def effects(m, w, one, share):
        """Log density of what was said, and the mean of effects given it."""
        spread = jnp.kron(one, jnp.diag(w)) + share * jnp.eye(V * P)
        total = whole + whole @ spread @ whole
        rest = said - whole @ jnp.tile(m, V)
        solved = jnp.linalg.solve(total, rest)
        log = -0.5 * (rest @ solved + jnp.linalg.slogdet(total)[1])
        return log, (jnp.tile(m, V) + spread @ whole @ solved).reshape(V, P)

    each = jax.vmap(jax.vmap(effects, (None, None, None, 0)), (None, None, 0, None))

    def model():
        m = numpyro.sample("m", dist.Normal(jnp.zeros(P), MEAN_PRECISION**-0.5))
        log_w = numpyro.sample("log_w", dist.ImproperUniform(dist.constraints.real, (), (P,)))
        w = jnp.exp(log_w)
        density = dist.InverseGamma(shapes[:, None], (shapes * typical)[:, None]).log_prob(w).sum(axis=1)
        numpyro.factor("widths", logsumexp(density) + log_w.sum())
        logs, means = each(m, w, same, jnp.array(SHARES))
        logs = logs + prior[:, None] + log_share
        numpyro.factor("said", logsumexp(logs))
        chance = numpyro.deterministic("chance", jnp.exp(logs - logsumexp(logs)))
        numpyro.deterministic("effects", jnp.tensordot(chance, means, 2))

    sampler = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model, target_accept_prob=0.9), num_warmup=500, num_samples=draws, progress_bar=False
    )
    sampler.run(jax.random.PRNGKey(0))
    found = sampler.get_samples()
    chance = np.asarray(found["chance"]).mean(axis=0)
    n_groups = np.array([z.max() + 1 for z in every])
    return {
        "same": np.tensordot(chance.sum(axis=1), np.asarray(same), 1),
        "groups": np.array([chance[n_groups == k].sum() for k in range(1, V + 1)]),
        "share": chance.sum(axis=0),
        "effects": np.asarray(found["effects"]).mean(axis=0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--sweeps", type=int, default=40_000)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    W, c = case()
    mine, theirs = by_fedkin(W, c, given.sweeps), by_numpyro(W, c, given.draws)
    for name, values in theirs.items():
        print(f"{name}: largest difference {np.abs(mine[name] - values).max():.4f}")
        print("  find_kin", np.round(mine[name], 3).tolist())
        print("  NumPyro ", np.round(values, 3).tolist())
    if given.write is not None:
        plain = {name: np.round(values, 5).tolist() for name, values in theirs.items()}
        given.write.write_text(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
