"""Federations between processes: what sites have agreed on, who is who, and what carries their messages.

In: a `Problem` to plan for, then the signed directory of a federation. Out: programs that run the rounds, the edge
tests and the choice of ``lam`` between sites, with the bits of one process; each site's parameters.
Imports: `admm`, `stats` and below; not `fitting`.

| part | what is in it |
|---|---|
| `contract` | what all sites agree on, and what is for one of them only |
| `trust` | certificates, signatures, private files, access lists |
| `setup` | the directory of a federation: planned, made, read, signed again; who has left |
| `links` | what carries thetas: memory (tests), zenoh, MPI |
| `tuning` | the choice of ``lam`` by cross-validation in which rows stay where they are |
| `programs` | what runs on a machine: a device's programs, their supervisor, an overview |
"""
