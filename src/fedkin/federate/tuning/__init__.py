"""The choice of ``lam`` between devices: cross-validation in which rows stay where they are.

In: a device's rows and a link (`tuner`). Out: its held-out losses, and the choice that all of them give (`curves`).
Imports: `setup`, `contract`, `links`.
"""
