"""Commands of federations whose sites keep their rows: ``federation``, ``site`` and ``watch``.

`federation` and `site` list what organiser and site can do; most of it is done in `fedkin.federate`. `running` starts,
shows and stops sites; `simulate` (with `simulate_shared` and `errands`) plays a federation on one machine; `parts` are
the sites' parts of a model.
To add a command: a function in `federation` or `site`, and an example in `fedkin.cli.examples`.
Nothing is imported here, so that each command loads only what it needs. Imports: `cli.models`, `cli.shared`.
"""
