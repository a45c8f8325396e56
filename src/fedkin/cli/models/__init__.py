"""Commands that make, use and show models: ``fit``, ``predict``, ``inspect``, ``report`` and ``demo``.

`fit` leads to `fit_table`, to `streamed` where the table is larger than memory, or to `fit_shared` for folders of
summaries; `edge_files` reads graph or covariates; `results` is what a fit ends with on the terminal. `saved` has
``predict`` and ``inspect``, with `new_sites`.
``fit`` of a table first compares on held-out rows, then fits all rows, then adds the history and the origin that the
report shows.
To add an option of a fit: `fedkin.fitting` says where; its place in ``--help`` is in `cli.shared.options`.
Nothing is imported here, so that each command loads only what it needs. Imports: `cli.shared`.
"""
