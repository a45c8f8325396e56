"""Groups inside the spread of a mixed model, by sampling partitions of the sites.

In: quadratics, the `MixedModel` learned from them, and perhaps the graph (`neighbours`). Out: `groups.find_groups`
gives probabilities of being kin, and the states of the chains (`blend`: averaged with a model without
groups). `starts` (by `merging`) says where chains begin,
`chains` runs them; a chain is a `walk` (`splits` are its moves of whole groups), which drives the compiled loops of
`fedkin.kin.kernels` and leaves a `record`. Imported by module, since all but `neighbours` load the compiler.
To change the prior or how a hyper-parameter moves: `walk`; how sites move: `fedkin.kin.kernels`.
Imports: `kin.kernels`, `kin.mixed` and below; not the result.
"""
