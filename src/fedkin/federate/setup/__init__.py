"""The directory of a federation: how it is planned, made, read and signed again, and who has left it.

In: a `Problem` (`deploy` plans, `directory` writes). Out: the directory of a federation. Imports: `contract`, `trust`.
"""
