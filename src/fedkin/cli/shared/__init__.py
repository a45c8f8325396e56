"""What commands share: how they speak (`console`), what they take (`options`), read (`reading`) and print.

`tables` are printed; `model_words` and `kin_words` have what there is to say about a model; `contracts` leads from a
contract to a fit, and from rounds to a model.
Nothing is imported here, so that each command loads only what it needs. Imports: the rooms below `cli`; no command.
"""
