"""Commands that make, use and show models: ``fit``, ``predict``, ``inspect``, ``report`` and ``demo``.

`fit` leads to `fit_table`, to `streamed` where the table is larger than memory, or to `fit_shared` for folders of
summaries; `results` is what a fit ends with on the terminal. `saved` has ``predict`` and ``inspect``, with `new_sites`.
To add an option of a fit: `fedkin.fitting.options`, which the command line and the estimators read.
Nothing is imported here, so that each command loads only what it needs. Imports: `cli.shared`.
"""
