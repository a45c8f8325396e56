"""The compiled sampler (numba): chains over partitions, and merging that finds starts for them.

The model, in units where the spread between sites is 1 for every coefficient: ``b_u = nu_z(u) + sqrt(rho) e_u``, groups
``nu_k ~ N(m, diag w)``, partitions ``z`` from a mixture of finite mixtures (`fedkin.kin.partitions`), edges with
probability ``r_in`` inside groups and ``r_out`` between them. Effects ``e`` and groups ``nu`` are integrated out, so
that a chain moves over partitions. For many sites groups are drawn once per sweep instead, which costs p^2 and not p^3
for each pair of a site and a group.

`bundles` are what kernels pass to each other, `marginals` the sums over groups, `sweeps` the chain, `splits` its
moves of whole groups, `merging` the starts. Loading any of them loads numba, and compiles what is not in its cache.
"""

from __future__ import annotations

from pathlib import Path

from fedkin.solvers.kernels import drop_stale

drop_stale(Path(__file__).parent)
