"""The choice of ``lam`` between devices: cross-validation in which rows stay where they are."""
