"""The compiled loops of the sampler (numba): each draws the groups of all sites once, or is a part of that.

The model, in units where the spread between sites is 1 for every coefficient: ``b_u = nu_z(u) + sqrt(rho) e_u``, groups
``nu_k ~ N(m, diag w)``, partitions ``z`` from a mixture of finite mixtures (`fedkin.kin.partitions`), edges with
probability ``r_in`` inside groups and ``r_out`` between them. Effects ``e`` are integrated out, and so are groups
``nu``: a chain moves over partitions. For many sites groups are drawn once per sweep instead, which costs p^2 and
not p^3 for each pair of a site and a group.

`bundles` are what kernels take, `lanes` vectors of eight numbers, `marginals` what groups say, `sweeps` and `drawn` the
two kinds of sweep (`choice` is what they share), `splits` a part of moves of whole groups. Everything that is cheap is
not here but in `fedkin.kin.sampler`: every line costs time to compile, on first use. Loading a module loads numba, and
compiles what is not in its cache.
"""
