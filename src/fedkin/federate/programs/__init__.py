"""What runs on a machine: a site's programs (`run`, `select`), their supervisor, and an overview.

In: the directory of a site or a federation. Out: files in it, and an exit code. `program` is the way in: what all
programs share (place, lock, log, signals, the link). Imports: all other parts of `federate`.
"""
