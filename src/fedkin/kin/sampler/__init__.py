"""Groups inside the spread of a mixed model, by sampling partitions of the sites.

In: quadratics, the `MixedModel` learned from them, and perhaps the graph (`neighbours`). Out: `groups.find_groups`
gives probabilities of being kin, and the states of the chains. `starts` and `chains` drive the compiled loops of
`fedkin.kin.kernels`. Imported by module, since all but `neighbours` load the compiler.
To change the prior or a move of the sampler: `fedkin.kin.kernels`; where chains begin and how they are weighted: here.
Imports: `kin.kernels`, `kin.mixed` and below; not the result.
"""
