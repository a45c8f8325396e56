"""What runs on a machine: a device's programs (`run`, `select`, `tune`), their supervisor, and an overview."""
